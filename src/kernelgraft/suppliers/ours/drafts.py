"""What a writer gives: a kernel for a Definition and the source that calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from kernelgraft.records import Definition


class Entry(NamedTuple):
    """A kernel in the catalogue."""

    family: str
    what: str
    autograd: bool = True
    language: Literal["cuda-tile", "triton"] = "cuda-tile"


@dataclass(frozen=True)
class Draft:
    """A kernel that computes a Definition, and the source that calls it."""

    kernel: str
    """Its name in the catalogue."""
    source: str
    guard: dict[str, Any] = field(default_factory=dict)
    """Fields of the Guard beside devices, dtypes and autograd."""


def source_of(module: str, function: str, definition: Definition, lines: list[str]) -> str:
    """A file that imports one function of `kernelgraft.kernels` and defines `kernel` with the Definition's inputs."""
    body = "\n".join(f"    {line}" for line in lines)
    imported = f"from kernelgraft.kernels.{module} import {function}"
    return f"{imported}\n\n\ndef kernel({', '.join(definition.inputs)}):\n{body}\n"


def call_of(function: str, arguments: list[str], keywords: dict[str, Any]) -> str:
    """The source of a call."""
    return f"{function}({', '.join([*arguments, *(f'{k}={v!r}' for k, v in keywords.items())])})"


def promoted(*names: str | None) -> str:
    """The dtype that torch promotes dtypes to; None is left out."""
    found = [getattr(torch, name) for name in names if name is not None]
    result = found[0]
    for dtype in found[1:]:
        result = torch.promote_types(result, dtype)
    return str(result).removeprefix("torch.")
