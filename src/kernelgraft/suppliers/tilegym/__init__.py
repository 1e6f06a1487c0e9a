"""The supplier `tilegym`: NVIDIA TileGym's cuTile operations as Solutions, with what they get wrong left out.

Its distribution pins an old transformers, so that it is installed alone: `pip install --no-deps tilegym`. Operations
are called where they are implemented in cuTile (`ops.json` names them), past TileGym's dispatcher: its backend is a
setting of the whole process, and a Solution says in which language it is.

Tuning: TileGym would time its configurations at the first call of each new shape, for seconds in the middle of a
generation, and print tables. Here it takes its fixed configuration, only for the time of the call, unless the
environment says otherwise (`TILEGYM_DISABLE_AUTOTUNE=0`). The fused residual norm tunes its occupancy once for a row
size whatever that says. Importing TileGym replaces `cuda.tile.launch` for the process by a wrapper that does the same.

torch.compile: an operation is a break in the graph (each source says `torch.compiler.disable`): launches of cuTile
kernels cannot be traced, and TileGym registers no custom operators.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from kernelgraft import machine as machine_module
from kernelgraft.records import Guard, MachineCard
from kernelgraft.suppliers.peers import INTERPRET, Operation, PeerSupplier, Writer, no_cutile_device
from kernelgraft.suppliers.tilegym import attention, gated_mlp, norms, rope

MODULES = (norms, gated_mlp, rope, attention)


class TileGymSupplier(PeerSupplier):
    """Needs tilegym and cuda-tile, and a CUDA device unless its kernels are interpreted."""

    name: ClassVar[str] = "tilegym"
    distribution: ClassVar[str] = "tilegym"
    tested: ClassVar[str] = "1.5.1"
    install: ClassVar[str] = "pip install --no-deps tilegym==1.5.1, beside pip install 'kernelgraft[cutile]'"
    language: ClassVar[Literal["cuda-tile", "triton"]] = "cuda-tile"
    dependencies: ClassVar[tuple[str, ...]] = ("torch", "cuda-tile", "tilegym", "kernelgraft")
    operations: ClassVar[dict[str, Operation]] = {n: o for module in MODULES for n, o in module.OPERATIONS.items()}
    writers: ClassVar[dict[str, Writer]] = {family: w for module in MODULES for family, w in module.WRITERS.items()}

    def __init__(self, *, interpret: bool | None = None) -> None:
        self._interpret = interpret

    @property
    def interpret(self) -> bool:
        """True if the kernels are to run on the CPU."""
        return machine_module.environment(INTERPRET) == "1" if self._interpret is None else self._interpret

    @property
    def devices(self) -> tuple[str, ...]:
        """See `PeerSupplier.devices`."""
        return ("cpu",) if self.interpret else ("cuda",)

    def lacking(self, machine: MachineCard) -> str | None:
        """See `PeerSupplier.lacking`."""
        if "cuda-tile" not in machine.versions:
            return "cuda-tile is not installed: pip install 'kernelgraft[cutile]'"
        return None if self.interpret else no_cutile_device(machine)

    def _guard(self, operation: Operation, dtypes: tuple[str, ...], fields: dict[str, Any]) -> Guard:
        if self.interpret and operation.family != "rope":
            # TileGym's backward launches after the call, where nothing interprets it; that of rope is the source's own.
            fields = fields | {"autograd": False}
        return super()._guard(operation, dtypes, fields)


SUPPLIER = TileGymSupplier()
