"""A graft: what was accepted, where, and how fast it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kernelgraft.records import Evaluation, Graft, Patch, Seat, Site, Status
from kernelgraft.report.wording import REGIMES, UNKNOWN, make_table, model_title, short_name, site_name, time_text


def leading_seats(patch: Patch) -> dict[str, Seat]:
    """One seat per regime: a seated one, else the first (a compute with several Definitions has several seats)."""
    chosen: dict[str, Seat] = {}
    for regime in REGIMES:
        own = [s for s in patch.seats if s.regime == regime]
        if own:
            chosen[regime] = next((s for s in own if s.seated), own[0])
    return chosen


def leading_solution(patch: Patch) -> str | None:
    """The first seated Solution, else the best verified one, else None."""
    return next(iter(patch.solutions), None) or next((s.solution for s in patch.seats if s.solution), None)


GRAFT_HEADINGS = ["family", "where", "right", "prefill µs", "decode µs", "seated"]


def graft_table(graft: Graft) -> RenderableType:
    """Each compute with its places, candidates and times, and why one was rejected."""
    rows = graft_rows(graft, site_name)
    table = make_table(model_title(graft.model), GRAFT_HEADINGS, rows, numbers={2, 3, 4}, folded={1})
    reasons = [Text(f"rejected: {p.family}: {p.reason}") for p in graft.patches if p.status == "rejected"]
    return Group(table, *reasons, Text(graft_line(graft)))


def graft_line(graft: Graft) -> str:
    """How much was accepted, in one line."""
    sites = sum(len(s.instances) for p in graft.accepted for s in p.sites)
    line = f"{len(graft.accepted)} of {len(graft.patches)} computes accepted, {sites} places patched"
    if graft.end_to_end is not None:
        equal = "equal" if graft.end_to_end.tokens_equal else "not equal"
        line += f"; tokens {equal}, logits differ by {graft.end_to_end.logits_rel_rmse:.1e} relative RMSE"
    return line


def graft_rows(graft: Graft, name: Callable[[Site], str]) -> Iterable[list[str]]:
    """Cells of the graft's table, one row a compute; `name` says a site."""
    for patch in graft.patches:
        own = [e for e in graft.evaluations if e.definition in patch.definitions]
        seats = leading_seats(patch)
        seated = ", ".join(dict.fromkeys(short_name(s, patch.definitions) for s in patch.solutions))
        yield [
            patch.family,
            "\n".join(f"{name(s)} ×{len(s.instances)}" for s in patch.sites),
            f"{_right(own)}/{len(own)}",
            *(_seat_text(seats.get(regime)) for regime in REGIMES),
            seated or "original",
        ]


def _right(evaluations: Sequence[Evaluation]) -> int:
    return sum(e.status is Status.PASSED for e in evaluations)


def _seat_text(seat: Seat | None) -> str:
    """`12.3 → 8.1` where the Solution is seated, `12.3 (8.1)` where the original stays."""
    if seat is None or seat.original_us is None:
        return UNKNOWN
    if seat.solution_us is None:
        return time_text(seat.original_us)
    ours = time_text(seat.solution_us)
    return time_text(seat.original_us) + (f" → {ours}" if seat.seated else f" ({ours})")
