"""How fast a machine could run a model at best, and how near a measured time comes.

The limit of a step is the longer of two times: reading what must be read at the measured bandwidth, and computing
what must be computed at the measured rate.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from kernelgraft import machine
from kernelgraft.bench.counting import Regime, count
from kernelgraft.bench.result import Roofline, Side

STREAM_BYTES = {"cuda": 2 << 30, "cpu": 1 << 26}
"""Larger than the caches, so that each pass reads memory."""
EDGES = {"cuda": (8192, 16384), "cpu": (256,)}
"""Of square matrix products."""
ROUNDS = 5


@dataclass(frozen=True)
class Work:
    """What one prefill, or the mean decode step, of a model needs."""

    regime: Regime
    tokens: int
    """That one step takes in, of the whole batch."""
    bytes_per_step: float
    """Weights that are used, each once, rows of embeddings, and the cache."""
    flops_per_step: float
    """Of matrix products, convolutions and attention, a multiply-add as two."""


@dataclass(frozen=True)
class Limits:
    """What a device reaches with simple operators."""

    bandwidth_gb_s: float
    tflops: float


def work(model: nn.Module, regime: Regime, batch: int, prompt_tokens: int, new_tokens: int) -> Work:
    """Count what `model`, the original, needs; a decode step at the mean length of the context.

    Experts count by the expected number of distinct ones that the batch's tokens choose. Nothing runs on the model's
    device unless the model's control flow depends on values. Raises KernelgraftError where it cannot be counted.
    """
    read, flops = count(model, regime, batch, prompt_tokens, new_tokens)
    return Work(regime, batch * (prompt_tokens if regime == "prefill" else 1), read, flops)


@functools.cache
def limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure the device, once per process: a read of 2 GiB (CPU: 64 MiB) and large matrix products in `dtype`."""
    return Limits(_bandwidth_gb_s(device), _tflops(device, dtype))


def against(needed: Work, machine_limits: Limits, measured: Side | float) -> Roofline | None:
    """Compare a contender's runs, or the time of one step in ms; None where the runs hold no such time."""
    memory_ms = needed.bytes_per_step / machine_limits.bandwidth_gb_s / 1e6
    compute_ms = needed.flops_per_step / machine_limits.tflops / 1e9
    limit_ms = max(memory_ms, compute_ms)
    step_ms = measured if isinstance(measured, (int, float)) else _step_ms(needed, measured)
    if step_ms is None:
        return None
    return Roofline(
        regime=needed.regime,
        bytes_per_step=needed.bytes_per_step,
        flops_per_step=needed.flops_per_step,
        bandwidth_gb_s=machine_limits.bandwidth_gb_s,
        tflops=machine_limits.tflops,
        limit_ms=limit_ms,
        limit_tokens_per_s=1000 * needed.tokens / limit_ms,
        percent=100 * limit_ms / step_ms,
    )


def _step_ms(needed: Work, side: Side) -> float | None:
    if needed.regime == "prefill":
        return side.ttft_ms.mean
    rate = side.decode_tokens_per_s
    return None if rate is None else 1000 * needed.tokens / rate.mean


def _bandwidth_gb_s(device: torch.device) -> float:
    size = STREAM_BYTES.get(device.type, STREAM_BYTES["cpu"])
    columns = 1 << 13
    data = torch.empty(size // 4 // columns, columns, dtype=torch.float32, device=device).normal_()
    # Which reduction reads fastest depends on the device.
    readers: list[Callable[[], object]] = [data.sum, data.view(torch.int64).sum, data.amax]
    return size / min(_seconds(reader, device) for reader in readers) / 1e9


def _tflops(device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    for edge in EDGES.get(device.type, EDGES["cpu"]):
        left, right = (torch.randn(edge, edge, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
        best = max(best, 2 * edge**3 / _seconds(functools.partial(torch.mm, left, right), device) / 1e12)
    return best


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of one call, without the host's part on a GPU."""
    times = []
    for _ in range(ROUNDS + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            began = machine.clock()
            run()
            times.append(machine.clock() - began)
    return statistics.median(times[1:])
