"""The supplier `kernelgraft`: our cuTile kernels as Solutions. A Solution's source calls the kernel with its arguments.

They run on CUDA devices from sm_80 on. With `KERNELGRAFT_INTERPRET=1` (or `interpret=True`) they are offered on the CPU
instead, where the interpreter runs them: slow, and meant for checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernelgraft import machine as machine_module
from kernelgraft.records import BuildSpec, Definition, Guard, MachineCard, Solution, SolutionMeta, SourceFile
from kernelgraft.suppliers.base import Listing, Refusal, Supplier
from kernelgraft.suppliers.wording import in_words

INTERPRET = "KERNELGRAFT_INTERPRET"
OLDEST = (8, 0)
FLOATS = ("float32", "bfloat16", "float16")

CATALOGUE = {
    "rms_norm": ("rms_norm", "one launch; the weight or one plus it; every place where the original rounds"),
    "layer_norm": ("layer_norm", "one launch; with or without weight and bias"),
    "add_rms_norm": ("residual_norm", "a residual addition and an RMS norm, before or after it, in one launch"),
    "add_layer_norm": ("residual_norm", "a residual addition and a layer norm, before or after it, in one launch"),
    "rope": ("rope", "q and k in one launch; any even number of rotated channels, half-split or interleaved pairs"),
    "act_and_mul": ("gated_mlp", "activation(gate) * up in one launch, from two tensors or from one that holds both"),
}
"""Kernel → its family, and what it is."""


@dataclass(frozen=True)
class Draft:
    """A kernel that computes a Definition, and the source that calls it."""

    kernel: str
    source: str
    autograd: bool = True


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
                family=family,
                language="cuda-tile",
                hardware=self._devices(),
                guard=f"{what}; {in_words(self._guard(FLOATS, kernel != 'add_layer_norm'))}",
                unavailable=self.unavailable(machine),
            )
            for kernel, (family, what) in CATALOGUE.items()
        ]

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """See `Supplier.candidates`."""
        if (reason := self.unavailable(machine)) is not None:
            return Refusal(self.name, reason)
        writer = _WRITERS.get(definition.meta.family)
        if writer is None:
            return Refusal(self.name, f"it has nothing for the family `{definition.meta.family}`")
        specs = (*definition.inputs.values(), *definition.outputs.values())
        if odd := sorted({spec.dtype for spec in specs if spec.dtype not in FLOATS}):
            return Refusal(self.name, f"dtype {odd[0]} is not served")
        draft = writer(definition)
        if isinstance(draft, str):
            return Refusal(self.name, draft)
        return [self._solution(definition, draft)]

    def _devices(self) -> tuple[str, ...]:
        return ("cpu",) if self.interpret else ("cuda",)

    def _guard(self, dtypes: tuple[str, ...], autograd: bool) -> Guard:
        guard = Guard(devices=self._devices(), dtypes=dtypes, autograd=autograd)
        return guard.model_copy(update={"text": in_words(guard)})

    def _solution(self, definition: Definition, draft: Draft) -> Solution:
        file = f"{draft.kernel}.py"
        dtypes = tuple(dict.fromkeys(spec.dtype for spec in definition.inputs.values()))
        return Solution(
            name=f"kernelgraft_{draft.kernel}_{definition.name}",
            definition=definition.name,
            author=self.name,
            spec=BuildSpec(
                language="cuda-tile",
                target_hardware=self._devices(),
                entry_point=f"{file}::kernel",
                dependencies=("torch", "cuda-tile", "kernelgraft"),
            ),
            sources=(SourceFile(path=file, content=draft.source),),
            description=CATALOGUE[draft.kernel][1],
            meta=SolutionMeta(
                supplier=self.name,
                family=definition.meta.family,
                guard=self._guard(dtypes, draft.autograd),
                fingerprint=definition.meta.fingerprint,
                uses_compiler=True,
            ),
        )


def _source(module: str, function: str, definition: Definition, lines: list[str]) -> str:
    """A file that imports one function and defines `kernel`."""
    body = "\n".join(f"    {line}" for line in lines)
    imported = f"from kernelgraft.kernels.{module} import {function}"
    return f"{imported}\n\n\ndef kernel({', '.join(definition.inputs)}):\n{body}\n"


def _call(function: str, arguments: list[str], keywords: dict[str, Any]) -> str:
    return f"{function}({', '.join([*arguments, *(f'{k}={v!r}' for k, v in keywords.items())])})"


def _promoted(*names: str | None) -> str:
    found = [getattr(torch, name) for name in names if name is not None]
    result = found[0]
    for dtype in found[1:]:
        result = torch.promote_types(result, dtype)
    return str(result).removeprefix("torch.")


def _norm(
    norm: dict[str, Any], family: str, x: str, weight: str | None, bias: str | None
) -> tuple[dict[str, Any], str] | str:
    """Keywords of a norm's function for its semantics, and the dtype of its result; why it cannot compute them."""
    keywords: dict[str, Any] = {}
    if norm["offset"]:
        keywords = {"offset": True, "round_offset": norm["offset_dtype"] == "weight"}
    if norm.get("inverse") == "division":
        keywords["divide"] = True
    plain = norm["form"] == "functional" and not norm.get("upcast")
    if plain and {weight, bias} - {None, x}:
        return "torch's own call does not mix dtypes"
    if family == "layer_norm":
        if norm["form"] == "functional" or norm["cast"] == "after_weight":
            return keywords, x
        return keywords | {"round_normed": True}, _promoted(x, weight, bias)
    cast = norm["cast"]
    keywords["cast"] = cast
    if weight is None or cast == "after_weight":
        return keywords, x
    if cast == "weight_dtype":
        return keywords, weight if weight != "float32" else "float32"
    return keywords, _promoted(x, weight)


def _vectors(definition: Definition) -> tuple[str | None, str | None]:
    weight, bias = (definition.inputs[n].dtype if n in definition.inputs else None for n in ("weight", "bias"))
    return weight, bias


def _norm_draft(definition: Definition) -> Draft | str:
    family, semantics = definition.meta.family, definition.meta.semantics
    x = definition.inputs["hidden_states"].dtype
    found = _norm(semantics, family, x, *_vectors(definition))
    if isinstance(found, str):
        return found
    keywords, dtype = found
    if (wanted := definition.outputs["output"].dtype) != dtype:
        return f"its result is {dtype}, the definition's {wanted}"
    call = _call(family, _norm_arguments(definition, family), {"eps": semantics["eps"], **keywords})
    return Draft(family, _source(family, family, definition, [f"return {call}"]))


def _norm_arguments(definition: Definition, family: str) -> list[str]:
    """All inputs by position; a bias without a weight leaves the weight's place empty.

    Torch's own norms give a contiguous result whatever the strides of their input, ours keeps them.
    """
    names = list(definition.inputs)
    semantics = definition.meta.semantics
    if semantics.get("norm", semantics)["form"].startswith("functional"):
        names = [f"{name}.contiguous()" if name in ("hidden_states", "residual") else name for name in names]
    if family == "layer_norm" and "bias" in names and "weight" not in names:
        names.insert(names.index("bias"), "None")
    return names


def _residual_draft(definition: Definition) -> Draft | str:
    order, norm = definition.meta.semantics["order"], definition.meta.semantics["norm"]
    family, inputs = norm["family"], definition.inputs
    residual, x = inputs["residual"].dtype, inputs["hidden_states"].dtype
    total = _promoted(residual, x)
    found = _norm(norm, family, total if order == "pre" else x, *_vectors(definition))
    if isinstance(found, str):
        return found
    keywords, dtype = found
    expected = {"sum": total, "normed": dtype} if order == "pre" else {"sum": _promoted(residual, dtype)}
    for name, spec in definition.outputs.items():
        if spec.dtype != expected[name]:
            return f"its {name} is {expected[name]}, the definition's {spec.dtype}"
    function = f"add_{family}" if order == "pre" else f"{family}_add"
    module = "add_rms_norm" if family == "rms_norm" else "layer_norm"
    call = _call(function, _norm_arguments(definition, family), {"eps": norm["eps"], **keywords})
    source = _source(module, function, definition, [f"return {call}"])
    return Draft(f"add_{family}", source, autograd=family == "rms_norm")


def _gated_draft(definition: Definition) -> Draft | str:
    semantics = definition.meta.semantics
    keywords: dict[str, Any] = {"activation": semantics["activation"]}
    if semantics["packed"]:
        keywords["packed"] = semantics["packed"]
    if semantics["upcast"]:
        keywords["upcast"] = True
    if semantics["clamp"]:
        keywords |= {"clamp": semantics["clamp"], "limit": float(semantics["limit"])}
    from kernelgraft.kernels.act_and_mul import ACTIVATIONS, ALIASES

    if semantics["activation"] not in {*ACTIVATIONS, *ALIASES}:
        return f"it has no activation `{semantics['activation']}`"
    function = "packed_act_and_mul" if semantics["packed"] else "act_and_mul"
    call = _call(function, list(definition.inputs), keywords)
    return Draft("act_and_mul", _source("act_and_mul", function, definition, [f"return {call}"]))


def _rope_draft(definition: Definition) -> Draft | str:
    semantics, inputs = definition.meta.semantics, definition.inputs
    shape = inputs["q"].shape or ()
    row = shape.index("seq_len") if "seq_len" in shape else -1
    if (len(shape), row) not in ((4, 1), (4, 2), (3, 0), (3, 1)):
        return "q has the axes batch, heads and length, or two of them"
    lines, tables = _tables(definition)
    rotated = [name for name in ("q", "k") if name in inputs]
    extra = None
    if len(shape) == 3:
        extra, row = (0, 1) if row == 0 else (2, 1)
        lines += [f"{name} = {name}.unsqueeze({extra})" for name in rotated]
    keywords: dict[str, Any] = {"row_axis": row, "rotary_dim": semantics["rotary_dim"]}
    if semantics["placement"] == "last":
        keywords["last"] = True
    keywords |= {"pairs_in": semantics["pairs_in"], "pairs_out": semantics["pairs_out"]}
    keywords["table"] = "half" if semantics["table"] == "complex" else semantics["table"]
    if semantics["direction"] == "backward":
        keywords["backward"] = True
    keywords |= {"compute": semantics["compute"], "cast": semantics["cast"]}
    q = inputs["q"].dtype
    table = inputs["freqs" if semantics["table"] == "complex" else "cos"].dtype
    wide = _promoted(q, table, "float32" if semantics["compute"] == "float32" else None)
    expected = q if semantics["cast"] else wide
    if (wanted := definition.outputs["q_out"].dtype) != expected:
        return f"its result is {expected}, the definition's {wanted}"
    call = _call("rope", ["q", "k" if "k" in inputs else "None", *tables], keywords)
    names = [f"{name}_out" for name in rotated]
    results = [f"{name}.squeeze({extra})" if extra is not None else name for name in names]
    lines += [f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}", f"return {', '.join(results)}"]
    return Draft("rope", _source("rope", "rope", definition, lines))


def _tables(definition: Definition) -> tuple[list[str], list[str]]:
    """Lines that bring the tables to [1 or batch, length, values], and their names."""
    inputs = definition.inputs
    lines = []
    name = "cos"
    if definition.meta.semantics["table"] == "complex":
        lines, name = ["cos, sin = freqs[..., 0], freqs[..., 1]"], "freqs"
    labels = (inputs[name].shape or ())[: -2 if name == "freqs" else -1]
    length = labels.index("seq_len")
    if len(labels) != 2 or length != 1:
        batch = f"cos.shape[{labels.index('table_batch')}]" if "table_batch" in labels else "1"
        lines.append(f"size = ({batch}, cos.shape[{length}], cos.shape[-1])")
        lines.append("cos, sin = cos.reshape(size), sin.reshape(size)")
    return lines, ["cos", "sin"]


_WRITERS = {
    "rms_norm": _norm_draft,
    "layer_norm": _norm_draft,
    "residual_norm": _residual_draft,
    "gated_mlp": _gated_draft,
    "rope": _rope_draft,
}

SUPPLIER = OwnSupplier()
