"""Does a Solution serve this call? A pure question with the reason in words; unknown is refused."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernelgraft.records import Definition, Guard, TensorSpec


def refuses(guard: Guard, definition: Definition, inputs: Sequence[Any]) -> str | None:
    """Why a call of a Definition with these inputs is outside the guard; None if it is inside.

    A call that is not one of the Definition's at all (other rank, dtype, const axis, or a broken constraint) is refused
    too. Whether the shape was measured (`guard.static_shapes`) is the dispatcher's question, not asked here.
    """
    sizes, reason = _bind(definition, inputs)
    if reason is not None:
        return reason
    return _tensors(guard, definition, inputs) or _axes(guard, definition, sizes)


def bind_axes(definition: Definition, inputs: Sequence[Any]) -> dict[str, int]:
    """Sizes of all axes of a Definition, read off its inputs; raises ValueError if they are not inputs of it."""
    sizes, reason = _bind(definition, inputs)
    if reason is not None:
        raise ValueError(f"inputs of `{definition.name}`: {reason}")
    return sizes


def _bind(definition: Definition, inputs: Sequence[Any]) -> tuple[dict[str, int], str | None]:
    sizes = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    if len(inputs) != len(definition.inputs):
        return sizes, f"{len(inputs)} inputs where there are {len(definition.inputs)}"
    for (name, spec), value in zip(definition.inputs.items(), inputs, strict=True):
        if spec.shape is None:
            if isinstance(value, torch.Tensor):
                return sizes, f"{name} is a tensor where a number is needed"
            continue
        if reason := _unlike(spec, value):
            return sizes, f"{name} {reason}"
        for axis, size in zip(spec.shape, value.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                return sizes, f"{name} has {axis}={size} where it is {sizes[axis]}"
    return sizes, None


def _unlike(spec: TensorSpec, value: Any) -> str | None:
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return f"is a {type(value).__name__} where a plain tensor is needed"
    if (found := str(value.dtype).removeprefix("torch.")) != spec.dtype:
        return f"has dtype {found} where it is {spec.dtype}"
    if value.dim() != len(spec.shape or ()):
        return f"has {value.dim()} dimensions where it has {len(spec.shape or ())}"
    return None


def _tensors(guard: Guard, definition: Definition, inputs: Sequence[Any]) -> str | None:
    device = None
    grad = not guard.autograd and torch.is_grad_enabled()
    for name, value in zip(definition.inputs, inputs, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type not in guard.devices:
            return f"{name} is on {value.device.type}, served are {' and '.join(guard.devices)}"
        if device is not None and value.device != device:
            return f"{name} is on {value.device}, other inputs are on {device}"
        device = value.device
        if value.is_floating_point() and (dtype := str(value.dtype).removeprefix("torch.")) not in guard.dtypes:
            return f"{name} has dtype {dtype}, served are {', '.join(guard.dtypes)}"
        if grad and value.requires_grad:
            return f"{name} needs a gradient, which it does not compute"
        if name in guard.contiguous and not value.is_contiguous():
            return f"{name} is not contiguous"
        if name in guard.last_dim_contiguous and value.dim() and value.size(-1) > 1 and value.stride(-1) != 1:
            return f"{name} has stride {value.stride(-1)} in its last dimension, served is 1"
    return None


def _axes(guard: Guard, definition: Definition, sizes: dict[str, int]) -> str | None:
    """The sizes found are not named: there would be as many reasons, and torch.compile cannot write symbolic ones."""
    for axis, largest in guard.max_axes.items():
        if sizes.get(axis, largest + 1) > largest:
            return f"{axis} is larger than {int(largest)}"
    for first, second in guard.equal_axes:
        if sizes.get(first) != 1 and sizes.get(first) != sizes.get(second):
            return f"{first} is neither 1 nor equal to {second}"
    for constraint in definition.constraints:
        if not constraint_check(constraint)(**sizes):
            return f"it breaks the constraint {constraint}"
    return None


_checks: dict[str, Callable[..., bool]] = {}
"""A plain dictionary, which torch.compile reads without a graph break once it is filled."""


def constraint_check(constraint: str) -> Callable[..., bool]:
    """A Definition's constraint as a function of its axes, by keyword; further axes are ignored."""
    if constraint not in _checks:
        names = {node.id for node in ast.walk(ast.parse(constraint, mode="eval")) if isinstance(node, ast.Name)}
        axes = sorted(name for name in names if not hasattr(builtins, name))
        _checks[constraint] = eval(f"lambda {''.join(f'{axis}, ' for axis in axes)}**_: {constraint}", {})
    return _checks[constraint]
