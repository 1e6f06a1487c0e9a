"""How tensors of rows are cut into tiles, and the launches of the norm kernels.

Tensors are seen as [lead, rows, width]. Up to `RESIDENT_PIECES` pieces of a row stay in registers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.cutile.plans import (
    LARGEST_AXIS,
    LARGEST_EXTENT,
    Maker,
    Plan,
    Tuning,
    extent,
    fire,
    like,
    makers,
    power_of_two,
    processors,
)
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels.access import GATHER, LOAD, TMA, fitting

RESIDENT_PIECES = 8
RESIDENT_WIDTH = 16384
"""Rows up to this many elements stay in registers."""


@dataclass(frozen=True, slots=True)
class RowTuning(Tuning):
    """The choices for a norm."""

    rows: int | None = None
    """Rows of a tile; None: as many as `elements` allow while enough blocks are left."""
    piece: int | None = None
    """Widest piece of a row; None: what `cut` says."""


SMALL = RowTuning(elements=2048, access=LOAD)
LARGE = RowTuning(elements=4096, access=LOAD)
SMALL_ELEMENTS = 2**20
"""Up to that many elements of x, `SMALL` holds, `LARGE` beyond."""
BLOCKS_PER_PROCESSOR = 2
"""Rows are put together into one tile only as far as that many blocks are left."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm for tensors of known dtypes: its kernel, the constants of its semantics, the dtypes of its results."""

    kernel: Any
    eps: float
    constants: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A norm for tensors of known shapes: what is left to do is to make the results and to launch."""

    norm: Norm
    plan: Plan | None
    """None: nothing to launch, more than one launch, or tensors that have to be brought to rows first."""
    view: tuple[int, int, int] | None
    """The tensors' shape as the kernel takes them; None: they have it."""
    makes: tuple[Maker, ...] | None = None
    """What makes results of the norm's dtypes, see `makers`."""
    direct: bool = False
    """Whether all that is left is to `fire` the plan on the tensors as they are."""


def call(norm: Norm, shape: tuple[int, ...], device: int, *strides: tuple[int, ...]) -> Call:
    """A norm of inputs with one shape and these strides, one for each; the results lie as the first."""
    steps = like(shape, strides[0])
    makes = makers(device, *((shape, steps, dtype) for dtype in norm.dtypes))
    if 0 in shape:
        return Call(norm, None, None, makes)
    view = None if len(shape) == 3 else as_rows_shape(shape)
    seen = shape if view is None else view
    if view is not None and (len(shape) > 3 and any(not viewable(shape, s) for s in strides)):
        return Call(norm, None, None, makes)
    if max(extent(shape, s) for s in strides) >= LARGEST_EXTENT:
        return Call(norm, None, None, makes)
    return Call(norm, plan(norm, seen, device), view, makes, view is None)


def launch(
    ready: Call, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], vectors: tuple[torch.Tensor, ...]
) -> None:
    """Compute `results` from `inputs` (tensors of rows) and `vectors` [width]: the order of the kernel's arguments."""
    plan, view = ready.plan, ready.view
    if plan is None:
        if results[0].numel():
            seen = as_rows(*results, *inputs)
            count = len(results)
            _split(ready.norm, seen[count:], seen[:count], vectors)
    elif view is None:
        fire(plan, inputs + results + vectors)
    else:
        lead, rows, width = view  # torch takes sizes one by one faster than as a tuple
        fire(plan, (*[t.view(lead, rows, width) for t in inputs + results], *vectors))


def _split(
    norm: Norm, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], vectors: tuple[torch.Tensor, ...]
) -> None:
    """Launches on [lead, rows, width] tensors, as many as 32-bit offsets ask for."""
    if max(extent(t.shape, t.stride()) for t in (*inputs, *results)) < LARGEST_EXTENT:
        fire(plan(norm, inputs[0].shape, inputs[0].get_device()), (*inputs, *results, *vectors))
        return
    for part in halves((*inputs, *results)):
        _split(norm, part[: len(inputs)], part[len(inputs) :], vectors)


def as_rows_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """[lead, rows, width] of a shape of another rank."""
    if len(shape) < 3:
        return 1, math.prod(shape[:-1]), shape[-1]
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def viewable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether all axes but the last two of a contiguous result and of an input with these strides flatten into one."""
    sizes = [(n, s) for n, s in zip(shape[:-2], strides[:-2], strict=True) if n > 1]
    return all(a[1] == b[0] * b[1] for a, b in itertools.pairwise(sizes))


def as_rows(out: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A new tensor and inputs of its leading shape as [lead, rows, width], in that order.

    The new one is a view; an input is one wherever its strides allow it, else a copy.
    """
    rank = out.dim()
    tensors = (out, *inputs)
    if rank == 3:
        return tensors
    if rank < 3:
        return tuple(t.reshape(1, t.numel() // t.shape[-1], t.shape[-1]) for t in tensors)
    if not out.is_contiguous():
        outward = [*sorted(range(rank - 1), key=out.stride, reverse=True), rank - 1]
        tensors = tuple(t.permute(outward) for t in tensors)
    return tuple(t.flatten(0, rank - 3) for t in tensors)


def cut(width: int, piece: int | None = None) -> tuple[int, int, bool]:
    """Width of a piece (`piece` if given), number of pieces, and whether a row's pieces all stay in registers.

    One piece wherever little of it lies beyond the row; else smaller ones, so that memory and registers are not wasted.
    """
    whole = power_of_two(width)
    if piece is not None and width <= RESIDENT_WIDTH and -(-width // piece) <= RESIDENT_PIECES:
        return piece, -(-width // piece), True
    if width > RESIDENT_WIDTH:
        return 4096, -(-width // 4096), False
    if whole <= 128 or whole * 7 <= width * 8:
        return whole, 1, True
    tile = whole
    while tile > 128 and -(-width // (tile // 2)) <= RESIDENT_PIECES and -(-width // tile) * tile * 15 > width * 16:
        tile //= 2
    return tile, -(-width // tile), True


def tile_rows(lead: int, rows: int, tile: int, device: int, elements: int) -> int:
    """How many rows a tile takes: narrow ones are put together while enough blocks are left."""
    most = max(1, min(elements // tile, power_of_two(rows)))
    enough = BLOCKS_PER_PROCESSOR * processors(device)
    while most > 1 and lead * -(-rows // most) < enough:
        most //= 2
    return most


@functools.lru_cache(maxsize=4096)
def plan(norm: Norm, shape: tuple[int, int, int], device: int) -> Plan:
    """The plan for [lead, rows, width] tensors of one shape."""
    lead, rows, width = shape
    name = norm.kernel._pyfunc.__name__.removesuffix("_kernel")
    tuning = choose(name, lead * rows, width, norm.dtypes[-1].itemsize, device)
    tile, pieces, resident = cut(width, tuning.piece)
    if pieces > 1:
        together = 1
    elif tuning.rows is None:
        together = tile_rows(lead, rows, tile, device, tuning.elements)
    else:
        together = min(tuning.rows, power_of_two(rows))
    across = -(-rows // together)
    grid = tuning.grid(lead * across, device)
    loop = grid[0] < lead * across or lead > LARGEST_AXIS
    exact = width % tile == 0
    access = fitting(tuning.access, exact and rows % together == 0, device)
    constants = (1.0 / width, *norm.constants, together, tile, pieces, exact, resident, loop, access)
    return Plan(tuning.hinted(norm.kernel), grid if loop else (across, lead), (norm.eps, *constants))


def choose(kernel: str, rows: int, width: int, itemsize: int, device: int) -> RowTuning:
    """The free choices for a norm of that many rows, with results of that many bytes a value."""
    return chosen(default(kernel, rows, width), kernel, shape_class(rows, width, itemsize), device)


def default(kernel: str, rows: int, width: int) -> RowTuning:
    """The choices where nothing is tuned."""
    if rows * width <= SMALL_ELEMENTS:
        if width <= 256:  # heads: a block of one is mostly waiting
            return dataclasses.replace(SMALL, rows=8)
        return SMALL if width < 2048 else dataclasses.replace(SMALL, worker_warps=8)
    # Two reductions one after the other: the blocks beside it fill the time.
    return dataclasses.replace(LARGE, occupancy=16) if kernel == "layer_norm" else LARGE


def shape_class(rows: int, width: int, itemsize: int) -> str:
    """`512x5 r32 2B`: how `cut` cuts a row, about how many rows, the size of a value."""
    tile, pieces, _ = cut(width)
    return f"{tile}x{pieces} r{about(rows)} {itemsize}B"


def about(rows: int) -> int:
    """A number of rows that stands for all of a class."""
    return next((one for most, one in ((8, 1), (64, 32), (1024, 512), (8192, 4096)) if rows <= most), 16384)


def space(kernel: str, rows: int, width: int) -> list[RowTuning]:
    """Configurations worth trying, the default first."""
    whole, first = power_of_two(width), default(kernel, rows, width)
    pieces = [None] if cut(width)[1] == 1 or whole > RESIDENT_WIDTH // 2 else [None, whole]
    found = [first]
    if rows * width <= SMALL_ELEMENTS:
        found += [
            RowTuning(elements=2048, access=LOAD, worker_warps=warps, piece=piece, rows=height)
            for piece in pieces
            for height in ((1,) if whole > 1024 else (1, 2) if whole > 256 else (1, 4, 8, 16))
            for warps in (None, 8)
            if not (warps == 8 and whole * height < 1024)
        ]
        found += [RowTuning(elements=2048, access=GATHER, worker_warps=warps) for warps in (None, 8)]
        return list(dict.fromkeys(found))
    found += [
        RowTuning(elements=2048, access=LOAD, occupancy=occupancy, worker_warps=warps, piece=piece)
        for piece in pieces
        for occupancy, warps in ((None, None), (None, 8), (8, None), (16, None), (4, 8))
    ]
    heights = (2,) if whole > 1024 else (1, 2, 4, 8) if whole > 256 else (4, 8, 16, 32)
    found += [RowTuning(elements=2048, access=LOAD, rows=height) for height in heights]
    found += [RowTuning(elements=2048, access=LOAD, rows=heights[-1], worker_warps=8)]
    found += [RowTuning(elements=2048, access=LOAD, blocks=8), RowTuning(elements=2048, access=GATHER, worker_warps=8)]
    found += [RowTuning(elements=2048, access=TMA, occupancy=n, blocks=n) for n in (4, 8)]
    return list(dict.fromkeys(found))


def halves(tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """[lead, rows, width] tensors of one shape in two parts, along the lead axis or else the rows."""
    axis = 0 if tensors[0].shape[0] > 1 else 1
    size = tensors[0].shape[axis]
    if size == 1:
        raise ValueError("a row is too long for 32-bit offsets")
    for first, count in ((0, size // 2), (size // 2, size - size // 2)):
        yield tuple(t.narrow(axis, first, count) for t in tensors)
