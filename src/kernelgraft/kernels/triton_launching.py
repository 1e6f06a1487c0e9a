"""Launches of Triton kernels: what depends on shapes only is worked out once and kept, as `cutile.plans` does it.

Triton binds and specialises its arguments at every launch, which takes longer than a short kernel runs. A `Launch` has
it done once for tensors that all begin at a multiple of 16 bytes and once for each other mixture of tensors that do
and that do not, then calls what Triton made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from kernelgraft.cutile.plans import current

OVERLAPPING = (9, 0)
"""The first compute capability on which a kernel can be launched before the one ahead of it has ended."""
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""None where torch was built without CUDA; then no tensor is on a GPU."""


@functools.lru_cache(maxsize=16)
def overlaps(device: int) -> bool:
    """Whether launches on a CUDA device (-1: the CPU, under Triton's interpreter) can overlap."""
    return device >= 0 and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= OVERLAPPING


class Launch:
    """A kernel of six tensors, its grid, the arguments that follow the tensors, and the options of its compilation."""

    __slots__ = ("device", "grid", "kernel", "options", "ready", "rest")

    def __init__(
        self,
        kernel: Callable[[], Any],
        grid: tuple[int, int, int],
        rest: tuple[Any, ...],
        device: int,
        **options: Any,
    ) -> None:
        """`kernel` gives the kernel: it is asked at the first launch, as importing it needs Triton."""
        self.kernel, self.grid, self.rest, self.device, self.options = kernel, grid, rest, device, options
        self.ready: dict[tuple[bool, ...], tuple[Any, ...]] = {}
        """By which tensors are aligned (none named: all of them): what Triton made, and its handles."""

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on tensors of one device (None where the kernel takes none), on torch's current stream."""
        a, b, c, d, e, f = pointers = [0 if t is None else t.data_ptr() for t in tensors]
        aligned = () if not (a | b | c | d | e | f) & 15 else tuple(not p & 15 for p in pointers)
        ready = self.ready.get(aligned)
        if ready is None or self.device != current():
            self._first(tensors, aligned)
            return
        run, function, packed, runtime, quiet = ready
        hook = runtime.launch_enter_hook
        if hook is not None and (hook is not quiet or quiet.calls):
            self._first(tensors, aligned)  # somebody, such as a profiler, wants to be told of launches
            return
        x, y, z = self.grid
        run(x, y, z, _stream(self.device), function, packed, None, None, None, *pointers, *self.rest)

    def _first(self, tensors: tuple[torch.Tensor | None, ...], aligned: tuple[bool, ...]) -> None:
        """Launch through Triton's own front, and keep what it made."""
        kernel = self.kernel()
        with torch.cuda.device(self.device):  # of -1 nothing is asked
            made = kernel[self.grid](*tensors, *self.rest, **self.options)
        if self.device < 0:
            return
        runtime = import_module("triton").knobs.runtime
        hook = runtime.launch_enter_hook
        # A Triton without these would be launched through its own front every time.
        if all(hasattr(made, name) for name in ("run", "function", "packed_metadata")):
            handles = made.run, made.function, made.packed_metadata
            self.ready[aligned] = *handles, runtime, hook if hasattr(hook, "calls") else None
