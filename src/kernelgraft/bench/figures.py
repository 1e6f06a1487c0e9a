"""From the seconds, tokens and logits that processes answer to the figures of a contender: pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernelgraft.bench import stats
from kernelgraft.bench.result import Comparison, Divergence, Figure, Outputs, Run, Side

Array = np.ndarray[Any, Any]


def run_of(answers: Sequence[dict[str, Any]], batch: int) -> Run:
    """One model's part of a pair, from the seconds at which the tokens of each of its runs came."""
    stamps: list[list[float]] = [a["stamps_s"] for a in answers]
    tokens = batch * sum(map(len, stamps))
    decode_s = sum(s[-1] - s[0] for s in stamps)
    return Run(
        ttft_ms=stats.mean([s[0] for s in stamps]) * 1e3,
        decode_ms=tuple((b - a) * 1e3 for s in stamps for a, b in itertools.pairwise(s)),
        tokens_per_s=tokens / sum(s[-1] for s in stamps),
        decode_tokens_per_s=(tokens - batch * len(stamps)) / decode_s if decode_s > 0 else None,
        peak_memory_bytes=max(a["peak_memory_bytes"] for a in answers),
    )


def side(turns: Sequence[Sequence[dict[str, Any]]], batch: int, load_s: float, warm: Sequence[dict[str, Any]]) -> Side:
    """The figures of one model from its measured turns."""
    runs = tuple(run_of(answers, batch) for answers in turns)
    gaps = [gap for run in runs for gap in run.decode_ms]
    decode = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    return Side(
        runs=runs,
        tokens_per_s=_figure([r.tokens_per_s for r in runs]),
        ttft_ms=_figure([r.ttft_ms for r in runs]),
        decode_tokens_per_s=_figure(decode) if decode else None,
        inter_token_ms_p50=stats.percentile(gaps, 50),
        inter_token_ms_p90=stats.percentile(gaps, 90),
        peak_memory_bytes=max(r.peak_memory_bytes for r in runs),
        load_s=load_s,
        warmup_s=warm[0]["stamps_s"][-1],
    )


def compare(baseline: Side, other: Side, seed: int) -> Comparison:
    """Another contender over the original, pair by pair."""
    base, ours = baseline.runs, other.runs
    decode_a = [r.decode_tokens_per_s for r in base if r.decode_tokens_per_s is not None]
    decode_b = [r.decode_tokens_per_s for r in ours if r.decode_tokens_per_s is not None]
    both = len(decode_a) == len(decode_b) == len(base)
    total_a, total_b = [r.tokens_per_s for r in base], [r.tokens_per_s for r in ours]
    first_a, first_b = [r.ttft_ms for r in base], [r.ttft_ms for r in ours]
    return Comparison(
        tokens_per_s_ratio=stats.mean(total_b) / stats.mean(total_a),
        tokens_per_s_interval=stats.ratio_interval(total_a, total_b, seed=seed),
        decode_ratio=stats.mean(decode_b) / stats.mean(decode_a) if both else None,
        decode_interval=stats.ratio_interval(decode_a, decode_b, seed=seed) if both else None,
        ttft_ratio=stats.mean(first_a) / stats.mean(first_b),
        ttft_interval=stats.ratio_interval(first_b, first_a, seed=seed),
    )


def compare_outputs(
    baseline_tokens: Array,
    other_tokens: Array,
    baseline_logits: Array,
    other_logits: Array,
    rows: Sequence[int] | None = None,
) -> Outputs:
    """Tokens [batch, new tokens] of the free runs and logits [sequences, steps, vocab] of the forced ones.

    `rows`: which sequences of the batch the logits are of; the first ones if it is not given.
    """
    sequences, steps, vocabulary = baseline_logits.shape
    kept = list(range(sequences)) if rows is None else list(rows)
    divergence = None
    if at := stats.first_divergence(baseline_tokens, other_tokens):
        sequence, position = at
        margin = difference = None
        if sequence in kept and position < steps:
            place = kept.index(sequence), position
            margin = stats.margin(baseline_logits[place])
            difference = stats.largest_difference(baseline_logits[place], other_logits[place])
        divergence = Divergence(
            sequence=sequence,
            position=position,
            baseline_token=int(baseline_tokens[at]),
            grafted_token=int(other_tokens[at]),
            baseline_margin=margin,
            grafted_difference=difference,
        )
    return Outputs(
        tokens_equal=divergence is None,
        divergence=divergence,
        logits_rel_rmse=stats.rel_rmse(other_logits, baseline_logits),
        logits_shape=(sequences, steps, vocabulary),
    )


def telling_rows(tokens: dict[str, Array], original: str) -> tuple[list[int], int]:
    """Sequences by what their logits say, and for how many of them a contender first differs from the original there.

    Those come first, then the others in order.
    """
    base = tokens[original]
    found = {at[0] for other in tokens.values() if (at := stats.first_divergence(base, other))}
    return list(dict.fromkeys([*sorted(found), *range(len(base))])), len(found)


def _figure(values: Sequence[float]) -> Figure:
    return Figure(mean=stats.mean(values), std=stats.std(values))
