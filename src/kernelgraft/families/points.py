"""Which sizes a Definition is judged on."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from kernelgraft.records import Definition

EDGES = (1, 2, 3, 17, 127, 1021)
LARGEST_ELEMENTS = 1 << 21
"""No generated input has more elements than this, so that the sweep stays fast on a CPU."""


def holds(constraints: Sequence[str], axes: dict[str, int]) -> bool:
    """True if every constraint (a Python expression over axis names) is true for these sizes."""
    return all(
        bool(eval(compile(ast.parse(c, mode="eval"), "<constraint>", "eval"), {}, dict(axes))) for c in constraints
    )


def axis_points(definition: Definition, traced: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """Sizes of the var axes: the traced ones, and per axis the edges {1, 2, 3, 17, 127, B-1, B, B+1, 2B, 1021}.

    Points that break a constraint, or whose inputs would be too large, are left out.
    """
    const = {n: a.value for n, a in definition.axes.items() if a.value is not None}
    base = dict(traced[0]) if traced else {n: 4 for n, a in definition.axes.items() if a.value is None}
    points: list[dict[str, int]] = [dict(t) for t in traced]
    for axis in base:
        b = max(t[axis] for t in (traced or [base]))
        for size in dict.fromkeys((*EDGES, b - 1, b, b + 1, 2 * b)):
            points.append({**base, axis: size})
    points.append({axis: 3 for axis in base})

    def fits(point: dict[str, int]) -> bool:
        sizes = {**const, **point}
        if min(point.values(), default=1) < 1 or not holds(definition.constraints, sizes):
            return False
        for spec in definition.inputs.values():
            elements = 1
            for name in spec.shape or ():
                elements *= sizes[name]
            if elements > LARGEST_ELEMENTS:
                return False
        return True

    unique = {tuple(sorted(p.items())): p for p in points}
    return [p for p in unique.values() if fits(p)]
