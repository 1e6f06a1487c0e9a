"""Changing the shape of tiles, taking them apart, putting them together."""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.faults import fault
from kernelgraft.cutile.promotion import axis_of, broadcastable, integers, is_power_of_two, tile_shape, typed
from kernelgraft.cutile.tiles import Tile, describe, fitted, moved, reshaped

_TypeError = ct.TileTypeError


def reshape(x: Any, /, shape: Any) -> Tile:
    """The elements in another shape; one dimension may be -1."""
    given = typed(x)
    if not isinstance(shape, tuple | list):
        raise _TypeError(f"Expected a tuple, but given value has type {describe(shape)}")
    wanted = integers(shape)
    total, known = math.prod(given.shape), math.prod(size for size in wanted if size >= 0)
    if any(size < -1 for size in wanted):
        raise _TypeError(f"Dimension can only be -1 or non-negative, got {min(wanted)}")
    if wanted.count(-1) > 1:
        raise _TypeError(f"Only one dimension can be -1, got {wanted}")
    if (-1 in wanted and (known == 0 or total % known)) or (-1 not in wanted and total != known):
        raise _TypeError(f"Cannot reshape {given.shape} to {wanted}")
    return moved(given, lambda data: data.reshape(wanted))


def broadcast_to(x: Any, /, shape: Any) -> Tile:
    """The tile repeated to a larger shape."""
    given, wanted = typed(x), tile_shape(shape)
    if not broadcastable(given.shape, wanted):
        raise _TypeError(f"Shape {given.shape} is not broadcastable to {wanted}")
    return moved(given, lambda data: data.expand(wanted))


def expand_dims(x: Any, /, axis: Any) -> Tile:
    """A new dimension of size 1."""
    given = typed(x)
    place = axis_of(axis, given.ndim + 1)
    return moved(given, lambda data: data.unsqueeze(place))


def permute(x: Any, /, axes: Any) -> Tile:
    """The axes in another order."""
    given, order = typed(x), integers(axes, "axes")
    if len(order) != given.ndim:
        raise _TypeError(f"Num axes must match input's rank: {len(order)} vs {given.ndim}")
    order = tuple(axis_of(axis, given.ndim) for axis in order)
    for i, axis in enumerate(order):
        if axis in order[:i]:
            raise _TypeError(f"Repeated axis #{i}: {axis}")
    return moved(given, lambda data: data.permute(order))


def transpose(x: Any, /, axis0: Any = None, axis1: Any = None) -> Tile:
    """Two axes exchanged; without axes, those of a matrix."""
    given = typed(x)
    if given.ndim < 2:
        raise _TypeError("Cannot transpose a tile with fewer than 2 dimensions")
    if axis0 is None and axis1 is None:
        if given.ndim != 2:
            raise _TypeError("`axes` must be specified for tile with more than 2 dimensions")
        axis0, axis1 = 0, 1
    elif axis0 is None or axis1 is None:
        raise _TypeError(
            f"transpose axes must either both be specified or both be None, got axis0={axis0}, axis1={axis1}"
        )
    one, other = axis_of(axis0, given.ndim), axis_of(axis1, given.ndim)
    return moved(given, lambda data: data.transpose(one, other))


def cat(tiles: Any, /, axis: Any) -> Tile:
    """Two tiles of one dtype behind each other along `axis`."""
    if not isinstance(tiles, tuple | list):
        raise _TypeError(f"Expected a tuple, but given value has type {describe(tiles)}")
    if not tiles:
        raise _TypeError("cat() received an empty tuple")
    if len(tiles) > 2:
        raise _TypeError(f"cat() supports at most 2 tiles, got {len(tiles)}")
    parts = [typed(tile) for tile in tiles]
    if len(parts) == 1:
        return parts[0]
    one, other = parts
    place = axis_of(axis, one.ndim)
    if one.ndim != other.ndim:
        raise _TypeError(f"Expected tiles to have the same rank: {one.ndim} != {other.ndim}")
    if one._dtype != other._dtype:
        raise _TypeError(f"Expected tiles to have the same dtype: {one._dtype} != {other._dtype}")
    rest = [s for i, s in enumerate(one.shape) if i != place], [s for i, s in enumerate(other.shape) if i != place]
    if rest[0] != rest[1]:
        raise _TypeError(
            f"Expected tiles to have the same shape for non axis dimensions, got {one.shape} and {other.shape}"
        )
    data = torch.cat([one.data, other.data], place)
    if not all(map(is_power_of_two, data.shape)):
        raise _TypeError(f"Result tile shape must be power of 2, got: {list(data.shape)}")
    poison = None
    if one.poison is not None or other.poison is not None:
        poison = torch.cat(
            [torch.zeros(p.shape, dtype=torch.bool) if p.poison is None else p.poison for p in parts], place
        )
    return Tile(data, one._dtype, poison, one.origin or other.origin)


def _subtile(x: Tile, index: Any, shape: tuple[int, ...], noun: str) -> tuple[slice, ...]:
    places = integers(index, "index")
    if len(places) != x.ndim:
        raise _TypeError(f"Index size {len(places)} does not match the tile rank {x.ndim}")
    found = []
    for i, (size, part, place) in enumerate(zip(x.shape, shape, places, strict=True)):
        if size % part:
            raise _TypeError(f"Input shape {x.shape} is not divisible by {noun} shape {shape} at dimension #{i}")
        if not 0 <= place < size // part:
            fault(
                f"Index {place} out of bounds at dimension #{i}: valid range is [0, {size // part}) in tile space"
                f" (input shape {x.shape}, {noun} shape {shape})"
            )
        found.append(slice(place * part, (place + 1) * part))
    return tuple(found)


def extract(x: Any, /, index: Any, shape: Any) -> Tile:
    """One subtile of the grid of subtiles of `shape`."""
    given = typed(x)
    wanted = tile_shape(shape, given.ndim, scalar=True)
    place = _subtile(given, index, wanted or (1,) * given.ndim, "result")
    return moved(given, lambda data: data[place].reshape(wanted))


def insert(x: Any, /, index: Any, value: Any) -> Tile:
    """A copy of `x` with one subtile replaced."""
    given, part = typed(x), typed(value)
    if given._dtype != part._dtype:
        raise _TypeError(f"Cannot insert a tile of dtype {part._dtype} into a tile of dtype {given._dtype}")
    if part.ndim == 0:
        part = moved(part, lambda data: data.reshape((1,) * given.ndim))
    elif part.ndim != given.ndim:
        raise _TypeError(f"Value rank {part.ndim} does not match the tile rank {given.ndim}")
    place = _subtile(given, index, part.shape, "value")
    data = given.data.clone()
    data[place] = part.data
    poison = None
    if given.poison is not None or part.poison is not None:
        poison = torch.zeros(data.shape, dtype=torch.bool) if given.poison is None else given.poison.clone()
        poison[place] = False if part.poison is None else part.poison
    return Tile(data, given._dtype, poison, given.origin or part.origin)


def expanded(x: Tile, shape: tuple[int, ...]) -> Tile:
    """A tile seen in a larger shape that is known to fit."""
    return Tile(x.data.expand(shape), x._dtype, fitted(x.poison, torch.Size(shape)), x.origin)


def flat(x: Tile, shape: tuple[int, ...]) -> Tile:
    """A tile in another shape of the same size."""
    return Tile(x.data.reshape(shape), x._dtype, reshaped(x.poison, shape), x.origin)
