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
from kernelgraft.evaluate import Captured, JudgeOptions
from kernelgraft.identity import model_card
from kernelgraft.models import Loaded, wrap
from kernelgraft.pipeline import ablation, gate, planning, seating
from kernelgraft.pipeline.points import Use
from kernelgraft.pipeline.progress import Progress, silent
from kernelgraft.pipeline.ranks import led
from kernelgraft.pipeline.researching import Bound, Compute, axes_of, research
from kernelgraft.pipeline.seating import Policy
from kernelgraft.pipeline.selection import select
from kernelgraft.pipeline.threads import threads_at_most
from kernelgraft.pipeline.verifying import Judges, Task
from kernelgraft.records import Contribution, Graft, MachineCard, Plan, Research, Seat
from kernelgraft.store import Inventory
from kernelgraft.suppliers.base import Supplier

USUAL = Use()
RESEARCH_THREADS = 4
"""Research computes small things on the CPU, while the judges' processes start."""


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
    use: Use = USUAL,
    ablate: bool = False,
    force: bool = False,
    options: JudgeOptions | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    languages: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Graft:
    """Research a live model, verify and time every candidate, and return the graft; the model is left as it was.

    `suppliers` are names (None: all that run here) or Supplier objects. With `out`, all records are written to that
    folder. `use` says what the choice is made for; with `ablate`, what each compute gains end to end is measured in
    more rounds, and also where that decides nothing. `jobs` Solutions are verified at a time (None: as many as there
    are cores, two fewer beside a GPU); `fresh` judges again what an earlier run has verified; `languages` are those of
    the Solutions that are tried (None: all). Raises NothingToPatch if no site is recognised, UsageError for a wrong
    name or folder.
    """
    loaded = model if isinstance(model, Loaded) else wrap(model, tokenizer, name)
    with contextlib.ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return run_integration(
            loaded,
            Inventory(folder),
            suppliers=suppliers,
            policy=policy,
            use=use,
            ablate=ablate,
            force=force,
            options=options,
            jobs=jobs,
            fresh=fresh,
            languages=languages,
            progress=progress,
        ).graft


@led
def run_integration(
    loaded: Loaded,
    inventory: Inventory,
    *,
    suppliers: Sequence[str] | Sequence[Supplier] | None = None,
    policy: Policy = "fastest",
    use: Use = USUAL,
    ablate: bool = False,
    force: bool = False,
    options: JudgeOptions | None = None,
    jobs: int | None = None,
    fresh: bool = False,
    languages: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Integration:
    """`integrate` into an inventory, with every record that it made.

    Every rank that has a part of a split model calls this; the first one writes, all get the same.
    """
    card, here = model_card(loaded.model, loaded.ref.spec), machine.read()
    chosen = _suppliers(suppliers, here)
    done, graft = planning.already(loaded.model, card, here, inventory, use)
    if done and graft and not force:
        return Integration(None, Plan(model=card, rows=(), already=done), graft, done)
    # On a GPU there are many cores, and what a judge's process imports takes as long as the research.
    with Judges(options, device=card.device, jobs=jobs, fresh=fresh, early=card.device.startswith("cuda")) as judges:
        with threads_at_most(RESEARCH_THREADS):
            record, computes = research(loaded, inventory, progress=progress)
        if not computes:
            raise NothingToPatch(f"`{card.name}` has no site that a kernel could take: see `kernelgraft research`")
        found = planning.candidates(computes, chosen, here, languages=languages)
        plan = planning.make_plan(card, found, inventory)
        graft = make_graft(
            loaded,
            computes,
            found,
            inventory,
            policy=policy,
            use=use,
            ablate=ablate,
            judges=judges,
            progress=progress,
        )
    return Integration(record, plan, graft, None)


def make_graft(
    loaded: Loaded,
    computes: Sequence[Compute],
    found: planning.Candidates,
    inventory: Inventory,
    *,
    policy: Policy = "fastest",
    use: Use = USUAL,
    ablate: bool = False,
    judges: Judges,
    progress: Progress = silent,
) -> Graft:
    """Verify, measure and check the whole; write the evaluations and `graft.json`."""
    card = model_card(loaded.model, loaded.ref.spec)
    verified = judges.verify(_tasks(computes, found), progress=progress)
    judges.close()  # nothing else may be at work while it is measured
    graft = select(loaded, computes, found, card, policy, use, verified, progress)
    progress("check", 0, None, "comparing the grafted model with the original")
    graft = gate.filter_patches(graft, loaded)
    progress("check", 1, 1, f"{len(graft.accepted)} computes accepted")
    graft = end_to_end(loaded, graft, use, ablate=ablate, progress=progress)
    inventory.append_evaluations(graft.evaluations, machine.read())
    inventory.save_record("graft", graft)
    return graft


def end_to_end(
    loaded: Loaded, graft: Graft, use: Use = USUAL, *, ablate: bool = False, progress: Progress = silent
) -> Graft:
    """The graft with what it gains when the whole model runs, and without the seats that gain nothing.

    A graft of policy `verified`, or for CUDA graphs, is left as it is; with `ablate` what it gains is measured all
    the same, in more rounds.
    """
    decides = graft.policy == "fastest" and graft.mode == "eager"
    if not decides and not ablate:
        return graft
    rounds, budget_s = (
        (ablation.THOROUGH_ROUNDS, 4 * ablation.BUDGET_S) if ablate else (ablation.ROUNDS, ablation.BUDGET_S)
    )

    def measured(of: Graft, each: bool) -> tuple[Contribution, ...]:
        return ablation.ablate(loaded, of, use, rounds=rounds, budget_s=budget_s, each=each, progress=progress)

    found = measured(graft, True)
    if not decides:
        return graft.model_copy(update={"contributions": found})
    # Whenever seats are taken away, the whole is measured again: its row is of the graft as it is then.
    kept = graft
    for without in (ablation.without_losers, ablation.without_slow_settings):
        if (less := without(kept, found)) is not kept:
            kept = gate.filter_patches(less, loaded)
            alone = tuple(c for c in found if c.family != ablation.ALL)
            found = (*measured(kept, False), *alone)
    found = ablation.told(kept, found)
    progress("ablate", 1, 1, f"{len(kept.accepted)} of {len(graft.accepted)} computes stay")
    return kept.model_copy(update={"contributions": found})


def restricted(graft: Graft, *, language: str) -> Graft:
    """The graft with only Solutions that are written in `language`; a patch that loses all its seats is rejected.

    Where another Solution was seated, the fastest of the language takes its place if it is faster than the original.
    """
    patches = []
    for patch in graft.patches:
        seats = tuple(_reseated(graft, s, language) if s.seated else s for s in patch.seats)
        update: dict[str, Any] = {"seats": seats}
        if patch.status == "accepted" and not any(s.seated for s in seats):
            update |= {"status": "rejected", "reason": f"no Solution in {language} is faster than the original"}
        patches.append(patch.model_copy(update=update))
    return graft.model_copy(update={"patches": tuple(patches)})


def _reseated(graft: Graft, seat: Seat, language: str) -> Seat:
    solutions = graft.solutions
    if seat.solution in solutions and solutions[seat.solution].spec.language == language:
        return seat
    own = {n: us for n, us in seat.candidates_us.items() if n in solutions and solutions[n].spec.language == language}
    best = min(own, key=lambda name: own[name], default=None)
    if best is None:
        return seat.model_copy(update={"seated": False})
    gain_us = (seat.original_us or 0.0) - own[best]
    kept = graft.policy == "verified" or gain_us > (seat.spread_us or 0.0)
    return seat.model_copy(update={"seated": kept, "solution": best, "solution_us": own[best]})


def _suppliers(given: Sequence[str] | Sequence[Supplier] | None, here: MachineCard) -> list[Supplier]:
    if given and isinstance(given[0], Supplier):
        return list(given)  # type: ignore[arg-type]
    return planning.chosen(given, here)  # type: ignore[arg-type]


def _tasks(computes: Sequence[Compute], found: planning.Candidates) -> list[Task]:
    """Every candidate with the calls that it is judged on."""
    tasks = []
    for compute in computes:
        for definition in compute.definitions:
            own = [b for b in compute.bound if b.definition.name == definition.name]
            for solution in found.solutions.get(definition.name, ()):
                static = solution.meta.guard.static_shapes
                calls = seating.judged_calls(compute, definition.name) if static else own
                captured = tuple(as_captured(b) for b in calls)
                tasks.append(Task(solution, definition, captured, seating.original_kernel(own[0])))
    return tasks


def as_captured(bound: Bound) -> Captured:
    """A captured call as the judge takes it."""
    call = bound.call
    label = f"{call.regime}{' padded' if call.padded else ''} {call.cache} {call.instance}"
    return Captured(inputs=bound.inputs, regime=call.regime, label=label, axes=axes_of(bound.definition, bound.inputs))
