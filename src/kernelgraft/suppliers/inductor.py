"""The supplier `inductor`: the Definition's reference compiled by torch.compile, once for each shape."""

from __future__ import annotations

from typing import ClassVar

from kernelgraft import families
from kernelgraft import machine as machine_module
from kernelgraft.records import BuildSpec, Definition, Guard, MachineCard, Solution, SolutionMeta, SourceFile
from kernelgraft.suppliers.base import Listing, Refusal, Supplier
from kernelgraft.suppliers.wording import in_words

_TAIL = """

kernel = torch.compile(run, dynamic=False, fullgraph=True)
"""
WHAT = "torch.compile of the reference, one compilation a shape"


class InductorSupplier(Supplier):
    """Needs a C++ compiler on a CPU, Triton on a GPU."""

    name: ClassVar[str] = "inductor"
    slow_on_gpu: ClassVar[bool] = True

    def unavailable(self, machine: MachineCard) -> str | None:
        """See `Supplier.unavailable`."""
        if machine.gpu is not None:
            return None if "triton" in machine.versions else "triton is not installed: pip install triton"
        if machine_module.cxx_compiler() is None:
            return "no C++ compiler: install g++ or set CXX"
        return None

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """See `Supplier.catalogue`."""
        device = _device(machine)
        guard = Guard(devices=(device,), autograd=False, static_shapes=True)
        return [
            Listing(
                supplier=self.name,
                name=f"inductor_{family}",
                family=family,
                language="python",
                hardware=(device,),
                guard=f"{WHAT}; {in_words(guard)}",
                unavailable=self.unavailable(machine),
            )
            for family in families.NAMES
            if family != "linear"
        ]

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """See `Supplier.candidates`."""
        if (reason := self.unavailable(machine)) is not None:
            return Refusal(self.name, reason)
        if definition.op_type == "gemm":
            return Refusal(self.name, "it calls the same product as the original, and there is nothing to fuse")
        if sum(axis.type == "var" for axis in definition.axes.values()) > 2:
            # Batch and length are settled for a request; a third size (keys seen so far) grows with every token.
            return Refusal(self.name, "its sizes change with every token: it would compile at each")
        specs = (*definition.inputs.values(), *definition.outputs.values())
        if odd := sorted({s.dtype for s in specs if s.dtype.startswith("float") and s.dtype not in Guard().dtypes}):
            return Refusal(self.name, f"dtype {odd[0]} is not served")
        guard = Guard(
            devices=(_device(machine),),
            dtypes=tuple(dict.fromkeys(s.dtype for s in definition.inputs.values() if "float" in s.dtype)),
            autograd=False,
            static_shapes=True,
        )
        return [
            Solution(
                name=f"inductor_{definition.name}",
                definition=definition.name,
                author=self.name,
                spec=BuildSpec(
                    language="python",
                    target_hardware=guard.devices,
                    entry_point="compiled.py::kernel",
                    dependencies=("torch",),
                ),
                sources=(SourceFile(path="compiled.py", content=definition.reference.rstrip() + "\n" + _TAIL),),
                description=WHAT,
                meta=SolutionMeta(
                    supplier=self.name,
                    family=definition.meta.family,
                    guard=guard.model_copy(update={"text": in_words(guard)}),
                    fingerprint=definition.meta.fingerprint,
                    uses_compiler=True,
                ),
            )
        ]


def _device(machine: MachineCard) -> str:
    return "cpu" if machine.gpu is None else "cuda"


SUPPLIER = InductorSupplier()
