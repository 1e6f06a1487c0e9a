"""What a report is made of, read from where it was written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kernelgraft.bench.result import BenchResult
from kernelgraft.errors import KernelgraftError, UsageError
from kernelgraft.records import Graft, Plan
from kernelgraft.report.cells import Cells, read_cells
from kernelgraft.store import Inventory

CELLS = "end_to_end.json"


@dataclass(frozen=True)
class Job:
    """The records of a job that there are."""

    graft: Graft | None = None
    plan: Plan | None = None
    bench: BenchResult | None = None
    cells: Cells | None = None


def read(place: Path) -> Job:
    """The records in a folder, or in one file: of `bench --json`, or of benchmarks/end_to_end.py.

    Raises UsageError if there is nothing that a report could be made of.
    """
    if place.is_dir():
        job = _read_folder(place)
    elif place.is_file():
        job = _read_file(place)
    else:
        raise UsageError(f"`{place}` does not exist: run `kernelgraft run MODEL --out {place}` first")
    if job.graft is None and job.bench is None and job.cells is None:
        raise UsageError(f"`{place}` has no graft and no benchmark: run `kernelgraft run MODEL --out {place}` first")
    return job


def _read_folder(folder: Path) -> Job:
    store = Inventory(folder)
    return Job(
        graft=store.load_record("graft", Graft) if store.has_record("graft") else None,
        plan=store.load_record("plan", Plan) if store.has_record("plan") else None,
        bench=store.load_record("bench", BenchResult) if store.has_record("bench") else None,
        cells=read_cells(folder / CELLS) if (folder / CELLS).is_file() else None,
    )


def _read_file(file: Path) -> Job:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict) and "cells" in found:
            return Job(cells=read_cells(file))
        return Job(bench=BenchResult.model_validate(found))
    except KernelgraftError:
        raise
    except ValueError as error:  # of JSON or of the record
        said = str(error).splitlines()[0]
        raise UsageError(f"`{file}` is no benchmark: {said}; give a folder, or a file of `bench --json`") from error
