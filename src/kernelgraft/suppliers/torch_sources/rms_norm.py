"""RMS norms in plain torch: the fused call where the weight allows it, or fewer and in-place operations in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelgraft.records import Definition, Match
from kernelgraft.suppliers.torch_sources import FLOATS, Code, Draft, cast, last_size, promoted

CATALOGUE = {
    "native": "torch.rms_norm with the weight",
    "scaled": "torch.rms_norm without a weight, then one multiplication (or multiply-add, for 1 + weight)",
    "in_place": "float32 arithmetic with two temporaries, scaled in place",
    "length": "the row's length in one operation, a multiply-add for its scale, scaled in place",
}


def codes(
    semantics: dict[str, Any], size: int, x: str, dtype: str, weight: str | None, bias: None, out: str
) -> Iterator[Code]:
    """Ways to norm the rows (`size` wide) of the variable `x` of some dtype; `weight` and `out` are dtypes."""
    eps, offset = repr(semantics["eps"]), semantics["offset"]
    match: Match = "adapter" if offset else "exact"
    if not offset and weight in (None, dtype):
        name = "None" if weight is None else "weight"
        yield Code("native", (), cast(f"torch.rms_norm({x}, ({size},), {name}, {eps})", dtype, out), match, True)
    elif weight is not None:
        line = f"y = torch.rms_norm({x}, ({size},), None, {eps})"
        scaled = "torch.addcmul(y, y, weight)" if offset else "y * weight"
        # In a half type the norm is rounded before it is scaled; the gradient does not forgive that.
        exact = dtype == "float32"
        yield Code("scaled", (line,), cast(scaled, promoted(dtype, weight), out), match, exact)
    name, lines = (x, []) if dtype == "float32" else ("wide", [f"wide = {x}.float()"])
    scaling = ""
    if weight is not None:
        scaling = f".mul_({'1.0 + ' + cast('weight', weight, 'float32') if offset else 'weight'})"
    y = f"torch.rsqrt(({name} * {name}).mean(-1, True).add_({eps})).mul({name}){scaling}"
    yield Code("in_place", tuple(lines), cast(y, "float32", out), match, False)
    # On a CPU an operation with a Python number costs twice what one with a tensor costs.
    lines += [
        f"length = torch.linalg.vector_norm({name}, 2, -1, True)",
        f"scale = torch.addcmul(length.new_full((), {eps}), length, length, value={1 / size!r}).rsqrt_()",
    ]
    yield Code("length", tuple(lines), cast(f"scale.mul({name}){scaling}", "float32", out), match, False)


def drafts(definition: Definition) -> list[Draft] | str:
    """See the package."""
    inputs, out = definition.inputs, definition.outputs["output"].dtype
    x, size = inputs["hidden_states"], last_size(definition, "hidden_states")
    if size is None or {x.dtype, out} - set(FLOATS):
        return "rows of one known size in float32, bfloat16 or float16 are served"
    weight = inputs["weight"].dtype if "weight" in inputs else None
    found = codes(definition.meta.semantics, size, "hidden_states", x.dtype, weight, None, out)
    return [code.draft(list(inputs)) for code in found]
