"""The arguments that a live module was built with, read back from it.

A Layout under a string key "has the same `__init__` arguments as what it replaces". A live module does not keep them;
what its `__init__` did with each parameter says where to look. What was read is proved by building the class again on
meta: names, shapes and plain attributes must be those of the module.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import RebindError, UsageError
from kernelgraft.sites import innermost

INTERNAL = frozenset(nn.Module().__dict__)
"""What every module has in its instance dictionary."""
_SHAPED = {"ones", "zeros", "empty", "rand", "randn", "full"}
_MISSING = object()


def for_layout(module: nn.Module, layout: type[nn.Module]) -> dict[str, Any]:
    """Keyword arguments for `layout.__init__`: by name, else by position. Raises UsageError if one cannot be known."""
    known = recover(module)
    positions = list(known)
    wanted = _parameters(layout)
    left = [name for name in positions if name not in {p.name for p in wanted}]
    found: dict[str, Any] = {}
    for index, parameter in enumerate(wanted):
        if parameter.name in known:
            found[parameter.name] = known[parameter.name]
        elif index < len(positions) and positions[index] in left:
            found[parameter.name] = known[positions[index]]
        elif parameter.default is inspect.Parameter.empty:
            raise UsageError(
                f"`{layout.__name__}` wants `{parameter.name}`, which `{type(module).__name__}` is not built with"
            )
    return found


def recover(module: nn.Module) -> dict[str, Any]:
    """The arguments of `type(module).__init__`, in its order. Raises UsageError naming the one that cannot be read."""
    owner = type(module)
    parameters = _parameters(owner)
    tree = _init_tree(_init_of(owner))
    found: dict[str, Any] = {}
    for parameter in parameters:
        value = _assigned(module, tree, parameter.name) if tree is not None else _MISSING
        if value is _MISSING and hasattr(module, parameter.name):
            value = getattr(module, parameter.name)
            if isinstance(parameter.default, bool) and not isinstance(value, bool):
                value = value is not None
        if value is _MISSING:
            value = parameter.default
        if value is inspect.Parameter.empty:
            raise UsageError(
                f"the argument `{parameter.name}` of `{owner.__name__}` cannot be read from the module; "
                "name it in a tuple key, so that the Layout gets the module itself"
            )
        found[parameter.name] = value
    _prove(module, found)
    return found


def _parameters(owner: type[nn.Module]) -> list[inspect.Parameter]:
    return _named(_init_of(owner))


def _named(init: Callable[..., None]) -> list[inspect.Parameter]:
    every = list(inspect.signature(init).parameters.values())[1:]
    return [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _init_of(owner: type[nn.Module]) -> Callable[..., None]:
    """`__init__`, or what a decorator of `kernels` that takes anything passes on to."""
    init: Callable[..., None] = owner.__init__
    if isinstance(init, types.FunctionType) and init.__closure__ and not _named(init):
        try:
            return innermost(init)
        except RebindError:
            return init
    return init


@functools.lru_cache(maxsize=256)
def _init_tree(init: Callable[..., None]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(init)))
    except (OSError, TypeError, SyntaxError):
        return None


def _assigned(module: nn.Module, tree: ast.AST, name: str) -> Any:
    """What `self.<attribute> = …name…` in `__init__` left behind."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
                continue
            held = getattr(module, target.attr, _MISSING)
            if held is _MISSING:
                continue
            if isinstance(node, ast.Assign):
                value = _read(node.value, held, name)
                if value is not _MISSING:
                    return value
    return _MISSING


def _read(expression: ast.expr, held: Any, name: str) -> Any:
    if isinstance(expression, ast.Name) and expression.id == name:
        return held
    if not isinstance(expression, ast.Call):
        return _MISSING
    called = expression.func.attr if isinstance(expression.func, ast.Attribute) else getattr(expression.func, "id", "")
    arguments = expression.args
    if called in _SHAPED and isinstance(held, torch.Tensor):
        if len(arguments) == 1 and isinstance(arguments[0], ast.Tuple):
            arguments = arguments[0].elts
        for index, argument in enumerate(arguments):
            if isinstance(argument, ast.Name) and argument.id == name and index < held.dim():
                return held.shape[index]
    if isinstance(held, torch.Tensor):  # nn.Parameter(torch.ones(name))
        for argument in arguments:
            value = _read(argument, held, name)
            if value is not _MISSING and not isinstance(value, torch.Tensor):
                return value
    if isinstance(held, nn.Module):
        names = [p.name for p in _parameters(type(held))]
        pairs = [*zip(names, arguments, strict=False), *((k.arg or "", k.value) for k in expression.keywords)]
        for inner, argument in pairs:
            if isinstance(argument, ast.Name) and argument.id == name and hasattr(held, inner):
                value = getattr(held, inner)
                return value is not None if inner == "bias" else value
    return _MISSING


def _prove(module: nn.Module, arguments: dict[str, Any]) -> None:
    owner = type(module)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            again = owner(**arguments)
    except Exception as error:
        raise UsageError(
            f"`{owner.__name__}` cannot be built again from what was read ({type(error).__name__}); "
            "name it in a tuple key, so that the Layout gets the module itself"
        ) from error
    if _looks(again) != _looks(module):
        ours, theirs = dict(_looks(again)), dict(_looks(module))
        off = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
        raise UsageError(
            f"`{owner.__name__}` was changed after it was built (`{off}`); "
            "name it in a tuple key, so that the Layout gets the module itself"
        )


def _looks(module: nn.Module) -> list[tuple[str, Any]]:
    """Shapes of the tensors, and the module's own plain attributes."""
    plain = (bool, int, float, str, type(None))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in module.state_dict(keep_vars=True).items()]
    attributes = [
        (name, value)
        for name, value in module.__dict__.items()
        if name not in INTERNAL and not name.startswith("_") and isinstance(value, plain)
    ]
    return sorted(shapes + attributes, key=lambda pair: pair[0])
