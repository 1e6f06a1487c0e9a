"""Loads and stores of single elements, by index or by offset from an array's first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import PaddingMode
from cuda.tile._datatype import is_boolean, is_integral

from kernelgraft.cutile.arrays import Array, RawMemory
from kernelgraft.cutile.bits import bitwise
from kernelgraft.cutile.dtypes import decode, encode
from kernelgraft.cutile.faults import checked, fault, line
from kernelgraft.cutile.memory import array_of, check_hints, never_written, padded, said
from kernelgraft.cutile.promotion import (
    broadcast,
    broadcastable,
    implicit,
    typed,
)
from kernelgraft.cutile.tiles import Tile, describe, fitted, spread

Tensor = torch.Tensor
_TypeError = ct.TileTypeError


@dataclass
class Elements:
    """Some elements of an array: where they lie in its flat memory, and which of them are accessed at all."""

    array: Array
    places: Tensor
    active: Tensor | None
    shape: tuple[int, ...]

    def chosen(self, values: Tensor) -> Tensor:
        """Those of `values`, broadcast to the elements' shape, that belong to accessed elements; in one dimension."""
        spread_out = values.expand(self.shape)
        return spread_out.reshape(-1) if self.active is None else spread_out[self.active]


def _index_tiles(indices: Any, rank: int) -> tuple[Tile, ...]:
    items = indices if isinstance(indices, tuple | list) else (indices,)
    tiles = tuple(typed(item) for item in items)
    if len(tiles) != rank:
        message = f"For array of rank {rank}, `indices` must be a tuple of length {rank}"
        message += ", or a single scalar/tile" if rank == 1 else ""
        raise _TypeError(f"{message}. However, `indices` has {len(tiles)}.")
    for i, tile in enumerate(tiles):
        if not is_integral(tile.dtype):
            raise _TypeError(f"Index for dimension {i} has non-integer data type {tile.dtype}")
    return tiles


def locate(array: Any, indices: Any, check_bounds: bool, mask: Any = None) -> Elements:
    """The elements at `indices`; those out of bounds are left out, or a fault without `check_bounds`."""
    given = array_of(array)
    tiles = _index_tiles(indices, given.ndim)
    shape = broadcast(*(tile.shape for tile in tiles))
    places = torch.tensor(given.offset)
    inside = torch.tensor(True)
    for tile, size, step in zip(tiles, given.dims, given.steps, strict=True):
        index = tile.data.to(torch.int64)
        inside = inside & (index >= 0) & (index < size)
        places = places + index * step
    custom = _mask(mask, shape)
    poison, origin = spread(*tiles)
    active: Tensor | None
    if check_bounds:
        wanted = Tile(inside.expand(shape), ct.bool_, fitted(poison, torch.Size(shape)), origin)
        wanted = wanted if custom is None else bitwise("and_", wanted, custom)
        active = _decided(wanted, given)
    else:
        active = None if custom is None else _decided(custom, given)
        no_poison(poison, active, shape, origin, given)
        outside = ~inside if active is None else ~inside & active
        if bool(outside.any()):
            first = tuple(int(tile.data.expand(shape)[outside.expand(shape)][0]) for tile in tiles)
            fault(f"accesses index {first} outside {said(given)} with check_bounds=False")
    if active is not None:
        active = None if bool(active.all()) else active.expand(shape)
    return Elements(given, places.expand(shape), active, shape)


def _mask(mask: Any, shape: tuple[int, ...]) -> Tile | None:
    if mask is None:
        return None
    given = typed(mask)
    if not is_boolean(given.dtype):
        raise _TypeError(f"Custom mask must have boolean dtype, but got {given.dtype}")
    if not broadcastable(given.shape, shape):
        raise _TypeError(f"Custom mask shape {given.shape} is not broadcastable to the index shape {shape}")
    return given


def _decided(mask: Tile, array: Array) -> Tensor:
    if mask.poison is not None and bool(mask.poison.any()):
        fault(f"masks an access to {said(array)} with what depends on {mask.origin}")
    return mask.data


def no_poison(
    poison: Tensor | None, active: Tensor | None, shape: tuple[int, ...], origin: str | None, array: Array
) -> None:
    """A fault where an index that is used is poisoned."""
    if poison is not None and bool((poison if active is None else poison & active).any()):
        fault(f"indexes {said(array)} with what depends on {origin}")


def locate_offset(raw: Any, offset: Any, mask: Any = None) -> Elements:
    """The elements at offsets from an array's first; a fault outside the tensor that the array was made from."""
    if not isinstance(raw, RawMemory):
        raise _TypeError(f"Expected a RawArrayMemory, but given value has type {describe(raw)}")
    array, given = raw.array, typed(offset)
    if not is_integral(given.dtype):
        raise _TypeError(f"Index has non-integer data type {given.dtype}")
    places = given.data.to(torch.int64) + array.offset
    custom = _mask(mask, given.shape)
    active = None if custom is None else _decided(custom, array).expand(given.shape)
    no_poison(given.poison, active, given.shape, given.origin, array)
    outside = (places < array.memory.low) | (places >= array.memory.high)
    outside = outside if active is None else outside & active
    if bool(outside.any()):
        first = int(given.data[outside].reshape(-1)[0])
        fault(f"accesses offset {first}, which lies outside the memory of `{array.name}`")
    return Elements(array, places, active, given.shape)


def take(elements: Elements, padding: Tile | None) -> Tile:
    """The values of the elements; `padding` (broadcast) for those that are not accessed, poison without one."""
    array, memory, active = elements.array, elements.array.memory, elements.active
    if active is None:
        data = decode(memory.flat[elements.places], array.dtype)
        poison, origin = never_written(array, None if memory.written is None else memory.written[elements.places])
        return Tile(data, array.dtype, poison, origin)
    fill = padded(array.dtype, PaddingMode.UNDETERMINED, ()) if padding is None else padding.data
    data = fill.expand(elements.shape).clone()
    places = elements.places[active]
    if places.numel():
        data[active] = decode(memory.flat[places], array.dtype)
    poison, origin = None, None
    if padding is None or padding.poison is not None:
        source = torch.tensor(True) if padding is None or padding.poison is None else padding.poison
        poison = source.expand(elements.shape) & ~active
        origin = padding.origin if padding else f"padding of undetermined value, loaded in {line()}"
    if memory.written is not None:
        fresh, where = never_written(array, memory.written[places])
        if fresh is not None:
            poison = torch.zeros(elements.shape, dtype=torch.bool) if poison is None else poison.clone()
            poison[active] = fresh
            origin = origin or where
    return Tile(data, array.dtype, poison, origin)


def put(elements: Elements, value: Tile) -> None:
    """Write a value (broadcast) to the accessed elements; a fault where one element would get two values."""
    array, memory = elements.array, elements.array.memory
    if value.poison is not None and bool(elements.chosen(value.poison).any()):
        fault(f"stores to {said(array)} what depends on {value.origin}")
    places = elements.chosen(elements.places)
    raw = encode(elements.chosen(value.data), array.dtype)
    memory.flat[places] = raw
    if memory.written is not None:
        memory.written[places] = True
    back = memory.flat[places]
    if not bool(((back == raw) | ((back != back) & (raw != raw))).all()):
        fault(f"one store gives elements of {said(array)} more than one value; which one stays is not determined")


def value_for(value: Any, elements: Elements, name: str, context: str) -> Tile:
    """A value to store, checked against the elements' shape and cast to their dtype."""
    shape = typed(value).shape
    if not broadcastable(shape, elements.shape):
        raise _TypeError(f"{name} shape {shape} is not broadcastable to the index shape {elements.shape}")
    return implicit(value, elements.array.dtype, context)


def gather(
    array: Any,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    """The elements at `indices`; `padding_value` where the mask is false or the index is out of bounds."""
    elements = locate(array, indices, check_bounds, mask)
    check_hints(latency)
    return take(elements, value_for(padding_value, elements, "Padding", "Invalid padding value"))


def scatter(
    array: Any,
    indices: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    latency: int | None = None,
) -> None:
    """Write elements at `indices` where the mask is true and the index in bounds."""
    elements = locate(array, indices, check_bounds, mask)
    check_hints(latency)
    put(elements, value_for(value, elements, "Value", "Stored value is incompatible with array's dtype"))


def load_offset(
    raw: Any, offset: Any, /, *, mask: Any = None, padding_value: Any = 0, latency: int | None = None
) -> Tile:
    """The elements at offsets from the array's first."""
    elements = locate_offset(raw, offset, mask)
    check_hints(latency)
    padding = None
    if padding_value is None and not checked():
        padding_value = 0
    if padding_value is not None:
        padding = value_for(padding_value, elements, "Padding", "Invalid padding value")
    return take(elements, padding)


def store_offset(raw: Any, offset: Any, value: Any, /, *, mask: Any = None, latency: int | None = None) -> None:
    """Write elements at offsets from the array's first."""
    elements = locate_offset(raw, offset, mask)
    check_hints(latency)
    put(elements, value_for(value, elements, "Value", "Stored value is incompatible with RawArrayMemory's dtype"))
