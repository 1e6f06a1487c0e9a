"""The last gate: the grafted model against the original, and both against wider arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kernelgraft.errors import GraftError
from kernelgraft.models import Loaded, prompt_ids
from kernelgraft.patch import apply, patch_label
from kernelgraft.pipeline.researching import PROMPT
from kernelgraft.records import EndToEnd, Graft, Patch

NEW_TOKENS = 12
LARGEST_DOUBLE = 300_000_000
"""Parameters up to which the float64 copy is made."""
FACTOR = 2.0
"""The grafted error may be this many times the original's (as in the judge's C8)."""
FLOOR_EPS = 8.0
"""Plus this many machine epsilons of the model's dtype: the original's error can be nearly nothing by luck."""


@dataclass(frozen=True)
class Baseline:
    """What the original model does, to be compared with."""

    ids: torch.Tensor
    """Prompt and greedy continuation, int64 [1, tokens]."""
    prompt_length: int
    logits: torch.Tensor
    """float64 [1, tokens, vocab], teacher-forced on `ids`."""
    wide: torch.Tensor | None
    """The same from a float64 copy of the model; None where it cannot be made."""


def rel_rmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference over that of `wanted`; non-finite values must stand in the same places."""
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(got)):
        return float("inf")
    difference, scale = (got - wanted)[finite], wanted[finite]
    return float(difference.pow(2).mean().sqrt() / scale.pow(2).mean().sqrt().clamp_min(1e-30))


def _generate(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    generated: torch.Tensor = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return generated


@torch.no_grad()
def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.double()


def baseline(loaded: Loaded) -> Baseline:
    """Generate greedily with the original and keep its logits."""
    model = loaded.model
    prompt = prompt_ids(loaded, PROMPT).to(next(model.parameters()).device)
    with torch.no_grad():
        ids = _generate(model, prompt)
    return Baseline(ids, prompt.shape[1], _logits(model, ids), _wide_logits(model, ids))


def _wide_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor | None:
    if sum(p.numel() for p in model.parameters()) > LARGEST_DOUBLE:
        return None
    try:
        return _logits(copy.deepcopy(model).double(), ids)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # some models hold code that is written for one dtype: the original's logits are the measure then


def compare(graft: Graft, loaded: Loaded, base: Baseline) -> tuple[EndToEnd, list[str]]:
    """Run the model with the graft on it and revert.

    Returns the comparison and the labels of the patches that no call reached (or whose every call fell back).
    """
    model = loaded.model
    with apply(graft, model) as applied:
        with torch.no_grad():
            ids = _generate(model, base.ids[:, : base.prompt_length])
        logits = _logits(model, base.ids)
        unreached = applied.unreached()
    return (
        EndToEnd(
            tokens_equal=torch.equal(ids, base.ids),
            logits_rel_rmse=rel_rmse(logits, base.logits),
            baseline_error=None if base.wide is None else rel_rmse(base.logits, base.wide),
            grafted_error=None if base.wide is None else rel_rmse(logits, base.wide),
        ),
        unreached,
    )


def passes(result: EndToEnd, dtype: torch.dtype) -> bool:
    """True if the graft adds no more error than the original has itself."""
    floor = FLOOR_EPS * torch.finfo(dtype).eps
    if result.grafted_error is not None and result.baseline_error is not None:
        return result.grafted_error <= FACTOR * result.baseline_error + floor
    return result.logits_rel_rmse <= 16 * floor


def filter_patches(graft: Graft, loaded: Loaded) -> Graft:
    """Reject the patches that no call reaches or that change what the model says; the rest stays.

    Each patch that fails is rejected with its reason; what is left is compared again until it passes as a whole.
    """
    base = baseline(loaded)
    dtype = next(loaded.model.parameters()).dtype
    for _ in range(len(graft.patches) + 1):
        if not graft.accepted:
            return graft
        try:
            result, unreached = compare(graft, loaded, base)
        except GraftError as error:
            return _reject_all(graft, f"could not be applied: {error}")
        bad = dict.fromkeys(unreached, "no call reached it")
        if not bad and not passes(result, dtype):
            bad = _guilty(graft, loaded, base, dtype)
        if not bad:
            return graft.model_copy(update={"end_to_end": result})
        rejected = tuple(_reject(p, bad.get(patch_label(p))) if p.status == "accepted" else p for p in graft.patches)
        graft = graft.model_copy(update={"patches": rejected})
    return graft


def _guilty(graft: Graft, loaded: Loaded, base: Baseline, dtype: torch.dtype) -> dict[str, str]:
    """The patches (by label) that fail alone, or else the one with the largest error: together they are too much."""
    errors: dict[str, EndToEnd] = {}
    for patch in graft.accepted:
        errors[patch_label(patch)], _ = compare(graft.model_copy(update={"patches": (patch,)}), loaded, base)
    alone = [p for p, e in errors.items() if not passes(e, dtype)]
    guilty = alone or [max(errors, key=lambda p: errors[p].logits_rel_rmse)]
    return {p: f"end to end: logits move by {errors[p].logits_rel_rmse:.1e} relative RMSE" for p in guilty}


def _reject(patch: Patch, reason: str | None) -> Patch:
    if reason is None:
        return patch
    seats = tuple(s.model_copy(update={"seated": False}) for s in patch.seats)
    return patch.model_copy(update={"status": "rejected", "reason": reason, "seats": seats})


def _reject_all(graft: Graft, reason: str) -> Graft:
    patches: Sequence[Patch] = [_reject(p, reason) if p.status == "accepted" else p for p in graft.patches]
    return graft.model_copy(update={"patches": tuple(patches)})
