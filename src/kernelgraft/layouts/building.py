"""A Layout for one place, without weights, and the class that runs the kernel's forward on it.

The Layout is built by its own `__init__` on meta, from hollow copies of the children (their tensors on meta): nothing
is allocated, no random number is drawn, no child is changed. What it keeps of the children, whole modules or single
parameters, is then exchanged for the originals themselves, so hooks, adapters and ties in them live on.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import UsageError
from kernelgraft.layouts import arguments
from kernelgraft.layouts.following import following
from kernelgraft.layouts.records import LoadedKernel, Place
from kernelgraft.layouts.standing_in import SharedPart

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Built:
    """A Layout whose new tensors are still on meta."""

    layout: nn.Module
    kept: frozenset[int]
    """Ids of the original modules and parameters that it holds."""


def build(place: Place, children: Sequence[nn.Module], *, passes_for: type[nn.Module] | None = None) -> Built:
    """The Layout of a place. Raises UsageError, naming the Layout, if its `__init__` cannot be run.

    To `isinstance` it is also a `passes_for`: the class whose outputs the model records.
    """
    kernel = place.kernel
    owner = layout_class(kernel, passes_for)
    hollow = _Hollow(children)
    try:
        if kernel.entry.is_fusion:
            layout = _construct(lambda: owner(*hollow.copies))
        else:
            keywords = arguments.for_layout(children[0], kernel.layout or owner)
            layout = _construct(lambda: owner(**keywords))
            if any(b is not None and b.is_meta for b in layout.buffers()) and not _all_meta(children):
                _fill_buffers(layout, owner(**keywords))
    except UsageError:
        raise
    except Exception as error:
        where = " + ".join(f"`{path}`" for path in place.paths)
        raise UsageError(
            f"`{kernel.name}Layout` cannot be built for {where}: {type(error).__name__}: {error}; "
            "it is made for other modules"
        ) from error
    kept = hollow.give_back(layout)
    layout.train(children[0].training)
    for module in layout.modules():
        if id(module) not in kept:
            module.__dict__["_is_hf_initialized"] = True  # transformers leaves such modules alone
    return Built(layout, kept)


_classes: dict[tuple[int, int, int, bool], type[nn.Module]] = {}


def layout_class(kernel: LoadedKernel, passes_for: type[nn.Module] | None = None) -> type[nn.Module]:
    """The Layout with the kernel's forward: a subclass, one for each pair; the package's classes stay as they are."""
    layout = kernel.layout
    if layout is None:
        raise UsageError(f"`{kernel.name}` has no `{kernel.name}Layout` beside it, which a fusion needs; add one")
    parallel = kernel.entry.is_fusion and kernel.fusion == "parallel"
    key = (id(kernel.kernel), id(layout), id(passes_for), parallel)
    if key not in _classes:
        own = layout.forward if layout.forward is not nn.Module.forward else None
        forward = kernel_forward(kernel, own)
        # The classes are in the body so that they live as long as their ids are in use.
        body: dict[str, Any] = {"forward": forward, "_kernelgraft_classes": (kernel.kernel, layout, passes_for)}
        body.update(_apply=following(layout._apply))
        body.update(__deepcopy__=_deep_copy, __copy__=_shallow_copy, __reduce_ex__=_refuse_pickling)
        if passes_for is not None:
            body["__class__"] = property(lambda self: passes_for)
        if parallel:
            body = {**body, "forward": SharedPart.first, "_kernelgraft_whole": forward}
        body.update(__module__=layout.__module__, __doc__=layout.__doc__, __qualname__=layout.__qualname__)
        _classes[key] = type(layout.__name__, (layout,), body)
    return _classes[key]


def _deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    made = _shallow_copy(self, empty=True)
    memo[id(self)] = made
    made.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return made


def _shallow_copy(self: nn.Module, empty: bool = False) -> nn.Module:
    owner = type(self)
    made: nn.Module = owner.__new__(owner)
    made.__dict__.update({} if empty else self.__dict__)
    return made


def _refuse_pickling(self: nn.Module, protocol: int) -> Any:
    # Its class is made here, and what is installed on instances beside it is lost in a pickle.
    raise UsageError(
        f"a model with a `{type(self).__name__}` cannot be pickled; use `save_pretrained`, or revert the Layouts first"
    )


def kernel_forward(loaded: LoadedKernel, own: Forward | None) -> Forward:
    """What runs: the kernel, or the forward `own` (if there is one) where the kernel says that it cannot."""
    kernel: Forward = loaded.kernel.forward
    backward, traced = loaded.has_backward, loaded.can_torch_compile
    if backward and (traced or own is None):
        return kernel

    @functools.wraps(kernel)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if own is not None and not traced and torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        if backward or not torch.is_grad_enabled():
            return kernel(self, *args, **kwargs)
        if own is not None:
            return own(self, *args, **kwargs)
        with torch.no_grad():
            result = kernel(self, *args, **kwargs)
        watched = [t for t in (*args, *kwargs.values(), *self.parameters()) if isinstance(t, torch.Tensor)]
        return _NoBackward.apply(type(self).__name__, result, *watched)

    return forward


class _NoBackward(torch.autograd.Function):
    """Marks a result through which no gradient flows: a backward pass says so instead of leaving it out."""

    @staticmethod
    def forward(ctx: Any, name: str, result: torch.Tensor, *watched: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UsageError(
            f"the kernel of `{ctx.name}` declares `has_backward = False`; revert it, or give its Layout a forward"
        )


class _Hollow:
    """Copies of modules with their parameters on meta; everything else in them is shared with the originals."""

    def __init__(self, children: Sequence[nn.Module]) -> None:
        memo: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}
        self._alive: list[Any] = [memo]
        for module in (m for child in children for m in child.modules()):
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in memo:
                    shell = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                    memo[id(parameter)] = shell
                    self._originals[id(shell)] = parameter
            for name, value in module.__dict__.items():
                if name in ("_parameters", "_modules", "_non_persistent_buffers_set"):
                    continue
                if name == "_buffers":
                    memo.update({id(b): b for b in value.values() if b is not None})
                elif name in arguments.INTERNAL and isinstance(value, dict):
                    memo[id(value)] = collections.OrderedDict()  # a hook may be bound to the whole model
                elif not isinstance(value, nn.Module):
                    memo[id(value)] = value
        self.copies = [copy.deepcopy(child, memo) for child in children]
        for child, mine in zip(children, self.copies, strict=True):
            for original, copied in zip(child.modules(), mine.modules(), strict=True):
                self._originals[id(copied)] = original
                self._alive.append(copied)
        self._looks = {id(m): _tensors(m) for mine in self.copies for m in mine.modules()}

    def give_back(self, layout: nn.Module) -> frozenset[int]:
        """Put the originals where the Layout holds untouched copies; ids of all originals that it then holds."""
        kept: set[int] = set()
        for module in list(_walk_and_swap(layout, self._swap)):
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self._originals:
                    module._parameters[name] = self._originals[id(parameter)]
        held = {id(original) for original in self._originals.values()}
        for module in layout.modules():
            kept.update({id(module)} & held)
            kept.update({id(p) for p in module._parameters.values() if p is not None} & held)
        return frozenset(kept)

    def _swap(self, module: nn.Module) -> nn.Module | None:
        if id(module) in self._originals and _tensors(module) == self._looks[id(module)]:
            original: nn.Module = self._originals[id(module)]
            return original
        return None


def _walk_and_swap(module: nn.Module, swap: Callable[[nn.Module], nn.Module | None]) -> Iterator[nn.Module]:
    """Each module that is not an original, after its children were exchanged."""
    yield module
    for name, child in module._modules.items():
        if child is None:
            continue
        original = swap(child)
        if original is None:
            yield from _walk_and_swap(child, swap)
        else:
            module._modules[name] = original


def _tensors(module: nn.Module) -> dict[str, int]:
    return {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}


def _construct(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return make()


def _all_meta(children: Sequence[nn.Module]) -> bool:
    return all(p.is_meta for child in children for p in child.parameters())


def _fill_buffers(layout: nn.Module, real: nn.Module) -> None:
    """Values of the buffers that `__init__` computes; those are lost on meta."""
    for mine, theirs in zip(layout.modules(), real.modules(), strict=True):
        for name, buffer in theirs._buffers.items():
            mine._buffers[name] = buffer
