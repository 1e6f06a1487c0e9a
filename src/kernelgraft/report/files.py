"""Reports of a whole job: on the terminal, and as files beside the records."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import RenderableType

from kernelgraft.bench.result import BenchResult
from kernelgraft.records import Graft, Plan
from kernelgraft.report import plots
from kernelgraft.report.benches import bench_table
from kernelgraft.report.cells import cells_table
from kernelgraft.report.documents import markdown
from kernelgraft.report.grafts import graft_table
from kernelgraft.report.job import Job
from kernelgraft.report.pages import page
from kernelgraft.report.results import result
from kernelgraft.store import Inventory, write_atomic


def write(inventory: Inventory, graft: Graft, plan: Plan | None, bench: BenchResult | None) -> dict[str, str]:
    """Write `result.json` and `report.md` beside the records; returns every file of the job by name."""
    root = inventory.root
    names = {"research": "research.json", "plan": "plan.json", "graft": "graft.json", "bench": "bench.json"}
    files = {name: str(root / file) for name, file in names.items() if (root / file).is_file()}
    files |= {"result": str(root / "result.json"), "report": str(root / "report.md")}
    body = json.dumps(result(graft, bench, files), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(root / "result.json", body + "\n")
    write_atomic(root / "report.md", markdown(graft, plan, bench))
    return files


def job_tables(job: Job) -> list[RenderableType]:
    """Everything that the job has, for a terminal."""
    shown: list[RenderableType] = []
    if job.cells is not None:
        shown.append(cells_table(job.cells))
    if job.graft is not None:
        shown.append(graft_table(job.graft))
    if job.bench is not None:
        shown.append(bench_table(job.bench))
    return shown


def write_page(file: Path, job: Job) -> str:
    """Write the job as one HTML page; returns its name."""
    write_atomic(file, page(job))
    return str(file)


def write_plots(folder: Path, job: Job) -> dict[str, str]:
    """Write what can be drawn as PNG files; returns them by name. Raises UsageError without matplotlib."""
    return plots.write_pngs(plots.figures_of(job), folder)
