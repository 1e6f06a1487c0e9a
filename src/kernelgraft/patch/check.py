"""Is this the model, the source, the library and the machine that a graft was made for?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from kernelgraft import machine
from kernelgraft.errors import MismatchError, RebindError
from kernelgraft.identity import model_card
from kernelgraft.patch.claims import effective, instances
from kernelgraft.records import Graft, MachineCard, ModelCard, Site, SourceRef
from kernelgraft.sites import global_functions, source_ref
from kernelgraft.sites.rebind import function_tree


def refuse_mismatches(graft: Graft, root: nn.Module) -> None:
    """Raise MismatchError, with all differences in one line, if the graft was not made for this model, here and now."""
    here = machine.read()
    wrong = [
        *model_differences(graft.model, model_card(root)),
        *machine_differences(graft, here),
        *source_differences(graft, root),
    ]
    if wrong:
        raise MismatchError(
            f"the graft of `{graft.model.name}` does not fit: {'; '.join(wrong)}; "
            f"run `kernelgraft run {graft.model.name} --force`"
        )


def model_differences(made_for: ModelCard, found: ModelCard) -> Iterator[str]:
    """Where two models differ in what a patch depends on."""
    for what in ("type", "dtype", "device", "transformers"):
        if (before := getattr(made_for, what)) != (now := getattr(found, what)):
            yield f"{what} is `{now}`, it was made for `{before}`"
    if made_for.split != found.split:
        before, now = (f"split over processes ({s})" if s else "whole" for s in (made_for.split, found.split))
        yield f"it is {now}, it was made for one that is {before}: integrate it in the processes that run it"
    if made_for.config_sha256 != found.config_sha256:
        yield f"the configuration is another (`{found.config_sha256[:12]}`, not `{made_for.config_sha256[:12]}`)"


def machine_differences(graft: Graft, here: MachineCard) -> Iterator[str]:
    """Where a machine differs in what verdicts and times depend on."""
    there = graft.machine
    hardware = ("cpu",) if graft.model.device == "cpu" else ("gpu", "compute_capability")
    for what in hardware:
        if (before := getattr(there, what)) != (now := getattr(here, what)):
            yield f"{what} is `{now}`, it was measured on `{before}`"
    names = {name for patch in graft.accepted for name in patch.solutions}
    needed = {d for name in names for d in graft.solutions[name].spec.dependencies} | {"torch"}
    for name in sorted(needed & (there.versions.keys() | here.versions.keys())):
        if (before := there.versions.get(name)) != (now := here.versions.get(name)):
            yield f"{name} is `{now}`, it was verified with `{before}`"


def source_differences(graft: Graft, root: nn.Module) -> Iterator[str]:
    """Sites that are missing, or whose code is another."""
    known: dict[tuple[int, str], str | None] = {}
    for patch in graft.accepted:
        for site in patch.sites:
            seen: set[str] = set()
            for path in site.instances:
                found = instances(root, site, path)
                if not found:
                    seen.add(f"`{path}` is no `{site.class_name}`")
                for module in found:
                    function = effective(module, site.method)
                    if function is None:
                        seen.add(f"`{path}.{site.method}` was replaced by something else")
                        continue
                    key = (id(function), site.key)
                    if key not in known:
                        known[key] = _difference(site, function)
                    if reason := known[key]:
                        seen.add(reason)
            yield from sorted(seen)[:3]


def _difference(site: Site, function: Any) -> str | None:
    try:
        now = _source(site, function)
    except (RebindError, KeyError):
        return f"`{site.key}` is not there any more"
    if now.sha256 != site.source.sha256:
        return f"the source of `{site.key}` is another (`{now.file}` lines {now.first_line} to {now.last_line})"
    return None


def _source(site: Site, function: Any) -> SourceRef:
    """What the site's source is now, cited as it was when the site was found."""
    if site.kind == "function":
        return source_ref(global_functions(function)[site.symbol or ""])
    if site.kind == "statement":
        first = function_tree(function).lineno + site.detail["index"]
        return source_ref(function, first=first, last=first + site.source.last_line - site.source.first_line)
    return source_ref(function)
