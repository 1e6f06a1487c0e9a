"""The format `flashinfer-trace`: a trace set as FlashInfer-Bench reads it, without what only kernelgraft needs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kernelgraft.records import Graft
from kernelgraft.store import FOLDERS, Inventory

TRACE_SET = tuple(name for name in FOLDERS if name != "meta")


def write(graft: Graft, stage: Path, inventory: Inventory | None) -> None:
    """Write Definitions, Solutions, Workloads with their tensors, and Traces into the folder `stage`.

    Without an inventory there are only the graft's Definitions and Solutions: calls and traces are not part of a graft.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = inventory
        if source is None:
            source = Inventory(scratch)
            for definition in graft.definitions.values():
                source.save_definition(definition)
            for solution in graft.solutions.values():
                source.save_solution(solution)
        for folder in TRACE_SET:
            if (source.root / folder).is_dir():
                shutil.copytree(source.root / folder, stage / folder)
