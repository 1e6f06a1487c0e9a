"""The summary of a job for machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelgraft.bench.result import BenchResult, Contender, Roofline, Side, Trace
from kernelgraft.records import SCHEMA_VERSION, Contribution, Graft, Patch, Solution
from kernelgraft.report.grafts import leading_seats, leading_solution


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
        "contributions": [_contribution_result(c) for c in graft.contributions],
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


def _contribution_result(c: Contribution) -> dict[str, Any]:
    return {
        "family": c.family,
        "sites": list(c.sites),
        "regime": c.regime,
        "batch": c.batch,
        "prompt_tokens": c.prompt_tokens,
        "on_ms": c.on_ms,
        "off_ms": c.off_ms,
        "interval_ms": list(c.interval_ms),
        "seated": c.seated,
    }


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
        "contributions": [_contribution_result(c) for c in bench.contributions],
        "contenders": [_contender_result(contender) for contender in bench.contenders],
    }


def _side_result(side: Side) -> dict[str, Any]:
    return {
        "tokens_per_s": {"mean": side.tokens_per_s.mean, "std": side.tokens_per_s.std},
        "decode_tokens_per_s": None if side.decode_tokens_per_s is None else side.decode_tokens_per_s.mean,
        "ttft_ms": side.ttft_ms.mean,
        "peak_memory_bytes": side.peak_memory_bytes,
    }


def _contender_result(contender: Contender) -> dict[str, Any]:
    comparison, outputs = contender.comparison, contender.outputs
    return {
        "name": contender.name,
        "failure": contender.failure,
        "figures": None if contender.side is None else _side_result(contender.side),
        "tokens_per_s_ratio": None if comparison is None else comparison.tokens_per_s_ratio,
        "tokens_equal": None if outputs is None else outputs.tokens_equal,
        "logits_rel_rmse": None if outputs is None else outputs.logits_rel_rmse,
        "float32_rel_rmse": contender.float32_rel_rmse,
        "gpu_time": {trace.regime: _trace_result(trace) for trace in contender.traces},
        "roofline": {roofline.regime: _roofline_result(roofline) for roofline in contender.rooflines},
    }


def _trace_result(trace: Trace) -> dict[str, Any]:
    return {
        "kernel_us": trace.kernel_us,
        "kernels_per_token": trace.kernels_per_token,
        "host_bound_percent": trace.host_bound_percent,
        "cutile_percent": trace.cutile_percent,
        "replaced_percent": trace.replaced_percent,
        "languages_percent": dict(trace.languages_percent),
    }


def _roofline_result(roofline: Roofline) -> dict[str, Any]:
    return {
        "percent": roofline.percent,
        "limit_ms": roofline.limit_ms,
        "limit_tokens_per_s": roofline.limit_tokens_per_s,
    }
