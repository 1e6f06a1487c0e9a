"""What the machine, the model and the suppliers have, as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kernelgraft.records import MachineCard, Plan, Research, Solution
from kernelgraft.report.wording import REGIMES, UNKNOWN, make_table, model_title, short_name, usable, variant_text
from kernelgraft.suppliers.base import Listing


def doctor_table(card: MachineCard, suppliers: Mapping[str, str | None]) -> RenderableType:
    """What the machine has, and why a supplier cannot be used on it."""
    found = card.model_dump(exclude={"versions"})
    rows = [[name.replace("_", " "), UNKNOWN if value is None else str(value)] for name, value in found.items()]
    rows += [[name, version] for name, version in card.versions.items()]
    rows += [[f"supplier {name}", usable(reason)] for name, reason in suppliers.items()]
    return make_table("This machine", ["what", "found"], rows, folded={1})


def research_table(research: Research) -> RenderableType:
    """The sites that were recognised, and those that look like a family but were not; the rest is counted."""
    rows: list[list[str]] = []
    lines: list[str] = []
    rest: Counter[str] = Counter()
    for row in research.rows:
        if row.family is not None:
            calls = " + ".join(str(row.calls.get(regime, 0)) for regime in REGIMES)
            rows.append([row.site.key, str(len(row.site.instances)), row.family, variant_text(row.semantics), calls])
        elif ":" in (row.reason or ""):
            lines.append(f"not recognised: {row.site.key}: {row.reason}")
        else:
            rest[row.reason or "no family"] += 1
    headings = ["site", "places", "family", "variant", "calls"]
    table = make_table(model_title(research.model), headings, rows, numbers={1}, folded={0, 3})
    lines += [f"{count} other sites: {reason}" for reason, count in rest.most_common()]
    return Group(table, *map(Text, lines), Text("calls: in prefill + in decode"))


def inventory_table(listings: Sequence[Listing], stored: Sequence[Solution] = ()) -> RenderableType:
    """Every Solution of every supplier, and those stored in a folder."""
    rows = [
        [x.supplier, x.name, x.family, x.language, ", ".join(x.hardware), x.guard, usable(x.unavailable)]
        for x in listings
    ]
    for solution in stored:
        meta, spec = solution.meta, solution.spec
        hardware, guard = ", ".join(spec.target_hardware), meta.guard.text or UNKNOWN
        rows.append([meta.supplier, solution.name, meta.family, spec.language, hardware, guard, "stored"])
    headings = ["supplier", "name", "family", "language", "hardware", "guard", "here"]
    return make_table("Inventory", headings, rows, folded={1, 4, 5, 6})


def plan_table(plan: Plan) -> RenderableType:
    """The candidates of each compute, best first."""
    rows = []
    for row in plan.rows:
        said = [
            f"{c.supplier}: {c.reason}" if c.solution is None else short_name(c.solution, row.definitions)
            for c in row.candidates
        ]
        rows.append([row.family, "\n".join(row.sites), row.verdict, "\n".join(said) or UNKNOWN])
    table = make_table(model_title(plan.model), ["family", "sites", "verdict", "candidates"], rows, folded={1, 3})
    return Group(table, Text(f"Already done: {plan.already}")) if plan.already else table
