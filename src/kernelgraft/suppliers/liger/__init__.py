"""The supplier `liger`: Liger-Kernel's Triton operations as Solutions, with what they get wrong left out.

Operations are imported from the modules that define them, which hold the Triton ones whatever `LIGER_KERNEL_IMPL` says.
What its layers do by default and is left off: writing a gradient into the one that came in (`in_place`); where that
cannot be turned off (rotary embedding, activations of two tensors), the source has a gradient of its own.

torch.compile: Triton launches are traced; see the catalogue for what breaks the graph.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from kernelgraft.records import MachineCard
from kernelgraft.suppliers.liger import gated_mlp, norms, rope
from kernelgraft.suppliers.peers import Operation, PeerSupplier, Writer

MODULES = (norms, gated_mlp, rope)


class LigerSupplier(PeerSupplier):
    """Needs liger-kernel, triton and a CUDA device."""

    name: ClassVar[str] = "liger"
    distribution: ClassVar[str] = "liger-kernel"
    tested: ClassVar[str] = "0.8.5"
    install: ClassVar[str] = "pip install liger-kernel==0.8.5"
    language: ClassVar[Literal["cuda-tile", "triton"]] = "triton"
    dependencies: ClassVar[tuple[str, ...]] = ("torch", "triton", "liger-kernel")
    operations: ClassVar[dict[str, Operation]] = {n: o for module in MODULES for n, o in module.OPERATIONS.items()}
    writers: ClassVar[dict[str, Writer]] = {family: w for module in MODULES for family, w in module.WRITERS.items()}

    def lacking(self, machine: MachineCard) -> str | None:
        """See `PeerSupplier.lacking`."""
        if "triton" not in machine.versions:
            return "triton is not installed: pip install triton"
        return "no CUDA device" if machine.gpu is None else None


SUPPLIER = LigerSupplier()
