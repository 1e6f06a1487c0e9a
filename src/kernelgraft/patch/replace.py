"""Build the functions that take the place of methods: one for each method and set of sites, shared by all instances."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from kernelgraft import families
from kernelgraft.families.base import Seat
from kernelgraft.patch.claims import PATCHED, Claim
from kernelgraft.patch.dispatch import Dispatcher
from kernelgraft.sites import InterfaceProxy, callee, current, innermost, rebind, statements

Function = Callable[..., Any]


class Replacer:
    """Makes replacements from claims; `dispatchers` by (id of the patch, key of the site)."""

    def __init__(self, dispatchers: Mapping[tuple[int, str], Dispatcher]) -> None:
        self._dispatchers = dispatchers
        # Instances of one class share the function: less memory, and torch.compile sees one piece of code.
        self._built: dict[tuple[int, tuple[str, ...]], Function] = {}

    def plan(self, claims: Sequence[Claim]) -> list[tuple[nn.Module, str, Function]]:
        """Module, method name and new function of every method that changes; nothing is changed yet."""
        methods: dict[tuple[int, str], list[Claim]] = {}
        for claim in claims:
            methods.setdefault((id(claim.module), claim.site.method), []).append(claim)
        return [(group[0].module, group[0].site.method, self._function(group)) for group in methods.values()]

    def _function(self, group: Sequence[Claim]) -> Function:
        before = current(group[0].module, group[0].site.method)
        key = (id(before), tuple(claim.site.key for claim in group))
        if key not in self._built:
            self._built[key] = self._build(before, group)
        return self._built[key]

    def _build(self, before: Function, group: Sequence[Claim]) -> Function:
        """All sites of one method in one function: the parts inside it first, then what stands for the whole of it."""
        names: dict[str, Any] = {}
        scope = innermost(before).__globals__
        for claim in group:
            symbol = claim.site.symbol or ""
            if claim.site.kind == "function":
                names[symbol] = self._seat(claim, self._dispatcher(claim).counted(callee(scope[symbol])))
            elif claim.site.kind == "attention":
                seat = families.get(claim.patch.family).seat(claim.patch.semantics)
                wanted = claim.site.detail.get("implementation")
                wrap = functools.partial(_interface, self._dispatcher(claim), seat, wanted)
                names[symbol] = InterfaceProxy(scope[symbol], wrap)
            elif claim.site.kind == "statement":
                counted = self._dispatcher(claim).counted(statements.original(claim.site))
                names[statements.injected_name(claim.site)] = self._seat(claim, counted)
        written = [claim.site for claim in group if claim.site.kind == "statement"]
        function = before
        if names:
            function = rebind(before, names=names, transform=statements.transformer(written) if written else None)
        for claim in group:
            if claim.site.kind == "module":
                below = self._dispatcher(claim).counted(function)
                function = functools.wraps(below)(self._seat(claim, below))
        function.__dict__[PATCHED] = tuple(claim.site.key for claim in group)
        return function

    def _dispatcher(self, claim: Claim) -> Dispatcher:
        return self._dispatchers[id(claim.patch), claim.site.key]

    def _seat(self, claim: Claim, counted: Function) -> Function:
        seat = families.get(claim.patch.family).seat(claim.patch.semantics)
        return seat.factory(counted, self._dispatcher(claim).select, **seat.constants)


def _interface(
    dispatcher: Dispatcher, seat: Seat, wanted: str | None, original: Function, name: str | None
) -> Function:
    """The seat in front of an attention function, if it is the one that the graft was made for.

    Like everything that ends up in a method it holds no module, or a deep copy would call into the first model.
    """
    if wanted is not None and name != wanted:
        reason = f"the attention implementation is `{name}`, the graft was made for `{wanted}`"
        return dispatcher.bypass(original, reason)
    return seat.factory(dispatcher.counted(original), dispatcher.select, **seat.constants)
