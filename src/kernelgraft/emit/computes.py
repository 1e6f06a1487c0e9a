"""The computes of a graft as code: what goes into `monkey_patch_<compute>.py`, and what it replaces."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelgraft import families
from kernelgraft.emit import modeling, selecting
from kernelgraft.emit.sources import Merged
from kernelgraft.errors import RebindError
from kernelgraft.records import Definition, Graft, Patch, Site, Solution
from kernelgraft.sites import innermost

_LIBRARY = "transformers."


@dataclass
class Target:
    """One attribute that is replaced."""

    module: str
    owner: str
    name: str
    kind: str
    source: tuple[str, str]
    seats: list[dict[str, Any]] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    statements: dict[int, str] = field(default_factory=dict)
    build: str | None = None


@dataclass
class Compute:
    """All accepted patches of one family, as code."""

    family: str
    patches: list[Patch]
    targets: dict[tuple[str, str, str], Target] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    merged: Merged = field(default_factory=lambda: Merged(set()))
    kernels: dict[str, str] = field(default_factory=dict)
    selects: dict[str, str] = field(default_factory=dict)
    """Definition to the function that chooses its kernel."""
    references: dict[str, str] = field(default_factory=dict)
    """Definition to the function that says what it computes."""
    packages: dict[str, Solution] = field(default_factory=dict)
    built: list[str] = field(default_factory=list)
    """Functions of the modelling file that it uses."""


def unservable(patch: Patch) -> list[str]:
    """Why a patch cannot be put on classes; empty if it can."""
    return [
        f"{patch.family} at `{site.key}`: `{site.class_name}` is not a class of transformers"
        for site in patch.sites
        if not site.class_name.startswith(_LIBRARY)
    ]


def build(compute: Compute, graft: Graft, modules: dict[str, str], functions: list[str], skipped: list[str]) -> None:
    """Fill in a compute: its code, and what is replaced.

    `modules` (module to its name in the modelling file) and `functions` (of that file) grow; `skipped` gets a line for
    every site that cannot be replaced.
    """
    family = families.get(compute.family)
    compute.merged.bound["torch"] = "import torch"
    compute.merged.taken |= {"torch", "Any", "Callable", "Handle", "Seat", "Target", "needs_gradient", "plain"}
    compute.merged.taken |= {
        "SELECTS",
        "importlib",
        "remembered",
        "size_of",
        "targets",
        f"monkey_patch_{compute.family}",
    }
    references: list[str] = []
    kernels: list[str] = []
    guards: list[str] = []
    seats: dict[str, str] = {}
    seated = [(p, d, [s for s in p.seats if s.definition == d]) for p in compute.patches for d in p.definitions]
    if any(selecting.needs_work(own) for _, _, own in seated):
        guards.append(selecting.work(family, "size_of"))
    for patch in compute.patches:
        for name in patch.solutions:
            if name not in compute.kernels:
                kernels += _kernel(compute, graft.solutions[name])
    for patch, name, own in seated:
        if name in compute.selects or not any(s.seated for s in own):
            continue
        definition = graft.definitions[name]
        fits, compute.selects[name] = f"fits_{name}", f"select_{name}"
        guards.append(selecting.fits(definition, fits))
        guards.append(
            selecting.select(definition, f"select_{name}", fits, own, graft.solutions, compute.kernels, "size_of")
        )
        if any(site.kind == "module" for site in patch.sites):
            compute.references[name] = f"reference_{name}"
            references.append(compute.merged.add(definition.reference, "run", f"reference_{name}"))
    for patches in _alike(compute.patches):
        seat = family.seat(patches[0].semantics)
        seats[seat.factory.__name__] = textwrap.dedent(inspect.getsource(seat.factory))
        names = dict.fromkeys(d for p in patches for d in p.definitions if d in compute.selects)
        entry = {
            "factory": seat.factory.__name__,
            "select": _chooser(compute, "choose", [graft.definitions[d] for d in names], compute.selects, guards),
            "describe": "None",
            "constants": seat.constants,
        }
        if described := [graft.definitions[d] for d in names if d in compute.references]:
            entry["describe"] = _chooser(compute, "describe", described, compute.references, guards)
        for site in (s for p in patches for s in p.sites):
            try:
                _place(compute, site, entry)
            except (RebindError, AttributeError, ImportError, KeyError) as error:
                skipped.append(f"{compute.family} at `{site.key}`: {error}")
    statements = _statements(compute, modules, functions, skipped)
    compute.groups = [
        {"title": title, "blocks": blocks}
        for title, blocks in (
            ("What is computed, as the original does it.", references),
            ("Kernels.", kernels),
            ("Which kernel serves a call; None: the original.", guards),
            ("How a kernel sits in its place.", list(seats.values())),
            ("The statements that are replaced.", statements),
        )
        if blocks
    ]


def _alike(patches: Sequence[Patch]) -> list[list[Patch]]:
    """Patches in groups that need one seat only: they sit in the same way, and the inputs tell them apart."""
    groups: dict[str, list[Patch]] = {}
    for patch in patches:
        constants = families.get(patch.family).seat(patch.semantics).constants
        places = sorted({str(site.detail.get("index")) for site in patch.sites})
        groups.setdefault(f"{sorted(constants.items())} {places}", []).append(patch)
    return list(groups.values())


def _kernel(compute: Compute, solution: Solution) -> list[str]:
    """The Solution's code under its own name; Solutions of several files become folders."""
    name = compute.kernels[solution.name] = "".join(c if c.isalnum() else "_" for c in solution.name)
    if len(solution.sources) == 1:
        return [compute.merged.add(solution.entry_source, solution.entry_symbol, name)]
    file = solution.spec.entry_point.partition("::")[0].removesuffix(".py").replace("/", ".")
    compute.packages[name] = solution
    compute.merged.imports.append(f"from .{name}.{file} import {solution.entry_symbol} as {name}")
    return []


def _chooser(
    compute: Compute, verb: str, definitions: Sequence[Definition], functions: dict[str, str], guards: list[str]
) -> str:
    """A function of any inputs that asks those of the Definitions; its name.

    `choose` asks the select functions, `describe` gives the reference of the Definition that fits.
    """
    lines = []
    for count in dict.fromkeys(len(d.inputs) for d in definitions):
        own = [d for d in definitions if len(d.inputs) == count]
        if verb == "choose":
            lines.append(f"    if len(inputs) == {count}:")
            options = "\n            or ".join(f"{functions[d.name]}(*inputs)" for d in own)
            lines.append(f"        return (\n            {options}\n        )")
        for definition in own if verb == "describe" else []:
            lines.append(f"    if len(inputs) == {count} and fits_{definition.name}(*inputs):")
            lines.append(f"        return {functions[definition.name]}")
    name = f"{verb}_{sum(g.startswith(f'def {verb}_') for g in guards) + 1}"
    guards.append("\n".join([f"def {name}(*inputs):", *lines, "    return None"]) + "\n")
    compute.merged.taken.add(name)
    return name


def _place(compute: Compute, site: Site, entry: dict[str, Any]) -> None:
    """Add a seat to the target of a site; raises if the site's class or method is not as it was."""
    module, cls = find_class(site.class_name)
    method = getattr(cls, site.method)
    inside = f"{cls.__qualname__}.{site.method}"
    place: Any = None
    if site.kind in ("module", "statement"):
        owner, name, source = cls.__qualname__, site.method, inside
        place = site.detail["index"] if site.kind == "statement" else None
    else:
        module, owner, name = innermost(method).__module__, "", site.symbol or ""
        source = name if site.kind == "function" else inside
        place = site.detail.get("implementation") if site.kind == "attention" else None
    if not module.startswith(_LIBRARY):
        raise RebindError(f"`{module}` is not a module of transformers")
    key = (module, owner, name)
    digest = source_sha256(importlib.import_module(module), source)
    target = compute.targets.setdefault(key, Target(module, owner, name, site.kind, (source, digest)))
    seat = {**entry, "place": json.dumps(place) if place is not None else "None"}
    if seat not in target.seats:
        target.seats.append(seat)
    target.sites.append(site)


def _statements(compute: Compute, modules: dict[str, str], functions: list[str], skipped: list[str]) -> list[str]:
    """Write the rewritten methods of a compute; the functions that stand for their statements are returned."""
    blocks = []
    for key, target in list(compute.targets.items()):
        if target.kind != "statement":
            continue
        _, cls = find_class(target.sites[0].class_name)
        sites = list({s.detail["index"]: s for s in target.sites}.values())
        name = f"{cls.__name__}_{target.name}"
        alias = modules.get(target.module, f"modeling{len(modules) + 1 if modules else ''}")
        try:
            functions.append(modeling.rewritten(cls, target.name, sites, name, alias))
        except RebindError as error:
            skipped.append(f"{compute.family} at `{target.sites[0].key}`: {error}")
            del compute.targets[key]
            continue
        modules[target.module] = alias
        target.build = name
        compute.built.append(name)
        for site in sites:
            function = f"{name}_statement_{site.detail['index']}"
            target.statements[site.detail["index"]] = function
            blocks.append(modeling.statement_source(site, function))
    return blocks


def find_class(class_name: str) -> tuple[str, type]:
    """Module and class of a qualified name; ImportError or AttributeError if it is not there."""
    parts = class_name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return ".".join(parts[:cut]), found
    raise ImportError(f"`{class_name}` is not in the installed transformers")


def source_sha256(module: Any, name: str) -> str:
    """SHA-256 of the text of a function or method of a module; emitted files ask the same before they patch."""
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    return hashlib.sha256(inspect.getsource(inspect.unwrap(found)).encode()).hexdigest()
