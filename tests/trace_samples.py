"""Made-up traces of torch's profiler, and a fake GPU: the CPU's operators are real, each launches a made-up kernel."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgraft.bench.result import Trace

Event = dict[str, Any]


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


def adds_up(trace: Trace, total_us: float) -> None:
    """What a profiler sums is what each division of the time sums to."""
    assert trace.kernel_us == pytest.approx(total_us, rel=1e-9)
    assert sum(share.time_us for share in trace.modules) == pytest.approx(total_us, rel=1e-2)
    assert sum(trace.languages_percent.values()) == pytest.approx(100, rel=1e-2)


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
