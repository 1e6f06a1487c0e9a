"""Verdicts of earlier runs: what was judged with equal content, versions and machine is not judged again.

A verdict is kept in the cache folder under a hash of all that bears on it: the Solution, the Definition, shapes and
layouts of the captured calls, the judge's options, this package's sources (the judge and our kernels), the tuning
tables in use, the versions of the libraries, the hardware. Only what the content decides is kept: that a Solution is
right or that its numbers are wrong, not that it ran out of time or memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from kernelgraft import machine
from kernelgraft.cutile.tuning import SWITCH
from kernelgraft.errors import UsageError
from kernelgraft.evaluate import Captured, JudgeOptions
from kernelgraft.records import Definition, Evaluation, Solution, Status
from kernelgraft.store import write_atomic
from kernelgraft.suppliers.ours import INTERPRET

KEPT = frozenset({Status.PASSED, Status.INCORRECT_SHAPE, Status.INCORRECT_NUMERICAL, Status.INCORRECT_DTYPE})


def key(
    solution: Solution, definition: Definition, captured: Sequence[Captured], options: JudgeOptions, original: bool
) -> str:
    """SHA-256 (hex) of all that bears on a verdict; `original`: the yardstick is the model's own function."""
    card = machine.read()
    about = {
        "solution": solution.content_hash(),
        "definition": definition.content_hash(),
        "captured": sorted({json.dumps(_described(call)) for call in captured}),
        "options": asdict(options),
        "original": original,
        "machine": card.model_dump(mode="json", exclude={"platform"}),
        "package": _sources(),
        "tuned": _tables(machine.cache_folder() / "tuned"),
        "environment": {name: machine.environment(name) for name in (INTERPRET, SWITCH)},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def find(name: str) -> Evaluation | None:
    """The verdict kept under a key, marked as an earlier one; None if there is none that can be read."""
    try:
        found = Evaluation.model_validate_json(_file(name).read_text())
    except (OSError, ValidationError):
        return None
    return found.model_copy(update={"earlier": True}) if found.status in KEPT else None


def keep(name: str, evaluation: Evaluation) -> None:
    """Keep a verdict under its key, if its content decided it; a cache folder that cannot be written keeps nothing."""
    if evaluation.status not in KEPT or evaluation.earlier:
        return
    try:
        write_atomic(_file(name), evaluation.model_dump_json(exclude={"performance"}))
    except UsageError:
        return


def _file(name: str) -> Path:
    return machine.cache_folder() / "verdicts" / name[:2] / f"{name}.json"


def _described(call: Captured) -> Any:
    """What of a captured call decides which cases are drawn: sizes, and how its tensors lie in memory."""
    tensors = [
        [str(x.dtype), list(x.shape), list(x.stride()), x.device.type] if isinstance(x, torch.Tensor) else repr(x)
        for x in call.inputs
    ]
    return [call.regime, call.axes, tensors]


@functools.cache
def _sources() -> str:
    """SHA-256 of this package's files: its judge, its kernels and what they import."""
    root = Path(machine.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")) + sorted((root / "tuned").glob("*.json")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _tables(folder: Path) -> str:
    """SHA-256 of the user's tuning tables: they choose other configurations of our kernels."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.json")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
