"""The files between the judge and the worker: inputs go in, outputs and facts come back."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kernelgraft.evaluate.cases import Case, JudgeOptions
from kernelgraft.evaluate.zygote import Exit
from kernelgraft.records import Solution

ALIGNMENT_ELEMENTS = 64
"""Storage offsets are kept modulo this: what matters of them is how the first element is aligned."""


@dataclass(frozen=True)
class Job:
    """What is asked of the worker: cases by number, and for gradient cases what flows in and what is wanted."""

    cases: dict[int, Case]
    cotangents: dict[int, list[torch.Tensor | None]]
    wanted: dict[int, list[int]]


@dataclass(frozen=True)
class Answer:
    """What came back; `facts` as `worker` wrote them, None if the process ended before."""

    ended: Exit
    facts: dict[str, Any] | None
    outputs: Mapping[str, torch.Tensor]
    at: str
    """What it was doing last: `import`, or the label of a case."""
    last_line: str
    """Last line of what the process printed; may be empty."""


def write(folder: Path, solution: Solution, job: Job, options: JudgeOptions) -> None:
    """Write `request.json` and `inputs.safetensors`; the order of the cases is drawn anew each time."""
    tensors: dict[str, torch.Tensor] = {}
    written: dict[int, str] = {}
    cases = []
    device = "cpu"
    for number, case in job.cases.items():
        specs: list[dict[str, Any]] = []
        for index, value in enumerate(case.inputs):
            if not isinstance(value, torch.Tensor):
                specs.append({"value": value})
                continue
            device = str(value.device)
            # One tensor that many cases share is written once.
            key = f"{number}.{index}" if case.gradient else written.setdefault(id(value), f"{number}.{index}")
            if key not in tensors:
                tensors[key] = (value.contiguous().reshape(-1) if case.gradient else _flat(value)).cpu().clone()
            specs.append(
                {
                    "key": key,
                    "size": list(value.shape),
                    "stride": list(value.stride()),
                    "offset": value.storage_offset() % ALIGNMENT_ELEMENTS,
                }
            )
        flows = []
        for index, flow in enumerate(job.cotangents.get(number, ())):
            flows.append(None if flow is None else f"{number}.flow.{index}")
            if flow is not None:
                tensors[f"{number}.flow.{index}"] = flow.reshape(-1).clone()
        cases.append({"id": number, "inputs": specs, "cotangents": flows, "wanted": job.wanted.get(number, [])})
    random.SystemRandom().shuffle(cases)
    cases.sort(key=lambda c: bool(c["cotangents"]))
    save_file(tensors, folder / "inputs.safetensors")
    request = {
        "solution": solution.model_dump(mode="json"),
        "device": device,
        "cases": cases,
        "interpret": solution.spec.language == "cuda-tile" and device == "cpu",
        "wrap_allocations": not solution.meta.uses_compiler,
        "repeats": options.repeats,
        "timeout_s": options.timeout_s,
        "memory_bytes": options.memory_bytes,
    }
    (folder / "request.json").write_text(json.dumps(request))


def read(folder: Path, job: Job, ended: Exit) -> Answer:
    """Read what the worker left."""
    progress = (folder / "progress").read_text().split() if (folder / "progress").exists() else []
    last = progress[-1] if progress else "import"
    at = "import" if last == "import" else job.cases[int(last)].label
    log = (folder / "log").read_text(errors="replace").split("\n") if (folder / "log").exists() else []
    lines = [line.strip() for line in log if line.strip()]
    facts = None
    outputs: Mapping[str, torch.Tensor] = {}
    if (folder / "facts.json").exists() and not ended.timed_out:
        facts = json.loads((folder / "facts.json").read_text())
        outputs = load_file(folder / "outputs.safetensors")
    return Answer(ended, facts, outputs, at, lines[-1][:300] if lines else "")


def _flat(x: torch.Tensor) -> torch.Tensor:
    """All elements from the first to the last of a tensor's memory, whatever its strides: 1-D."""
    if not x.numel():
        return x.reshape(-1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return torch.as_strided(x, (extent,), (1,), x.storage_offset())
