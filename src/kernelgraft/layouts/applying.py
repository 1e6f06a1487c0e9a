"""Put kernels with their Layouts on a live model, per instance, and take them off again.

No class, module or configuration of the process is changed: children of this model's modules are exchanged for
Layouts, and their tensors go through the packages' rules.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from kernelgraft.errors import GraftError, KernelgraftError
from kernelgraft.layouts import saving
from kernelgraft.layouts.following import hollow
from kernelgraft.layouts.matching import Untouched, match, root_of
from kernelgraft.layouts.packages import load_all
from kernelgraft.layouts.records import LoadedKernel
from kernelgraft.layouts.seating import Facts, Seat, draft, seat

LAYOUTS = "_kernelgraft_layouts"
"""Key in the instance dictionary of a converted model: its live `AppliedLayouts`."""


class AppliedLayouts:
    """Kernels with their Layouts on a model; as a context manager it reverts at the end.

    A deep copy of the model carries its own (`find_layouts(copy)`), which reverts the copy only.
    """

    def __init__(self, model: nn.Module, seats: Sequence[Seat], untouched: Sequence[Untouched]) -> None:
        self.model = model
        """The model that paths start from; what wraps it is not looked at."""
        self._seats = list(seats)
        self._untouched = tuple(untouched)

    @property
    def active(self) -> bool:
        """False once everything was reverted."""
        return any(seat.seated for seat in self._seats)

    def revert(self) -> None:
        """Put back the same modules and parameter objects, with the values of now. A second call does nothing.

        Values that were not trained meanwhile are those of before, bit for bit. Raises GraftError if something was
        put over a Layout: everything else is back then, and another call tries the rest. Raises UsageError, with
        nothing changed, if a Layout was quantised.
        """
        saving.refuse_quantised_layouts(self.model)
        reasons = []
        for one in reversed([one for one in self._seats if one.seated]):
            try:
                one.take_out()
            except KernelgraftError as error:
                reasons.append(str(error))
        saving.save_plainly(self.model)
        if reasons:
            raise GraftError("; ".join(dict.fromkeys(reasons)))
        _mark(self.model, [applied for applied in _marked(self.model) if applied is not self])

    def report(self) -> list[dict[str, Any]]:
        """One row for each module: `path`, `class`, `function`, `kernel`, `source`, `state`, `reason`; `rules` and
        `views` count the keys that rules made and the originals that share storage with them (None where nothing was
        replaced). `function` is the name of the function that was replaced in the module, None for the module itself.
        `state` is "replaced", "passed on" (another child of a fusion), "untouched" or "reverted".
        """
        rows = []
        for one in self._seats:
            kernel = one.place.kernel
            for index, (path, child) in enumerate(zip(one.place.paths, one.children, strict=True)):
                state = ("passed on" if index else "replaced") if one.seated else "reverted"
                rows.append(
                    {
                        "path": path,
                        "class": type(child).__name__,
                        "function": one.place.function.name if one.place.function else None,
                        "kernel": kernel.name,
                        "source": str(kernel.entry.source),
                        "state": state,
                        "reason": f"its work is done at `{one.place.paths[0]}`" if index else "",
                        "rules": None if index else len(one.new),
                        "views": None if index else one.views,
                    }
                )
        for module in self._untouched:
            rows.append(
                {
                    "path": module.path,
                    "class": module.class_name,
                    "function": module.function,
                    "kernel": module.kernel,
                    "source": "",
                    "state": "untouched",
                    "reason": module.reason,
                    "rules": None,
                    "views": None,
                }
            )
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors under the original names, in the original shapes; merged ones as views."""
        return saving.original_state_dict(self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedLayouts:
        # Values of merged originals are in the Layouts: a copy needs none of its own until it is reverted.
        for one in self._seats:
            for tensor in one.merged if one.seated else ():
                hollow(tensor, memo)
        return AppliedLayouts(copy.deepcopy(self.model, memo), copy.deepcopy(self._seats, memo), self._untouched)

    def __reduce__(self) -> Any:
        # A forward that is bound to an instance is pickled by name: what is loaded has the original again.
        return _nothing, ()

    def __enter__(self) -> AppliedLayouts:
        return self

    def __exit__(self, *_: object) -> None:
        self.revert()


def apply_layouts(model: nn.Module, kernels: Any, *, check: bool = True) -> AppliedLayouts:
    """Convert a loaded model in place, all places or none.

    `kernels` is what KernelConfig or KernelSet takes, or a sequence of LoadedKernel. `model` may be what wraps the
    model (adapters, torch.compile). With `check`, kernels that would compute something else here are refused first:
    `kernelgraft.layouts.checking`. Raises UsageError or ConflictError, with the model unchanged.
    """
    root = root_of(model)
    loaded = _loaded(root, kernels)
    found = match(root, loaded)
    facts = Facts.of(root)
    drafts = [draft(root, place, facts) for place in found.places]
    if check:
        _refuse_findings(root, loaded)
    done: list[Seat] = []
    try:
        for one in drafts:
            seat(root, one)
            done.append(one)
        saving.save_originals(root)
    except BaseException:
        for one in reversed(done):
            one.take_out()
        saving.save_plainly(root)
        raise
    applied = AppliedLayouts(root, drafts, found.untouched)
    _mark(root, [*_marked(root), applied])
    return applied


def find_layouts(model: nn.Module) -> AppliedLayouts | None:
    """What was applied last to a model, or to what it wraps; None if nothing is on it."""
    live = [applied for module in model.modules() for applied in _marked(module) if applied.active]
    return live[-1] if live else None


def _loaded(root: nn.Module, kernels: Any) -> tuple[LoadedKernel, ...]:
    if isinstance(kernels, (list, tuple)) and kernels and all(isinstance(k, LoadedKernel) for k in kernels):
        return tuple(kernels)
    devices = [p.device.type for p in root.parameters() if not p.is_meta]
    return load_all(kernels, device=devices[0] if devices else None)


def _refuse_findings(root: nn.Module, loaded: Sequence[LoadedKernel]) -> None:
    from kernelgraft.layouts.checking import check, refuse  # it tries kernels on a small model through this module

    refuse(check(loaded, root))


def _marked(model: nn.Module) -> list[AppliedLayouts]:
    return [applied for applied in model.__dict__.get(LAYOUTS, ()) if applied is not None]


def _nothing() -> None:
    return None


def _mark(model: nn.Module, applied: Sequence[AppliedLayouts]) -> None:
    if applied:
        model.__dict__[LAYOUTS] = tuple(applied)
    else:
        model.__dict__.pop(LAYOUTS, None)
