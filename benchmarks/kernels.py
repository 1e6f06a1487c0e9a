"""Our memory-bound kernels on a GPU against torch, torch.compile, TileGym and Liger, on shapes of real models.

    PYTHONPATH=src python benchmarks/kernels.py --json results.json

Every contestant is checked against float64 before it is timed; one that is wrong or not installed is named and left
out. Device time: replays of a CUDA graph of calls on rotated inputs, all contestants of a case in turn, medians. Host
time: calls without waiting for the device. Bandwidth: bytes that must move (each input read once, each output written
once) by device time, also as a share of what a copy of 1 GiB reaches in the same run. At decode sizes the inputs lie in
the L2 cache, as in a model, where the kernel before has just written them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kernelgraft import machine
from kernelgraft.kernels import act_and_mul as act_module
from kernelgraft.kernels import rope as rope_module
from kernelgraft.kernels import row_plans, rows
from kernelgraft.kernels.act_and_mul import act_and_mul, packed_act_and_mul
from kernelgraft.kernels.add_rms_norm import add_rms_norm
from kernelgraft.kernels.layer_norm import layer_norm
from kernelgraft.kernels.rms_norm import rms_norm
from kernelgraft.kernels.rope import rope

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
BIG = ("llama-3.1-8b", "4x4096", (4, 4096))
"""Every tensor of at least 64 MB."""


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


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def others() -> dict[str, Any]:
    """TileGym and Liger, or why they are not there."""
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            import tilegym.ops
            import tilegym.suites.liger.cutile
            import tilegym.suites.liger.ops

            found["tilegym"] = tilegym
        except Exception as error:  # another project's import on this machine: its message is the result
            found["no tilegym"] = f"{type(error).__name__}: {error}"
        try:
            import liger_kernel.ops.fused_add_rms_norm as add
            import liger_kernel.ops.geglu as geglu
            import liger_kernel.ops.layer_norm as layer
            import liger_kernel.ops.rms_norm as rms
            import liger_kernel.ops.rope as turn
            import liger_kernel.ops.swiglu as swiglu

            found["liger"] = {
                "rms": rms.LigerRMSNormFunction.apply,
                "add": add.LigerFusedAddRMSNormFunction.apply,
                "layer": layer.LigerLayerNormFunction.apply,
                "rope": turn.LigerRopeFunction.apply,
                "silu": swiglu.LigerSiLUMulFunction.apply,
                "gelu_tanh": geglu.LigerGELUMulFunction.apply,
            }
        except Exception as error:
            found["no liger"] = f"{type(error).__name__}: {error}"
    return found


def rms_eager(x: torch.Tensor, weight: torch.Tensor, offset: bool = False) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + weight.float())).to(x.dtype) if offset else weight * normed.to(x.dtype)


def rms_exact(x: torch.Tensor, weight: torch.Tensor, offset: bool = False) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (weight.double() + float(offset))


def rope_eager(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return (q * cos) + (turned(q) * sin), (k * cos) + (turned(k) * sin)


def norm_cases(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Iterator[Case]:
    tilegym, liger = peers.get("tilegym"), peers.get("liger")
    offset, cast = model.offset, "after_weight" if model.offset else "before_weight"
    shapes = {"rms_norm": (batch, length, model.hidden)}
    if model.head_norm:
        shapes["rms_norm heads"] = (batch, length, model.heads, model.head_dim)
    for label, shape in shapes.items():
        width = shape[-1]
        contestants: dict[str, Run] = {
            "kernelgraft": lambda x, w: rms_norm(x, w, EPS, offset=offset, cast=cast),
            "torch": lambda x, w: rms_eager(x, w, offset),
        }
        if not offset:
            contestants["torch fused"] = lambda x, w, width=width: functional.rms_norm(x, (width,), w, EPS)
        if tilegym:
            contestants["tilegym"] = lambda x, w, width=width: tilegym.ops.rms_norm(
                x, (width,), w, EPS, offset=float(offset)
            )
        if liger:
            mode = "gemma" if offset else "llama"
            contestants["liger"] = lambda x, w, mode=mode: liger["rms"](x, w, EPS, float(offset), mode, False)
        yield Case(
            label,
            name,
            regime,
            lambda shape=shape: (drawn(*shape), drawn(shape[-1])),
            lambda x, w: rms_exact(x, w, offset),
            contestants,
            2 * math.prod(shape),
        )
    shape = shapes["rms_norm"]
    contestants = {
        "kernelgraft": lambda r, x, w: add_rms_norm(r, x, w, EPS, offset=offset, cast=cast),
        "torch": lambda r, x, w: ((total := r + x), rms_eager(total, w, offset)),
    }
    if not offset:
        contestants["torch fused"] = lambda r, x, w: (
            (total := r + x),
            functional.rms_norm(total, (total.shape[-1],), w, EPS),
        )
    mode = "gemma" if offset else "llama"
    if tilegym:
        contestants["tilegym"] = lambda r, x, w: reversed_pair(
            tilegym.suites.liger.ops.fused_add_rms_norm(x, r, w, EPS, float(offset), mode)
        )
    if liger:
        contestants["liger"] = lambda r, x, w: reversed_pair(liger["add"](x, r, w, EPS, float(offset), mode, False))
    yield Case(
        "add_rms_norm",
        name,
        regime,
        lambda: (drawn(*shape), drawn(*shape), drawn(shape[-1])),
        lambda r, x, w: (r + x, rms_exact(r + x, w, offset)),
        contestants,
        4 * math.prod(shape),
    )


def reversed_pair(pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[1], pair[0]


def layer_case(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Case:
    shape = (batch, length, model.hidden)
    contestants: dict[str, Run] = {
        "kernelgraft": lambda x, w, b: layer_norm(x, w, b, EPS),
        "torch fused": lambda x, w, b: functional.layer_norm(x, (x.shape[-1],), w, b, EPS),
    }
    if tilegym := peers.get("tilegym"):
        contestants["tilegym"] = lambda x, w, b: tilegym.ops.layer_norm_legacy(x, (x.shape[-1],), w, b, EPS)
    if liger := peers.get("liger"):
        contestants["liger"] = lambda x, w, b: liger["layer"](x, w, b, EPS)
    return Case(
        "layer_norm",
        name,
        regime,
        lambda: (drawn(*shape), drawn(shape[-1]), drawn(shape[-1])),
        lambda x, w, b: functional.layer_norm(x.double(), (x.shape[-1],), w.double(), b.double(), EPS),
        contestants,
        2 * math.prod(shape),
    )


def act_case(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Case:
    act, width = model.activation, model.intermediate
    function = act_module.ACTIVATIONS[act]
    tilegym, liger = peers.get("tilegym"), peers.get("liger")
    if model.packed:
        contestants: dict[str, Run] = {
            "kernelgraft": lambda x: packed_act_and_mul(x, act),
            "torch": lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        }
        if tilegym and act == "silu":
            contestants["tilegym"] = lambda x: tilegym.ops.silu_and_mul(x)
        if liger:
            contestants["liger"] = lambda x: liger[act](*(t.contiguous() for t in x.chunk(2, -1)))

        def exact(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.double().chunk(2, -1)
            return function(gate) * up

        make: Callable[[], tuple[torch.Tensor, ...]] = lambda: (drawn(batch, length, 2 * width),)  # noqa: E731
    else:
        contestants = {
            "kernelgraft": lambda g, u: act_and_mul(g, u, act),
            "torch": lambda g, u: function(g) * u,
        }
        if tilegym and act == "silu":
            swiglu = tilegym.ops.get_swiglu()
            contestants["tilegym"] = lambda g, u: swiglu(g, u)
        if liger:
            contestants["liger"] = lambda g, u: liger[act](g, u)

        def exact(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return function(g.double()) * u.double()

        make = lambda: (drawn(batch, length, width), drawn(batch, length, width))  # noqa: E731
    return Case("act_and_mul", name, regime, make, exact, contestants, 2 * batch * length * width)


def rope_case(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        q = drawn(batch, length, model.heads, model.head_dim).transpose(1, 2)
        k = drawn(batch, length, model.kv_heads, model.head_dim).transpose(1, 2)
        angles = torch.rand(1, length, model.head_dim // 2, device="cuda") * 6.28
        angles = torch.cat((angles, angles), -1)
        return q, k, angles.cos().to(BF16), angles.sin().to(BF16)

    contestants: dict[str, Run] = {
        "kernelgraft": rope,
        "kernelgraft float32": lambda q, k, cos, sin: rope(q, k, cos, sin, compute="float32"),
        "torch": rope_eager,
    }
    if tilegym := peers.get("tilegym"):
        contestants["tilegym"] = lambda q, k, cos, sin: tilegym.ops.apply_rope_base(q, k, cos, sin)
    if liger := peers.get("liger"):
        contestants["liger"] = liger["rope"]
    elements = batch * length * (model.heads + model.kv_heads) * model.head_dim
    return Case(
        "rope",
        name,
        regime,
        make,
        lambda *inputs: rope_eager(*(t.double() for t in inputs)),
        contestants,
        2 * elements,
        frozenset({"tilegym", "liger"}),
    )


def cases(peers: dict[str, Any], models: list[str]) -> Iterator[Case]:
    places = [(m, r, s) for m in models for r, s in REGIMES.items()]
    for name, regime, (batch, length) in [*places, *([BIG] if BIG[0] in models else [])]:
        model = MODELS[name]
        yield from norm_cases(name, model, regime, batch, length, peers)
        yield act_case(name, model, regime, batch, length, peers)
        yield rope_case(name, model, regime, batch, length, peers)
        if name in ("llama-3.2-1b", "llama-3.1-8b"):
            yield layer_case(name, model, regime, batch, length, peers)


# Checking and timing


def wrong(case: Case, run: Run) -> str | None:
    """Why a contestant's results are not right; None if they are. They may be at most 4 bfloat16 roundings off."""
    inputs = case.make()
    expected = as_tuple(case.exact(*inputs))
    found = as_tuple(run(*(t.clone() for t in inputs)))
    torch.cuda.synchronize()
    for actual, wanted in zip(found, expected, strict=True):
        if actual.shape != wanted.shape:
            return f"shape {tuple(actual.shape)}"
        wanted = wanted.double()
        distance = (actual.double() - wanted).abs()
        allowed = 4 * 2**-8 * (wanted.abs() + wanted.pow(2).mean().sqrt())
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
                reason = wrong(case, run)
                if reason is None:
                    replays[name] = Replay(run, sets, calls)
        except Exception as error:  # a contestant that cannot run here: the message is its result
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
            torch.cuda.synchronize()
        line["wrong"] = reason
    times: dict[str, list[float]] = {name: [] for name in replays}
    hosts: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(replay.time())
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
        }
    return list(lines.values())


def copy_bandwidth() -> float:
    """GB/s of a copy of 1 GiB, reads and writes counted: the driver's or an elementwise kernel's, the faster one."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    runs: list[Run] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    replays = [Replay(run, [()], 10) for run in runs]
    return 2**31 / min(statistics.median(replay.time() for _ in range(7)) for replay in replays) / 1e3


def launch_cost() -> dict[str, float]:
    """Host time of `ct.launch` alone and of torch's own fused norm, µs, beside which ours are to be read."""
    import cuda.tile as ct

    from kernelgraft.kernels.rms_norm import rms_norm_kernel

    x, weight = drawn(1, 1, 4096), drawn(4096)
    y = torch.empty_like(x)
    norm = row_plans.Norm(rms_norm_kernel, EPS, (True, False, False, rows.TO_INPUT, False), (BF16,))
    chosen = row_plans.plan(norm, x.shape, 0)
    stream, args = torch.cuda.current_stream().cuda_stream, (x, y, weight, *chosen.constants)
    q, k = drawn(1, 1, 32, 128).transpose(1, 2), drawn(1, 1, 8, 128).transpose(1, 2)
    cos, sin, gate = drawn(1, 1, 128), drawn(1, 1, 128), drawn(1, 1, 14336)
    heads, head_weight = drawn(1, 1, 32, 128), drawn(128)
    runs: dict[str, Run] = {
        "ct.launch": lambda: ct.launch(stream, chosen.grid, chosen.kernel, args),
        "rms_norm": lambda: rms_norm(x, weight, EPS, cast="before_weight"),
        "rms_norm custom op": lambda: torch.ops.kernelgraft.rms_norm(
            x, weight, EPS, False, "before_weight", False, False
        ),
        "rms_norm of heads": lambda: rms_norm(heads, head_weight, EPS, cast="before_weight"),
        "add_rms_norm": lambda: add_rms_norm(x, x, weight, EPS, cast="before_weight"),
        "layer_norm": lambda: layer_norm(x, weight, weight, EPS),
        "act_and_mul": lambda: act_and_mul(gate, gate),
        "rope": lambda: rope(q, k, cos, sin),
        "torch fused rms_norm": lambda: functional.rms_norm(x, (4096,), weight, EPS),
        "torch empty_like": lambda: torch.empty_like(x),
    }
    with torch.no_grad():
        for run in runs.values():
            run()
        return {name: statistics.median(host_time(run, (), 500) for _ in range(9)) for name, run in runs.items()}


# Settings


def forget() -> None:
    """Empty the caches of launch plans."""
    from kernelgraft.kernels import add_rms_norm as add_module
    from kernelgraft.kernels import layer_norm as layer_module
    from kernelgraft.kernels import rms_norm as rms_module

    row_plans.plan.cache_clear()
    for module in (rms_module, add_module, layer_module, act_module, rope_module):
        module._call.cache_clear()
    for module in (act_module, rope_module):
        module._plan.cache_clear()


@contextlib.contextmanager
def setting(module: Any, **changes: Any) -> Iterator[None]:
    """The module's `SMALL` and `LARGE` with changes; plans are forgotten before and after."""
    before = module.SMALL, module.LARGE
    module.SMALL, module.LARGE = (dataclasses.replace(tuning, **changes) for tuning in before)
    forget()
    try:
        yield
    finally:
        module.SMALL, module.LARGE = before
        forget()


def sweep(copy_gbps: float, until: float) -> list[dict[str, Any]]:
    """Device times of our kernels under other settings, one at a time and in some pairs."""
    changes: list[dict[str, Any]] = [{}, {"tma": False}, {"tma": True}]
    changes += [{"elements": n} for n in (256, 512, 1024, 2048, 4096)]
    changes += [{"occupancy": n} for n in (None, 2, 4, 8)] + [{"worker_warps": n} for n in (None, 4, 8)]
    changes += [{"blocks": n} for n in (None, 4, 8)]
    wanted = [
        ("rms_norm", "llama-3.1-8b", "decode", row_plans),
        ("add_rms_norm", "llama-3.1-8b", "prefill4096", row_plans),
        ("rms_norm heads", "qwen3-0.6b", "batch32", row_plans),
        ("rope", "qwen3-0.6b", "prefill4096", rope_module),
        ("rope", "llama-3.1-8b", "decode", rope_module),
        ("act_and_mul", "llama-3.1-8b", "prefill4096", act_module),
        ("act_and_mul", "phi-3-mini", "prefill4096", act_module),
    ]
    known = {(c.kernel, c.model, c.regime): c for c in cases({}, list(MODELS))}
    found = []
    for kernel, model, regime, module in wanted:
        case = known[kernel, model, regime]
        case.contestants = {"kernelgraft": case.contestants["kernelgraft"]}
        for change in changes:
            if machine.clock() > until:
                return found
            with setting(module, **change):
                (line,) = measure(case, 9, False, copy_gbps)
            found.append({**line, "setting": change})
        torch.cuda.empty_cache()
    return found


def show(lines: list[dict[str, Any]]) -> None:
    """A table: one line a case, device and host µs of each contestant."""
    for (kernel, model, regime), group in itertools.groupby(
        lines, key=lambda e: (e["kernel"], e["model"], e["regime"])
    ):
        parts = []
        for line in group:
            if "device_us" in line:
                share = f" {line['of_copy']:.0%}" if line["bytes"] > 32e6 else ""
                parts.append(f"{line['who']} {line['device_us']:.1f}/{line['host_us']:.1f}{share}")
            else:
                parts.append(f"{line['who']} WRONG ({line['wrong']})"[:60])
        print(f"{kernel:15s} {model:13s} {regime:12s} {' | '.join(parts)}")


def main(argv: list[str] | None = None) -> int:
    """Run; the exit code says whether ours were right everywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--compile", nargs="*", default=[], choices=list(MODELS), help="models with torch.compile too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which no further case is begun")
    parser.add_argument("--sweep", type=float, default=0.0, help="seconds for other settings of our kernels")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    begin = machine.clock()
    peers = others()
    copy_gbps = copy_bandwidth()
    result: dict[str, Any] = {
        "machine": machine.read().model_dump(mode="json"),
        "time": machine.timestamp(),
        "copy_gbps": copy_gbps,
        "missing": {name: why for name, why in peers.items() if name.startswith("no ")},
        "launch_us": launch_cost(),
        "cases": [],
        "skipped": [],
        "settings": [],
    }

    def save() -> None:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    with torch.no_grad():
        for case in cases(peers, options.models):
            if machine.clock() - begin > options.budget:
                result["skipped"].append([case.kernel, case.model, case.regime])
                continue
            result["cases"] += measure(case, options.rounds, case.model in options.compile, copy_gbps)
            torch.cuda.empty_cache()
            save()
        if options.sweep:
            result["settings"] = sweep(copy_gbps, machine.clock() + options.sweep)
    save()
    for line in result["settings"]:
        where = f"{line['kernel']:15s} {line['model']:13s} {line['regime']:12s}"
        print(where, f"{line.get('device_us', -1):9.2f} {line['setting']} {line['wrong'] or ''}")
    show(result["cases"])
    print(f"copy {copy_gbps:.0f} GB/s; host µs: {', '.join(f'{k} {v:.1f}' for k, v in result['launch_us'].items())}")
    for name, why in result["missing"].items():
        print(f"{name}: {why}")
    print(f"{len(result['skipped'])} cases skipped for time; {machine.clock() - begin:.0f} s")
    return int(any(line["who"] == "kernelgraft" and line["wrong"] for line in result["cases"]))


if __name__ == "__main__":
    sys.exit(main())
