"""Loads and stores of tiles of [lead, rows, width] tensors: through the TMA, as plain loads, or element by element."""

# ruff: noqa: SIM109
# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch; tile functions take no annotations.

from __future__ import annotations

import cuda.tile as ct

from kernelgraft.cutile.plans import unchecked_loads

ZERO = ct.PaddingMode.ZERO

LOAD, TMA, GATHER, UNCHECKED, BARE = 0, 1, 2, 3, 4
"""How a kernel reads and writes; the result is the same.

Where no tile ends beyond its tensor, BARE stands for LOAD and UNCHECKED for GATHER: half of the instructions.
"""


def fitting(access: int, exact: bool, device: int) -> int:
    """An access for tensors that end with their last tile (`exact`), or not: a checked LOAD costs a branch a load."""
    if access == TMA:
        return access
    if access == LOAD and exact and unchecked_loads(device):
        return BARE
    return UNCHECKED if exact else GATHER


def take(x, lead, row, p, ROWS, TILE, ACCESS):
    """The tile [1, ROWS, TILE] number (lead, row, p); zero beyond the tensor."""
    if ACCESS == BARE:
        return ct.load(x, (lead, row, p), (1, ROWS, TILE), allow_tma=False, check_bounds=False)
    if ACCESS == GATHER or ACCESS == UNCHECKED:
        columns = ct.arange(TILE, dtype=ct.int32) + p * TILE
        if ROWS == 1:
            tile = ct.gather(x, (lead, row, columns), padding_value=0, check_bounds=ACCESS == GATHER)
        else:
            lines = ct.reshape(ct.arange(ROWS, dtype=ct.int32) + row * ROWS, (ROWS, 1))
            tile = ct.gather(
                x, (lead, lines, ct.reshape(columns, (1, TILE))), padding_value=0, check_bounds=ACCESS == GATHER
            )
        return ct.reshape(tile, (1, ROWS, TILE))
    return ct.load(x, (lead, row, p), (1, ROWS, TILE), padding_mode=ZERO, allow_tma=ACCESS == TMA)


def give(y, value, lead, row, p, ROWS, TILE, ACCESS):
    """Store a tile [1, ROWS, TILE] as number (lead, row, p); nothing is written beyond the tensor."""
    if ACCESS == BARE:
        ct.store(y, (lead, row, p), value, allow_tma=False, check_bounds=False)
    elif ACCESS == GATHER or ACCESS == UNCHECKED:
        columns = ct.arange(TILE, dtype=ct.int32) + p * TILE
        if ROWS == 1:
            ct.scatter(y, (lead, row, columns), ct.reshape(value, (TILE,)), check_bounds=ACCESS == GATHER)
        else:
            lines = ct.reshape(ct.arange(ROWS, dtype=ct.int32) + row * ROWS, (ROWS, 1))
            value = ct.reshape(value, (ROWS, TILE))
            ct.scatter(y, (lead, lines, ct.reshape(columns, (1, TILE))), value, check_bounds=ACCESS == GATHER)
    else:
        ct.store(y, (lead, row, p), value, allow_tma=ACCESS == TMA)


def take_vector(x, p, TILE, ACCESS):
    """The tile [TILE] number p of a vector; zero beyond it."""
    if ACCESS == BARE:
        return ct.load(x, (p,), (TILE,), allow_tma=False, check_bounds=False)
    if ACCESS == GATHER or ACCESS == UNCHECKED:
        return ct.gather(x, ct.arange(TILE, dtype=ct.int32) + p * TILE, padding_value=0, check_bounds=ACCESS == GATHER)
    return ct.load(x, (p,), (TILE,), padding_mode=ZERO, allow_tma=ACCESS == TMA)
