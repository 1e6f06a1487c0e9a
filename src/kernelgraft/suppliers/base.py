"""What a supplier is: where Solutions come from. Others add one through the entry points `kernelgraft.suppliers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kernelgraft.records import Definition, MachineCard, Solution

ENTRY_POINT_GROUP = "kernelgraft.suppliers"


@dataclass(frozen=True)
class Listing:
    """One line of the catalogue: what a supplier has, whether or not it runs here."""

    supplier: str
    name: str
    family: str
    language: str
    hardware: tuple[str, ...]
    guard: str
    """In words."""
    unavailable: str | None
    """Why it cannot be used on this machine; None if it can."""


@dataclass(frozen=True)
class Refusal:
    """A supplier has nothing for a Definition, and says why."""

    supplier: str
    reason: str


class Supplier(ABC):
    """A source of Solutions."""

    name: ClassVar[str]
    slow_on_gpu: ClassVar[bool] = False
    """True if judging its Solutions takes a minute each on a GPU: there they are judged only where it is named."""

    @abstractmethod
    def unavailable(self, machine: MachineCard) -> str | None:
        """Why nothing of this supplier can run on the machine; None if it can. Must not import heavy packages."""

    @abstractmethod
    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """Everything it has, for `kernelgraft inventory`."""

    @abstractmethod
    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """Solutions for one Definition, best guess first; the semantics must be served exactly or through an adapter
        that is part of the Solution's source (`meta.match`). A variant that it would compute wrongly is refused."""
