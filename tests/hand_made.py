"""Grafts made by hand: every recognised site gets its Definition's own reference as the Solution, nothing is judged."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kernelgraft import families, machine, models
from kernelgraft.families.base import Recognition
from kernelgraft.identity import model_card
from kernelgraft.records import (
    BuildSpec,
    Definition,
    Graft,
    Guard,
    Patch,
    Seat,
    Site,
    Solution,
    SolutionMeta,
    SourceFile,
)
from kernelgraft.sites.capture import Run, capture
from kernelgraft.sites.discover import discover

TEXTS = ["The capital of France is", "The capital"]


def load(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny random model of a causal type, in eval mode, as `kernelgraft.models.Loaded`."""
    return models.load(f"config:{name}", dtype=dtype, seed=seed)


def prompt(loaded: Any) -> torch.Tensor:
    return models.prompt_ids(loaded, TEXTS[0])


def recognise(model: nn.Module, loaded: Any) -> list[tuple[Site, Recognition]]:
    """All sites that a family knows, from one short generation and a left-padded one."""
    sites = discover(model)
    ids, (padded, mask) = prompt(loaded), models.left_padded(loaded, TEXTS)
    runs = [
        Run(ids, torch.ones_like(ids), new_tokens=3, cache="dynamic", padded=False),
        Run(padded, mask, new_tokens=2, cache="dynamic", padded=True),
    ]
    calls = capture(model, sites, runs).calls
    found = []
    for site in sites:
        for name in families.NAMES:
            family = families.get(name)
            if site.kind in family.kinds and calls.get(site.key):
                recognition = family.recognise(site, calls[site.key])
                if isinstance(recognition, Recognition):
                    found.append((site, recognition))
                    break
    return found


def reference_solution(definition: Definition, guard: Guard | None = None) -> Solution:
    """The Definition's reference as a Solution."""
    return Solution(
        name=f"reference_{definition.name}",
        definition=definition.name,
        author="tests",
        spec=BuildSpec(language="python", target_hardware=("cpu",), entry_point="main.py::run"),
        sources=(SourceFile(path="main.py", content=definition.reference),),
        meta=SolutionMeta(
            supplier="tests",
            family=definition.meta.family,
            guard=guard or Guard(),
            fingerprint=definition.meta.fingerprint,
        ),
    )


def make_graft(
    loaded: Any, *, only: set[str] | None = None, without: frozenset[str] = frozenset(), guard: Guard | None = None
) -> Graft:
    """Seat the reference at every recognised site of the families `only` (None: all), except those of `without`."""
    model = loaded.model
    groups: dict[tuple[str, ...], list[tuple[Site, Recognition]]] = {}
    for site, found in recognise(model, loaded):
        if found.family not in without and (only is None or found.family in only):
            groups.setdefault(tuple(d.name for d in found.definitions), []).append((site, found))
    definitions = {d.name: d for group in groups.values() for d in group[0][1].definitions}
    solutions = {d.name: reference_solution(d, guard) for d in definitions.values()}
    patches = [
        Patch(
            family=group[0][1].family,
            sites=tuple(site for site, _ in group),
            semantics=group[0][1].semantics,
            definitions=names,
            status="accepted",
            seats=tuple(
                Seat(definition=name, regime="prefill", work=8, solution=solutions[name].name, seated=True)
                for name in names
            ),
        )
        for names, group in groups.items()
    ]
    return Graft(
        model=model_card(model, loaded.ref.name),
        machine=machine.read(),
        policy="verified",
        patches=tuple(patches),
        definitions=definitions,
        solutions={s.name: s for s in solutions.values()},
        evaluations=(),
    )


def generate(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Six greedy tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        tokens: torch.Tensor = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options
        )
    return tokens


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    result: torch.Tensor = model(ids, **options).logits
    return result
