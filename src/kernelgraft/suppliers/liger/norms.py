"""Which of Liger-Kernel's norms computes a Definition, and how it is called.

Its casting modes by number: 0 rounds the norm before the weight; 1 does all in float32 and rounds once. The third,
all in the input's dtype, is never taken: it sums squares in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.liger.sources import TOO_WIDE, WIDEST, calling
from kernelgraft.suppliers.peers import Draft, Operation, Writer, other_result

OPERATIONS = {
    "rms_norm": Operation(
        "rms_norm",
        "one block a row; float32 arithmetic, rounded before the weight where the original does, else once",
        autograd=True,
    ),
    "layer_norm": Operation(
        "layer_norm",
        "one block a row; float32 arithmetic, rounded once; the gradient compiles anew for each number of rows",
        autograd=True,
    ),
    "add_rms_norm": Operation(
        "residual_norm",
        "sum and RMS norm in one launch, the norm of the rounded sum; rounded before the weight where the original "
        "does, else once; the gradient compiles anew for each number of rows",
        autograd=True,
    ),
}


def _mode(norm: dict[str, Any], x: str, weight: str | None) -> int:
    return 0 if norm["cast"] in ("before_weight", "weight_dtype") and weight == x else 1


def _rms_norm(definition: Definition) -> Iterator[Draft | str]:
    semantics, inputs = definition.meta.semantics, definition.inputs
    x, weight = inputs["hidden_states"].dtype, inputs["weight"].dtype if "weight" in inputs else None
    size = definition.axes["hidden_size"].value
    if size is None or size > WIDEST:
        yield TOO_WIDE
    elif reason := other_result(definition, {"output": x}):
        yield reason
    else:
        name = "None" if weight is None else "weight"
        rest = f"{semantics['eps']!r}, {float(semantics['offset'])!r}, {_mode(semantics, x, weight)}, False"
        line = f"return LigerRMSNormFunction.apply(hidden_states, {name}, {rest})"
        imports = ["from liger_kernel.ops.rms_norm import LigerRMSNormFunction"]
        yield Draft("rms_norm", calling(imports, definition, [line]))


def _layer_norm(definition: Definition) -> Iterator[Draft | str]:
    semantics, inputs = definition.meta.semantics, definition.inputs
    size = definition.axes["hidden_size"].value
    if "weight" not in inputs or "bias" not in inputs:
        yield "it needs a weight and a bias"
    elif semantics["offset"]:
        yield "it scales by the weight, not by one plus it"
    elif size is None or size > WIDEST:
        yield TOO_WIDE
    elif reason := other_result(definition, {"output": inputs["hidden_states"].dtype}):
        yield reason
    else:
        line = f"return LigerLayerNormFunction.apply(hidden_states, weight, bias, {semantics['eps']!r})"
        imports = ["from liger_kernel.ops.layer_norm import LigerLayerNormFunction"]
        yield Draft("layer_norm", calling(imports, definition, [line]))


def _residual_norm(definition: Definition) -> Iterator[Draft | str]:
    inputs, order, norm = definition.inputs, definition.meta.semantics["order"], definition.meta.semantics["norm"]
    x = inputs["hidden_states"].dtype
    size = definition.axes["hidden_size"].value
    if norm["family"] != "rms_norm":
        yield "it has a residual addition beside an RMS norm only"
    elif order != "pre":
        yield "it adds before the norm only"
    elif "weight" not in inputs:
        yield "beside a residual addition it needs a weight"
    elif inputs["residual"].dtype != x:
        yield f"it rounds the sum to {x}, the dtype of hidden_states, and the residual is {inputs['residual'].dtype}"
    elif size is None or size > WIDEST:
        yield TOO_WIDE
    elif reason := other_result(definition, {"sum": x, "normed": x}):
        yield reason
    else:
        rest = f"{norm['eps']!r}, {float(norm['offset'])!r}, {_mode(norm, x, inputs['weight'].dtype)}, False"
        lines = [
            f"normed, total = LigerFusedAddRMSNormFunction.apply(hidden_states, residual, weight, {rest})",
            "return total, normed",
        ]
        imports = ["from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction"]
        yield Draft("add_rms_norm", calling(imports, definition, lines))


WRITERS: dict[str, Writer] = {"rms_norm": _rms_norm, "layer_norm": _layer_norm, "residual_norm": _residual_norm}
