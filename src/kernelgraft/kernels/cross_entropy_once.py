"""The cross entropy with its gradients in one go: each logit is computed once, a chunk of tokens at a time.

A chunk's logits lie in memory in float32: their normalisers and the losses are read from them, then the derivatives,
which are rounded to the inputs' dtype. Torch multiplies those of a group of chunks with the weight (these tokens' rows
of the hidden states' gradient) and with the hidden states, which it adds to the weight's gradient, in float32 and
rounded once. Each group reads and writes that sum: beyond `MOST_GROUPS`, and where the choice says so, both passes are
made one after the other, which takes one more product but writes each row of the weight's gradient once.

Memory beside inputs, results and gradients: `chunk_bytes` of logits and as much for the derivatives, or 128 tokens;
with more than one group the weight's gradient in float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kernelgraft.cutile.plans import Plan, fire, power_of_two
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels import cross_entropy_tiles as tiles
from kernelgraft.kernels.cross_entropy_chunks import add_product, cap, product, shape_class, shares, spans

KERNEL = "cross_entropy_once"
MOST_GROUPS = 8
"""With more groups of tokens a half type's sum over them takes longer than one more product."""
ALIGNED = 64
"""A row of logits or derivatives begins at a multiple of that many elements, which fast products ask for."""
DTYPES = (torch.bfloat16, torch.float32)
"""float16 has too small a range for derivatives that do not know yet what the loss is scaled by."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What can be chosen freely."""

    once: bool = True
    """Each logit once; else the passes forward and backward one after the other."""
    chunk_bytes: int = 2**28


@dataclass(frozen=True, slots=True)
class Part:
    """The launches for one chunk of tokens: normalisers of pieces of its logits, losses, derivatives."""

    first: int
    count: int
    parts: int
    normaliser: Plan
    loss: Plan
    slope: Plan


def fits(dtype: torch.dtype) -> bool:
    """Whether gradients may be computed before the loss's own derivative is known."""
    return dtype in DTYPES


def with_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    ignored: int,
    scale: float,
    softcap: float | None,
    mean: bool,
    of_hidden: bool,
    of_weight: bool,
) -> list[torch.Tensor] | None:
    """The loss, summed or the mean of those that count, and its derivatives by hidden and by weight, if wanted.

    None where it is to be done in two passes.
    """
    shape = (hidden.shape[0], *weight.shape)
    groups = _groups(shape, hidden.dtype, hidden.get_device(), ignored, scale, softcap)
    if not groups:
        return None
    counted = labels != ignored
    number = counted.sum()
    slope = counted.float() / number if mean else counted.float()
    slope = torch.where(counted, slope, 0.0)
    losses = torch.empty(shape[0], dtype=torch.float32, device=hidden.device)
    normalisers = torch.empty_like(losses)
    by_hidden = hidden.new_empty(hidden.shape) if of_hidden else None
    kind = weight.dtype if len(groups) == 1 else torch.float32
    by_weight = weight.new_empty(weight.shape, dtype=kind) if of_weight else None
    wide = -(-shape[1] // ALIGNED) * ALIGNED
    logits = torch.empty((groups[0][0].count, wide), dtype=torch.float32, device=hidden.device)
    slopes = torch.empty((sum(p.count for p in groups[0]), wide), dtype=hidden.dtype, device=hidden.device)
    for group in groups:
        start, end = group[0].first, group[-1].first + group[-1].count
        for part in group:
            rows = slice(part.first, part.first + part.count)
            chunk = product(hidden[rows], weight.t(), logits[: part.count, : shape[1]])
            partial = torch.empty((2, part.parts, part.count), dtype=torch.float32, device=hidden.device)
            results = losses[rows], normalisers[rows]
            fire(part.normaliser, (chunk, partial))
            fire(part.loss, (hidden[rows], weight, labels[rows], partial, *results))
            derivatives = slopes[part.first - start : part.first - start + part.count, : shape[1]]
            fire(part.slope, (chunk, labels[rows], results[1], slope[rows], derivatives))
        whole = slopes[: end - start, : shape[1]]
        if by_hidden is not None:
            by_hidden[start:end] = product(whole, weight)
        if by_weight is not None and len(groups) == 1:
            torch.mm(whole.t(), hidden, out=by_weight)
        elif by_weight is not None and start == 0:
            product(whole.t(), hidden[:end], by_weight)
        elif by_weight is not None:
            add_product(by_weight, whole.t(), hidden[start:end])
    total = losses.sum() / number if mean else losses.sum()
    by_weight = None if by_weight is None else by_weight.to(weight.dtype)
    return [total, *(x for x in (by_hidden, by_weight) if x is not None)]


@functools.lru_cache(maxsize=1024)
def _groups(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: int,
    ignored: int,
    scale: float,
    softcap: float | None,
    choice: Choice | None = None,
) -> tuple[tuple[Part, ...], ...]:
    """Chunks whose derivatives are multiplied together; none if it is to be done in two passes."""
    tokens, words, channels = shape
    choice, half = choice or choose(shape, dtype, device), dtype.itemsize == 2
    if not choice.once or not tokens:
        return ()
    parts = []
    for first, count in spans(words, tokens, choice.chunk_bytes):
        numbers, how = (scale, softcap or 0.0), cap(softcap, dtype)
        cut = shares(count, words, device)
        normaliser = Plan(tiles.chunk_normaliser_kernel, (count * cut[2],), (0, *numbers, how, *cut))
        rows = 8 if count >= 1024 else 1
        sizes = (power_of_two(cut[2]), rows, min(256, power_of_two(channels)))
        loss = Plan(tiles.loss_kernel, (-(-count // rows),), (*numbers, ignored, how, *sizes))
        slope = Plan(tiles.chunk_slope_kernel, (count * cut[2],), (0, *numbers, how, *cut))
        parts.append(Part(first, count, cut[2], normaliser, loss, slope))
    together = 2 if half else 1  # derivatives of a half type take half as much as logits
    groups = tuple(tuple(parts[i : i + together]) for i in range(0, len(parts), together))
    return () if half and len(groups) > MOST_GROUPS else groups


def choose(shape: tuple[int, int, int], dtype: torch.dtype, device: int) -> Choice:
    """The free choices for (tokens, words, channels)."""
    return chosen(Choice(), KERNEL, shape_class(shape, dtype), device)


def space() -> list[Choice]:
    """Configurations worth trying, the default first."""
    return [Choice(True, 2**28), Choice(True, 2**27), Choice(True, 2**26), Choice(False)]
