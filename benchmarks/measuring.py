"""Checks and times contestants of one compute on a GPU, for `kernels.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from kernelgraft import machine

Run = Callable[..., Any]
BF16 = torch.bfloat16
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model that matter here."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    activation: str = "silu"
    offset: bool = False
    packed: bool = False
    head_norm: bool = False


MODELS = {
    "llama-3.1-8b": Model(4096, 32, 8, 128, 14336),
    "llama-3.2-1b": Model(2048, 32, 8, 64, 8192),
    "qwen3-0.6b": Model(1024, 16, 8, 128, 3072, head_norm=True),
    "gemma-3-4b": Model(2560, 8, 4, 256, 10240, activation="gelu_tanh", offset=True),
    "phi-3-mini": Model(3072, 32, 32, 96, 8192, packed=True),
}
REGIMES = {"decode": (1, 1), "batch32": (32, 1), "prefill4096": (1, 4096)}


@dataclasses.dataclass
class Case:
    """One compute at one shape: how to make its inputs, what must come out, who takes part."""

    kernel: str
    model: str
    regime: str
    make: Callable[[], tuple[torch.Tensor, ...]]
    exact: Run
    contestants: dict[str, Run]
    outputs: int
    """Bytes written."""
    in_place: frozenset[str] = frozenset()
    """Contestants that overwrite their inputs."""
    roundings: float = 4.0
    """bfloat16 roundings that a result may be off; more where several steps round one after the other."""
    flops: float = 0.0
    """Floating-point operations of a call, where they are what limits it."""
    random: frozenset[str] = frozenset()
    """Contestants that draw by themselves: only the shape of their results is checked."""
    peak: bool = False
    """Whether the memory that a call takes at most is of interest, too."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def wrong(case: Case, run: Run, checked: bool = True) -> str | None:
    """Why a contestant's results are not right; None if they are, or have the right shape if that is all there is."""
    inputs = case.make()
    expected = as_tuple(case.exact(*inputs))
    found = as_tuple(run(*(t.clone() for t in inputs)))
    torch.cuda.synchronize()
    for actual, wanted in zip(found, expected, strict=True):
        if actual.shape != wanted.shape:
            return f"shape {tuple(actual.shape)}"
        if checked and not actual.is_floating_point():
            if not torch.equal(actual.long(), wanted.long()):
                return f"{int((actual != wanted).sum())} of {wanted.numel()} differ"
            continue
        if not checked:
            continue
        wanted = wanted.double()
        distance = (actual.double() - wanted).abs()
        allowed = case.roundings * 2**-8 * (wanted.abs() + wanted.pow(2).mean().sqrt())
        ratio = float((distance / allowed).nan_to_num(math.inf).max())
        if ratio > 1:
            return f"{ratio:.3g} times the allowed error"
    return None


def read_bytes(inputs: tuple[torch.Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in inputs)


class Replay:
    """A CUDA graph of calls of one contestant on rotated inputs."""

    def __init__(self, run: Run, sets: list[tuple[torch.Tensor, ...]], calls: int) -> None:
        self.calls = calls
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for inputs in sets[:2]:
                run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for _, inputs in zip(range(calls), itertools.cycle(sets), strict=False):
                run(*inputs)

    def time(self) -> float:
        """µs a call."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


def host_time(run: Run, inputs: tuple[torch.Tensor, ...], calls: int = 60) -> float:
    """µs a call until it returns, the device being far behind or done."""
    torch.cuda.synchronize()
    begin = machine.clock()
    for _ in range(calls):
        run(*inputs)
    elapsed = machine.clock() - begin
    torch.cuda.synchronize()
    return elapsed * 1e6 / calls


def measure(case: Case, rounds: int, compiled: bool, copy_gbps: float) -> list[dict[str, Any]]:
    """Check and time all contestants of a case."""
    runs = dict(case.contestants)
    if compiled:
        torch._dynamo.reset()
        runs["torch.compile"] = torch.compile(case.contestants.get("torch", case.exact), dynamic=False)
    first = case.make()
    size = read_bytes(first)
    moved = size + case.outputs
    count = max(2, min(16, math.ceil(256e6 / size)))
    sets = [first, *(case.make() for _ in range(count - 1))]
    calls = max(2 * count, min(64, int(40e9 / moved))) if moved < 1e9 else count
    replays: dict[str, Replay] = {}
    lines: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        line: dict[str, Any] = {"kernel": case.kernel, "model": case.model, "regime": case.regime, "who": name}
        lines[name] = line
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                reason = wrong(case, run, name not in case.random)
                if reason is None and case.peak:
                    line["peak_bytes"] = peak_bytes(run, first)
                if reason is None:
                    replays[name] = Replay(run, sets, calls)
        except Exception as error:  # a contestant that cannot run here: the message is its result
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            torch.cuda.synchronize()
        line["wrong"] = reason
    copies = copies_of(moved, calls) if moved >= COPIED and case.flops < INTENSE * moved else []
    times: dict[str, list[float]] = {name: [] for name in replays}
    hosts: dict[str, list[float]] = {name: [] for name in replays}
    copied: list[list[float]] = [[] for _ in copies]
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(replay.time())
        for found, replay in zip(copied, copies, strict=True):
            found.append(replay.time())
    copy_us = min((statistics.median(found) for found in copied), default=None)
    for _ in range(3):
        for name in replays:
            hosts[name].append(host_time(runs[name], first))
    for name in replays:
        device = statistics.median(times[name])
        gbps = moved / device / 1e3
        lines[name] |= {
            "device_us": device,
            "device_spread_us": max(times[name]) - min(times[name]),
            "host_us": statistics.median(hosts[name]),
            "bytes": moved,
            "gbps": gbps,
            "of_copy": gbps / copy_gbps,
            "copy_us": copy_us,
            "of_same_copy": copy_us / device if copy_us else None,
            "tflops": case.flops / device / 1e6 or None,
        }
    return list(lines.values())


COPIED, INTENSE = 16e6, 50
"""Beside calls that move so many bytes, and do fewer operations for each, a copy of the same size is timed."""


def copies_of(moved: int, calls: int) -> list[Replay]:
    """Copies that read half as many bytes and write the other half: the driver's and an elementwise kernel's.

    They rotate over as many pairs of tensors as it takes not to find any in a cache.
    """
    count = max(2, min(16, math.ceil(256e6 / moved)))
    sets = [tuple(torch.zeros(moved // 4, device="cuda", dtype=BF16) for _ in range(2)) for _ in range(count)]
    runs: list[Run] = [lambda x, y: y.copy_(x), lambda x, y: torch.neg(x, out=y)]
    return [Replay(run, sets, max(count, min(calls, 32))) for run in runs]


def peak_bytes(run: Run, inputs: tuple[torch.Tensor, ...]) -> int:
    """Memory that a call takes at most, results included, beyond what was taken before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth() -> float:
    """GB/s of a copy of 1 GiB, reads and writes counted: the driver's or an elementwise kernel's, the faster one."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    runs: list[Run] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    replays = [Replay(run, [()], 10) for run in runs]
    return 2**31 / min(statistics.median(replay.time() for _ in range(7)) for replay in replays) / 1e3
