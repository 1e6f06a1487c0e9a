"""Comparison, logic and shifts, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import is_float, is_integral

from kernelgraft.cutile.dtypes import ordered, wrap
from kernelgraft.cutile.elementwise import HOST, apply, made
from kernelgraft.cutile.promotion import category, dtype_of, meet, operand, typed
from kernelgraft.cutile.tiles import Tile

Tensor = torch.Tensor
_TypeError = ct.TileTypeError

_COMPARE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def compare(name: str, x: Any, y: Any, /) -> Any:
    """Two tiles or numbers → a tile of bool_."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return HOST[name](x, y)
    dtype = meet(x, y)
    a, b = ordered(operand(x, dtype), dtype), ordered(operand(y, dtype), dtype)
    return made(apply(_COMPARE[name], x, y, a, b), ct.bool_, x, y)


_BITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "and_": torch.bitwise_and,
    "or_": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


def bitwise(name: str, x: Any, y: Any, /) -> Any:
    """and, or, xor of integers or bools of the same dtype."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return HOST[name](x, y)
    one, other = dtype_of(x), dtype_of(y)
    if category(one) > 1 or category(other) > 1:
        raise _TypeError(
            "Bitwise operations require integers or booleans."
            " Use an explicit cuda.tile.bitcast() for non-integer operands."
        )
    if isinstance(x, Tile) and isinstance(y, Tile) and one != other:
        raise _TypeError(f"Bitwise operands must have same data type, got: {one} and {other}")
    dtype = meet(x, y)
    a, b = operand(x, dtype), operand(y, dtype)
    result = made(apply(_BITS[name], x, y, a, b), dtype, x, y)
    if result.poison is not None and dtype == ct.bool_ and name != "xor":
        result.poison = _undecided(name, typed(x), typed(y))
    return result


def _undecided(name: str, x: Tile, y: Tile) -> Tensor | None:
    """Where a poisoned operand still matters: not beside a determined False of `and`, or True of `or`."""
    decides = (lambda tile: ~tile.data) if name == "and_" else (lambda tile: tile.data)
    shape = torch.broadcast_shapes(x.data.shape, y.data.shape)
    settled = torch.zeros(shape, dtype=torch.bool)
    open_ = torch.zeros(shape, dtype=torch.bool)
    for tile in (x, y):
        sure = decides(tile) if tile.poison is None else decides(tile) & ~tile.poison
        settled = settled | sure
        if tile.poison is not None:
            open_ = open_ | tile.poison
    poison = open_ & ~settled
    return poison if bool(poison.any()) else None


def shift(name: str, x: Any, y: Any, /) -> Any:
    """x << y, x >> y of integers; the right shift is arithmetic for signed, logical for unsigned dtypes."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return HOST[name](x, y)
    for side, value in (("left", x), ("right", y)):
        if not is_integral(dtype_of(value)):
            raise _TypeError(f"Bitwise shift requires an integer for {side}-hand side, got: {dtype_of(value)}")
    dtype = meet(x, y)
    a, b = operand(x, dtype), operand(y, dtype)
    if name == "lshift":
        return made(wrap(apply(torch.bitwise_left_shift, x, y, a, b), dtype), dtype, x, y)
    data = apply(torch.bitwise_right_shift, x, y, a, b)
    if dtype == ct.uint64:
        data = torch.where(b == 0, a, data & ~(torch.full_like(data, -1) << (64 - b).clamp(0, 63)))
    return made(data, dtype, x, y)


def invert(x: Any, /) -> Any:
    """Every bit of an integer, or `not` of a bool."""
    if not isinstance(x, Tile):
        return HOST["bitwise_not"](x)
    if is_float(x._dtype):
        raise _TypeError("Float inputs are not supported")
    return made(wrap(torch.bitwise_not(x.data), x._dtype), x._dtype, x)
