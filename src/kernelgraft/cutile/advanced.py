"""Slices of an array at a tile of indices: one sparse dimension, the others dense."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import PaddingMode
from cuda.tile._datatype import is_integral

from kernelgraft.cutile.arrays import Array
from kernelgraft.cutile.elements import locate, no_poison, put, take
from kernelgraft.cutile.memory import array_of, check_hints, mode_of, padded
from kernelgraft.cutile.promotion import implicit, is_power_of_two, typed
from kernelgraft.cutile.tiles import Tile, describe

Tensor = torch.Tensor
_TypeError = ct.TileTypeError


def slice_init(self: Any, start: Any, length: Any, /) -> None:
    """`ct.Slice(start, length)`: a run of indices in a dense dimension."""
    self.start, self.length = start, length


def _advanced(array: Array, indices: Any) -> tuple[tuple[Tile, ...], tuple[int, ...]]:
    if array.ndim < 2:
        raise _TypeError("load_advanced_indexing requires a 2D or higher-rank array; use ct.gather() for 1D arrays")
    if not isinstance(indices, tuple) or len(indices) != array.ndim:
        count = len(indices) if isinstance(indices, tuple) else 1
        raise _TypeError(
            f"load_advanced_indexing/store_advanced_indexing index length {count} does not match array rank"
            f" {array.ndim}"
        )
    runs: list[Tensor] = []
    poison: list[Tile] = []
    sparse = 0
    for i, item in enumerate(indices):
        if isinstance(item, Tile):
            if item.ndim != 1 or not is_integral(item.dtype):
                raise _TypeError(f"Sparse index at dim {i} must be a 1D integer tile, got {describe(item)}")
            sparse += 1
            poison.append(item)
            runs.append(item.data.to(torch.int64))
        elif isinstance(item, ct.Slice):
            runs.append(item.start.__index__() + torch.arange(item.length.__index__()))
        else:
            raise _TypeError(
                f"load_advanced_indexing/store_advanced_indexing index at dim {i} must be a 1D integer Tile"
                f" (sparse dim) or ct.Slice(start, length) (dense dim), got type {describe(item)}"
            )
        if not is_power_of_two(len(runs[-1])):
            raise _TypeError(f"Index at dim {i} has size {len(runs[-1])}; must be a power of two")
    if sparse != 1:
        raise _TypeError(
            "load_advanced_indexing/store_advanced_indexing: exactly one index must be a 1D integer Tile (the sparse"
            f" dim); found {sparse}"
        )
    no_poison(poison[0].poison, None, (), poison[0].origin, array)
    shape = tuple(len(run) for run in runs)
    tiles = tuple(
        Tile(run.reshape([-1 if j == i else 1 for j in range(array.ndim)]), ct.int64) for i, run in enumerate(runs)
    )
    return tiles, shape


def load_advanced_indexing(
    array: Any,
    indices: Any,
    /,
    *,
    padding_mode: Any = PaddingMode.UNDETERMINED,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    """Slices of the array at a tile of indices along one dimension."""
    given = array_of(array)
    tiles, _ = _advanced(given, indices)
    check_hints(latency, allow_tma)
    mode = mode_of(padding_mode)
    fill = None if mode == PaddingMode.UNDETERMINED else Tile(padded(given.dtype, mode, ()), given.dtype)
    return take(locate(given, tiles, True), fill)


def store_advanced_indexing(
    array: Any, indices: Any, tile: Any, /, *, latency: int | None = None, allow_tma: bool | None = None
) -> None:
    """Write slices of the array at a tile of indices along one dimension."""
    given = array_of(array)
    tiles, shape = _advanced(given, indices)
    value = typed(tile)
    if value.shape != shape:
        raise _TypeError(f"Tile shape {value.shape} does not match the shape implied by indices {shape}")
    check_hints(latency, allow_tma)
    put(locate(given, tiles, True), implicit(tile, given.dtype, "Stored tile dtype is incompatible with array dtype"))
