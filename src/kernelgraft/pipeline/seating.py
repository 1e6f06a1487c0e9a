"""Who serves which sizes: the original and every verified Solution timed in their site, the fastest seated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from kernelgraft import families
from kernelgraft.evaluate import decide
from kernelgraft.patch import apply
from kernelgraft.pipeline import measuring
from kernelgraft.pipeline.measuring import ORIGINAL, REPEAT, Measured, Sample
from kernelgraft.pipeline.points import BASE, Mode
from kernelgraft.pipeline.researching import Bound, Compute
from kernelgraft.records import Evaluation, Graft, Performance, Seat, Solution, Status

Policy = Literal["fastest", "verified"]
PARTS = "its parts are as fast with what was seated for them"


def original_kernel(bound: Bound) -> Callable[..., Any] | None:
    """What the model itself computes from a Definition's inputs, where the family can call it so; else None."""
    return families.get(bound.definition.meta.family).original(bound.call)


def judged_calls(compute: Compute, definition_name: str) -> list[Bound]:
    """The calls that a Solution compiled per shape is judged on, one per regime: it serves no others."""
    definition = next(d for d in compute.definitions if d.name == definition_name)
    calls = (measuring.representative(compute, definition, regime) for regime in measuring.REGIMES)
    return [bound for bound in calls if bound is not None]


@dataclass
class Table:
    """What was measured of one compute, point by point, and the seats that follow from it."""

    compute: Compute
    verified: list[Solution]
    policy: Policy
    mode: Mode = "eager"
    rows: list[Measured] = field(default_factory=list)
    matched: set[int] = field(default_factory=set)
    """Rows in which the parts of a fusion are as fast."""
    over_parts_us: dict[int, float] = field(default_factory=dict)
    """By row, what a fusion gains over its parts."""

    def add(self, model: nn.Module, samples: Sequence[Sample]) -> None:
        """Measure the samples whose sizes are new."""
        for sample in samples:
            if any(self._is(row, sample) for row in self.rows):
                continue
            own = [s for s in self.verified if s.definition == sample.definition.name and _serves(s, sample)]
            if own or any(s.definition == sample.definition.name for s in self.verified):
                self.rows.append(measuring.measure(model, self.compute, sample, own, mode=self.mode))

    @staticmethod
    def _is(row: Measured, sample: Sample) -> bool:
        return (row.definition, row.regime, row.axes) == (sample.definition.name, sample.regime, sample.axes)

    @property
    def wrong(self) -> dict[str, str]:
        """Solutions that were wrong at some size, with the reason: they are seated nowhere."""
        return {name: reason for row in self.rows for name, reason in row.wrong.items()}

    def seats(self) -> tuple[Seat, ...]:
        """One seat for each row."""
        return tuple(self._seat(number, row) for number, row in enumerate(self.rows))

    def _seat(self, number: int, row: Measured) -> Seat:
        timings = {name: t for name, t in row.timings.items() if name not in self.wrong}
        place: dict[str, Any] = {
            "definition": row.definition,
            "regime": row.regime,
            "work": row.work,
            "axes": row.axes,
            "batch": row.point.batch,
            "prompt_tokens": row.point.prompt_tokens,
        }
        candidates = {name: t.median_us for name, t in timings.items() if name not in (ORIGINAL, REPEAT)}
        if not candidates:
            return Seat(**place)
        choice = decide(timings, original=ORIGINAL, repeat=REPEAT, policy=self.policy)
        chosen = choice.winner if choice.winner in candidates else None
        best = min(candidates, key=lambda name: candidates[name])
        gain_us = timings[ORIGINAL].median_us - candidates[chosen or best]
        return Seat(
            **place,
            original_us=timings[ORIGINAL].median_us,
            solution_us=candidates[chosen or best],
            spread_us=choice.spread_us,
            gain_us=self.over_parts_us.get(number, gain_us),
            candidates_us=candidates,
            solution=chosen or best,
            seated=chosen is not None and number not in self.matched,
        )

    def against_parts(self, model: nn.Module, samples: Sequence[Sample], parts: Graft) -> None:
        """Of a fusion, note the rows of these samples in which its parts, with what was seated for them, are as fast.

        A statement site contains a module call (residual addition, then norm); its original gets faster when that
        module is patched. `parts` holds the patches accepted so far.
        """
        if not parts.accepted or not self.fusion:
            return
        due = [
            (number, sample, seat)
            for number, (row, seat) in enumerate(zip(self.rows, self.seats(), strict=True))
            for sample in samples
            if seat.seated and self._is(row, sample)
        ]
        if not due:
            return
        with apply(parts, model):
            for number, sample, seat in due:
                solution = next(s for s in self.verified if s.name == seat.solution)
                with torch.no_grad():
                    row = measuring.measure(model, self.compute, sample, [solution], mode=self.mode)
                timed = solution.name in row.timings  # not where it is wrong, or does not go into a graph now
                choice = decide(row.timings, original=ORIGINAL, repeat=REPEAT) if timed else None
                if choice is not None:
                    self.over_parts_us[number] = choice.original_us - row.timings[solution.name].median_us
                if choice is None or choice.winner != solution.name:
                    self.matched.add(number)

    @property
    def fusion(self) -> bool:
        """True if the compute's sites contain another compute."""
        return any(s.kind == "statement" for s in self.compute.sites)

    def performances(self) -> dict[str, dict[str, Performance]]:
        """Per Solution its times by regime; those of other points than the shortest are told apart in the key."""
        found: dict[str, dict[str, Performance]] = {}
        for row, seat in zip(self.rows, self.seats(), strict=True):
            label: str = row.regime if row.point == BASE else f"{row.regime} {row.point}"
            if len(self.compute.definitions) > 1:
                label += f":{row.definition}"
            for name, solution_us in seat.candidates_us.items():
                assert seat.original_us is not None and seat.spread_us is not None
                found.setdefault(name, {})[label] = Performance(
                    original_us=seat.original_us, solution_us=solution_us, spread_us=seat.spread_us
                )
        return found

    def updated(self, evaluation: Evaluation) -> Evaluation:
        """The evaluation with its measured times, or as a failure if it was wrong at a measured size."""
        name = evaluation.solution
        if evaluation.status is not Status.PASSED or all(s.name != name for s in self.verified):
            return evaluation
        if reason := self.wrong.get(name):
            status = Status.RUNTIME_ERROR if reason.startswith("raised") else Status.INCORRECT_NUMERICAL
            update = {"status": status, "check": "C6", "reason": f"C6: {reason}", "performance": {}}
            return evaluation.model_copy(update=update)
        times = self.performances().get(name)
        return evaluation.model_copy(update={"performance": times}) if times else evaluation


def _serves(solution: Solution, sample: Sample) -> bool:
    """False for a Solution that is compiled per shape and was not judged on this one."""
    return not solution.meta.guard.static_shapes or sample.point == BASE
