"""Which children of a module are the projections around a gated product, seen by running it.

Used by the `gated_mlp` family only. The module's own forward runs on a stand-in that has the module's attributes and,
for each child, a recorder that calls it; the module itself is neither hooked nor changed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelgraft.families.base import Call


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a child with one tensor in and one out."""

    path: str
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Trace:
    """A forward of the form tail(f(heads(x))), with the values that it had."""

    heads: tuple[str, ...]
    """Paths of two projections of x, in the order of their calls, or of the one that holds both."""
    tail: tuple[str, ...]
    """Paths of what is called after the product, in order."""
    inner: tuple[Step, ...]
    """Other children's calls on tensors as wide as the product: the activation, if it is a child."""
    projected: tuple[torch.Tensor, ...]
    """What the heads returned."""
    product: torch.Tensor
    """What the tail was given; the output if there is no tail."""
    others: tuple[str, ...]
    """Paths of all other children that were called."""

    @property
    def form(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Heads and tail."""
        return self.heads, self.tail


class _Recorder(nn.Module):
    """Stands for a child: calls it and notes what went in and out; other attributes are the child's."""

    def __init__(self, child: nn.Module, path: str, steps: list[Step]) -> None:
        super().__init__()
        self.__dict__.update(child=child, path=path, steps=steps)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the child."""
        before = args[0].clone() if args and isinstance(args[0], torch.Tensor) else None
        y = self.child(*args, **kwargs)
        if before is not None and isinstance(y, torch.Tensor):
            self.steps.append(Step(self.path, before, y.clone()))
        return y

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["child"], name)


def _stand_in(module: nn.Module, steps: list[Step]) -> nn.Module:
    result = copy.copy(module)
    children: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(child, nn.ModuleList):
            children[name] = nn.ModuleList([_Recorder(c, f"{name}.{i}", steps) for i, c in enumerate(child)])
        else:
            children[name] = _Recorder(child, name, steps)
    result.__dict__["_modules"] = children
    return result


def trace(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Trace | str | None:
    """Run a module's forward and find heads and tail; None if it has no such form, a reason if it nearly has."""
    steps: list[Step] = []
    with torch.no_grad():
        output = original(_stand_in(module, steps), *args, **kwargs)
    x = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
    if not isinstance(output, torch.Tensor) or output.shape[:-1] != x.shape[:-1]:
        return None
    current, start = output, len(steps)
    tail: list[str] = []
    while (found := _last(steps[:start], current)) is not None:
        tail.insert(0, steps[found].path)
        current, start = steps[found].x, found
    fed = [s for s in steps[:start] if _equal(s.x, x)]
    if not tail and _gated(fed, steps, output):
        return "its output is not what its last child returns"
    single = [s for s in fed if s.y.shape == current.shape]
    double = [s for s in fed if s.y.shape[:-1] == current.shape[:-1] and s.y.shape[-1] == 2 * current.shape[-1]]
    heads = single if len(single) == 2 else double
    if not (len(single) == 2 or (len(double) == 1 and not single)):
        return None
    inner = tuple(s for s in steps[:start] if s not in heads and s.x.shape == s.y.shape == current.shape)
    used = {s.path for s in (*heads, *inner)} | set(tail)
    return Trace(
        heads=tuple(s.path for s in heads),
        tail=tuple(tail),
        inner=inner,
        projected=tuple(s.y for s in heads),
        product=current,
        others=tuple(dict.fromkeys(s.path for s in steps if s.path not in used)),
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _last(steps: list[Step], value: torch.Tensor) -> int | None:
    return next((i for i in reversed(range(len(steps))) if _equal(steps[i].y, value)), None)


def _gated(fed: list[Step], steps: list[Step], output: torch.Tensor) -> bool:
    """Two equally wide projections of x, and a third that leads back to x's width."""
    if len(fed) != 2 or fed[0].y.shape != fed[1].y.shape or fed[0].y.shape == output.shape:
        return False
    return any(s.x.shape == fed[0].y.shape and s.y.shape == output.shape for s in steps if s not in fed)


def find(call: Call) -> Trace | str | None:
    """The form of a captured call; None for whatever takes more than one tensor, or state."""
    module, values = call.module, (*call.args, *call.kwargs.values())
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    plain = all(v is None or isinstance(v, (torch.Tensor, bool, int, float, str)) for v in values)
    if len(tensors) != 1 or not plain or not tensors[0].is_floating_point() or tensors[0].ndim < 2:
        return None
    if not isinstance(call.output, torch.Tensor) or len(list(module.children())) < 2:
        return None
    return trace(call.original, module, *call.args, **call.kwargs)


def parameter_name(call: Call) -> str:
    """Name of the forward's first argument after self."""
    names = list(inspect.signature(call.original).parameters)
    return names[1] if len(names) > 1 else "hidden_states"
