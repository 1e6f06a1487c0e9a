"""Tables, Markdown and the result object, from records made by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_samples import (
    ACCEPTED,
    ALONE,
    BENCH,
    GRAFT,
    GRAFTED,
    MACHINE,
    MODEL,
    ORIGINAL,
    PLAN,
    ablated,
    five,
    grafted,
    on_a_gpu,
    seat,
    side,
    site,
    solution,
    trace,
)
from rich.console import Console

from kernelgraft import report
from kernelgraft.bench.result import Comparison, Contender, Divergence, Outputs, PatchCalls
from kernelgraft.records import Plan, Research, ResearchRow
from kernelgraft.store import Inventory
from kernelgraft.suppliers.base import Listing


def shown(renderable: Any, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    console.file.close()
    return console.export_text()


def keys(value: Any) -> Any:
    """The shape of a result: names, with one element of each list."""
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [keys(v) for v in value[:1]]
    return type(value).__name__


def test_the_names_of_the_result_are_frozen() -> None:
    result = report.result(GRAFT, BENCH, {"graft": "g.json"})
    one_side = {
        "tokens_per_s": {"mean": "float", "std": "float"},
        "decode_tokens_per_s": "float",
        "ttft_ms": "float",
        "peak_memory_bytes": "int",
    }
    regime = {"original_us": "float", "solution_us": "float", "seated": "bool"}
    assert keys(result) == {
        "schema_version": "int",
        "model": {"name": "str", "type": "str", "parameters": "int", "dtype": "str", "transformers": "str"},
        "machine": {
            "platform": "str",
            "cpu": "str",
            "cores": "int",
            "gpu": "NoneType",
            "gpu_driver": "NoneType",
            "compute_capability": "NoneType",
            "python": "str",
            "versions": {"torch": "str"},
        },
        "patches": [
            {
                "family": "str",
                "sites": ["str"],
                "status": "str",
                "solution": "str",
                "supplier": "str",
                "reason": "NoneType",
                "regimes": {"prefill": regime, "decode": regime},
            }
        ],
        "contributions": [],
        "bench": {
            "baseline": one_side,
            "grafted": one_side,
            "tokens_equal": "bool",
            "logits_rel_rmse": "float",
            "coverage": {"device": "str", "cpu_time_percent": "float"},
            "contributions": [],
            "contenders": [
                {
                    "name": "str",
                    "failure": "NoneType",
                    "figures": one_side,
                    "tokens_per_s_ratio": "NoneType",
                    "tokens_equal": "NoneType",
                    "logits_rel_rmse": "NoneType",
                    "float32_rel_rmse": "NoneType",
                    "gpu_time": {},
                    "roofline": {},
                }
            ],
        },
        "files": {"graft": "str"},
    }
    assert result["schema_version"] == 1


def test_the_result_holds_the_figures() -> None:
    result = json.loads(json.dumps(report.result(GRAFT, BENCH, {}), allow_nan=False))
    accepted, rejected = result["patches"]
    assert accepted["sites"] == ["model.layers.*.norm", "model.norm"]
    assert (accepted["status"], accepted["solution"], accepted["supplier"]) == ("accepted", "acme_norm", "acme")
    assert accepted["regimes"]["prefill"] == {"original_us": 20.0, "solution_us": 12.0, "seated": True}
    assert accepted["regimes"]["decode"] == {"original_us": 10.0, "solution_us": 11.0, "seated": False}
    assert rejected == {
        "family": "rope",
        "sites": ["model.layers.*.rope"],
        "status": "rejected",
        "solution": None,
        "supplier": None,
        "reason": "unsuitable: no supplier has a candidate",
        "regimes": {},
    }
    assert result["bench"]["grafted"]["tokens_per_s"] == {"mean": 1000.0, "std": 2.0}


def test_unknown_is_null() -> None:
    assert report.result(GRAFT, None, {})["bench"] is None
    bench = report.result(GRAFT, ALONE, {})["bench"]
    assert [bench[name] for name in ("grafted", "tokens_equal", "logits_rel_rmse", "coverage")] == [None] * 4


def test_a_seated_definition_stands_for_its_regime() -> None:
    seats = (seat("decode", 9.0, 9.5, False, "masked"), seat("decode", 8.0, 4.0, True, "causal"))
    patch = ACCEPTED.model_copy(update={"seats": seats})
    assert report.leading_seats(patch) == {"decode": seats[1]}


def test_the_throughput_line_has_the_agreed_words() -> None:
    lines = "\n".join(report.bench_lines(BENCH))
    found = re.findall(r"Average throughput: ([\d.]+) ± ([\d.]+) tokens/sec", lines)
    assert found == [("800.00", "2.00"), ("1000.00", "2.00")]
    assert report.throughput_line(side(3.0, None)) == "Average throughput: 3.00 ± n/a tokens/sec"


@pytest.mark.parametrize(
    ("interval", "word"),
    [((1.01, 1.2), "faster than"), ((0.8, 0.99), "slower than"), ((0.9, 1.1), "within the noise of")],
)
def test_faster_is_said_only_beyond_the_noise(interval: tuple[float, float], word: str) -> None:
    comparison = Comparison(tokens_per_s_ratio=1.0, tokens_per_s_interval=interval, ttft_ratio=1.0)
    lines = report.bench_lines(grafted(comparison=comparison))
    assert [line for line in lines if line.startswith(f"kernelgraft is {word} the original:")]


def test_a_divergence_is_explained() -> None:
    divergence = Divergence(
        sequence=0, position=7, baseline_token=1, grafted_token=2, baseline_margin=0.001, grafted_difference=0.002
    )
    outputs = Outputs(tokens_equal=False, divergence=divergence, logits_rel_rmse=None, logits_shape=(1, 64, 100))
    text = "\n".join(report.bench_lines(grafted(outputs=outputs)))
    assert "tokens not equal" in text
    assert "not comparable" in text
    assert "new token 7" in text
    assert "1.00e-03" in text


def test_graft_table() -> None:
    text = shown(report.graft_table(GRAFT))
    assert "1 of 2 computes accepted, 4 places patched; tokens equal" in text
    assert "20.0 → 12.0" in text
    assert "10.0 (11.0)" in text
    assert "1/2" in text
    assert "norm ×3" in text
    assert "rejected: rope: unsuitable" in text


def test_bench_table() -> None:
    text = shown(report.bench_table(BENCH))
    assert "800.0" in text
    assert "1.250x" in text
    assert "95 % interval 1.200 to 1.300" in text
    assert "42.0 % of the original's CPU time" in text
    assert "only the original ran" in shown(report.bench_table(ALONE))


def test_every_contender_has_a_row_and_a_failed_one_its_reason() -> None:
    text = shown(report.bench_table(five()), 80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    order = ["eager", "static-compile", "tilegym", "liger", "kernelgraft"]
    assert [row[0] for row in rows if row and row[0] in order][:5] == order
    assert next(row for row in rows if row[:1] == ["static-compile"])[1:3] == ["4000.0", "5.000x"]
    assert next(row for row in rows if row[:1] == ["tilegym"])[-1] == "failed"
    lines = report.bench_lines(five())
    assert "tilegym:        failed: tilegym has no patch for `b`" in lines
    assert "kernelgraft over the fastest peer, liger: 0.081x" in lines
    assert "kernelgraft over static-compile: 0.250x" in lines


def test_a_ratio_over_a_peer_has_an_interval_where_there_are_rounds() -> None:
    def rounds(*speeds: float) -> Any:
        one = side(sum(speeds) / len(speeds))
        runs = (one.runs[0].model_copy(update={"tokens_per_s": s}) for s in speeds)
        return one.model_copy(update={"runs": tuple(runs)})

    peer = Contender(name="liger", side=rounds(100.0, 110.0, 90.0))
    ours = GRAFTED.model_copy(update={"side": rounds(200.0, 220.0, 180.0)})
    lines = report.bench_lines(BENCH.model_copy(update={"contenders": (ORIGINAL, peer, ours)}))
    assert "kernelgraft over the fastest peer, liger: 2.000x, 95 % interval 2.000 to 2.000" in lines


def test_the_coverage_line_is_for_whoever_has_cutile_kernels() -> None:
    lines = report.trace_lines(on_a_gpu().contenders)
    coverage = [line for line in lines if ">>> cuTile Kernel Coverage (GPU Time):    49.21% <<<" in line]
    assert [line.partition(":")[0] for line in coverage] == ["kernelgraft, prefill", "kernelgraft, decode"]
    assert "eager, decode: 22.95 % of the GPU time is in what the graft replaces" in lines
    assert "kernelgraft, decode: left to libraries: 45.7 % (cuBLAS 35.6, flash attention 10.2)" in lines


def test_a_peer_with_cutile_kernels_has_its_coverage_too() -> None:
    eager, _, _, peer, _ = on_a_gpu().contenders
    peer = peer.model_copy(update={"name": "tilegym", "traces": (trace("decode", cutile=12.5),)})
    lines = report.trace_lines([eager, peer])
    assert "tilegym, decode: >>> cuTile Kernel Coverage (GPU Time):    12.50% <<<" in lines


def test_the_compiled_original_is_no_peer() -> None:
    lines = report.bench_lines(on_a_gpu())
    assert "kernelgraft over the fastest peer, liger: 1.282x" in lines
    assert "kernelgraft over static-compile: 0.250x" in lines


def test_one_line_a_regime_says_what_the_machine_allows() -> None:
    decode = "roofline: a decode step takes 0.581 ms at least (2.50 GB at 4300 GB/s); of it eager 8.0 %"
    prefill = "roofline: a prefill takes 12.5 ms at least (10.00 TFLOP at 800 TFLOP/s); of it eager 28.0 %"
    lines = report.trace_lines(on_a_gpu().contenders)
    assert [line.startswith(decode) for line in lines].count(True) == 1
    assert [line.startswith(prefill) for line in lines].count(True) == 1


def test_the_gpu_tables_fit_a_narrow_terminal() -> None:
    text = shown(report.bench_table(on_a_gpu()), 80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    (decode,) = (row for row in rows if row[:2] == ["kernelgraft", "decode"])
    # 20 ms and 400 kernels in four steps; 5.4 of the 20 ms were busy.
    assert decode == ["kernelgraft", "decode", "5.00", "100", "73.0", "49.2", "–", "61.0"]
    assert "Not covered: kernelgraft, decode" in text
    assert "GPU time" not in shown(report.bench_table(five()))


def test_the_original_shows_what_a_graft_could_cover() -> None:
    bench = on_a_gpu().model_copy(update={"contenders": on_a_gpu().contenders[:1]})
    assert "Not covered: eager, decode" in shown(report.bench_table(bench))


def test_gpu_figures_in_markdown_and_in_the_result() -> None:
    bench = on_a_gpu()
    text = report.markdown(GRAFT, None, bench)
    for part in ("## GPU time", "### Not covered: kernelgraft, prefill", "### Left to libraries: kernelgraft, decode"):
        assert part in text
    assert "| liger | model.norm: liger_rms_norm |" in text
    assert "| eager | nothing |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    contenders = json.loads(json.dumps(report.result(GRAFT, bench, {})))["bench"]["contenders"]
    assert [c["failure"] for c in contenders if c["failure"]] == ["tilegym has no patch for `b`"]
    decode = contenders[-1]["gpu_time"]["decode"]
    assert (decode["cutile_percent"], decode["kernels_per_token"]) == (49.21, 100.0)
    assert contenders[-1]["roofline"]["decode"]["percent"] == 61.0


def test_calls_are_shown_with_fallbacks_and_their_reasons() -> None:
    calls = PatchCalls(
        family="rms_norm",
        sites=("model.norm",),
        calls={"acme_norm": 12},
        original_by_choice=3,
        fallbacks={"dtype float64": 2},
        contained=0,
    )
    text = report.markdown(GRAFT, None, grafted(calls=(calls,)))
    assert "| rms_norm | model.norm | acme_norm: 12 | 3 | 2: dtype float64 |" in text


def test_what_each_compute_gains_is_shown_with_its_interval() -> None:
    assert "switched off" not in shown(report.graft_table(GRAFT))
    text = shown(report.graft_table(ablated()), 80)
    assert max(map(len, text.splitlines())) <= 80
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["all"])
    assert row == ["all", "decode", "×1", "10.0", "12.5", "+20.0", "+2.25", "to", "+2.75"]
    page = report.markdown(ablated(), None, None)
    norm = "| rms_norm (norm) | decode, batch 1 | 10.0 | 12.0 | +16.7 | +1.80 to +2.20 |"
    assert norm in page
    assert "| gated_mlp (mlp) | prefill of 512, batch 1 | 10.0 | 9.50 | -5.3 | -0.600 to -0.400 |" in page
    assert "## Contributions" not in report.markdown(GRAFT, None, None)
    assert report.result(ablated(), None, {})["contributions"][0]["off_ms"] == 12.5


def test_what_the_graft_leaves_to_the_original_is_no_loss() -> None:
    (loss,) = (c for c in ablated().contributions if c.gain_ms < 0)
    graft = GRAFT.model_copy(update={"contributions": (loss.model_copy(update={"seated": False}),)})
    for text in (shown(report.graft_table(graft)), report.markdown(graft, None, None)):
        assert "-5.3" not in text and "-0.600" not in text
        assert "the original's" in text
    assert report.result(graft, None, {})["contributions"][0]["seated"] is False


def test_the_long_table_can_be_a_line() -> None:
    text = shown(report.graft_table(ablated(), contributions="they are in there"))
    assert "they are in there" in text
    assert "switched off" not in text
    assert "they are in there" not in shown(report.graft_table(GRAFT, contributions="they are in there"))


def test_a_benchmark_tells_what_each_compute_gains_in_its_setting() -> None:
    bench = BENCH.model_copy(update={"contributions": ablated().contributions})
    assert "+20.0" in shown(report.bench_table(bench))
    assert "switched off" not in shown(report.bench_table(BENCH))
    page = report.markdown(GRAFT, None, bench)
    assert "## What each compute gains in this setting" in page
    assert page.index("## Before and after") < page.index("| rms_norm (norm) | decode, batch 1 | 10.0 | 12.0 | +16.7 |")
    assert "## What each compute gains" not in report.markdown(GRAFT, None, BENCH)
    said = report.result(GRAFT, bench, {})["bench"]["contributions"]
    assert [c["family"] for c in said] == ["all", "rms_norm", "gated_mlp"]


def test_computes_of_a_family_are_told_apart() -> None:
    assert report.compute_name("rms_norm", ["model.layers.*.q_norm"]) == "rms_norm (q_norm)"
    assert report.compute_name("rope", ["model.layers.*.self_attn.forward:rotate"]) == "rope (rotate)"
    assert report.compute_name("norm", ["a.b", "a.c", "d.b"]) == "norm (b and 1 more)"
    assert report.compute_name("all", []) == "all"


def test_every_measured_time_is_in_the_page() -> None:
    seats = (
        seat("decode", 10.0, 4.0, True).model_copy(update={"batch": 32, "candidates_us": {"a": 5.0, "acme_norm": 4.0}}),
        seat("prefill", 20.0, 30.0, False).model_copy(update={"batch": 1, "prompt_tokens": 512}),
    )
    graft = GRAFT.model_copy(update={"patches": (ACCEPTED.model_copy(update={"seats": seats}),)})
    text = report.markdown(graft, None, None)
    assert "| rms_norm | decode, batch 32 | 10.0 | acme_norm 4.0<br>a 5.0 | acme_norm |" in text
    assert "| rms_norm | prefill of 512, batch 1 | 20.0 | acme_norm 30.0 | original |" in text


def test_plan_table() -> None:
    text = shown(report.plan_table(PLAN))
    assert "acme_norm" in text
    assert "other: not installed" in text
    assert "Already done: it is grafted" in shown(
        report.plan_table(Plan(model=MODEL, rows=(), already="it is grafted"))
    )


def test_research_table_counts_what_is_of_no_family() -> None:
    rows = (
        ResearchRow(site=site("model.x"), reason="no family"),
        ResearchRow(site=site("model.y"), reason="no family"),
        ResearchRow(site=site("model.z"), reason="rms_norm: two variants fit"),
        ResearchRow(
            site=site("model.norm", 1),
            family="rms_norm",
            definitions=("norm_h8",),
            semantics={"offset": 1, "norm": {"family": "rms_norm", "eps": 1e-6}, "window": None, "names": ["q"]},
            calls={"prefill": 2, "decode": 6},
        ),
    )
    text = shown(report.research_table(Research(model=MODEL, machine=MACHINE, prompt="p", rows=rows)))
    assert "offset=1, norm=rms_norm " in text
    assert "2 + 6" in text
    assert "not recognised: model.z: rms_norm: two variants fit" in text
    assert "2 other sites: no family" in text
    assert "model.x" not in text


def test_inventory_table() -> None:
    listing = Listing("acme", "norm", "rms_norm", "python", ("cpu", "cuda"), "any dtype", None)
    gone = Listing("far", "norm", "rms_norm", "cuda", ("cuda",), "sm_90", "no GPU")
    text = shown(report.inventory_table([listing, gone], [solution("acme_norm")]))
    assert "usable" in text
    assert "not usable: no GPU" in text
    assert "stored" in text


def test_doctor_table() -> None:
    text = shown(report.doctor_table(MACHINE, {"torch": None, "far": "no GPU"}))
    assert "A CPU" in text
    assert "not usable: no GPU" in text


def test_names_are_shown_as_they_are() -> None:
    model = MODEL.model_copy(update={"name": "config:smile: [red]"})
    assert "config:smile: [red]" in shown(report.graft_table(GRAFT.model_copy(update={"model": model})))


def test_a_solution_is_named_without_its_definition() -> None:
    assert report.short_name("torch_native_norm_h8", ["rope_h8", "norm_h8"]) == "torch_native"
    assert report.short_name("acme", ["norm_h8"]) == "acme"


def test_a_site_is_named_by_what_is_replaced() -> None:
    assert report.site_name(site("model.layers.*.norm")) == "norm"
    assert report.site_name(site("experts.*")) == "experts"
    function = site("model.layers.*.attn").model_copy(update={"kind": "function", "symbol": "rotate"})
    assert report.site_name(function) == "rotate"


def test_a_long_variant_is_cut() -> None:
    assert report.variant_text({str(i): i for i in range(9)}) == "0=0, 1=1, 2=2, 3=3, …"


def test_tables_fit_a_narrow_terminal() -> None:
    for table in (report.graft_table(GRAFT), report.bench_table(BENCH), report.plan_table(PLAN)):
        assert max(map(len, shown(table, 80).splitlines())) <= 80


def test_markdown() -> None:
    text = report.markdown(GRAFT, PLAN, BENCH)
    for part in ("# kernelgraft: tiny", "## Computes", "## Candidates", "## Verdicts", "## Before and after"):
        assert part in text
    assert "off \\| by 3" in text
    assert "model.layers.*.norm ×3<br>model.norm ×1" in text
    assert "Rejected: rope: unsuitable" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    assert "## Before" not in report.markdown(GRAFT, None, None)


def test_write_puts_result_and_report_beside_the_records(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path)
    inventory.save_record("graft", GRAFT)
    files = report.write(inventory, GRAFT, PLAN, BENCH)
    assert set(files) == {"graft", "result", "report"}
    assert all(Path(file).is_file() for file in files.values())
    assert json.loads((tmp_path / "result.json").read_text()) == report.result(GRAFT, BENCH, files)
    assert (tmp_path / "report.md").read_text() == report.markdown(GRAFT, PLAN, BENCH)
