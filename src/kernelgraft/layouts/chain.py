"""Do the parts of a fusion stand in the data flow as its kind says? Seen on a tiny model, call by call.

Every torch function of a run is watched, so that a second reader of what a fused module no longer computes is found
whatever it is: another module, an addition in the parent, the parent's own result.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kernelgraft.layouts import functions
from kernelgraft.layouts.findings import Finding, Severity, in_one_line, starred
from kernelgraft.layouts.records import Place
from kernelgraft.layouts.trial import Trial
from kernelgraft.models.shrinking import quiet

_METADATA = {
    "size",
    "dim",
    "numel",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "__len__",
    "ndimension",
    "is_complex",
}
"""Functions that ask for what a tensor looks like and read no value."""
_ADDITIONS = {"add", "__add__", "__radd__", "add_", "__iadd__"}


@dataclass
class _Call:
    part: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    version: int | None
    """Of its first tensor: an input that changes in place is another one."""
    producer: tuple[str, str] | None = None
    """The function that made its first tensor, and the path of the module that called it."""
    output: Any = None


@dataclass
class _Seen:
    place: Place
    calls: list[_Call] = field(default_factory=list)
    readers: list[tuple[int, str]] = field(default_factory=list)
    """(part whose output was read, by what)."""
    direct: dict[str, str] = field(default_factory=dict)
    """Parameters used outside of the modules that hold them, and by what."""


class _Watch(TorchFunctionMode):
    """Tells every place what is read where."""

    def __init__(self, seen: Sequence[_Seen], parameters: dict[int, tuple[_Seen, str]]) -> None:
        super().__init__()
        self.stack: list[tuple[str, _Seen | None, int]] = [("", None, 0)]
        """Open modules: path, the place that one belongs to, which part it is."""
        self.outputs: dict[int, tuple[_Seen, int]] = {}
        self.producers: dict[int, tuple[str, str]] = {}
        self.parameters = parameters
        self.alive: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        plain = name in _METADATA or (name == "__get__" and not isinstance(result, torch.Tensor))
        if not plain:
            for tensor in _tensors((args, kwargs)):
                self._read(tensor, name)
        if isinstance(result, torch.Tensor):
            self.producers[id(result)] = (name, self.stack[-1][0])
            self.alive.append(result)
        return result

    def _read(self, tensor: torch.Tensor, name: str) -> None:
        where = starred(self.stack[-1][0]) or "the model"
        if id(tensor) in self.outputs:
            seen, part = self.outputs[id(tensor)]
            inside = any(owner is seen and index == part + 1 for _, owner, index in self.stack)
            if not inside:
                seen.readers.append((part, f"`{name}` in `{where}`"))
        if id(tensor) in self.parameters:
            seen, path = self.parameters[id(tensor)]
            if not any(owner is seen for _, owner, _ in self.stack):
                seen.direct.setdefault(path, f"`{name}` in `{where}`")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _tensors(item)
    elif hasattr(tree, "to_tuple"):  # the outputs of transformers' models
        yield from _tensors(tree.to_tuple())


def check_flow(trial: Trial, places: Sequence[Place]) -> list[Finding]:
    """One finding for each kind of place whose parts do not stand as its fusion says, or that no call reached."""
    found = []
    try:
        every = _run(trial, places)
    except Exception as error:  # code that cannot be watched, such as a compiled one, raises whatever it likes
        what = f"{type(error).__name__}: {in_one_line(error, 120)}"
        return [Finding("flow", "note", f"the data flow of a tiny model cannot be watched ({what}): it is not checked")]
    for seen in every:
        kernel = seen.place.kernel
        for severity, message in _judged(seen):
            found.append(Finding("flow", severity, message, kernel.name))
    unique = list(dict.fromkeys([*found, *_uncalled(trial, [place for place in places if place.function is not None])]))
    # A place of a kind that was reached elsewhere needs no word.
    reached = {f.message for f in unique if f.severity == "error"}
    return [f for f in unique if f.severity == "error" or f.message not in reached]


def _uncalled(trial: Trial, places: Sequence[Place]) -> list[Finding]:
    """A note for each kind of place whose function no call reached: the numbers say nothing about its kernel."""

    def kind(place: Place) -> tuple[str, str, str]:
        assert place.function is not None
        return place.kernel.name, place.function.name, starred(place.paths[0])

    def run() -> None:
        trial.outputs()
        if trial.padded is not None:  # some functions are for the decode steps only
            with quiet(), contextlib.suppress(Exception):  # a model that generates in another way: the numbers say so
                model: Any = trial.model
                model.generate(**trial.padded, max_new_tokens=2, min_new_tokens=2, do_sample=False)

    if not places:
        return []
    with torch.no_grad():
        reached = {kind(place) for place in functions.called(places, trial.model, run)}
    said = "a run on text never calls `{}` at `{}`: `{}` is not checked there"
    return [
        Finding("flow", "note", said.format(name, path, kernel), kernel)
        for kernel, name, path in dict.fromkeys(kind(place) for place in places)
        if (kernel, name, path) not in reached
    ]


def _run(trial: Trial, places: Sequence[Place]) -> list[_Seen]:
    root = trial.model
    every = [_Seen(place) for place in places if place.function is None]  # a function takes no module away
    holders: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(id(module))
    parameters: dict[int, tuple[_Seen, str]] = {}
    mine: dict[int, tuple[_Seen, int]] = {}
    for seen in every:
        children = [root.get_submodule(path) for path in seen.place.paths]
        inner = {id(m) for child in children for m in child.modules()}
        for part, (path, child) in enumerate(zip(seen.place.paths, children, strict=True)):
            mine[id(child)] = (seen, part)
            for name, parameter in child.named_parameters():
                if holders[id(parameter)] <= inner:  # a tied one has other rightful readers
                    parameters[id(parameter)] = (seen, f"{path}.{name}")
    watch = _Watch(every, parameters)
    handles = []
    for path, module in root.named_modules():
        handles += _hooked(module, path, mine.get(id(module)), watch)
    try:
        with torch.no_grad(), watch:
            trial.outputs()
    finally:
        for handle in handles:
            handle.remove()
    return every


def _hooked(module: nn.Module, path: str, owned: tuple[_Seen, int] | None, watch: _Watch) -> list[Any]:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if owned is not None:
            first = next(_tensors((args, kwargs)), None)
            version, producer = (None, None) if first is None else (first._version, watch.producers.get(id(first)))
            owned[0].calls.append(_Call(owned[1], args, kwargs, version, producer))
        watch.stack.append((path, *(owned or (None, 0))))

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        watch.stack.pop()
        watch.alive.append(output)
        if owned is not None:
            seen, part = owned
            call = next(c for c in reversed(seen.calls) if c.part == part)
            call.output = output
            if seen.place.kernel.fusion != "parallel" and part < len(seen.place.names) - 1:
                watch.outputs.update({id(tensor): owned for tensor in _tensors(output)})
        else:
            for tensor in _tensors(output):  # handed on by a module that read nothing of it
                if id(tensor) in watch.outputs:
                    holder, part = watch.outputs[id(tensor)]
                    if path == holder.place.parent:
                        holder.readers.append((part, f"what `{starred(path) or 'the model'}` returns"))

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True),
    ]


# --- judging what was seen ---


def _judged(seen: _Seen) -> Iterator[tuple[Severity, str]]:
    place = seen.place
    where = " + ".join(f"`{starred(path)}`" for path in place.paths)
    kernel = f"`{place.kernel.name}`"
    for path, reader in seen.direct.items():
        yield (
            "error",
            f"`{starred(path)}` is also read by {reader}, past its module: {kernel} cannot take its place there",
        )
        break
    if not seen.calls:
        yield "note", f"no call of a run on text reaches {where}: the data flow for {kernel} is not checked"
        return
    if not place.kernel.entry.is_fusion:
        return
    reason = _parallel(seen) if place.kernel.fusion == "parallel" else _chain(seen)
    if reason is not None:
        mend = {
            "chain": "fuse children that are called one after the other",
            "parallel": 'fuse children that read one input (fusion = "parallel")',
            "residual": "begin with a norm that reads the sum of a residual and a branch",
        }[place.kernel.fusion]
        yield "error", f"{kernel} does not fit the data flow at {where}: {reason}; {mend}"


def _rounds(seen: _Seen) -> Iterator[list[_Call]]:
    for index in range(0, len(seen.calls), len(seen.place.names)):
        yield seen.calls[index : index + len(seen.place.names)]


def _only_input(call: _Call) -> Any:
    """The one input of a call, as what stands in for a part takes it; None if there are more, or others."""
    given = [*call.args, *call.kwargs.values()]
    return given[0] if len(given) == 1 and set(call.kwargs) <= {"hidden_states"} else None


def _chain(seen: _Seen) -> str | None:
    names = [f"`{name}`" for name in seen.place.names]
    for calls in _rounds(seen):
        order = [call.part for call in calls]
        if order != list(range(len(names))):
            silent = [names[i] for i in range(len(names)) if i not in {c.part for c in seen.calls}]
            if silent:
                return f"{silent[0]} is not called"
            return f"the calls come in the order {', '.join(names[i] for i in order)}"
        if seen.place.kernel.fusion == "residual":
            made, where = calls[0].producer or ("", "")
            if made not in _ADDITIONS or where != seen.place.parent:
                return f"the input of {names[0]} is no sum that `{starred(seen.place.parent) or 'the model'}` takes"
        for before, call in itertools.pairwise(calls):
            if _only_input(call) is None:
                return f"{names[call.part]} takes more than one input"
            if _only_input(call) is not before.output:
                return f"the input of {names[call.part]} is not the output of {names[before.part]}"
    if seen.readers:
        part, reader = seen.readers[0]
        return f"the output of {names[part]} is also read by {reader}"
    return None


def _parallel(seen: _Seen) -> str | None:
    names = [f"`{name}`" for name in seen.place.names]
    for calls in _rounds(seen):
        order = [call.part for call in calls]
        if sorted(order) != list(range(len(names))):
            silent = [names[i] for i in range(len(names)) if i not in order]
            return f"{silent[0]} is not called each time"
        for call in calls:
            if _only_input(call) is None:
                return f"{names[call.part]} takes more than one input"
            if _only_input(call) is not _only_input(calls[0]):
                return f"{names[0]} and {names[call.part]} read different inputs"
            if call.version != calls[0].version:
                return f"the input changes between {names[0]} and {names[call.part]}"
    return None
