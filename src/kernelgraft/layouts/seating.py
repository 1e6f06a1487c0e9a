"""One place of one model: drafted without weights, seated, and taken out again."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import GraftError, UsageError
from kernelgraft.layouts import building, functions, hooks
from kernelgraft.layouts.following import VIEWS, Views, shares
from kernelgraft.layouts.records import Place
from kernelgraft.layouts.residual import with_addition
from kernelgraft.layouts.rules import Conversion, resolve
from kernelgraft.layouts.saving import NAMES, Names, take_originals
from kernelgraft.layouts.signatures import signature_drift
from kernelgraft.layouts.standing_in import PassedOn, SharedPart
from kernelgraft.sites import current, install

_BASE = "base_layer"
"""Where an adapter keeps the layer that it stands in for."""


@dataclass
class _Put:
    """The way back of one child; an object, so that a deep copy puts the copy back."""

    parent: nn.Module
    name: str
    child: nn.Module

    def __call__(self) -> None:
        self.parent._modules[self.name] = self.child


@dataclass
class Seat:
    """What is put at a place, and what it needs to come back."""

    place: Place
    parent: nn.Module
    children: tuple[nn.Module, ...]
    layout: nn.Module | None = None
    """None for a kernel without a Layout: the module stays, and runs or calls the kernel's forward."""
    names: Names | None = None
    new: dict[str, str] = field(default_factory=dict)
    """Attribute path in the Layout by key, of the tensors that rules make."""
    forward: Callable[..., Any] | None = None
    """What the parent runs instead of its forward, for a residual fusion."""
    undos: list[Callable[[], None]] = field(default_factory=list)
    views: int = 0
    """Original tensors that are now views of merged ones."""

    @property
    def seated(self) -> bool:
        """Whether it is on the model."""
        return bool(self.undos)

    @property
    def merged(self) -> list[torch.Tensor]:
        """The original tensors whose values are in a tensor of the Layout now, and come back at the end."""
        if self.names is None:
            return []
        originals = _originals(self.place, self.children)
        steps = [step for step in self.names.conversion.steps if step.converter is not None]
        return [originals[key] for step in steps for key in step.keys]

    def take_out(self) -> None:
        """Put everything back. Raises GraftError, with nothing changed, if the Layout is not what was seated."""
        if self.layout is not None:
            path = self.place.paths[0]
            if self.parent._modules.get(self.place.names[0]) is not self.layout:
                raise GraftError(f"`{path}` was replaced after the Layout; undo that first")
            there = _state(self.layout, "")
            if lost := [name for name in self.new.values() if name not in there]:
                raise GraftError(f"`{path}.{lost[0]}` is not there any more; remove or merge the adapter first")
            self._give_back(there)
        for undo in reversed(self.undos):
            undo()
        self.undos.clear()
        self.layout, self.names, self.forward = None, None, None

    def _give_back(self, there: Mapping[str, torch.Tensor]) -> None:
        """The values (and gradients) of the Layout to the original parameters, each with a storage of its own."""
        assert self.names is not None and self.layout is not None
        originals = _originals(self.place, self.children)
        conversion = self.names.conversion
        values = {key: there[name] for key, name in self.new.items()}
        if away := [k for k, t in values.items() if t.is_meta and not any(o.is_meta for o in originals.values())]:
            raise GraftError(f"`{away[0]}` is offloaded; take accelerate's hooks off the model first")
        gradients = {key: t.grad for key, t in values.items() if t.grad is not None}
        back, grads = conversion.backward(values), conversion.backward(gradients)
        trained = {
            key: values[new].requires_grad for step in conversion.steps for key, new in _newest(step, conversion)
        }
        for key, value in back.items():
            original = originals[key]
            if original is value:
                continue
            original.data = value.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(original, nn.Parameter):
                original.requires_grad_(trained[key])
                original.grad = grads[key].clone() if key in grads else None
        for child in self.children:
            child.train(self.layout.training)


@dataclass(frozen=True)
class Facts:
    """What is true of a whole model, read once for all its places."""

    modules: Counter[int]
    """How many paths each module has, by id."""
    parameters: Counter[int]
    """How many names each parameter has, by id."""
    recorded: tuple[type[nn.Module], ...]
    """The classes by which transformers finds what to record: attentions, hidden states, router logits."""

    @classmethod
    def of(cls, root: nn.Module) -> Facts:
        """The facts of a model as it is now."""
        classes: dict[type[nn.Module], None] = {}
        for module in root.modules():
            for asked in (getattr(module, "_can_record_outputs", None) or {}).values():
                for one in asked if isinstance(asked, (list, tuple)) else [asked]:
                    found = getattr(one, "target_class", one)
                    if isinstance(found, type):
                        classes[found] = None
        return cls(
            Counter(id(module) for _, module in root.named_modules(remove_duplicate=False)),
            Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False)),
            tuple(classes),
        )


def draft(root: nn.Module, place: Place, facts: Facts) -> Seat:
    """Everything that can be known before a tensor is touched. Raises UsageError with the reason if it cannot work."""
    parent = root.get_submodule(place.parent)
    children = tuple(parent.get_submodule(name) for name in place.names)
    kernel = place.kernel
    if place.function is not None:
        functions.refuse_replaced(place, children[0])
        if drift := functions.function_drift(place, children[0]):
            raise UsageError(f"{drift}: `{place.paths[0]}` would call it wrongly; take a kernel of that signature")
        return Seat(place, parent, children)
    _refuse_special(facts, place, children)
    if not kernel.entry.is_fusion:
        if drift := signature_drift(kernel.kernel, type(children[0])):
            raise UsageError(f"{drift}: `{place.paths[0]}` would be called wrongly; take a kernel of that signature")
        if kernel.layout is None:
            return Seat(place, parent, children)
    recorded = next((type(child) for child in children if isinstance(child, facts.recorded)), None)
    if recorded is not None and kernel.entry.is_fusion:
        raise UsageError(
            f"the model records the outputs of `{recorded.__name__}`, which `{kernel.name}` would take in; leave it out"
        )
    built = building.build(place, children, passes_for=recorded)
    hooks.check(place, children, built.kept)
    originals = _originals(place, children)
    here = _state(built.layout, f"{place.paths[0]}.")
    by_id = {id(tensor): key for key, tensor in originals.items()}
    kept = {key: by_id[id(tensor)] for key, tensor in here.items() if id(tensor) in by_id}
    left = [key for key in originals if id(originals[key]) not in {id(here[key]) for key in kept}]
    if adapted := [key for key in left if f".{_BASE}." in key]:
        raise UsageError(f"`{adapted[0]}` is under an adapter that `{kernel.name}Layout` would lose; attach it after")
    conversion = resolve(kernel.rules, left, getattr(root, "config", None))
    _check(place, conversion, {key: originals[key] for key in left}, {k: here[k] for k in here if k not in kept})
    _refuse_mixtures(facts, conversion, originals)
    prefix = f"{place.parent}." if place.parent else ""
    names = Names(prefix, place.names[0], conversion, kept)
    new = {key: key.removeprefix(f"{place.paths[0]}.") for key in here if key not in kept}
    residual = kernel.entry.is_fusion and kernel.fusion == "residual"
    forward = with_addition(parent, place) if residual else None
    return Seat(place, parent, children, built.layout, names, new, forward)


def seat(root: nn.Module, draft: Seat) -> None:
    """Convert the tensors and put the Layout on the model. If it raises, the model is as it was."""
    place = draft.place
    try:
        if place.function is not None:
            for undo in functions.put(place, draft.children[0]):
                draft.undos.append(undo)
            return
        if draft.layout is None:
            below = current(draft.children[0])
            draft.undos.append(install(draft.children[0], "forward", building.kernel_forward(place.kernel, below)))
            return
        views = _fill(draft)
        _install(draft, draft.layout)
        if draft.forward is not None:
            draft.undos.append(install(draft.parent, "forward", draft.forward))
        if views:
            assert draft.names is not None
            followers = Views(draft.names.conversion, draft.new, views)
            draft.layout.__dict__[VIEWS] = followers
            followers.follow(draft.layout)
        draft.views = len(views)
    except BaseException:
        for undo in reversed(draft.undos):
            undo()
        draft.undos.clear()
        raise


def _install(draft: Seat, layout: nn.Module) -> None:
    parent, place, kernel = draft.parent, draft.place, draft.place.kernel
    stand_ins: list[nn.Module] = [layout]
    for index in range(1, len(place.names)):
        stand_ins.append(SharedPart(layout, index) if kernel.fusion == "parallel" else PassedOn())
        stand_ins[-1].train(draft.children[index].training)
    hooks.move(place, draft.children, stand_ins)
    layout.__dict__[NAMES] = draft.names
    for name, child, module in zip(place.names, draft.children, stand_ins, strict=True):
        parent._modules[name] = module
        draft.undos.append(_Put(parent, name, child))
    handle = parent.register_load_state_dict_pre_hook(take_originals)
    draft.undos.append(handle.remove)


def _fill(draft: Seat) -> dict[str, torch.Tensor]:
    """Give the Layout its tensors. Returns the originals that can be views of them.

    They are not yet, so that what fails later leaves the originals as they are.
    """
    layout, names = draft.layout, draft.names
    assert layout is not None and names is not None
    originals, conversion = _originals(draft.place, draft.children), names.conversion
    sources = {key: originals[key] for step in conversion.steps for key in step.keys}
    made = conversion.forward(sources)
    back = conversion.backward(made)
    for key, value in back.items():
        if not _same_bits(value, sources[key]):
            raise UsageError(
                f"`{key}` does not come back as it was from the rules of `{draft.place.kernel.name}Layout`"
            )
    trained = {key: any(sources[k].requires_grad for k in keys) for key, keys in _origins(conversion).items()}
    for key, name in draft.new.items():
        tensor = made[key]
        owner, _, leaf = name.rpartition(".")
        module = layout.get_submodule(owner)
        if leaf in module._parameters:
            if not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=trained[key] and tensor.is_floating_point())
            module._parameters[leaf] = tensor
        else:
            module._buffers[leaf] = tensor
    gradients = {key: t.grad for key, t in sources.items() if t.is_leaf and t.grad is not None}
    for step in conversion.steps:
        if step.converter is not None and gradients and all(key in gradients for key in step.keys):
            part = Conversion((step,), conversion.config)
            for key, gradient in part.forward({k: gradients[k] for k in step.keys}).items():
                layout.get_parameter(draft.new[key]).grad = gradient
    views: dict[str, torch.Tensor] = {}
    for key, value in back.items():
        source = sources[key]
        if value is not source and not value.is_meta and shares(value, made.values()):
            views[key] = source
    return views


def _origins(conversion: Conversion) -> dict[str, tuple[str, ...]]:
    """The original keys of each new key."""
    return {new: step.keys for step in conversion.steps for new in conversion.made[step.target]}


def _newest(step: Any, conversion: Conversion) -> list[tuple[str, str]]:
    return [(key, conversion.made[step.target][0]) for key in step.keys]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or one.is_meta:
        return one.shape == other.shape
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = one.detach().contiguous(), other.detach().contiguous()
    return torch.equal(a, b) or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _originals(place: Place, children: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path, child in zip(place.paths, children, strict=True):
        found.update(_state(child, f"{path}."))
    return found


def _state(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """What a state dict holds, the tensors themselves."""
    found: dict[str, torch.Tensor] = dict(module.state_dict(keep_vars=True, prefix=prefix))
    return found


def _check(
    place: Place, conversion: Conversion, left: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> None:
    """Names and shapes, on meta: everything that the Layout has is made, everything that was there goes somewhere."""
    layout = f"{place.kernel.name}Layout"
    hollow = {key: torch.empty_like(tensor, device="meta") for key, tensor in left.items()}
    made = conversion.forward(hollow)
    for key, origin in _origins(conversion).items():
        if key not in new:
            what = f"stays `{key}`" if (key,) == origin else f"becomes `{key}`"
            raise UsageError(f"`{origin[0]}` {what}, which `{layout}` has not; correct its `conversion_mapping`")
    for key, tensor in new.items():
        if key not in made:
            raise UsageError(f"no rule makes `{key}` of `{layout}`; add one to its `conversion_mapping`")
        if made[key].shape != tensor.shape:
            shapes = f"{tuple(made[key].shape)}, `{layout}` has {tuple(tensor.shape)}"
            raise UsageError(f"the rules make `{key}` of shape {shapes}; correct the rule's dim or the Layout")
    back = conversion.backward(made)
    for key, tensor in hollow.items():
        if key not in back or back[key].shape != tensor.shape:
            raise UsageError(f"`{key}` would not be saved in its shape {tuple(tensor.shape)}; use SizedConcatenate")


def _refuse_mixtures(facts: Facts, conversion: Conversion, originals: Mapping[str, torch.Tensor]) -> None:
    """A merged tensor cannot be half frozen, half tied, or of two dtypes."""
    for step in conversion.steps:
        if step.converter is None:
            continue
        tensors = [originals[key] for key in step.keys]
        if len({t.requires_grad for t in tensors}) > 1:
            raise UsageError(f"some parts of `{step.target}` are frozen and some are not; freeze all or none of them")
        if len({t.dtype for t in tensors}) > 1:
            raise UsageError(f"the parts of `{step.target}` have several dtypes; cast them to one")
        for key, tensor in zip(step.keys, tensors, strict=True):
            if facts.parameters[id(tensor)] > 1:
                raise UsageError(f"`{key}` is tied to another parameter and cannot be merged; untie it first")


def _refuse_special(facts: Facts, place: Place, children: Sequence[nn.Module]) -> None:
    """What a Layout cannot take over: quantised, offloaded, shared or otherwise replaced modules."""
    if any(facts.modules[id(child)] > 1 for child in children):
        raise UsageError(f"`{place.paths[0]}` is the same module as another one of the model; it cannot be replaced")
    for path, child in zip(place.paths, children, strict=True):
        if isinstance(child, (PassedOn, SharedPart)) or NAMES in child.__dict__:
            raise UsageError(f"`{path}` holds a Layout already; revert that first")
        for name, module in child.named_modules():
            full = f"{path}.{name}" if name else path
            hooked = "_hf_hook" in module.__dict__
            if isinstance(module.__dict__.get("forward"), types.MethodType) and not hooked:
                raise UsageError(f"the forward of `{full}` was replaced on the instance; revert that first")
            for key, tensor in module._parameters.items():
                if tensor is None:
                    continue
                if not tensor.is_floating_point() or type(tensor) not in (nn.Parameter, torch.Tensor):
                    raise UsageError(
                        f"`{full}.{key}` is quantised or sharded (`{type(tensor).__name__}`, {tensor.dtype});"
                        " put the Layout on the plain model first"
                    )
                if tensor.is_meta and hooked:
                    raise UsageError(f"`{full}.{key}` is offloaded; apply the kernels before `dispatch_model`")
