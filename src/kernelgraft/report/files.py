"""Reports as files beside the records."""

from __future__ import annotations

import json

from kernelgraft.bench.result import BenchResult
from kernelgraft.records import Graft, Plan
from kernelgraft.report.markdown import markdown
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
