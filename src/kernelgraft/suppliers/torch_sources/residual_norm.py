"""A residual addition beside a norm in plain torch: the addition, and the norm as its own family's texts compute it."""

from __future__ import annotations

from kernelgraft.records import Definition
from kernelgraft.suppliers.torch_sources import FLOATS, Code, Draft, cast, last_size, norm_codes, promoted

CATALOGUE = {
    "native": "an addition and the fused norm call",
    "scaled": "an addition and the fused norm call without vectors, then scaled",
    "in_place": "an addition and float32 arithmetic scaled in place",
    "length": "an addition, and the row's length in one operation",
}


def drafts(definition: Definition) -> list[Draft] | str:
    """See the package."""
    inputs, outputs = definition.inputs, definition.outputs
    order, norm = definition.meta.semantics["order"], definition.meta.semantics["norm"]
    residual, hidden = inputs["residual"].dtype, inputs["hidden_states"].dtype
    size = last_size(definition, "hidden_states")
    dtypes = {s.dtype for s in (*inputs.values(), *outputs.values())}
    if size is None or dtypes - set(FLOATS):
        return "rows of one known size in float32, bfloat16 or float16 are served"
    weight, bias = (inputs[n].dtype if n in inputs else None for n in ("weight", "bias"))
    if order == "pre":
        total = promoted(residual, hidden)
        found = norm_codes(norm["family"], norm, size, "total", total, weight, bias, outputs["normed"].dtype)
        codes = [_pre(code, cast("total", total, outputs["sum"].dtype)) for code in found]
    else:
        out = outputs["sum"].dtype
        # The norm's own result may be narrower than the sum: what is added is what the module would have returned.
        normed = hidden if promoted(residual, hidden) == out else out
        found = norm_codes(norm["family"], norm, size, "hidden_states", hidden, weight, bias, normed)
        codes = [
            _post(code, cast(f"torch.add(residual, {code.result})", promoted(residual, normed), out)) for code in found
        ]
    return [code.draft(list(inputs)) for code in codes]


def _pre(code: Code, total: str) -> Code:
    lines = ("total = torch.add(residual, hidden_states)", *code.lines)
    return Code(code.variant, lines, f"{total}, {code.result}", code.match, code.autograd)


def _post(code: Code, result: str) -> Code:
    return Code(code.variant, code.lines, result, code.match, code.autograd)
