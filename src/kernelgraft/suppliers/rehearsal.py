"""Calling a stored Solution on tensors without memory, shaped as its Definition's captured calls."""

from __future__ import annotations

from typing import Any

import torch

from kernelgraft.errors import UsageError
from kernelgraft.records import Definition, Solution
from kernelgraft.store import Inventory
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.load import load

DEVICE = "meta"
VARIABLE_SIZES = (1, 16)
"""What every variable axis is set to where no captured call is inside the guard."""


def rehearsals(store: Inventory, solution: Solution, definition: Definition) -> list[str]:
    """Which calls to rehearse.

    `workload <uuid>` for each captured call of other shapes and strides that the guard lets through; if there is none,
    `size <number>` for all variable axes.
    """
    found, seen = [], set()
    for workload, meta in store.workloads(definition.name):
        key = (tuple(sorted(workload.axes.items())), tuple(sorted(meta.strides.items())))
        name = f"workload {workload.uuid}"
        if key not in seen and _served(solution, definition, _inputs(store, definition, name)):
            found.append(name)
        seen.add(key)
    return found or [f"size {size}" for size in VARIABLE_SIZES]


def rehearse(folder: str, solution: str, which: str) -> None:
    """Call a stored Solution; `which` is one of its `rehearsals`."""
    store = Inventory(folder)
    found = store.solutions().get(solution)
    definition = None if found is None else store.definitions().get(found.definition)
    if found is None or definition is None:
        raise UsageError(f"solution `{solution}` or its definition is not in `{folder}`")
    with torch.no_grad():
        load(found)(*_inputs(store, definition, which))


def _served(solution: Solution, definition: Definition, inputs: list[Any]) -> bool:
    guard = solution.meta.guard.model_copy(update={"devices": (DEVICE,)})
    return refuses(guard, definition, inputs) is None


def _inputs(store: Inventory, definition: Definition, which: str) -> list[Any]:
    """The Definition's inputs on `meta`, with the shapes and strides that were captured."""
    kind, _, name = which.partition(" ")
    axes: dict[str, int] = {}
    strides: dict[str, tuple[int, ...]] = {}
    scalars: dict[str, Any] = {}
    if kind == "size":
        axes = dict.fromkeys(definition.axes, int(name))
    else:
        workload, meta = next(pair for pair in store.workloads(definition.name) if pair[0].uuid == name)
        axes, strides = workload.axes, meta.strides
        scalars = {name: value.value for name, value in workload.inputs.items() if value.type == "scalar"}
    made: list[Any] = []
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            made.append(scalars.get(name, 1.0 if "float" in spec.dtype else 1))
            continue
        sizes = [axes[axis] if (const := definition.axes[axis].value) is None else const for axis in spec.shape]
        dtype = getattr(torch, spec.dtype)
        if name in strides:
            made.append(torch.empty_strided(sizes, strides[name], dtype=dtype, device=DEVICE))
        else:
            made.append(torch.empty(sizes, dtype=dtype, device=DEVICE))
    return made
