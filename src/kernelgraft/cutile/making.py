"""Making tiles, and giving them another dtype."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import RoundingMode
from cuda.tile._datatype import is_float, is_numeric

from kernelgraft.cutile.dtypes import DType, as_dtype, carrier, float4_bits, float4_values, from_bits, to_bits
from kernelgraft.cutile.elementwise import arithmetic
from kernelgraft.cutile.promotion import is_power_of_two, loose_dtype, tile_shape, typed
from kernelgraft.cutile.rounding import convert
from kernelgraft.cutile.tiles import Tile, constant, describe, moved, spread

_TypeError = ct.TileTypeError


def numeric_dtype(value: Any) -> DType:
    """A dtype argument, which must be numeric."""
    dtype = as_dtype(value)
    if not is_numeric(dtype):
        raise _TypeError(f"Expected dtype to satisfy constraint is_numeric, but got {dtype}")
    carrier(dtype)
    return dtype


def full(shape: Any, fill_value: Any, dtype: Any) -> Tile:
    """A tile of one value, cast to `dtype`."""
    found, target = tile_shape(shape), numeric_dtype(dtype)
    if isinstance(fill_value, Tile):
        if fill_value.ndim:
            raise _TypeError(f"Expected a scalar or a 0D tile, but given value has type {describe(fill_value)}")
        return moved(astype(fill_value, target), lambda data: data.expand(found))
    loose_dtype(fill_value)
    return Tile(constant(fill_value, target).expand(found), target)


def ones(shape: Any, dtype: Any) -> Tile:
    """A tile of ones."""
    return full(shape, 1, dtype)


def zeros(shape: Any, dtype: Any) -> Tile:
    """A tile of zeros."""
    return full(shape, 0, dtype)


def arange(size: Any, /, *, dtype: Any, start: Any = 0, step: Any = 1) -> Tile:
    """start, start + step, … in one dimension; computed in `dtype`, as cuTile does."""
    length, target = size.__index__(), numeric_dtype(dtype)
    if not is_power_of_two(length):
        raise _TypeError(f"Result tile shape must be power of 2, got {length}")
    counted = Tile(torch.arange(length, dtype=torch.int32), ct.int32)
    found = Tile(convert(counted.data, ct.int32, target), target)
    if isinstance(step, Tile) or step != 1:
        found = arithmetic("mul", found, astype(step, target))
    if isinstance(start, Tile) or start != 0:
        found = arithmetic("add", found, astype(start, target))
    return found


def astile(value: Any, /, *, dtype: Any) -> Tile:
    """A scalar or nested tuples of scalars → a tile whose shape follows the nesting."""
    target = numeric_dtype(dtype)
    if not isinstance(value, tuple):
        return astype(value, target)
    shape = _nesting(value, "value")
    flat = [astype(item, target) for item in _flatten(value)]
    for item in flat:
        if item.ndim:
            raise _TypeError(f"Expected scalar elements at value; got a tile of shape {item.shape}")
    poison = None
    if any(item.poison is not None for item in flat):
        clean = torch.tensor(False)
        poison = torch.stack([clean if item.poison is None else item.poison for item in flat]).reshape(shape)
    return Tile(torch.stack([item.data for item in flat]).reshape(shape), target, poison, spread(*flat)[1])


def _nesting(value: Any, path: str) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        return ()
    if not is_power_of_two(len(value)):
        raise _TypeError(f"Tuple length {len(value)} at {path} is not a power of 2")
    inner = {_nesting(item, f"{path}[{i}]") for i, item in enumerate(value)}
    if len(inner) != 1:
        raise _TypeError(f"Tuple has non-uniform inner shapes at {path}")
    return (len(value), *inner.pop())


def _flatten(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, tuple) else [value]


# --- dtype ---


def astype(x: Any, dtype: Any, /, *, rounding_mode: RoundingMode | None = None) -> Tile:
    """The values in another dtype; `rounding_mode` only from float to float, where cuTile has that conversion."""
    target, given = numeric_dtype(dtype), typed(x)
    between_floats = is_float(given._dtype) and is_float(target)
    if rounding_mode is not None and not between_floats:
        raise _TypeError("rounding_mode is only valid for float to float conversions")
    if given._dtype == target:
        return given
    if not isinstance(x, Tile) and rounding_mode in (None, RoundingMode.RN):
        return Tile(constant(x, target), target)
    if target == ct.float8_e8m0fnu and between_floats and rounding_mode not in (RoundingMode.RZ, RoundingMode.RP):
        raise _TypeError(f"rounding_mode={rounding_mode} is not supported for conversion to {target}: use RZ or RP")
    return Tile(convert(given.data, given._dtype, target, rounding_mode), target, given.poison, given.origin)


def construct(dtype: DType, x: Any = 0) -> Tile:
    """`ct.float32(x)`: a scalar of that dtype."""
    given = typed(x)
    if given.ndim:
        raise _TypeError(f"Expected a scalar value, but given value has type {describe(given)}")
    return astype(x, dtype)


def bitcast(x: Any, /, dtype: Any) -> Tile:
    """The same bits read as another dtype of the same width."""
    given, target = typed(x), numeric_dtype(dtype)
    source = given._dtype
    if ct.bool_ in (source, target):
        raise _TypeError(f"Cannot bitcast from {source} to {target}: bitcast to or from bool is not supported")
    if source.bitwidth != target.bitwidth:
        raise _TypeError(
            f"Cannot bitcast from {source} to {target}: bit width is different"
            f" ({source.bitwidth} vs. {target.bitwidth})"
        )
    if source == target:
        return given
    return Tile(from_bits(to_bits(given.data, source), target), target, given.poison, given.origin)


def pack_to_bytes(x: Any, /) -> Tile:
    """The tile's bytes, little end first, in one dimension of uint8."""
    given = typed(x)
    if given._dtype == ct.bool_:
        raise _TypeError(f"pack_to_bytes from a {given._dtype} tile is not supported")
    flat = given.data.reshape(-1)
    poison = None if given.poison is None else given.poison.reshape(-1)
    if given._dtype == ct.float4_e2m1fn:
        if flat.numel() % 2:
            raise _TypeError(f"Cannot pack tile {describe(given)}: total bits not divisible by 8")
        pairs = float4_bits(flat).reshape(-1, 2)
        halves = None if poison is None else poison.reshape(-1, 2).any(-1)
        return Tile(pairs[:, 0] | (pairs[:, 1] << 4), ct.uint8, halves, given.origin)
    bits = to_bits(flat, given._dtype).contiguous().view(torch.uint8)
    if poison is not None:
        poison = poison.repeat_interleave(given._dtype.bitwidth // 8)
    return Tile(bits, ct.uint8, poison, given.origin)


def unpack_from_bytes(x: Any, /, dtype: Any) -> Tile:
    """The inverse of `pack_to_bytes`."""
    given, target = typed(x), numeric_dtype(dtype)
    if given.ndim != 1:
        raise _TypeError(f"unpack_from_bytes requires a 1D tile, got {given.ndim}D tile with shape {given.shape}")
    if given._dtype != ct.uint8:
        raise _TypeError(f"unpack_from_bytes requires uint8 tile, got {given._dtype} tile")
    if target == ct.bool_:
        raise _TypeError(f"unpack_from_bytes to a {target} tile is not supported")
    if target == ct.float4_e2m1fn:
        nibbles = torch.stack([given.data & 15, given.data >> 4], -1).reshape(-1)
        both = None if given.poison is None else given.poison.repeat_interleave(2)
        return Tile(float4_values(nibbles), target, both, given.origin)
    size = target.bitwidth // 8
    if given.shape[0] % size:
        raise _TypeError(
            f"Cannot unpack tile {describe(given)} to {target}: total bits ({given.shape[0]} * 8)"
            f" not divisible by {target.bitwidth}"
        )
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    poison = None if given.poison is None else given.poison.reshape(-1, size).any(-1)
    return Tile(from_bits(given.data.contiguous().view(width), target), target, poison, given.origin)
