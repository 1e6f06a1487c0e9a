"""Which modules of one model a set of kernels replaces.

Class names and paths must both match. What a fusion takes, a string key leaves alone: the string means "every module of
this class that nothing more exact names". A string that is in no class name names a function that modules call.
Anything ambiguous is refused before a module is touched.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from kernelgraft.errors import ConflictError, UsageError
from kernelgraft.layouts import functions
from kernelgraft.layouts.records import LoadedKernel, Part, Place


@dataclass(frozen=True)
class Untouched:
    """A module that a key speaks of, or nearly, and that stays as it is."""

    path: str
    class_name: str
    kernel: str
    reason: str
    function: str | None = None
    """The name of the function that it is about; None: the module itself."""


@dataclass(frozen=True)
class Matching:
    """The replacements in the order of the kernels, those of functions last, and what was passed over."""

    places: tuple[Place, ...]
    untouched: tuple[Untouched, ...]


def root_of(model: nn.Module) -> nn.Module:
    """The model that paths start from: `model`, or the transformers model that an adapter or a compiler wraps."""
    if isinstance(model, PreTrainedModel):
        return model
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)


def places(model: nn.Module, loaded: Sequence[LoadedKernel]) -> list[Place]:
    """Every replacement; see `match`."""
    return list(match(model, loaded).places)


def match(model: nn.Module, loaded: Sequence[LoadedKernel]) -> Matching:
    """Find the places of each kernel in a model (live or on meta); nothing is changed.

    Raises UsageError if a key matches nothing (naming what is near), or a pattern matches two children of one parent;
    ConflictError if two kernels want one module, or one wants a module inside another's.
    """
    modules = dict(root_of(model).named_modules(remove_duplicate=False))
    untouched: list[Untouched] = []
    fused: dict[int, list[Place]] = {}
    for index, kernel in enumerate(loaded):
        if kernel.entry.is_fusion:
            fused[index] = _fusions(kernel, modules, untouched)
    _refuse_overlaps([place for group in fused.values() for place in group])
    owner = {path: place for group in fused.values() for place in group for path in place.paths}

    single: dict[int, list[Place]] = {}
    holders: dict[str, Place] = {}
    unmatched: list[int] = []
    # A key that is the name of the class goes before one that is found in it.
    order = sorted(range(len(loaded)), key=lambda i: not _names_a_class(loaded[i], modules))
    for index in (i for i in order if not loaded[i].entry.is_fusion):
        kernel = loaded[index]
        single[index] = []
        if not any(class_matches(kernel.entry.parts[0].class_name, m) for path, m in modules.items() if path):
            unmatched.append(index)
            continue
        for place in _singles(kernel, modules, owner, untouched):
            path = place.paths[0]
            held = holders.setdefault(path, place)
            if held is place:
                single[index].append(place)
            elif _names_a_class(held.kernel, modules) and not _names_a_class(kernel, modules):
                reason = f"the key `{held.kernel.entry.key}` names its class"
                untouched.append(Untouched(path, type(modules[path]).__name__, kernel.name, reason))
            else:
                both = f"the keys `{held.kernel.entry.key}` and `{kernel.entry.key}`"
                raise ConflictError(f"`{path}` is matched by {both}; make one of them the name of the class")
    found = [place for index in range(len(loaded)) for place in (*fused.get(index, ()), *single.get(index, ()))]
    _refuse_overlaps(found)
    found += _functions([loaded[index] for index in sorted(unmatched)], modules, found, untouched)
    return Matching(tuple(found), tuple(untouched))


def class_matches(wanted: str, module: nn.Module) -> bool:
    """Whether a class name is `wanted`, or `wanted` is a regex found in it."""
    name = type(module).__name__
    return name == wanted or _compiled(wanted).search(name) is not None


def path_pattern(path: str) -> re.Pattern[str]:
    """The regex of a path with wildcards: `*` alone is one segment, inside a segment any run without a dot.

    Raises UsageError for an empty segment or `**`.
    """
    segments = path.split(".")
    for segment in segments:
        if not segment or "**" in segment:
            raise UsageError(f"the path `{path}` has the segment `{segment}`; write `*` once for each segment")
    return re.compile(r"\.".join(_segment(s) for s in segments))


def _segment(segment: str) -> str:
    return r"[^.]+" if segment == "*" else r"[^.]*".join(re.escape(literal) for literal in segment.split("*"))


def _compiled(wanted: str) -> re.Pattern[str]:
    try:
        return re.compile(wanted)
    except re.error as error:
        raise UsageError(f"the class name `{wanted}` is no regular expression ({error}); write it exactly") from error


def _split(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition(".")
    return parent, name


def _names_a_class(kernel: LoadedKernel, modules: dict[str, nn.Module]) -> bool:
    """Whether a string key is the name of a class of the model."""
    wanted = kernel.entry.parts[0].class_name
    return not kernel.entry.is_fusion and any(type(module).__name__ == wanted for module in modules.values())


def _singles(
    kernel: LoadedKernel, modules: dict[str, nn.Module], owner: dict[str, Place], untouched: list[Untouched]
) -> list[Place]:
    """The places of a string key: modules whose class has exactly that name; if there are none, by regex."""
    wanted = kernel.entry.parts[0].class_name
    inner = {path: module for path, module in modules.items() if path}
    hits = [path for path, module in inner.items() if type(module).__name__ == wanted]
    hits = hits or [path for path, module in inner.items() if class_matches(wanted, module)]
    free = []
    for path in hits:
        taker = owner.get(path) or next((p for o, p in owner.items() if path.startswith(f"{o}.")), None)
        if taker is None:
            free.append(Place(kernel, *_named(path)))
        else:
            reason = f"the fusion `{taker.kernel.name}` takes it"
            untouched.append(Untouched(path, type(modules[path]).__name__, kernel.name, reason))
    if not free:
        raise UsageError(f"the key `{wanted}` matches only modules that fusions take; leave it out")
    return free


def _functions(
    kernels: Sequence[LoadedKernel],
    modules: dict[str, nn.Module],
    taken: Sequence[Place],
    untouched: list[Untouched],
) -> list[Place]:
    """The places of string keys that no class matches: modules that call the function of that name.

    A name by which a function is registered goes before one that it has itself.
    """
    if not kernels:
        return []
    replaced = {path: place for place in taken for path in place.paths}
    unique = {id(module): path for path, module in reversed(modules.items())}
    found: list[Place] = []
    holders: dict[tuple[str, str], Place] = {}
    for kernel in kernels:
        wanted = kernel.entry.parts[0].class_name
        both = [(path, functions.uses_named(modules[path], wanted)) for path in reversed(unique.values())]
        registered = any(use for _, (use, _) in both)
        hits = [(path, use) for path, (by, own) in both for use in (by if registered else own)]
        if not hits:
            near = _near(wanted, {type(m).__name__ for m in modules.values()} | _function_names(modules.values()))
            raise UsageError(f"the key `{wanted}` matches no class and no function of the model; {near}")
        if kernel.layout is not None:
            raise UsageError(
                f"the key `{wanted}` is a function of the model, which has no parameters for "
                f"`{kernel.layout.__name__}`: give a kernel without a Layout"
            )
        free = []
        for path, use in hits:
            taker = replaced.get(path) or next((replaced[o] for o in _ancestors(path) if o in replaced), None)
            if taker is not None:
                reason = f"`{taker.kernel.name}` replaces the module that calls `{use.name}`"
                untouched.append(Untouched(path, type(modules[path]).__name__, kernel.name, reason, use.name))
                continue
            free.append(Place(kernel, *_named(path), use))
            held = holders.setdefault((path, use.name), free[-1])
            if held is not free[-1]:
                keys = f"the keys `{held.kernel.entry.key}` and `{wanted}`"
                raise ConflictError(f"`{use.name}` at `{path}` is matched by {keys}; keep one of them")
        if not free:
            raise UsageError(f"the key `{wanted}` matches only functions of modules that are replaced; leave it out")
        found += free
    return found


def _function_names(modules: Iterable[nn.Module]) -> set[str]:
    return {name for module in {type(m): m for m in modules}.values() for name in functions.names(module)}


def _named(path: str) -> tuple[str, tuple[str, ...]]:
    parent, name = _split(path)
    return parent, (name,)


def _fusions(kernel: LoadedKernel, modules: dict[str, nn.Module], untouched: list[Untouched]) -> list[Place]:
    """The places of a tuple key: parents that have, for each part, one child of that path and class."""
    columns = [_candidates(part, modules, kernel, untouched) for part in kernel.entry.parts]
    parents = [parent for parent in columns[0] if all(parent in column for column in columns)]
    found = []
    for parent in parents:
        names = []
        for part, column in zip(kernel.entry.parts, columns, strict=True):
            if len(column[parent]) > 1:
                several = ", ".join(f"`{name}`" for name in column[parent])
                raise UsageError(f"{part} matches {several} of `{parent}`; make the path exact")
            names.append(column[parent][0])
        if len(set(names)) < len(names):
            raise UsageError(f"two parts of {kernel.entry} are the same module `{parent}.{names[0]}`; name each once")
        found.append(Place(kernel, parent, tuple(names)))
    for parent, names_here in ((parent, names) for column in columns for parent, names in column.items()):
        if parent not in parents:
            for name in names_here:
                path = f"{parent}.{name}" if parent else name
                reason = "its parent lacks the other parts of the fusion"
                untouched.append(Untouched(path, type(modules[path]).__name__, kernel.name, reason))
    if not found:
        here = [str(part) for part in kernel.entry.parts]
        raise UsageError(f"{' and '.join(here)} have no parent in common in this model; give all parts one parent")
    return found


def _candidates(
    part: Part, modules: dict[str, nn.Module], kernel: LoadedKernel, untouched: list[Untouched]
) -> dict[str, list[str]]:
    """Child names by parent path of the modules that a part means."""
    pattern = None if part.path is None else path_pattern(part.path)
    here = [path for path in modules if path and (pattern is None or pattern.fullmatch(path))]
    if not here:
        near = _near(part.path or "", {_starred(path) for path in modules if path})
        raise UsageError(f"the path `{part.path}` matches no module of the model; {near}")
    fits = [path for path in here if class_matches(part.class_name, modules[path])]
    if not fits:
        classes = sorted({type(modules[path]).__name__ for path in here})
        there = ", ".join(f"`{name}`" for name in classes[:4])
        raise UsageError(f"`{part.path}` holds {there}, no `{part.class_name}`; correct the class name or the path")
    for path in here:
        if path not in fits and part.path is not None:
            name = type(modules[path]).__name__
            untouched.append(Untouched(path, name, kernel.name, f"its class is not `{part.class_name}`"))
    found: dict[str, list[str]] = {}
    for path in fits:
        parent, name = _split(path)
        found.setdefault(parent, []).append(name)
    return found


def _starred(path: str) -> str:
    return ".".join("*" if segment.isdigit() else segment for segment in path.split("."))


def _near(wanted: str, names: Iterable[str]) -> str:
    """What a message offers instead."""
    offered = sorted(names)
    last = wanted.rpartition(".")[2]
    close = difflib.get_close_matches(wanted, offered, n=3, cutoff=0.5)
    close += [name for name in offered if last and name.rpartition(".")[2] == last and name not in close][:2]
    words = re.findall(r"[A-Z][a-z]+", wanted)
    close = close or [name for name in offered if words and name.endswith(words[-1])][:3]
    return "near it: " + ", ".join(f"`{name}`" for name in close) if close else "list them with `named_modules()`"


def _refuse_overlaps(found: Sequence[Place]) -> None:
    taken: dict[str, Place] = {}
    for place in found:
        for path in place.paths:
            if path in taken:
                raise ConflictError(f"`{path}` is in {taken[path].kernel.entry} and {place.kernel.entry}; keep one")
            taken[path] = place
    for path, place in taken.items():
        for outer in _ancestors(path):
            if outer in taken and taken[outer] is not place:
                inner, around = f"`{path}` ({place.kernel.name})", f"`{outer}` ({taken[outer].kernel.name})"
                raise ConflictError(f"{inner} lies inside {around}; keep one of the two keys")


def _ancestors(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
