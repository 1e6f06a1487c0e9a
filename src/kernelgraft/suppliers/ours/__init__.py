"""The supplier `kernelgraft`: our cuTile kernels as Solutions. A Solution's source calls the kernel with its arguments.

They run on CUDA devices from sm_80 on. With `KERNELGRAFT_INTERPRET=1` (or `interpret=True`) they are offered on the CPU
instead, where the interpreter runs them: slow, and meant for checks.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kernelgraft import machine as machine_module
from kernelgraft.records import BuildSpec, Definition, Guard, MachineCard, Solution, SolutionMeta, SourceFile
from kernelgraft.suppliers.base import Listing, Refusal, Supplier
from kernelgraft.suppliers.ours import attention, cross_entropy, gated_mlp, linear, norms, qk_norm_rope, rope, sampling
from kernelgraft.suppliers.ours.drafts import Draft, Entry
from kernelgraft.suppliers.wording import in_words

INTERPRET = "KERNELGRAFT_INTERPRET"
OLDEST = (8, 0)
FLOATS = ("float32", "bfloat16", "float16")
WHOLE = ("bool", "int64", "int32")
"""Masks and indices."""

MODULES = (norms, gated_mlp, rope, linear, attention, qk_norm_rope, sampling, cross_entropy)
CATALOGUE: dict[str, Entry] = {name: entry for module in MODULES for name, entry in module.CATALOGUE.items()}
"""Kernel → its family, and what it is."""
_WRITERS = {family: writer for module in MODULES for family, writer in module.WRITERS.items()}


class OwnSupplier(Supplier):
    """Needs cuda-tile, and a CUDA device unless it is interpreted."""

    name: ClassVar[str] = "kernelgraft"

    def __init__(self, *, interpret: bool | None = None) -> None:
        self._interpret = interpret

    @property
    def interpret(self) -> bool:
        """True if the kernels are to run on the CPU."""
        return machine_module.environment(INTERPRET) == "1" if self._interpret is None else self._interpret

    def unavailable(self, machine: MachineCard) -> str | None:
        """See `Supplier.unavailable`."""
        if "cuda-tile" not in machine.versions:
            return "cuda-tile is not installed: pip install 'kernelgraft[cutile]'"
        if self.interpret:
            return None
        if machine.compute_capability is None:
            return f"no CUDA device; {INTERPRET}=1 runs the kernels on the CPU, slowly"
        digits = "".join(c for c in machine.compute_capability if c.isdigit())
        if (int(digits[:-1]), int(digits[-1])) < OLDEST:
            return f"cuTile needs sm_80 or newer, this device is {machine.compute_capability}"
        return None

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """See `Supplier.catalogue`."""
        return [
            Listing(
                supplier=self.name,
                name=f"kernelgraft_{kernel}",
                family=entry.family,
                language=entry.language,
                hardware=self._devices(),
                guard=f"{entry.what}; {in_words(self._guard(FLOATS, entry.autograd))}",
                unavailable=self.unavailable(machine) or self._language(entry.language, machine),
            )
            for kernel, entry in CATALOGUE.items()
        ]

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """See `Supplier.candidates`."""
        if (reason := self.unavailable(machine)) is not None:
            return Refusal(self.name, reason)
        writer = _WRITERS.get(definition.meta.family)
        if writer is None:
            return Refusal(self.name, f"it has nothing for the family `{definition.meta.family}`")
        specs = (*definition.inputs.values(), *definition.outputs.values())
        if odd := sorted({spec.dtype for spec in specs if spec.dtype not in (*FLOATS, *WHOLE)}):
            return Refusal(self.name, f"dtype {odd[0]} is not served")
        drafts = writer(definition)
        if isinstance(drafts, str):
            return Refusal(self.name, drafts)
        listed = [drafts] if isinstance(drafts, Draft) else drafts
        offered = [d for d in listed if self._language(CATALOGUE[d.kernel].language, machine) is None]
        if not offered:
            return Refusal(self.name, self._language(CATALOGUE[listed[0].kernel].language, machine) or "")
        return [self._solution(definition, draft) for draft in offered]

    def _language(self, language: str, machine: MachineCard) -> str | None:
        """Why a kernel in this language cannot be used here."""
        if language != "triton":
            return None
        if self.interpret:
            return "Triton kernels are not interpreted"
        return None if "triton" in machine.versions else "triton is not installed"

    def _devices(self) -> tuple[str, ...]:
        return ("cpu",) if self.interpret else ("cuda",)

    def _guard(self, dtypes: tuple[str, ...], autograd: bool, **fields: Any) -> Guard:
        guard = Guard(devices=self._devices(), dtypes=dtypes, autograd=autograd, **fields)
        return guard.model_copy(update={"text": in_words(guard)})

    def _solution(self, definition: Definition, draft: Draft) -> Solution:
        file = f"{draft.kernel}.py"
        entry = CATALOGUE[draft.kernel]
        dtypes = tuple(dict.fromkeys(s.dtype for s in definition.inputs.values() if s.dtype in FLOATS))
        return Solution(
            name=f"kernelgraft_{draft.kernel}_{definition.name}",
            definition=definition.name,
            author=self.name,
            spec=BuildSpec(
                language=entry.language,
                target_hardware=self._devices(),
                entry_point=f"{file}::kernel",
                dependencies=("torch", entry.language, "kernelgraft"),
            ),
            sources=(SourceFile(path=file, content=draft.source),),
            description=entry.what,
            meta=SolutionMeta(
                supplier=self.name,
                family=definition.meta.family,
                guard=self._guard(dtypes, entry.autograd, **draft.guard),
                fingerprint=definition.meta.fingerprint,
                uses_compiler=True,
            ),
        )


SUPPLIER = OwnSupplier()
