"""Put a graft on a model and take it off again.

All claims are collected on the untouched model; then one function is built for each method that changes, and installed
on the instances in one transaction. Nothing of torch, transformers, a class or a configuration is written.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from kernelgraft import families
from kernelgraft.errors import GraftError, KernelgraftError, UnreachedError
from kernelgraft.families.base import Kernel
from kernelgraft.patch import check, claims
from kernelgraft.patch.claims import Claim
from kernelgraft.patch.dispatch import Dispatcher
from kernelgraft.patch.replace import Replacer
from kernelgraft.records import Graft, Patch, Site
from kernelgraft.sites import Undo, install

APPLIED = "_kernelgraft_applied"
"""Key in the instance dictionary of the grafted model: its live `Applied`s."""


@dataclass(frozen=True)
class Live:
    """One site of an applied patch."""

    patch: Patch
    site: Site
    dispatcher: Dispatcher
    instances: int
    """Not counting those that a fusion contains."""
    contained: int

    @property
    def idle(self) -> bool:
        """True if it does nothing so far: no call came, or every call fell back."""
        return not self.dispatcher.by_choice and not any(self.dispatcher.served.values())


class Applied:
    """A graft on a model; as a context manager it reverts at the end.

    A deep copy of the model carries the patches and an `Applied` of its own (`find_applied(copy)`), which shares its
    counters with the first; each reverts its own model only. A pickled model is the original again.
    """

    def __init__(
        self, graft: Graft, model: nn.Module, undos: Sequence[Undo], lives: Sequence[Live], *, check_reach: bool = False
    ) -> None:
        self.graft = graft
        self.model = model
        """The module that the graft was made for; what wraps it is not looked at."""
        self._undos = list(undos)
        self._lives = tuple(lives)
        self._check_reach = check_reach

    @property
    def active(self) -> bool:
        """False once it was reverted."""
        return bool(self._undos)

    def revert(self) -> None:
        """Put everything back, by identity, also under hooks that came later. A second call does nothing.

        Raises GraftError if something else replaced a patched method meanwhile: all other methods are back then, and
        another call tries the rest.
        """
        left, reasons = [], []
        for undo in reversed(self._undos):
            try:
                undo()
            except KernelgraftError as error:
                left.append(undo)
                reasons.append(str(error))
        self._undos = left[::-1]
        if reasons:
            raise GraftError("; ".join(dict.fromkeys(reasons)))
        _unmark(self.model, self)

    def report(self) -> list[dict[str, Any]]:
        """For each accepted patch: family, sites, solutions; instances, and how many more a fusion contains; calls per
        Solution, calls to the original by choice, and calls that fell back, by reason."""
        return [self._row(patch) for patch in self.graft.accepted]

    def _row(self, patch: Patch) -> dict[str, Any]:
        lives = [live for live in self._lives if live.patch is patch]
        fallbacks: dict[str, int] = {}
        for live in lives:
            for reason, count in live.dispatcher.fallbacks.items():
                fallbacks[reason] = fallbacks.get(reason, 0) + count
        return {
            "family": patch.family,
            "sites": [site.key for site in patch.sites],
            "solutions": list(patch.solutions),
            "instances": sum(live.instances for live in lives),
            "calls": {name: sum(live.dispatcher.served[name] for live in lives) for name in patch.solutions},
            "original_by_choice": sum(live.dispatcher.by_choice for live in lives),
            "fallbacks": fallbacks,
            "contained": sum(live.contained for live in lives),
        }

    def unreached(self) -> list[str]:
        """Labels (`patch_label`) of the patches that do nothing so far: no call came, or every call fell back.

        A patch of which a fusion contains all instances is not expected to be reached.
        """
        found = []
        for patch in self.graft.accepted:
            lives = [live for live in self._lives if live.patch is patch and live.instances]
            if lives and all(live.idle for live in lives):
                found.append(patch_label(patch))
        return found

    def check(self) -> None:
        """Raise UnreachedError, naming the sites, if no call reached a site or if every call of a site fell back."""
        wrong = []
        for live in self._lives:
            if not live.instances:
                continue
            if not live.dispatcher.calls:
                wrong.append(f"no call reached `{live.site.key}` ({live.patch.family})")
            elif live.idle:
                reasons = ", ".join(live.dispatcher.fallbacks)
                wrong.append(f"every call of `{live.site.key}` ({live.patch.family}) fell back: {reasons}")
        if wrong:
            raise UnreachedError("; ".join(wrong) + "; revert, and integrate with inputs like these")

    @contextlib.contextmanager
    def wrapped(self, wrap: Callable[[Kernel, str], Kernel]) -> Iterator[None]:
        """While it lasts, every kernel of the graft runs as `wrap(kernel, name of its Solution)`."""
        with contextlib.ExitStack() as stack:
            for live in self._lives:
                stack.enter_context(live.dispatcher.wrapped(wrap))
            yield

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.revert()
        if kind is None and self._check_reach:
            self.check()

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        model, undos = copy.deepcopy(self.model, memo), copy.deepcopy(self._undos, memo)
        return Applied(self.graft, model, undos, self._lives, check_reach=self._check_reach)

    def __reduce__(self) -> Any:
        # Methods bound to an instance are pickled by name, so what is loaded is the original; this is what says so.
        return _nothing, ()


def apply(graft: Graft, model: nn.Module, *, check_reach: bool = False) -> Applied:
    """Install the accepted patches of a graft on one model object, all or none.

    `model` may also be what wraps the model (adapters, torch.compile). With `check_reach`, leaving the context of the
    result runs `Applied.check`. Raises MismatchError if the graft was made for another model, source, library or
    machine, ConflictError if a site is taken already or claimed twice, GraftError if there is nothing to apply.
    """
    if not graft.accepted:
        raise GraftError(
            f"the graft of `{graft.model.name}` has no accepted patch; its report says why each was rejected"
        )
    root = claims.find_root(model, graft.model.class_name)
    found = claims.collect(graft, root)
    claims.refuse_patched(found)
    check.refuse_mismatches(graft, root)
    claims.refuse_conflicts(found)
    if not found:
        raise GraftError(
            f"no patch of the graft of `{graft.model.name}` finds a place in this model; integrate it again"
        )
    lives = _lives(graft, found)
    dispatchers = {(id(live.patch), live.site.key): live.dispatcher for live in lives}
    plan = Replacer(dispatchers).plan(found)
    undos: list[Undo] = []
    try:
        for module, method, function in plan:
            undos.append(install(module, method, function))
    except BaseException:
        for undo in reversed(undos):
            undo()
        raise
    applied = Applied(graft, root, undos, lives, check_reach=check_reach)
    root.__dict__[APPLIED] = (*root.__dict__.get(APPLIED, ()), applied)
    return applied


def find_applied(model: nn.Module) -> Applied | None:
    """The graft that is on a model, or in what it wraps: the one applied last; None if there is none."""
    live = [a for m in model.modules() for a in m.__dict__.get(APPLIED, ()) if a is not None and a.active]
    return live[-1] if live else None


def patch_label(patch: Patch) -> str:
    """A patch in messages: its family and sites."""
    return f"{patch.family} ({', '.join(site.key for site in patch.sites)})"


def _lives(graft: Graft, found: Sequence[Claim]) -> list[Live]:
    """A dispatcher for each claimed site: what cannot be loaded fails here, before any change."""
    groups: dict[tuple[int, str], list[Claim]] = {}
    for claim in found:
        groups.setdefault((id(claim.patch), claim.site.key), []).append(claim)
    lives = []
    for group in groups.values():
        patch, contained = group[0].patch, sum(claim.contained for claim in group)
        dispatcher = Dispatcher(patch, graft.definitions, graft.solutions, families.get(patch.family))
        lives.append(Live(patch, group[0].site, dispatcher, len(group) - contained, contained))
    return lives


def _unmark(model: nn.Module, applied: Applied) -> None:
    left = tuple(a for a in model.__dict__.get(APPLIED, ()) if a is not applied and a is not None)
    if left:
        model.__dict__[APPLIED] = left
    else:
        model.__dict__.pop(APPLIED, None)


def _nothing() -> None:
    return None
