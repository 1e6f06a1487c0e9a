"""A graft against the package that is exported from it, loaded through transformers' own KernelConfig.

    python benchmarks/hub_package.py [--json FILE]                     # a GPU, transformers 5.22.2, kernels 0.17.2
    KERNELGRAFT_INTERPRET=1 python benchmarks/hub_package.py --device cpu --layers 2 --hidden 128 --seconds 1

A llama-shaped model with random weights is loaded plain, with a graft of our norms and gated products, from the package
through KernelConfig, and from it through `kernelgraft.from_pretrained`: the same logits, the same tokens, how often our
kernels ran, and times of decoding and prefill, measured in turns in one process. With `--attention` both have our
attention too, and the package q, k and v in one linear; rounding may then part the tokens. On a CPU, which KernelConfig
refuses, "cpu" is added to its devices.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# `kernels.py` beside this file is not the package `kernels`, which transformers imports.
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]

REPO = "owner/llama-kernels"
WANTED = {("module", "LlamaRMSNorm"), ("module", "LlamaMLP"), ("attention", "LlamaAttention")}
"""Kinds and classes of the sites that are looked at: the others would only cost time."""
CLOSE = 0.05
"""Relative difference of bfloat16 logits up to which attention may round otherwise."""
ACCEPTED = 0.97
"""The least speed of the package over that of the graft."""


def save_model(folder: Path, args: argparse.Namespace) -> None:
    """Write a model with random weights, norms not 1."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = max(args.hidden // 64, 2)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or 4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=args.hidden // heads,
        vocab_size=args.vocabulary,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)


def make_graft(model: Any, inventory: Any, attention: bool) -> Any:
    """A graft with our kernels seated everywhere in norms and gated products, and in attention if that is wanted."""
    from kernelgraft import families, identity, machine, models, suppliers
    from kernelgraft.pipeline import researching
    from kernelgraft.records import Graft, Patch, Seat
    from kernelgraft.suppliers.base import Refusal

    discover = researching.discover
    researching.discover = lambda *a, **k: [
        site for site in discover(*a, **k) if (site.kind, site.class_name.rpartition(".")[2]) in WANTED
    ]
    try:
        _, computes = researching.research(models.wrap(model, name="llama-random"), inventory)
    finally:
        researching.discover = discover
    (supplier,) = suppliers.select(["kernelgraft"])
    card = machine.read()
    patches: list[Patch] = []
    solutions: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for compute in computes:
        if compute.family == "attention" and not attention:
            continue
        chosen = {}
        for definition in compute.definitions:
            found = supplier.candidates(definition, card)
            if isinstance(found, Refusal):
                raise SystemExit(f"{definition.name}: {found.reason}")
            chosen[definition.name] = found[0]
            inventory.save_solution(found[0])
        definitions |= {definition.name: definition for definition in compute.definitions}
        solutions |= {solution.name: solution for solution in chosen.values()}
        work = families.get(compute.family).work
        seats = tuple(
            Seat(
                definition=bound.definition.name,
                regime=bound.call.regime,
                work=work(bound.inputs),
                solution=chosen[bound.definition.name].name,
                seated=True,
            )
            for bound in compute.bound
        )
        patches.append(
            Patch(
                family=compute.family,
                sites=tuple(compute.sites),
                semantics=compute.semantics,
                definitions=tuple(d.name for d in compute.definitions),
                status="accepted",
                seats=seats,
            )
        )
    return Graft(
        model=identity.model_card(model, "llama-random"),
        machine=card,
        policy="verified",
        patches=tuple(patches),
        definitions=definitions,
        solutions=solutions,
        evaluations=(),
    )


def load_contenders(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The model in four ways. KernelConfig comes last: what it does to the process is never undone."""
    import transformers.utils.kernel_config as kernel_config
    from transformers import AutoModelForCausalLM, KernelConfig

    import kernelgraft
    from kernelgraft import emit
    from kernelgraft.store import Inventory

    folder, package = scratch / "model", scratch / "package"
    save_model(folder, args)

    def load(**more: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=args.device, **more)
        return model.eval()

    plain, grafted = load(), load()
    inventory = Inventory(scratch / "inventory")
    graft = make_graft(grafted, inventory, args.attention)
    emit.export(graft, format="hub", dest=package, repo=REPO, inventory=inventory, config=grafted.config)
    kernelgraft.apply(graft, grafted)
    entries = json.loads((package / "kernels.json").read_text())
    values = {key if isinstance(key, str) else tuple(map(tuple, key)): value for key, (value, _) in entries}
    print("\n".join(f"{key} → {value}" for key, value in values.items()))
    here = {key: f"{package}:{value.partition(':')[2]}" for key, value in values.items()}
    ours = kernelgraft.from_pretrained(
        AutoModelForCausalLM, folder, kernels=here, dtype=torch.bfloat16, device_map=args.device, check=False
    )
    os.environ |= {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"{REPO}={package}"}
    if args.device == "cpu":
        kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
    mapping = {key: (value, {"revision": "local"}) for key, value in values.items()}
    theirs = load(use_kernels=True, kernel_config=KernelConfig(mapping, inherit_mapping=False))
    return {"plain": plain, "graft": grafted, "package": theirs, "package through kernelgraft": ours.eval()}


def compare(contenders: dict[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    """Logits and greedy tokens against the plain model's, and the launches of our kernels."""
    from kernelgraft.kernels import act_and_mul, attention_decode, rms_norm

    counts: collections.Counter[str] = collections.Counter()
    originals = {module: module._run for module in (rms_norm, act_and_mul, attention_decode)}

    def counted(module: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[module.__name__.rpartition(".")[2]] += 1
            return originals[module](*args, **kwargs)

        return run

    found: dict[str, Any] = {}
    want: Any = None
    tokens: Any = None
    try:
        for module in originals:
            module._run = counted(module)  # type: ignore[attr-defined]
        for name, model in contenders.items():
            counts.clear()
            logits = model(ids).logits.float()
            made = model.generate(ids, max_new_tokens=24, do_sample=False)[:, ids.shape[1] :]
            want, tokens = (logits, made) if want is None else (want, tokens)
            found[name] = {
                "relative_difference": float((logits - want).norm() / want.norm()),
                "tokens_equal": bool(torch.equal(made, tokens)),
                "launches": dict(counts),
            }
    finally:
        for module, run in originals.items():
            module._run = run  # type: ignore[attr-defined]
    return found


def decode(model: Any, ids: torch.Tensor, batch: int, steps: int) -> float:
    """Milliseconds a greedy step from a cache of 16 tokens, on the host's clock."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    rows = ids[:, :16].repeat(batch, 1)
    token = model(rows, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    def run() -> None:
        nonlocal token
        for _ in range(steps):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    return timed(run, model.device) / steps


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one run, the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    before = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - before) * 1e3


def measure(contenders: dict[str, Any], run: Callable[[Any], float], seconds: float) -> dict[str, Any]:
    """Medians of rounds in which all take turns, the order changing."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for model in contenders.values():
        run(model)
    stop, turn = time.time() + seconds, 0
    while time.time() < stop or turn < 3:
        order = collections.deque(contenders)
        order.rotate(turn)
        for name in reversed(order) if turn % 2 else order:
            times[name].append(run(contenders[name]))
        turn += 1
    middle = {name: statistics.median(values) for name, values in times.items()}
    pairs = [graft / package for graft, package in zip(times["graft"], times["package"], strict=True)]
    return {
        "rounds": turn,
        "median_ms": middle,
        "package_speed_over_graft": middle["graft"] / middle["package"],
        "quartiles": statistics.quantiles(pairs, n=4)[::2],
    }


def main() -> int:
    """Run it; 1 if the package is slower than the graft, or computes something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    for name, default in (("layers", 8), ("hidden", 2048), ("intermediate", 0), ("vocabulary", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each regime")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from kernelgraft import machine

    torch.set_grad_enabled(False)
    gpu = args.device != "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        contenders = load_contenders(args, Path(scratch))
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, args.vocabulary, (1, 48), generator=generator).to(args.device)
        long = torch.randint(3, args.vocabulary, (1, 2048 if gpu else 32), generator=generator).to(args.device)
        numbers = compare(contenders, ids)
        for name, line in numbers.items():
            print(name, line)
        steps = 32 if gpu else 2
        regimes: dict[str, Callable[[Any], float]] = {
            "decode, batch 1": lambda model: decode(model, ids, 1, steps),
            "decode, batch 32": lambda model: decode(model, ids, 32 if gpu else 2, steps // 2),
            f"prefill {long.shape[1]}": lambda m: timed(lambda: m(long, logits_to_keep=1), m.device),
        }
        times = {name: measure(contenders, run, args.seconds) for name, run in regimes.items()}
    for name, found in times.items():
        said = ", ".join(f"{contender} {ms:.3f} ms" for contender, ms in found["median_ms"].items())
        print(f"{name}: {said}; package over graft {found['package_speed_over_graft']:.3f}")
    card = machine.read()
    result = {
        "environment": {"gpu": card.gpu, "driver": card.gpu_driver, "cpu": card.cpu, "versions": card.versions},
        "model": {"layers": args.layers, "hidden": args.hidden, "intermediate": args.intermediate or 4 * args.hidden},
        "numbers": numbers,
        "times": times,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    right = all(
        line["tokens_equal"] or (args.attention and line["relative_difference"] < CLOSE) for line in numbers.values()
    )
    return 0 if right and times["decode, batch 1"]["package_speed_over_graft"] >= ACCEPTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
