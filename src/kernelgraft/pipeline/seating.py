"""Time the original and every verified Solution in their site, and seat the fastest per regime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from kernelgraft import families
from kernelgraft.evaluate import decide, interleave
from kernelgraft.patch import Dispatcher, apply
from kernelgraft.pipeline.researching import Bound, Compute, axes_of, replay
from kernelgraft.records import Definition, Evaluation, Graft, Patch, Performance, Regime, Seat, Solution

Policy = Literal["fastest", "verified"]
ORIGINAL, REPEAT = "original", "original again"
REGIMES: tuple[Regime, ...] = ("prefill", "decode")


def representative(compute: Compute, definition: Definition, regime: Regime) -> Bound | None:
    """The captured call that stands for a regime: unpadded and from a dynamic cache where there is one."""
    calls = [b for b in compute.bound if b.definition.name == definition.name and b.call.regime == regime]
    return min(calls, key=lambda b: (b.call.padded, b.call.cache != "dynamic"), default=None)


def measured(compute: Compute, definition: Definition) -> list[Bound]:
    """The calls that are timed, one per regime: all that a Solution compiled per shape will ever serve."""
    calls = (representative(compute, definition, regime) for regime in REGIMES)
    return [bound for bound in calls if bound is not None]


def original_kernel(bound: Bound) -> Callable[..., Any] | None:
    """What the model itself computes from a Definition's inputs, where the family can call it so; else None."""
    return families.get(bound.definition.meta.family).original(bound.call)


def seat_regimes(
    compute: Compute,
    verified: Sequence[Solution],
    *,
    policy: Policy,
    rounds: int = 40,
    budget_s: float = 1.5,
) -> tuple[tuple[Seat, ...], dict[str, dict[str, Performance]]]:
    """Measure every regime of a compute's Definitions.

    Returns the seats, and per Solution name its times per regime. Times are host times of one call in µs, synchronised.
    """
    seats: list[Seat] = []
    times: dict[str, dict[str, Performance]] = {}
    for definition in compute.definitions:
        own = [s for s in verified if s.definition == definition.name]
        for regime in REGIMES:
            bound = representative(compute, definition, regime)
            if bound is None or not own:
                continue
            seat = _measure(compute, definition, regime, bound, own, policy, rounds, budget_s)
            seats.append(seat)
            for name, solution_us in seat.candidates_us.items():
                assert seat.original_us is not None and seat.spread_us is not None
                label = regime if len(compute.definitions) == 1 else f"{regime}:{definition.name}"
                times.setdefault(name, {})[label] = Performance(
                    original_us=seat.original_us, solution_us=solution_us, spread_us=seat.spread_us
                )
    return tuple(seats), times


def _measure(
    compute: Compute,
    definition: Definition,
    regime: Regime,
    bound: Bound,
    solutions: Sequence[Solution],
    policy: Policy,
    rounds: int,
    budget_s: float,
) -> Seat:
    family = families.get(compute.family)
    work, axes = family.work(bound.inputs), axes_of(definition, bound.inputs)
    contenders: dict[str, Callable[[], Any]] = {
        name: functools.partial(replay, bound.site, bound.call, bound.call.original) for name in (ORIGINAL, REPEAT)
    }
    for solution in solutions:
        replacement = seated(compute, definition, regime, work, axes, solution, bound.call.original)
        contenders[solution.name] = functools.partial(replay, bound.site, bound.call, replacement)
    with torch.no_grad():
        timings = interleave(contenders, rounds=rounds, budget_s=budget_s)
    choice = decide(timings, original=ORIGINAL, repeat=REPEAT, policy=policy)
    candidates = {s.name: timings[s.name].median_us for s in solutions}
    best = min(candidates, key=lambda n: candidates[n])
    chosen = choice.winner if choice.winner in candidates else None
    return Seat(
        definition=definition.name,
        regime=regime,
        work=work,
        axes=axes,
        original_us=timings[ORIGINAL].median_us,
        solution_us=candidates[chosen or best],
        spread_us=choice.spread_us,
        candidates_us=candidates,
        solution=chosen or best,
        seated=chosen is not None,
    )


def seated(
    compute: Compute,
    definition: Definition,
    regime: Regime,
    work: int,
    axes: dict[str, int],
    solution: Solution,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """What the site would call if only this Solution were seated: through the dispatcher, so its cost is counted."""
    patch = Patch(
        family=compute.family,
        sites=tuple(compute.sites),
        semantics=compute.semantics,
        definitions=(definition.name,),
        status="accepted",
        seats=(
            Seat(
                definition=definition.name,
                regime=regime,
                work=work,
                axes=axes,
                solution=solution.name,
                seated=True,
            ),
        ),
    )
    family = families.get(compute.family)
    seat = family.seat(compute.semantics)
    dispatcher = Dispatcher(patch, {definition.name: definition}, {solution.name: solution}, family)
    return seat.factory(original, dispatcher, **seat.constants)


def with_performance(evaluation: Evaluation, times: dict[str, dict[str, Performance]]) -> Evaluation:
    """The evaluation with its measured times, if its Solution was measured."""
    found = times.get(evaluation.solution)
    return evaluation.model_copy(update={"performance": found}) if found else evaluation


def against_parts(
    model: torch.nn.Module,
    compute: Compute,
    seats: Sequence[Seat],
    solutions: dict[str, tuple[Solution, ...]],
    parts: Graft,
) -> tuple[Seat, ...]:
    """Unseat a fusion where its parts, with what was seated for them, are as fast.

    A statement site contains a module call (residual addition, then norm); its original gets faster when that module is
    patched. `parts` holds the patches accepted so far.
    """
    if not parts.accepted or not any(s.kind == "statement" for s in compute.sites):
        return tuple(seats)
    kept: list[Seat] = []
    definitions = {d.name: d for d in compute.definitions}
    with apply(parts, model):
        for seat in seats:
            kept.append(_against(compute, definitions[seat.definition], seat, solutions) if seat.seated else seat)
    return tuple(kept)


def _against(compute: Compute, definition: Definition, seat: Seat, solutions: dict[str, tuple[Solution, ...]]) -> Seat:
    bound = representative(compute, definition, seat.regime)
    assert bound is not None
    solution = next(s for s in solutions[definition.name] if s.name == seat.solution)
    replacement = seated(
        compute, definition, seat.regime, seat.work, axes_of(definition, bound.inputs), solution, bound.call.original
    )
    contenders: dict[str, Callable[[], Any]] = {
        name: functools.partial(replay, bound.site, bound.call, bound.call.original) for name in (ORIGINAL, REPEAT)
    }
    contenders[solution.name] = functools.partial(replay, bound.site, bound.call, replacement)
    with torch.no_grad():
        timings = interleave(contenders, rounds=40, budget_s=1.5)
    choice = decide(timings, original=ORIGINAL, repeat=REPEAT, policy="fastest")
    return seat if choice.winner == solution.name else seat.model_copy(update={"seated": False})
