"""Copies of a method around a replaced global or a rewritten statement; the original and its globals stay.

A method is often several layers deep: decorators that check arguments, record outputs or checkpoint. Each layer is
copied as it is, with the closure cell that holds the next layer pointing at the copy of that layer.

Not covered: a decorator that is an object instead of a function, or that keeps the inner function elsewhere than in a
closure cell (`RebindError`); a layer that calls itself through its own cell (the cell keeps the original layer, because
layers that compare themselves with the class's method must go on finding themselves there).
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from kernelgraft.errors import RebindError
from kernelgraft.records import SourceRef
from kernelgraft.sites.source import cite, compile_tree, loaded_globals, read_tree

Transform = Callable[[ast.FunctionDef], ast.FunctionDef]

_TREE = "__kernelgraft_tree__"
"""Attribute of a recompiled function: its syntax tree, because the file on disk still holds the original."""


def innermost(method: Callable[..., Any]) -> types.FunctionType:
    """The plain function under all decorators of `method` (a function or a bound method)."""
    return _layers(method)[-1]


def rebind(
    method: Callable[..., Any], *, names: dict[str, Any] | None = None, transform: Transform | None = None
) -> types.FunctionType:
    """A copy of `method` in which the globals `names` have other values and/or the statements are rewritten.

    `method` is a plain function that takes self, decorated or not. `transform` gets a private copy of the syntax tree
    of the innermost function and returns the tree to compile. The copy keeps signature, defaults, closure, name,
    documentation and line numbers; its globals are a snapshot. Raises RebindError if a name is not loaded as a global
    by the innermost function, if a layer cannot be copied, or if the source is not that of the loaded code.
    """
    layers = _layers(method)
    inner = layers[-1]
    code, tree = inner.__code__, None
    if transform is not None:
        tree = ast.fix_missing_locations(transform(function_tree(inner)))
        code = compile_tree(tree, code)
    unused = sorted(set(names or ()) - loaded_globals(code))
    if unused:
        raise RebindError(
            f"`{inner.__qualname__}` does not use {', '.join(f'`{n}`' for n in unused)} as a global; "
            f"it uses {', '.join(sorted(loaded_globals(inner.__code__))) or 'none'}"
        )
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    scope = {**inner.__globals__, **(names or {})}
    if "__name__" not in loaded_globals(code):
        # torch.compile reads the globals of an inlined function from the module of that name, where the originals are.
        scope.pop("__name__", None)
    built = _copy(inner, code, scope, tuple(cells[n] for n in code.co_freevars))
    if tree is not None:
        built.__dict__[_TREE] = tree
    below: types.FunctionType = inner
    for layer in reversed(layers[:-1]):
        closure = tuple(types.CellType(built) if _holds(c, below) else c for c in layer.__closure__ or ())
        copied = _copy(layer, layer.__code__, layer.__globals__, closure)
        if "__wrapped__" in copied.__dict__:
            copied.__dict__["__wrapped__"] = built
        built, below = copied, layer
    return built


def global_functions(method: Callable[..., Any]) -> dict[str, types.FunctionType]:
    """Globals that the innermost function of `method` loads and that are Python functions, under their decorators.

    Functions of torch, classes and builtins are left out. The package `kernels`, where it is installed, makes modules
    of functions: those count as what they hold (`callee`).
    """
    inner = innermost(method)
    found = {}
    for name in sorted(loaded_globals(inner.__code__)):
        value = callee(inner.__globals__.get(name))
        value = inspect.unwrap(value) if callable(value) else None
        if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != "torch":
            found[name] = value
    return found


def callee(value: Any) -> Any:
    """What a global's call runs: the function that the package `kernels` made a module of, else the global itself.

    A module that runs another kernel by now is left as it is.
    """
    if not isinstance(value, nn.Module) or not hasattr(type(value), "kernel_layer_name") or "forward" in vars(value):
        return value
    held = made_from(type(value))
    return value if held is None else held


def made_from(made: type[nn.Module]) -> types.FunctionType | None:
    """The function that the package `kernels` made a class of modules from: its forward calls it through a closure."""
    closure = getattr(made.forward, "__closure__", None) or ()
    held = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, types.FunctionType)]
    return held[0] if len(held) == 1 else None


def function_tree(method: Callable[..., Any]) -> ast.FunctionDef:
    """A private copy of the syntax tree of the innermost function of `method`, with the line numbers of the file.

    Its decorators stand in it as written; `rebind` copies the layers that they made instead of applying them again.
    Raises RebindError if there is no source, or if it does not compile to the code that is loaded.
    """
    inner = innermost(method)
    return copy.deepcopy(inner.__dict__[_TREE]) if _TREE in inner.__dict__ else read_tree(inner.__code__)


def source_ref(
    obj: Callable[..., Any] | type, *, first: int | None = None, last: int | None = None, symbol: str | None = None
) -> SourceRef:
    """Where a function or class is written: file, lines (or lines `first` to `last` of that file), hash of their text.

    Code of an installed release of transformers or torch gets a permalink at that release's tag. Raises RebindError
    without source.
    """
    return cite(obj if isinstance(obj, type) else innermost(obj), first, last, symbol)


def _layers(method: Callable[..., Any]) -> list[types.FunctionType]:
    """The functions from the outermost decorator to the innermost function."""
    layer: Any = getattr(method, "__func__", method)
    layers: list[types.FunctionType] = []
    while layer is not None:
        if not isinstance(layer, types.FunctionType):
            name = getattr(method, "__qualname__", repr(method))
            raise RebindError(
                f"`{name}` cannot be copied: under {len(layers)} decorators there is a {type(layer).__name__}"
            )
        if layer in layers:
            raise RebindError(f"`{layer.__qualname__}` cannot be copied: its decorators form a circle")
        layers.append(layer)
        layer = _next(layer)
    return layers


def _next(layer: types.FunctionType) -> Any:
    """What `layer` decorates; None if it decorates nothing."""
    cells = layer.__closure__ or ()
    if "__wrapped__" in layer.__dict__:
        inner = layer.__dict__["__wrapped__"]
        if not any(_holds(c, inner) for c in cells):
            raise RebindError(f"`{layer.__qualname__}` cannot be copied: a decorator keeps it outside its closure")
        return inner
    # A decorator without functools.wraps: it passes on whatever it gets to the one method in its closure.
    variadic = layer.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    methods = [c.cell_contents for c in cells if variadic and _is_method(c)]
    return methods[0] if len(methods) == 1 and methods[0] is not layer else None


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _is_method(cell: types.CellType) -> bool:
    try:
        value = cell.cell_contents
    except ValueError:
        return False
    return isinstance(value, types.FunctionType) and value.__code__.co_varnames[:1] == ("self",)


def _copy(
    function: types.FunctionType, code: types.CodeType, names: dict[str, Any], closure: tuple[types.CellType, ...]
) -> types.FunctionType:
    copied = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = dict(function.__kwdefaults__) if function.__kwdefaults__ else None
    for attribute in ("__qualname__", "__module__", "__doc__", "__type_params__"):
        if hasattr(function, attribute):
            setattr(copied, attribute, getattr(function, attribute))
    # From Python 3.14 on annotations are computed on demand.
    lazy = "__annotate__" if hasattr(function, "__annotate__") else "__annotations__"
    setattr(copied, lazy, getattr(function, lazy))
    copied.__dict__.update(function.__dict__)
    return copied
