"""The signature for which a launch compiles its kernel, worked out from tensors that need not be on a GPU.

`ct.launch` specialises a kernel to facts about each array: `KernelSignature.from_kernel_args` tells them, but only with
a CUDA driver and tensors on a GPU. Data is taken to begin at a multiple of 16 bytes, as torch allocates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.compilation import ArrayConstraint

from kernelgraft.cutile.dtypes import as_dtype
from kernelgraft.cutile.promotion import axis_of
from kernelgraft.cutile.typecheck import signature

ALIGNMENT_BYTES = 16
SHAPE_DIVISOR = 16
MOST_AXES = 5
"""Arrays with more axes are not specialised to their shape and strides."""


def launched_array(tensors: Sequence[torch.Tensor], annotation: Any) -> Any:
    """What a launch tells the compiler about an array, or about all arrays of a list: what holds for each of them."""
    first = tensors[0]
    rank, dtype = first.dim(), as_dtype(first.dtype)
    step = ALIGNMENT_BYTES * 8 // dtype.bitwidth
    shape: list[int | None] = [None] * rank
    strides: list[int | None] = [None] * rank
    whole, steps = [1] * rank, [1] * rank
    if rank <= MOST_AXES:
        for axis in range(rank):
            sizes, apart = {t.shape[axis] for t in tensors}, {t.stride(axis) for t in tensors}
            shape[axis] = 1 if sizes == {1} else None
            strides[axis] = 1 if apart == {1} else None
            whole[axis] = SHAPE_DIVISOR if all(size % SHAPE_DIVISOR == 0 for size in sizes) else 1
            steps[axis] = step if all(stride % step == 0 for stride in apart) else 1
    if annotation is not None and annotation.static_shape_dims:
        shape = [None] * rank
        for axis in annotation.static_shape_dims:
            shape[axis_of(axis, rank)] = first.shape[axis]
    if annotation is not None and annotation.static_stride_dims:
        strides = [None] * rank
        for axis in annotation.static_stride_dims:
            strides[axis_of(axis, rank)] = first.stride(axis)
    for axis in range(rank):
        # What is known exactly needs no divisor.
        whole[axis] = whole[axis] if shape[axis] is None else 1
        steps[axis] = steps[axis] if strides[axis] is None else 1
    return ArrayConstraint(
        dtype,
        rank,
        index_dtype=annotation.index_dtype if annotation is not None else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=not all(disjoint(t) for t in tensors),
        stride_constant=strides,
        shape_constant=shape,
        stride_divisible_by=steps,
        shape_divisible_by=whole,
        base_addr_divisible_by=ALIGNMENT_BYTES,
    )


def disjoint(tensor: torch.Tensor) -> bool:
    """Whether all elements lie apart, as a launch judges it: axes sorted by stride, each past the one before."""
    axes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    if axes and axes[0][0] <= 0:
        return False
    return all(outer[0] >= inner[0] * inner[1] for inner, outer in pairwise(axes))


def launch_signature(kernel: Any, args: Sequence[Any]) -> Any:
    """The signature, with its symbol, for which `ct.launch` compiles a kernel for arguments like these on a GPU."""
    found = signature(kernel, args, launched_array)
    return found.with_mangled_symbol(kernel._pyfunc.__name__)
