"""Which implementation is seated: a pure decision over measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kernelgraft.errors import UsageError
from kernelgraft.evaluate.timer import Timing

SIGMAS = 3.0
"""A difference below this many standard errors is noise; three, because the best of several candidates was chosen."""


@dataclass(frozen=True)
class Choice:
    """What the times say."""

    winner: str
    """The version to seat: a candidate's name, or that of the original."""
    best: str | None
    """The fastest candidate, seated or not; None if there was none."""
    original_us: float
    """Mean of the original's two medians."""
    best_us: float | None
    spread_us: float
    """How far two timings of the same version lie apart; a smaller difference is a tie."""
    tie: bool
    """True if original and best candidate differ by less than the spread."""


def decide(
    timings: Mapping[str, Timing],
    *,
    original: str = "original",
    repeat: str = "original again",
    policy: Literal["fastest", "verified"] = "fastest",
) -> Choice:
    """Choose between the original, which was timed twice in the same run, and the candidates (all other names).

    `fastest`: the fastest candidate, if it beats the original by more than the spread; a tie keeps the original.
    `verified`: the fastest candidate whatever the original's time. Raises UsageError if the original's timings are
    missing.
    """
    if missing := [name for name in (original, repeat) if name not in timings]:
        raise UsageError(f"`{missing[0]}` was not timed: time the original twice, interleaved with the candidates")
    first, second = timings[original], timings[repeat]
    original_us = (first.median_us + second.median_us) / 2
    candidates = {name: t for name, t in timings.items() if name not in (original, repeat)}
    best = min(candidates, key=lambda name: candidates[name].median_us, default=None)
    apart = abs(first.median_us - second.median_us)
    own_error = math.hypot(first.error_us, second.error_us) / 2
    if best is None:
        return Choice(original, None, original_us, None, max(apart, SIGMAS * own_error), tie=False)
    best_us = candidates[best].median_us
    spread_us = max(apart, SIGMAS * math.hypot(own_error, candidates[best].error_us))
    gain_us = original_us - best_us
    tie = abs(gain_us) <= spread_us
    seated = policy == "verified" or (gain_us > 0 and not tie)
    return Choice(best if seated else original, best, original_us, best_us, spread_us, tie)
