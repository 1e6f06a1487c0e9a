"""A cuTile Solution for a GPU, tried on the CPU under the interpreter first: what is wrong there never runs on the GPU.

The interpreter also reports what a GPU does not: reads outside of tensors, uninitialised memory, types that the
compiler refuses. It is slow, so that few and small sizes are tried.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernelgraft.evaluate.cases import Captured, JudgeOptions, spread
from kernelgraft.families.base import Family
from kernelgraft.records import Definition, Solution

LARGEST_VOLUME = 1 << 17
"""Elements of the largest input of a point that is tried, unless its constant axes alone make it larger."""
POINTS = 2
TIMEOUT_SECONDS = 120.0
UNSUPPORTED = "NotImplementedError"
"""What the interpreter raises for an operation that it does not have: no verdict."""


def applies(solution: Solution, captured: Sequence[Captured]) -> bool:
    """True if a Solution is about to run on a GPU and the interpreter can run it before."""
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for c in captured for x in c.inputs)
    return on_gpu and solution.spec.language == "cuda-tile" and importlib.util.find_spec("cuda.tile") is not None


def on_cpu(solution: Solution, definition: Definition) -> Solution:
    """The Solution as one of a Definition (its own, or a smaller one), with a guard that lets CPU tensors through."""
    guard = solution.meta.guard.model_copy(update={"devices": ("cpu",)})
    meta = solution.meta.model_copy(update={"guard": guard, "fingerprint": definition.meta.fingerprint})
    return solution.model_copy(update={"definition": definition.name, "meta": meta})


def quick(options: JudgeOptions) -> JudgeOptions:
    """What is tried: few sizes and values, every distribution, two memory layouts of all inputs, each case once.

    Equal calls, gradients and layouts of single inputs are compared on the GPU.
    """
    few = replace(JudgeOptions.quick(), seeds=1, points=POINTS, held_out=0, gradients=False, timeout_s=TIMEOUT_SECONDS)
    few = replace(few, laid_out="together", repeats=1)
    return replace(few, static_gate=options.static_gate, memory_bytes=options.memory_bytes, fork=options.fork)


def calls(
    definition: Definition, family: Family, captured: Sequence[Captured], serves: Callable[[tuple[Any, ...]], bool]
) -> list[Captured]:
    """Calls on CPU tensors that the guard lets through (`serves`): one of a captured size, if small, and others."""
    traced = list({tuple(sorted(c.axes.items())): c.axes for c in captured}.values())
    points = sorted(
        family.axis_points(definition, traced), key=lambda p: (_volume(definition, p), math.prod(p.values()))
    )
    small = [axes for axes in points if _volume(definition, axes) <= LARGEST_VOLUME] or points[:1]
    regimes = {tuple(sorted(c.axes.items())): c.regime for c in captured}
    drawn = []
    for number, axes in enumerate(small):
        inputs = tuple(family.inputs(definition, axes, torch.Generator().manual_seed(number), "normal"))
        if serves(inputs):
            regime = regimes.get(tuple(sorted(axes.items())), captured[0].regime)
            drawn.append(Captured(inputs, regime, f"of random values, number {number}", axes))
    known = [c for c in drawn if c.axes in traced][:1]
    return known + [c for c in spread(drawn, POINTS) if not any(c is k for k in known)]


def _volume(definition: Definition, axes: dict[str, int]) -> int:
    sizes = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None} | axes
    return max(math.prod(sizes[name] for name in spec.shape or ()) for spec in definition.inputs.values())
