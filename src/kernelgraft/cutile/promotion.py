"""cuTile's typing rules: which dtype two operands meet in, which casts happen unasked, which shapes a tile may have.

Python numbers are *loosely typed*: they take the dtype of the tile they meet where its category (bool < integer <
float) is at least theirs. Promotion between tiles is cuTile's own table; messages are worded like the compiler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import _datatype as datatype
from cuda.tile._datatype import DType, is_boolean, is_float, is_integral, is_restricted_float

from kernelgraft.cutile.dtypes import integer_limits
from kernelgraft.cutile.rounding import convert
from kernelgraft.cutile.tiles import Number, Tile, constant, describe

_TypeError = ct.TileTypeError


def loose_dtype(value: Number) -> DType:
    """The dtype of a Python number on its own: bool_, int32 (int64, uint64 where it needs them) or float32."""
    if isinstance(value, bool):
        return ct.bool_
    if isinstance(value, float):
        return ct.float32
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return ct.int32
        if -(2**63) <= value < 2**63:
            return ct.int64
        if 0 <= value < 2**64:
            return ct.uint64
        raise ct.TileValueError(f"Constant {value} is out of range of any supported integer type")
    raise _TypeError(f"Expected a tile, but given value has type {describe(value)}")


def dtype_of(value: Any) -> DType:
    """The dtype of a tile or of a Python number."""
    return value._dtype if isinstance(value, Tile) else loose_dtype(value)


def typed(value: Any) -> Tile:
    """A tile as it is; a Python number as a scalar of its own dtype; TileTypeError for anything else."""
    if isinstance(value, Tile):
        return value
    dtype = loose_dtype(value)
    return Tile(constant(value, dtype), dtype)


def category(dtype: DType) -> int:
    """0 bool, 1 integer, 2 float, 3 float without arithmetic."""
    if is_boolean(dtype):
        return 0
    if is_integral(dtype):
        return 1
    return 3 if is_restricted_float(dtype) else 2


@lru_cache(maxsize=1024)
def promote(one: DType, other: DType, force_float: bool = False) -> DType:
    """The dtype in which two tiles meet; TileTypeError where cuTile asks for an explicit cast."""
    return datatype.promote_dtypes(one, other, force_float)


def _promote_loose(dtype: DType, value: Number, force_float: bool) -> DType:
    loose = loose_dtype(value)
    ours, its = min(category(dtype), 2), min(category(loose), 2)
    if its == ours == 1 and not force_float:
        low, high = integer_limits(dtype)
        if not low <= value <= high:
            raise ct.TileValueError(f"Integer constant {value} is out of range of {dtype}")
    found = loose if its > ours else dtype
    return ct.float32 if force_float and not is_float(found) else found


def meet(x: Any, y: Any, force_float: bool = False) -> DType:
    """The common dtype of two operands of which at least one is a tile."""
    if isinstance(x, Tile):
        if isinstance(y, Tile):
            if x._dtype == y._dtype and not force_float:
                return x._dtype
            return promote(x._dtype, y._dtype, force_float)
        return _promote_loose(x._dtype, y, force_float)
    return _promote_loose(y._dtype, x, force_float)


def operand(value: Any, dtype: DType) -> torch.Tensor:
    """The carrier tensor of a tile or number in `dtype`."""
    if isinstance(value, Tile):
        return value.data if value._dtype == dtype else convert(value.data, value._dtype, dtype)
    return constant(value, dtype)


def implicit(value: Any, dtype: DType, context: str) -> Tile:
    """What a store, a mask's padding or a reduction's result is cast to unasked; refused where it could lose."""
    if isinstance(value, Tile):
        if value._dtype == dtype:
            return value
        if not _may_cast(value._dtype, dtype):
            raise _TypeError(f"{context}: cannot implicitly cast {value._dtype} to {dtype}")
        return Tile(convert(value.data, value._dtype, dtype), dtype, value.poison, value.origin)
    ours, its = category(dtype), category(loose_dtype(value))
    if ours == 0:
        if its > 1 or value not in (0, 1):
            raise _TypeError(f"{context}: cannot implicitly cast {value} to {dtype}")
    elif its > ours:
        raise _TypeError(f"{context}: cannot implicitly cast {value} to {dtype}")
    elif its == ours == 1:
        low, high = integer_limits(dtype)
        if not low <= value <= high:
            raise ct.TileValueError(f"{context}: {value} is out of range of {dtype}")
    return Tile(constant(value, dtype), dtype)


@lru_cache(maxsize=1024)
def _may_cast(source: DType, target: DType) -> bool:
    try:
        return promote(source, target) == target
    except _TypeError:
        return False


# --- shapes and axes ---


def is_power_of_two(value: int) -> bool:
    """Whether a dimension is allowed in a tile."""
    return value > 0 and value & (value - 1) == 0


@lru_cache(maxsize=4096)
def _checked(shape: tuple[int, ...], what: str, any_size: bool) -> tuple[int, ...]:
    for i, size in enumerate(shape):
        if size <= 0:
            raise _TypeError(f"Dimension #{i} of {what} {shape} is not positive")
        if not any_size and not is_power_of_two(size):
            raise _TypeError(f"Dimension #{i} of {what} {shape} is not a power of two")
    return shape


def integers(values: Any, what: str = "shape") -> tuple[int, ...]:
    """A tuple of integers (or one) as Python integers."""
    items = values if isinstance(values, tuple | list) else (values,)
    found = []
    for i, item in enumerate(items):
        if isinstance(item, bool) or not (isinstance(item, int) or (isinstance(item, Tile) and item.ndim == 0)):
            raise _TypeError(f"Expected a tuple of integers, but element #{i} of {what} has type {describe(item)}")
        found.append(item.__index__())
    return tuple(found)


def tile_shape(
    shape: Any, rank: int | None = None, *, what: str = "shape", any_size: bool = False, scalar: bool = False
) -> tuple[int, ...]:
    """A tile's shape, checked: positive powers of two, of the given rank (or none, where a scalar is allowed)."""
    found = integers(shape, what)
    if rank is not None and len(found) != rank and not (scalar and not found):
        raise _TypeError(f"Expected {what} length to be {rank}, got {len(found)}")
    return _checked(found, what, any_size)


def axis_of(axis: Any, rank: int) -> int:
    """An axis counted from the front; TileTypeError where there is none."""
    given = axis.__index__()
    found = given + rank if given < 0 else given
    if not 0 <= found < rank:
        raise _TypeError(f"Axis {given} is out of range for rank {rank}'")
    return found


def axis_order(order: Any, rank: int) -> tuple[int, ...]:
    """`order` of a load or store as a permutation of the array's axes."""
    if isinstance(order, str):
        if order not in ("C", "F"):
            raise _TypeError(f"Expected 'C' or 'F', got '{order}'")
        return tuple(range(rank)) if order == "C" else tuple(reversed(range(rank)))
    found = integers(order, "order")
    if len(found) != rank:
        raise _TypeError(f"Expected tuple of length {rank}, got {len(found)}")
    found = tuple(axis_of(axis, rank) for axis in found)
    for axis in found:
        if found.count(axis) > 1:
            raise _TypeError(f"Axis order must be a permutation, but axis {axis} is used at least twice")
    return found


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape; TileTypeError where there is none."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise _TypeError(f"Shapes are not broadcastable: {listed}") from None


def broadcastable(source: Sequence[int], target: Sequence[int]) -> bool:
    """Whether `source` can be broadcast to `target`."""
    return len(source) <= len(target) and all(
        size in (goal, 1) for size, goal in zip(reversed(source), reversed(target), strict=False)
    )
