"""What `kernelgraft bench` does besides measuring: a graft for it, and what each of its computes gains."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgraft.terminal import load_model, people, progress_shown

if TYPE_CHECKING:
    from kernelgraft.bench import BenchResult
    from kernelgraft.store import Inventory


def measured(model: str, graft: Path | None, **options: Any) -> BenchResult:
    """The benchmark, with its progress shown."""
    from kernelgraft.bench import bench

    with progress_shown() as progress:
        return bench(model, graft, progress=progress, **options)


def made_for(
    model: str, folder: Path, suppliers: list[str] | None, languages: list[str] | None, setting: dict[str, Any]
) -> Path:
    """A graft that is made for one benchmark and its setting."""
    from kernelgraft import machine, pipeline
    from kernelgraft.store import Inventory

    chosen = pipeline.chosen(suppliers, machine.read())
    prefills = None if setting["prompt_tokens"] is None else (setting["prompt_tokens"],)
    with progress_shown() as progress:
        loaded = load_model(model, setting["dtype"], setting["device"], False)
        people.print("no --graft is given: making one for this benchmark (keep one with `kernelgraft run`)")
        pipeline.run_integration(
            loaded,
            Inventory(folder),
            suppliers=chosen,
            languages=languages,
            use=pipeline.Use(batches=(1, setting["batch"]), prefills=prefills),
            progress=progress,
        )
    del loaded
    gc.collect()
    if setting["device"].startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # the contenders need the room
    return folder


def only_cutile(store: Inventory, scratch: Path) -> Path:
    """A graft whose other seats are empty; the graft itself, which is said, if it seats no cuTile Solution."""
    from kernelgraft.pipeline import restricted
    from kernelgraft.records import Graft
    from kernelgraft.store import Inventory

    graft = restricted(store.load_record("graft", Graft), language="cuda-tile")
    if not graft.accepted:
        people.print("the graft seats no cuTile Solution: its own Solutions are used")
        return store.root
    Inventory(scratch).save_record("graft", graft)
    return scratch


def ablated(model: str, folder: Path, result: BenchResult, setting: dict[str, Any]) -> BenchResult:
    """The benchmark with what each compute of the graft gains in its setting, after the contenders have ended."""
    from kernelgraft import pipeline
    from kernelgraft.pipeline.ablation import BUDGET_S, THOROUGH_ROUNDS
    from kernelgraft.records import Graft
    from kernelgraft.store import Inventory

    graft = Inventory(folder).load_record("graft", Graft)
    length = setting["prompt_tokens"]
    use = pipeline.Use(batches=(setting["batch"],), prefills=() if length is None else (length,))
    with progress_shown() as progress:
        loaded = load_model(model, setting["dtype"], setting["device"], False)
        found = pipeline.ablate(loaded, graft, use, rounds=THOROUGH_ROUNDS, budget_s=4 * BUDGET_S, progress=progress)
    return result.model_copy(update={"contributions": found})
