"""What stands at the names of the other children of a fusion, so that the parent's code stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PassedOn(nn.Identity):
    """A child whose work a fusion does elsewhere: it hands on its first argument, whatever else comes with it."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The first argument, which models may name."""
        return hidden_states


class SharedPart(nn.Module):
    """A child of a parallel fusion: its share of what the Layout computes once for all.

    The call that comes first computes all shares; those that follow with the same input take theirs. Another input, or
    another grad mode, computes afresh: the shares of one call can never serve another.
    """

    def __init__(self, owner: nn.Module, index: int) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # not a submodule: its parameters have one home
        self.index = index

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The share of this part for these inputs."""
        return take_share(self.__dict__["owner"], self.index, hidden_states)

    @staticmethod
    def first(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """The forward of the Layout itself, which stands at the name of the first part."""
        return take_share(self, 0, hidden_states)


class _Waiting(tuple[Any, ...]):
    """Shares that nobody took yet, with the input, grad mode and version that they are for; no copy has them."""

    def __deepcopy__(self, memo: Any) -> None:
        return None


def take_share(layout: Any, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
    """Share `index` of the Layout's output for an input; the whole is computed if it is not there."""
    waiting = layout.__dict__.get("_kernelgraft_waiting")
    state = (torch.is_grad_enabled(), _version(hidden_states))
    if waiting is None or waiting[0] is not hidden_states or waiting[1] != state or index not in waiting[2]:
        shares = layout._kernelgraft_whole(hidden_states)
        waiting = (hidden_states, state, dict(enumerate(shares)))
    share: torch.Tensor = waiting[2][index]
    rest = {other: value for other, value in waiting[2].items() if other != index}
    layout._kernelgraft_waiting = _Waiting((hidden_states, state, rest)) if rest else None
    return share


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written in place, where that is counted."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version
