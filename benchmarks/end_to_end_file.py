"""The file of `end_to_end.py`: cells, models and what is missing, of one run or of several."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelgraft.store import write_atomic


@dataclass
class Report:
    """What the JSON file holds."""

    file: Path
    environment: dict[str, Any]
    options: dict[str, Any]
    own: Sequence[str]
    """The models that this run measures: of those nothing is kept."""
    merge: Sequence[Path] = ()
    """Files of other runs; later ones prevail."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def write(self, seconds: float) -> None:
        """Everything so far, and what other runs have measured, as it is in their files now."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.file.parent):
            kept = merged([json.loads(f.read_text(encoding="utf-8")) for f in self.merge if f.is_file()], self.own)
            about = kept.environment if kept.environment and not self.own else self.environment
            answer = {
                "environment": about,
                "options": self.options,
                "seconds": round(seconds, 1),
                "cells": kept.cells + self.cells,
                "models": kept.models | self.models,
                "missing": kept.missing + self.missing,
            }
            write_atomic(self.file, json.dumps(answer, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


@dataclass
class Kept:
    """What other runs have measured."""

    environment: dict[str, Any] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def merged(files: Sequence[dict[str, Any]], without: Sequence[str]) -> Kept:
    """The contents of files, model by model, less some models; of a model that is in several, that of the last file.

    Each model says itself on which machine and when it was measured.
    """
    kept = Kept()
    for content in files:
        kept.environment = kept.environment or content["environment"]
        held = dict.fromkeys([*content["models"], *(c["model"] for c in content["cells"])])
        held |= dict.fromkeys(model_of(text) for text in content["missing"])
        own = [model for model in held if model not in without]
        kept.cells = [c for c in kept.cells if c["model"] not in own]
        kept.cells += [c for c in content["cells"] if c["model"] in own]
        kept.missing = [text for text in kept.missing if model_of(text) not in own]
        kept.missing += [text for text in content["missing"] if model_of(text) in own]
        run = {name: content[name] for name in ("environment", "options") if name in content}
        for model in own:
            kept.models.pop(model, None)
            kept.models[model] = run | content["models"].get(model, {})
    return kept


def model_of(missing: str) -> str:
    """The model that a line of `missing` is about."""
    return missing.partition(":")[0]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time, where the system has locks: another run may write to the same file."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
