"""The original names, shapes and bits of a converted model, for files.

`model.state_dict()` speaks of the tensors that are there: its keys are those of `named_parameters`, as everything that
shards, offloads or averages a model expects. `save_pretrained` writes what the unconverted model would, and
`load_state_dict` takes either form. `original_state_dict` is the first form turned into the second.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import UsageError
from kernelgraft.layouts.rules import Conversion
from kernelgraft.sites import Undo, current, install

NAMES = "_kernelgraft_names"
"""Key in the instance dictionary of a Layout on a model: its `Names`."""
_SAVING = "_kernelgraft_saving"


@dataclass(frozen=True)
class Names:
    """How the tensors of one Layout are called and shaped in the original model.

    Keys are those of the root at the time of applying; `parent` is the prefix (with its dot) that they all have, which
    may be another when the model is wrapped, copied or saved in part.
    """

    parent: str
    first: str
    conversion: Conversion
    kept: Mapping[str, str] = field(default_factory=dict)
    """Original key by the Layout's key, of tensors that were taken over without a rule."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Names:
        return self  # it is written once, and copies of a model have the same names

    def back(self, state: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
        """A state dict with this place's keys in original form; None if there are none of them."""
        here = {self.parent + key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
        found: dict[str, Any] = {}
        gone: set[str] = set()
        for key, original in self.kept.items():
            if key in here and key != original:
                found[original] = state[here[key]]
                gone.add(here[key])
        mine = {key: state[here[key]] for targets in self.conversion.made.values() for key in targets if key in here}
        found.update(self.conversion.backward(mine))
        gone.update(here[key] for key in self.conversion.complete(mine))
        if not gone:
            return None
        renamed = {prefix + key.removeprefix(self.parent): value for key, value in found.items()}
        return {**{key: value for key, value in state.items() if key not in gone}, **renamed}

    def forth(self, state: dict[str, Any], prefix: str) -> None:
        """Turn original keys of a state dict into this place's, in place."""
        there = {prefix + key.removeprefix(self.parent): key for step in self.conversion.steps for key in step.keys}
        mine = {key: state[name] for name, key in there.items() if name in state}
        if mine and len(mine) == len(there) and not self._holds_new(state, prefix):
            made = self.conversion.forward(mine)
            for name in there:
                del state[name]
            state.update({prefix + key.removeprefix(self.parent): value for key, value in made.items()})
        for key, original in self.kept.items():
            name, new = (prefix + k.removeprefix(self.parent) for k in (original, key))
            if name in state and name != new and new not in state:
                state[new] = state.pop(name)

    def _holds_new(self, state: Mapping[str, Any], prefix: str) -> bool:
        targets = [key for keys in self.conversion.made.values() for key in keys]
        return all(prefix + key.removeprefix(self.parent) in state for key in targets)


def original_state_dict(model: nn.Module, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`model.state_dict()` (or that one) under the original names, in the original shapes; views where possible.

    Keys that are not those of a converted place stay as they are, so what is original already is unchanged.
    """
    refuse_quantised_layouts(model)
    found = dict(model.state_dict() if state is None else state)
    for path, module in model.named_modules():
        names: Names | None = module.__dict__.get(NAMES)
        if names is not None:
            found = names.back(found, path.removesuffix(names.first)) or found
    return found


def refuse_quantised_layouts(model: nn.Module) -> None:
    """Raise UsageError if tensors of a Layout were quantised: no rule makes the original ones of them."""
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters() if NAMES in module.__dict__ else ():
            if not tensor.is_floating_point() or type(tensor).__module__.partition(".")[0] != "torch":
                raise UsageError(
                    f"`{path}.{name}` was quantised in its Layout (`{type(tensor).__name__}`), so the original tensors "
                    "are gone; save or revert before quantising, or load again without kernels"
                )


def save_originals(root: nn.Module) -> None:
    """Make `save_pretrained` of a model, and of the models in it that hold a converted place, write original names."""
    for module in root.modules():
        if not callable(getattr(type(module), "save_pretrained", None)) or _SAVING in module.__dict__:
            continue
        if any(NAMES in inner.__dict__ for inner in module.modules()):
            below = current(module, "save_pretrained")
            module.__dict__[_SAVING] = install(module, "save_pretrained", _saving(below))


def save_plainly(root: nn.Module) -> None:
    """Undo `save_originals` where no converted place is left."""
    for module in root.modules():
        undo: Undo | None = module.__dict__.get(_SAVING)
        if undo is not None and not any(NAMES in inner.__dict__ for inner in module.modules()):
            undo()
            del module.__dict__[_SAVING]


def _saving(below: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(below)

    @functools.wraps(below)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        state = original_state_dict(self, _loaded(self, bound.arguments.get("state_dict")))
        # What lies across another tensor's storage is no tensor of its own for a file.
        state = {key: t.contiguous() if isinstance(t, torch.Tensor) else t for key, t in state.items()}
        bound.arguments["state_dict"] = state
        if getattr(self, "hf_quantizer", None) is None:
            return below(*bound.args, **bound.kwargs)
        # A quantised model is asked for its tensors again, whatever state dict is given.
        before = {name: value for name, value in self.__dict__.items() if name == "state_dict"}
        self.__dict__["state_dict"] = lambda *_, **__: dict(state)
        try:
            return below(*bound.args, **bound.kwargs)
        finally:
            del self.__dict__["state_dict"]
            self.__dict__.update(before)

    return save_pretrained


def _loaded(model: nn.Module, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A state dict in which the tensors of converted places are there, not offloaded: rules cannot run on meta."""
    found = dict(model.state_dict() if state is None else state)
    away = [
        f"{path}."
        for path, module in model.named_modules()
        if NAMES in module.__dict__ and any(t.is_meta for t in module.state_dict().values())
    ]
    if away:
        from transformers.integrations.accelerate import load_offloaded_parameter

        for key, value in found.items():
            if key.startswith(tuple(away)) and isinstance(value, torch.Tensor) and value.is_meta:
                found[key] = load_offloaded_parameter(model, key)
    return found


def take_originals(parent: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before the parent of converted places loads a state dict: original keys become theirs."""
    for name, child in parent.named_modules():
        names: Names | None = child.__dict__.get(NAMES)
        if names is not None:
            names.forth(state, prefix + name.removesuffix(names.first))
