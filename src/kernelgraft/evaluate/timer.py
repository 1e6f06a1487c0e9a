"""The package's one timer: functions against each other, interleaved, in batches that the clock can resolve.

It does not flush caches and does not draw fresh inputs: a caller who wants either passes functions that do.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft import machine

ROUNDS_AT_LEAST = 5
"""Rounds that are run even when the budget is spent."""
BATCH_CALLS_AT_MOST = 10_000


@dataclass(frozen=True)
class Timing:
    """Times of one call of one function, in µs."""

    median_us: float
    mad_us: float
    """Median absolute deviation of the samples."""
    samples: tuple[float, ...]
    """One a round: mean over the calls of a batch."""

    @property
    def error_us(self) -> float:
        """Standard error of the median, from the MAD as for a normal distribution."""
        return 1.2533 * 1.4826 * self.mad_us / math.sqrt(len(self.samples))


def timing(samples: list[float]) -> Timing:
    """Median and MAD of samples in µs (at least one)."""
    median = statistics.median(samples)
    return Timing(median, statistics.median(abs(s - median) for s in samples), tuple(samples))


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 30,
    warmup: int = 3,
    min_batch_us: float = 200.0,
    budget_s: float | None = None,
    device: str | None = None,
) -> dict[str, Timing]:
    """Time every function in every round, in an order that is shuffled per round, so that drift hits all alike.

    A sample is a batch of calls that takes at least `min_batch_us`; it ends when the device has finished. `device` is
    `cpu` or `cuda`; None means cuda if this process uses it. After `budget_s` seconds (warm-up not counted) no new
    round begins, but five rounds are always run. Garbage collection waits meanwhile.
    """
    on_cuda = (device or ("cuda" if torch.cuda.is_initialized() else "cpu")).startswith("cuda")
    batch_us = _cuda_batch_us if on_cuda else _cpu_batch_us
    calls = {name: _calls(function, batch_us, warmup, min_batch_us) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    shuffle = random.Random().shuffle
    started = machine.clock()
    with _no_collection():
        for done in range(max(1, rounds)):
            if budget_s is not None and done >= ROUNDS_AT_LEAST and machine.clock() - started > budget_s:
                break
            shuffle(order)
            for name in order:
                samples[name].append(batch_us(functions[name], calls[name]) / calls[name])
    return {name: timing(found) for name, found in samples.items()}


def _calls(
    function: Callable[[], Any], batch_us: Callable[[Callable[[], Any], int], float], warmup: int, min_batch_us: float
) -> int:
    """How many calls make a batch; runs the warm-up."""
    for _ in range(max(1, warmup)):
        once_us = batch_us(function, 1)
    return max(1, min(BATCH_CALLS_AT_MOST, math.ceil(min_batch_us / max(once_us, 0.01))))


def _cpu_batch_us(function: Callable[[], Any], calls: int) -> float:
    started = machine.clock()
    for _ in range(calls):
        function()
    return (machine.clock() - started) * 1e6


def _cuda_batch_us(function: Callable[[], Any], calls: int) -> float:
    """The longer of host and device time: a batch that the host cannot feed fast enough is as slow as the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    started = machine.clock()
    start.record()
    for _ in range(calls):
        function()
    host_us = (machine.clock() - started) * 1e6
    end.record()
    torch.cuda.synchronize()
    return max(host_us, start.elapsed_time(end) * 1e3)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
