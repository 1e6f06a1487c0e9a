"""Record one call of each compute at a point of use, and time the original and the verified Solutions there.

A call is timed in its site: through the seat and the dispatcher, so that their cost is in it, and on the instances of
the site in turn, so that a layer's weights are as cold as they are in the model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kernelgraft import families
from kernelgraft.evaluate import Timing, interleave
from kernelgraft.families.base import Call, Kernel, Recognition
from kernelgraft.models import Loaded
from kernelgraft.patch import Dispatcher
from kernelgraft.pipeline.graphs import WARMUP, captured_graphs
from kernelgraft.pipeline.points import BASE, Mode, Point, run_at
from kernelgraft.pipeline.researching import Bound, Compute, axes_of, belongs, replay
from kernelgraft.records import Definition, Patch, Regime, Seat, Site, Solution
from kernelgraft.sites import capture
from kernelgraft.suppliers.guards import refuses

ORIGINAL, REPEAT = "original", "original again"
REGIMES: tuple[Regime, ...] = ("prefill", "decode")
ROUNDS = 40
CPU_BUDGET_S, GPU_BUDGET_S = 1.5, 0.4
"""For the rounds of one call; five rounds are always run."""
MOST_INSTANCES = WARMUP - 1
"""Of a site, beside the recorded one, that take turns."""
DIFFERENCE_EPS, LEAST_DIFFERENCE = 4.0, 1e-4
"""Relative RMSE that a Solution's result may be away from the original's, in machine epsilons of its dtype and at
least: the judge has seen other sizes of the same compute, so that this only has to notice what is plainly wrong."""


@dataclass(frozen=True)
class Sample:
    """One call of a site at one point."""

    site: Site
    call: Call
    definition: Definition
    inputs: tuple[Any, ...]
    """The Definition's."""
    regime: Regime
    point: Point = BASE

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the Definition's var axes."""
        return axes_of(self.definition, self.inputs)


@dataclass(frozen=True)
class Measured:
    """What a sample's call took by each contender."""

    axes: dict[str, int]
    definition: str
    regime: Regime
    point: Point
    work: int
    timings: dict[str, Timing]
    """Empty if no Solution serves the call."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Solutions that are wrong or fail here, with the reason."""


class _Seen(BaseException):
    """Ends a call of a site when the Definition's inputs are known."""

    def __init__(self, definition: Definition, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.definition, self.inputs = definition, inputs


def representative(compute: Compute, definition: Definition, regime: Regime) -> Bound | None:
    """The captured call that stands for a regime: unpadded and from a dynamic cache where there is one."""
    calls = [b for b in compute.bound if b.definition.name == definition.name and b.call.regime == regime]
    return min(calls, key=lambda b: (b.call.padded, b.call.cache != "dynamic"), default=None)


def base_samples(compute: Compute) -> list[Sample]:
    """Of the calls that research captured, one for each Definition and regime."""
    found = []
    for definition, regime in itertools.product(compute.definitions, REGIMES):
        bound = representative(compute, definition, regime)
        if bound is not None:
            found.append(Sample(bound.site, bound.call, definition, bound.inputs, regime))
    return found


def samples(loaded: Loaded, computes: Sequence[Compute], point: Point) -> list[list[Sample]]:
    """For each compute one call for each Definition and regime, recorded while the model generates at the point."""
    if point == BASE:
        return [base_samples(compute) for compute in computes]
    sites = list({site.key: site for compute in computes for site in compute.sites}.values())
    calls = capture(loaded.model, sites, [run_at(loaded, point)]).calls
    found = []
    for compute in computes:
        own: dict[tuple[str, Regime], Sample] = {}
        recognition = Recognition(compute.family, compute.semantics, compute.definitions)
        for site in compute.sites:
            for call in calls.get(site.key, ()):
                made = _sample(site, call, recognition, point)
                if made is not None:
                    own.setdefault((made.definition.name, made.regime), made)
        found.append(list(own.values()))
    return found


def _sample(site: Site, call: Call, recognition: Recognition, point: Point) -> Sample | None:
    """The call with the Definition's inputs, without computing anything; None if the original has to serve it."""
    by_inputs = {len(d.inputs): d for d in recognition.definitions}

    def select(*inputs: Any) -> Kernel | None:
        definition = by_inputs.get(len(inputs))
        if definition is None or not belongs(definition, inputs):
            return None

        def kernel(*values: Any) -> Any:
            raise _Seen(definition, values)

        return kernel

    seat = families.get(recognition.family).seat(recognition.semantics)
    replacement = seat.factory(call.original, select, **seat.constants)
    try:
        with torch.no_grad():
            replay(site, call, replacement)
    except _Seen as seen:
        return Sample(site, call, seen.definition, seen.inputs, call.regime, point)
    return None


def measure(
    model: nn.Module, compute: Compute, sample: Sample, solutions: Sequence[Solution], *, mode: Mode = "eager"
) -> Measured:
    """Time the original twice and each Solution that serves the call; µs a call."""
    work, axes = families.get(compute.family).work(sample.inputs), sample.axes
    contenders = {name: through(model, sample, sample.call.original) for name in (ORIGINAL, REPEAT)}
    wrong: dict[str, str] = {}
    with torch.no_grad():
        wanted = contenders[ORIGINAL]() if solutions else None
        for solution in solutions:
            if refuses(solution.meta.guard, sample.definition, sample.inputs):
                continue
            replacement = seated(compute, sample.definition, sample.regime, work, axes, solution, sample.call.original)
            contender = functools.partial(replay, sample.site, sample.call, replacement)
            try:
                reason = _wrong(contender, wanted, sample)
            except torch.OutOfMemoryError:
                continue  # it does not serve these sizes on this device
            if reason is not None:
                wrong[solution.name] = reason
            else:
                contenders[solution.name] = through(model, sample, replacement)
        wanted = None
        timings = time_all(contenders, mode=mode) if len(contenders) > 2 else {}
    return Measured(axes, sample.definition.name, sample.regime, sample.point, work, timings, wrong)


def time_all(contenders: dict[str, Callable[[], Any]], *, mode: Mode = "eager") -> dict[str, Timing]:
    """All against each other. In a graph: those that can be captured, if the original is among them."""
    budget_s = GPU_BUDGET_S if torch.cuda.is_initialized() else CPU_BUDGET_S
    if mode == "graph":
        graphs, calls = captured_graphs(contenders)
        if ORIGINAL in graphs and REPEAT in graphs:
            found = interleave(graphs, rounds=ROUNDS, budget_s=budget_s)
            return {name: _per_call(timing, calls) for name, timing in found.items()}
    return interleave(contenders, rounds=ROUNDS, budget_s=budget_s)


def _per_call(timing: Timing, calls: int) -> Timing:
    return Timing(timing.median_us / calls, timing.mad_us / calls, tuple(s / calls for s in timing.samples))


def through(model: nn.Module, sample: Sample, function: Callable[..., Any]) -> Callable[[], Any]:
    """The sample's call through a function of the site, on another instance of the site each time."""
    call, site = sample.call, sample.site
    if site.kind not in ("module", "statement"):
        return functools.partial(replay, site, call, function)
    turn = itertools.cycle(list(_alike(model, sample)))

    def run() -> Any:
        return function(next(turn), *call.args, **call.kwargs)

    return run


def _alike(model: nn.Module, sample: Sample) -> Iterator[nn.Module]:
    """The recorded module, then the site's other instances on the same devices."""
    own = sample.call.module
    places = {p.device for p in own.parameters()}
    yield own
    for path in sample.site.instances[:MOST_INSTANCES]:
        module = model.get_submodule(path)
        if module is not own and {p.device for p in module.parameters()} == places:
            yield module


def _wrong(contender: Callable[[], Any], wanted: Any, sample: Sample) -> str | None:
    """Why a verified Solution is not taken at these sizes; None if it gives what the original gives."""
    where = f"{sample.regime} of {sample.point}"
    try:
        given = contender()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a Solution raises: the model would raise it too
        return f"raised in a {where}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if sample.point == BASE:  # the judge saw this very call, and knows what of it (padding) nobody uses
        return None
    pairs = zip(tree_leaves(given), tree_leaves(wanted), strict=False)
    for number, (got, want) in enumerate(pairs):
        if not isinstance(want, torch.Tensor) or not want.is_floating_point():
            continue
        if got is None and number > 0:
            continue  # attention weights, which the original gives and nobody asked for
        apart = _apart(got, want)
        if not apart <= max(DIFFERENCE_EPS * torch.finfo(want.dtype).eps, LEAST_DIFFERENCE):
            return f"wrong in a {where}: {apart:.1e} relative RMSE from the original"
    return None


def _apart(got: Any, want: torch.Tensor) -> float:
    """Relative RMSE of the finite values; infinite if shapes differ or finite values are not."""
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        return float("inf")
    finite = want.isfinite()
    a, b = got[finite].float(), want[finite].float()
    if not bool(a.isfinite().all()):
        return float("inf")
    scale = float(b.square().mean().sqrt()) if b.numel() else 0.0
    return float((a - b).square().mean().sqrt()) / max(scale, 1e-30) if b.numel() else 0.0


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
