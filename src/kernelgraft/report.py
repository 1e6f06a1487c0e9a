"""From records to tables, Markdown and the result object: pure functions, and `write`, which puts them on disk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kernelgraft.bench.result import BenchResult, Comparison, Figure, Side
from kernelgraft.cutile.compiling import Compilation, CompileCheck
from kernelgraft.records import (
    SCHEMA_VERSION,
    Evaluation,
    Graft,
    MachineCard,
    ModelCard,
    Patch,
    Plan,
    Research,
    Seat,
    Site,
    Solution,
    Status,
)
from kernelgraft.store import Inventory, write_atomic
from kernelgraft.suppliers.base import Listing

if TYPE_CHECKING:
    from kernelgraft.cutile.tuner import Run

REGIMES = ("prefill", "decode")
UNKNOWN = "–"


# --- the result object ---


def result(graft: Graft, bench: BenchResult | None, files: Mapping[str, str]) -> dict[str, Any]:
    """The summary for machines (`--json`): only JSON values, unknown is None."""
    model = graft.model
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": model.name,
            "type": model.type,
            "parameters": model.parameters,
            "dtype": model.dtype,
            "transformers": model.transformers,
        },
        "machine": graft.machine.model_dump(mode="json"),
        "patches": [_patch_result(p, graft.solutions) for p in graft.patches],
        "bench": None if bench is None else _bench_result(bench),
        "files": dict(files),
    }


def _patch_result(patch: Patch, solutions: Mapping[str, Solution]) -> dict[str, Any]:
    name = leading_solution(patch)
    return {
        "family": patch.family,
        "sites": [s.key for s in patch.sites],
        "status": patch.status,
        "solution": name,
        "supplier": solutions[name].meta.supplier if name is not None and name in solutions else None,
        "reason": patch.reason,
        "regimes": {
            regime: {"original_us": seat.original_us, "solution_us": seat.solution_us, "seated": seat.seated}
            for regime, seat in leading_seats(patch).items()
        },
    }


def leading_seats(patch: Patch) -> dict[str, Seat]:
    """One seat per regime: a seated one, else the first (a compute with several Definitions has several seats)."""
    chosen: dict[str, Seat] = {}
    for regime in REGIMES:
        own = [s for s in patch.seats if s.regime == regime]
        if own:
            chosen[regime] = next((s for s in own if s.seated), own[0])
    return chosen


def leading_solution(patch: Patch) -> str | None:
    """The first seated Solution, else the best verified one, else None."""
    return next(iter(patch.solutions), None) or next((s.solution for s in patch.seats if s.solution), None)


def _bench_result(bench: BenchResult) -> dict[str, Any]:
    outputs, coverage = bench.outputs, bench.coverage
    return {
        "baseline": _side_result(bench.baseline),
        "grafted": None if bench.grafted is None else _side_result(bench.grafted),
        "tokens_equal": None if outputs is None else outputs.tokens_equal,
        "logits_rel_rmse": None if outputs is None else outputs.logits_rel_rmse,
        "coverage": None
        if coverage is None
        else {"device": coverage.device, "cpu_time_percent": coverage.cpu_time_percent},
    }


def _side_result(side: Side) -> dict[str, Any]:
    return {
        "tokens_per_s": {"mean": side.tokens_per_s.mean, "std": side.tokens_per_s.std},
        "decode_tokens_per_s": None if side.decode_tokens_per_s is None else side.decode_tokens_per_s.mean,
        "ttft_ms": side.ttft_ms.mean,
        "peak_memory_bytes": side.peak_memory_bytes,
    }


def write(inventory: Inventory, graft: Graft, plan: Plan | None, bench: BenchResult | None) -> dict[str, str]:
    """Write `result.json` and `report.md` beside the records; returns every file of the job by name."""
    root = inventory.root
    names = {"research": "research.json", "plan": "plan.json", "graft": "graft.json", "bench": "bench.json"}
    files = {name: str(root / file) for name, file in names.items() if (root / file).is_file()}
    files |= {"result": str(root / "result.json"), "report": str(root / "report.md")}
    body = json.dumps(result(graft, bench, files), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(root / "result.json", body + "\n")
    write_atomic(root / "report.md", markdown(graft, plan, bench))
    return files


# --- tables ---


def doctor_table(card: MachineCard, suppliers: Mapping[str, str | None]) -> RenderableType:
    """What the machine has, and why a supplier cannot be used on it."""
    found = card.model_dump(exclude={"versions"})
    rows = [[name.replace("_", " "), UNKNOWN if value is None else str(value)] for name, value in found.items()]
    rows += [[name, version] for name, version in card.versions.items()]
    rows += [[f"supplier {name}", _usable(reason)] for name, reason in suppliers.items()]
    return _table("This machine", ["what", "found"], rows, folded={1})


def research_table(research: Research) -> RenderableType:
    """The sites that were recognised, and those that look like a family but were not; the rest is counted."""
    rows: list[list[str]] = []
    lines: list[str] = []
    rest: Counter[str] = Counter()
    for row in research.rows:
        if row.family is not None:
            calls = " + ".join(str(row.calls.get(regime, 0)) for regime in REGIMES)
            rows.append([row.site.key, str(len(row.site.instances)), row.family, variant_text(row.semantics), calls])
        elif ":" in (row.reason or ""):
            lines.append(f"not recognised: {row.site.key}: {row.reason}")
        else:
            rest[row.reason or "no family"] += 1
    headings = ["site", "places", "family", "variant", "calls"]
    table = _table(_title(research.model), headings, rows, numbers={1}, folded={0, 3})
    lines += [f"{count} other sites: {reason}" for reason, count in rest.most_common()]
    return Group(table, *map(Text, lines), Text("calls: in prefill + in decode"))


def inventory_table(listings: Sequence[Listing], stored: Sequence[Solution] = ()) -> RenderableType:
    """Every Solution of every supplier, and those stored in a folder."""
    rows = [
        [x.supplier, x.name, x.family, x.language, ", ".join(x.hardware), x.guard, _usable(x.unavailable)]
        for x in listings
    ]
    for solution in stored:
        meta, spec = solution.meta, solution.spec
        hardware, guard = ", ".join(spec.target_hardware), meta.guard.text or UNKNOWN
        rows.append([meta.supplier, solution.name, meta.family, spec.language, hardware, guard, "stored"])
    headings = ["supplier", "name", "family", "language", "hardware", "guard", "here"]
    return _table("Inventory", headings, rows, folded={1, 4, 5, 6})


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
    table = _table(f"Compiled by tileiras {check.compiler}", headings, rows, numbers={2, 3, 4, 5, 6})
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
                _number(first.us, 2),
                _number(None if best is None else best.us, 2),
                ", ".join(f"{k} {v}" for k, v in apart.items()) or ("the default" if best else "nothing right"),
                ", ".join(f"{count} {status}" for status, count in found.counts().items()),
            ]
        )
    headings = ["kernel", "shapes", "default µs", "best µs", "set apart by", "configurations"]
    table = _table(f"Tuned on {run.gpu.name}", headings, rows, numbers={2, 3}, folded={4, 5})
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


def plan_table(plan: Plan) -> RenderableType:
    """The candidates of each compute, best first."""
    rows = []
    for row in plan.rows:
        said = [
            f"{c.supplier}: {c.reason}" if c.solution is None else short_name(c.solution, row.definitions)
            for c in row.candidates
        ]
        rows.append([row.family, "\n".join(row.sites), row.verdict, "\n".join(said) or UNKNOWN])
    table = _table(_title(plan.model), ["family", "sites", "verdict", "candidates"], rows, folded={1, 3})
    return Group(table, Text(f"Already done: {plan.already}")) if plan.already else table


GRAFT_HEADINGS = ["family", "where", "right", "prefill µs", "decode µs", "seated"]


def graft_table(graft: Graft) -> RenderableType:
    """Each compute with its places, candidates and times, and why one was rejected."""
    rows = _graft_rows(graft, site_name)
    table = _table(_title(graft.model), GRAFT_HEADINGS, rows, numbers={2, 3, 4}, folded={1})
    reasons = [Text(f"rejected: {p.family}: {p.reason}") for p in graft.patches if p.status == "rejected"]
    return Group(table, *reasons, Text(graft_line(graft)))


def graft_line(graft: Graft) -> str:
    """How much was accepted, in one line."""
    sites = sum(len(s.instances) for p in graft.accepted for s in p.sites)
    line = f"{len(graft.accepted)} of {len(graft.patches)} computes accepted, {sites} places patched"
    if graft.end_to_end is not None:
        equal = "equal" if graft.end_to_end.tokens_equal else "not equal"
        line += f"; tokens {equal}, logits differ by {graft.end_to_end.logits_rel_rmse:.1e} relative RMSE"
    return line


def _graft_rows(graft: Graft, name: Callable[[Site], str]) -> Iterable[list[str]]:
    for patch in graft.patches:
        own = [e for e in graft.evaluations if e.definition in patch.definitions]
        seats = leading_seats(patch)
        seated = ", ".join(dict.fromkeys(short_name(s, patch.definitions) for s in patch.solutions))
        yield [
            patch.family,
            "\n".join(f"{name(s)} ×{len(s.instances)}" for s in patch.sites),
            f"{_right(own)}/{len(own)}",
            *(_seat_text(seats.get(regime)) for regime in REGIMES),
            seated or "original",
        ]


def site_name(site: Site) -> str:
    """The last part of a site's path, or what is replaced in its method."""
    if site.symbol is not None:
        return site.symbol
    parts = [part for part in site.path.split(".") if part != "*"]
    return parts[-1] if parts else site.class_name.rpartition(".")[2]


def _right(evaluations: Sequence[Evaluation]) -> int:
    return sum(e.status is Status.PASSED for e in evaluations)


def _seat_text(seat: Seat | None) -> str:
    """`12.3 → 8.1` where the Solution is seated, `12.3 (8.1)` where the original stays."""
    if seat is None or seat.original_us is None:
        return UNKNOWN
    if seat.solution_us is None:
        return _time(seat.original_us)
    ours = _time(seat.solution_us)
    return _time(seat.original_us) + (f" → {ours}" if seat.seated else f" ({ours})")


def _time(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


BENCH_HEADINGS = ["", "baseline", "grafted", "grafted is"]


def bench_table(bench: BenchResult) -> RenderableType:
    """Before and after, and what it means in lines."""
    table = _table(_title(bench.model), BENCH_HEADINGS, _bench_rows(bench), numbers={1, 2, 3})
    return Group(table, *(Text(line) for line in bench_lines(bench)))


def _bench_rows(bench: BenchResult) -> Iterable[list[str]]:
    base, ours, comparison = bench.baseline, bench.grafted, bench.comparison

    def row(name: str, cell: Any, change: str = "") -> list[str]:
        return [name, cell(base), UNKNOWN if ours is None else cell(ours), change]

    def times(ratio: float | None, interval: tuple[float, float] | None) -> str:
        if ratio is None:
            return ""
        return f"{ratio:.3f}x" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")

    c: Comparison | None = comparison
    yield row(
        "tokens/s",
        lambda s: figure_text(s.tokens_per_s),
        times(c.tokens_per_s_ratio, c.tokens_per_s_interval) if c else "",
    )
    yield row(
        "decode tokens/s",
        lambda s: figure_text(s.decode_tokens_per_s),
        times(c.decode_ratio, c.decode_interval) if c else "",
    )
    yield row("first token, ms", lambda s: figure_text(s.ttft_ms, 2), times(c.ttft_ratio, c.ttft_interval) if c else "")
    yield row("next token p50, ms", lambda s: _number(s.inter_token_ms_p50, 3))
    yield row("next token p90, ms", lambda s: _number(s.inter_token_ms_p90, 3))
    yield row("peak memory, MB", lambda s: _number(s.peak_memory_bytes / 1e6, 1))
    yield row("load, s", lambda s: _number(s.load_s, 2))
    yield row("first run, s", lambda s: _number(s.warmup_s, 2))


def bench_lines(bench: BenchResult) -> list[str]:
    """The setting, both throughputs, the ratio, the outputs and the coverage, one line each."""
    s = bench.setting
    lines = [
        f"{s.prompt_tokens} + {s.new_tokens} tokens, batch {s.batch}, {s.cache} cache, {s.dtype} on {s.device}, "
        f"{s.threads} thread{'s' if s.threads != 1 else ''}, {s.pairs} interleaved pairs",
        f"baseline: {throughput_line(bench.baseline)}",
    ]
    if bench.grafted is None:
        return [*lines, "no graft: only the baseline ran"]
    lines.append(f"grafted:  {throughput_line(bench.grafted)}")
    lines += _comparison_lines(bench)
    if bench.coverage is not None:
        lines.append(f"{bench.coverage.cpu_time_percent:.1f} % of the baseline's CPU time is in the replaced sites")
    return lines


def _comparison_lines(bench: BenchResult) -> Iterable[str]:
    if bench.comparison is not None and (interval := bench.comparison.tokens_per_s_interval) is not None:
        low, high = interval
        word = "faster" if low > 1 else "slower" if high < 1 else "as fast within the noise"
        yield f"grafted is {word}: {bench.comparison.tokens_per_s_ratio:.3f}x, 95 % interval {low:.3f} to {high:.3f}"
    if bench.outputs is None:
        return
    error = bench.outputs.logits_rel_rmse
    figure = "not comparable (non-finite values)" if error is None else f"{error:.1e} relative RMSE"
    yield f"tokens {'equal' if bench.outputs.tokens_equal else 'not equal'}; logits differ by {figure}"
    if (d := bench.outputs.divergence) is not None:
        margin = (
            "" if d.baseline_margin is None else f"; there the baseline's first choice leads by {d.baseline_margin:.2e}"
        )
        apart = "" if d.grafted_difference is None else f", and the logits differ by up to {d.grafted_difference:.2e}"
        yield f"first difference at new token {d.position} of sequence {d.sequence}{margin}{apart}"


def throughput_line(side: Side) -> str:
    """`Average throughput: X ± Y tokens/sec`."""
    figure = side.tokens_per_s
    spread = "n/a" if figure.std is None else f"{figure.std:.2f}"
    return f"Average throughput: {figure.mean:.2f} ± {spread} tokens/sec"


def figure_text(figure: Figure | None, digits: int = 1) -> str:
    """`12.3 ± 0.4`."""
    if figure is None:
        return UNKNOWN
    return f"{figure.mean:.{digits}f}" + ("" if figure.std is None else f" ± {figure.std:.{digits}f}")


LARGEST_VARIANT = 4
LONGEST_WORD = 14


def variant_text(semantics: Mapping[str, Any]) -> str:
    """`offset=1, cast=before`: the first short values, and a nested family's name; long names of code are left out."""
    said = []
    for key, value in semantics.items():
        if isinstance(value, Mapping) and "family" in value:
            said.append(f"{key}={value['family']}")
        elif isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= LONGEST_WORD):
            said.append(f"{key}={value}")
    return ", ".join(said[:LARGEST_VARIANT]) + (", …" if len(said) > LARGEST_VARIANT else "")


def short_name(solution: str, definitions: Iterable[str]) -> str:
    """The name of a Solution without that of its Definition."""
    for definition in definitions:
        if solution.endswith(f"_{definition}"):
            return solution.removesuffix(f"_{definition}")
    return solution


def _usable(reason: str | None) -> str:
    return "usable" if reason is None else f"not usable: {reason}"


def _table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Container[int] = (),
    folded: Container[int] = (),
) -> Table:
    """Cells are shown as they are: a name can hold what looks like markup. Only the `folded` columns give way."""
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if index in numbers else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=index not in folded)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _title(model: ModelCard) -> str:
    return f"{model.name}: {model.type}, {model.parameters:,} parameters, {model.dtype} on {model.device}"


# --- Markdown ---


def markdown(graft: Graft, plan: Plan | None, bench: BenchResult | None) -> str:
    """The whole job as one Markdown page."""
    machine = graft.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    parts = [
        f"# kernelgraft: {graft.model.name}",
        f"{_title(graft.model)}.",
        f"{machine.cpu}, {machine.cores} cores, {machine.gpu or 'no GPU'}, Python {machine.python}; {versions}.",
        "## Computes",
        f"{graft_line(graft)}. Policy: {graft.policy}. Times are medians of one call.",
        _markdown_table(GRAFT_HEADINGS, _graft_rows(graft, lambda site: site.key)),
        *(f"Rejected: {p.family}: {p.reason}." for p in graft.patches if p.status == "rejected"),
    ]
    if plan is not None and plan.rows:
        rows = (
            [row.family, c.supplier, c.solution or UNKNOWN, c.match or UNKNOWN, c.reason or ""]
            for row in plan.rows
            for c in row.candidates
        )
        parts += ["## Candidates", _markdown_table(["family", "supplier", "solution", "match", "reason"], rows)]
    if graft.evaluations:
        rows = (
            [e.solution, e.status.value, _number(e.error_ratio, 2), str(e.cases), e.reason or ""]
            for e in graft.evaluations
        )
        parts += [
            "## Verdicts",
            "Error ratio: largest error against float64 over the original's own.",
            _markdown_table(["solution", "status", "error ratio", "cases", "reason"], rows),
        ]
    if bench is not None:
        parts += [
            "## Before and after",
            _markdown_table(BENCH_HEADINGS, _bench_rows(bench)),
            "\n".join(f"- {line}" for line in bench_lines(bench)),
        ]
    return "\n\n".join(parts) + "\n"


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", "<br>") for c in cells) + " |"

    return "\n".join([line(headings), line(["---"] * len(headings)), *map(line, rows)])
