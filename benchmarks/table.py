"""Markdown tables of a result of `kernels.py`.

python benchmarks/table.py benchmarks/results/h200/kernels.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OURS = "kernelgraft"
SOLUTIONS = (OURS, f"{OURS} triton")
"""Of which selection seats the faster one; what else begins with our name is for comparison."""


def rows(cases: list[dict[str, Any]], kernel: str) -> list[str]:
    """One table: device µs of each contestant, how far our faster Solution is from the best other, ours from copies."""
    own = [c for c in cases if c["kernel"] == kernel]
    names = list(dict.fromkeys(c["who"] for c in own))
    lines = [
        "| model | call | " + " | ".join(names) + " | against the best other | share of a copy's bandwidth"
        " | share of a copy of the same size |",
        "| --- | --- | " + " | ".join("---:" for _ in names) + " | ---: | ---: | ---: |",
    ]
    for model, regime in dict.fromkeys((c["model"], c["regime"]) for c in own):
        group = {c["who"]: c for c in own if (c["model"], c["regime"]) == (model, regime)}
        cells = [figure(group.get(name)) for name in names]
        ours = min((group[n]["device_us"] for n in SOLUTIONS if group.get(n, {}).get("device_us")), default=None)
        others = [c["device_us"] for n, c in group.items() if not n.startswith(OURS) and c.get("device_us")]
        ratio = f"{min(others) / ours:.2f}x" if ours and others else "–"
        large = group.get(OURS, {}).get("device_us") and group[OURS]["bytes"] > 32e6
        share = f"{group[OURS]['of_copy']:.0%}" if large else "–"
        same = f"{group[OURS]['of_same_copy']:.0%}" if large and group[OURS].get("of_same_copy") else "–"
        lines.append(f"| {model} | {regime} | {' | '.join(cells)} | {ratio} | {share} | {same} |")
    return lines


def figure(case: dict[str, Any] | None) -> str:
    """Device µs, or why there are none."""
    if case is None:
        return "–"
    if case.get("device_us") is None:
        return "wrong" if "allowed error" in (case["wrong"] or "") else "fails"
    return f"{case['device_us']:.2f}" if case["device_us"] < 10 else f"{case['device_us']:.1f}"


def main(path: Path) -> None:
    """Print all tables."""
    result = json.loads(path.read_text())
    for kernel in dict.fromkeys(c["kernel"] for c in result["cases"]):
        print(f"### {kernel}\n")
        print("\n".join(rows(result["cases"], kernel)), end="\n\n")
    if "launch" in result:
        print("### Host time of a call at decode size\n")
        print("| call | µs | its `ct.launch`es alone, same arguments | ratio |\n| --- | ---: | ---: | ---: |")
        for line in result["launch"]:
            alone = f"{line['launch_us']:.1f} | {line['ratio']:.2f}" if "ratio" in line else "– | –"
            print(f"| {line['kernel']} | {line['op_us']:.1f} | {alone} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
