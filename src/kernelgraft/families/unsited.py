"""For families whose compute stands at no single place of a model, so that no site of theirs is found yet.

Their Definitions are written for given sizes and options (`definition_for` of the module) instead of being recognised.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kernelgraft.families.base import Call, Family, Recognition, Rejection, Seat
from kernelgraft.families.reference import define, dtype_name
from kernelgraft.records import Definition, Site
from kernelgraft.sites.source import cite

Shapes = dict[str, tuple[Sequence[str] | None, torch.dtype]]


class Unsited(Family):
    """A family that is offered no sites."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    most_rows: ClassVar[int] = 150
    """Points with more rows (the product of the var axes) are judged only if they were traced."""

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """None: no kind of site holds this compute as a whole, and none is searched for it."""
        return None

    def axis_points(self, definition: Definition, traced: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """See `Family.axis_points`."""
        found = super().axis_points(definition, traced)
        return [point for point in found if point in traced or math.prod(point.values()) <= self.most_rows]

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """There is no place to put a kernel; a caller uses the kernel's function."""
        raise NotImplementedError(f"no site of the family `{self.name}` is found, so nothing can be seated")


def written(
    family: str,
    name: str,
    *,
    semantics: dict[str, Any],
    axes: dict[str, int | None],
    inputs: Shapes,
    outputs: Shapes,
    body: str,
    source: str,
    description: str,
    constraints: Sequence[str] = (),
) -> Definition:
    """A Definition that no captured call stands behind; `source`: `module:name` of the code that `body` follows."""
    module, _, symbol = source.partition(":")
    found: Any = importlib.import_module(module)
    for part in symbol.split("."):
        found = getattr(found, part)
    cited = cite(found, None, None, symbol)
    site = Site(kind="function", path="", instances=(), class_name=module, symbol=symbol, source=cited)
    digest = hashlib.sha256(json.dumps([semantics, axes, str(inputs)], sort_keys=True).encode()).hexdigest()[:8]
    first = next(iter(inputs.values()))[1]
    return define(
        name=f"{name}_{dtype_name(first)}_{digest}",
        op_type=family,
        family=family,
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        body=body,
        site=site,
        description=description,
        reference_error=0.0,
        constraints=constraints,
    )
