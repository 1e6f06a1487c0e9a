"""What a compute family is: the contract between research, the judge and the patcher.

A family knows one kind of compute and nothing else. It recognises a site from its captured calls, writes the
Definition, makes fresh inputs for the judge, and says how a kernel is *seated* in the site. The seat is the single
source of truth for how a site's call maps to a Definition's inputs: capture, verification, patching and emitted files
all use the same factory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from kernelgraft.records import Definition, Site
from kernelgraft.sites.calls import Call

__all__ = ["Call", "Distribution", "Family", "Kernel", "Recognition", "Rejection", "Seat", "Select"]

Kernel = Callable[..., Any]
"""Takes the Definition's inputs in order, returns its output, or a tuple of its outputs."""

Select = Callable[..., Kernel | None]
"""Called with the Definition's inputs in order; returns the kernel for this call, or None: run the original.
A site with several Definitions (attention with and without a mask) tells them apart by the number of inputs."""

Distribution = Literal["normal", "uniform_2_4", "tiny", "huge", "zeros_rows", "ramp", "binary", "inf", "nan"]
"""How fresh activations are drawn (`research` C7): N(0,1); U(2,4); 1e-4·N(0,1); near dtype max / 64; N(0,1) with zero
rows; a ramp along the last axis; {0,1}; one ±inf; one NaN."""


@dataclass(frozen=True)
class Seat:
    """How a kernel sits in a site: `factory(original, select, **constants)` gives the replacement.

    The factory is a self-contained module-level function (it may use torch and builtins only), because its source is
    also written into emitted files. What it returns has the calling convention of the original:
    `module`: `f(self, *args, **kwargs)`; `function`: the function's own; `attention`: `f(module, query, key, value,
    attention_mask, **kwargs)`; `statement`: `f(self, residual, hidden_states) -> (new_residual, normed)`.
    """

    factory: Callable[..., Callable[..., Any]]
    constants: dict[str, Any] = field(default_factory=dict)
    """JSON-able keyword arguments of the factory."""


@dataclass(frozen=True)
class Recognition:
    """A site that a family knows: its variant as data and one Definition per number of inputs."""

    family: str
    semantics: dict[str, Any]
    definitions: tuple[Definition, ...]


@dataclass(frozen=True)
class Rejection:
    """A site that a family looked at and does not serve."""

    family: str
    reason: str


class Family(ABC):
    """One kind of compute."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[str]]
    """Site kinds it can be found at."""
    without_gradient: ClassVar[frozenset[str]] = frozenset({"cos", "sin", "attention_mask"})
    """Definition inputs that no model differentiates (they come from positions and masks): the judge asks for none."""
    nan_may_vanish: ClassVar[bool] = False
    """True if torch's own implementations give numbers where the written-out reference gives NaN (a fused softmax over
    infinite scores): the judge then takes either."""

    @abstractmethod
    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """Say what the site computes.

        None: plainly not this family (no message). Rejection: it looks like this family but no variant fits, or two fit
        and no probe tells them apart. Recognition: its reference, run through its own seat, reproduced the captured
        outputs and a probe with freshly randomised parameters and inputs (on a deep copy: the live module is never
        changed).
        """

    @abstractmethod
    def seat(self, semantics: dict[str, Any]) -> Seat:
        """How a kernel for this variant is put into the site."""

    @abstractmethod
    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """Fresh inputs of a Definition, contiguous, on CPU, in its dtypes, for the given sizes of its var axes.

        Structured inputs (rotary tables, masks) keep their structure whatever the distribution.
        """

    def original(self, call: Call) -> Kernel | None:
        """The recorded call's own function, taking a Definition's inputs instead; None where that cannot be done.

        The judge then measures errors against it instead of the reference. Needed where the two treat NaN or infinity
        differently, because the reference spells out what the original leaves to a library.
        """
        return None

    def reduced(self, definition: Definition) -> Definition | None:
        """The same compute with smaller constant axes, if a Definition's own take too long under the interpreter.

        Asked only for Solutions whose source does not depend on these sizes. None: there is none, or no need.
        """
        return None

    def axis_points(self, definition: Definition, traced: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """Sizes of the var axes to judge on: edges around and beyond the traced ones, within the constraints."""
        from kernelgraft.families.points import axis_points

        return axis_points(definition, traced)

    def work(self, inputs: Sequence[Any]) -> int:
        """Size of a call in rows: elements of the first tensor over its last axis."""
        first = inputs[0]
        return first.numel() // max(1, first.shape[-1])
