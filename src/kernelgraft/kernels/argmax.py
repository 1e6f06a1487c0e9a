"""argmax of each row of logits: the lowest index of the largest value, where NaN is larger than any number.

A row is cut into parts, so that one row alone uses the whole GPU: one launch finds the best of each part, a second the
best of those. Where there are as many rows as the GPU can take blocks, a row is one part and the first launch is all.
"""

# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import (
    LARGEST_EXTENT,
    LARGEST_GRID,
    Maker,
    Plan,
    current,
    eager,
    extent,
    fire,
    hinted,
    makers,
    power_of_two,
    processors,
)
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels.access import GATHER, LOAD, TMA
from kernelgraft.kernels.examples import Example, tensor

NEG_INF = ct.PaddingMode.NEG_INF
MAXIMUM = 2**31 - 1
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """What can be chosen freely for a launch."""

    tile: int = 1024
    """Elements of a row that are compared at once."""
    blocks: int = 4
    """Parts for each multiprocessor, over all rows; rows are cut into no more."""
    access: int = TMA
    """How a row is read: see `kernelgraft.kernels.access`."""
    occupancy: int | None = None
    worker_warps: int | None = None


LITTLE = Choice(tile=1024)
MUCH = Choice(tile=4096)
"""For rows that such tiles, one for each block, can take all at once, and for more."""


def best_of(x, row, first, last, TILE, ACCESS):
    """The best of tiles `first` to `last` of a row, as one number: the value's rank above, how early it comes below.

    Every place of a tile keeps the best of its own first; ranks are made at the end.
    """
    best = ct.full((1, TILE), NEGATIVE_INFINITY, dtype=ct.float32)
    places = ct.reshape(ct.arange(TILE, dtype=ct.int32), (1, TILE))
    place = places + first * TILE
    for number in range(first, last):
        if ACCESS >= GATHER:
            tile = ct.gather(x, (row, places + number * TILE), padding_value=NEGATIVE_INFINITY)
        else:
            tile = ct.load(x, (row, number), (1, TILE), padding_mode=NEG_INF, allow_tma=ACCESS == TMA)
        value = ct.astype(tile, ct.float32)
        better = (value > best) | (ct.isnan(value) & (best == best))
        best = ct.where(better, value, best)
        place = ct.where(better, places + number * TILE, place)
    # Read as an integer, a positive float keeps its order, a negative one reverses it; both zeros are one.
    bits = ct.bitcast(ct.where(best == 0.0, 0.0, best), ct.int32)
    rank = ct.where(ct.isnan(best), MAXIMUM, bits ^ ((bits >> 31) & MAXIMUM))
    return ct.max((ct.astype(rank, ct.int64) << 32) | ct.astype(MAXIMUM - place, ct.int64))


@ct.kernel
def argmax_kernel(
    x,
    y,
    parts,
    PARTS: ct.Constant[int],
    TILES: ct.Constant[int],
    TILE: ct.Constant[int],
    LOOP: ct.Constant[bool],
    ACCESS: ct.Constant[int],
):
    """x: [rows, width]; y: [rows] if a row is one part; else parts: [rows, PARTS], each of TILES tiles."""
    total = ct.cdiv(x.shape[1], TILE)
    if PARTS > 1:
        row, part = ct.bid(0) // PARTS, ct.bid(0) % PARTS
        best = best_of(x, row, part * TILES, min(part * TILES + TILES, total), TILE, ACCESS)
        ct.store(parts, (row, part), best)
    elif LOOP:
        for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
            best = best_of(x, row, 0, total, TILE, ACCESS)
            ct.store(y, (row,), MAXIMUM - (best & MAXIMUM))
    else:
        best = best_of(x, ct.bid(0), 0, total, TILE, ACCESS)
        ct.store(y, (ct.bid(0),), MAXIMUM - (best & MAXIMUM))


@ct.kernel
def best_part_kernel(parts, y, PARTS: ct.Constant[int], TILE: ct.Constant[int]):
    """parts: [rows, PARTS] of what `best_of` gives; y: [rows]."""
    row = ct.bid(0)
    places = ct.arange(TILE, dtype=ct.int32)
    # Beyond the parts the last one is read again.
    best = ct.max(ct.gather(parts, (row, ct.minimum(places, PARTS - 1)), check_bounds=False))
    ct.store(y, (row,), MAXIMUM - (best & MAXIMUM))


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the largest value along the last axis, the lowest of several: int64.

    x: [..., width], any strides, width up to 2³¹; float32, bfloat16 or float16. NaN is larger than any number, as in
    torch.
    """
    return _run(x) if eager(x) else _op(x)


def _run(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        return _run(x.reshape(-1, x.shape[-1])).view(x.shape[:-1])
    device = x.get_device()
    steps = _ready(x.shape, x.stride(), device)
    if steps.makes is None or device != current():
        y = x.new_empty(x.shape[0], dtype=torch.int64)
        _launch(x, y, steps)
        return y
    y = steps.makes[0]()
    _launch(x, y, steps, None if steps.second is None else steps.makes[1]())
    return y


@dataclass(frozen=True, slots=True)
class Steps:
    """The launches for tensors of one shape."""

    first: Plan | None
    """None: nothing to do, or rows have to be split first."""
    second: Plan | None
    """None if the first launch gives the result."""
    parts: tuple[int, int]
    makes: tuple[Maker, ...] | None
    """What makes the result, and the parts if there are two launches; see `makers`."""


def _launch(x: torch.Tensor, y: torch.Tensor, steps: Steps, parts: torch.Tensor | None = None) -> None:
    if steps.first is None:
        for rows in _halves(x.shape[0]):
            part = x[rows]
            _launch(part, y[rows], _ready(part.shape, part.stride(), x.get_device()))
    elif steps.second is None:
        fire(steps.first, (x, y, y))
    else:
        parts = x.new_empty(*steps.parts, dtype=torch.int64) if parts is None else parts
        fire(steps.first, (x, y, parts))
        fire(steps.second, (parts, y))


def _halves(rows: int) -> list[slice]:
    if rows == 1:
        raise ValueError("a row is too long for 32-bit offsets")
    return [slice(0, rows // 2), slice(rows // 2, rows)] if rows else []


def choose(rows: int, width: int, device: int) -> Choice:
    """The free choices for rows of that width."""
    return chosen(default(rows, width, device), "argmax", shape_class(rows, width), device)


def default(rows: int, width: int, device: int) -> Choice:
    """The choice where nothing is tuned."""
    return LITTLE if rows * -(-width // LITTLE.tile) <= LITTLE.blocks * processors(device) else MUCH


def shape_class(rows: int, width: int) -> str:
    """The class of shapes that one tuned configuration serves."""
    return f"{min(power_of_two(rows), 256)}x{power_of_two(width)}"


def space(rows: int, width: int, device: int = -1) -> list[Choice]:
    """Configurations worth trying, the default first."""
    first = default(rows, width, device)
    found = []
    for tile in [t for t in (1024, 2048, 4096) if t <= power_of_two(width)]:
        found += [Choice(tile, blocks) for blocks in ((1, 2, 4) if rows < 256 else (1,))]
        found += [Choice(tile, access=LOAD), Choice(tile, access=LOAD, occupancy=2, worker_warps=8)]
    return [first, *(c for c in found if c != first)]


@functools.lru_cache(maxsize=4096)
def _ready(shape: tuple[int, int], strides: tuple[int, int], device: int, choice: Choice | None = None) -> Steps:
    rows, width = shape
    if not width and rows:
        raise ValueError("argmax of empty rows")
    if not rows or max(extent(shape, strides), rows * width) >= LARGEST_EXTENT:
        return Steps(None, None, (0, 0), None)
    result = ((rows,), (1,), torch.int64)
    choice = choice or choose(rows, width, device)
    tile = min(choice.tile, power_of_two(width))
    tiles = -(-width // tile)
    each = -(-tiles // max(1, choice.blocks * processors(device) // rows))
    parts = -(-tiles // each)
    grid = (rows * parts if parts > 1 else min(rows, LARGEST_GRID),)
    kernel = hinted(argmax_kernel, choice.occupancy, choice.worker_warps)
    first = Plan(kernel, grid, (parts, each, tile, grid[0] < rows * parts, choice.access))
    if parts == 1:
        return Steps(first, None, (0, 0), makers(device, result))
    second = Plan(best_part_kernel, (rows,), (parts, power_of_two(parts)))
    return Steps(first, second, (rows, parts), makers(device, result, ((rows, parts), (parts, 1), torch.int64)))


_op = torch.library.custom_op("kernelgraft::argmax", _run, mutates_args=())


@_op.register_fake
def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


def examples() -> list[Example]:
    """One row and batches of the vocabularies of real models; odd widths."""

    def of(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[str], Any]:
        return lambda device: argmax(tensor(device, rows, width, dtype=dtype))

    return [
        Example("1 x 128256", of(1, 128256)),
        Example("32 x 128256", of(32, 128256)),
        Example("1 x 262144 float32", of(1, 262144, torch.float32)),
        Example("64 x 151936 float32", of(64, 151936, torch.float32)),
        Example("3 x 1021 float16", of(3, 1021, torch.float16), tune=False),
        Example("300 x 32064", of(300, 32064), tune=False),
    ]
