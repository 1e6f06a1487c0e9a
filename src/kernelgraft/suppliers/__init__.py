"""Where Solutions come from: ours, and those that installed packages register under `kernelgraft.suppliers`.

An entry point gives a Supplier, a Supplier class or a function that returns one; its name is the supplier's name. One
that cannot be loaded stays in the list as unavailable, with its error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence

from kernelgraft.errors import UsageError
from kernelgraft.records import Definition, MachineCard, Solution
from kernelgraft.suppliers.base import ENTRY_POINT_GROUP, Listing, Refusal, Supplier

OWN = {
    "torch": "kernelgraft.suppliers.torch_ops",
    "inductor": "kernelgraft.suppliers.inductor",
    "kernelgraft": "kernelgraft.suppliers.ours",
    "tilegym": "kernelgraft.suppliers.tilegym",
    "liger": "kernelgraft.suppliers.liger",
    "hub": "kernelgraft.suppliers.hub",
}
"""Our suppliers by name, in the order in which they are asked; each module exports `SUPPLIER`."""

__all__ = ["OWN", "BrokenSupplier", "Listing", "Refusal", "Supplier", "all_suppliers", "select"]


class BrokenSupplier(Supplier):
    """An entry point that could not be loaded: it has nothing, and says why."""

    def __init__(self, name: str, reason: str) -> None:
        vars(self)["name"] = name  # the base class has it as a class variable; here each instance has its own
        self.reason = reason

    def unavailable(self, machine: MachineCard) -> str | None:
        """See `Supplier.unavailable`."""
        return self.reason

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """One line that carries the reason."""
        return [Listing(self.name, self.name, "any", "python", (), "", self.reason)]

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """See `Supplier.candidates`."""
        return Refusal(self.name, self.reason)


def all_suppliers() -> list[Supplier]:
    """Ours first, then those of other packages by name."""
    found: dict[str, Supplier] = {name: importlib.import_module(module).SUPPLIER for name, module in OWN.items()}
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for point in sorted(points, key=lambda p: p.name):
        if point.name in found:
            label = f"{point.name} ({point.value})"
            found[label] = BrokenSupplier(label, f"the name `{point.name}` is taken; rename the entry point")
        else:
            found[point.name] = _load(point)
    return list(found.values())


def select(names: Sequence[str] | None) -> list[Supplier]:
    """The suppliers of these names, in that order; None: all. UsageError for an unknown one."""
    known = {supplier.name: supplier for supplier in all_suppliers()}
    if names is None:
        return list(known.values())
    for name in names:
        if name not in known:
            raise UsageError(f"unknown supplier `{name}`; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _load(point: importlib.metadata.EntryPoint) -> Supplier:
    try:
        loaded = point.load()
        supplier = loaded if isinstance(loaded, Supplier) else loaded()
    except Exception as error:  # whatever a third party's import raises is what the listing says
        return BrokenSupplier(point.name, f"`{point.value}` cannot be loaded: {type(error).__name__}: {error}")
    if not isinstance(supplier, Supplier):
        return BrokenSupplier(point.name, f"`{point.value}` is a {type(supplier).__name__}, not a Supplier")
    if supplier.name != point.name:
        return BrokenSupplier(point.name, f"`{point.value}` calls itself `{supplier.name}`; use one name")
    return supplier
