"""Which cases of `kernels.py` come first, and how a run's results join those of runs before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

OURS = "kernelgraft"
FIRST = ("attention_prefill", "attention_decode", "linear_decode", "qk_norm_rope", "rms_norm", "add_rms_norm")
"""Kernels in the order in which they are wanted where time is short; others follow."""

Key = tuple[str, str, str]
"""Kernel, model, regime."""


def key(line: dict[str, Any]) -> Key:
    """Which case a contestant's line belongs to."""
    return line["kernel"], line["model"], line["regime"]


def settled(old: dict[str, Any]) -> set[Key]:
    """The cases for which an earlier result holds a time of ours."""
    return {key(line) for line in old.get("cases", ()) if line["who"] == OURS and line.get("device_us") is not None}


def rank(case: Key, known: Collection[Key], again: Collection[str] = ()) -> tuple[int, int]:
    """What cases are sorted by: kernels to be measured `again`, cases without a result, the others.

    Each in the order of `again` and of the `FIRST` kernels.
    """
    if case[0] in again:
        return 0, list(again).index(case[0])
    return 1 + (case in known), FIRST.index(case[0]) if case[0] in FIRST else len(FIRST)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new result with the cases that only the old one has; a case is replaced as a whole.

    `runs` says when, on what and how fast a copy was, for each run that cases are from: a case's `run` counts in it.
    """
    runs = [*old.get("runs", _runs(old)), *_runs(new)]
    replaced = {key(line) for line in new["cases"]}
    kept = [{"run": 0, **line} for line in old.get("cases", ()) if key(line) not in replaced]
    cases = [*kept, *({**line, "run": len(runs) - 1} for line in new["cases"])]
    order: dict[str, int] = {}
    for line in (*old.get("cases", ()), *new["cases"]):
        order.setdefault(line["kernel"], len(order))
    cases.sort(key=lambda line: order[line["kernel"]])
    done = {key(line) for line in cases}
    skipped = [*old.get("skipped", ()), *new["skipped"]]
    left: Sequence[Key] = list(dict.fromkeys(tuple(one) for one in skipped if tuple(one) not in done))
    return {**old, **new, "cases": cases, "skipped": [list(one) for one in left], "runs": runs}


def _runs(result: dict[str, Any]) -> list[dict[str, Any]]:
    if not result:
        return []
    return [{name: result.get(name) for name in ("time", "copy_gbps", "machine")}]
