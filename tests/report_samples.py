"""Records of a small job, made by hand, for the tests of reports."""

from __future__ import annotations

from typing import Any

from kernelgraft.bench.result import (
    BenchResult,
    Comparison,
    Contender,
    Coverage,
    Figure,
    Outputs,
    PatchCalls,
    Proof,
    Roofline,
    Run,
    Setting,
    Share,
    Side,
    Trace,
)
from kernelgraft.records import (
    BuildSpec,
    CandidateRow,
    Contribution,
    EndToEnd,
    Evaluation,
    Graft,
    MachineCard,
    ModelCard,
    Patch,
    Plan,
    PlanRow,
    Seat,
    Site,
    Solution,
    SolutionMeta,
    SourceFile,
    SourceRef,
    Status,
)

MODEL = ModelCard(
    name="tiny",
    class_name="a.B",
    type="b",
    parameters=1234567,
    dtype="float32",
    device="cpu",
    transformers="5.24.0",
    config_sha256="0" * 64,
)
MACHINE = MachineCard(platform="Linux", cpu="A CPU", cores=2, python="3.11.7", versions={"torch": "2.13.0"})
SOURCE = SourceRef(file="a/b.py", first_line=1, last_line=2, sha256="0" * 64)


def site(path: str, count: int = 3) -> Site:
    instances = tuple(path.replace("*", str(i)) for i in range(count))
    return Site(kind="module", path=path, instances=instances, class_name="a.Norm", source=SOURCE)


def solution(name: str, definition: str = "norm_h8") -> Solution:
    return Solution(
        name=name,
        definition=definition,
        author="acme",
        spec=BuildSpec(language="python", target_hardware=("cpu",), entry_point="main.py::run"),
        sources=(SourceFile(path="main.py", content="def run(x): return x\n"),),
        meta=SolutionMeta(supplier="acme", family="rms_norm", fingerprint="f"),
    )


def seat(regime: Any, original: float, ours: float, seated: bool, definition: str = "norm_h8") -> Seat:
    return Seat(
        definition=definition,
        regime=regime,
        work=4,
        original_us=original,
        solution_us=ours,
        spread_us=0.1,
        candidates_us={"acme_norm": ours},
        solution="acme_norm",
        seated=seated,
    )


ACCEPTED = Patch(
    family="rms_norm",
    sites=(site("model.layers.*.norm"), site("model.norm", 1)),
    definitions=("norm_h8",),
    status="accepted",
    seats=(seat("prefill", 20.0, 12.0, True), seat("decode", 10.0, 11.0, False)),
)
REJECTED = Patch(
    family="rope",
    sites=(site("model.layers.*.rope"),),
    definitions=("rope_h8",),
    status="rejected",
    reason="unsuitable: no supplier has a candidate",
)
GRAFT = Graft(
    model=MODEL,
    machine=MACHINE,
    policy="fastest",
    patches=(ACCEPTED, REJECTED),
    definitions={},
    solutions={"acme_norm": solution("acme_norm")},
    evaluations=(
        Evaluation(solution="acme_norm", definition="norm_h8", status=Status.PASSED, cases=40, error_ratio=1.01),
        Evaluation(
            solution="acme_liar",
            definition="norm_h8",
            status=Status.INCORRECT_NUMERICAL,
            check="C8",
            reason="off | by 3",
        ),
    ),
    end_to_end=EndToEnd(tokens_equal=True, logits_rel_rmse=1e-7),
)


def side(tokens_per_s: float, std: float | None = 2.0) -> Side:
    run = Run(
        ttft_ms=5.0, decode_ms=(1.0,), tokens_per_s=tokens_per_s, decode_tokens_per_s=900.0, peak_memory_bytes=10**8
    )
    return Side(
        runs=(run,),
        tokens_per_s=Figure(mean=tokens_per_s, std=std),
        ttft_ms=Figure(mean=5.0, std=0.1),
        decode_tokens_per_s=Figure(mean=900.0, std=3.0),
        inter_token_ms_p50=1.0,
        inter_token_ms_p90=1.5,
        peak_memory_bytes=10**8,
        load_s=0.3,
        warmup_s=1.0,
    )


ORIGINAL = Contender(name="eager", side=side(800.0), proof=Proof(patch_imported=False))
GRAFTED = Contender(
    name="kernelgraft",
    side=side(1000.0),
    comparison=Comparison(tokens_per_s_ratio=1.25, tokens_per_s_interval=(1.2, 1.3), ttft_ratio=1.0),
    outputs=Outputs(tokens_equal=True, logits_rel_rmse=2e-7, logits_shape=(1, 64, 100)),
)
BENCH = BenchResult(
    model=MODEL,
    machine=MACHINE,
    setting=Setting(
        prompt="p",
        prompt_tokens=6,
        new_tokens=64,
        batch=1,
        cache="dynamic",
        device="cpu",
        dtype="float32",
        threads=2,
        pairs=5,
        repeats=4,
        warmup_runs=2,
        seed=0,
    ),
    contenders=(ORIGINAL, GRAFTED),
    coverage=Coverage(device="cpu", cpu_time_percent=42.0, sites_percent={"model.norm": 42.0}, new_tokens=16),
)
ALONE = BENCH.model_copy(update={"contenders": (ORIGINAL,), "coverage": None})


def grafted(**changes: Any) -> BenchResult:
    """The benchmark with another outcome of the graft."""
    return BENCH.model_copy(update={"contenders": (ORIGINAL, GRAFTED.model_copy(update=changes))})


PLAN = Plan(
    model=MODEL,
    rows=(
        PlanRow(
            family="rms_norm",
            definitions=("norm_h8",),
            sites=("model.norm",),
            candidates=(
                CandidateRow(supplier="acme", solution="acme_norm", match="exact"),
                CandidateRow(supplier="other", reason="not installed"),
            ),
            verdict="exact",
        ),
    ),
)


def five() -> BenchResult:
    """All contenders, one of which could not run."""
    peers = (
        Contender(
            name="static-compile", side=side(4000.0), comparison=Comparison(tokens_per_s_ratio=5.0, ttft_ratio=1)
        ),
        Contender(name="tilegym", failure="tilegym has no patch for `b`"),
        Contender(name="liger", side=side(12345.6, 78.9)),
    )
    return BENCH.model_copy(update={"contenders": (ORIGINAL, *peers, GRAFTED)})


def trace(regime: Any, *, cutile: float = 0.0, replaced: float | None = None, scale: float = 1.0) -> Trace:
    """A window of four decode steps, or a prefill, of a small model on a GPU; `scale` shortens the MLP and the norm."""
    parts = [
        ("model.layers.*.mlp.gate_proj", "aten::mm", 2400.0, 24),
        ("model.layers.*.mlp", "kernelgraft::act_and_mul", 800.0 * scale, 12),
        ("model.layers.*.input_layernorm", "kernelgraft::rms_norm", 600.0 * scale, 12),
        ("model.layers.*.self_attn", "aten::scaled_dot_product_attention", 1000.0, 12),
        ("lm_head", "aten::mm", 1200.0, 4),
        ("", "aten::argmax", 100.0, 4),
    ]
    total = sum(time for _, _, time, _ in parts)

    def share(path: str, name: str, time: float, calls: int) -> Share:
        return Share(name=name, path=path, time_us=time, percent=100 * time / total, calls=calls)

    shares = [share(*part) for part in parts]
    rest = 100.0 - cutile
    return Trace(
        regime=regime,
        tokens=4 if regime == "decode" else 512,
        wall_ms=20.0,
        busy_ms=total / 1e3,
        kernels=400,
        kernel_us=total,
        languages_percent={"cutile": cutile, "cublas": rest * 0.7, "flash": rest * 0.2, "torch": rest * 0.1},
        replaced_percent=replaced,
        modules=tuple(sorted((s for s in shares if s.path), key=lambda s: -s.time_us)),
        uncovered=tuple(s for s in shares if s.name.startswith("aten::")),
        libraries=tuple(s for s in shares if s.name == "aten::mm"),
    )


def roofline(regime: Any, percent: float) -> Roofline:
    """2.5 GB a step at 4.3 TB/s, or 10 TFLOP a prefill at 800 TFLOP/s."""
    decode = regime == "decode"
    return Roofline(
        regime=regime,
        bytes_per_step=2.5e9,
        flops_per_step=2.5e9 if decode else 1e13,
        bandwidth_gb_s=4300.0,
        tflops=800.0,
        limit_ms=0.581 if decode else 12.5,
        limit_tokens_per_s=1720.0 if decode else 327680.0,
        percent=percent,
    )


def on_a_gpu() -> BenchResult:
    """All contenders with traces and rooflines, as on a GPU."""

    def traced(contender: Contender, **how: Any) -> Contender:
        if contender.side is None:
            return contender
        share = {"eager": 8.0, "static-compile": 58.0, "liger": 7.0}.get(contender.name, 61.0)
        return contender.model_copy(
            update={
                "traces": (trace("prefill", **how), trace("decode", **how)),
                "rooflines": (roofline("prefill", share + 20), roofline("decode", share)),
            }
        )

    eager, compiled, tilegym, liger, ours = five().contenders
    liger = liger.model_copy(update={"side": side(780.0), "evidence": ("model.norm: liger_rms_norm",)})
    contenders = (
        traced(eager, replaced=22.95),
        traced(compiled),
        tilegym,
        traced(liger),
        traced(ours, cutile=49.21, scale=0.5),
    )
    return BENCH.model_copy(
        update={
            "contenders": contenders,
            "coverage": None,
            "setting": BENCH.setting.model_copy(update={"device": "cuda", "dtype": "bfloat16"}),
            "machine": MACHINE.model_copy(update={"gpu": "A GPU", "compute_capability": "sm_90"}),
        }
    )


def cells() -> dict[str, Any]:
    """Two models, three settings each, as benchmarks/end_to_end.py writes them."""
    found = []
    for model, speed in (("small", 80.0), ("large", 40.0)):
        for regime, batch, prompt in (("decode", 1, 32), ("decode", 32, 128), ("prefill", 1, 4096)):
            for contender, factor in (
                ("eager", 1.0),
                ("static-compile", 5.0),
                ("tilegym", None if model == "small" else 0.9),
                ("liger", 0.7),
                ("kernelgraft", 0.8 if (model, batch) == ("large", 32) else 1.5),
            ):
                decode = regime == "decode"
                rate = speed * batch * (1 if decode else 500)
                found.append(
                    {
                        "model": model,
                        "regime": regime,
                        "batch": batch,
                        "prompt_tokens": prompt,
                        "new_tokens": 64 if decode else 1,
                        "contender": contender,
                        "tokens_per_s": None if factor is None else rate * factor,
                        "ttft_ms": None if factor is None else 1e3 * batch * prompt / (rate * factor),
                        "roofline_percent": None if factor is None else 8.0 * factor,
                        "tokens_equal": None if factor is None or contender == "eager" else True,
                        "something_else": [1, 2],
                    }
                )
    for cell in found:
        if cell["tokens_per_s"] is None:
            cell["failure"] = "tilegym has no patch for `small`"
    machine = MACHINE.model_copy(update={"gpu": "A GPU"}).model_dump(mode="json")
    traces = (
        ("kernelgraft", trace("decode", cutile=49.21, scale=0.5)),
        ("eager", trace("decode", replaced=22.95)),
        ("eager", trace("prefill", replaced=22.95)),
    )
    large = {
        "traces": [
            {"contender": name, "batch": 1, "coverage": "words", **made.model_dump(mode="json")}
            for name, made in traces
        ],
        "evidence": {"eager": [], "liger": ["model.norm: liger_rms_norm"]},
        "proof": {"eager": Proof(patch_imported=False).model_dump(mode="json")},
        "calls": [
            PatchCalls(
                family="rms_norm",
                sites=("model.norm",),
                calls={"acme_norm": 7},
                original_by_choice=0,
                fallbacks={},
                contained=0,
            ).model_dump(mode="json")
        ],
        "started": {},
    }
    return {
        "environment": {"machine": machine, "seed": 0},
        "cells": found,
        "models": {"small": {}, "large": large},
        "missing": ["small: trace of eager, decode"],
    }


def ablated() -> Graft:
    """The graft with what each compute gains: the whole a lot, one nothing, one a loss."""

    def gain(family: str, sites: tuple[str, ...], regime: Any, off: float, low: float, high: float) -> Contribution:
        return Contribution(
            family=family,
            sites=sites,
            regime=regime,
            batch=1,
            prompt_tokens=512 if regime == "prefill" else None,
            on_ms=10.0,
            off_ms=off,
            interval_ms=(low, high),
        )

    return GRAFT.model_copy(
        update={
            "contributions": (
                gain("all", (), "decode", 12.5, 2.25, 2.75),
                gain("rms_norm", ("model.layers.*.norm", "model.norm"), "decode", 12.0, 1.8, 2.2),
                gain("gated_mlp", ("model.layers.*.mlp",), "prefill", 9.5, -0.6, -0.4),
            )
        }
    )
