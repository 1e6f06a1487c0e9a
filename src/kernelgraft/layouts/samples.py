"""One place of each kind: what a check looks at instead of every layer, and how tensors that came back differ."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelgraft.layouts.building import Built, build
from kernelgraft.layouts.findings import starred
from kernelgraft.layouts.records import Place
from kernelgraft.layouts.rules import Tensors


@dataclass(frozen=True)
class Sample:
    """A place that stands for all places of its kind in the model."""

    place: Place
    children: tuple[nn.Module, ...]

    @property
    def where(self) -> str:
        """How messages name it."""
        return " + ".join(f"`{path}`" for path in dict.fromkeys(starred(p) for p in self.place.paths))

    def values(self) -> Tensors:
        """Parameters and buffers of the children themselves, by full name."""
        return {
            f"{path}.{name}": tensor
            for path, child in zip(self.place.paths, self.children, strict=True)
            for name, tensor in child.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }

    def built(self) -> Built:
        """The Layout of this place, on meta. Raises UsageError."""
        return build(self.place, self.children)

    def moved(self, layout: nn.Module) -> Tensors:
        """Those that the rules take to the Layout: all but what it holds as it is."""
        held = {id(t) for t in layout.state_dict(keep_vars=True).values()}
        return {name: tensor for name, tensor in self.values().items() if id(tensor) not in held}


def representatives(root: nn.Module, places: Sequence[Place]) -> list[Sample]:
    """One place of each kind: same kernel, path up to indices, classes, names and shapes."""
    kinds: dict[Any, Sample] = {}
    for place in places:
        sample = Sample(place, tuple(root.get_submodule(path) for path in place.paths))
        classes = tuple(type(child) for child in sample.children)
        looks = tuple((starred(name), tuple(tensor.shape)) for name, tensor in sample.values().items())
        path = (starred(place.parent), *(starred(name) for name in place.names))
        key = (id(place.kernel), path, place.function, classes, looks)
        kinds.setdefault(key, sample)
    return list(kinds.values())


def on_meta(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The same without values."""
    return {n: torch.empty_like(t, device="meta") for n, t in tensors.items() if isinstance(t, torch.Tensor)}


def differences(before: Mapping[str, torch.Tensor], back: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Where names, shapes and (off meta) values that come back differ from those that went in, in words."""
    for name in before.keys() | back.keys():
        if name not in back:
            others = difflib.get_close_matches(name, [n for n in back if n not in before], 1, 0.3)
            yield (
                f"`{starred(name)}` is saved as `{starred(others[0])}`" if others else f"`{starred(name)}` is not saved"
            )
        elif name in before and before[name].shape != back[name].shape:
            yield f"`{starred(name)}` is {shape_of(before[name])} and saved as {shape_of(back[name])}"
        elif name in before and not before[name].is_meta and not torch.equal(before[name], back[name]):
            yield f"`{starred(name)}` is saved with other values"


def shape_of(tensor: torch.Tensor) -> str:
    """`[2, 3]`."""
    return f"[{', '.join(map(str, tensor.shape))}]"
