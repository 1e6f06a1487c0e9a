"""What the verbs of the command line share: their options, how these are read, and progress on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kernelgraft.errors import UsageError

if TYPE_CHECKING:
    from kernelgraft.models import Loaded
    from kernelgraft.pipeline import Progress

people = Console(stderr=True)
"""Where people read what is said; answers go to stdout."""

Model = Annotated[str, typer.Argument(help="tiny, a preset, a local folder, a hub id, or config:<model_type>.")]
Folder = Annotated[Path, typer.Argument(help="Folder with the records that the verb before this one wrote.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the records (default: kernelgraft-<model>).")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON to this file; - is stdout.")]
Suppliers = Annotated[str | None, typer.Option(help="Comma-separated suppliers (default: all that run here).")]
PolicyOption = Annotated[
    str,
    typer.Option(help="fastest: the original stays where it is as fast; verified: seat the best verified Solution."),
]
Force = Annotated[bool, typer.Option("--force", help="Do the job again even if it is done.")]
JudgeOption = Annotated[
    str, typer.Option("--judge", help="thorough, or quick: fewer sizes, seeds and layouts of every kind.")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Solutions verified at a time (default: the cores, two fewer beside a GPU).")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Verify again what an earlier run has verified.")]
Batches = Annotated[
    str | None,
    typer.Option("--batch", help="Batches to choose kernels for, comma-separated (default: 1; on a GPU 1,32)."),
]
Prefills = Annotated[
    str | None,
    typer.Option("--prefill", help="Prompt lengths to choose for, besides a short one (default: 128; GPU: 512,4096)."),
]
ModeOption = Annotated[
    str, typer.Option("--mode", help="eager, or graph: what counts is device time, as inside a CUDA graph.")
]
Ablate = Annotated[
    bool, typer.Option("--ablate", help="Measure well what each compute gains in the whole model, and show it.")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: the model's own).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow a model's own code from the hub.")]


def names(suppliers: str | None) -> list[str] | None:
    """Comma-separated names; None for none."""
    return [s.strip() for s in suppliers.split(",") if s.strip()] if suppliers else None


def policy_named(name: str) -> Any:
    """The policy of that name."""
    if name not in ("fastest", "verified"):
        raise UsageError(f"policy `{name}` is not fastest or verified")
    return name


def use_of(batches: str | None, prefills: str | None, mode: str, device: str) -> Any:
    """What the options say of how the model will be used."""
    from kernelgraft.pipeline import Use

    if mode == "graph" and not device.startswith("cuda"):
        raise UsageError(f"mode `graph` is for CUDA graphs, and the device is `{device}`: use --mode eager")
    return Use(mode, sizes("--batch", batches), sizes("--prefill", prefills))  # type: ignore[arg-type]


def sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """`1,32` as numbers; an empty text is none."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"`{option} {text}` is not a list of positive numbers such as 1,32")
    return tuple(map(int, words))


def judge_named(name: str) -> Any:
    """Options of the judge of that name."""
    from kernelgraft.evaluate import JudgeOptions

    if name not in ("thorough", "quick"):
        raise UsageError(f"judge `{name}` is not thorough or quick")
    return JudgeOptions.quick() if name == "quick" else JudgeOptions()


def cache_named(name: str) -> Any:
    """The kind of cache of that name."""
    if name not in ("dynamic", "static"):
        raise UsageError(f"cache `{name}` is not dynamic or static")
    return name


def load_model(model: str, dtype: str | None, device: str, trust_remote_code: bool) -> Loaded:
    """The model that a verb is about; one process of several gets its part of it."""
    import torch

    from kernelgraft import machine
    from kernelgraft.models import load

    chosen = None
    if dtype is not None:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise UsageError(f"dtype `{dtype}` is not float32, bfloat16 or float16")
        chosen = getattr(torch, dtype)
    split = machine.processes()[1] > 1
    return load(model, dtype=chosen, device=checked_device(device), trust_remote_code=trust_remote_code, split=split)


def checked_device(device: str) -> str:
    """The device, if it is one and is here."""
    import torch

    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"device `{device}` is not cpu, cuda or cuda:<index>")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device `{device}` is not here: torch sees no GPU; use --device cpu")
    return device


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """Progress as bars on a terminal, as lines elsewhere."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    if not people.is_terminal:
        yield _lines()
        return
    with Progress(*columns, console=people) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int | None, text: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, text=text)
            bars.update(tasks[stage], completed=done, total=total, text=text)

        yield progress


def _lines() -> Progress:
    """Progress where nobody watches a terminal: one line a step."""
    from kernelgraft import machine

    started = machine.clock()

    def progress(stage: str, done: int, total: int | None, text: str) -> None:
        where = f"{done}/{total}" if total is not None else str(done)
        line = f"{machine.clock() - started:7.1f} s  {stage} {where}  {text}"
        people.print(line, markup=False, highlight=False, soft_wrap=True)

    return progress
