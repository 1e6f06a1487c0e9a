"""Traces: what made a kernel, who launched it, and sums that add up; on made-up traces and on a fake GPU."""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda.tile as ct
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from kernelgraft import models, patch, pipeline
from kernelgraft.bench import trace as tracing
from kernelgraft.bench.result import Trace
from kernelgraft.bench.trace import coverage_line, measure, parse
from kernelgraft.bench.trace_events import MODULE, SITE, SOLUTION, STEP, mark, union_us
from kernelgraft.bench.trace_kernels import cutile_function, label, language
from kernelgraft.cutile.signatures import launch_signature
from kernelgraft.errors import UsageError

Event = dict[str, Any]


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


# --- made-up traces ---


def x(category: str, name: str, start: float, length: float, tid: Any = 1, **args: Any) -> Event:
    given = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length, "args": given}


def op(name: str, start: float, length: float, **args: Any) -> Event:
    return x("cpu_op", name, start, length, **args)


def note(name: str, start: float, length: float, **args: Any) -> Event:
    return x("user_annotation", name, start, length, **args)


def launch(number: int, at: float, name: str = "cudaLaunchKernel", **args: Any) -> Event:
    driver = "cuda_driver" if name.startswith("cuL") else "cuda_runtime"
    return x(driver, name, at, 1.0, correlation=number, **args)


def kernel(name: str, start: float, length: float, number: int | None = None, stream: int = 7, **args: Any) -> Event:
    given = args if number is None else args | {"correlation": number}
    return x("kernel", name, start, length, tid=stream, **given)


def read(*events: Event, regime: Any = "prefill", tokens: int = 5, **options: Any) -> Trace:
    return parse({"traceEvents": list(events)}, regime=regime, tokens=tokens, **options)


def adds_up(trace: Trace, total_us: float) -> None:
    """What a profiler sums is what each division of the time sums to."""
    assert trace.kernel_us == pytest.approx(total_us, rel=1e-9)
    assert sum(share.time_us for share in trace.modules) == pytest.approx(total_us, rel=1e-2)
    assert sum(trace.languages_percent.values()) == pytest.approx(100, rel=1e-2)


FOREIGN = (
    "rope_kernel",
    "fused_moe_kernel",
    "matmul_kernel",
    "rms_norm_kernel",
    "cutile_attention_kernel",
    "tile_gemm_K64",
    "x_K1_Ab2",
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


# --- a fake GPU: the CPU's operators are real, each launches a made-up kernel ---

KERNELS = {
    "aten::addmm": "nvjet_tst_64x64",
    "aten::mm": "nvjet_tst_64x64",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "void pytorch_flash::flash_fwd_kernel<int>(int)",
    "aten::mul": "void at::native::vectorized_elementwise_kernel<4>(int)",
    "aten::add": "void at::native::vectorized_elementwise_kernel<4>(int)",
    "aten::argmax": "void at::native::reduce_kernel<512>(int)",
    "aten::embedding": "void at::native::index_kernel<1>(int)",
    "aten::cat": "void at::native::CatArrayBatchedCopy<int>(int)",
    "aten::_fused_rms_norm": "void at::native::rms_kernel<1>(int)",
}


def fake_gpu(run: Callable[[], Any]) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_bytes())
    free = 0.0
    for number, event in enumerate(list(trace["traceEvents"])):
        if event.get("cat") == "cpu_op" and event["name"] in KERNELS:
            at = event["ts"] + event["dur"] / 2
            free = max(free, at + 2)
            trace["traceEvents"] += [
                launch(number + 1, at) | {"tid": event["tid"]},
                kernel(KERNELS[event["name"]], free, 3.0, number + 1),
            ]
            free += 3.0
    return trace


@pytest.fixture(scope="module")
def tiny() -> Any:
    return models.load("tiny")


def generating(model: nn.Module, new_tokens: int, **options: Any) -> Callable[[], Any]:
    ids = torch.arange(3, 10)[None]
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, disable_compile=True, **options)

    def run() -> Any:
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)  # type: ignore[operator]

    return run


def test_a_model_on_a_fake_gpu(tiny: Any) -> None:
    model = tiny.model
    before = {(path, name): value for path, m in model.named_modules() for name, value in vars(m).items()}
    run = generating(model, 5)
    expected = run()
    prefill = measure(model, run, regime="prefill", tokens=7, profiler=fake_gpu)
    decode = measure(model, run, regime="decode", tokens=99, profiler=fake_gpu)
    assert decode.tokens == 4
    assert prefill.tokens == 7
    assert decode.kernels == 4 * prefill.kernels
    layers = model.config.num_hidden_layers
    shares = {(s.path, s.name): s for s in decode.modules}
    assert shares["model.layers.*.mlp.down_proj", "Linear"].calls == 4 * layers
    adds_up(decode, 3.0 * decode.kernels)
    assert torch.equal(run(), expected)
    after = {(path, name): value for path, m in model.named_modules() for name, value in vars(m).items()}
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] or before[key] == after[key] for key in before)
