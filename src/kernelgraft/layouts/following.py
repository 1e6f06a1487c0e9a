"""Originals that are views of merged tensors, and stay so when the model is moved or cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from kernelgraft.layouts.rules import Conversion

VIEWS = "_kernelgraft_views"
"""Key in the instance dictionary of a Layout on a model: its `Views`."""


class Views:
    """The original parameters that share the storage of a Layout's tensors.

    `new` has the attribute path in the Layout by the conversion's new key. Without this, a cast or a move of the model
    would leave the originals with the old storage, and so keep it in memory.
    """

    def __init__(self, conversion: Conversion, new: Mapping[str, str], originals: Mapping[str, torch.Tensor]) -> None:
        self.conversion = conversion
        self.new = dict(new)
        self.originals = dict(originals)

    def follow(self, layout: nn.Module) -> None:
        """Make the originals views of the tensors that the Layout has now, where that is exact."""
        there = layout.state_dict(keep_vars=True)
        values = {key: there[name] for key, name in self.new.items() if name in there}
        for key, value in self.conversion.backward(values).items():
            original = self.originals.get(key)
            if original is None or value.is_meta or not shares(value, values.values()):
                continue
            if torch._has_compatible_shallow_copy_type(original, value):
                original.data = value.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        return Views(self.conversion, self.new, {key: hollow(t, memo) for key, t in self.originals.items()})


def hollow(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """What a deep copy has in the place of a merged original: its values are in the copy of the Layout."""
    if id(tensor) not in memo:
        memo[id(tensor)] = nn.Parameter(
            torch.empty(0, dtype=tensor.dtype, device=tensor.device), requires_grad=tensor.requires_grad
        )
    copied: torch.Tensor = memo[id(tensor)]
    return copied


def following(below: Callable[..., Any]) -> Callable[..., Any]:
    """A Layout's `_apply` (what `.to()` and the like go through), after which the originals follow."""

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = below(self, *args, **kwargs)
        views: Views | None = self.__dict__.get(VIEWS)
        if views is not None:
            views.follow(self)
        return result

    return _apply


def shares(view: torch.Tensor, wholes: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor lies in the storage of one of the others."""
    pointer = view.untyped_storage().data_ptr()
    return any(whole.untyped_storage().data_ptr() == pointer for whole in wholes)
