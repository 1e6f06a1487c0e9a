"""What each compute of a graft gains in the whole model."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from kernelgraft.records import Contribution, Graft
from kernelgraft.report.wording import make_table

CONTRIBUTION_HEADINGS = ["compute", "where", "run", "without ms", "with ms", "gain", "95 % interval ms"]


def contributions_table(graft: Graft) -> Table:
    """One row for each compute and run that was measured, the whole graft first."""
    title = "What each compute gains end to end, the rest of the graft on"
    return make_table(title, CONTRIBUTION_HEADINGS, contribution_rows(graft), numbers={3, 4, 5, 6}, folded={1})


def contribution_rows(graft: Graft) -> Iterable[list[str]]:
    """Cells of the table."""
    for found in graft.contributions:
        low, high = found.interval_ms
        yield [
            "all together" if found.family == "all" else found.family,
            "\n".join(found.sites),
            run_text(found),
            f"{found.off_ms:.2f}",
            f"{found.on_ms:.2f}",
            f"{found.gain_percent:+.1f} %",
            f"{low:+.3f} … {high:+.3f}",
        ]


def run_text(found: Contribution) -> str:
    """`decode, batch 32`, `prefill 1×4096`."""
    if found.regime == "decode":
        return f"decode, batch {found.batch}"
    return f"prefill {found.batch}×{found.prompt_tokens or 'short'}"
