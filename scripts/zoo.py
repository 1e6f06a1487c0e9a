"""Run the main job on a tiny random model of every causal type of the installed transformers, and print one table.

    python scripts/zoo.py [TYPE ...] [--jobs 2] [--timeout 300] [--suppliers torch] [--json FILE]

Each type runs in its own process. Seating follows `policy="verified"`: every compute with a right Solution is patched,
whatever its speed, so that patching is tested, not timing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FAMILIES = ("rms_norm", "layer_norm", "rope", "gated_mlp", "attention", "residual_norm")


def one(model_type: str, suppliers: Sequence[str]) -> dict[str, Any]:
    """Integrate one type in this process and say what happened."""
    import torch

    torch.set_num_threads(1)
    from kernelgraft.errors import KernelgraftError, NothingToPatch
    from kernelgraft.evaluate import JudgeOptions
    from kernelgraft.models import load
    from kernelgraft.pipeline import Use, integrate

    row: dict[str, Any] = {"type": model_type, "recognised": [], "verified": [], "applied": []}
    try:
        graft = integrate(
            load(f"config:{model_type}"),
            suppliers=suppliers,
            policy="verified",
            use=Use(prefills=()),
            options=JudgeOptions.quick(),
        )
    except NothingToPatch as error:
        return {**row, "status": "nothing to patch", "detail": str(error)}
    except KernelgraftError as error:
        return {**row, "status": type(error).__name__, "detail": str(error)}
    right = {e.definition for e in graft.evaluations if e.status == "PASSED"}
    row["recognised"] = sorted({p.family for p in graft.patches})
    row["verified"] = sorted({p.family for p in graft.patches if right & set(p.definitions)})
    row["applied"] = sorted({p.family for p in graft.accepted})
    row["rejected"] = [f"{p.family}: {p.reason}" for p in graft.patches if p.status == "rejected"]
    if graft.end_to_end:
        row["tokens_equal"] = graft.end_to_end.tokens_equal
        row["logits_rel_rmse"] = graft.end_to_end.logits_rel_rmse
    return {**row, "status": "applied" if graft.accepted else "none accepted"}


def child(model_type: str, suppliers: str, timeout_s: float) -> dict[str, Any]:
    """`one` in a fresh process."""
    command = [sys.executable, __file__, "--one", model_type, "--suppliers", suppliers]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ})
    except subprocess.TimeoutExpired:
        return {"type": model_type, "status": "timeout"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"type": model_type, "status": "crash", "detail": last}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line a type, one column a family (A applied, v verified, r recognised)."""
    lines = ["| type | " + " | ".join(FAMILIES) + " | tokens equal | status |", "| --- " * (len(FAMILIES) + 3) + "|"]
    for row in rows:
        marks = [
            next(
                (m for m, key in (("A", "applied"), ("v", "verified"), ("r", "recognised")) if f in row.get(key, ())),
                "",
            )
            for f in FAMILIES
        ]
        equal = {True: "yes", False: "no"}.get(row.get("tokens_equal"), "")  # type: ignore[call-overload]
        lines.append(f"| {row['type']} | " + " | ".join(marks) + f" | {equal} | {row['status']} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the arguments, run the types, print the table and the totals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--one")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per type")
    parser.add_argument("--suppliers", default="torch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.suppliers.split(","))))
        return
    from kernelgraft.models import causal_types

    types = arguments.types or causal_types()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda t: child(t, arguments.suppliers, arguments.timeout), types):
            rows.append(row)
            print(f"{len(rows)}/{len(types)} {row['type']}: {row['status']}", file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    applied = [r for r in rows if r["status"] == "applied"]
    equal = sum(r.get("tokens_equal") is True for r in applied)
    print(f"\n{len(rows)} types, {len(applied)} with a graft, {equal} of those with equal tokens")
    for family in FAMILIES:
        print(f"{family}: applied in {sum(family in r.get('applied', ()) for r in rows)} types")


if __name__ == "__main__":
    main()
