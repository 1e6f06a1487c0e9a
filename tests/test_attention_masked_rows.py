"""What attention gives to queries that see no key is nobody's business: libraries differ there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hand_made
import pytest
import torch

from kernelgraft import families
from kernelgraft.families.attention_reference import seeing
from kernelgraft.families.base import Call, Recognition, Rejection
from kernelgraft.pipeline.researching import standard_runs
from kernelgraft.records import Site
from kernelgraft.sites import capture, discover

FAMILY = families.get("attention")
Spoil = Callable[[torch.Tensor], torch.Tensor]
"""From the queries that see a key, bool [batch, q_len], those whose output is to be NaN."""


@pytest.fixture(scope="module")
def recorded() -> tuple[Site, list[Call]]:
    loaded = hand_made.load("llama")
    site = next(s for s in discover(loaded.model) if s.kind == "attention")
    return site, capture(loaded.model, [site], standard_runs(loaded)).calls[site.key]


def mask_of(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return next((x for x in tensors if x.dtype == torch.bool), None)


def spoiled(call: Call, spoil: Spoil) -> Call:
    def original(*args: Any, **kwargs: Any) -> Any:
        output, *rest = call.original(*args, **kwargs)
        seen = seeing(mask_of(*args, **kwargs), len(output))
        if seen is None:
            return (output, *rest)
        return (output.masked_fill(spoil(seen)[..., None, None], float("nan")), *rest)

    return replace(call, original=original, output=original(*call.args, **call.kwargs))


def test_padding_has_queries_that_see_nothing(recorded: tuple[Site, list[Call]]) -> None:
    masks = [mask_of(*c.args, **c.kwargs) for c in recorded[1] if c.padded and c.regime == "prefill"]
    assert masks and all(m is not None and not seeing(m, len(m)).all() for m in masks)  # type: ignore[union-attr]
    assert seeing(None, 2) is None
    least = torch.finfo(torch.float32).min
    assert seeing(torch.tensor([[[[0.0, least], [least, least]]]]), 2).tolist() == [[True, False]] * 2  # type: ignore[union-attr]


def test_nan_there_is_no_reason_to_reject(recorded: tuple[Site, list[Call]]) -> None:
    site, calls = recorded
    changed = [spoiled(c, lambda seen: ~seen) for c in calls]
    assert any(not c.output[0].isfinite().all() for c in changed)
    assert isinstance(FAMILY.recognise(site, changed), Recognition)


def test_nan_elsewhere_is(recorded: tuple[Site, list[Call]]) -> None:
    site, calls = recorded
    assert isinstance(FAMILY.recognise(site, [spoiled(c, lambda seen: seen) for c in calls]), Rejection)
