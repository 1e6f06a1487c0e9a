"""Who takes what: every place that a graft would change, collected on the model before anything is changed."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from kernelgraft.errors import ConflictError, MismatchError, RebindError
from kernelgraft.records import Graft, Patch, Site
from kernelgraft.sites import current

PATCHED = "__kernelgraft_sites__"
"""Attribute of an installed function: keys of the sites that it serves. A copy of a model has it too."""


@dataclass(frozen=True)
class Claim:
    """One site on one module instance."""

    patch: Patch
    site: Site
    path: str
    """Full path of the instance in the model that the graft was made for."""
    module: nn.Module
    contained: bool = False
    """True for a norm module that a claimed statement calls: it serves what the statement leaves to the original."""

    @property
    def place(self) -> tuple[int, str, str | None, int | None]:
        """Equal for two claims of the same thing."""
        return id(self.module), self.site.method, self.site.symbol, self.site.detail.get("index")

    @property
    def name(self) -> str:
        """The claim in words."""
        inside = f".{self.site.method}:{self.site.symbol}" if self.site.symbol else ""
        return f"`{self.path}{inside}`"


def is_class(module: nn.Module, class_name: str) -> bool:
    """True if the module is of that class (`package.module.Class`), or of one derived from it at run time."""
    return any(f"{c.__module__}.{c.__qualname__}" == class_name for c in type(module).__mro__)


def find_root(model: nn.Module, class_name: str) -> nn.Module:
    """The model that a graft speaks of: `model`, or what an adapter or a compiled model wraps.

    Raises MismatchError if no or more than one module in it is of that class.
    """
    found = list(_outermost(model, class_name))
    if len(found) == 1:
        return found[0]
    there = f"holds {len(found)} of them" if found else f"is a `{type(model).__module__}.{type(model).__qualname__}`"
    raise MismatchError(f"the graft is for a `{class_name}`, the model {there}; integrate this model")


def _outermost(module: nn.Module, class_name: str) -> Iterator[nn.Module]:
    """The modules of a class in a tree, without those inside others of that class."""
    if is_class(module, class_name):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, class_name)


def instances(root: nn.Module, site: Site, path: str) -> list[nn.Module]:
    """The modules of the site's class at a path: one, none, or the copies that a wrapper put there keeps."""
    try:
        return list(_outermost(root.get_submodule(path), site.class_name))
    except AttributeError:
        return []


def collect(graft: Graft, root: nn.Module) -> list[Claim]:
    """All claims of the accepted patches, in the order of the graft.

    A statement site contains the call of its norm. That norm module is patched nevertheless, for the calls that the
    statement leaves to the original, but its patch must not count on being reached there: the claim is `contained`.
    """
    claims = [
        Claim(patch, site, path, module)
        for patch in graft.accepted
        for site in patch.sites
        for path in site.instances
        for module in instances(root, site, path)
    ]
    norms = {id(norm_of(c.module, c.site)) for c in claims if c.site.kind == "statement"}
    return [replace(c, contained=c.site.kind == "module" and id(c.module) in norms) for c in claims]


def norm_of(module: nn.Module, site: Site) -> nn.Module | None:
    """The norm module that a statement site calls."""
    try:
        return module.get_submodule(site.symbol or "")
    except AttributeError:
        return None


def refuse_conflicts(claims: Sequence[Claim]) -> None:
    """Raise ConflictError, naming the site, if two patches claim one place."""
    holders: dict[object, Claim] = {}
    for claim in claims:
        first = holders.setdefault(claim.place, claim)
        if first is not claim:
            raise ConflictError(
                f"{claim.name} is claimed by two patches, `{first.patch.family}` and `{claim.patch.family}`; "
                "take one of them out of the graft"
            )


def refuse_patched(claims: Iterable[Claim]) -> None:
    """Raise ConflictError, naming the site, for a method that another graft holds; a copied model keeps its patches."""
    for claim in claims:
        function = effective(claim.module, claim.site.method)
        if keys := getattr(function, PATCHED, ()):
            raise ConflictError(
                f"{claim.name} is already patched by another graft (`{'`, `'.join(keys)}`); revert that one first"
            )


def effective(module: nn.Module, method: str) -> types.FunctionType | None:
    """What the module runs under that name; None if that is no plain method any more."""
    try:
        return current(module, method)
    except RebindError:
        return None
