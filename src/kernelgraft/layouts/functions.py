"""Kernels for functions: which of them the modules of a model use, under which name, and what runs in their place.

transformers registers a function by a decorator that does nothing where `kernels` is not installed, so the name is then
read from the source of the module that defines it. A function is replaced in copies of the methods that use it, bound
to instances: the function object, the globals of its module and every other model are untouched.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import RebindError, UsageError
from kernelgraft.layouts.records import FunctionUse, LoadedKernel, Place
from kernelgraft.layouts.signatures import drift
from kernelgraft.sites import current, innermost, install, rebind
from kernelgraft.sites.rebind import made_from
from kernelgraft.sites.source import loaded_globals

_DECORATORS = (
    "use_kernel_forward_from_hub",
    "use_kernel_func_from_hub",
    "use_kernel_func_from_hub_with_fallback",
)
"""What registers a function; the first argument is the name."""
_LAYER_NAME = "kernel_layer_name"
"""Where `kernels` keeps the name, on the module that it makes of a function."""
_REPLACES = "__kernelgraft_replaces__"
"""Attribute of what runs in the place of a function: the name of that function."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Global:
    """A function as one method sees it."""

    method: str
    variable: str
    plain: types.FunctionType
    """The Python function under decorators, and under what `kernels` made of it."""
    registered: str | None


def uses(module: nn.Module) -> list[FunctionUse]:
    """The functions that the forward of a module calls, itself or in methods that it calls."""
    found: dict[types.FunctionType, list[_Global]] = {}
    for one in _globals(module):
        found.setdefault(one.plain, []).append(one)
    return [
        FunctionUse(plain.__name__, several[0].registered, tuple((one.method, one.variable) for one in several))
        for plain, several in found.items()
    ]


def uses_named(module: nn.Module, wanted: str) -> tuple[list[FunctionUse], list[FunctionUse]]:
    """Those that are registered under a name, and those that have it themselves."""
    every = uses(module)
    return [use for use in every if use.registered == wanted], [use for use in every if use.name == wanted]


def names(module: nn.Module) -> set[str]:
    """What a key may say of this module: names under which functions are registered, and their own."""
    return {name for use in uses(module) for name in (use.registered, use.name) if name}


def function_drift(place: Place, module: nn.Module) -> str | None:
    """Why calls of the function do not mean the same to the kernel; None if they do.

    Compared by name, order, kind and default: what a call leaves out must be the same in both.
    """
    assert place.function is not None
    theirs = list(inspect.signature(_plain_of(module, place.function)).parameters.values())
    ours = list(inspect.signature(place.kernel.kernel.forward).parameters.values())[1:]
    kernel, function = f"{place.kernel.name}.forward", place.function.name
    said = drift(ours, theirs, kernel, function)
    if said is not None:
        return said
    given = {p.name: p.default for p in ours}
    for one in theirs:
        if one.default is one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        if not _same(given[one.name], one.default):
            have = "no default" if given[one.name] is one.empty else f"`{given[one.name]!r}`"
            return f"`{kernel}` has {have} for `{one.name}`, `{function}` has `{one.default!r}`"
    return None


def refuse_replaced(place: Place, module: nn.Module) -> None:
    """Raises UsageError if a kernel stands in the place of the function already."""
    assert place.function is not None
    for method, variable in place.function.where:
        if hasattr(innermost(current(module, method)).__globals__[variable], _REPLACES):
            raise UsageError(f"`{place.paths[0]}` runs a kernel for `{place.function.name}` already; revert that first")


def put(place: Place, module: nn.Module) -> Iterator[Callable[[], None]]:
    """Bind copies of the methods that call the kernel; yields the way back of each as soon as it is bound."""
    assert place.function is not None
    name = place.function.name
    yield from _bind(place, module, lambda original: _replacement(place.kernel, original, name))


def called(places: Sequence[Place], root: nn.Module, run: Callable[[], Any]) -> list[Place]:
    """Those places of functions whose function a run of the model calls; nothing is left on the model."""
    found: list[Place] = []
    undos: list[Callable[[], None]] = []

    def counted(place: Place) -> Callable[[Function], Function]:
        def wrap(original: Function) -> Function:
            def count(*args: Any, **kwargs: Any) -> Any:
                found.append(place)
                return original(*args, **kwargs)

            return count

        return wrap

    try:
        for place in places:
            undos += _bind(place, root.get_submodule(place.paths[0]), counted(place))
        run()
    finally:
        for undo in reversed(undos):
            undo()
    return list(dict.fromkeys(found))


def _bind(place: Place, module: nn.Module, make: Callable[[Function], Function]) -> Iterator[Callable[[], None]]:
    assert place.function is not None
    here: dict[str, list[str]] = {}
    for method, variable in place.function.where:
        here.setdefault(method, []).append(variable)
    for method, variables in here.items():
        below = current(module, method)
        scope = innermost(below).__globals__
        given = {name: make(scope[name]) for name in variables}
        yield install(module, method, rebind(below, names=given))


@functools.lru_cache(maxsize=256)
def _replacement(loaded: LoadedKernel, original: Function, name: str) -> Function:
    """What the methods call: the kernel, or the original where the kernel says that it cannot.

    The kernel's forward gets a module without any state as self. Cached, so that torch.compile sees one function for
    all layers.
    """
    kernel, forward = loaded.kernel(), loaded.kernel.forward
    backward, traced = loaded.has_backward, loaded.can_torch_compile
    run = forward.__get__(kernel)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if not traced and torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if not backward and torch.is_grad_enabled():
            return original(*args, **kwargs)
        return run(*args, **kwargs)

    replaced.__name__ = replaced.__qualname__ = name
    replaced.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(replaced, _REPLACES, name)
    return replaced


# --- finding ---


def _globals(module: nn.Module) -> Iterator[_Global]:
    """The functions that methods of a module use, from its forward on."""
    owner: Any = type(module)
    left, seen = ["forward"], {"forward"}
    while left:
        method = left.pop(0)
        try:
            inner = innermost(current(module, method))
        except RebindError:  # a method that cannot be copied cannot take a kernel
            continue
        for variable in sorted(loaded_globals(inner.__code__)):
            if (found := _function(inner.__globals__.get(variable))) is not None:
                yield _Global(method, variable, *found)
        for name in _attributes(inner.__code__):
            if name not in seen and _is_method(owner, name):
                seen.add(name)
                left.append(name)


def _function(value: Any) -> tuple[types.FunctionType, str | None] | None:
    """The plain function that a global is, and the name under which it is registered; None for anything else."""
    plain = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
    registered = getattr(plain, _LAYER_NAME, None) if isinstance(plain, nn.Module) else None
    if registered is not None:
        held = made_from(type(plain))
        plain = held if held is None else inspect.unwrap(held)
    if not isinstance(plain, types.FunctionType) or plain.__module__.partition(".")[0] == "torch":
        return None
    return plain, registered or _registered(plain.__module__).get(plain.__name__)


def _plain_of(module: nn.Module, use: FunctionUse) -> types.FunctionType:
    method, variable = use.where[0]
    found = _function(innermost(current(module, method)).__globals__[variable])
    assert found is not None
    return found[0]


@functools.lru_cache(maxsize=256)
def _registered(module: str) -> Mapping[str, str]:
    """The name under which each function of a module is registered, as its source says."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):  # no source: nothing is known of it
        return {}
    aliases = {name: name for name in _DECORATORS}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            aliases.update({a.asname: a.name for a in node.names if a.asname and a.name in _DECORATORS})
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                continue
            called = decorator.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
            given = [*decorator.args, *(word.value for word in decorator.keywords)][:1]
            if aliases.get(str(name)) and given and isinstance(given[0], ast.Constant):
                found[node.name] = str(given[0].value)
    return found


@functools.lru_cache(maxsize=1024)
def _attributes(code: types.CodeType) -> tuple[str, ...]:
    """Names of attributes that some code, or a function inside it, may read."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_attributes(constant)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _is_method(owner: Any, name: str) -> bool:
    """Whether a name is a method that a class below nn.Module defines."""
    for base in owner.__mro__:
        if name in vars(base):
            held = vars(base)[name]
            return base is not nn.Module and isinstance(held, types.FunctionType)
    return False


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
