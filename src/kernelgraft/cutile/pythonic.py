"""Python's builtins as a kernel means them, printing, and the questions that a block asks about itself."""

from __future__ import annotations

import builtins
import operator
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cuda.tile as ct
from cuda.tile._datatype import is_integral, is_signed

from kernelgraft.cutile import bits, elementwise, mathematics
from kernelgraft.cutile.arrays import ArrayList
from kernelgraft.cutile.dtypes import DType
from kernelgraft.cutile.faults import block, fault
from kernelgraft.cutile.making import astype, construct
from kernelgraft.cutile.promotion import dtype_of, promote, typed
from kernelgraft.cutile.rewriting import stand_ins
from kernelgraft.cutile.tiles import Tile, describe, int32, scalar

_TypeError = ct.TileTypeError


# --- the block ---


def _grid_axis(axis: Any) -> int:
    place = axis.__index__()
    if place not in (0, 1, 2):
        raise _TypeError(f"Axis must be 0, 1, or 2, but {place} was given.")
    return int(place)


def bid(axis: Any) -> Tile:
    """The running block's index along an axis of the grid."""
    return int32(block().index[_grid_axis(axis)])


def num_blocks(axis: Any) -> Tile:
    """The grid's size along an axis."""
    return int32(block().grid[_grid_axis(axis)])


def assume_divisible_by(x: Any, divisor: Any) -> Any:
    """x itself; a fault where the claim is wrong."""
    by = divisor.__index__()
    if not is_integral(dtype_of(x)) or (isinstance(x, Tile) and x.ndim):
        raise _TypeError(f"`assume_divisible_by` requires an integer scalar, got {describe(x)}")
    if by < 1:
        raise _TypeError(f"`assume_divisible_by` requires a positive divisor, got {by}")
    if x.__index__() % by:
        fault(f"{x.__index__()} is assumed to be divisible by {by}, which it is not")
    return x


# --- builtins ---


def counting(*arguments: Any) -> Iterator[Tile]:
    """`range`: scalars of at least 32 bits; a step that is not positive is refused, as by the compiler."""
    if not 1 <= len(arguments) <= 3:
        raise _TypeError(f"Invalid number of arguments: {len(arguments)}")
    dtype: DType = ct.int32
    for argument in arguments:
        its = dtype_of(argument)
        if not is_integral(its) or not is_signed(its) or (isinstance(argument, Tile) and argument.ndim):
            raise _TypeError(f"Expected a signed integer scalar, but got {describe(argument)}")
        dtype = promote(dtype, its)
    numbers = [argument.__index__() for argument in arguments]
    if len(numbers) == 3 and numbers[2] <= 0:
        raise _TypeError(f"Step must be positive, got {numbers[2]}")
    return (scalar(i, dtype) for i in range(*numbers))


def _extreme(name: str, builtin: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*values: Any, **options: Any) -> Any:
        if len(values) == 2 and not options and any(isinstance(v, Tile) for v in values):
            return elementwise.arithmetic(name, *values)
        return builtin(*values, **options)

    return extreme


def _constant_only(builtin: Callable[..., Any]) -> Callable[..., Any]:
    def number(x: Any = 0) -> Any:
        if isinstance(x, Tile):
            raise _TypeError(f"{builtin.__name__}() expects a constant argument")
        return builtin(x)

    return number


def _truth(x: Any = False) -> Any:
    if not isinstance(x, Tile):
        return bool(x)
    if x.ndim:
        raise _TypeError(f"Expected a scalar value, but given value has type {describe(x)}")
    return astype(x, ct.bool_)


def _either(name: Callable[..., Any], builtin: Callable[..., Any]) -> Callable[..., Any]:
    def function(*values: Any) -> Any:
        return name(*values) if any(isinstance(v, Tile) for v in values) else builtin(*values)

    return function


def _length(x: Any) -> Any:
    return int32(len(x)) if isinstance(x, ArrayList) else len(x)


def cdiv(x: Any, y: Any, /) -> Any:
    """The quotient rounded up."""
    return elementwise.arithmetic("cdiv", x, y)


# --- words ---


def print_(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Print tiles as nested lists."""
    builtins.print(*(_words(value) for value in values), sep=sep, end=end)


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(_words(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return str(value)


_SPECIFIER = re.compile(r"%(?:%|[0 #+-]?[0-9]*(?:\.[0-9]+)?(?:hh|h|ll|l)?([diuoxXeEfFgGaA]))")


def printf(format: str, *args: Any) -> None:
    """Print tiles by a C format of integers and floats."""
    waiting = [typed(value) for value in args]

    def one(match: re.Match[str]) -> str:
        kind = match[1]
        if kind is None:
            return "%"
        if not waiting:
            raise _TypeError("Not enough arguments for format string")
        tile = waiting.pop(0)
        if (kind in "eEfFgGaA") != tile.data.is_floating_point():
            raise _TypeError(f"Format {match[0]} got unexpected type of {describe(tile)}")
        spec = re.sub(r"hh|h|ll|l", "", match[0])
        spec = spec[:-1] + {"i": "d", "u": "d"}.get(kind, kind)
        return _c_format(tile.data.tolist(), spec)

    text = _SPECIFIER.sub(one, format)
    if waiting:
        raise _TypeError("Too many arguments for format string")
    builtins.print(text, end="")


def _c_format(values: Any, spec: str) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_c_format(value, spec) for value in values) + "]"
    return spec % values


def assert_(cond: Any, /, message: str | None = None) -> None:
    """A fault unless every element is true."""
    given = typed(cond)
    if given.dtype != ct.bool_:
        raise _TypeError(f"Type of condition must be bool, got {describe(given)}")
    if given.poison is not None and bool(given.poison.any()):
        fault(f"asserts what depends on {given.origin}")
    if not bool(given.data.all()):
        fault(f"assertion failed{': ' + message if message else ''}")


# --- compile time ---


def identity(value: Any, /) -> Any:
    """What is constant at compile time is itself here."""
    return value


def static_assert(condition: Any, message: Any = None, /) -> None:
    """TileStaticAssertionError if a condition on constants is false."""
    if not isinstance(condition, bool):
        raise _TypeError(f"static_assert() condition must be a boolean, not {describe(condition)}")
    if not condition:
        raise ct.TileStaticAssertionError("" if message is None else str(message))


def ensure_constant(value: Any, /) -> Any:
    """The value, if it is known at compile time."""
    if isinstance(value, Tile):
        raise ct.TileStaticAssertionError("Argument of ensure_constant() is not a compile-time constant")
    return value


def nothing() -> None:
    """Hints to the hardware about neighbouring launches: blocks run one after the other here."""


stand_ins.update(
    {
        range: counting,
        max: _extreme("max", max),
        min: _extreme("min", min),
        abs: _either(mathematics.absolute, abs),
        divmod: _either(elementwise.divmod_, divmod),
        float: _constant_only(float),
        int: _constant_only(int),
        bool: _truth,
        len: _length,
        print: print_,
        ct.cdiv: cdiv,
        ct.DType: lambda dtype: partial(construct, dtype),
        operator.not_: lambda x: bits.invert(_truth(x)) if isinstance(x, Tile) else not x,
    }
)
"""The builtins whose meaning differs inside a kernel."""
