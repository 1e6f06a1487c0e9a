"""Source texts of plain-torch Solutions, one module a family; each knows its own family's semantics only.

A family's module exports `CATALOGUE` (variant → what it is, in words) and `drafts(definition)`, which gives the
variants that compute the Definition, best guess first, or a text: why there is none. `GPU_ONLY` names the variants, if
there are any, that only a CUDA device can run, on half types.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

from kernelgraft.records import Definition, Match

FAMILIES = ("rms_norm", "layer_norm", "residual_norm", "rope", "gated_mlp", "attention")

FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Draft:
    """One way to compute a Definition."""

    variant: str
    """Key of the family's `CATALOGUE`."""
    source: str
    """Python text with `import torch` and a function `kernel` that takes the Definition's inputs."""
    match: Match = "exact"
    autograd: bool = True
    max_axes: dict[str, int] = field(default_factory=dict)
    equal_axes: tuple[tuple[str, str], ...] = ()
    contiguous: tuple[str, ...] = ()
    last_dim_contiguous: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ("torch",)
    """Packages that the source imports from."""


@dataclass(frozen=True)
class Code:
    """Part of a body: lines that compute something, and the expression that then holds it."""

    variant: str
    lines: tuple[str, ...]
    result: str
    match: Match
    autograd: bool

    def draft(self, arguments: Sequence[str]) -> Draft:
        """The Solution that returns it."""
        source = write(arguments, [*self.lines, f"return {self.result}"])
        return Draft(self.variant, source, match=self.match, autograd=self.autograd)


def catalogue(family: str) -> dict[str, str]:
    """Variants of a family and what they are."""
    found: dict[str, str] = _module(family).CATALOGUE
    return found


def gpu_only(family: str) -> tuple[str, ...]:
    """Variants of a family that only a CUDA device can run, on half types."""
    found: tuple[str, ...] = getattr(_module(family), "GPU_ONLY", ())
    return found


def drafts(definition: Definition) -> list[Draft] | str:
    """The variants that compute a Definition, best guess first; why there is none."""
    family = definition.meta.family
    if family not in FAMILIES:
        return f"it has nothing for the family `{family}`"
    found: list[Draft] | str = _module(family).drafts(definition)
    return found or "no variant fits its semantics"


def norm_codes(family: str, *arguments: object) -> list[Code]:
    """`codes` of a norm's family: semantics, row size, variable, its dtype, dtypes of weight, bias and result."""
    return list(_module(family).codes(*arguments))


def float_dtypes(definition: Definition) -> tuple[str, ...]:
    """Dtypes of the floating inputs."""
    return tuple(dict.fromkeys(s.dtype for s in definition.inputs.values() if s.dtype in FLOATS))


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{family}")


def write(arguments: Sequence[str], lines: Sequence[str]) -> str:
    """`def kernel(<arguments>)` with these lines as its body."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"import torch\n\n\ndef kernel({', '.join(arguments)}):\n{body}\n"


def promoted(*dtypes: str) -> str:
    """The floating dtype that torch gives to a product of tensors of these dtypes."""
    names = set(dtypes)
    return next(iter(names)) if len(names) == 1 else "float32"


def cast(value: str, have: str, want: str) -> str:
    """An expression converted from one dtype to another; as it is if they are the same."""
    return value if have == want else f"{value}.to(torch.{want})"


def last_size(definition: Definition, name: str) -> int | None:
    """Size of an input's last axis if it is a const one."""
    shape = definition.inputs[name].shape
    return definition.axes[shape[-1]].value if shape else None
