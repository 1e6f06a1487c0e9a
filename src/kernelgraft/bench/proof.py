"""Evidence that a process runs a model's own code."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from kernelgraft.bench.result import Proof


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
