"""Select: measure every compute at every point of use, and make the graft of the seats that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernelgraft import machine
from kernelgraft.models import Loaded
from kernelgraft.pipeline import measuring, planning
from kernelgraft.pipeline.measuring import Sample
from kernelgraft.pipeline.points import Point, Use, too_long
from kernelgraft.pipeline.progress import Progress
from kernelgraft.pipeline.researching import Compute
from kernelgraft.pipeline.seating import PARTS, Policy, Table
from kernelgraft.records import Evaluation, Graft, ModelCard, Patch, Seat, Status


def select(
    loaded: Loaded,
    computes: Sequence[Compute],
    found: planning.Candidates,
    card: ModelCard,
    policy: Policy,
    use: Use,
    evaluations: list[Evaluation],
    progress: Progress,
) -> Graft:
    """Time the right Solutions at every point of use, and make the graft of what is seated; no model is changed."""
    right = {(e.definition, e.solution) for e in evaluations if e.status is Status.PASSED}
    progress("verify", len(evaluations), len(evaluations), f"{len(right)} of {len(evaluations)} solutions are right")
    tables = []
    for compute in computes:
        own = [s for d in compute.definitions for s in found.solutions.get(d.name, ()) if (d.name, s.name) in right]
        tables.append(Table(compute, own, policy, use.mode))
    # Fusions that contain another compute come last: they must beat what was seated for their parts.
    tables.sort(key=lambda table: table.fusion)

    def graft(chosen: Sequence[Table], judged: Sequence[Evaluation]) -> Graft:
        return _graft(card, policy, use, [_patch(t, judged) for t in chosen], computes, found, judged)

    parts = [t for t in tables if not t.fusion]
    for table, samples in _measured(loaded, tables, use.points(card.device), progress):
        table.add(loaded.model, samples)
        if policy == "fastest" and table.fusion and any(s.seated for s in table.seats()):
            table.against_parts(loaded.model, samples, graft(parts, ()))
    for table in tables:
        evaluations = [table.updated(e) for e in evaluations]
    made = graft(tables, evaluations)
    steps = sum(bool(t.verified) for t in tables) * len(use.points(card.device))
    progress("measure", steps, steps, f"{len(made.accepted)} computes seated")
    return made


def _measured(
    loaded: Loaded, tables: Sequence[Table], points: Sequence[Point], progress: Progress
) -> Iterator[tuple[Table, list[Sample]]]:
    """Every compute that has something to measure with its samples at each point, which are recorded at its turn."""
    due = [table for table in tables if table.verified]
    left_out = too_long(loaded, points)
    steps = len(points) * len(due)
    for turn, point in enumerate(points):
        if point in left_out:
            progress("measure", turn * len(due), steps, f"{point} is left out: {left_out[point]}")
            continue
        progress("measure", turn * len(due), steps, f"recording {point}")
        try:
            recorded = measuring.samples(loaded, [t.compute for t in due], point)
        except torch.OutOfMemoryError:
            progress("measure", turn * len(due), steps, f"{point} is left out: not enough memory on the device")
            continue
        for number, table in enumerate(due):
            where = f"{point} {table.compute.family} at {table.compute.sites[0].key}"
            progress("measure", turn * len(due) + number, steps, where)
            samples, recorded[number] = recorded[number], []
            yield table, samples


def _patch(table: Table, evaluations: Sequence[Evaluation]) -> Patch:
    compute, seats = table.compute, table.seats()
    reason = None if any(s.seated for s in seats) else _why_not(table, seats, evaluations)
    return Patch(
        family=compute.family,
        sites=tuple(compute.sites),
        semantics=compute.semantics,
        definitions=tuple(d.name for d in compute.definitions),
        status="accepted" if reason is None else "rejected",
        reason=reason,
        seats=seats,
    )


def _why_not(table: Table, seats: Sequence[Seat], evaluations: Sequence[Evaluation]) -> str:
    names = {d.name for d in table.compute.definitions}
    own = [e for e in evaluations if e.definition in names]
    if not own:
        return "unsuitable: no supplier has a candidate"
    if all(e.status is not Status.PASSED for e in own):
        return "unsuitable: " + "; ".join(f"{e.solution}: {e.reason}" for e in own)
    if table.matched:
        return PARTS
    figures = ", ".join(
        f"{s.regime} {Point(s.batch or 1, s.prompt_tokens)} {s.original_us:.1f} µs against {s.solution_us:.1f} µs"
        for s in seats
        if s.original_us is not None and s.solution_us is not None
    )
    return f"the original is as fast or faster: {figures or 'no Solution serves the calls that were measured'}"


def _graft(
    card: ModelCard,
    policy: Policy,
    use: Use,
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
        mode=use.mode,
        patches=tuple(patches),
        definitions=definitions,
        solutions=solutions,
        evaluations=tuple(evaluations),
    )
