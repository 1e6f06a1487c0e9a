"""Integrate: verify candidates, time the survivors in their sites, seat the winners, and check the whole model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from kernelgraft import machine
from kernelgraft.errors import NothingToPatch
from kernelgraft.evaluate import Captured, Judge, JudgeOptions
from kernelgraft.identity import model_card
from kernelgraft.models import Loaded, wrap
from kernelgraft.pipeline import gate, planning, seating
from kernelgraft.pipeline.progress import Progress, silent
from kernelgraft.pipeline.researching import Bound, Compute, axes_of, research
from kernelgraft.pipeline.seating import Policy
from kernelgraft.records import Evaluation, Graft, Patch, Plan, Research, Seat, Solution, Status
from kernelgraft.store import Inventory
from kernelgraft.suppliers import select as select_suppliers
from kernelgraft.suppliers.base import Supplier


@dataclass(frozen=True)
class Integration:
    """All records of one run."""

    research: Research | None
    plan: Plan
    graft: Graft
    already: str | None
    """What was found in place, if the job was done before; there is no research then."""


def integrate(
    model: nn.Module | Loaded,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    out: Path | str | None = None,
    suppliers: Sequence[str] | Sequence[Supplier] | None = None,
    policy: Policy = "fastest",
    force: bool = False,
    options: JudgeOptions | None = None,
    progress: Progress = silent,
) -> Graft:
    """Research a live model, verify and time every candidate, and return the graft; the model is left as it was.

    `suppliers` are names (None: all that run here) or Supplier objects. With `out`, all records are written to that
    folder. Raises NothingToPatch if no site is recognised, UsageError for a wrong name or folder.
    """
    loaded = model if isinstance(model, Loaded) else wrap(model, tokenizer, name)
    with contextlib.ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return run_integration(
            loaded,
            Inventory(folder),
            suppliers=suppliers,
            policy=policy,
            force=force,
            options=options,
            progress=progress,
        ).graft


def run_integration(
    loaded: Loaded,
    inventory: Inventory,
    *,
    suppliers: Sequence[str] | Sequence[Supplier] | None = None,
    policy: Policy = "fastest",
    force: bool = False,
    options: JudgeOptions | None = None,
    progress: Progress = silent,
) -> Integration:
    """`integrate` into an inventory, with every record that it made."""
    chosen = _suppliers(suppliers)
    card, here = model_card(loaded.model, loaded.ref.spec), machine.read()
    done, graft = planning.already(loaded.model, card, here, inventory)
    if done and graft and not force:
        return Integration(None, Plan(model=card, rows=(), already=done), graft, done)
    record, computes = research(loaded, inventory, progress=progress)
    if not computes:
        raise NothingToPatch(f"`{card.name}` has no site that a kernel could take: see `kernelgraft research`")
    found = planning.candidates(computes, chosen, here)
    plan = planning.make_plan(card, found, inventory)
    graft = make_graft(loaded, computes, found, inventory, policy=policy, options=options, progress=progress)
    return Integration(record, plan, graft, None)


def make_graft(
    loaded: Loaded,
    computes: Sequence[Compute],
    found: planning.Candidates,
    inventory: Inventory,
    *,
    policy: Policy = "fastest",
    options: JudgeOptions | None = None,
    progress: Progress = silent,
) -> Graft:
    """Verify, measure and check the whole; write the evaluations and `graft.json`."""
    card = model_card(loaded.model, loaded.ref.spec)
    graft = _judge_and_seat(loaded, computes, found, card, policy, options, progress)
    progress("check", 0, None, "comparing the grafted model with the original")
    graft = gate.filter_patches(graft, loaded)
    progress("check", 1, 1, f"{len(graft.accepted)} computes accepted")
    inventory.append_evaluations(graft.evaluations, machine.read())
    inventory.save_record("graft", graft)
    return graft


def restricted(graft: Graft, *, language: str) -> Graft:
    """The graft with only the seats whose Solutions are written in `language`; a patch that loses all is rejected."""
    patches = []
    for patch in graft.patches:
        seats = tuple(
            s.model_copy(update={"seated": s.seated and _language(graft, s) == language}) for s in patch.seats
        )
        kept = any(s.seated for s in seats)
        update: dict[str, Any] = {"seats": seats}
        if patch.status == "accepted" and not kept:
            update |= {"status": "rejected", "reason": f"no Solution in {language} is seated"}
        patches.append(patch.model_copy(update=update))
    return graft.model_copy(update={"patches": tuple(patches)})


def _language(graft: Graft, seat: Seat) -> str | None:
    solution = graft.solutions.get(seat.solution or "")
    return None if solution is None else solution.spec.language


def _suppliers(given: Sequence[str] | Sequence[Supplier] | None) -> list[Supplier]:
    if given and isinstance(given[0], Supplier):
        return list(given)  # type: ignore[arg-type]
    return select_suppliers(given)  # type: ignore[arg-type]


def _judge_and_seat(
    loaded: Loaded,
    computes: Sequence[Compute],
    found: planning.Candidates,
    card: Any,
    policy: Policy,
    options: JudgeOptions | None,
    progress: Progress,
) -> Graft:
    evaluations: list[Evaluation] = []
    patches: list[Patch] = []
    total = sum(len(s) for s in found.solutions.values())
    verified: dict[int, list[Solution]] = {}
    with Judge(options or JudgeOptions()) as judge:
        done = 0
        for index, compute in enumerate(computes):
            verified[index] = []
            for definition in compute.definitions:
                own = [b for b in compute.bound if b.definition.name == definition.name]
                for solution in found.solutions.get(definition.name, ()):
                    progress("verify", done, total, solution.name)
                    calls = seating.measured(compute, definition) if solution.meta.guard.static_shapes else own
                    original = seating.original_kernel(own[0])
                    evaluation = judge.verify(solution, definition, [as_captured(b) for b in calls], original=original)
                    evaluations.append(evaluation)
                    if evaluation.status is Status.PASSED:
                        verified[index].append(solution)
                    done += 1
    progress("verify", total, total, f"{sum(map(len, verified.values()))} of {total} solutions are right")
    # Fusions that contain another compute come last: they must beat what was seated for their parts.
    order = sorted(range(len(computes)), key=lambda i: any(s.kind == "statement" for s in computes[i].sites))
    for step, index in enumerate(order):
        compute = computes[index]
        progress("measure", step, len(order), f"{compute.family} at {compute.sites[0].key}")
        seats, times = seating.seat_regimes(compute, verified[index], policy=policy)
        evaluations = [seating.with_performance(e, times) for e in evaluations]
        reason = None if any(s.seated for s in seats) else _why_not(compute, seats, evaluations)
        if policy == "fastest" and reason is None:
            partial = _graft(card, policy, patches, computes, found, ())
            seats = seating.against_parts(loaded.model, compute, seats, found.solutions, partial)
            if not any(s.seated for s in seats):
                reason = "its parts are as fast with what was seated for them"
        patches.append(_patch(compute, seats, reason))
    progress("measure", len(order), len(order), f"{sum(p.status == 'accepted' for p in patches)} computes seated")
    return _graft(card, policy, patches, computes, found, evaluations)


def as_captured(bound: Bound) -> Captured:
    """A captured call as the judge takes it."""
    call = bound.call
    label = f"{call.regime}{' padded' if call.padded else ''} {call.cache} {call.instance}"
    return Captured(inputs=bound.inputs, regime=call.regime, label=label, axes=axes_of(bound.definition, bound.inputs))


def _patch(compute: Compute, seats: Sequence[Seat], reason: str | None) -> Patch:
    return Patch(
        family=compute.family,
        sites=tuple(compute.sites),
        semantics=compute.semantics,
        definitions=tuple(d.name for d in compute.definitions),
        status="accepted" if reason is None else "rejected",
        reason=reason,
        seats=tuple(seats),
    )


def _why_not(compute: Compute, seats: Sequence[Seat], evaluations: Sequence[Evaluation]) -> str:
    names = {d.name for d in compute.definitions}
    own = [e for e in evaluations if e.definition in names]
    if not own:
        return "unsuitable: no supplier has a candidate"
    if all(e.status is not Status.PASSED for e in own):
        return "unsuitable: " + "; ".join(f"{e.solution}: {e.reason}" for e in own)
    figures = ", ".join(f"{s.regime} {s.original_us:.1f} µs against {s.solution_us:.1f} µs" for s in seats)
    return f"the original is as fast or faster: {figures}"


def _graft(
    card: Any,
    policy: Policy,
    patches: Sequence[Patch],
    computes: Sequence[Compute],
    found: planning.Candidates,
    evaluations: Sequence[Evaluation],
) -> Graft:
    definitions = {d.name: d for c in computes for d in c.definitions}
    kept = {e.solution for e in evaluations} | {name for p in patches for name in p.solutions}
    solutions = {s.name: s for group in found.solutions.values() for s in group if s.name in kept}
    return Graft(
        model=card,
        machine=machine.read(),
        policy=policy,
        patches=tuple(patches),
        definitions=definitions,
        solutions=solutions,
        evaluations=tuple(evaluations),
    )
