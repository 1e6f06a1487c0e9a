"""Reads a profiler's trace: the kernels of a window, and who launched each.

A kernel is tied to its launch by correlation id, and the launch to the ranges that stand around it on its thread:
torch's operators and the marks that `kernelgraft.bench.trace` sets. A CUDA graph is one launch of many kernels. What is
missing in a trace leaves a kernel without ranges.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelgraft.errors import UsageError
from kernelgraft.records import Regime

PREFIX = "kernelgraft|"
"""Of the names of our marks: `kernelgraft|kind|text|more|product`."""
OPERATOR = "operator"
"""Kind of a range that is no mark."""
MODULE, SITE, SOLUTION, STEP = "module", "site", "solution", "step"
"""Kinds of marks. `step` is a point: what is launched from there on belongs to a step of that regime."""
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def mark(kind: str, *text: str) -> str:
    """The name of a mark."""
    return PREFIX + "|".join((kind, *text))


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """A stretch of a thread's time, µs: an operator, or a mark."""

    kind: str
    """OPERATOR, or the kind of a mark."""
    text: str
    """Of a module: its path."""
    more: str
    """Of a module: its class."""
    product: bool
    """Whether it is a module that holds a matrix."""
    start: float
    end: float


@dataclass(slots=True)
class Kernel:
    """One kernel, copy or fill on the GPU; times in µs."""

    name: str
    start: float
    end: float
    memory: bool
    correlation: int | None
    operator_id: int | None
    launched: float | None = None
    chain: tuple[Range, ...] = ()
    """The ranges around its launch, outermost first."""


@dataclass
class Events:
    """What a trace holds."""

    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """Thread and time by correlation id."""
    graphs: set[int] = field(default_factory=set)
    """Correlation ids of launches of CUDA graphs."""
    ranges: dict[Any, list[Range]] = field(default_factory=lambda: defaultdict(list))
    """By thread."""
    operators: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """Thread and time of each operator by its id."""
    steps: list[tuple[float, str]] = field(default_factory=list)
    """When a step began, and its regime; in order."""


def read(trace: Mapping[str, Any] | Path) -> Events:
    """The events of a trace in Chrome's format, or of a file of it. Raises UsageError for a file that is not whole."""
    if isinstance(trace, Path):
        content = trace.read_bytes()
        try:
            trace = json.loads(gzip.decompress(content) if trace.suffix == ".gz" else content)
        except (ValueError, EOFError, OSError) as error:
            raise UsageError(f"`{trace}` is no whole trace of torch's profiler ({error}); record it again") from error
    listed = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(listed, list):
        raise UsageError("the trace has no list `traceEvents`; give one that torch's profiler exported")
    events = Events()
    for event in listed:
        if event.get("ph") == "X" and isinstance(event.get("ts"), int | float):
            _add(events, event)
    events.steps.sort()
    return events


def _add(events: Events, event: Mapping[str, Any]) -> None:
    category, name, given = event.get("cat"), str(event.get("name", "")), event.get("args") or {}
    start = float(event["ts"])
    end = start + max(float(event.get("dur") or 0.0), 0.0)
    thread, correlation, operator = event.get("tid"), given.get("correlation"), given.get("External id")
    if category in _GPU:
        events.kernels.append(Kernel(name, start, end, category != "kernel", correlation, operator))
    elif category in _LAUNCHES and correlation is not None:
        # A launch through the runtime can hold one of the driver with the same id: the outer one counts.
        if "GraphLaunch" in name:
            events.graphs.add(correlation)
        known = events.launches.get(correlation)
        if known is None or start < known[1]:
            events.launches[correlation] = thread, start
    elif category in ("cpu_op", "user_annotation"):
        if name.startswith(PREFIX):
            kind, text, more, product = [*name.removeprefix(PREFIX).split("|"), "", "", ""][:4]
            if kind == STEP:
                events.steps.append((start, text))
                return
            events.ranges[thread].append(Range(kind, text, more, bool(product), start, end))
        else:
            events.ranges[thread].append(Range(OPERATOR, name, "", False, start, end))
        if operator is not None:
            events.operators.setdefault(operator, (thread, start))


def attribute(events: Events) -> None:
    """Give every kernel the time of its launch and the ranges around it, as far as the trace says."""
    asked: dict[Any, list[tuple[float, Kernel]]] = defaultdict(list)
    threads = list(events.ranges)
    for kernel in events.kernels:
        launch = None if kernel.correlation is None else events.launches.get(kernel.correlation)
        operator = None if kernel.operator_id is None else events.operators.get(kernel.operator_id)
        if launch is None and operator is None:
            continue
        place = launch
        if launch is None or launch[0] not in events.ranges:
            # The launch is unknown, or was noted under another number than its thread's operators.
            alone = (threads[0], launch[1]) if launch and len(threads) == 1 else None
            place = operator or alone
        kernel.launched = (launch or operator or (None, None))[1]
        if place is not None:
            asked[place[0]].append((place[1], kernel))
    for thread, points in asked.items():
        _stack(events.ranges[thread], points)
    # A kernel without a record of its launch was launched after those that ran before it.
    last = None
    for kernel in sorted(events.kernels, key=lambda k: k.start):
        if kernel.launched is None:
            kernel.launched = kernel.start if last is None else last
        else:
            last = kernel.launched


def _stack(ranges: Sequence[Range], points: list[tuple[float, Kernel]]) -> None:
    """Ranges of one thread nest: walk through them, and note the open ones at each point."""
    ordered = sorted(ranges, key=lambda r: (r.start, -r.end))
    points.sort(key=lambda p: p[0])
    stack: list[Range] = []
    following = 0
    for at, kernel in points:
        while following < len(ordered) and ordered[following].start <= at:
            opened = ordered[following]
            following += 1
            while stack and stack[-1].end <= opened.start:
                stack.pop()
            stack.append(opened)
        while stack and stack[-1].end < at:
            stack.pop()
        kernel.chain = tuple(r for r in stack if r.end >= at)


def union_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def windows(events: Events, regime: Regime) -> list[list[Kernel]]:
    """The kernels of each unbroken run of steps of a regime; all of them in one if the trace has no steps.

    What `generate` launches before its first step, a prefill, is part of that: it is waited for.
    """
    if not events.steps:
        return [events.kernels]
    times = [at for at, _ in events.steps]
    runs: list[list[Kernel]] = []
    number, of_step = -1, []
    for index, (_, found) in enumerate(events.steps):
        if found == regime and (index == 0 or events.steps[index - 1][1] != regime):
            number += 1
            runs.append([])
        of_step.append(number if found == regime else None)
    for kernel in events.kernels:
        assert kernel.launched is not None
        index = bisect.bisect_right(times, kernel.launched) - 1
        if index < 0 and events.steps[0][1] == "prefill":
            index = 0
        run = of_step[index] if index >= 0 else None
        if run is not None:
            runs[run].append(kernel)
    return runs
