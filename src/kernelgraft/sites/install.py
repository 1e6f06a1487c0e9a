"""Put a function in the place of one method of one module, and take it out again.

The function is bound as a method in the instance's dictionary, so that the class, other instances and the module tree
are untouched and a deep copy gets it bound to the copy. If accelerate's hook sits on the module, the function goes
under it; so it does under a plain function that keeps the module's method in a closure, which is how transformers puts
tensor parallelism around a module.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from kernelgraft.errors import RebindError


class _Absent:
    """Marks an attribute that was not there; a class, because a deep copy keeps its identity."""


_ABSENT: Any = _Absent


def current(module: nn.Module, method_name: str = "forward") -> types.FunctionType:
    """The plain function, taking self, that the module runs now under that name, below hooks and wrappers.

    Raises RebindError if the name holds something else than a method of this module.
    """
    slot = _slot(module, method_name)
    found = module.__dict__.get(slot, _ABSENT)
    if (cell := wrapped(module, found)) is not None:
        found = cell.cell_contents
    if found is _ABSENT:
        found = getattr(type(module), method_name, None)
    elif isinstance(found, types.MethodType) and found.__self__ is module:
        found = found.__func__
    else:
        found = None
    if not isinstance(found, types.FunctionType):
        raise RebindError(
            f"`{type(module).__name__}.{method_name}` was replaced by something that is no method; undo that first"
        )
    return found


class Undo:
    """Takes an installed function out again: calling it restores exactly what was there, wherever it sits now."""

    def __init__(
        self, module: nn.Module, method_name: str, installed: types.MethodType, slot: str, previous: Any
    ) -> None:
        self._module = module
        self._method_name = method_name
        self._installed = installed
        self._slot = slot
        self._previous = previous
        self._done = False

    @property
    def active(self) -> bool:
        """True while the installed function is what the module runs below hooks and wrappers."""
        held = self._module.__dict__.get(_slot(self._module, self._method_name))
        cell = wrapped(self._module, held)
        return not self._done and (held if cell is None else cell.cell_contents) is self._installed

    def __call__(self) -> None:
        """Restore. A second call does nothing. Raises RebindError if a later replacement hides what was installed."""
        if self._done:
            return
        module, name = self._module, self._method_name
        inside = module.__dict__
        held = [s for s in dict.fromkeys((self._slot, name, _OLD)) if inside.get(s) is self._installed]
        cells = [
            c for s in (name, _OLD) if s in inside for c in _cells(inside[s]) if c.cell_contents is self._installed
        ]
        if not held and not cells:
            raise RebindError(
                f"`{type(module).__name__}.{name}` was replaced after kernelgraft; undo the later replacement first"
            )
        # What a hook or wrapper on top holds is a method, so an absent attribute becomes the class's method there.
        as_method = self._previous
        if as_method is _ABSENT:
            as_method = types.MethodType(getattr(type(module), name), module)
        for slot in held:
            if self._previous is _ABSENT and slot == name:
                del inside[slot]
            else:
                inside[slot] = as_method
        for cell in cells:
            cell.cell_contents = as_method
        for wrapper in _chain(inside.get(name)):
            if getattr(wrapper, "__dict__", {}).get("__wrapped__") is self._installed:
                wrapper.__dict__["__wrapped__"] = as_method
        self._done = True


def install(module: nn.Module, method_name: str, function: Callable[..., Any]) -> Undo:
    """Make `function` (taking self) the module's method of that name, below a hook or wrapper if there is one.

    Returns the way back. Several installs on one method are undone in reverse order.
    """
    slot = _slot(module, method_name)
    previous = module.__dict__.get(slot, _ABSENT)
    method = types.MethodType(function, module)
    if (cell := wrapped(module, previous)) is not None:
        previous, cell.cell_contents = cell.cell_contents, method
    else:
        module.__dict__[slot] = method
    return Undo(module, method_name, method, slot, previous)


_OLD = "_old_forward"
"""Where accelerate keeps the forward that its hook calls."""


def _slot(module: nn.Module, method_name: str) -> str:
    """The instance attribute that holds the method's code."""
    hooked = method_name == "forward" and "_hf_hook" in module.__dict__ and _OLD in module.__dict__
    return _OLD if hooked else method_name


def wrapped(module: nn.Module, value: Any) -> types.CellType | None:
    """The closure cell in which a plain function keeps the one method of this module that it calls; else None."""
    if not isinstance(value, types.FunctionType):
        return None
    cells: dict[int, types.CellType] = {}
    left, seen = [value], set()
    while left:
        function = left.pop()
        if function in seen:
            continue
        seen.add(function)
        for cell in _cells(function):
            held = cell.cell_contents
            if isinstance(held, types.MethodType) and held.__self__ is module:
                cells[id(cell)] = cell
            elif isinstance(held, types.FunctionType):
                left.append(held)
    return next(iter(cells.values())) if len(cells) == 1 else None


def _chain(value: Any) -> Iterator[Any]:
    """`value`, and what it wraps."""
    seen: list[Any] = []
    while value is not None and not any(value is s for s in seen):
        seen.append(value)
        yield value
        value = getattr(value, "__dict__", {}).get("__wrapped__")


def _cells(value: Any) -> Iterator[types.CellType]:
    """Closure cells of a wrapper, and of the functions it wraps, that are not empty."""
    for layer in _chain(value):
        function = layer
        while isinstance(function, (functools.partial, types.MethodType)):
            function = function.func if isinstance(function, functools.partial) else function.__func__
        for cell in getattr(function, "__closure__", None) or ():
            try:
                _ = cell.cell_contents
            except ValueError:
                continue
            yield cell
