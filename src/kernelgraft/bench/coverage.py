"""How much of the original's time is spent where a graft sits: a stopwatch around each site's original, by module path.

The clock is the CPU time of the thread that runs the model, so that other work on the machine is not counted; a
profiler's ranges are wall time, and its own cost per operator would change the shares. Only for CPU: on a GPU the
thread's time says little, and nothing is measured there.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from kernelgraft import machine
from kernelgraft.bench.result import Coverage
from kernelgraft.errors import KernelgraftError
from kernelgraft.patch.claims import Claim, collect, find_root
from kernelgraft.records import Graft
from kernelgraft.sites import InterfaceProxy, Undo, callee, current, innermost, install, rebind, statements

WARMUP_RUNS = 1
RUNS = 3
"""Measured together."""


@dataclass(frozen=True)
class Range:
    """One stretch of CPU time in which a site ran, s."""

    key: str
    start_s: float
    end_s: float


class Recorder:
    """Notes a range for each call of a wrapped function, innermost first."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def wrap(self, function: Callable[..., Any], key: str) -> Callable[..., Any]:
        """`function`, noted under `key`."""
        clock, ranges = machine.thread_cpu_clock, self.ranges

        @functools.wraps(function)
        def through(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                ranges.append(Range(key, start, clock()))

        return through


def measure(model: nn.Module, graft: Graft, generate: Callable[[], Any], new_tokens: int) -> Coverage:
    """Time `generate` with a range around the original of every site that the graft replaces; the model is restored.

    `new_tokens` is only written down. Raises KernelgraftError if nothing was measured.
    """
    recorder = Recorder()
    with ranged(model, graft, recorder):
        for _ in range(WARMUP_RUNS):
            generate()
        recorder.ranges.clear()
        began = machine.thread_cpu_clock()
        for _ in range(RUNS):
            generate()
        whole_s = machine.thread_cpu_clock() - began
    total, sites = shares(recorder.ranges, whole_s, reading_s())
    return Coverage(device="cpu", cpu_time_percent=total, sites_percent=sites, new_tokens=new_tokens)


def reading_s() -> float:
    """What one look at the clock costs, s: half of it stands inside a range, half of it outside."""
    clock = machine.thread_cpu_clock
    return statistics.median(-(clock() - clock()) for _ in range(1001))


def shares(ranges: Sequence[Range], whole_s: float, reading_s: float = 0.0) -> tuple[float, dict[str, float]]:
    """Percent of the whole inside any site, and inside each site with all that runs in it.

    A site inside another counts once in the first figure. The ranges are of one thread, so two of them nest or do not
    touch. The two readings of the clock that each range adds are taken off. Raises KernelgraftError for an empty whole.
    """
    whole = whole_s - 2 * reading_s * len(ranges)
    if whole <= 0:
        raise KernelgraftError("the run took no CPU time that can be measured; generate more tokens")
    sites: dict[str, float] = {}
    total = 0.0
    open_ends: list[float] = []
    inside: list[int] = []
    ordered = sorted(ranges, key=lambda r: (r.start_s, -r.end_s))
    for r in ordered:
        while open_ends and open_ends[-1] <= r.start_s:
            open_ends.pop()
        inside.append(len(open_ends))
        open_ends.append(r.end_s)
    for index, r in enumerate(ordered):
        nested = 0
        while index + nested + 1 < len(ordered) and inside[index + nested + 1] > inside[index]:
            nested += 1
        percent = 100 * max(r.end_s - r.start_s - reading_s * (1 + 2 * nested), 0.0) / whole
        sites[r.key] = sites.get(r.key, 0.0) + percent
        total += percent if inside[index] == 0 else 0.0
    return total, sites


@contextlib.contextmanager
def ranged(model: nn.Module, graft: Graft, recorder: Recorder) -> Iterator[None]:
    """The original code with a range around each site of the accepted patches; taken out again at the end."""
    methods: dict[tuple[int, str], list[Claim]] = {}
    for claim in collect(graft, find_root(model, graft.model.class_name)):
        methods.setdefault((id(claim.module), claim.site.method), []).append(claim)
    undos: list[Undo] = []
    try:
        for group in methods.values():
            undos.append(install(group[0].module, group[0].site.method, _with_ranges(group, recorder)))
        yield
    finally:
        for undo in reversed(undos):
            undo()


def _with_ranges(group: Sequence[Claim], recorder: Recorder) -> Callable[..., Any]:
    """One method with ranges around its sites: the parts inside it first, then the whole of it."""
    before = current(group[0].module, group[0].site.method)
    scope = innermost(before).__globals__
    names: dict[str, Any] = {}
    written = []
    for site in (claim.site for claim in group):
        symbol = site.symbol or ""
        if site.kind == "function":
            names[symbol] = recorder.wrap(callee(scope[symbol]), site.key)
        elif site.kind == "attention":
            names[symbol] = InterfaceProxy(scope[symbol], functools.partial(_attention, recorder, site.key))
        elif site.kind == "statement":
            names[statements.injected_name(site)] = recorder.wrap(statements.original(site), site.key)
            written.append(site)
    function: Callable[..., Any] = before
    if names:
        function = rebind(before, names=names, transform=statements.transformer(written) if written else None)
    for site in (claim.site for claim in group):
        if site.kind == "module":
            function = recorder.wrap(function, site.key)
    return function


def _attention(recorder: Recorder, key: str, found: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    return recorder.wrap(found, key)
