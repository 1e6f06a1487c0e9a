"""A graft: what was accepted, where, and how fast it is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kernelgraft.records import Contribution, Evaluation, Graft, Patch, Seat, Site, Status
from kernelgraft.report.wording import (
    REGIMES,
    UNKNOWN,
    figures,
    make_table,
    model_title,
    short_name,
    signed,
    site_name,
    time_text,
)


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


def graft_table(graft: Graft, *, contributions: str | None = None) -> RenderableType:
    """Each compute with its places, candidates and times, and why one was rejected; then what each gains in the whole
    model, or, if `contributions` says where that is to be found, a line with it."""
    rows = graft_rows(graft, site_name)
    table = make_table(model_title(graft.model), GRAFT_HEADINGS, rows, numbers={2, 3, 4}, folded={1})
    reasons = [Text(f"rejected: {p.family}: {p.reason}") for p in graft.patches if p.status == "rejected"]
    more: list[RenderableType] = []
    if graft.contributions:
        shown = contribution_table(graft.contributions) if contributions is None else Text(contributions)
        more.append(shown)
    return Group(table, *reasons, Text(graft_line(graft)), *more)


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


SEAT_HEADINGS = ["family", "measured at", "original µs", "solutions, µs", "seated"]


def seat_rows(graft: Graft) -> Iterable[list[str]]:
    """Cells: every time that was measured in the model, and who was seated by it."""
    for patch in graft.patches:
        for seat in patch.seats:
            ordered = sorted(seat.candidates_us.items(), key=lambda item: item[1])
            yield [
                patch.family,
                _measured_at(seat, patch),
                UNKNOWN if seat.original_us is None else time_text(seat.original_us),
                "\n".join(f"{short_name(name, patch.definitions)} {time_text(us)}" for name, us in ordered) or UNKNOWN,
                short_name(seat.solution, patch.definitions) if seat.seated and seat.solution else "original",
            ]


def _measured_at(seat: Seat, patch: Patch) -> str:
    """`decode, batch 32`, and which Definition where there are several."""
    said = point_text(seat.regime, seat.batch, seat.prompt_tokens)
    return said if len(patch.definitions) == 1 else f"{said}: {seat.definition}"


def point_text(regime: str, batch: int | None, prompt_tokens: int | None) -> str:
    """`prefill of 512, batch 1`; a short prompt has no length."""
    length = f" of {prompt_tokens}" if regime == "prefill" and prompt_tokens else ""
    return f"{regime}{length}" + (f", batch {batch}" if batch else "")


def mode_text(graft: Graft) -> str:
    """How the times were taken."""
    how = "longer of host and device time" if graft.mode == "eager" else "device time in a CUDA graph"
    return f"Times are medians of one call, the {how}" if graft.machine.gpu else "Times are medians of one call"


ORIGINALS = "the original's"
"""In place of an interval: the graft does not serve these sizes."""
CONTRIBUTION_HEADINGS = ["compute", "run", "on ms", "off ms", "gain %", "95 % interval ms"]


def contribution_rows(contributions: Iterable[Contribution]) -> Iterable[list[str]]:
    """Cells: what each compute does for the whole model, and what the whole graft does.

    Where the graft has left a compute to the original, there is no gain and no loss to be told.
    """
    for c in contributions:
        low, high = c.interval_ms
        yield [
            contribution_name(c),
            point_text(c.regime, c.batch, c.prompt_tokens),
            figures(c.on_ms) if c.seated else UNKNOWN,
            figures(c.off_ms),
            f"{c.gain_percent:+.1f}" if c.seated else UNKNOWN,
            f"{signed(low)} to {signed(high)}" if c.seated else ORIGINALS,
        ]


def contribution_name(c: Contribution) -> str:
    """The compute; the whole graft is `all`."""
    return compute_name(c.family, c.sites)


def compute_name(family: str, sites: Iterable[str]) -> str:
    """`rms_norm (q_norm)`: the family and what its sites' keys end with, so that two of a family can be told apart."""
    ends = list(dict.fromkeys(re.split(r"[.:]", site)[-1] for site in sites))
    more = f" and {len(ends) - 1} more" if len(ends) > 1 else ""
    return family + (f" ({ends[0]}{more})" if ends else "")


def contribution_table(contributions: Iterable[Contribution]) -> RenderableType:
    """The same as a table for a terminal."""
    # Short, so that 80 columns are enough.
    rows = ([row[0], row[1].replace(", batch ", " ×"), *row[2:]] for row in contribution_rows(contributions))
    title = "What each compute does for the whole model: switched off, the rest on"
    return make_table(title, CONTRIBUTION_HEADINGS, rows, numbers=range(2, 6), folded={0})
