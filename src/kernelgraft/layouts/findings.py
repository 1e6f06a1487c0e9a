"""What a check of kernels found: one line each, with the object and the mend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kernelgraft.errors import GraftError

Severity = Literal["error", "portability", "note"]
"""error        it would be wrong here: nothing is applied
portability  it is right here, and wrong through transformers' own KernelConfig
note         what was not checked, or what to know
"""
Check = Literal[
    "package", "match", "build", "names", "shapes", "save", "towers", "signature", "training", "flow", "numbers"
]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, about one kernel on one model; `kernel` is its class name."""

    check: Check
    severity: Severity
    message: str
    kernel: str | None = None

    def __str__(self) -> str:
        return self.message

    def record(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def refuse(findings: Sequence[Finding]) -> None:
    """Raise GraftError, one line, if there is an error among the findings; portability and notes pass."""
    wrong = [finding.message for finding in findings if finding.severity == "error"]
    if wrong:
        more = f" (and {len(wrong) - 3} more: `kernelgraft check` lists them)" if len(wrong) > 3 else ""
        raise GraftError(f"the kernels do not fit this model: {' | '.join(wrong[:3])}{more}")


def starred(path: str) -> str:
    """A path with `*` for each index."""
    return ".".join("*" if segment.isdigit() else segment for segment in path.split("."))


def in_one_line(error: BaseException, limit: int = 240) -> str:
    """The text of an error on one line, not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
