"""Reads a profiler's trace: who launched each kernel, and where the GPU's time went. Pure: a trace in, a record out.

A kernel is tied to its launch by correlation id, and the launch to the ranges that stand around it on its thread:
torch's operators and the marks that `kernelgraft.bench.trace` sets. What is missing in a trace leaves a kernel without
operator or module; its time counts nevertheless, so that all parts add up.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kernelgraft.bench.result import Share, Trace
from kernelgraft.bench.trace_kernels import LANGUAGES, LIBRARIES, label, language
from kernelgraft.errors import UsageError

Regime = Literal["prefill", "decode"]

PREFIX = "kernelgraft|"
"""Of the names of our marks: `kernelgraft|kind|text|more`."""
MODULE, SITE, SOLUTION, STEP = "module", "site", "solution", "step"
"""Kinds of marks. `step` is a point: what is launched from there on belongs to a step of that regime."""
LARGEST_LIST = 10
OUTSIDE = "outside every module"
"""Name of the share of what no module launched, as far as the trace says."""
_GPU = {"kernel": None, "gpu_memcpy": "memory", "gpu_memset": "memory"}
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def mark(kind: str, *text: str) -> str:
    """The name of a mark."""
    return PREFIX + "|".join((kind, *text))


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """A stretch of a thread's time, µs: an operator, or a mark."""

    kind: str
    """`operator`, or the kind of a mark."""
    text: str
    more: str
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
        known = events.launches.get(correlation)
        if known is None or start < known[1]:
            events.launches[correlation] = thread, start
    elif category in ("cpu_op", "user_annotation"):
        if name.startswith(PREFIX):
            kind, text, more = [*name.removeprefix(PREFIX).split("|"), "", ""][:3]
            if kind == STEP:
                events.steps.append((start, text))
                return
            events.ranges[thread].append(Range(kind, text, more, start, end))
        else:
            events.ranges[thread].append(Range("operator", name, "", start, end))
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
    """The kernels of each unbroken run of steps of a regime; all of them in one if the trace has no steps."""
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
        run = of_step[index] if index >= 0 else None
        if run is not None:
            runs[run].append(kernel)
    return runs


def _innermost(chain: Sequence[Range], kind: str) -> int:
    """Index of the innermost range of a kind, or -1."""
    return next((i for i in range(len(chain) - 1, -1, -1) if chain[i].kind == kind), -1)


def _operator(chain: Sequence[Range]) -> Range | None:
    """The outermost operator inside the innermost module."""
    inside = chain[_innermost(chain, MODULE) + 1 :]
    return next((r for r in inside if r.kind == "operator" and _is_operator(r.text)), None)


def _is_operator(name: str) -> bool:
    """`namespace::name`, without the notes that torch's compiler sets around them."""
    head, colons, tail = name.partition("::")
    return bool(colons) and bool(tail) and " " not in name and head.isidentifier()


class _Shares:
    """Adds up time by name and path."""

    def __init__(self) -> None:
        self.time: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], set[object]] = defaultdict(set)

    def add(self, name: str, path: str, kernel: Kernel, call: Range | None) -> None:
        """A kernel; `call` is what it is a part of, itself if None."""
        self.time[name, path] += kernel.end - kernel.start
        self.calls[name, path].add(id(kernel if call is None else call))

    def largest(self, total: float, most: int | None = None) -> tuple[Share, ...]:
        """The shares, the largest first."""
        ordered = sorted(self.time.items(), key=lambda item: (-item[1], item[0]))[:most]
        return tuple(
            Share(
                name=name,
                path=path,
                time_us=time,
                percent=100 * time / total if total else 0.0,
                calls=len(self.calls[name, path]),
            )
            for (name, path), time in ordered
        )


def parse(
    trace: Mapping[str, Any] | Path,
    *,
    regime: Regime,
    tokens: int,
    triton: Collection[str] = (),
    wall_ms: float | None = None,
    sites: bool = False,
) -> Trace:
    """Where the GPU's time went in a trace of torch's profiler (its Chrome format, or a file of it, .json or .json.gz).

    If the trace has marks of steps, only what the steps of `regime` launched counts, and for decode their number is
    used in place of `tokens`. `triton`: names of the Triton kernels of the process. `wall_ms`: length of the window
    where it was measured without the profiler, which slows the host down; else it is taken from the trace. `sites`:
    whether the trace has marks of replaced sites. Raises UsageError if no kernel was recorded in the window.
    """
    events = read(trace)
    attribute(events)
    runs = [run for run in windows(events, regime) if run]
    kernels = [kernel for run in runs for kernel in run]
    total = sum(k.end - k.start for k in kernels)
    if not total:
        raise UsageError(
            f"the trace has no kernel of the {regime} window; profile with CUDA activity, on a machine that allows it"
        )
    if events.steps and regime == "decode":
        tokens = sum(found == "decode" for _, found in events.steps)
    busy_ms = sum(union_us((k.start, k.end) for k in run) for run in runs) / 1e3
    if wall_ms is None:
        wall_ms = sum(_length_us(run) for run in runs) / 1e3
    spent = dict.fromkeys(LANGUAGES, 0.0)
    modules, uncovered, libraries = _Shares(), _Shares(), _Shares()
    replaced = 0.0
    for kernel in kernels:
        time, chain = kernel.end - kernel.start, kernel.chain
        made = "memory" if kernel.memory else language(kernel.name, triton, tuple(_operators(chain)))
        spent[made] += time
        inside = _innermost(chain, MODULE)
        module = chain[inside] if inside >= 0 else None
        path, owner = (module.text, module.more) if module else ("", OUTSIDE)
        modules.add(owner, path, kernel, module)
        served = any(r.kind == SOLUTION for r in chain)
        in_site = any(r.kind == SITE for r in chain)
        replaced += time if in_site else 0.0
        operator = _operator(chain)
        name = label(kernel.name) if operator is None else operator.text
        if not (served or in_site or made in ("cutile", "triton")):
            uncovered.add(name, path, kernel, operator)
        if made in LIBRARIES:
            libraries.add(name, path, kernel, operator)
    return Trace(
        regime=regime,
        tokens=tokens,
        wall_ms=max(wall_ms, busy_ms),
        busy_ms=busy_ms,
        kernels=sum(not k.memory for k in kernels),
        kernel_us=total,
        languages_percent={k: 100 * v / total for k, v in sorted(spent.items(), key=lambda i: -i[1]) if v},
        replaced_percent=100 * replaced / total if sites else None,
        modules=modules.largest(total),
        uncovered=uncovered.largest(total, LARGEST_LIST),
        libraries=libraries.largest(total, LARGEST_LIST),
    )


def _operators(chain: Sequence[Range]) -> Iterator[str]:
    return (r.text for r in chain if r.kind == "operator")


def _length_us(run: Sequence[Kernel]) -> float:
    """From the first launch to the end of the last kernel."""
    first = min(min(k.start if k.launched is None else k.launched, k.start) for k in run)
    return max(k.end for k in run) - first


def coverage_line(trace: Trace) -> str:
    """The share of the GPU's time that is in cuTile kernels."""
    return f">>> cuTile Kernel Coverage (GPU Time): {trace.cutile_percent:8.2f}% <<<"
