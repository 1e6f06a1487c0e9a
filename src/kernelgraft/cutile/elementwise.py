"""Element by element: arithmetic, comparison, bits, mathematics, choice."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import RoundingMode
from cuda.tile._datatype import is_arithmetic, is_float, is_integral, is_unrestricted_float

from kernelgraft.cutile.dtypes import MASKS, DType, ordered, wrap
from kernelgraft.cutile.promotion import broadcast, dtype_of, meet, operand, typed
from kernelgraft.cutile.rounding import convert, round_directed
from kernelgraft.cutile.tiles import Tile, fitted, spread

Tensor = torch.Tensor
_TypeError = ct.TileTypeError

_BASIC = {RoundingMode.RN, RoundingMode.RZ, RoundingMode.RM, RoundingMode.RP}
ROUNDING: dict[str, set[RoundingMode]] = {
    "add": _BASIC,
    "sub": _BASIC,
    "mul": _BASIC,
    "truediv": _BASIC | {RoundingMode.FULL, RoundingMode.APPROX},
    "sqrt": _BASIC | {RoundingMode.APPROX},
    "tanh": {RoundingMode.FULL, RoundingMode.APPROX},
    "exp": {RoundingMode.FULL, RoundingMode.APPROX},
}
"""Operation → the rounding modes that it takes."""

_FLUSHING = {"add", "sub", "mul", "truediv", "max", "min", "exp2", "sqrt", "rsqrt"}
_SMALLEST_NORMAL = 2.0**-126

HOST: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "cdiv": lambda x, y: -((-x) // y),
    "mod": operator.mod,
    "pow": operator.pow,
    "atan2": math.atan2,
    "max": max,
    "min": min,
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "abs": abs,
    "neg": operator.neg,
    "exp2": lambda x: 2**x,
    "rsqrt": lambda x: x**-0.5,
    "bitwise_not": lambda x: not x if isinstance(x, bool) else ~x,
    **{
        name: getattr(math, name)
        for name in [
            "exp",
            "sin",
            "sinh",
            "cos",
            "cosh",
            "tan",
            "tanh",
            "log",
            "log2",
            "sqrt",
            "floor",
            "ceil",
            "isnan",
        ]
    },
}
"""What an operation on Python numbers alone gives: a Python number, as the compiler folds it."""


def check_modes(name: str, dtype: DType, rounding_mode: RoundingMode | None, flush_to_zero: bool) -> None:
    """TileTypeError where cuTile has no such rounding mode or flushing for this operation and dtype."""
    if rounding_mode is not None:
        if rounding_mode not in ROUNDING.get(name, ()):
            raise _TypeError(f"Rounding mode {rounding_mode.value} is not supported for {name}")
        if not is_unrestricted_float(dtype):
            raise _TypeError(f"Rounding mode can only be used for unrestricted float types, but got {dtype}")
        if rounding_mode in (RoundingMode.APPROX, RoundingMode.FULL) and dtype != ct.float32:
            raise _TypeError(f"Rounding mode {rounding_mode.value} can only be used for float32 type, but got {dtype}")
    if flush_to_zero:
        if name not in _FLUSHING:
            raise _TypeError(f"Flush to zero is not supported for {name}")
        if dtype != ct.float32:
            raise _TypeError(f"Flush to zero can only be used for float32 type, but got {dtype}")


def flush(data: Tensor) -> Tensor:
    """Subnormal float32 values → zero of the same sign."""
    return torch.where(data.abs() < _SMALLEST_NORMAL, data * 0.0, data)


def made(data: Tensor, dtype: DType, *sources: Any) -> Tile:
    """A tile with the poison of the tiles that it was computed from."""
    poison, origin = spread(*sources)
    return Tile(data, dtype, fitted(poison, data.shape), origin)


def apply(function: Callable[..., Tensor], x: Any, y: Any, a: Tensor, b: Tensor) -> Tensor:
    """`function(a, b)`, with cuTile's words where the shapes do not fit."""
    try:
        return function(a, b)
    except RuntimeError:
        broadcast(typed(x).shape, typed(y).shape)
        raise


# --- arithmetic ---


def _divide_integers(a: Tensor, b: Tensor, dtype: DType, kind: str) -> tuple[Tensor, Tensor | None]:
    """Floor or ceiling quotient or Python's remainder; and where the divisor was zero (an undetermined result)."""
    zero = b == 0
    undetermined = None
    if bool(zero.any()):
        b = torch.where(zero, torch.ones_like(b), b)
        undetermined = zero
    if dtype == ct.uint64:
        high, low = a.numpy().view("uint64"), b.numpy().view("uint64")
        quotient = high // low
        remainder = high - quotient * low
        found = {"mod": remainder, "cdiv": quotient + (remainder != 0), "floordiv": quotient}[kind]
        return torch.from_numpy(found.astype("uint64").view("int64").reshape(found.shape)), undetermined
    wide = torch.int64 if a.dtype != torch.int64 else a.dtype
    left, right = a.to(wide), b.to(wide)
    if kind == "mod":
        result = torch.remainder(left, right)
    else:
        result = torch.div(left, right, rounding_mode="floor")
        if kind == "cdiv":
            result = result + (result * right != left)
    return wrap(result.to(a.dtype), dtype), undetermined


def _floats(name: str, a: Tensor, b: Tensor, propagate_nan: bool) -> Tensor:
    if name == "max":
        return torch.maximum(a, b) if propagate_nan else torch.fmax(a, b)
    if name == "min":
        return torch.minimum(a, b) if propagate_nan else torch.fmin(a, b)
    if name == "floordiv":
        return torch.floor(torch.true_divide(a, b))
    if name == "mod":
        # Exact, unlike torch.remainder: C's remainder, moved to the divisor's side of zero.
        rest = torch.fmod(a, b)
        return torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    function = _FLOAT.get(name)
    if function is None:
        raise _TypeError(f"Missing binary arithmetic implementation for {name}, float")
    return function(a, b)


_FLOAT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "pow": torch.pow,
    "atan2": torch.atan2,
}
_INTEGER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}


def _integers(name: str, a: Tensor, b: Tensor, dtype: DType) -> tuple[Tensor, Tensor | None]:
    if name in ("max", "min"):
        choose = torch.maximum if name == "max" else torch.minimum
        return ordered(choose(ordered(a, dtype), ordered(b, dtype)), dtype), None
    if name in ("floordiv", "cdiv", "mod"):
        return _divide_integers(a, b, dtype, name)
    function = _INTEGER.get(name)
    if function is None:
        raise _TypeError(f"Missing binary arithmetic implementation for {name}, int")
    result = function(a, b)
    return (wrap(result, dtype) if dtype in MASKS else result), None


def arithmetic(
    name: str,
    x: Any,
    y: Any,
    /,
    *,
    rounding_mode: RoundingMode | None = None,
    flush_to_zero: bool = False,
    propagate_nan: bool = False,
) -> Any:
    """Two tiles or numbers → a tile of the common dtype and shape (a number where both are numbers)."""
    left, right = isinstance(x, Tile), isinstance(y, Tile)
    if name != "mod":
        for side, value in (("Left", x), ("Right", y)):
            if not is_arithmetic(dtype_of(value)):
                raise _TypeError(f"{side}-hand side has non-arithmetic dtype {dtype_of(value)}")
    if not left and not right:
        return HOST[name](x, y)
    dtype = meet(x, y, name == "truediv")
    if dtype == ct.bool_:
        if name == "mod":
            raise _TypeError("Modulo operation does not support bool")
        raise _TypeError(f"Binary arithmetic op `{name}` does not support bool, please cast bool to int")
    if rounding_mode is not None or flush_to_zero:
        check_modes(name, dtype, rounding_mode, flush_to_zero)
    a, b = operand(x, dtype), operand(y, dtype)
    undetermined = None
    if flush_to_zero:
        a, b = flush(a), flush(b)
    if not a.is_floating_point():
        try:
            data, undetermined = _integers(name, a, b, dtype)
        except (RuntimeError, ValueError):
            broadcast(a.shape, b.shape)
            raise
    elif rounding_mode in (RoundingMode.RZ, RoundingMode.RM, RoundingMode.RP):
        exact = apply(partial(_floats, name, propagate_nan=False), x, y, a.double(), b.double())
        data = round_directed(exact, dtype, rounding_mode)
    else:
        data = apply(partial(_floats, name, propagate_nan=propagate_nan), x, y, a, b)
    if flush_to_zero:
        data = flush(data)
    if undetermined is not None:
        return made(data, dtype, x, y, Tile(data, dtype, undetermined, "a division by zero"))
    return made(data, dtype, x, y)


def power(x: Any, y: Any, /) -> Any:
    """x ** y; a float to an integer tile of at most 32 bits keeps the float's dtype."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return x**y
    base, exponent = dtype_of(x), dtype_of(y)
    if is_unrestricted_float(base) and is_integral(exponent) and exponent.bitwidth <= 32 and exponent != ct.uint32:
        a = operand(x, base)
        data = apply(torch.pow, x, y, a.double(), operand(y, exponent).double())
        return made(convert(data, ct.float64, base), base, x, y)
    return arithmetic("pow", x, y)


def divmod_(x: Any, y: Any, /) -> tuple[Any, Any]:
    """(x // y, x % y) of integers."""
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return divmod(x, y)
    if is_float(meet(x, y)):
        raise _TypeError("divmod() is not implemented for floating point values")
    return arithmetic("floordiv", x, y), arithmetic("mod", x, y)
