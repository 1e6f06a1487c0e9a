"""What two processes with parts of one model do: run by `tests/test_parallel.py`, writes what it found to a file.

Usage: parallel_samples.py <folder>; torchrun's variables are in the environment.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hand_made import generate, load, make_graft, reference_solution
from torch import nn

import kernelgraft
from kernelgraft import machine, models, pipeline
from kernelgraft.errors import KernelgraftError
from kernelgraft.evaluate import JudgeOptions
from kernelgraft.patch import Applied, find_applied
from kernelgraft.records import Definition, Graft, MachineCard, Solution
from kernelgraft.suppliers.base import Listing, Refusal, Supplier

TINY = "tiny"
KINDS = ("phi3", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Between them: gate and up in one product that is gathered from all ranks and cut again for the next; four norms a
layer; experts; sinks that are parameters of the attention; projections that are split only in part."""


class Ranks:
    """Two processes of one script, as torchrun starts them; each writes what it found to `<folder>/<rank>.json`."""

    def __init__(self, script: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = machine.child_environment(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.folder, self.began = folder, time.monotonic()
        self.logs = [(folder / f"{rank}.log").open("w+") for rank in range(2)]
        self.started = [
            subprocess.Popen(
                [sys.executable, str(script), str(folder)],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=self.logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]

    def found(self, patience_s: float) -> list[dict[str, Any]]:
        """What each of them wrote; AssertionError with what they said if one failed, or took longer from its start."""
        try:
            for process in self.started:
                process.wait(max(0, self.began + patience_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.end()
        said = [(self.folder / f"{rank}.log").read_text()[-3000:] for rank in range(2)]
        assert [p.returncode for p in self.started] == [0, 0], "\n".join(said)
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(2)]

    def end(self) -> None:
        for process, log in zip(self.started, self.logs, strict=True):
            process.kill()
            process.wait()
            log.close()


class References(Supplier):
    """Each Definition's own reference, of the families named."""

    name = "references"

    def __init__(self, *families: str) -> None:
        self.families = families

    def unavailable(self, machine: MachineCard) -> str | None:
        return None

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        return []

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        wanted = definition.meta.family in self.families
        return [reference_solution(definition)] if wanted else Refusal(self.name, "not asked for")


def split(folder: Path | str) -> models.Loaded:
    return models.load(str(folder), split=True)


def integrate(loaded: models.Loaded, *families: str, out: Path | None = None) -> Graft:
    return pipeline.integrate(
        loaded, suppliers=[References(*families)], policy="verified", options=JudgeOptions.quick(), out=out, jobs=2
    )


def state(model: nn.Module) -> list[Any]:
    """Identity of every attribute and parameter of every module, and what hooks there are."""
    found: list[Any] = []
    for path, module in model.named_modules():
        inside = {k: id(v) for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
        forward = module.__dict__.get("forward")
        cells = [id(c.cell_contents) for c in getattr(forward, "__closure__", None) or () if callable(c.cell_contents)]
        hooks = [len(h) for h in (module._forward_hooks, module._forward_pre_hooks)]
        found.append((path, inside, [id(p) for p in module._parameters.values()], len(cells), hooks))
    return found


def calls(applied: Applied) -> dict[str, Any]:
    """Per family: calls of Solutions, fallbacks, instances."""
    found: dict[str, Any] = {}
    for row in applied.report():
        kernel, fallbacks, instances = found.get(row["family"], (0, {}, 0))
        found[row["family"]] = (
            kernel + sum(row["calls"].values()), fallbacks | row["fallbacks"], instances + row["instances"]
        )  # fmt: skip
    return found


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except KernelgraftError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def whole_graft(folder: Path) -> dict[str, Any]:
    """A graft that was made for the whole model."""
    whole, part = models.load(TINY), split(TINY)
    ids = models.prompt_ids(whole, "The capital of France is")
    graft = make_graft(whole)
    return {
        "equal": torch.equal(generate(whole.model, ids), generate(part.model, ids)),
        "applied": failure(lambda: kernelgraft.apply(graft, part.model)),
        "tokens": generate(whole.model, ids).tolist(),
    }


def parts(folder: Path) -> dict[str, Any]:
    """Integrate a model in its processes, apply the graft there, and take it off."""
    loaded = split(TINY)
    model, ids = loaded.model, models.prompt_ids(loaded, "The capital of France is")
    generate(model, ids)
    before = state(model)
    out = folder / f"records-{dist.get_rank()}"
    graft = integrate(loaded, "rms_norm", "rope", "gated_mlp", "attention", "residual_norm", out=out)
    untouched = state(model) == before
    with kernelgraft.apply(graft, model, check_reach=True) as applied:
        during, served = generate(model, ids), calls(applied)
    alone = models.prompt_ids(loaded, "The capital")
    return {
        "split": graft.model.split,
        "parameters": graft.model.parameters,
        "hash": graft.content_hash(),
        "definitions": sorted(graft.definitions),
        "rejected": [p.reason for p in graft.patches if p.status == "rejected"],
        "tokens_equal": graft.end_to_end is not None and graft.end_to_end.tokens_equal,
        "untouched": untouched,
        "reverted": state(model) == before,
        "written": (out / "graft.json").exists(),
        "during": during.tolist(),
        "served": served,
        "after": generate(model, ids).tolist(),
        "training": [generate(model, alone).shape[1], model.training],
    }


def quarrels(folder: Path) -> dict[str, Any]:
    """What goes wrong on one rank is known on all."""
    loaded = split(TINY)
    model = loaded.model
    graft = integrate(loaded, "rms_norm")
    found = {"supplier": failure(lambda: pipeline.integrate(loaded, suppliers=["nowhere"]))}
    if dist.get_rank() == 1:
        held = kernelgraft.apply(graft, model)
    refused = integrate(loaded, "rms_norm")
    found["reasons"] = sorted({p.reason for p in refused.patches if p.family == "rms_norm"})  # type: ignore[type-var]
    if dist.get_rank() == 1:
        found["kept"] = find_applied(model) is held
        held.revert()
    found["again"] = [p.status for p in integrate(loaded, "rms_norm").patches if p.family == "rms_norm"]
    return found


def uneven(folder: Path) -> dict[str, Any]:
    """Sizes that two does not divide: the ranks hold parts of different sizes."""
    loaded = split(folder / "uneven")
    model, ids = loaded.model, torch.arange(20, 26)[None]
    before = generate(model, ids)
    graft = integrate(loaded, "gated_mlp", "residual_norm")
    with kernelgraft.apply(graft, model) as applied:
        during, served = generate(model, ids), calls(applied)
    return {"equal": torch.equal(before, during), "served": served}


def kinds(folder: Path) -> dict[str, Any]:
    """References seated by hand in models of several kinds."""
    found = {}
    for name in KINDS:
        loaded = split(folder / name)
        model, ids = loaded.model, torch.arange(20, 26)[None]
        before, left = generate(model, ids), state(model)
        graft = pipeline.led(make_graft)(loaded)
        untouched = state(model) == left
        with kernelgraft.apply(graft, model) as applied:
            during, served = generate(model, ids), calls(applied)
        found[name] = {"equal": torch.equal(before, during), "served": served, "untouched": untouched}
    return found


def caches(folder: Path) -> dict[str, Any]:
    """Calls of the whole model that pass caches on, made by the first rank alone."""
    from transformers import StaticCache

    loaded = split(TINY)
    ids = models.prompt_ids(loaded, "The capital of France is")

    def steps(loaded: models.Loaded) -> list[Any]:
        model, found = loaded.model, []
        fixed = StaticCache(model.config, max_cache_len=16)
        with torch.no_grad():
            for name, cache in (("dynamic", None), ("static", fixed)):
                options = {} if cache is None else {PAST: cache}
                first = model(ids[:, :-1], use_cache=True, **options)
                second = model(ids[:, -1:], use_cache=True, **{PAST: first[PAST]})
                found.append((name, second.logits[0, -1].topk(5).indices.tolist()))
            found.append(("at once", model(ids).logits[0, -1].topk(5).indices.tolist()))
        return found

    PAST = "past_key_values"
    with torch.no_grad():
        if PAST not in loaded.model(ids[:, :1], use_cache=True):
            PAST = "cache"
    return {"steps": pipeline.led(steps)(loaded)}


def replicas(folder: Path) -> dict[str, Any]:
    """A graft of the whole model where each rank has it whole, or whole while it runs."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found: dict[str, Any] = {}
    loaded = load("qwen3")
    model, ids = loaded.model, models.prompt_ids(loaded, "The capital of France is")
    graft, wanted = make_graft(loaded), generate(model, ids)
    with kernelgraft.apply(graft, DistributedDataParallel(model)) as applied:
        found["ddp"] = (torch.equal(generate(model, ids), wanted), calls(applied))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with kernelgraft.apply(graft, model) as applied:
        model.train()
        model(ids, labels=ids).loss.backward()
        model.eval()
        gradient = float(model.model.norm.weight.grad.full_tensor().abs().sum())
        found["fsdp"] = (torch.equal(generate(model, ids), wanted), calls(applied), gradient)
    found["integrated"] = failure(lambda: pipeline.integrate(model))
    twin = load("qwen3").model
    twin.train()
    twin(ids, labels=ids).loss.backward()
    found["gradient"] = float(twin.model.norm.weight.grad.abs().sum())
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for scenario in (whole_graft, parts, quarrels, uneven, kinds, caches, replicas):
        torch.manual_seed(0)
        found[scenario.__name__] = scenario(folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
