"""What really ran in each contender's process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernelgraft.bench.result import Contender
from kernelgraft.report.wording import UNKNOWN

CALL_HEADINGS = ["family", "sites", "served", "left to the original", "fallbacks"]
EVIDENCE_HEADINGS = ["contender", "in place of the model's own code"]
MOST_EVIDENCE = 40
"""A patch of every layer says the same of each; the record has all."""


def call_rows(contender: Contender) -> Iterable[list[str]]:
    """Cells: calls that went through each patch of a graft, and what fell back with its reason."""
    for patch in contender.calls:
        served = [f"{name}: {count}" for name, count in patch.calls.items()]
        fallbacks = [f"{count}: {reason}" for reason, count in patch.fallbacks.items()]
        yield [
            patch.family,
            "\n".join(patch.sites),
            "\n".join(served) or UNKNOWN,
            str(patch.original_by_choice),
            "\n".join(fallbacks) or UNKNOWN,
        ]


def evidence_rows(contenders: Sequence[Contender]) -> Iterable[list[str]]:
    """Cells: what was found patched in each contender's process; for the original, that nothing was."""
    for contender in contenders:
        if contender.failure is not None:
            continue
        found = list(contender.evidence)
        if contender.proof is not None:
            found += [f"{path}: its forward is replaced" for path in contender.proof.replaced_methods]
            found += [f"attention function: {name}" for name in contender.proof.foreign_attention]
        shown = found[:MOST_EVIDENCE]
        if len(found) > len(shown):
            shown.append(f"and {len(found) - len(shown)} more")
        if not shown:
            shown = ["nothing"] if contender.proof is not None and contender.proof.clean else [UNKNOWN]
        yield [contender.name, "\n".join(shown)]
