"""Compiled and tuned kernels as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from kernelgraft.cutile.compiling import Compilation, CompileCheck
from kernelgraft.report.wording import UNKNOWN, make_table, number

if TYPE_CHECKING:
    from kernelgraft.cutile.tuner import Run


def compile_table(check: CompileCheck) -> RenderableType:
    """Kernels by architecture: how many signatures compiled, how long one took, what they take; then what failed."""
    groups: dict[tuple[str, str], list[Compilation]] = {}
    for done in check.compilations:
        groups.setdefault((done.kernel, done.architecture), []).append(done)
    rows = []
    for (kernel, architecture), group in groups.items():
        good = [done for done in group if done.status == "compiled"]
        seconds = sorted(done.seconds for done in good if done.seconds is not None)
        rows.append(
            [
                _kernel_name(kernel),
                architecture,
                f"{len(good)} of {len(group)}",
                f"{seconds[-1]:.1f}" if seconds else UNKNOWN,
                _range([done.registers for done in good]),
                _range([done.local_bytes for done in good]),
                _range([None if done.shared_bytes is None else -(-done.shared_bytes // 1024) for done in good]),
            ]
        )
    headings = ["kernel", "for", "compiled", "s", "registers", "local B", "shared KiB"]
    table = make_table(f"Compiled by tileiras {check.compiler}", headings, rows, numbers={2, 3, 4, 5, 6})
    lines = [
        f"{done.status}: {_kernel_name(done.kernel)} for {done.architecture} ({done.calls[0]}): {done.message}"
        for done in check.compilations
        if done.status != "compiled"
    ]
    lines += [f"not compiled: {failed.call}: {failed.message}" for failed in check.failed_calls]
    spilling = sorted((d for d in check.compilations if d.local_bytes), key=lambda d: d.local_bytes or 0)
    most = {done.kernel: done for done in spilling}
    lines += [
        f"local memory: {_kernel_name(kernel)}: up to {done.local_bytes} B for {done.architecture} ({done.calls[0]})"
        for kernel, done in most.items()
    ]
    fine = sum(done.status == "compiled" for done in check.compilations)
    lines.append(f"{fine} of {len(check.compilations)} compiled in {check.seconds:.0f} s, without a cache")
    lines.append("s: the slowest signature; local B: a thread's spilled registers and arrays; ranges: over signatures")
    return Group(table, *map(Text, lines))


def tuning_table(run: Run) -> RenderableType:
    """The default's time, the best one's, what sets it apart; then what was not right and what was not reached."""
    rows = []
    for found in run.results:
        first = found.outcomes[0]
        best = None if found.chosen is None else found.outcomes[found.chosen]
        apart = {} if best is None else {k: v for k, v in best.config.items() if v != first.config[k]}
        rows.append(
            [
                found.kernel,
                found.shape_class,
                number(first.us, 2),
                number(None if best is None else best.us, 2),
                ", ".join(f"{k} {v}" for k, v in apart.items()) or ("the default" if best else "nothing right"),
                ", ".join(f"{count} {status}" for status, count in found.counts().items()),
            ]
        )
    headings = ["kernel", "shapes", "default µs", "best µs", "set apart by", "configurations"]
    table = make_table(f"Tuned on {run.gpu.name}", headings, rows, numbers={2, 3}, folded={4, 5})
    bad = Counter(
        f"{o.status}: {found.kernel}/{found.shape_class}: {o.reason}"
        for found in run.results
        for o in found.outcomes
        if o.status not in ("ok", "untimed")
    )
    lines = [text if count == 1 else f"{text} ({count} times)" for text, count in bad.items()]
    lines += [f"not reached: {name}" for name in run.left]
    lines.append(f"table: {run.table}; {run.seconds:.0f} s")
    return Group(table, *map(Text, lines))


def _kernel_name(kernel: str) -> str:
    """Short enough for a table of 80 columns."""
    name = kernel.rpartition(".")[2].removesuffix("_kernel").strip("_")
    return name if len(name) <= 26 else name[:25] + "…"


def _range(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return UNKNOWN
    return f"{min(known)}" if min(known) == max(known) else f"{min(known)}–{max(known)}"
