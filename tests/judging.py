"""Small Definitions, a Family for them, and Solutions from source text: what the judge's tests share."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

import torch

from kernelgraft.evaluate import Captured
from kernelgraft.families.base import Call, Distribution, Family, Recognition, Rejection, Seat
from kernelgraft.families.probe import draw
from kernelgraft.families.reference import define
from kernelgraft.records import (
    BuildSpec,
    Definition,
    Guard,
    Site,
    Solution,
    SolutionMeta,
    SourceFile,
    SourceRef,
)
from kernelgraft.suppliers.guards import bind_axes

SITE = Site(
    kind="module",
    path="layers.*.thing",
    instances=("layers.0.thing",),
    class_name="example.Thing",
    source=SourceRef(file="example/thing.py", first_line=1, last_line=2, sha256="0" * 64),
)
HIDDEN = 64

RMS_NORM = """
def run(hidden_states, weight):
    dtype = hidden_states.dtype
    x = hidden_states.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * x.to(dtype)
"""
SOFTMAX = """
def run(scores):
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
"""
ACT_MUL = """
def run(gate, up):
    return torch.nn.functional.silu(gate) * up
"""
CLONE = """
def run(x):
    return x.clone()
"""
ADD_NORM = """
def run(residual, hidden_states):
    total = residual + hidden_states
    x = total.to(torch.float32)
    return total, (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(total.dtype)
"""


@functools.cache
def definition(which: str, dtype: torch.dtype = torch.float32) -> Definition:
    """One of `rms_norm`, `softmax`, `act_mul`, `clone`, `add_norm` (two outputs)."""
    rows = ("batch_size", "seq_len", "hidden_size")
    axes: dict[str, int | None] = {"batch_size": None, "seq_len": None, "hidden_size": HIDDEN}
    inputs: dict[str, tuple[Sequence[str] | None, torch.dtype]]
    outputs: dict[str, tuple[Sequence[str] | None, torch.dtype]] = {"output": (rows, dtype)}
    if which == "rms_norm":
        body, inputs = RMS_NORM, {"hidden_states": (rows, dtype), "weight": (("hidden_size",), dtype)}
    elif which == "softmax":
        rows, axes = ("rows", "columns"), {"rows": None, "columns": None}
        body, inputs, outputs = SOFTMAX, {"scores": (rows, dtype)}, {"output": (rows, dtype)}
    elif which == "act_mul":
        body, inputs = ACT_MUL, {"gate": (rows, dtype), "up": (rows, dtype)}
    elif which == "clone":
        body, inputs = CLONE, {"x": (rows, dtype)}
    else:
        body, inputs = ADD_NORM, {"residual": (rows, dtype), "hidden_states": (rows, dtype)}
        outputs = {"total": (rows, dtype), "output": (rows, dtype)}
    return define(
        name=f"{which}_{str(dtype).removeprefix('torch.')}",
        op_type=which,
        family="fake",
        semantics={},
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        body=body,
        site=SITE,
        description="for tests",
        reference_error=0.0,
    )


class FakeFamily(Family):
    """Serves any Definition whose inputs are all alike; a 1-D one is a weight."""

    name = "fake"
    kinds = frozenset({"module"})

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        raise NotImplementedError

    def seat(self, semantics: dict[str, Any]) -> Seat:
        raise NotImplementedError

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        sizes = {name: axis.value or axes[name] for name, axis in definition.axes.items()}
        found = []
        for spec in definition.inputs.values():
            shape = [sizes[a] for a in spec.shape or ()]
            kind: Distribution = "uniform_2_4" if len(shape) == 1 else distribution
            found.append(draw(shape, getattr(torch, spec.dtype), generator, kind))
        return found


FAMILY = FakeFamily()


def captured(subject: Definition, *sizes: tuple[int, ...]) -> list[Captured]:
    """Calls as a model would make them: a prefill of 7 tokens and a decode step, or calls of the given sizes."""
    names = [name for name, axis in subject.axes.items() if axis.value is None]
    found = []
    for number, size in enumerate(sizes or ((1, 7), (1, 1))):
        generator = torch.Generator().manual_seed(number)
        inputs = tuple(FAMILY.inputs(subject, dict(zip(names, size, strict=True)), generator, "normal"))
        axes = {n: bind_axes(subject, inputs)[n] for n in names}
        found.append(Captured(inputs, "prefill" if number == 0 else "decode", f"number {number}", axes))
    return found


def solution(
    subject: Definition,
    source: str,
    *,
    guard: Guard | None = None,
    language: Any = "python",
    supplier: str = "torch",
    nondeterministic: bool = False,
    uses_compiler: bool = False,
    entry: str = "run",
) -> Solution:
    """A Solution of a Definition from source text (dedented, with `import torch` and `F` before it)."""
    text = "import torch\nimport torch.nn.functional as F\n" + textwrap.dedent(source)
    return Solution(
        name=f"{supplier}_{subject.name}",
        definition=subject.name,
        author="test",
        spec=BuildSpec(language=language, target_hardware=("cpu",), entry_point=f"kernel.py::{entry}"),
        sources=(SourceFile(path="kernel.py", content=text),),
        meta=SolutionMeta(
            supplier=supplier,
            family="fake",
            guard=guard or Guard(),
            fingerprint=subject.meta.fingerprint,
            nondeterministic=nondeterministic,
            uses_compiler=uses_compiler,
        ),
    )
