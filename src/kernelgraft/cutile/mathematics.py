"""Functions of one tile, and the choice between two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import RoundingMode
from cuda.tile._datatype import is_boolean, is_float, is_integral, is_signed

from kernelgraft.cutile.dtypes import DType, wrap
from kernelgraft.cutile.elementwise import HOST, check_modes, flush, made
from kernelgraft.cutile.promotion import broadcast, loose_dtype, meet, operand, typed
from kernelgraft.cutile.rounding import round_directed
from kernelgraft.cutile.tiles import Tile, describe, fitted, spread

Tensor = torch.Tensor
_TypeError = ct.TileTypeError

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def unary(name: str, x: Any, /, *, rounding_mode: RoundingMode | None = None, flush_to_zero: bool = False) -> Any:
    """A function of floats; bools and integers become float32 first, except that floor and ceil refuse them."""
    if not isinstance(x, Tile):
        loose_dtype(x)
        return HOST[name](x)
    dtype = x._dtype
    if not is_float(dtype):
        if name in ("floor", "ceil"):
            raise _TypeError(f"{'Boolean' if is_boolean(dtype) else 'Integer'} inputs are not supported")
        dtype = ct.float32
    if rounding_mode is not None or flush_to_zero:
        check_modes(name, dtype, rounding_mode, flush_to_zero)
    data = operand(x, dtype)
    if flush_to_zero:
        data = flush(data)
    if rounding_mode in (RoundingMode.RZ, RoundingMode.RM, RoundingMode.RP):
        data = round_directed(_UNARY[name](data.double()), dtype, rounding_mode)
    else:
        data = _UNARY[name](data)
    return made(flush(data) if flush_to_zero else data, dtype, x)


def absolute(x: Any, /) -> Any:
    """|x|, in x's dtype."""
    if not isinstance(x, Tile):
        return abs(x)
    return x if x._dtype == ct.bool_ or _unsigned(x._dtype) else made(torch.abs(x.data), x._dtype, x)


def _unsigned(dtype: DType) -> bool:
    return is_integral(dtype) and not is_signed(dtype)


def negative(x: Any, /) -> Any:
    """-x; bools become int32 first."""
    if not isinstance(x, Tile):
        return -x
    dtype = ct.int32 if x._dtype == ct.bool_ else x._dtype
    return made(wrap(torch.neg(operand(x, dtype)), dtype), dtype, x)


def isnan(x: Any, /) -> Any:
    """Where a float is NaN."""
    if not isinstance(x, Tile):
        return math.isnan(x)
    if not is_float(x._dtype):
        raise _TypeError(f"Unexpected input type {describe(x)}")
    return made(torch.isnan(x.data), ct.bool_, x)


def where(cond: Any, x: Any, y: Any, /) -> Tile:
    """x where `cond` is not zero, otherwise y, in their common dtype."""
    chosen = typed(cond)
    tiles = isinstance(x, Tile) or isinstance(y, Tile)
    dtype = meet(x, y) if tiles else meet(typed(x), y)
    test = chosen.data if chosen._dtype == ct.bool_ else chosen.data != 0
    a, b = operand(x, dtype), operand(y, dtype)
    try:
        data = torch.where(test, a, b)
    except RuntimeError:
        broadcast(chosen.shape, a.shape, b.shape)
        raise
    poison, origin = spread(cond, x, y)
    if poison is not None:
        none = torch.tensor(False)
        left = x.poison if isinstance(x, Tile) and x.poison is not None else none
        right = y.poison if isinstance(y, Tile) and y.poison is not None else none
        poison = torch.where(test, left, right)
        if chosen.poison is not None:
            poison = poison | chosen.poison
        poison = fitted(poison, data.shape) if bool(poison.any()) else None
    return Tile(data, dtype, poison, origin)
