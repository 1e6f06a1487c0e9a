"""How rows lie in memory, and the launches of the Triton norms: what depends on shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.cutile.plans import power_of_two
from kernelgraft.kernels.triton_launching import Launch, overlaps

OVERLAPPED = 4096
"""Most programs of a launch that starts before the kernel ahead of it has ended: they would hold up others."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What can be chosen freely for a launch; the result is the same."""

    warps: int
    rows: int = 1
    """Rows of a program."""
    early: bool = True
    """Whether to start while the kernel before still runs, where the GPU can."""
    together: bool = True
    """Whether the sums wait for the weight, so that it is asked for with the row."""


@dataclass(frozen=True, slots=True)
class Lain:
    """How rows lie in memory: in groups of `inner`, None where all are evenly apart; steps of y, x and residual."""

    count: int
    inner: int | None
    steps: tuple[int, ...]
    outer: tuple[int, ...]


def lie(shape: tuple[int, ...], *strides: tuple[int, ...]) -> Lain | None:
    """How the rows of tensors of one shape lie, in the order of the first; None where that takes more than two steps.

    Channels have to lie side by side.
    """
    if shape[-1] > 1 and any(steps[-1] != 1 for steps in strides):
        return None
    places: Sequence[int] = [i for i, size in enumerate(shape[:-1]) if size > 1]
    merged: list[tuple[int, list[int]]] = []
    for i in sorted(places, key=lambda i: strides[0][i], reverse=True):
        steps = [s[i] for s in strides]
        if merged and all(a == shape[i] * b for a, b in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = merged[-1][0] * shape[i], steps
        else:
            merged.append((shape[i], steps))
    if len(merged) > 2:
        return None
    count, inner, outer = 1, None, [0] * len(strides)
    steps = [shape[-1]] * len(strides)
    if merged:
        inner_count, steps = merged[-1]
        count = inner_count
        if len(merged) == 2:
            inner, outer = inner_count, merged[0][1]
            count *= merged[0][0]
    return Lain(count, inner, tuple(steps), tuple(outer))


def launch_of(
    lain: Lain,
    width: int,
    dtypes: tuple[torch.dtype | None, ...],
    semantics: tuple[Any, ...],
    how: int,
    scaled: bool,
    chosen: Chosen,
    device: int,
) -> Launch:
    """The launch of a norm with a given configuration."""
    _, x, weight, bias = dtypes
    eps, offset, round_offset, divide, last = semantics
    programs = -(-lain.count // chosen.rows)
    sizes = [t.itemsize for t in (x, weight, bias) if t is not None]
    whole = chosen.together and device >= 0 and len(set(sizes)) == 1 < len(sizes) and width > 32  # no part of 32 bits
    pack = 4 // sizes[0] if whole else 0
    early = chosen.early and programs <= OVERLAPPED and overlaps(device)
    even = lain.inner is None and all(step == width for step in lain.steps)
    y_step, x_step, residual_step = (None,) * 3 if even else lain.steps
    y_outer, x_outer, residual_outer = (None,) * 3 if lain.inner is None else lain.outer
    rest = (
        lain.count if lain.count % chosen.rows else None, lain.inner, residual_step, x_step, y_step, residual_outer,
        x_outer, y_outer, width, eps, not isinstance(last, str), offset, round_offset, how, scaled, divide, chosen.rows,
        power_of_two(width), pack, early,
    )  # fmt: skip
    options = {"launch_pdl": True} if early else {}
    return Launch(_kernel, (programs, 1, 1), rest, device, num_warps=chosen.warps, **options)


def _kernel() -> Any:
    from kernelgraft.kernels.rows_triton_kernels import norm_kernel

    return norm_kernel


def choose(count: int, width: int, itemsize: int) -> Chosen:
    """The free choices for `count` rows of values of that many bytes."""
    return space(count, width, itemsize)[0]


def space(count: int, width: int, itemsize: int) -> list[Chosen]:
    """Sensible choices for `count` rows, the default first."""
    tile = power_of_two(width)
    lanes = max(32, tile * itemsize // 16)  # of 16 bytes
    if tile <= 512:
        # Narrow rows are put together while enough programs are left for every multiprocessor to have two.
        most = min(128 * 16 // (tile * itemsize), max(1, count // 264))
        height = power_of_two(max(1, most) + 1) // 2
        found = [Chosen(max(1, min(4, height * lanes // 32)), height)]
        return list(dict.fromkeys([*found, Chosen(1), Chosen(2, 2), Chosen(4, 4), Chosen(4, 8), Chosen(4, 16)]))
    least = min(32, lanes // 32)
    # Warps share the sums through memory: the fewer, the shorter that takes, as long as each scheduler has one.
    first = max(least // 2, min(4, least))
    return list(dict.fromkeys(Chosen(max(1, min(32, warps))) for warps in (first, least, first // 2, 2 * least)))
