"""Launch plans: everything about a launch that depends on shapes and dtypes only, worked out once and kept.

A kernel's launcher looks its plan up by shape and calls `fire`: on a GPU that is `ct.launch` on torch's current stream
with nothing else in between, on a CPU it is the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.tuning import compiler_versions

LARGEST_EXTENT = 2**31
"""Elements between the first and the last of one launch's tensor; kernels count in int32, larger ones are split."""
LARGEST_GRID = 2**16
"""Blocks of one launch; a kernel's blocks take further tiles in turn."""
LARGEST_AXIS = 2**16 - 1
"""Blocks along the second and the third axis of a grid."""
UNCHECKED_LOADS = (13, 4)
"""The first version of tileiras that takes loads and stores of tiles without checks of their bounds."""
Maker = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel with its compiler hints, its grid and the arguments that follow the tensors."""

    kernel: Any
    grid: tuple[int, ...]
    constants: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What can be chosen freely for a launch; the result is the same."""

    elements: int
    """Largest number of elements of a tile that holds several rows."""
    access: int = 1
    """How tiles are loaded and stored: see `kernelgraft.kernels.access`."""
    occupancy: int | None = None
    worker_warps: int | None = None
    blocks: int | None = None
    """Most blocks for each multiprocessor; None: one for each tile."""

    def grid(self, tiles: int, device: int) -> tuple[int]:
        """The grid for a number of tiles."""
        most = LARGEST_GRID if self.blocks is None else min(self.blocks * processors(device), LARGEST_GRID)
        return (min(tiles, most),)

    def hinted(self, kernel: Any) -> Any:
        """The kernel with the compiler hints."""
        return hinted(kernel, self.occupancy, self.worker_warps)


_launch = ct.launch
"""As it is now: other packages put slower functions of their own in its place."""
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""None where torch was built without CUDA; then no tensor is on a GPU."""
_allocate: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
"""What torch's own compiler allocates with, in half the time of `torch.empty`; None where torch has none."""
current: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""The current CUDA device. It opens the driver: for tensors on a GPU only."""


def makers(device: int, *layouts: tuple[Sequence[int], Sequence[int], torch.dtype]) -> tuple[Maker, ...] | None:
    """What makes tensors of these shapes, strides and dtypes on a CUDA device while that is `current()`.

    None: torch's own functions have to (on CPUs, too).
    """
    if device < 0 or _allocate is None:
        return None
    return tuple(functools.partial(_allocate, tuple(shape), tuple(steps), dtype) for shape, steps, dtype in layouts)


@functools.lru_cache(maxsize=4096)
def like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that `torch.empty_like` gives for a tensor of this shape and these strides."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def fire(plan: Plan, tensors: tuple[torch.Tensor, ...]) -> None:
    """Launch a plan on tensors of one device."""
    first = tensors[0]
    if not first.is_cuda:
        from kernelgraft.cutile.interpreter import launch

        launch(plan.grid, plan.kernel, (*tensors, *plan.constants))
        return
    device = first.get_device()
    if device == current():
        _launch(_stream(device), plan.grid, plan.kernel, (*tensors, *plan.constants))
    else:
        with torch.cuda.device(device):
            fire(plan, tensors)


@functools.lru_cache(maxsize=256)
def hinted(kernel: Any, occupancy: int | None, worker_warps: int | None) -> Any:
    """A kernel with compiler hints; the same object for the same hints, as each object compiles anew."""
    if occupancy is None and worker_warps is None:
        return kernel
    return kernel.replace_hints(occupancy=occupancy, num_worker_warps=worker_warps)


@functools.lru_cache(maxsize=16)
def unchecked_loads(device: int) -> bool:
    """Whether the compiler for a CUDA device (-1: the interpreter) takes loads without checks of their bounds."""
    version = compiler_versions()["nvidia-cuda-tileiras"]
    if device < 0 or version is None:
        return device < 0
    return tuple(int(part) for part in version.split(".")[:2]) >= UNCHECKED_LOADS


@functools.lru_cache(maxsize=16)
def processors(device: int) -> int:
    """Multiprocessors of a CUDA device; those of an H200 for -1, the CPU."""
    return 132 if device < 0 else int(torch.cuda.get_device_properties(device).multi_processor_count)


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last of a tensor, both counted."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    steps = [1]
    for size in shape[:0:-1]:
        steps.append(steps[-1] * max(size, 1))
    return tuple(steps[len(steps) - 1 - i] for i in range(len(shape)))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
# Names of this module are found sooner than attributes of attributes; this runs in every call of every kernel.
_compiling, _modes, _grad = torch.compiler.is_compiling, torch._C._len_torch_dispatch_stack, torch.is_grad_enabled


def eager(*tensors: torch.Tensor | None) -> bool:
    """True if a launcher may run at once: nothing traces, no gradient is wanted, all tensors are plain.

    Otherwise the custom op has to be called, through torch's dispatcher.
    """
    if _compiling() or _modes():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return False
    if _grad():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    return True
