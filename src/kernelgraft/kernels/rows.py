"""What the norm kernels share: one tile of rows from memory to memory, and how rows are cut into tiles.

Tensors are seen as [lead, rows, width] with any strides. A tile is some rows of one lead index, `PIECES` times `TILE`
wide; up to `RESIDENT_PIECES` pieces stay in registers, so that a row is read once, wider rows are read again.
"""

# ruff: noqa: SIM108, SIM109
# mypy: disable-error-code="no-untyped-def,assignment"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import LARGEST_EXTENT, Plan, Tuning, extent, power_of_two, processors

ZERO = ct.PaddingMode.ZERO

NO_SUM, SUM_FIRST, SUM_LAST = 0, 1, 2
"""Where a residual is added: nowhere, before the norm (both are stored), or to the norm."""
KEEP, TO_INPUT, TO_WEIGHT, FACTOR = 0, 1, 2, 3
"""Rounding before the weight: none, to the input's dtype, to the weight's; or the factor to the input's dtype."""

RESIDENT_PIECES = 8
RESIDENT_WIDTH = 16384
"""Rows up to this many elements stay in registers."""
SMALL = Tuning(elements=2048, occupancy=4, worker_warps=8)
LARGE = Tuning(elements=2048, occupancy=4, blocks=4)
SMALL_ELEMENTS = 2**20
"""Up to that many elements of x, `SMALL` holds, `LARGE` beyond."""
BLOCKS_PER_PROCESSOR = 2
"""Rows are put together into one tile only as far as that many blocks are left."""


def norm_rows(
    residual, x, weight, bias, total, y, eps, width, WHERE, CENTRED, WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND,
    ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, LOOP, TMA,
):  # fmt: skip
    """Every tile of rows that falls to this block; without LOOP that is one."""
    across = ct.cdiv(x.shape[1], ROWS)
    scales = ()
    shifts = ()
    if RESIDENT:
        # Asked for before the rows, so that they arrive together; blocks that take several tiles load them once.
        for p in ct.static_iter(range(PIECES)):
            if WEIGHT:
                scales += (ct.load(weight, (p,), (TILE,), padding_mode=ZERO, allow_tma=TMA),)
            if BIAS:
                shifts += (ct.load(bias, (p,), (TILE,), padding_mode=ZERO, allow_tma=TMA),)
    if LOOP:
        for index in range(ct.bid(0), x.shape[0] * across, ct.num_blocks(0)):
            norm_tile(
                residual, x, weight, bias, total, y, eps, width, index // across, index % across, scales, shifts, WHERE,
                CENTRED, WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND, ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE,
                PIECES, EXACT, RESIDENT, TMA,
            )  # fmt: skip
    else:
        norm_tile(
            residual, x, weight, bias, total, y, eps, width, ct.bid(0) // across, ct.bid(0) % across, scales, shifts,
            WHERE, CENTRED, WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND, ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE,
            PIECES, EXACT, RESIDENT, TMA,
        )  # fmt: skip


def norm_tile(
    residual, x, weight, bias, total, y, eps, width, lead, row, scales, shifts, WHERE, CENTRED, WEIGHT, BIAS, OFFSET,
    ROUND_OFFSET, ROUND, ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, TMA,
):  # fmt: skip
    """One tile of rows; `scales` and `shifts` are the pieces of weight and bias where rows are resident."""
    pieces = ()
    if RESIDENT:
        for p in ct.static_iter(range(PIECES)):
            pieces += (input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, TMA),)
    mean = ct.zeros((1, ROWS, 1), dtype=ct.float32)
    if CENTRED:
        sums = ct.zeros((1, ROWS, TILE), dtype=ct.float32)
        if RESIDENT:
            for p in ct.static_iter(range(PIECES)):
                sums = sums + ct.astype(pieces[p], ct.float32)
        else:
            for p in range(PIECES):
                piece = input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, TMA)
                sums = sums + ct.astype(piece, ct.float32)
        mean = ct.sum(sums, axis=2, keepdims=True) / width
    squares = ct.zeros((1, ROWS, TILE), dtype=ct.float32)
    if RESIDENT:
        for p in ct.static_iter(range(PIECES)):
            squares = squares + squared(pieces[p], mean, p, x.shape[2], CENTRED, TILE, EXACT)
    else:
        for p in range(PIECES):
            piece = input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, TMA)
            squares = squares + squared(piece, mean, p, x.shape[2], CENTRED, TILE, EXACT)
    variance = ct.sum(squares, axis=2, keepdims=True) / width + eps
    if DIVIDE:
        factor = ct.sqrt(variance)
    else:
        factor = ct.rsqrt(variance)
    if RESIDENT:
        for p in ct.static_iter(range(PIECES)):
            value = normalised(pieces[p], mean, factor, weight, CENTRED, ROUND, DIVIDE)
            if WEIGHT:
                value = weighted(value, scales[p], y, OFFSET, ROUND_OFFSET, ROUND_SCALED, TILE)
            if BIAS:
                value = value + ct.reshape(ct.astype(shifts[p], ct.float32), (1, 1, TILE))
            if WHERE == SUM_FIRST:
                ct.store(total, (lead, row, p), pieces[p], allow_tma=TMA)
            output_piece(value, residual, x, weight, y, lead, row, p, WHERE, ROUND_NORMED, ROWS, TILE, TMA)
    else:
        for p in range(PIECES):
            piece = input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, TMA)
            value = normalised(piece, mean, factor, weight, CENTRED, ROUND, DIVIDE)
            if WEIGHT:
                scale = ct.load(weight, (p,), (TILE,), padding_mode=ZERO, allow_tma=TMA)
                value = weighted(value, scale, y, OFFSET, ROUND_OFFSET, ROUND_SCALED, TILE)
            if BIAS:
                shift = ct.load(bias, (p,), (TILE,), padding_mode=ZERO, allow_tma=TMA)
                value = value + ct.reshape(ct.astype(shift, ct.float32), (1, 1, TILE))
            if WHERE == SUM_FIRST:
                ct.store(total, (lead, row, p), piece, allow_tma=TMA)
            output_piece(value, residual, x, weight, y, lead, row, p, WHERE, ROUND_NORMED, ROWS, TILE, TMA)


def input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, TMA):
    """What the norm reads: the input, or its sum with the residual, rounded as that is stored."""
    piece = ct.load(x, (lead, row, p), (1, ROWS, TILE), padding_mode=ZERO, allow_tma=TMA)
    if WHERE == SUM_FIRST:
        other = ct.load(residual, (lead, row, p), (1, ROWS, TILE), padding_mode=ZERO, allow_tma=TMA)
        piece = ct.astype(ct.astype(other, ct.float32) + ct.astype(piece, ct.float32), total.dtype)
    return piece


def squared(piece, mean, p, columns, CENTRED, TILE, EXACT):
    """Squares of a piece, or of its distance from the mean; zero beyond the row."""
    value = ct.astype(piece, ct.float32)
    if CENTRED:
        value = value - mean
        if not EXACT:
            inside = ct.arange(TILE, dtype=ct.int32) + p * TILE < columns
            value = ct.where(ct.reshape(inside, (1, 1, TILE)), value, 0.0)
    return value * value


def normalised(piece, mean, factor, weight, CENTRED, ROUND, DIVIDE):
    """A piece of the norm before its weight in float32, rounded where the semantics say so."""
    value = ct.astype(piece, ct.float32)
    if CENTRED:
        value = value - mean
    if ROUND == FACTOR:
        factor = ct.astype(ct.astype(factor, piece.dtype), ct.float32)
    if DIVIDE:
        value = value / factor
    else:
        value = value * factor
    if ROUND == TO_INPUT or ROUND == FACTOR:
        value = ct.astype(ct.astype(value, piece.dtype), ct.float32)
    if ROUND == TO_WEIGHT:
        value = ct.astype(ct.astype(value, weight.dtype), ct.float32)
    return value


def weighted(value, piece, y, OFFSET, ROUND_OFFSET, ROUND_SCALED, TILE):
    """A piece of the norm times one of the weight."""
    scale = ct.astype(piece, ct.float32)
    if OFFSET:
        scale = scale + 1.0
        if ROUND_OFFSET:
            scale = ct.astype(ct.astype(scale, piece.dtype), ct.float32)
    value = value * ct.reshape(scale, (1, 1, TILE))
    if ROUND_SCALED:
        value = ct.astype(ct.astype(value, y.dtype), ct.float32)
    return value


def output_piece(value, residual, x, weight, y, lead, row, p, WHERE, ROUND_NORMED, ROWS, TILE, TMA):
    """Add the residual where it comes last, round, store."""
    if WHERE == SUM_LAST:
        if ROUND_NORMED == TO_INPUT:
            value = ct.astype(ct.astype(value, x.dtype), ct.float32)
        if ROUND_NORMED == TO_WEIGHT:
            value = ct.astype(ct.astype(value, weight.dtype), ct.float32)
        value = value + ct.astype(
            ct.load(residual, (lead, row, p), (1, ROWS, TILE), padding_mode=ZERO, allow_tma=TMA),
            ct.float32,
        )
    ct.store(y, (lead, row, p), ct.astype(value, y.dtype), allow_tma=TMA)


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


def cut(width: int) -> tuple[int, int, bool]:
    """Width of a piece, number of pieces, and whether a row's pieces all stay in registers.

    One piece wherever little of it lies beyond the row; else smaller ones, so that memory and registers are not wasted.
    """
    whole = power_of_two(width)
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
def plan(
    kernel: Any, shape: tuple[int, ...], strides: tuple[int, ...], device: int, eps: float, constants: tuple[Any, ...]
) -> Plan | None:
    """The plan for tensors of one shape; None if they have to be split first."""
    lead, rows, width = shape
    if lead * rows * width >= LARGEST_EXTENT or extent(shape, strides) >= LARGEST_EXTENT:
        return None
    tile, pieces, resident = cut(width)
    tuning = SMALL if lead * rows * width <= SMALL_ELEMENTS else LARGE
    together = tile_rows(lead, rows, tile, device, tuning.elements) if pieces == 1 else 1
    tiles = lead * -(-rows // together)
    grid = tuning.grid(tiles, device)
    shape_constants = (together, tile, pieces, width % tile == 0, resident, grid[0] < tiles, tuning.tma)
    return Plan(tuning.hinted(kernel), grid, (eps, float(width), *constants, *shape_constants))


def halves(tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """[lead, rows, width] tensors of one shape in two parts, along the lead axis or else the rows."""
    axis = 0 if tensors[0].shape[0] > 1 else 1
    size = tensors[0].shape[axis]
    if size == 1:
        raise ValueError("a row is too long for 32-bit offsets")
    for first, count in ((0, size // 2), (size // 2, size - size // 2)):
        yield tuple(t.narrow(axis, first, count) for t in tensors)
