"""Ablation: what each compute of a graft does for the whole model, on against off, everything else on.

All versions (the original, the graft, the graft without each of its patches) generate in one process in turns that are
shuffled anew each round, so that drift hits all alike; a difference is one within a round.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft import machine
from kernelgraft.identity import split_of
from kernelgraft.models import Loaded
from kernelgraft.patch import apply
from kernelgraft.pipeline.points import Point, Use, ids_at, too_long
from kernelgraft.pipeline.progress import Progress, silent
from kernelgraft.records import Contribution, Graft, Patch, Regime, Seat

STEPS = 8
"""Decode steps of a run."""
ROUNDS, LEAST_ROUNDS, THOROUGH_ROUNDS = 5, 3, 12
BUDGET_S = 25.0
"""After it no new round begins, once the least number is done; where one round takes longer, the model runs with the
whole graft and without it only."""
WHOLE = 2
"""Versions that always run: the original and the whole graft."""
ALL = "all"
"""The family of a Contribution of the whole graft."""
_STUDENT = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20}
"""Two-sided 95 % points of Student's distribution by degrees of freedom."""

Setting = tuple[Regime, Point]
Times = dict[Setting, float]
"""Milliseconds: of a decode step, or of a prefill."""


@dataclass(frozen=True)
class Version:
    """One way to run the model."""

    graft: Graft | None
    """None: the original."""
    without: Patch | None = None
    """The patch that is off."""


def settings(loaded: Loaded, use: Use) -> list[Point]:
    """The points at which versions run: each batch, and the longest prompt that the model takes."""
    points = use.points(str(loaded.model.device))
    fitting = [p for p in points if p not in too_long(loaded, points)]
    longest = [p for p in fitting if p.prompt_tokens is not None][-1:]
    return [p for p in fitting if p.prompt_tokens is None] + longest


def ablate(
    loaded: Loaded,
    graft: Graft,
    use: Use | None = None,
    *,
    rounds: int = ROUNDS,
    budget_s: float = BUDGET_S,
    each: bool = True,
    progress: Progress = silent,
) -> tuple[Contribution, ...]:
    """The contribution of the whole graft and, with `each`, of every accepted patch, for decode steps and prefills.

    Empty for a graft without accepted patches, and for a model that is split over processes. The model is left as it
    was.
    """
    if not graft.accepted or split_of(loaded.model) is not None:
        return ()
    versions = [Version(None), Version(graft)]
    if each and len(graft.accepted) > 1:
        versions += [Version(_without(graft, patch), patch) for patch in graft.accepted]
    points = settings(loaded, use or Use())
    times = _race(loaded, versions, points, rounds, budget_s, progress)
    off, on, *less = times
    found = [_contribution(None, off, on, setting) for setting in on[0]]
    if each and len(graft.accepted) == 1:
        found += [_contribution(graft.accepted[0], off, on, setting) for setting in on[0]]
    for version, runs in zip(versions[2:], less, strict=True):
        if not runs:
            break
        found += [_contribution(version.without, runs, on, setting) for setting in on[0]]
    return told(graft, found)


def told(graft: Graft, contributions: Sequence[Contribution]) -> tuple[Contribution, ...]:
    """The same, each with whether the graft still has a seat for what it speaks of: without one, what was measured is
    no loss (or gain) that the graft has."""

    def seated(found: Contribution) -> bool:
        own = graft.patches if found.family == ALL else [p for p in graft.patches if _is_of(found, p)]
        seats = [s for p in own for s in p.seats if _speaks_of(found, s)]
        return any(s.seated for s in seats) or not seats

    return tuple(c.model_copy(update={"seated": seated(c)}) for c in contributions)


def without_losers(graft: Graft, contributions: Sequence[Contribution]) -> Graft:
    """The graft without the seats that gain nothing end to end: those of a patch and a setting (batch of decode steps,
    longest prompt) whose interval lies below zero, or whose mean does while the interval ends below half of what the
    seat gained in its place. An interval that is too wide to tell leaves the seat as it is.

    A short prompt's prefill decides nothing: it is once a request and mostly not the model's time.
    """

    def against(patch: Patch) -> list[Contribution]:
        own = [c for c in contributions if _is_of(c, patch)]
        return [c for c in own if _lost(c, _claim_ms(patch, c))]

    return _updated(graft, {id(p): against(p) for p in graft.accepted})


def without_slow_settings(graft: Graft, contributions: Sequence[Contribution]) -> Graft:
    """The graft without all seats of the settings in which the model is slower with it than without."""
    slow = [c for c in contributions if c.family == ALL and c.interval_ms[1] < 0 and _decides(c)]
    return _updated(graft, {id(p): slow for p in graft.accepted})


def _is_of(found: Contribution, patch: Patch) -> bool:
    return (found.family, found.sites) == (patch.family, tuple(site.key for site in patch.sites))


def _updated(graft: Graft, against: dict[int, list[Contribution]]) -> Graft:
    patches = tuple(_unseated(p, against[id(p)]) if against.get(id(p)) else p for p in graft.patches)
    changed = any(new is not old for new, old in zip(patches, graft.patches, strict=True))
    return graft.model_copy(update={"patches": patches}) if changed else graft


def _lost(found: Contribution, claim_ms: float) -> bool:
    high = found.interval_ms[1]
    return _decides(found) and (high < 0 or (found.gain_ms <= 0 and high < claim_ms / 2))


def _claim_ms(patch: Patch, found: Contribution) -> float:
    """What the seats of a setting gained in their places, for one call of every instance; 0 if not known."""
    gains = [s.gain_us or 0.0 for s in patch.seats if s.seated and _speaks_of(found, s)]
    instances = sum(len(site.instances) for site in patch.sites)
    return min(gains, default=0.0) * instances / 1e3


def _decides(found: Contribution) -> bool:
    return found.regime == "decode" or found.prompt_tokens is not None


def _unseated(patch: Patch, against: Sequence[Contribution]) -> Patch:
    seats = tuple(
        seat.model_copy(update={"seated": False}) if any(_speaks_of(c, seat) for c in against) else seat
        for seat in patch.seats
    )
    if seats == patch.seats:
        return patch
    update: dict[str, Any] = {"seats": seats}
    if not any(seat.seated for seat in seats):
        figures = ", ".join(f"{_where(c)} {c.on_ms:.2f} ms with it, {c.off_ms:.2f} ms without" for c in against)
        update |= {"status": "rejected", "reason": f"end to end it gains nothing: {figures}"}
    return patch.model_copy(update=update)


def _speaks_of(found: Contribution, seat: Seat) -> bool:
    """A decode step of a batch speaks of that batch's, whatever the length; a prefill of its own length."""
    if found.regime != seat.regime or found.batch != seat.batch:
        return False
    return found.regime == "decode" or found.prompt_tokens == seat.prompt_tokens


def _where(found: Contribution) -> str:
    return f"{found.regime} {Point(found.batch, found.prompt_tokens)}"


def _without(graft: Graft, patch: Patch) -> Graft:
    return graft.model_copy(update={"patches": tuple(p for p in graft.patches if p is not patch)})


def _race(
    loaded: Loaded,
    versions: Sequence[Version],
    points: Sequence[Point],
    rounds: int,
    budget_s: float,
    progress: Progress,
) -> list[list[Times]]:
    """Per version its times in each round. The first round, with what is compiled and allocated in it, is dropped."""
    model: Any = loaded.model
    prompts = {point: ids_at(loaded, point) for point in points}
    times: list[list[Times]] = [[] for _ in versions]
    order = list(range(len(versions)))
    shuffle = random.Random().shuffle
    started = machine.clock()
    for done in range(rounds + 1):
        if done > LEAST_ROUNDS and machine.clock() - started > budget_s:
            break
        progress("ablate", done, rounds + 1, f"{len(versions)} versions of the model, in turns")
        shuffle(order)
        for number in order:
            graft = versions[number].graft
            with apply(graft, model) if graft is not None else contextlib.nullcontext():
                found: Times = {}
                for point, ids in prompts.items():
                    found |= _times(model, ids, point)
            times[number].append(found)
        if done == 0 and budget_s < machine.clock() - started:
            order = [number for number in order if number < WHOLE]
    progress("ablate", rounds + 1, rounds + 1, f"{len(times[0]) - 1} rounds of {len(order)} versions")
    return [runs[1:] for runs in times]


def _times(model: Any, ids: torch.Tensor, point: Point) -> Times:
    """One greedy generation."""
    from kernelgraft.bench.worker import Stamps

    steps = STEPS if point.prompt_tokens is None else 0
    stamps = Stamps(len(ids), ids.device)
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1 + steps,
            min_new_tokens=1 + steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[stamps],
        )
    seconds = stamps.seconds()
    found: Times = {("prefill", point): 1e3 * seconds[0]}
    if steps:
        found["decode", point] = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(seconds))
    return found


def _contribution(patch: Patch | None, off: Sequence[Times], on: Sequence[Times], setting: Setting) -> Contribution:
    regime, point = setting
    with_it, without = [t[setting] for t in on], [t[setting] for t in off]
    return Contribution(
        family=ALL if patch is None else patch.family,
        sites=() if patch is None else tuple(site.key for site in patch.sites),
        regime=regime,
        batch=point.batch,
        prompt_tokens=point.prompt_tokens,
        on_ms=statistics.mean(with_it),
        off_ms=statistics.mean(without),
        interval_ms=interval([b - a for a, b in zip(with_it, without, strict=True)]),
    )


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of paired differences; infinite for a single one."""
    mean, count = statistics.mean(differences), len(differences)
    if count < 2:
        return -math.inf, math.inf
    reach = _STUDENT.get(count - 1, 2.0) * statistics.stdev(differences) / math.sqrt(count)
    return mean - reach, mean + reach
