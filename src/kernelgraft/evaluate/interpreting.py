"""A cuTile Solution for a GPU, tried on the CPU under the interpreter first: what is wrong there never runs on the GPU.

The interpreter also reports what a GPU does not: reads outside of tensors, uninitialised memory, types that the
compiler refuses. It is slow, so that few and small sizes are tried.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace

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


def on_cpu(solution: Solution) -> Solution:
    """The Solution with a guard that lets CPU tensors through."""
    guard = solution.meta.guard.model_copy(update={"devices": ("cpu",)})
    return solution.model_copy(update={"meta": solution.meta.model_copy(update={"guard": guard})})


def quick(options: JudgeOptions) -> JudgeOptions:
    """What is tried: few sizes and values, every distribution, two memory layouts."""
    few = replace(JudgeOptions.quick(), seeds=1, points=POINTS, held_out=0, gradients=False, timeout_s=TIMEOUT_SECONDS)
    return replace(few, static_gate=options.static_gate, memory_bytes=options.memory_bytes, fork=options.fork)


def calls(definition: Definition, family: Family, captured: Sequence[Captured]) -> list[Captured]:
    """Calls on CPU tensors with sizes of the captured ones as far as they are small, and with the smallest others."""
    traced = list({tuple(sorted(c.axes.items())): c.axes for c in captured}.values())
    points = sorted(family.axis_points(definition, traced), key=lambda axes: _volume(definition, axes))
    small = [axes for axes in points if _volume(definition, axes) <= LARGEST_VOLUME] or points[:1]
    known = [axes for axes in traced if axes in small]
    chosen = [*known[:1], *(axes for axes in spread(small, POINTS) if axes not in known[:1])]
    regimes = {tuple(sorted(c.axes.items())): c.regime for c in captured}
    return [
        Captured(
            inputs=tuple(family.inputs(definition, axes, torch.Generator().manual_seed(number), "normal")),
            regime=regimes.get(tuple(sorted(axes.items())), captured[0].regime),
            label=f"of random values, number {number}",
            axes=axes,
        )
        for number, axes in enumerate(chosen)
    ]


def _volume(definition: Definition, axes: dict[str, int]) -> int:
    sizes = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None} | axes
    return max(math.prod(sizes[name] for name in spec.shape or ()) for spec in definition.inputs.values())
