"""Atomic operations: one element after the other, so that an element named twice is updated twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.arrays import TiledView
from kernelgraft.cutile.bits import bitwise, compare
from kernelgraft.cutile.dtypes import DType, decode, encode
from kernelgraft.cutile.elements import Elements, locate, locate_offset, value_for
from kernelgraft.cutile.elementwise import arithmetic
from kernelgraft.cutile.faults import fault
from kernelgraft.cutile.mathematics import where
from kernelgraft.cutile.memory import said, view_starts, view_value
from kernelgraft.cutile.promotion import typed
from kernelgraft.cutile.tiles import Tile

Tensor = torch.Tensor
_TypeError = ct.TileTypeError
Update = Callable[[Tile, Tile], Tile]

_INTEGERS = (ct.int32, ct.int64, ct.uint32, ct.uint64)
_NUMBERS = (*_INTEGERS, ct.float32, ct.float64)

UPDATES: dict[str, tuple[Update, tuple[DType, ...]]] = {
    "xchg": (lambda old, new: new, _NUMBERS),
    "add": (lambda old, new: arithmetic("add", old, new), (*_NUMBERS, ct.float16, ct.bfloat16)),
    "max": (lambda old, new: arithmetic("max", old, new), _INTEGERS),
    "min": (lambda old, new: arithmetic("min", old, new), _INTEGERS),
    "and": (lambda old, new: bitwise("and_", old, new), _INTEGERS),
    "or": (lambda old, new: bitwise("or_", old, new), _INTEGERS),
    "xor": (lambda old, new: bitwise("xor", old, new), _INTEGERS),
}
"""Operation → what it makes of old value and operand, and the dtypes of arrays that it takes."""


def _checked(dtype: DType, allowed: tuple[DType, ...], what: str = "array") -> None:
    if dtype not in allowed:
        raise _TypeError(f"Unsupported {what} dtype: {dtype}")


def _settled(elements: Elements, *values: Tile) -> None:
    for value in values:
        if value.poison is not None and bool(elements.chosen(value.poison).any()):
            fault(f"updates {said(elements.array)} with what depends on {value.origin}")
    written = elements.array.memory.written
    if written is not None and not bool(written[elements.chosen(elements.places)].all()):
        fault(f"updates memory of {said(elements.array)} that was never written")


def _update(elements: Elements, operands: tuple[Tile, ...], change: Callable[..., Tile]) -> Tensor:
    """Apply `change(old, *operands)` to each accessed element in turn; the old values in one dimension."""
    memory, dtype = elements.array.memory, elements.array.dtype
    _settled(elements, *operands)
    places = elements.chosen(elements.places)
    values = [elements.chosen(value.data) for value in operands]
    old = decode(memory.flat[places], dtype)
    if len(torch.unique(places)) == len(places):
        new = change(Tile(old, dtype), *(Tile(value, dtype) for value in values))
        memory.flat[places] = encode(new.data, dtype)
        return old
    for i, place in enumerate(places.tolist()):
        old[i] = decode(memory.flat[place], dtype)
        new = change(Tile(old[i], dtype), *(Tile(value[i], dtype) for value in values))
        memory.flat[place] = encode(new.data, dtype)
    return old


def _result(elements: Elements, old: Tensor, fill: Tensor, determined: bool) -> Tile:
    dtype = elements.array.dtype
    if elements.active is None:
        return Tile(old.reshape(elements.shape), dtype)
    data = fill.expand(elements.shape).clone()
    data[elements.active] = old
    poison = None if determined else ~elements.active
    return Tile(data, dtype, poison, None if determined else "an atomic operation that was masked or out of bounds")


def _operand(value: Any, elements: Elements, bits: bool) -> Tile:
    dtype = elements.array.dtype
    if elements.shape and not isinstance(value, Tile):
        # The compiler broadcasts before it casts, and a broadcast number is loosely typed no longer.
        value = typed(value)
    if bits and typed(value).dtype != dtype:
        raise _TypeError(
            f"Bitwise atomic read-modify-write operations require the update dtype ({typed(value).dtype})"
            f" to exactly match the target dtype ({dtype})"
        )
    return value_for(value, elements, "Update", "Update is incompatible with the target dtype")


def _read_modify_write(name: str, elements: Elements, update: Any) -> Tile:
    change, allowed = UPDATES[name]
    _checked(elements.array.dtype, allowed)
    value = _operand(update, elements, name in ("and", "or", "xor"))
    return _result(elements, _update(elements, (value,), change), value.data, determined=False)


def atomic(
    name: str,
    array: Any,
    indices: Any,
    update: Any,
    /,
    *,
    check_bounds: bool = True,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> Tile:
    """Read, change, write the elements at `indices`; the old values."""
    return _read_modify_write(name, locate(array, indices, check_bounds), update)


def atomic_offset(
    name: str,
    raw: Any,
    offset: Any,
    update: Any,
    /,
    *,
    mask: Any = None,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> Tile:
    """Read, change, write the elements at offsets; the old values."""
    return _read_modify_write(name, locate_offset(raw, offset, mask), update)


def _compare_and_swap(elements: Elements, expected: Any, desired: Any) -> Tile:
    _checked(elements.array.dtype, _NUMBERS)
    context = "Stored value is incompatible with array's dtype"
    wanted = value_for(expected, elements, "Expected value", context)
    new = value_for(desired, elements, "Desired value", context)

    def change(old: Tile, like: Tile, replacement: Tile) -> Tile:
        return where(compare("eq", old, like), replacement, old)

    return _result(elements, _update(elements, (wanted, new), change), wanted.data, determined=True)


def atomic_cas(
    array: Any,
    indices: Any,
    expected: Any,
    desired: Any,
    /,
    *,
    check_bounds: bool = True,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> Tile:
    """Write `desired` where an element equals `expected`; the old values."""
    return _compare_and_swap(locate(array, indices, check_bounds), expected, desired)


def atomic_cas_offset(
    raw: Any,
    offset: Any,
    expected: Any,
    desired: Any,
    /,
    *,
    mask: Any = None,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> Tile:
    """`atomic_cas` at offsets."""
    return _compare_and_swap(locate_offset(raw, offset, mask), expected, desired)


def atomic_store(name: str, view: TiledView, index: Any, update: Any, /) -> None:
    """Change one tile of a tiled view element by element; what hangs over its end is left out."""
    change, allowed = UPDATES[name]
    _checked(view.dtype, allowed, "tiled view")
    starts = view_starts(view, index)
    axes = [
        Tile((start + torch.arange(size)).reshape([-1 if j == i else 1 for j in range(len(starts))]), ct.int64)
        for i, (start, size) in enumerate(zip(starts, view.full_shape, strict=True))
    ]
    elements = locate(view.array, tuple(axes), True)
    if elements.active is not None and not bool(elements.active.any()):
        fault(f"{name} of a tile at {tuple(starts)} lies entirely outside {said(view.array)}")
    value = view_value(view, update, "Update")
    _update(elements, (_operand(value, elements, name in ("and", "or", "xor")),), change)
