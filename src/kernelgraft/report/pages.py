"""A job as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import jinja2

from kernelgraft.bench.names import GRAFTED
from kernelgraft.bench.result import BenchResult, Contender
from kernelgraft.records import Contribution, Graft, Plan
from kernelgraft.report import plots
from kernelgraft.report.benches import BENCH_HEADINGS, bench_lines, bench_rows
from kernelgraft.report.cells import (
    Cells,
    cell_headings,
    cell_lines,
    cell_rows,
    contenders_of,
    environment_text,
    missing_lines,
)
from kernelgraft.report.documents import (
    ABLATED,
    CANDIDATE_HEADINGS,
    CONTRIBUTIONS,
    VERDICT_HEADINGS,
    candidate_rows,
    machine_text,
    verdict_rows,
)
from kernelgraft.report.grafts import (
    CONTRIBUTION_HEADINGS,
    GRAFT_HEADINGS,
    SEAT_HEADINGS,
    contribution_rows,
    graft_line,
    graft_rows,
    mode_text,
    seat_rows,
)
from kernelgraft.report.job import Job
from kernelgraft.report.proofs import CALL_HEADINGS, EVIDENCE_HEADINGS, call_rows, evidence_rows
from kernelgraft.report.traces import (
    GPU_HEADINGS,
    SHARE_HEADINGS,
    gpu_rows,
    languages_text,
    limit_text,
    roofline_of,
    share_rows,
    share_tables,
    trace_lines,
    trace_of,
)
from kernelgraft.report.wording import figures, model_title, one_line


@dataclass(frozen=True)
class Tile:
    """A figure to begin with."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table; `numbers` are the columns that are set flush right."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[int] = ()


@dataclass
class Section:
    """A heading with what stands under it, in this order; `folded` is opened by the reader."""

    title: str
    figures: list[plots.Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    folded: bool = False

    @property
    def anchor(self) -> str:
        """The name that a link goes to."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())


def page(job: Job) -> str:
    """The page; what the job has not has no section. Raises ValueError if it has nothing at all."""
    graft, bench, cells = job.graft, job.bench, job.cells
    record = bench or graft
    if record is None and cells is None:
        raise ValueError("a page needs a graft or a benchmark")
    drawn = _drawn(job)
    sections = [
        *([] if cells is None else _cell_sections(cells, drawn)),
        *([] if bench is None else _bench_sections(bench, drawn)),
        *([] if graft is None else _graft_sections(graft, job.plan, drawn)),
    ]
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            title=f"kernelgraft: {'end to end' if record is None else record.model.name}",
            facts=_facts(record, cells),
            tiles=[] if bench is None else tiles(bench),
            sections=[s for s in sections if s.figures or s.tables or s.lines],
            note=None if plots.can_plot() else plots.NO_PLOTS,
        )
    )


def _facts(record: BenchResult | Graft | None, cells: Cells | None) -> list[str]:
    if record is not None:
        return [model_title(record.model), machine_text(record.machine)]
    return [] if cells is None else [environment_text(cells.environment)]


def environment() -> jinja2.Environment:
    """Everything is escaped, except where the template says `safe`; an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kernelgraft.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


Drawn = dict[str, plots.Drawing]


def _drawn(job: Job) -> Drawn:
    if not plots.can_plot():
        return {}
    return {name: plots.svg(name, text, figure) for name, (text, figure) in plots.figures_of(job).items()}


def _section(title: str, drawn: Drawn, names: Iterable[str] = (), *, folded: bool = False) -> Section:
    return Section(title, [drawn[name] for name in names if name in drawn], folded=folded)


def tiles(bench: BenchResult) -> list[Tile]:
    """The figures that a reader looks for first."""
    chosen = bench.contender(GRAFTED)
    if chosen is None or chosen.side is None:
        chosen = bench.contenders[0]
    side, comparison, outputs = chosen.side, chosen.comparison, chosen.outputs
    assert side is not None
    over = "" if comparison is None else f"{comparison.tokens_per_s_ratio:.3f}x of the original"
    made = [Tile(f"Average throughput, {chosen.name}", f"{figures(side.tokens_per_s.mean)} tokens/s", over)]
    first = "" if comparison is None else f"{comparison.ttft_ratio:.3f}x as fast as the original"
    made.append(Tile("Time to first token", f"{figures(side.ttft_ms.mean)} ms", first))
    if outputs is not None:
        rmse = outputs.logits_rel_rmse
        note = "logits not comparable" if rmse is None else f"logits differ by {rmse:.1e} relative RMSE"
        made.append(Tile("Tokens", "equal" if outputs.tokens_equal else "not equal", note))
    for regime in ("decode", "prefill"):
        if (trace := trace_of(chosen, regime)) is not None and trace.cutile_percent:
            before = trace_of(bench.contenders[0], regime)
            replaced = None if before is None else before.replaced_percent
            note = "" if replaced is None else f"{replaced:.2f} % of the original's GPU time replaced"
            made.append(Tile(f"cuTile Kernel Coverage, {regime}", f"{trace.cutile_percent:.2f} %", note))
        if (roofline := roofline_of(chosen, regime)) is not None:
            made.append(
                Tile(f"Roofline, {regime}", f"{roofline.percent:.1f} %", limit_text(roofline).partition(": ")[2])
            )
    if bench.coverage is not None:
        note = "of the original's CPU time is in the replaced sites"
        made.append(Tile("Coverage", f"{bench.coverage.cpu_time_percent:.1f} %", note))
    return made


def _cell_sections(cells: Cells, drawn: Drawn) -> list[Section]:
    section = _section("Models", drawn, ["speedups"])
    headings = cell_headings(contenders_of(cells.cells))
    caption = "Decode in tokens/s, prefill in ms to the first token"
    section.tables.append(Table(caption, headings, list(cell_rows(cells.cells)), range(2, len(headings) - 1)))
    section.lines = [*cell_lines(cells.cells), *missing_lines(cells)]
    made = [section]
    for model, contenders in cells.contenders.items():
        made += [_gpu_section(contenders, drawn, model), _ran_section(contenders, model)]
    return made


def _bench_sections(bench: BenchResult, drawn: Drawn) -> list[Section]:
    contenders = _section("Contenders", drawn, ["throughput"])
    contenders.tables.append(Table("Contenders", one_line(BENCH_HEADINGS), list(bench_rows(bench)), range(1, 8)))
    contenders.lines = [re.sub(": +", ": ", line, count=1) for line in bench_lines(bench)]  # no columns here
    ablated = _section(ABLATED, drawn, ["bench_contributions"])
    if bench.contributions:
        ablated.tables.append(_contributions(bench.contributions))
    made = [contenders, ablated, _gpu_section(bench.contenders, drawn), _section("Roofline", drawn, ["roofline"])]
    return [*made, _ran_section(bench.contenders)]


def _contributions(found: Sequence[Contribution]) -> Table:
    return Table(CONTRIBUTIONS.rstrip("."), CONTRIBUTION_HEADINGS, list(contribution_rows(found)), range(2, 6))


def _gpu_section(contenders: Sequence[Contender], drawn: Drawn, model: str = "") -> Section:
    title, start = (f"GPU time: {model}", f"{model}_") if model else ("GPU time", "")
    names = [plots.file_name(f"{start}modules_{regime}") for regime in ("decode", "prefill")]
    section = _section(title, drawn, names)
    rows = list(gpu_rows(contenders))
    if rows:
        section.tables.append(Table("GPU time by contender", one_line(GPU_HEADINGS), rows, range(2, 8)))
    made_by = [[c.name, t.regime, languages_text(t)] for c in contenders for t in c.traces]
    if made_by:
        section.tables.append(Table("GPU time by what made the kernel", ["contender", "regime", "shares"], made_by))
    for caption, shares in share_tables(contenders):
        section.tables.append(Table(caption, SHARE_HEADINGS, list(share_rows(shares)), {2, 3, 4}))
    section.lines = trace_lines(contenders)
    return section


def _ran_section(contenders: Sequence[Contender], model: str = "") -> Section:
    section = Section("What ran in each process" + (f": {model}" if model else ""), folded=True)
    rows = list(evidence_rows(contenders))
    if rows:
        section.tables.append(Table("Found patched", EVIDENCE_HEADINGS, rows))
    for contender in contenders:
        if contender.calls:
            rows = list(call_rows(contender))
            section.tables.append(Table(f"Calls through the patches of {contender.name}", CALL_HEADINGS, rows, {3}))
    return section


def _graft_sections(graft: Graft, plan: Plan | None, drawn: Drawn) -> list[Section]:
    computes = _section("Computes", drawn, ["computes"])
    rows = list(graft_rows(graft, lambda site: site.key))
    computes.tables.append(Table("Computes of the model", GRAFT_HEADINGS, rows, {2, 3, 4}))
    computes.lines = [
        f"{graft_line(graft)}. Policy: {graft.policy}. {mode_text(graft)}.",
        *(f"Rejected: {p.family}: {p.reason}" for p in graft.patches if p.status == "rejected"),
    ]
    contributions = _section("Contributions", drawn, ["contributions"])
    if graft.contributions:
        contributions.tables.append(_contributions(graft.contributions))
    times = Section("Times", folded=True)
    if any(patch.seats for patch in graft.patches):
        times.tables.append(Table("Times in the model", SEAT_HEADINGS, list(seat_rows(graft)), {2}))
    made = [computes, contributions, times]
    if plan is not None and plan.rows:
        candidates = Section("Candidates", folded=True)
        candidates.tables.append(Table("Candidates of each compute", CANDIDATE_HEADINGS, list(candidate_rows(plan))))
        made.append(candidates)
    if graft.evaluations:
        verdicts = Section("Verdicts", folded=True)
        caption = "Verdicts; the error ratio is the largest error against float64 over the original's own"
        verdicts.tables.append(Table(caption, VERDICT_HEADINGS, list(verdict_rows(graft)), {2, 3}))
        made.append(verdicts)
    return made
