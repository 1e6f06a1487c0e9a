"""What was recorded at a site: one call, as data; and how calls are copied and compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kernelgraft.records import Regime


@dataclass(frozen=True)
class Call:
    """One recorded call of a site, tensors cloned before the call."""

    instance: str
    """Full path of the module."""
    module: nn.Module
    """`module`: the module itself; `function`/`attention`/`statement`: the module whose method makes the call."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    regime: Regime
    original: Callable[..., Any]
    """What ran: `original(*args, **kwargs)` gives `output`. For `module` and `statement` sites args[0] is NOT the
    module: call `original(module, *args, **kwargs)`."""
    cache: Literal["dynamic", "static"] = "dynamic"
    padded: bool = False
    mutated: tuple[str, ...] = ()
    """Names (`args[0]`, `kwargs.x`) of tensors that the call changed in place."""


def copied(value: Any) -> Any:
    """`value` with every tensor in it replaced by a copy of the same strides; other objects stay the same objects."""
    return tree_map_only(torch.Tensor, _copy, value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also of an expanded or sliced tensor."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.clone()
    dense = tensor.clone()
    if dense.stride() == tensor.stride():
        return dense
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((reach,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def differ(before: Any, after: Any) -> bool:
    """True if a tensor in the one is not bit for bit that in the other (so NaN equals NaN)."""
    olds, news = tree_leaves(before), tree_leaves(after)
    if len(olds) != len(news):  # a list or dictionary that has grown
        return True
    return any(isinstance(a, torch.Tensor) and not _equal(a, b) for a, b in zip(olds, news, strict=True))


def _equal(a: torch.Tensor, b: Any) -> bool:
    if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def signature(value: Any) -> Hashable:
    """Shapes and dtypes of tensors, values of scalars, types of everything else."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(signature(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, signature(v)) for k, v in value.items())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return (type(value).__name__, value)
    return type(value).__qualname__
