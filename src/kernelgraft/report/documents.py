"""A job as one Markdown page."""

from __future__ import annotations

from collections.abc import Iterable

from kernelgraft.bench.result import BenchResult
from kernelgraft.records import Contribution, Graft, MachineCard, Plan
from kernelgraft.report.benches import BENCH_HEADINGS, bench_lines, bench_rows
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
from kernelgraft.report.proofs import CALL_HEADINGS, EVIDENCE_HEADINGS, call_rows, evidence_rows
from kernelgraft.report.traces import GPU_HEADINGS, SHARE_HEADINGS, gpu_rows, share_rows, share_tables, trace_lines
from kernelgraft.report.wording import UNKNOWN, markdown_table, model_title, number, one_line

CONTRIBUTIONS = "Each compute switched off with the rest on, in turns; above zero it is a gain."
ABLATED = "What each compute gains in this setting"
CANDIDATE_HEADINGS = ["family", "supplier", "solution", "match", "reason"]
VERDICT_HEADINGS = ["solution", "status", "error ratio", "cases", "reason"]


def markdown(graft: Graft, plan: Plan | None, bench: BenchResult | None) -> str:
    """The whole job as one Markdown page."""
    parts = [
        f"# kernelgraft: {graft.model.name}",
        f"{model_title(graft.model)}.",
        f"{machine_text(graft.machine)}.",
        "## Computes",
        f"{graft_line(graft)}. Policy: {graft.policy}. {mode_text(graft)}.",
        markdown_table(GRAFT_HEADINGS, graft_rows(graft, lambda site: site.key)),
        *(f"Rejected: {p.family}: {p.reason}." for p in graft.patches if p.status == "rejected"),
    ]
    if graft.contributions:
        parts += ["## Contributions", CONTRIBUTIONS, _contributions(graft.contributions)]
    if any(patch.seats for patch in graft.patches):
        parts += ["## Times", markdown_table(SEAT_HEADINGS, seat_rows(graft))]
    if plan is not None and plan.rows:
        parts += ["## Candidates", markdown_table(CANDIDATE_HEADINGS, candidate_rows(plan))]
    if graft.evaluations:
        parts += [
            "## Verdicts",
            "Error ratio: largest error against float64 over the original's own.",
            markdown_table(VERDICT_HEADINGS, verdict_rows(graft)),
        ]
    if bench is not None:
        parts += [
            "## Before and after",
            markdown_table(one_line(BENCH_HEADINGS), bench_rows(bench)),
            "\n".join(f"- {line}" for line in bench_lines(bench)),
        ]
        if bench.contributions:
            parts += [f"## {ABLATED}", CONTRIBUTIONS, _contributions(bench.contributions)]
        parts += [*_gpu_parts(bench), *_ran_parts(bench)]
    return "\n\n".join(parts) + "\n"


def _contributions(contributions: Iterable[Contribution]) -> str:
    return markdown_table(CONTRIBUTION_HEADINGS, contribution_rows(contributions))


def _gpu_parts(bench: BenchResult) -> list[str]:
    rows = list(gpu_rows(bench.contenders))
    if not rows:
        return []
    parts = [
        "## GPU time",
        markdown_table(one_line(GPU_HEADINGS), rows),
        "\n".join(f"- {line}" for line in trace_lines(bench.contenders)),
    ]
    for title, shares in share_tables(bench.contenders):
        parts += [f"### {title}", markdown_table(SHARE_HEADINGS, share_rows(shares))]
    return parts


def _ran_parts(bench: BenchResult) -> list[str]:
    parts = ["## What ran in each process", markdown_table(EVIDENCE_HEADINGS, evidence_rows(bench.contenders))]
    for contender in bench.contenders:
        if contender.calls:
            parts += [
                f"### Calls through the patches of {contender.name}",
                markdown_table(CALL_HEADINGS, call_rows(contender)),
            ]
    return parts


def candidate_rows(plan: Plan) -> Iterable[list[str]]:
    """Cells: every candidate of each compute, or why a supplier has none."""
    for row in plan.rows:
        for c in row.candidates:
            yield [row.family, c.supplier, c.solution or UNKNOWN, c.match or UNKNOWN, c.reason or ""]


def verdict_rows(graft: Graft) -> Iterable[list[str]]:
    """Cells: what the judge said of each Solution."""
    for e in graft.evaluations:
        yield [e.solution, e.status.value, number(e.error_ratio, 2), str(e.cases), e.reason or ""]


def machine_text(machine: MachineCard) -> str:
    """The machine and the versions in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"{machine.cpu}, {machine.cores} cores, {machine.gpu or 'no GPU'}, Python {machine.python}; {versions}"
