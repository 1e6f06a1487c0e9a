"""Where the GPU's time went, contender by contender, and how near each came to what the machine allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kernelgraft.bench.names import GRAFTED
from kernelgraft.bench.result import Contender, Roofline, Share, Trace
from kernelgraft.bench.trace import coverage_line
from kernelgraft.bench.trace_kernels import LIBRARIES
from kernelgraft.report.wording import REGIMES, UNKNOWN, figures, make_table, number

LANGUAGES = {
    "cutile": "cuTile",
    "triton": "Triton",
    "cublas": "cuBLAS",
    "cudnn": "cuDNN",
    "flash": "flash attention",
    "torch": "PyTorch",
    "memory": "copies",
    "other": "other",
}
GPU_HEADINGS = [
    "contender",
    "regime",
    "step\nms",
    "kernels\na token",
    "GPU\nidle %",
    "cuTile\n%",
    "replaced\n%",
    "roofline\n%",
]
SHARE_HEADINGS = ["operator", "module", "%", "calls", "µs a call"]
NO_PATH = "(no module)"


def gpu_tables(contenders: Sequence[Contender]) -> list[RenderableType]:
    """The contenders' GPU time, what it means, and what is not covered yet; empty where nothing was traced."""
    rows = list(gpu_rows(contenders))
    if not rows:
        return []
    made: list[RenderableType] = [make_table("GPU time", GPU_HEADINGS, rows, numbers=range(2, 8))]
    made.append(Group(*map(Text, trace_lines(contenders))))
    for title, shares in share_tables(contenders, libraries=False):
        made.append(make_table(title, SHARE_HEADINGS, share_rows(shares), numbers={2, 3, 4}, folded={0, 1}))
    return made


def gpu_rows(contenders: Sequence[Contender]) -> Iterable[list[str]]:
    """Cells: one row a contender and regime of which a trace or a roofline is known."""
    for contender in contenders:
        for regime in REGIMES:
            trace, roofline = trace_of(contender, regime), roofline_of(contender, regime)
            if trace is None and roofline is None:
                continue
            yield [
                contender.name,
                regime,
                figures(None if trace is None else step_ms(trace, trace.wall_ms)),
                number(None if trace is None else trace.kernels_per_token, 0),
                number(None if trace is None or not trace.wall_ms else trace.host_bound_percent, 1),
                number(None if trace is None else trace.cutile_percent, 1),
                number(None if trace is None else trace.replaced_percent, 1),
                number(None if roofline is None else roofline.percent, 1),
            ]


def trace_of(contender: Contender, regime: str) -> Trace | None:
    """The contender's trace of that regime."""
    return next((trace for trace in contender.traces if trace.regime == regime), None)


def roofline_of(contender: Contender, regime: str) -> Roofline | None:
    """The contender's roofline of that regime."""
    return next((roofline for roofline in contender.rooflines if roofline.regime == regime), None)


def step_ms(trace: Trace, value: float) -> float:
    """A figure of the whole window for one decode step, or for the whole prefill."""
    return value / trace.tokens if trace.regime == "decode" else value


def trace_lines(contenders: Sequence[Contender]) -> list[str]:
    """Coverage in the agreed words, what the graft replaced, what is left to libraries, and the roofline."""
    lines = []
    for contender in contenders:
        for trace in contender.traces:
            lines += [f"{contender.name}, {trace.regime}: {line}" for line in _lines_of(contender, trace)]
    lines += roofline_lines(contenders)
    return lines


def _lines_of(contender: Contender, trace: Trace) -> Iterable[str]:
    if contender.name == GRAFTED or trace.cutile_percent > 0:
        yield coverage_line(trace)
    if trace.replaced_percent is not None:
        yield f"{trace.replaced_percent:.2f} % of the GPU time is in what the graft replaces"
    if contender.name == GRAFTED:
        yield f"left to libraries: {libraries_text(trace)}"


def libraries_text(trace: Trace) -> str:
    """`41.0 % (cuBLAS 39.0, cuDNN 2.0)`: time in libraries' kernels, which were kept because they are faster."""
    parts = {name: trace.languages_percent.get(name, 0.0) for name in LIBRARIES}
    said = ", ".join(f"{LANGUAGES[name]} {percent:.1f}" for name, percent in parts.items() if percent)
    return f"{sum(parts.values()):.1f} %" + (f" ({said})" if said else "")


def languages_text(trace: Trace) -> str:
    """All languages with their shares, largest first."""
    ordered = sorted(trace.languages_percent.items(), key=lambda item: -item[1])
    return ", ".join(f"{LANGUAGES.get(name, name)} {percent:.1f} %" for name, percent in ordered if percent)


def roofline_lines(contenders: Sequence[Contender]) -> Iterable[str]:
    """One line a regime: what limits a step, and how near each contender came."""
    for regime in REGIMES:
        found = [(c.name, r) for c in contenders if (r := roofline_of(c, regime)) is not None]
        if found:
            reached = ", ".join(f"{name} {roofline.percent:.1f} %" for name, roofline in found)
            yield f"{limit_text(found[0][1])}; of it {reached}"


def limit_text(r: Roofline) -> str:
    """The shortest time that the machine allows for a step, and why."""
    if memory_bound(r):
        limit = f"{r.bytes_per_step / 1e9:.2f} GB at {r.bandwidth_gb_s:.0f} GB/s"
    else:
        limit = f"{r.flops_per_step / 1e12:.2f} TFLOP at {r.tflops:.0f} TFLOP/s"
    step = "a decode step" if r.regime == "decode" else "a prefill"
    return f"roofline: {step} takes {figures(r.limit_ms)} ms at least ({limit})"


def memory_bound(r: Roofline) -> bool:
    """True if reading takes longer than computing."""
    return r.bytes_per_step / (r.bandwidth_gb_s * 1e9) >= r.flops_per_step / (r.tflops * 1e12)


def share_tables(contenders: Sequence[Contender], *, libraries: bool = True) -> Iterable[tuple[str, tuple[Share, ...]]]:
    """Title and shares: what no kernel serves yet, and what is left to libraries; of the graft, or of the original."""
    traced = [c for c in contenders if c.traces]
    chosen = [c for c in traced if c.name == GRAFTED] or traced[:1]
    for name, trace in ((c.name, trace) for c in chosen for trace in c.traces):
        if trace.uncovered:
            yield f"Not covered: {name}, {trace.regime}", trace.uncovered
        if libraries and trace.libraries:
            yield f"Left to libraries: {name}, {trace.regime}", trace.libraries


def share_rows(shares: Iterable[Share]) -> Iterable[list[str]]:
    """Cells of parts of the GPU's time."""
    for share in shares:
        each = figures(share.time_us / share.calls) if share.calls else UNKNOWN
        yield [share.name, share.path or NO_PATH, f"{share.percent:.1f}", str(share.calls), each]
