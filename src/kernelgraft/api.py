"""The two public functions that belong to no stage."""

from __future__ import annotations

from pathlib import Path

from kernelgraft import machine
from kernelgraft.errors import UsageError
from kernelgraft.records import Graft, MachineCard
from kernelgraft.store import Inventory
from kernelgraft.suppliers import all_suppliers


def load(folder: Path | str) -> Graft:
    """The graft that `integrate` wrote to a folder. UsageError if there is none, RecordError if corrupt."""
    root = Path(folder)
    if not (root / "graft.json").is_file():
        raise UsageError(f"folder `{root}` holds no graft: run `kernelgraft run MODEL --out {root}`")
    return Inventory(root).load_record("graft", Graft)


def doctor() -> tuple[MachineCard, dict[str, str | None]]:
    """This machine, and per supplier why it cannot be used here (None: it can)."""
    card = machine.read()
    return card, {s.name: s.unavailable(card) for s in all_suppliers()}
