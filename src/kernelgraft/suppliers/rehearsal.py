"""Calling a stored Solution on tensors without memory, shaped as its Definition's captured calls."""

from __future__ import annotations

from typing import Any

import torch

from kernelgraft.errors import UsageError
from kernelgraft.records import Definition, Workload, WorkloadMeta
from kernelgraft.store import Inventory
from kernelgraft.suppliers.load import load

VARIABLE_SIZES = (1, 16)
"""What every variable axis is set to where no call was captured."""


def captured(store: Inventory, definition: Definition) -> dict[str, tuple[Workload, WorkloadMeta]]:
    """The captured calls whose shapes and strides differ, by uuid."""
    found: dict[str, tuple[Workload, WorkloadMeta]] = {}
    seen = set()
    for workload, meta in store.workloads(definition.name):
        key = (tuple(sorted(workload.axes.items())), tuple(sorted(meta.strides.items())))
        if key not in seen:
            seen.add(key)
            found[workload.uuid] = (workload, meta)
    return found


def inputs(
    definition: Definition, axes: dict[str, int], strides: dict[str, tuple[int, ...]], scalars: dict[str, Any]
) -> list[Any]:
    """The Definition's inputs on `meta`; contiguous where no strides are given."""
    made: list[Any] = []
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            made.append(scalars.get(name, 1.0 if "float" in spec.dtype else 1))
            continue
        sizes = [axes[axis] if (const := definition.axes[axis].value) is None else const for axis in spec.shape]
        dtype = getattr(torch, spec.dtype)
        if name in strides:
            made.append(torch.empty_strided(sizes, strides[name], dtype=dtype, device="meta"))
        else:
            made.append(torch.empty(sizes, dtype=dtype, device="meta"))
    return made


def rehearse(folder: str, solution: str, workload: str | None, size: int = 1) -> None:
    """Call a stored Solution as in a captured call, or with every variable axis of one size."""
    store = Inventory(folder)
    found = store.solutions().get(solution)
    definition = None if found is None else store.definitions().get(found.definition)
    if found is None or definition is None:
        raise UsageError(f"solution `{solution}` or its definition is not in `{folder}`")
    axes = dict.fromkeys(definition.axes, size)
    strides: dict[str, tuple[int, ...]] = {}
    scalars: dict[str, Any] = {}
    if workload is not None:
        held, meta = captured(store, definition)[workload]
        axes, strides = dict(held.axes), meta.strides
        scalars = {name: value.value for name, value in held.inputs.items() if value.type == "scalar"}
    with torch.no_grad():
        load(found)(*inputs(definition, axes, strides, scalars))
