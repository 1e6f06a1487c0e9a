"""What two processes with parts of one model do, a GPU each: run by `tests/test_two_gpus.py`, writes what it found.

Usage: two_gpus_samples.py <folder>; torchrun's variables are in the environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hand_made import generate, logits
from parallel_samples import References, calls, state

import kernelgraft
from kernelgraft import models, pipeline
from kernelgraft.evaluate import JudgeOptions
from kernelgraft.records import Definition, MachineCard, Solution
from kernelgraft.suppliers import select
from kernelgraft.suppliers.base import Refusal

FAMILIES = ("rms_norm", "residual_norm", "gated_mlp")


class Ours(References):
    """The supplier `kernelgraft`, asked for the families named only: each Solution is judged."""

    name = "kernelgraft"

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        asked = super().candidates(definition, machine)
        return asked if isinstance(asked, Refusal) else select(["kernelgraft"])[0].candidates(definition, machine)


def prompt(device: torch.device | str) -> torch.Tensor:
    """Two rows of 24 tokens, for which the model of `test_two_gpus.py` has clear answers."""
    return ((torch.arange(24) * 7 + torch.tensor([[0], [58]])) % 200 + 20).to(device)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().double() - wanted.cpu().double()).norm() / wanted.double().norm())


def part(folder: Path, device: str) -> dict[str, Any]:
    """Integrate this rank's part of the model, apply the graft, and take it off."""
    loaded = models.load(str(folder), split=True, device=device)
    model, ids = loaded.model, prompt(device)
    wanted = torch.load(folder / "logits.pt")
    before = generate(model, ids)
    left = state(model)
    graft = pipeline.integrate(
        loaded, suppliers=[Ours(*FAMILIES)], policy="verified", options=JudgeOptions.quick(), languages=["cuda-tile"]
    )
    untouched = state(model) == left
    with kernelgraft.apply(graft, model) as applied:
        during = generate(model, ids)
        error, served = relative(logits(model, ids), wanted), calls(applied)
    reverted = state(model) == left
    after = generate(model, ids)
    return {
        "device": str(model.device),
        "backend": dist.get_backend(),
        "split": graft.model.split,
        "hash": graft.content_hash(),
        "rejected": [
            f"{p.family}: {p.reason}" for p in graft.patches if p.status == "rejected" and p.family in FAMILIES
        ],
        "before": before.tolist(),
        "during": during.tolist(),
        "after": after.tolist(),
        "error": error,
        "served": served,
        "untouched": untouched,
        "reverted": reverted,
    }


def main(folder: Path, device: str = "cuda") -> None:
    torch.set_num_threads(1)
    found = part(folder, device)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
