"""Where the GPU's time went, from a profiler's trace. Pure: a trace in, a record out.

Every kernel counts once in each division of the time, also one whose launch the trace has lost, so that all add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelgraft.bench.result import Share, Trace
from kernelgraft.bench.trace_events import (
    MODULE,
    OPERATOR,
    SITE,
    SOLUTION,
    Kernel,
    Range,
    attribute,
    read,
    union_us,
    windows,
)
from kernelgraft.bench.trace_kernels import LANGUAGES, LIBRARIES, label, language
from kernelgraft.errors import UsageError
from kernelgraft.records import Regime

LARGEST_LIST = 10
OUTSIDE = "outside every module"
"""Name of the share of what no module launched, as far as the trace says."""


def _innermost(chain: Sequence[Range], kind: str) -> int:
    """Index of the innermost range of a kind, or -1."""
    return next((i for i in range(len(chain) - 1, -1, -1) if chain[i].kind == kind), -1)


def _in_site(chain: Sequence[Range]) -> bool:
    """Whether a site's own work launched it: the modules with matrices that a site calls are the model's still."""
    inside = chain[_innermost(chain, SITE) + 1 :]
    return len(inside) < len(chain) and not any(r.product for r in inside)


def _operator(chain: Sequence[Range]) -> Range | None:
    """The outermost operator inside the innermost module."""
    inside = chain[_innermost(chain, MODULE) + 1 :]
    return next((r for r in inside if r.kind == OPERATOR and _is_operator(r.text)), None)


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
    whether the trace has marks of replaced sites. Raises UsageError if no kernel was recorded in the window, or none of
    any CUDA graph that was launched.
    """
    events = read(trace)
    if events.graphs and not any(kernel.correlation in events.graphs for kernel in events.kernels):
        raise UsageError(
            "the trace has launches of CUDA graphs without their kernels; start the profiler before capture"
        )
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
        operators = [r.text for r in chain if r.kind == OPERATOR]
        made = "memory" if kernel.memory else language(kernel.name, triton, operators)
        spent[made] += time
        inside = _innermost(chain, MODULE)
        module = chain[inside] if inside >= 0 else None
        path, owner = (module.text, module.more) if module else ("", OUTSIDE)
        modules.add(owner, path, kernel, module)
        served = any(r.kind == SOLUTION for r in chain)
        in_site = _in_site(chain)
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


def _length_us(run: Sequence[Kernel]) -> float:
    """From the first launch to the end of the last kernel."""
    first = min(min(k.start if k.launched is None else k.launched, k.start) for k in run)
    return max(k.end for k in run) - first


def coverage_line(trace: Trace) -> str:
    """The share of the GPU's time that is in cuTile kernels."""
    return f">>> cuTile Kernel Coverage (GPU Time): {trace.cutile_percent:8.2f}% <<<"
