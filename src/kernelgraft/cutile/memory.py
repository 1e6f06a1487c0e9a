"""Loads and stores: whole tiles of an array, and single elements by index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import PaddingMode
from cuda.tile._datatype import is_boolean, is_float, is_integral, is_signed

from kernelgraft.cutile.arrays import Array, TiledView
from kernelgraft.cutile.dtypes import DType, decode, encode
from kernelgraft.cutile.faults import checked, fault, line
from kernelgraft.cutile.promotion import (
    axis_of,
    axis_order,
    broadcastable,
    implicit,
    integers,
    tile_shape,
    typed,
)
from kernelgraft.cutile.tiles import Tile, constant, describe, fitted, int32

Tensor = torch.Tensor
_TypeError = ct.TileTypeError

_PADDING = {
    PaddingMode.ZERO: 0.0,
    PaddingMode.NEG_ZERO: -0.0,
    PaddingMode.NAN: math.nan,
    PaddingMode.POS_INF: math.inf,
    PaddingMode.NEG_INF: -math.inf,
}


def array_of(value: Any) -> Array:
    """The argument as an array; TileTypeError if it is none."""
    if not isinstance(value, Array):
        raise _TypeError(f"Expected an array, but given value has type {describe(value)}")
    return value


def check_hints(latency: int | None, allow_tma: bool | None = None) -> None:
    """cuTile's errors for hints out of range; the hints themselves change nothing."""
    if latency is not None and not 1 <= latency <= 10:
        raise ct.TileValueError(f"Latency must be between 1 and 10, got {latency}")
    if allow_tma is not None and not isinstance(allow_tma, bool):
        raise _TypeError(f"Allow TMA must be a boolean, got {allow_tma}")


def _places(index: Any, rank: int, what: str = "array") -> tuple[int, ...]:
    """A tile's index as Python integers: signed scalars, as many as the array has dimensions."""
    items = index if isinstance(index, tuple | list) else (index,)
    for i, item in enumerate(items):
        if isinstance(item, Tile) and (item.ndim or not is_integral(item.dtype) or not is_signed(item.dtype)):
            raise _TypeError(
                "Expected a tuple of signed integers or a single signed integer scalar,"
                f" but item #{i} has type {describe(item)}"
            )
    found = integers(tuple(items), "index")
    if len(found) != rank:
        raise _TypeError(f"Index size {len(found)} does not match the {what} rank {rank}")
    return found


# --- whole tiles ---


class _Window:
    """The part of a tile that lies inside its array, as a strided piece of memory."""

    def __init__(self, array: Array, order: Sequence[int], starts: Sequence[int], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.steps = [array.steps[axis] for axis in order]
        self.offset = array.offset
        self.sizes: list[int] = []
        for axis, start, size, step in zip(order, starts, shape, self.steps, strict=True):
            self.sizes.append(min(size, array.dims[axis] - start) if start >= 0 else 0)
            self.offset += start * step
        self.whole = self.sizes == list(shape)
        self.empty = any(size <= 0 for size in self.sizes)
        self.inside = tuple(slice(0, size) for size in self.sizes)

    def of(self, flat: Tensor) -> Tensor:
        """The elements inside, as a view of a flat tensor."""
        return flat.as_strided(self.sizes, self.steps, self.offset)


def padded(dtype: DType, mode: PaddingMode, shape: tuple[int, ...]) -> Tensor:
    """A tile full of a padding mode's value."""
    if mode == PaddingMode.UNDETERMINED:
        value = math.nan if is_float(dtype) else False if is_boolean(dtype) else 0x5555_5555
    else:
        value = _PADDING[mode]
        if not is_float(dtype) and mode != PaddingMode.ZERO:
            raise _TypeError(f"padding_mode={mode} is not supported for {dtype}")
    return constant(value, dtype).expand(shape).clone()


def _load_window(
    array: Array, order: Sequence[int], starts: Sequence[int], shape: tuple[int, ...], mode: PaddingMode, check: bool
) -> Tile:
    window = _Window(array, order, starts, shape)
    if not check and not window.whole:
        fault(f"load with check_bounds=False of a tile {shape} at {tuple(starts)} leaves {said(array)}")
    if window.empty:
        data = padded(array.dtype, mode, shape)
        if not checked():
            return Tile(data, array.dtype)
        where = f"a tile at {tuple(starts)} that lies entirely outside {said(array)}, loaded in {line()}"
        return Tile(data, array.dtype, torch.ones(shape, dtype=torch.bool), where)
    memory = array.memory
    data = decode(window.of(memory.flat), array.dtype)
    poison, origin = never_written(array, None if memory.written is None else window.of(memory.written))
    if not window.whole:
        found = data
        data = padded(array.dtype, mode, shape)
        data[window.inside] = found
        if poison is not None or mode == PaddingMode.UNDETERMINED:
            undetermined = mode == PaddingMode.UNDETERMINED
            outside = torch.full(shape, undetermined)
            outside[window.inside] = False if poison is None else poison
            poison = outside
            origin = origin or f"padding of undetermined value beyond the end of {said(array)}, loaded in {line()}"
    return Tile(data, array.dtype, poison, origin)


def said(array: Array) -> str:
    """An array as messages name it."""
    return f"`{array.name}` of shape {array.dims}"


def never_written(array: Array, written: Tensor | None) -> tuple[Tensor | None, str | None]:
    """Poison for what is read from memory that was never written, and its origin."""
    if written is None or bool(written.all()):
        return None, None
    return ~written, f"memory of {said(array)} that was never written, loaded in {line()}"


def _store_window(array: Array, order: Sequence[int], starts: Sequence[int], tile: Tile, check: bool) -> None:
    window = _Window(array, order, starts, tile.shape)
    if not check and not window.whole:
        fault(f"store with check_bounds=False of a tile {tile.shape} at {tuple(starts)} leaves {said(array)}")
    if window.empty:
        fault(f"store of a tile {tile.shape} at {tuple(starts)} lies entirely outside {said(array)}")
    data, poison = tile.data, tile.poison
    if not window.whole:
        data = data[window.inside]
        poison = None if poison is None else poison[window.inside]
    if poison is not None and bool(poison.any()):
        fault(f"stores to {said(array)} what depends on {tile.origin}")
    window.of(array.memory.flat).copy_(encode(data, array.dtype))
    if array.memory.written is not None:
        window.of(array.memory.written).fill_(True)


def load(
    array: Any,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: Any = PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> Tile:
    """One tile of the array's grid of tiles of `shape`; hints and memory orders change nothing here."""
    given = array_of(array)
    places = _places(index, given.ndim)
    wanted = tile_shape(shape, given.ndim, scalar=True)
    size = wanted or (1,) * given.ndim
    axes = axis_order(order, given.ndim)
    check_hints(latency, allow_tma)
    starts = [place * length for place, length in zip(places, size, strict=True)]
    tile = _load_window(given, axes, starts, size, mode_of(padding_mode), check_bounds)
    return tile if wanted else tile.item()


def mode_of(padding_mode: Any) -> PaddingMode:
    """A padding mode, also by its name; zero for undetermined values that nobody tracks."""
    mode = PaddingMode[padding_mode] if isinstance(padding_mode, str) else padding_mode
    return PaddingMode.ZERO if mode == PaddingMode.UNDETERMINED and not checked() else mode


def store(
    array: Any,
    /,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> None:
    """Write one tile of the array's grid; what hangs over the array's end is left out."""
    given = array_of(array)
    places = _places(index, given.ndim)
    value = implicit(tile, given.dtype, "Stored tile is incompatible with array's dtype")
    axes = axis_order(order, given.ndim)
    check_hints(latency, allow_tma)
    if not value.ndim and given.ndim:
        value = _as_shape(value, (1,) * given.ndim)
    if value.ndim != given.ndim:
        raise _TypeError(f"Expected shape length to be {given.ndim}, got {value.ndim}")
    starts = [place * length for place, length in zip(places, value.shape, strict=True)]
    _store_window(given, axes, starts, value, check_bounds)


def _as_shape(tile: Tile, shape: tuple[int, ...]) -> Tile:
    return Tile(tile.data.expand(shape), tile.dtype, fitted(tile.poison, torch.Size(shape)), tile.origin)


def view_load(
    view: TiledView,
    index: Any,
    *,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    """One tile of a tiled view."""
    starts = view_starts(view, index)
    check_hints(latency, allow_tma)
    axes = range(view.array.ndim)
    tile = _load_window(view.array, axes, starts, view.full_shape, mode_of(view.padding_mode), check_bounds)
    return tile if view.tile_shape else tile.item()


def view_store(
    view: TiledView,
    index: Any,
    tile: Any,
    *,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> None:
    """Write one tile of a tiled view."""
    starts = view_starts(view, index)
    check_hints(latency, allow_tma)
    value = view_value(view, tile, "Tile")
    value = implicit(value, view.dtype, "Stored tile is incompatible with tiled view's dtype")
    _store_window(view.array, range(view.array.ndim), starts, value, check_bounds)


def view_starts(view: TiledView, index: Any) -> list[int]:
    """Where a tiled view's tile begins, in elements."""
    places = _places(index, view.array.ndim, "tiled view")
    return [place * step for place, step in zip(places, view.traversal_steps, strict=True)]


def view_value(view: TiledView, value: Any, what: str) -> Any:
    """A value to store in a tiled view, broadcast to its tiles' shape."""
    shape = typed(value).shape
    if not broadcastable(shape, view.tile_shape):
        raise _TypeError(f"{what} shape {shape} is not broadcastable to the tiled view's tile shape {view.tile_shape}")
    return _as_shape(value, view.full_shape) if isinstance(value, Tile) else value


def num_tiles(array: Any, /, axis: Any, shape: Any, order: Any = "C") -> Tile:
    """How many tiles of `shape` lie along `axis` of the array's tile space."""
    given = array_of(array)
    size = tile_shape(shape, given.ndim, scalar=True) or (1,) * given.ndim
    place, axes = axis_of(axis, given.ndim), axis_order(order, given.ndim)
    return int32(-(-given.dims[axes[place]] // size[place]))
