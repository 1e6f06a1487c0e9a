"""The plots themselves, as matplotlib figures; each with a text for those who do not see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernelgraft.bench.names import COMPILED, GRAFTED, ORIGINAL
from kernelgraft.bench.result import BenchResult, Contender, Trace
from kernelgraft.records import Contribution, Graft
from kernelgraft.report.cells import Cell, contenders_of, in_order, over, setting_text, settings_of
from kernelgraft.report.grafts import compute_name, contribution_name, leading_seats, point_text
from kernelgraft.report.traces import NO_PATH, roofline_of, step_ms, trace_of
from kernelgraft.report.wording import REGIMES, figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    ORIGINAL: "#868e96",
    COMPILED: "#4c78c8",
    "tilegym": "#d9480f",
    "liger": "#a855c7",
    GRAFTED: "#12876f",
}
OTHER_COLOUR = "#9c7a1c"
LOSS = COLOURS["tilegym"]
BEFORE, AFTER = COLOURS[ORIGINAL], COLOURS[GRAFTED]
INK = "#010203"
"""Stands for the page's own text colour in an SVG; nearly black in a PNG."""
FAINT = "#7b8085"
"""Readable on white and on black."""
WIDTH = 8.0
"""Inches."""
MOST_MODULES = 12
REST = "all others"
LONGEST_LABEL = 46


def throughput(bench: BenchResult) -> tuple[str, Figure]:
    """Bars: tokens per second of each contender, with the standard deviation over rounds."""
    contenders = bench.contenders
    rows = range(len(contenders))
    means = [0.0 if c.side is None else c.side.tokens_per_s.mean for c in contenders]
    spreads = [0.0 if c.side is None else c.side.tokens_per_s.std or 0.0 for c in contenders]
    figure, axes = _sheet(0.5 * len(contenders) + 1.2)
    axes.barh(rows, means, height=0.62, color=[COLOURS.get(c.name, OTHER_COLOUR) for c in contenders])
    axes.errorbar(means, rows, xerr=spreads, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
    for row, contender in enumerate(contenders):
        said = f"failed: {contender.failure or 'unknown'}" if contender.side is None else figures(means[row])
        if contender.side is not None and row:
            said += f"  {means[row] / means[0]:.2f}x"
        place = (means[row] + spreads[row], row)
        axes.annotate(_short(said, 90), place, (6, 0), textcoords="offset points", va="center")
    _rows(axes, [c.name for c in contenders], max(means) * 1.2)
    setting = bench.setting
    axes.set_xlabel(f"tokens/s, batch {setting.batch}, {setting.prompt_tokens} + {setting.new_tokens} tokens")
    axes.set_title(title_of(bench), fontsize=10, loc="left")
    values = (f"{c.name} {figures(mean) if c.side else 'failed'}" for c, mean in zip(contenders, means, strict=True))
    return f"Tokens per second by contender: {', '.join(values)}.", figure


def modules(contenders: Sequence[Contender], regime: str, title: str) -> tuple[str, Figure] | None:
    """Pairs of bars: GPU time of each module for one step, in the original and with the graft; None without traces."""
    traces = {c.name: trace_of(c, regime) for c in contenders}
    before, after = traces.get(ORIGINAL), traces.get(GRAFTED)
    if before is None or after is None or not before.modules:
        return None
    rows = module_times(before, after)
    unit = "a decode step" if regime == "decode" else "the prefill"
    label = f"GPU µs of {unit}, by module"
    figure = _pairs(rows, [_end(row[0]) for row in rows], label)
    figure.axes[0].set_title(title, fontsize=10, loc="left")
    total = [figures(1e-3 * step_ms(trace, trace.kernel_us)) for trace in (before, after)]
    said = ", ".join(f"{name} {figures(old)} to {figures(new)}" for name, old, new in rows)
    return f"{label}, original to graft: in all {total[0]} ms to {total[1]} ms; {said}.", figure


def module_times(before: Trace, after: Trace) -> list[tuple[str, float, float]]:
    """Rows of (module, µs before, µs after) of one step, largest first, the small ones added up."""

    def times(trace: Trace) -> dict[str, float]:
        found: dict[str, float] = {}
        for share in trace.modules:
            name = share.path or NO_PATH
            found[name] = found.get(name, 0.0) + step_ms(trace, share.time_us)
        return found

    old, new = times(before), times(after)
    rows = [(name, old.get(name, 0.0), new.get(name, 0.0)) for name in {**old, **new}]
    rows.sort(key=lambda row: -max(row[1:]))
    kept, small = rows[:MOST_MODULES], rows[MOST_MODULES:]
    rest = [
        step_ms(before, before.kernel_us) - sum(row[1] for row in kept),
        step_ms(after, after.kernel_us) - sum(row[2] for row in kept),
    ]
    # What has no module is in no share, and rounding is no module.
    if small or max(rest) > 0.001 * sum(old.values()):
        kept.append((REST, max(rest[0], 0.0), max(rest[1], 0.0)))
    return kept


def computes(graft: Graft) -> tuple[str, Figure] | None:
    """Pairs of bars: one call of each compute in its site, original and seated; None if nothing was timed."""
    rows = []
    for patch in graft.patches:
        for regime, seat in leading_seats(patch).items():
            if seat.original_us is not None:
                ours = seat.solution_us if seat.seated and seat.solution_us is not None else seat.original_us
                name = compute_name(patch.family, (site.key for site in patch.sites))
                rows.append((f"{_short(name, LONGEST_LABEL)}, {regime}", seat.original_us, ours))
    if not rows:
        return None
    label = "µs of one call in the model, by compute"
    said = ", ".join(f"{name} {figures(old)} to {figures(new)}" for name, old, new in rows)
    figure = _pairs(rows, [row[0] for row in rows], label)
    figure.axes[0].set_title(graft.model.name, fontsize=10, loc="left")
    return f"{label}, original to graft: {said}.", figure


def contributions(model: str, measured: Sequence[Contribution]) -> tuple[str, Figure] | None:
    """Bars: what the whole model gains by each compute, in per cent, with the interval; None if not measured.

    Grey where the interval holds zero; what the graft leaves to the original has no bar.
    """
    found = [c for c in measured if c.seated]
    if not found:
        return None
    figure, axes = _sheet(0.44 * len(found) + 1.2)
    gains = [c.gain_percent for c in found]
    low = [c.gain_percent - 100 * c.interval_ms[0] / c.off_ms for c in found]
    high = [100 * c.interval_ms[1] / c.off_ms - c.gain_percent for c in found]
    errors = [[max(value, 0.0) for value in side] for side in (low, high)]
    rows = range(len(found))
    axes.barh(rows, gains, height=0.66, color=[_verdict_colour(*c.interval_ms) for c in found])
    axes.errorbar(gains, rows, xerr=errors, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
    ends = [gain + error for gain, error in zip(gains, errors[1], strict=True)]
    for row, (gain, end) in enumerate(zip(gains, ends, strict=True)):
        place = (max(end, 0.0), row)
        axes.annotate(f"{gain:+.1f}", place, (6, 0), textcoords="offset points", va="center", fontsize=8)
    names = [
        (_short(contribution_name(c), LONGEST_LABEL), point_text(c.regime, c.batch, c.prompt_tokens)) for c in found
    ]
    _rows(axes, ["\n".join(name) for name in names], 1.0)
    starts = [gain - error for gain, error in zip(gains, errors[0], strict=True)]
    least, most = min(0.0, *starts), max(0.0, *ends)
    axes.set_xlim(least - 0.03 * (most - least), most + 0.12 * (most - least) or 1.0)
    axes.axvline(0.0, color=INK, linewidth=1)
    axes.set_xlabel("% of the time without it; grey: within the noise")
    axes.set_title(model, fontsize=10, loc="left")
    said = ", ".join(f"{', '.join(name)} {gain:+.1f} %" for name, gain in zip(names, gains, strict=True))
    return f"What the whole model gains by each compute: {said}.", figure


def _verdict_colour(low: float, high: float) -> str:
    return AFTER if low > 0 else LOSS if high < 0 else BEFORE


def _pairs(rows: list[tuple[str, float, float]], names: list[str], label: str) -> Figure:
    figure, axes = _sheet(0.46 * len(rows) + 1.2)
    befores, afters = [row[1] for row in rows], [row[2] for row in rows]
    for shift, colour, name, values in ((-0.19, BEFORE, "original", befores), (0.19, AFTER, GRAFTED, afters)):
        places = [row + shift for row in range(len(rows))]
        axes.barh(places, values, height=0.36, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(figures(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    _rows(axes, names, max(*befores, *afters) * 1.12)
    axes.set_xlabel(label)
    axes.legend(loc="lower right")
    return figure


def roofline(bench: BenchResult) -> tuple[str, Figure] | None:
    """The machine's roof over operations per byte, with a point for each contender and regime; None without figures."""
    found = [(c, r) for c in bench.contenders for regime in REGIMES if (r := roofline_of(c, regime)) is not None]
    if not found:
        return None
    import numpy as np

    figure, axes = _sheet(4.6)
    first = found[0][1]
    ridge = first.tflops * 1e3 / first.bandwidth_gb_s
    intensities = [r.flops_per_step / r.bytes_per_step for _, r in found]
    left, right = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4
    over = np.geomspace(left, right, 200)
    axes.plot(
        over,
        np.minimum(over * first.bandwidth_gb_s / 1e3, first.tflops),
        color=FAINT,
        linewidth=2,
        label="measured roof",
    )
    said = []
    for contender, r in found:
        reached = r.flops_per_step / (r.limit_ms / (r.percent / 100)) / 1e9
        axes.plot(
            [r.flops_per_step / r.bytes_per_step],
            [reached],
            linestyle="none",
            marker="o" if r.regime == "decode" else "s",
            markersize=9,
            markerfacecolor="none",  # contenders lie on each other
            markeredgewidth=2,
            color=COLOURS.get(contender.name, OTHER_COLOUR),
            label=f"{contender.name}, {r.regime}: {r.percent:.0f} %",
        )
        said.append(f"{contender.name} {r.regime} {r.percent:.0f} %")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(visible=True)
    axes.set_xlabel("floating-point operations per byte that must be read")
    axes.set_ylabel("TFLOP/s")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    roof = f"measured {first.bandwidth_gb_s:.0f} GB/s and {first.tflops:.0f} TFLOP/s"
    axes.set_title(title_of(bench), fontsize=10, loc="left")
    return f"Roofline ({roof}); share of it that was reached: {', '.join(said)}.", figure


def _sheet(height: float) -> tuple[Figure, Axes]:
    # Not pyplot: that keeps every figure of the process, and chooses a backend for it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _rows(axes: Axes, names: list[str], most: float) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, most)
    axes.grid(visible=True, axis="x")
    axes.set_axisbelow(True)


def title_of(bench: BenchResult) -> str:
    """The model, and what it ran on."""
    where = bench.machine.gpu if bench.setting.device.startswith("cuda") else bench.machine.cpu
    return f"{bench.model.name}, {bench.setting.dtype} on {where or 'an unknown device'}"


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _end(path: str) -> str:
    """The end of a path says more than its beginning."""
    return path if len(path) <= LONGEST_LABEL else "…" + path[1 - LONGEST_LABEL :]


def speedups(cells: Sequence[Cell]) -> tuple[str, Figure] | None:
    """Bars: each contender over the original in every setting; None where nothing can be compared."""
    groups = {
        setting: {
            name: ratio
            for name in contenders_of(cells)
            if name != ORIGINAL and (ratio := over(found, name, [ORIGINAL])) is not None
        }
        for setting, found in settings_of(cells).items()
    }
    groups = {setting: ratios for setting, ratios in groups.items() if ratios}
    if not groups:
        return None
    names = in_order(name for ratios in groups.values() for name in ratios)
    figure, axes = _sheet(0.2 * len(names) * len(groups) + 0.15 * len(groups) + 1.4)
    height = 0.84 / len(names)
    for index, name in enumerate(names):
        rows = [row + (index - (len(names) - 1) / 2) * height for row, g in enumerate(groups.values()) if name in g]
        values = [g[name] for g in groups.values() if name in g]
        axes.barh(rows, values, height=0.9 * height, color=COLOURS.get(name, OTHER_COLOUR), label=name)
        for row, value in zip(rows, values, strict=True):
            axes.annotate(f"{value:.2f}", (value, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1.0, color=INK, linewidth=1)
    labels = [f"{setting[0]}\n{setting_text(setting)}" for setting in groups]
    _rows(axes, labels, max(max(group.values()) for group in groups.values()) * 1.1)
    axes.set_xlabel(f"times as fast as {ORIGINAL}: decode by tokens/s, prefill by the time to the first token")
    figure.legend(loc="outside upper right", ncols=len(names))
    said = "; ".join(
        f"{setting[0]}, {setting_text(setting)}: " + ", ".join(f"{name} {value:.2f}" for name, value in group.items())
        for setting, group in groups.items()
    )
    return f"Times as fast as {ORIGINAL}: {said}.", figure
