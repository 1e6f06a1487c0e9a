"""The supplier `torch`: Solutions in plain torch, with fewer or fused operations than the original usually has."""

from __future__ import annotations

from typing import ClassVar

from kernelgraft.records import BuildSpec, Definition, Guard, MachineCard, Solution, SolutionMeta, SourceFile
from kernelgraft.suppliers import torch_sources
from kernelgraft.suppliers.base import Listing, Refusal, Supplier
from kernelgraft.suppliers.wording import in_words

DEVICES = ("cpu", "cuda")


class TorchSupplier(Supplier):
    """Needs nothing but torch."""

    name: ClassVar[str] = "torch"

    def unavailable(self, machine: MachineCard) -> str | None:
        """See `Supplier.unavailable`."""
        return None if "torch" in machine.versions else "torch is not installed"

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """See `Supplier.catalogue`."""
        return [
            Listing(
                supplier=self.name,
                name=f"torch_{family}_{variant}",
                family=family,
                language="python",
                hardware=_devices(family, variant),
                guard=f"{what}; {_served(family, variant)}",
                unavailable=self.unavailable(machine) or _no_device(family, variant, machine),
            )
            for family in torch_sources.FAMILIES
            for variant, what in torch_sources.catalogue(family).items()
        ]

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """See `Supplier.candidates`."""
        if (reason := self.unavailable(machine)) is not None:
            return Refusal(self.name, reason)
        found = torch_sources.drafts(definition)
        if isinstance(found, str):
            return Refusal(self.name, found)
        family = definition.meta.family
        return [self._solution(definition, d) for d in found if _no_device(family, d.variant, machine) is None]

    def _solution(self, definition: Definition, draft: torch_sources.Draft) -> Solution:
        family = definition.meta.family
        devices = _devices(family, draft.variant)
        guard = Guard(
            devices=devices,
            dtypes=torch_sources.float_dtypes(definition),
            autograd=draft.autograd,
            contiguous=draft.contiguous,
            last_dim_contiguous=draft.last_dim_contiguous,
            max_axes=draft.max_axes,
            equal_axes=draft.equal_axes,
        )
        file = f"{draft.variant}.py"
        return Solution(
            name=f"torch_{draft.variant}_{definition.name}",
            definition=definition.name,
            author=self.name,
            spec=BuildSpec(
                language="python",
                target_hardware=devices,
                entry_point=f"{file}::kernel",
                dependencies=draft.dependencies,
            ),
            sources=(SourceFile(path=file, content=draft.source),),
            description=torch_sources.catalogue(family)[draft.variant],
            meta=SolutionMeta(
                supplier=self.name,
                family=family,
                match=draft.match,
                guard=guard.model_copy(update={"text": in_words(guard)}),
                fingerprint=definition.meta.fingerprint,
            ),
        )


def _devices(family: str, variant: str) -> tuple[str, ...]:
    return ("cuda",) if variant in torch_sources.gpu_only(family) else DEVICES


def _no_device(family: str, variant: str, machine: MachineCard) -> str | None:
    return "no CUDA device" if machine.gpu is None and variant in torch_sources.gpu_only(family) else None


def _served(family: str, variant: str) -> str:
    """Dtypes and devices, in words."""
    half_only = variant in torch_sources.gpu_only(family)
    return "bfloat16 or float16 on cuda" if half_only else "float32, bfloat16 or float16 on cpu or cuda"


SUPPLIER = TorchSupplier()
