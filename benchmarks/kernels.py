"""Our kernels on a GPU against torch, torch.compile, TileGym and Liger, on shapes of real models.

    PYTHONPATH=src python benchmarks/kernels.py --json results.json

Every contestant is checked against float64 before it is timed; one that is wrong or not installed is named and left
out. Device time: replays of a CUDA graph of calls on rotated inputs, all contestants of a case in turn, medians. Host
time: calls without waiting for the device. Bandwidth: bytes that must move (each input read once, each output written
once) by device time, also as a share of what a copy of 1 GiB reaches in the same run. At decode sizes activations lie
in the L2 cache, as in a model, where the kernel before has just written them; weights and cached keys do not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import matrix_cases
import memory_cases
import torch
from measuring import EPS, MODELS, REGIMES, Case, Run, copy_bandwidth, drawn, host_time, measure
from memory_cases import BIG
from merging import key as case_key
from merging import merged, rank, settled
from torch.nn import functional

from kernelgraft import machine
from kernelgraft.cutile.plans import Plan

LAUNCHERS = (
    *("row_plans", "rms_norm", "add_rms_norm", "act_and_mul", "rope", "qk_norm_rope", "linear_decode"),
    *("attention_decode", "argmax", "sampling"),
)
"""Modules of `kernelgraft.kernels` that launch."""


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
            import liger_kernel.ops.fused_linear_cross_entropy as entropy
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
                "cross_entropy": entropy.LigerFusedLinearCrossEntropyFunction.apply,
            }
        except Exception as error:
            found["no liger"] = f"{type(error).__name__}: {error}"
    return found


def cases(peers: dict[str, Any], models: list[str]) -> Iterator[Case]:
    """All cases, those of one model and regime together."""
    yield from matrix_cases.long_caches(peers)
    places = [(m, r, s) for m in models for r, s in REGIMES.items()]
    for name, regime, (batch, length) in [*places, *([BIG] if BIG[0] in models else [])]:
        yield from memory_cases.cases(name, regime, batch, length, peers)
        if regime in REGIMES:
            yield from matrix_cases.cases(name, regime, batch, length, peers)


# What a call costs on the host


def launch_cost() -> list[dict[str, Any]]:
    """Host time of our ops at decode size beside that of their `ct.launch`es alone, same arguments; µs, medians."""
    import cuda.tile as ct

    found = []
    for name, run in calls().items():
        stream = torch.cuda.current_stream().cuda_stream
        launches = [(stream, plan.grid, plan.kernel, (*tensors, *plan.constants)) for plan, tensors in launched(run)]

        def alone(launches: list[tuple[Any, ...]] = launches) -> None:
            for launch in launches:
                ct.launch(*launch)

        times = {"launch_us": alone, "op_us": run}
        medians: dict[str, list[float]] = {key: [] for key in times}
        for _ in range(11):
            for key, function in times.items():
                medians[key].append(host_time(function, (), 300))
        line = {
            "kernel": name,
            "launches": len(launches),
            **{key: statistics.median(values) for key, values in medians.items()},
        }
        found.append(line | {"ratio": line["op_us"] / line["launch_us"]})
    x, weight = drawn(1, 1, 4096), drawn(4096)
    square = drawn(1024, 4096)
    for name, run in {
        "torch F.rms_norm": lambda: functional.rms_norm(x, (4096,), weight, EPS),
        "torch F.linear": lambda: functional.linear(x, square),
        "torch F.silu": lambda: functional.silu(x),
        "torch.empty_like": lambda: torch.empty_like(x),
    }.items():
        run()
        found.append({"kernel": name, "op_us": statistics.median(host_time(run, (), 300) for _ in range(11))})
    return found


def calls() -> dict[str, Run]:
    """Our ops at decode size."""
    from kernelgraft.kernels.act_and_mul import act_and_mul
    from kernelgraft.kernels.add_rms_norm import add_rms_norm
    from kernelgraft.kernels.layer_norm import layer_norm
    from kernelgraft.kernels.rms_norm import rms_norm
    from kernelgraft.kernels.rope import rope

    x, weight, gate = drawn(1, 1, 4096), drawn(4096), drawn(1, 1, 14336)
    q, k = drawn(1, 1, 32, 128).transpose(1, 2), drawn(1, 1, 8, 128).transpose(1, 2)
    cos, sin = drawn(1, 1, 128), drawn(1, 1, 128)
    found: dict[str, Run] = {
        "rms_norm": lambda: rms_norm(x, weight, EPS, cast="before_weight"),
        "add_rms_norm": lambda: add_rms_norm(x, x, weight, EPS, cast="before_weight"),
        "layer_norm": lambda: layer_norm(x, weight, weight, EPS),
        "act_and_mul": lambda: act_and_mul(gate, gate),
        "rope": lambda: rope(q, k, cos, sin),
    }
    return found | matrix_cases.calls()


def launched(run: Run) -> list[tuple[Plan, tuple[torch.Tensor, ...]]]:
    """The launches of a call."""
    modules = [import_module(f"kernelgraft.kernels.{name}") for name in LAUNCHERS]
    kept: list[tuple[Plan, tuple[torch.Tensor, ...]]] = []
    real = {module: module.fire for module in modules}

    def keep(plan: Plan, tensors: tuple[torch.Tensor, ...]) -> None:
        kept.append((plan, tensors))
        next(iter(real.values()))(plan, tensors)

    try:
        for module in modules:
            module.fire = keep
        run()
    finally:
        for module, fire in real.items():
            module.fire = fire
    return kept


# Results


def shown(lines: list[dict[str, Any]]) -> Iterator[str]:
    """One line a case: device and host µs of each contestant, and ours beside a copy of the same size."""
    for (kernel, model, regime), group in itertools.groupby(lines, key=case_key):
        parts = []
        for line in group:
            if line.get("device_us") is not None:
                share = f" {line['of_copy']:.0%}" if line["bytes"] > 32e6 else ""
                share += f" ({line['of_same_copy']:.0%})" if line.get("of_same_copy") else ""
                share += f" {line['peak_bytes'] / 2**20:.0f} MiB" if line.get("peak_bytes") is not None else ""
                parts.append(f"{line['who']} {line['device_us']:.1f}/{line['host_us']:.1f}{share}")
            else:
                parts.append(f"{line['who']} WRONG ({line['wrong']})"[:60])
        yield f"{kernel:15s} {model:13s} {regime:12s} {' | '.join(parts)}"


def main(argv: list[str] | None = None) -> int:
    """Run; the exit code says whether ours were right everywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--merge", type=Path, help="an earlier result: what it lacks is run first, what it has is kept")
    parser.add_argument("--again", nargs="*", default=[], help="with --merge: kernels that are run first all the same")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kernels", nargs="*", help="only these")
    parser.add_argument("--compile", nargs="*", default=[], choices=list(MODELS), help="models with torch.compile too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds after which no further case is begun")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    begin = machine.clock()
    before = json.loads(options.merge.read_text()) if options.merge else {}
    peers = others()
    copy_gbps = copy_bandwidth()
    with torch.no_grad():
        costs = launch_cost()
    result: dict[str, Any] = {
        "machine": machine.read().model_dump(mode="json"),
        "time": machine.timestamp(),
        "copy_gbps": copy_gbps,
        "missing": {name: why for name, why in peers.items() if name.startswith("no ")},
        "launch": costs,
        "cases": [],
        "skipped": [],
    }

    def save() -> None:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(merged(before, result) if before else result, indent=1) + "\n")

    with torch.no_grad():
        known = settled(before)
        listed = [
            case for case in cases(peers, options.models) if not options.kernels or case.kernel in options.kernels
        ]
        if before:
            listed.sort(key=lambda case: rank((case.kernel, case.model, case.regime), known, options.again))
        print(f"{len(listed)} cases; ready after {machine.clock() - begin:.0f} s", flush=True)
        for number, case in enumerate(listed):
            if machine.clock() - begin > options.budget:
                result["skipped"].append([case.kernel, case.model, case.regime])
                continue
            result["cases"] += measure(case, options.rounds, case.model in options.compile, copy_gbps)
            torch.cuda.empty_cache()
            save()
            took = f"{machine.clock() - begin:5.0f} s {number + 1}/{len(listed)}"
            for text in shown(
                [line for line in result["cases"] if case_key(line) == (case.kernel, case.model, case.regime)]
            ):
                print(took, text, flush=True)
    save()
    print(f"copy {copy_gbps:.0f} GB/s; host µs:")
    for line in costs:
        alone = f" ct.launch {line['launch_us']:.1f} ratio {line['ratio']:.2f}" if "ratio" in line else ""
        print(f"  {line['kernel']} {line['op_us']:.1f}{alone}")
    for name, why in result["missing"].items():
        print(f"{name}: {why}")
    print(f"{len(result['skipped'])} cases skipped for time; {machine.clock() - begin:.0f} s")
    return int(any(line["who"] == "kernelgraft" and line["wrong"] for line in result["cases"]))


if __name__ == "__main__":
    sys.exit(main())
