"""The benchmark: contenders beside each other, and what their figures mean."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from kernelgraft.bench import stats
from kernelgraft.bench.names import COMPILED, GRAFTED
from kernelgraft.bench.result import BenchResult, Contender, Divergence, Outputs, Side
from kernelgraft.report.grafts import contribution_table
from kernelgraft.report.traces import gpu_tables
from kernelgraft.report.wording import UNKNOWN, figures, make_table, model_title, number

BENCH_HEADINGS = [
    "contender",
    "tokens/s",
    "over\neager",
    "decode\ntokens/s",
    "TTFT\nms",
    "p50\nms",
    "p90\nms",
    "peak\nMB",
    "tokens",
]


def bench_table(bench: BenchResult) -> RenderableType:
    """One row a contender, and what it means in lines."""
    table = make_table(model_title(bench.model), BENCH_HEADINGS, bench_rows(bench), numbers=range(1, 8))
    ablated = [contribution_table(bench.contributions)] if bench.contributions else []
    return Group(table, *(Text(line) for line in bench_lines(bench)), *ablated, *gpu_tables(bench.contenders))


def bench_rows(bench: BenchResult) -> Iterable[list[str]]:
    """Cells of the contenders' table; one that failed has dashes, and its reason in the lines."""
    for contender in bench.contenders:
        side = contender.side
        if side is None:
            yield [contender.name, *[UNKNOWN] * (len(BENCH_HEADINGS) - 2), "failed"]
            continue
        comparison = contender.comparison
        decode = side.decode_tokens_per_s
        yield [
            contender.name,
            number(side.tokens_per_s.mean, 1),
            "" if comparison is None else f"{comparison.tokens_per_s_ratio:.3f}x",
            number(None if decode is None else decode.mean, 1),
            figures(side.ttft_ms.mean),
            figures(side.inter_token_ms_p50),
            figures(side.inter_token_ms_p90),
            f"{side.peak_memory_bytes / 1e6:.0f}",
            "" if contender.outputs is None else "equal" if contender.outputs.tokens_equal else "differ",
        ]


def bench_lines(bench: BenchResult) -> list[str]:
    """The setting, every throughput and failure, the ratios, the outputs and the coverage, one line each."""
    s = bench.setting
    lines = [
        f"{s.prompt_tokens} + {s.new_tokens} tokens, batch {s.batch}, {s.cache} cache, {s.dtype} on {s.device}, "
        f"{s.threads} thread{'s' if s.threads != 1 else ''}, {s.pairs} interleaved rounds"
    ]
    width = max(len(contender.name) for contender in bench.contenders) + 1
    for contender in bench.contenders:
        said = f"failed: {contender.failure}" if contender.side is None else throughput_line(contender.side)
        lines.append(f"{contender.name + ':':<{width}} {said}")
    for contender in bench.contenders[1:]:
        lines += _comparison_lines(contender)
    lines += against_others(bench)
    if len(bench.contenders) == 1:
        lines.append("no graft and no peer: only the original ran")
    if bench.coverage is not None:
        lines.append(f"{bench.coverage.cpu_time_percent:.1f} % of the original's CPU time is in the replaced sites")
    return lines


def _comparison_lines(contender: Contender) -> Iterable[str]:
    comparison, outputs, name = contender.comparison, contender.outputs, contender.name
    if comparison is not None and (interval := comparison.tokens_per_s_interval) is not None:
        low, high = interval
        word = "faster than" if low > 1 else "slower than" if high < 1 else "within the noise of"
        ratio = f"{comparison.tokens_per_s_ratio:.3f}x, 95 % interval {low:.3f} to {high:.3f}"
        yield f"{name} is {word} the original: {ratio}"
    if outputs is not None:
        yield f"{name}: {outputs_text(outputs)}"
        if outputs.divergence is not None:
            yield f"{name}: {divergence_text(outputs.divergence)}"
    if contender.float32_rel_rmse is not None:
        yield f"{name}: logits are {contender.float32_rel_rmse:.1e} relative RMSE from those of float32"


def outputs_text(outputs: Outputs) -> str:
    """Whether the tokens are the original's, and how far the logits are from it."""
    error = outputs.logits_rel_rmse
    figure = "not comparable (non-finite values)" if error is None else f"{error:.1e} relative RMSE"
    return f"tokens {'equal' if outputs.tokens_equal else 'not equal'}; logits differ by {figure}"


def divergence_text(d: Divergence) -> str:
    """Where the tokens part, and how near the original's choice was there."""
    margin = (
        "" if d.baseline_margin is None else f"; there the original's first choice leads by {d.baseline_margin:.2e}"
    )
    apart = "" if d.grafted_difference is None else f", and the logits differ by up to {d.grafted_difference:.2e}"
    return f"first difference at new token {d.position} of sequence {d.sequence}{margin}{apart}"


def against_others(bench: BenchResult) -> Iterable[str]:
    """The graft over the fastest peer's patch and over transformers' own compiled path, one line each."""
    graft = bench.grafted
    others = {c.name: c.side for c in bench.contenders[1:] if c.side is not None and c.name != GRAFTED}
    if graft is None:
        return
    peers = [name for name in others if name != COMPILED]
    if peers:
        best = max(peers, key=lambda name: others[name].tokens_per_s.mean)
        yield f"{GRAFTED} over the fastest peer, {best}: {_ratio_text(others[best], graft, bench.setting.seed)}"
    if COMPILED in others:
        yield f"{GRAFTED} over {COMPILED}: {_ratio_text(others[COMPILED], graft, bench.setting.seed)}"


def _ratio_text(other: Side, graft: Side, seed: int) -> str:
    ratio = f"{graft.tokens_per_s.mean / other.tokens_per_s.mean:.3f}x"
    runs = [[run.tokens_per_s for run in side.runs] for side in (other, graft)]
    interval = stats.ratio_interval(*runs, seed=seed) if len(runs[0]) == len(runs[1]) else None
    return ratio + ("" if interval is None else f", 95 % interval {interval[0]:.3f} to {interval[1]:.3f}")


def throughput_line(side: Side) -> str:
    """`Average throughput: X ± Y tokens/sec`."""
    figure = side.tokens_per_s
    spread = "n/a" if figure.std is None else f"{figure.std:.2f}"
    return f"Average throughput: {figure.mean:.2f} ± {spread} tokens/sec"
