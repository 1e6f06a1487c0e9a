"""Reductions and scans: the usual ones by one call of torch where that means the same, all others as a tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import RoundingMode
from cuda.tile._datatype import is_arithmetic, is_float

from kernelgraft.cutile.dtypes import MASKS, DType, ordered, wrap
from kernelgraft.cutile.elementwise import arithmetic, check_modes
from kernelgraft.cutile.making import astype
from kernelgraft.cutile.promotion import axis_of, broadcast, implicit, integers, typed
from kernelgraft.cutile.shaping import expanded, flat
from kernelgraft.cutile.tiles import Tile, describe

Tensor = torch.Tensor
_TypeError = ct.TileTypeError
Combine = Callable[[tuple[Tile, ...], tuple[Tile, ...]], tuple[Tile, ...]]


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(rank))
    found = sorted(axis_of(a, rank) for a in integers(axis, "axis"))
    for one, other in itertools.pairwise(found):
        if one == other:
            raise _TypeError(f"Repeated reduction axis {one}")
    return tuple(found)


def _reduced_poison(x: Tile, axes: tuple[int, ...], keepdims: bool) -> Tensor | None:
    if x.poison is None:
        return None
    poison = x.poison.any(dim=axes, keepdim=keepdims) if axes else x.poison
    return poison if bool(poison.any()) else None


def _fold(xs: tuple[Tile, ...], axis: int, combine: Combine) -> tuple[Tile, ...]:
    """Combine neighbours along `axis` until one is left: a tree, whose every step rounds to the tile's dtype."""
    while xs[0].shape[axis] > 1:
        halves = [
            tuple(
                Tile(
                    x.data.unflatten(axis, (-1, 2)).select(axis + 1, side),
                    x._dtype,
                    None if x.poison is None else x.poison.unflatten(axis, (-1, 2)).select(axis + 1, side),
                    x.origin,
                )
                for x in xs
            )
            for side in (0, 1)
        ]
        xs = combine(halves[0], halves[1])
    return xs


def reduce_simple(
    name: str,
    x: Any,
    /,
    axis: Any = None,
    *,
    keepdims: bool = False,
    rounding_mode: RoundingMode | None = None,
    flush_to_zero: bool = False,
    propagate_nan: bool = False,
) -> Tile:
    """sum, prod, max, min over some or all axes, in the tile's dtype (bools as int32)."""
    given = typed(x)
    if not is_arithmetic(given._dtype):
        raise _TypeError(f"Non-arithmetic dtype {given._dtype} is unsupported for reduction")
    check_modes(name, given._dtype, rounding_mode, flush_to_zero)
    if given._dtype == ct.bool_:
        given = astype(given, ct.int32)
    dtype, axes = given._dtype, _axes(axis, given.ndim)
    if not axes:
        return given
    plain = rounding_mode in (None, RoundingMode.RN) and not flush_to_zero
    data = _quick(name, given.data, dtype, axes, keepdims, propagate_nan) if plain else None
    if data is None:
        modes = {"rounding_mode": rounding_mode} if name in ("add", "mul") else {"propagate_nan": propagate_nan}

        def combine(one: tuple[Tile, ...], other: tuple[Tile, ...]) -> tuple[Tile, ...]:
            return (arithmetic(name, one[0], other[0], flush_to_zero=flush_to_zero, **modes),)

        clean = Tile(given.data, dtype)
        for a in axes:
            clean = _fold((clean,), a, combine)[0]
        shape = [1 if i in axes else size for i, size in enumerate(given.shape) if keepdims or i not in axes]
        data = clean.data.reshape(shape)
    return Tile(data, dtype, _reduced_poison(given, axes, keepdims), given.origin)


def _quick(
    name: str, data: Tensor, dtype: DType, axes: tuple[int, ...], keepdims: bool, propagate_nan: bool
) -> Tensor | None:
    """The reduction by one call of torch, where that means the same; None where it has to be done step by step."""
    if name in ("max", "min"):
        function = torch.amax if name == "max" else torch.amin
        if not is_float(dtype):
            return ordered(function(ordered(data, dtype), axes, keepdim=keepdims), dtype)
        found = function(data, axes, keepdim=keepdims)
        if propagate_nan or not bool(found.isnan().any()):
            return found
        worst = -torch.inf if name == "max" else torch.inf
        return function(data.nan_to_num(nan=worst, posinf=torch.inf, neginf=-torch.inf), axes, keepdim=keepdims)
    if is_float(dtype) and dtype not in (ct.float32, ct.float64):
        return None
    if name == "add":
        found = torch.sum(data, axes, keepdim=keepdims, dtype=data.dtype)
    else:
        found = data
        for a in reversed(axes):
            found = torch.prod(found, a, keepdim=keepdims, dtype=data.dtype)
    return wrap(found, dtype) if dtype in MASKS else found


def argument(name: str, x: Any, /, axis: Any = None, *, keepdims: bool = False, propagate_nan: bool = False) -> Tile:
    """argmax and argmin: the smallest index of the best value, as int32; NaN is worst, or best if it propagates."""
    given = typed(x)
    final: tuple[int, ...] | None = None
    if axis is None:
        final = (1,) * given.ndim if keepdims else ()
        given = flat(given, (-1,))
        place = 0
    else:
        place = axis_of(axis, given.ndim)
    best = torch.argmax if name == "argmax" else torch.argmin
    values = ordered(given.data, given._dtype)
    values = values.to(torch.int32) if values.dtype == torch.bool else values
    found = best(values, place, keepdim=keepdims)
    if values.is_floating_point():
        nan = values.isnan()
        if bool(nan.any()):
            found = _argument_of_nan(name, values, nan, place, keepdims, propagate_nan)
    poison = _reduced_poison(given, (place,), keepdims)
    result = Tile(found.to(torch.int32), ct.int32, poison, given.origin)
    return result if final is None else flat(result, final)


def _argument_of_nan(name: str, values: Tensor, nan: Tensor, place: int, keepdims: bool, propagate_nan: bool) -> Tensor:
    sign = 1.0 if name == "argmax" else -1.0
    # A rank that orders NaN below (or above) every number, the infinities included.
    number = torch.where(nan, 0.0, values.double() * sign)
    order = torch.argsort(number, dim=place, stable=True)
    ranks = torch.zeros_like(number)
    climbing = number.gather(place, order)
    steps = torch.ones_like(climbing)
    later = climbing.narrow(place, 1, climbing.shape[place] - 1)
    before = climbing.narrow(place, 0, climbing.shape[place] - 1)
    steps.narrow(place, 1, climbing.shape[place] - 1).copy_((later != before).double())
    ranks.scatter_(place, order, steps.cumsum(place))
    ranks = torch.where(nan, 1e18 if propagate_nan else -1.0, ranks)
    return torch.argmax(ranks, place, keepdim=keepdims)


# --- custom reductions and scans ---


def _operands(x: Any, identity: Any, what: str) -> tuple[tuple[Tile, ...], bool]:
    together = isinstance(x, tuple)
    xs = tuple(typed(item) for item in x) if together else (typed(x),)
    if not xs:
        raise _TypeError(f"Need at least one input value to {what}")
    if together and (not isinstance(identity, tuple) or len(identity) != len(xs)):
        count = len(identity) if isinstance(identity, tuple) else 1
        raise _TypeError(f"Number of identity values ({count}) must match the number of input tiles ({len(xs)})")
    shape = broadcast(*(item.shape for item in xs))
    return tuple(expanded(item, shape) for item in xs), together


def _combiner(function: Callable[..., Any], xs: tuple[Tile, ...], together: bool, what: str) -> Combine:
    from kernelgraft.cutile.rewriting import adapt_callable  # the kernel's own function runs rewritten, like the kernel

    combine = adapt_callable(function)
    dtypes = [x._dtype for x in xs]

    def body(one: tuple[Tile, ...], other: tuple[Tile, ...]) -> tuple[Tile, ...]:
        found = combine(*one, *other)
        if together and not isinstance(found, tuple):
            raise _TypeError(f"{what} function returns a value of type {describe(found)}, but a tuple was expected")
        results = found if together else (found,)
        if len(results) != len(dtypes):
            raise _TypeError(
                f"{what} function must return a tuple of {len(dtypes)} values to match the number of inputs,"
                f" but a tuple of length {len(results)} was found."
            )
        cast = []
        for result, dtype, like in zip(results, dtypes, one, strict=True):
            tile = implicit(result, dtype, f"{what} function returned a tile of unexpected dtype")
            cast.append(tile if tile.shape == like.shape else expanded(tile, like.shape))
        return tuple(cast)

    return body


def reduce(x: Any, /, axis: Any, func: Callable[..., Any], identity: Any, *, keepdims: bool = False) -> Any:
    """A reduction by a function of two scalars (2N for a tuple of N tiles), run on whole halves at once."""
    xs, together = _operands(x, identity, "reduce")
    place = axis_of(axis, xs[0].ndim)
    found = _fold(xs, place, _combiner(func, xs, together, "Reduction"))
    if not keepdims:
        shape = tuple(size for i, size in enumerate(found[0].shape) if i != place)
        found = tuple(flat(item, shape) for item in found)
    return found if together else found[0]


def scan(x: Any, /, axis: Any, func: Callable[..., Any], identity: Any, *, reverse: bool = False) -> Any:
    """The inclusive prefixes under a function of two scalars (2N for a tuple of N tiles)."""
    xs, together = _operands(x, identity, "scan")
    place = axis_of(axis, xs[0].ndim)
    found = _prefixes(xs, place, reverse, _combiner(func, xs, together, "Scan"))
    return found if together else found[0]


def _slice(x: Tile, axis: int, start: int, length: int) -> Tile:
    return Tile(
        x.data.narrow(axis, start, length),
        x._dtype,
        None if x.poison is None else x.poison.narrow(axis, start, length),
        x.origin,
    )


def _flip(x: Tile, axis: int) -> Tile:
    return Tile(x.data.flip(axis), x._dtype, None if x.poison is None else x.poison.flip(axis), x.origin)


def _prefixes(xs: tuple[Tile, ...], axis: int, reverse: bool, combine: Combine) -> tuple[Tile, ...]:
    size, distance = xs[0].shape[axis], 1
    if reverse:
        xs = tuple(_flip(x, axis) for x in xs)
    while distance < size:
        earlier = tuple(_slice(x, axis, 0, size - distance) for x in xs)
        later = tuple(_slice(x, axis, distance, size - distance) for x in xs)
        joined = combine(earlier, later)
        xs = tuple(_join(_slice(x, axis, 0, distance), tail, axis) for x, tail in zip(xs, joined, strict=True))
        distance *= 2
    return tuple(_flip(x, axis) for x in xs) if reverse else xs


def _join(head: Tile, tail: Tile, axis: int) -> Tile:
    poison = None
    if head.poison is not None or tail.poison is not None:
        masks = [torch.zeros(t.shape, dtype=torch.bool) if t.poison is None else t.poison for t in (head, tail)]
        poison = torch.cat(masks, axis)
    return Tile(torch.cat([head.data, tail.data], axis), head._dtype, poison, head.origin or tail.origin)


def scan_simple(
    name: str,
    x: Any,
    /,
    axis: Any = 0,
    *,
    reverse: bool = False,
    rounding_mode: RoundingMode | None = None,
    flush_to_zero: bool = False,
) -> Tile:
    """cumsum and cumprod along one axis, in the tile's dtype (bools as int32)."""
    given = typed(x)
    if not is_arithmetic(given._dtype):
        raise _TypeError(f"Non-arithmetic dtype {given._dtype} is unsupported for prefix scans")
    check_modes(name, given._dtype, rounding_mode, flush_to_zero)
    if given._dtype == ct.bool_:
        given = astype(given, ct.int32)

    def combine(one: tuple[Tile, ...], other: tuple[Tile, ...]) -> tuple[Tile, ...]:
        found = arithmetic(name, one[0], other[0], rounding_mode=rounding_mode, flush_to_zero=flush_to_zero)
        return (found,)

    return _prefixes((given,), axis_of(axis, given.ndim), reverse, combine)[0]
