"""The compiler's own front end as a type checker: it runs on any machine, without a GPU and without the compiler."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._annotated_function import HeterogeneousTupleNode, HomogeneousTupleNode
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    ListConstraint,
    ScalarConstraint,
    TupleConstraint,
)

from kernelgraft.cutile.dtypes import as_dtype
from kernelgraft.cutile.promotion import axis_of

_checked: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
"""Kernel function → the signatures for which the front end has accepted it."""


def loose_array(tensors: Sequence[torch.Tensor], annotation: Any) -> Any:
    """What the compiler must know of an array (of all arrays of a list): nothing that depends on its layout."""
    tensor = tensors[0]
    rank = tensor.dim()
    shape: list[int | None] = [None] * rank
    strides: list[int | None] = [None] * rank
    if annotation is not None:
        for axis in annotation.static_shape_dims:
            shape[axis_of(axis, rank)] = tensor.shape[axis]
        for axis in annotation.static_stride_dims:
            strides[axis_of(axis, rank)] = tensor.stride(axis)
    return ArrayConstraint(
        as_dtype(tensor.dtype),
        rank,
        index_dtype=annotation.index_dtype if annotation else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=strides,
        shape_constant=shape,
    )


def constraint(value: Any, annotation: Any, array: Callable[[Sequence[torch.Tensor], Any], Any] = loose_array) -> Any:
    """What a launch argument tells the compiler about a kernel's parameter; `array` says what a tensor tells it."""
    if isinstance(annotation, HomogeneousTupleNode):
        return TupleConstraint([constraint(item, annotation.each, array) for item in value])
    if isinstance(annotation, HeterogeneousTupleNode):
        return TupleConstraint([constraint(v, node, array) for v, node in zip(value, annotation.items, strict=True)])
    if isinstance(value, tuple):
        return TupleConstraint([constraint(item, annotation, array) for item in value])
    if annotation.constant:
        return ConstantConstraint(value)
    if isinstance(value, torch.Tensor):
        return array([value], annotation.array)
    if isinstance(value, list):
        element = array(value, annotation.list.element if annotation.list else None)
        return ListConstraint(element, alias_groups=(), elements_may_alias=array is not loose_array)
    if isinstance(value, bool):
        return ScalarConstraint(ct.bool_)
    if isinstance(value, int):
        return ScalarConstraint(annotation.scalar.dtype if annotation.scalar else ct.int32)
    if isinstance(value, float):
        return ScalarConstraint(ct.float32)
    raise TypeError(f"cuTile takes no {type(value).__name__} as a kernel's argument")


def signature(
    kernel: Any, args: Sequence[Any], array: Callable[[Sequence[torch.Tensor], Any], Any] = loose_array
) -> Any:
    """A signature of the kernel for these arguments; `array` says what a tensor tells the compiler."""
    nodes = kernel._annotated_function.parameter_annotations
    parameters = [constraint(value, node, array) for value, node in zip(args, nodes, strict=True)]
    return KernelSignature(parameters, CallingConvention.cutile_python_v2())


@cache
def _newest() -> Any:
    from cuda.tile._bytecode.version import BytecodeVersion

    return max(BytecodeVersion)


def front_end(kernel: Any, args: Sequence[Any]) -> Any:
    """The kernel's typed intermediate form for these arguments; TileError where the compiler refuses it."""
    from cuda.tile._compile import compile_tile

    found = compile_tile(
        kernel._annotated_function,
        [signature(kernel, args)],
        sm_arch=None,
        bytecode_version=_newest(),
        return_final_ir=True,
        return_cubin=False,
    )
    return found.final_ir[0]


def check_types(kernel: Any, args: Sequence[Any]) -> None:
    """Raise what the compiler would raise about this kernel with such arguments; remembered per signature."""
    nodes = kernel._annotated_function.parameter_annotations
    key = tuple(_described(value, node) for value, node in zip(args, nodes, strict=True))
    accepted = _checked.setdefault(kernel._pyfunc, set())
    if key not in accepted:
        front_end(kernel, args)
        accepted.add(key)


def _described(value: Any, node: Any) -> Any:
    """What of an argument the compiler sees, as a key."""
    if isinstance(node, HomogeneousTupleNode):
        return tuple(_described(item, node.each) for item in value)
    if isinstance(node, HeterogeneousTupleNode):
        return tuple(_described(item, each) for item, each in zip(value, node.items, strict=True))
    if isinstance(value, tuple):
        return tuple(_described(item, node) for item in value)
    if node.constant:
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        return _described_array(value, node.array)
    if isinstance(value, list):
        return (list, _described_array(value[0], node.list.element if node.list else None))
    return type(value) if isinstance(value, bool | int | float) else value


def _described_array(tensor: torch.Tensor, annotation: Any) -> Any:
    fixed: tuple[Any, ...] = ()
    if annotation is not None:
        shape = tuple(tensor.shape[axis] for axis in annotation.static_shape_dims)
        fixed = (shape, tuple(tensor.stride(axis) for axis in annotation.static_stride_dims))
    return (tensor.dtype, tensor.dim(), *fixed)
