"""What the suppliers of other packages' kernels share: when they can be used, and how their Solutions are made.

A Solution's source imports the package and calls one of its functions, so nothing of the package is imported here.
What a package computes wrongly or ignores is refused by the writers, with the reason.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from packaging.version import Version

from kernelgraft.records import BuildSpec, Definition, Guard, MachineCard, Solution, SolutionMeta, SourceFile
from kernelgraft.suppliers.base import Listing, Refusal, Supplier
from kernelgraft.suppliers.wording import in_words

FLOATS = ("float32", "bfloat16", "float16")
INTERPRET = "KERNELGRAFT_INTERPRET"
"""The environment variable that offers cuTile kernels on a CPU."""
CUTILE_OLDEST = (8, 0)
"""Compute capability."""


class Operation(NamedTuple):
    """A kernel of another package in the catalogue."""

    family: str
    what: str
    """What it is, how it rounds, and what it costs besides its launch."""
    autograd: bool = False
    """True if gradients flow through the Solution's source (a draft can still say that they do not)."""
    static_shapes: bool = False
    """True if each new shape is a new compilation."""


@dataclass(frozen=True)
class Draft:
    """An operation that computes a Definition, and the source that calls it."""

    operation: str
    """Its name in the catalogue."""
    source: str
    guard: dict[str, Any] = field(default_factory=dict)
    """Fields of the Guard besides devices and dtypes."""


Writer = Callable[[Definition], Iterable[Draft | str]]
"""Drafts for a Definition, best guess first, and reasons why an operation does not serve it."""


class PeerSupplier(Supplier):
    """The kernels of one other package."""

    distribution: ClassVar[str]
    """Its name in the package index."""
    tested: ClassVar[str]
    """The version that was read and tried: an older one is refused, of a newer one the Solutions say so."""
    install: ClassVar[str]
    """The command that installs it."""
    language: ClassVar[Literal["cuda-tile", "triton"]]
    dependencies: ClassVar[tuple[str, ...]]
    operations: ClassVar[dict[str, Operation]]
    writers: ClassVar[dict[str, Writer]]

    @property
    def devices(self) -> tuple[str, ...]:
        """Device types on which its kernels are offered."""
        return ("cuda",)

    @abstractmethod
    def lacking(self, machine: MachineCard) -> str | None:
        """Why the package, which is installed, cannot be used on the machine."""

    def unavailable(self, machine: MachineCard) -> str | None:
        """See `Supplier.unavailable`."""
        found = machine.versions.get(self.distribution)
        if found is None:
            return f"{self.distribution} is not installed: {self.install}"
        if Version(found) < Version(self.tested):
            return f"{self.distribution} {found} is installed, needed is {self.tested} or newer: {self.install}"
        return self.lacking(machine)

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """See `Supplier.catalogue`."""
        return [
            Listing(
                supplier=self.name,
                name=f"{self.name}_{name}",
                family=operation.family,
                language=self.language,
                hardware=self.devices,
                guard=f"{operation.what}; {self._guard(operation, FLOATS, {}).text}",
                unavailable=self.unavailable(machine),
            )
            for name, operation in self.operations.items()
        ]

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """See `Supplier.candidates`."""
        if (reason := self.unavailable(machine)) is not None:
            return Refusal(self.name, reason)
        writer = self.writers.get(definition.meta.family)
        if writer is None:
            return Refusal(self.name, f"it has nothing for the family `{definition.meta.family}`")
        specs = (*definition.inputs.values(), *definition.outputs.values())
        if odd := sorted({spec.dtype for spec in specs if spec.dtype not in (*FLOATS, "bool")}):
            return Refusal(self.name, f"dtype {odd[0]} is not served")
        drafts, reasons = [], []
        for found in writer(definition):
            if isinstance(found, Draft):
                drafts.append(found)
            else:
                reasons.append(found)
        if not drafts:
            return Refusal(self.name, "; ".join(dict.fromkeys(reasons)))
        return [self._solution(definition, draft, machine) for draft in drafts]

    def _guard(self, operation: Operation, dtypes: tuple[str, ...], fields: dict[str, Any]) -> Guard:
        own = {"autograd": operation.autograd, "static_shapes": operation.static_shapes}
        guard = Guard(devices=self.devices, dtypes=dtypes, **(own | fields))
        return guard.model_copy(update={"text": in_words(guard)})

    def _solution(self, definition: Definition, draft: Draft, machine: MachineCard) -> Solution:
        operation, file = self.operations[draft.operation], f"{draft.operation}.py"
        dtypes = tuple(dict.fromkeys(s.dtype for s in definition.inputs.values() if s.dtype in FLOATS))
        found = machine.versions[self.distribution]
        other = "" if found == self.tested else f"; written for {self.distribution} {self.tested}, this is {found}"
        return Solution(
            name=f"{self.name}_{draft.operation}_{definition.name}",
            definition=definition.name,
            author=self.name,
            spec=BuildSpec(
                language=self.language,
                target_hardware=self.devices,
                entry_point=f"{file}::kernel",
                dependencies=self.dependencies,
            ),
            sources=(SourceFile(path=file, content=draft.source),),
            description=operation.what + other,
            meta=SolutionMeta(
                supplier=self.name,
                family=definition.meta.family,
                match="adapter",
                guard=self._guard(operation, dtypes, draft.guard),
                fingerprint=definition.meta.fingerprint,
                uses_compiler=True,
            ),
        )


def no_cutile_device(machine: MachineCard) -> str | None:
    """Why cuTile kernels cannot run on the machine's GPU."""
    if machine.compute_capability is None:
        return f"no CUDA device; {INTERPRET}=1 runs the kernels on the CPU, slowly"
    digits = "".join(c for c in machine.compute_capability if c.isdigit())
    if (int(digits[:-1]), int(digits[-1])) < CUTILE_OLDEST:
        return f"cuTile needs sm_80 or newer, this device is {machine.compute_capability}"
    return None


def text(imports: Iterable[str], *parts: str) -> str:
    """A source file: import lines, then functions and classes."""
    return "\n\n\n".join(["\n".join(imports), *(part.strip("\n") for part in parts)]) + "\n"


def function(name: str, arguments: Iterable[str], lines: Iterable[str]) -> str:
    """The source of a function."""
    return f"def {name}({', '.join(arguments)}):\n" + "\n".join(f"    {line}" if line else "" for line in lines)


def promoted(*names: str | None) -> str:
    """The dtype that torch promotes dtypes to; None is left out."""
    found = [getattr(torch, name) for name in names if name is not None]
    result = found[0]
    for dtype in found[1:]:
        result = torch.promote_types(result, dtype)
    return str(result).removeprefix("torch.")


def power_of_two(number: int) -> bool:
    """True for 1, 2, 4, …"""
    return number > 0 and number & (number - 1) == 0


def other_result(definition: Definition, expected: dict[str, str]) -> str | None:
    """What an operation returns in another dtype than the Definition; `expected`: output to the operation's dtype."""
    for name, spec in definition.outputs.items():
        if spec.dtype != expected[name]:
            return f"its {name} is {expected[name]}, the definition's {spec.dtype}"
    return None


def half_precision(definition: Definition) -> bool:
    """True if some input is in a half type, where the place of a rounding shows."""
    return any(spec.dtype in ("bfloat16", "float16") for spec in definition.inputs.values())


# Rotary embeddings


@dataclass(frozen=True)
class Turning:
    """How q and k of a Definition are brought to [batch, heads, length, size], and its tables to [1|batch, length, w].

    Expressions have a `{}` for the name of the tensor.
    """

    tables: tuple[str, ...]
    """Statements that set `cos` and `sin`."""
    heads_first: str
    """A contiguous tensor of the Definition's layout as [batch, heads, length, size]."""
    back_from_heads_first: str
    length_first: str
    """A tensor of the Definition's layout as [batch, length, heads, size]."""
    back_from_length_first: str


def turning(definition: Definition) -> Turning | str:
    """How the inputs of a rotary embedding are laid out; why they are not served.

    Both packages turn half-split pairs of q and k together, forwards, by the first halves of the tables.
    """
    semantics, inputs = definition.meta.semantics, definition.inputs
    if "k" not in inputs:
        return "it turns q and k together, not one alone"
    if (semantics["pairs_in"], semantics["pairs_out"]) != ("half", "half"):
        return "it turns half-split pairs, not interleaved ones"
    if semantics["direction"] != "forward":
        return "it turns forwards only"
    if semantics["rotary_dim"] < semantics["head_dim"] and semantics["placement"] != "first":
        return "of a head it turns the first channels, not the last"
    if semantics["table"] == "full" and semantics["table_layout"] != "duplicated":
        return "it reads the first half of the tables for both halves of a head, which these do not repeat"
    q = inputs["q"].dtype
    if reason := other_result(definition, {"q_out": q, "k_out": q}):
        return reason
    shape = inputs["q"].shape or ()
    row = shape.index("seq_len") if "seq_len" in shape else -1
    views = _VIEWS.get((len(shape), row))
    if views is None:
        return "q has the axes batch, heads and length, or two of them"
    return Turning(_tables(definition), *views)


def table_dtype(definition: Definition) -> str:
    """The dtype of the tables of a rotary embedding."""
    return definition.inputs["freqs" if definition.meta.semantics["table"] == "complex" else "cos"].dtype


_VIEWS = {
    (4, 2): ("{}", "{}", "{}.transpose(1, 2)", "{}.transpose(1, 2)"),
    (4, 1): ("{}.transpose(1, 2)", "{}.transpose(1, 2)", "{}", "{}"),
    (3, 0): (
        "{}.unsqueeze(0).transpose(1, 2)",
        "{}.transpose(1, 2).squeeze(0)",
        "{}.unsqueeze(0)",
        "{}.squeeze(0)",
    ),
    (3, 1): ("{}.unsqueeze(1)", "{}.squeeze(1)", "{}.unsqueeze(2)", "{}.squeeze(2)"),
}
"""Number of axes of q and the place of the length → the views of `Turning`."""


def _tables(definition: Definition) -> tuple[str, ...]:
    inputs, lines, name = definition.inputs, [], "cos"
    if definition.meta.semantics["table"] == "complex":
        lines, name = ["cos, sin = freqs[..., 0], freqs[..., 1]"], "freqs"
    labels = (inputs[name].shape or ())[: -2 if name == "freqs" else -1]
    length = labels.index("seq_len")
    if len(labels) != 2 or length != 1:
        batch = f"cos.shape[{labels.index('table_batch')}]" if "table_batch" in labels else "1"
        lines.append(f"size = ({batch}, cos.shape[{length}], cos.shape[-1])")
        lines.append("cos, sin = cos.reshape(size), sin.reshape(size)")
    return tuple(lines)


TURN_BACK = '''
class Turn(torch.autograd.Function):
    """With a gradient of its own: the package's turns the one that comes in, in place, whoever else needs it."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(q, k, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return (*turn(dq, dk, cos, -sin), None, None)
'''


def turn_source(
    definition: Definition, shape: Turning, imports: list[str], turn: list[str], decorator: str = ""
) -> str:
    """A source that turns q and k by a function `turn(q, k, cos, sin)` with these lines, also for gradients."""
    kernel = [
        *shape.tables,
        "if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):",
        "    return Turn.apply(q, k, cos, sin)",
        "return turn(q, k, cos, sin)",
    ]
    return text(
        ["import torch", *imports],
        function("turn", ["q", "k", "cos", "sin"], turn),
        TURN_BACK,
        decorator + function("kernel", definition.inputs, kernel),
    )
