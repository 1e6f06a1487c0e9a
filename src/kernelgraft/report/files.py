"""Reports as files beside the records."""

from __future__ import annotations

import json
from pathlib import Path

from kernelgraft.bench.result import BenchResult
from kernelgraft.errors import UsageError
from kernelgraft.records import Graft, Plan
from kernelgraft.report import plots
from kernelgraft.report.markdown import markdown
from kernelgraft.report.page import page
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


def read(inventory: Inventory) -> tuple[Graft | None, Plan | None, BenchResult | None]:
    """The records of a job that there are. Raises UsageError if there is neither a graft nor a benchmark."""
    graft = inventory.load_record("graft", Graft) if inventory.has_record("graft") else None
    plan = inventory.load_record("plan", Plan) if inventory.has_record("plan") else None
    bench = inventory.load_record("bench", BenchResult) if inventory.has_record("bench") else None
    if graft is None and bench is None:
        root = inventory.root
        raise UsageError(f"`{root}` has no graft and no benchmark: run `kernelgraft run MODEL --out {root}` first")
    return graft, plan, bench


def write_page(file: Path, graft: Graft | None, plan: Plan | None, bench: BenchResult | None) -> str:
    """Write the job as one HTML page; returns its name."""
    write_atomic(file, page(graft, plan, bench))
    return str(file)


def write_plots(folder: Path, graft: Graft | None, bench: BenchResult | None) -> dict[str, str]:
    """Write what can be drawn as PNG files; returns them by name. Raises UsageError without matplotlib."""
    return plots.write_pngs(plots.figures_of(graft, bench), folder)
