"""Evidence of whose code a process runs: a model's own, or what was put in its place."""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from kernelgraft.bench.result import Proof

Facts = dict[tuple[str, str], Any]
"""Objects by the kind and name of the place where they stand."""


def attention_functions() -> dict[str, Any]:
    """The attention functions that transformers knows in this process, by name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return dict(ALL_ATTENTION_FUNCTIONS.items())


def prove(model: nn.Module, registered: Mapping[str, Any]) -> Proof:
    """Look for anything that replaced the model's own code.

    `registered`: the attention functions right after transformers was imported, before the model was loaded.
    """
    now = attention_functions()
    return Proof(
        patch_imported="kernelgraft.patch" in sys.modules,
        replaced_methods=tuple(_replaced(model)),
        foreign_attention=tuple(sorted(name for name, found in now.items() if registered.get(name) is not found)),
    )


def facts(model: nn.Module) -> Facts:
    """Every object that decides what the model computes.

    Classes of its modules and what hangs on the instances; methods of those classes; functions and classes that their
    Python modules, `torch.nn` and `torch.nn.functional` name; the attention functions.
    """
    found: Facts = {}
    files: dict[str, types.ModuleType] = {"torch.nn": nn, "torch.nn.functional": torch.nn.functional}
    owners: dict[str, type] = {}
    for path, module in model.named_modules():
        found["module", path or "the model"] = type(module)
        for name, value in vars(module).items():
            if isinstance(value, (types.MethodType, types.FunctionType)):
                found["instance", f"{path}.{name}".lstrip(".")] = getattr(value, "__func__", value)
        for owner in type(module).__mro__:
            home = sys.modules.get(owner.__module__)
            if home is not None and _package(owner.__module__) not in ("builtins", "torch", "abc"):
                files[owner.__module__] = home
                owners[f"{owner.__module__}.{owner.__qualname__}"] = owner
    for title, owner in owners.items():
        for name, value in vars(owner).items():
            if isinstance(value, types.FunctionType):
                found["method", f"{title}.{name}"] = value
    for title, home in files.items():
        for name, value in vars(home).items():
            if isinstance(value, (types.FunctionType, type)):
                found["global", f"{title}.{name}"] = value
    for name, value in attention_functions().items():
        found["attention", f"attention function `{name}`"] = value
    return found


def differences(before: Facts, after: Facts) -> list[str]:
    """`where: what` for every place where another object stands now; list indices in paths are `*`."""
    lines: Counter[str] = Counter()
    owners = {place.rpartition(".")[0] for kind, place in before if kind == "method"}
    for (kind, place), value in after.items():
        old = before.get((kind, place))
        # A name that a file did not have, or a class that the model did not have, replaces nothing.
        new = old is None and (kind == "global" or (kind == "method" and place.rpartition(".")[0] not in owners))
        if value is old or new:
            continue
        own = kind == "instance" and _is_own(place, value, before)
        what = "a copy of its class's own with other names in it" if own else _name(value)
        lines[f"{_pattern(place)}: {what}"] += 1
    return [line + (f" ×{count}" if count > 1 else "") for line, count in lines.items()]


def _is_own(place: str, value: Any, before: Facts) -> bool:
    """Whether what hangs on an instance is its class's method, perhaps rebuilt."""
    path, _, name = place.rpartition(".")
    method = getattr(before.get(("module", path or "the model")), name, None)
    return method is not None and _name(method) == _name(value)


def _pattern(place: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place)


def _name(value: Any) -> str:
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{home}.{name}" if home and name else type(value).__qualname__


def _replaced(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (types.MethodType, types.FunctionType)) and callable(
                getattr(type(module), name, None)
            ):
                yield f"{path}.{name}".lstrip(".")
        forward = getattr(type(module), "forward", None)
        home = _package(getattr(forward, "__module__", None))
        if home not in {_package(c.__module__) for c in type(module).__mro__}:
            yield f"{path}.{type(module).__name__}.forward".lstrip(".")


def _package(module_name: str | None) -> str:
    return (module_name or "").partition(".")[0]
