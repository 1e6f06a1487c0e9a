"""Traces: what made a kernel, who launched it, and sums that add up; on made-up traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch
from trace_samples import Event, adds_up, kernel, launch, note, op, x

from kernelgraft.bench.result import Trace
from kernelgraft.bench.trace import coverage_line, parse
from kernelgraft.bench.trace_events import MODULE, SITE, SOLUTION, STEP, mark, union_us
from kernelgraft.bench.trace_kernels import cutile_function, label, language
from kernelgraft.cutile.signatures import launch_signature
from kernelgraft.errors import UsageError


@ct.kernel
def scale_kernel(x, y, factor, TILE: ct.Constant[int]):  # type: ignore[no-untyped-def]
    """y = factor * x."""
    index = ct.bid(0)
    ct.store(y, (index,), ct.load(x, (index,), (TILE,)) * factor)


def cutile_symbol() -> str:
    """The name under which the GPU would run `scale_kernel`."""
    x = torch.zeros(64)
    symbol = launch_signature(scale_kernel, (x, x, 2.0, 32)).symbol
    assert isinstance(symbol, str)
    return symbol


def read(*events: Event, regime: Any = "prefill", tokens: int = 5, **options: Any) -> Trace:
    return parse({"traceEvents": list(events)}, regime=regime, tokens=tokens, **options)


FOREIGN = (
    "rope_kernel",
    "fused_moe_kernel",
    "matmul_kernel",
    "rms_norm_kernel",
    "cutile_attention_kernel",
    "tile_gemm_K64",
    "x_K1_Ab2",
    "fused_rope_K128",
    "moe_K64_I8",
    "_Kv1",
    "void rope_embedding<float>(float*, int)",
    "void vllm::moe_align_block_size_kernel<int>(int*)",
    "_triton_rope",
)


def test_foreign_kernels_are_none_of_cutile() -> None:
    trace = read(*(kernel(name, 10.0 * i, 5.0, i) for i, name in enumerate(FOREIGN)))
    assert trace.cutile_percent == 0.0
    assert trace.languages_percent == {"other": pytest.approx(100)}
    assert coverage_line(trace) == ">>> cuTile Kernel Coverage (GPU Time):     0.00% <<<"


def test_a_kernel_of_cutile_is_known_by_its_whole_symbol() -> None:
    symbol = cutile_symbol()
    assert cutile_function(symbol) == "scale_kernel"
    assert cutile_function(symbol[:-1] + "?") is None
    assert label(symbol) == "scale_kernel"
    trace = read(kernel(symbol, 0, 49.21, 1), kernel("rope_kernel", 60, 50.79, 2))
    assert trace.cutile_percent == pytest.approx(49.21)
    assert coverage_line(trace) == ">>> cuTile Kernel Coverage (GPU Time):    49.21% <<<"


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_NNT", "cublas"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(int)", "cublas"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k", "cublas"),
        ("void gemvNSP_kernel<__nv_bfloat16, int>(int)", "cublas"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int>(int)", "cublas"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "cublas"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "cudnn"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>(int)", "flash"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<int>>(int)", "flash"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<int>::Params)", "torch"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "torch"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<int>(int)", "torch"),
        ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, 9>(float*)", "torch"),
        ("triton_poi_fused_mul_silu_0", "triton"),
        ("triton_matmul", "other"),
        ("my_cudnn_nvjet_flash_fwd_at::native", "other"),
    ],
)
def test_libraries_by_the_scheme_of_their_names(name: str, made: str) -> None:
    assert language(name) == made


def test_a_kernel_that_this_process_compiled_is_triton_s() -> None:
    assert language("_rms_norm_forward_kernel", {"_rms_norm_forward_kernel"}) == "triton"
    assert language("_rms_norm_forward_kernel") == "other"


def test_the_operator_decides_where_the_name_says_nothing() -> None:
    assert language("kernel", operators=["aten::linear", "aten::addmm"]) == "cublas"
    assert language("kernel", operators=["aten::_cudnn_attention_forward"]) == "cudnn"
    assert language("kernel", operators=["aten::sort"]) == "torch"
    assert language("kernel", operators=["my::linear"]) == "other"


def test_labels() -> None:
    assert label("void at::native::(anonymous namespace)::Copy<int, at::X<1>(2)>(int*)") == "at::native::Copy"
    assert label("nvjet_tst_64x64") == "nvjet_tst_64x64"


def test_a_kernel_belongs_to_the_innermost_module_and_the_outermost_operator_in_it() -> None:
    trace = read(
        op("wrapped::model", -10, 300),
        note(mark(MODULE, "layers.*", "Layer"), 0, 100),
        note(mark(MODULE, "layers.*.mlp", "MLP"), 10, 50),
        op("aten::linear", 12, 20),
        op("aten::addmm", 14, 10),
        launch(1, 16),
        kernel("nvjet_a", 200, 30, 1),
        op("aten::add", 70, 10),
        launch(2, 72),
        kernel("void at::native::add<int>(int)", 230, 10, 2),
        note(mark(MODULE, "layers.*.mlp", "MLP"), 110, 50),
        op("aten::linear", 112, 20),
        launch(3, 116),
        launch(4, 118),
        kernel("nvjet_b", 240, 40, 3),
        kernel("nvjet_c", 280, 20, 4),
    )
    assert [(s.path, s.name, s.time_us, s.calls) for s in trace.modules] == [
        ("layers.*.mlp", "MLP", 90, 2),
        ("layers.*", "Layer", 10, 1),
    ]
    assert [(s.path, s.name, s.time_us, s.calls) for s in trace.uncovered] == [
        ("layers.*.mlp", "aten::linear", 90, 2),
        ("layers.*", "aten::add", 10, 1),
    ]
    assert [s.percent for s in trace.libraries] == [pytest.approx(90)]
    assert trace.languages_percent == {"cublas": pytest.approx(90), "torch": pytest.approx(10)}
    assert trace.kernels == 4
    adds_up(trace, 100)


def test_ranges_of_other_threads_do_not_count() -> None:
    trace = read(
        note(mark(MODULE, "a", "A"), 0, 100) | {"tid": 2},
        note(mark(MODULE, "b", "B"), 0, 100),
        launch(1, 50),
        kernel("k", 60, 5, 1),
    )
    assert [s.path for s in trace.modules] == ["b"]


def test_a_launch_noted_under_another_thread_number_is_found_by_its_operator() -> None:
    ranges = (note(mark(MODULE, "a", "A"), 0, 100), op("aten::mm", 10, 20, External_id=77))
    lost = launch(1, 15) | {"tid": 140_000}
    for events in (
        (*ranges, note("elsewhere", 0, 100) | {"tid": 3}, lost, kernel("k", 60, 5, 1, External_id=77)),
        (*ranges, kernel("k", 60, 5, 1, External_id=77)),  # without a record of the launch
        (*ranges, lost, kernel("k", 60, 5, 1)),  # without its operator: there is but one thread with operators
    ):
        trace = read(*events)
        assert [(s.path, s.time_us) for s in trace.modules] == [("a", 5)]
        assert trace.languages_percent == {"cublas": pytest.approx(100)}


def test_a_kernel_without_correlation_counts_and_has_no_path() -> None:
    trace = read(
        note(mark(MODULE, "a", "A"), 0, 100),
        launch(1, 50),
        kernel("k", 60, 5, 1),
        kernel("void at::native::add<int>(int)", 70, 15),
        kernel("lost", 90, 10, 99),
    )
    assert [(s.path, s.name, s.time_us) for s in trace.modules] == [("", "outside every module", 25), ("a", "A", 5)]
    assert [(s.path, s.name) for s in trace.uncovered] == [("", "at::native::add"), ("", "lost"), ("a", "k")]
    adds_up(trace, 30)


def test_a_driver_launch_inside_a_runtime_launch_counts_once() -> None:
    trace = read(
        op("aten::mm", 0, 10),
        launch(1, 2),
        launch(1, 2.5, "cuLaunchKernelEx"),
        kernel("k", 20, 5, 1),
    )
    assert (trace.kernels, trace.kernel_us) == (1, 5)
    assert trace.wall_ms == pytest.approx(0.023)


def test_one_graph_launch_has_many_kernels() -> None:
    symbol = cutile_symbol()
    trace = read(
        x("cpu_op", "Torch-Compiled Region: 0/0", 0, 50),
        launch(1, 20, "cudaGraphLaunch"),
        kernel("nvjet_a", 30, 10, 1),
        kernel(symbol, 40, 20, 1),
        kernel("triton_red_fused_add_1", 60, 5, 1),
        x("gpu_memcpy", "Memcpy DtoD", 66, 5, tid=7, correlation=1),
    )
    assert trace.kernels == 3
    assert trace.languages_percent == {
        "cutile": pytest.approx(50),
        "cublas": pytest.approx(25),
        "triton": pytest.approx(12.5),
        "memory": pytest.approx(12.5),
    }
    assert [(s.name, s.path) for s in trace.uncovered] == [("nvjet_a", ""), ("Memcpy DtoD", "")]
    assert [s.path for s in trace.modules] == [""]
    adds_up(trace, 40)


def test_graphs_whose_kernels_were_not_recorded_are_refused() -> None:
    with pytest.raises(UsageError, match="CUDA graphs without their kernels"):
        read(launch(1, 0, "cudaGraphLaunch"), launch(2, 20), kernel("a", 30, 10, 2))
    whole = read(launch(1, 0, "cudaGraphLaunch"), launch(2, 20, "cudaGraphLaunch"), kernel("a", 30, 10, 2))
    assert whole.kernels == 1


def test_overlapping_streams_are_busy_once() -> None:
    trace = read(
        launch(1, 0),
        kernel("a", 10, 50, 1),
        launch(2, 5),
        kernel("b", 30, 50, 2, stream=20),
        launch(3, 90),
        kernel("c", 100, 20, 3),
    )
    assert trace.busy_ms == pytest.approx(0.090)
    assert trace.wall_ms == pytest.approx(0.120)
    assert trace.kernel_us == pytest.approx(120)
    assert trace.host_bound_percent == pytest.approx(25)
    assert union_us([(0, 5), (1, 2), (5, 6), (8, 9)]) == 7


def test_the_wall_of_an_unprofiled_run_is_taken_and_is_never_below_busy() -> None:
    events = (launch(1, 0), kernel("a", 10, 50, 1))
    assert read(*events, wall_ms=0.2).host_bound_percent == pytest.approx(75)
    assert read(*events, wall_ms=0.01).host_bound_percent == 0.0


def steps(*regimes: str) -> list[Event]:
    """A step each 100 µs, with a kernel of 10 µs launched 20 µs in that runs 80 µs later: in the next step's time."""
    events = []
    for number, regime in enumerate(regimes):
        at = 100.0 * number
        events += [
            note(mark(STEP, regime), at, 0.1),
            launch(number, at + 20),
            kernel(f"k{number}", at + 100, 10, number),
        ]
    return events


def test_a_window_is_what_the_steps_of_a_regime_launched() -> None:
    events = steps("prefill", "decode", "decode", "prefill", "decode")
    before = [launch(90, -20), kernel("before", -10, 10, 90)]
    decode = read(*before, *events, regime="decode", tokens=7)
    assert (decode.tokens, decode.kernels, decode.kernels_per_token) == (3, 3, 1)
    assert [s.name for s in decode.uncovered] == ["k1", "k2", "k4"]
    assert decode.wall_ms == pytest.approx((190 + 90) / 1e3)  # two windows
    prefill = read(*before, *events, regime="prefill", tokens=7)
    assert (prefill.tokens, prefill.kernels, prefill.kernels_per_token) == (7, 3, 3)  # with what prepared it
    middle = read(*before, *steps("decode", "prefill"), regime="decode")
    assert middle.kernels == 1  # whatever came before a decode step, it was no decode step


def test_a_kernel_whose_launch_is_lost_is_in_the_window_of_the_one_before_it() -> None:
    events = [*steps("prefill", "decode"), kernel("lost", 215, 10)]
    assert read(*events, regime="decode").kernels == 2
    assert read(*events, regime="prefill").kernels == 1
    events = [*steps("prefill", "decode"), kernel("lost", 112, 10)]  # it runs when the next step has begun
    assert read(*events, regime="decode").kernels == 1
    assert read(*events, regime="prefill").kernels == 2


def test_replaced_sites_and_solutions() -> None:
    events = (
        note(mark(MODULE, "a", "A"), 0, 100),
        note(mark(SITE, "a"), 10, 50),
        note(mark(SITE, "a:inner"), 20, 10),
        launch(1, 25),
        kernel("void at::native::x<int>(int)", 200, 30, 1),
        launch(2, 40),
        kernel("void at::native::y<int>(int)", 230, 30, 2),
        note(mark(SOLUTION, "torch_norm"), 65, 10),
        launch(3, 70),
        kernel("void at::native::z<int>(int)", 260, 20, 3),
        launch(4, 80),
        kernel("left", 280, 20, 4),
    )
    trace = read(*events, sites=True)
    assert trace.replaced_percent == pytest.approx(60)
    assert [(s.name, s.percent) for s in trace.uncovered] == [("left", pytest.approx(20))]
    assert read(*events).replaced_percent is None


def test_a_product_that_a_site_calls_as_a_module_is_not_replaced() -> None:
    def linear(at: float, number: int) -> tuple[Event, ...]:
        return (
            note(mark(MODULE, "mlp.up", "Linear", "product"), at, 10),
            launch(number, at + 5),
            kernel(f"k{number}", 200 + at, 10, number),
        )

    trace = read(
        note(mark(MODULE, "mlp", "MLP"), 0, 100),
        note(mark(SITE, "mlp"), 1, 98),
        *linear(10, 1),
        *linear(30, 2),
        note(mark(SITE, "mlp.up"), 32, 6),  # this one is replaced itself
        note(mark(MODULE, "mlp.act", "SiLU"), 50, 10),
        launch(3, 55),
        kernel("k3", 300, 5, 3),
        sites=True,
    )
    assert trace.replaced_percent == pytest.approx(100 * 15 / 25)
    assert [s.name for s in trace.uncovered] == ["k1"]


def test_only_the_ten_largest_are_listed() -> None:
    trace = read(*(kernel(f"nvjet_{i}", 100 * i, 1 + i) for i in range(14)))
    assert [s.name for s in trace.uncovered] == [f"nvjet_{i}" for i in range(13, 3, -1)]
    assert len(trace.libraries) == 10
    adds_up(trace, sum(range(1, 15)))


def test_a_file_of_a_trace(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [launch(1, 0), kernel("a", 10, 50, 1)]}).encode()
    (tmp_path / "t.json").write_bytes(text)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text))
    for name in ("t.json", "t.json.gz"):
        assert parse(tmp_path / name, regime="prefill", tokens=1).kernels == 1


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str) -> None:
    text = json.dumps({"traceEvents": [launch(1, 0), kernel("a", 10, 50, 1)]}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text)[:-20] if name.endswith("gz") else text[:-20])
    with pytest.raises(UsageError, match="no whole trace"):
        parse(tmp_path / name, regime="prefill", tokens=1)


def test_a_trace_that_lost_records_still_adds_up() -> None:
    whole = [
        e
        for i in range(20)
        for e in (launch(i, 10.0 * i), kernel("void at::native::a<int>(int)", 300 + 10.0 * i, 5, i))
    ]
    ranges = [note(mark(MODULE, f"m{i}", "M"), 50.0 * i, 49) for i in range(4)]
    for cut in range(5, 40, 7):
        left = whole[cut:]
        adds_up(read(*ranges, *left), 5.0 * sum(e["cat"] == "kernel" for e in left))


@pytest.mark.parametrize("trace", [{}, {"traceEvents": None}])
def test_what_is_no_trace_is_refused(trace: Any) -> None:
    with pytest.raises(UsageError, match="no list `traceEvents`"):
        parse(trace, regime="decode", tokens=1)


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(UsageError, match="no kernel of the decode window"):
        read(*steps("prefill"), regime="decode")
    with pytest.raises(UsageError, match="no kernel"):
        read(op("aten::mm", 0, 1), launch(1, 0.5))
