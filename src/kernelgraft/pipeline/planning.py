"""Plan: for each compute, which Solutions could serve it; and whether the job is done already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from kernelgraft.errors import RecordError
from kernelgraft.patch import find_applied
from kernelgraft.pipeline.points import BASE, Use
from kernelgraft.pipeline.researching import Compute
from kernelgraft.records import CandidateRow, Definition, Graft, MachineCard, ModelCard, Plan, PlanRow, Solution
from kernelgraft.store import Inventory
from kernelgraft.suppliers import select
from kernelgraft.suppliers.base import Listing, Refusal, Supplier


@dataclass(frozen=True)
class Candidates:
    """The Solutions to try for each Definition, best first, and the plan's rows that say the same."""

    rows: tuple[PlanRow, ...]
    solutions: dict[str, tuple[Solution, ...]]
    """By Definition name."""


class _OnRequest(Supplier):
    """A supplier that nobody named and that is too slow to be judged unasked: it has nothing, and says why."""

    def __init__(self, supplier: Supplier) -> None:
        vars(self)["name"] = supplier.name  # the base class has it as a class variable

    def unavailable(self, machine: MachineCard) -> str | None:
        """See `Supplier.unavailable`."""
        return f"compiling for a GPU takes a minute a Solution: name it (`--suppliers {self.name},…`) to have it judged"

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """Nothing."""
        return []

    def candidates(self, definition: Definition, machine: MachineCard) -> Refusal:
        """See `Supplier.candidates`."""
        return Refusal(self.name, self.unavailable(machine) or "")


def chosen(names: Sequence[str] | None, machine: MachineCard) -> list[Supplier]:
    """The suppliers of these names; None: all, but on a GPU without those that are too slow to be judged unasked."""
    found = select(names)
    if names is not None or machine.gpu is None:
        return found
    return [_OnRequest(s) if s.slow_on_gpu and s.unavailable(machine) is None else s for s in found]


def candidates(
    computes: Iterable[Compute],
    suppliers: Sequence[Supplier],
    machine: MachineCard,
    *,
    languages: Sequence[str] | None = None,
) -> Candidates:
    """Ask every supplier for every Definition; exact matches come before adapters, suppliers in their order.

    `languages`: those that Solutions may be written in; None: any.
    """
    rows: list[PlanRow] = []
    solutions: dict[str, tuple[Solution, ...]] = {}
    for compute in computes:
        lines: list[CandidateRow] = []
        for definition in compute.definitions:
            found, said = _for_definition(definition, suppliers, machine, languages)
            solutions[definition.name] = found
            lines += said
        matches = {line.match for line in lines if line.match}
        verdict: Literal["exact", "adapter", "new kernel"] = "new kernel"
        if matches:
            verdict = "exact" if "exact" in matches else "adapter"
        rows.append(
            PlanRow(
                family=compute.family,
                definitions=tuple(d.name for d in compute.definitions),
                sites=tuple(s.key for s in compute.sites),
                candidates=tuple(lines),
                verdict=verdict,
            )
        )
    return Candidates(tuple(rows), solutions)


def _for_definition(
    definition: Definition, suppliers: Sequence[Supplier], machine: MachineCard, languages: Sequence[str] | None
) -> tuple[tuple[Solution, ...], list[CandidateRow]]:
    found: list[Solution] = []
    lines: list[CandidateRow] = []
    for supplier in suppliers:
        if reason := supplier.unavailable(machine):
            lines.append(CandidateRow(supplier=supplier.name, reason=reason))
            continue
        answer = supplier.candidates(definition, machine)
        if isinstance(answer, Refusal):
            lines.append(CandidateRow(supplier=supplier.name, reason=answer.reason))
            continue
        fitting = [s for s in answer if languages is None or s.spec.language in languages]
        if answer and not fitting:
            other = ", ".join(sorted({s.spec.language for s in answer}))
            reason = f"its Solutions are written in {other}, and only {', '.join(languages or ())} is asked for"
            lines.append(CandidateRow(supplier=supplier.name, reason=reason))
        answer = fitting
        found += answer
        lines += [CandidateRow(supplier=supplier.name, solution=s.name, match=s.meta.match) for s in answer]
    found.sort(key=lambda s: s.meta.match != "exact")
    return tuple(found), lines


def already(
    model: nn.Module, card: ModelCard, machine: MachineCard, inventory: Inventory, use: Use | None = None
) -> tuple[str | None, Graft | None]:
    """What makes the job done: a graft on this very model, or one on disk for the same model, versions and machine.

    One on disk must also have been measured for the `use`, as far as that asks for something.

    Returns what to say, and the graft where there is one.
    """
    if applied := find_applied(model):
        families = ", ".join(dict.fromkeys(p.family for p in applied.graft.accepted))
        return f"`{card.name}` is already grafted ({families})", applied.graft
    graft = inventory.load_record("graft", Graft) if inventory.has_record("graft") else None
    if graft and same_job(graft, card, machine) and measured_for(graft, use, card.device):
        return f"`{card.name}` has a graft on disk for this model, these versions and this machine", graft
    return None, None


def same_job(graft: Graft, card: ModelCard, machine: MachineCard) -> bool:
    """True if a graft was made for this model, on this hardware, with these library versions."""
    here, there = machine, graft.machine
    return (
        graft.model == card
        and (here.cpu, here.cores, here.gpu, here.gpu_driver) == (there.cpu, there.cores, there.gpu, there.gpu_driver)
        and here.versions == there.versions
    )


def measured_for(graft: Graft, use: Use | None, device: str) -> bool:
    """True if a graft holds times for every batch and prompt length that is asked for, taken in the same way."""
    if use is None:
        return True
    asked = [p for p in use.points(device) if p != BASE] if use.batches or use.prefills else []
    seats = {(s.batch, s.prompt_tokens) for p in graft.patches for s in p.seats}
    return graft.mode == use.mode and all((p.batch, p.prompt_tokens) in seats for p in asked)


def make_plan(card: ModelCard, found: Candidates, inventory: Inventory) -> Plan:
    """Write the candidates and `plan.json`."""
    plan = Plan(model=card, rows=found.rows)
    for group in found.solutions.values():
        for solution in group:
            inventory.save_solution(solution)
    inventory.save_record("plan", plan)
    return plan


def planned(plan: Plan, inventory: Inventory) -> Candidates:
    """The candidates of a plan on disk."""
    stored = inventory.solutions()
    solutions: dict[str, list[Solution]] = {name: [] for row in plan.rows for name in row.definitions}
    for row in plan.rows:
        for line in row.candidates:
            if line.solution is None:
                continue
            if line.solution not in stored:
                raise RecordError(f"solution `{line.solution}` of the plan is missing: run `kernelgraft plan` again")
            solution = stored[line.solution]
            solutions[solution.definition].append(solution)
    return Candidates(plan.rows, {name: tuple(found) for name, found in solutions.items()})
