"""Calls of our kernels with the shapes of real models, for whoever compiles or tunes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

MODULES: tuple[str, ...] = ()
"""Modules of this package that have `examples() -> list[Example]`."""


@dataclass(frozen=True)
class Example:
    """One call: `run("meta")` works out its launches, `run("cpu")` and `run("cuda")` do it on random tensors."""

    name: str
    run: Callable[[str], Any]


def examples() -> dict[str, list[Example]]:
    """The examples of all kernels by module name."""
    return {name: import_module(f"{__package__}.{name}").examples() for name in MODULES}
