"""Layer norms in plain torch: the fused call with whatever vectors it can take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelgraft.records import Definition, Match
from kernelgraft.suppliers.torch_sources import FLOATS, Code, Draft, cast, last_size, promoted

CATALOGUE = {
    "native": "torch.layer_norm with weight and bias",
    "scaled": "torch.layer_norm without them, then multiplied (1 + weight in one multiply-add) and shifted",
}


def codes(
    semantics: dict[str, Any], size: int, x: str, dtype: str, weight: str | None, bias: str | None, out: str
) -> Iterator[Code]:
    """Ways to norm the rows (`size` wide) of the variable `x` of some dtype; `weight`, `bias` and `out` are dtypes."""
    eps, offset = repr(semantics["eps"]), semantics["offset"]
    match: Match = "adapter" if offset else "exact"
    if not offset and {weight, bias} <= {None, dtype}:
        vectors = f"{'None' if weight is None else 'weight'}, {'None' if bias is None else 'bias'}"
        yield Code("native", (), cast(f"torch.layer_norm({x}, ({size},), {vectors}, {eps})", dtype, out), match, True)
        return
    lines = [f"y = torch.layer_norm({x}, ({size},), None, None, {eps})"]
    have, y = dtype, "y"
    if weight is not None:
        have = promoted(have, weight)
        y = "torch.addcmul(y, y, weight)" if offset else "y * weight"
    if bias is not None:
        have, y = promoted(have, bias), f"{y} + bias"
    exact = dtype == "float32"  # in a half type it is rounded before it is scaled, which gradients do not forgive
    yield Code("scaled", tuple(lines), cast(y if bias is None else f"({y})", have, out), match, exact)


def drafts(definition: Definition) -> list[Draft] | str:
    """See the package."""
    inputs, out = definition.inputs, definition.outputs["output"].dtype
    x, size = inputs["hidden_states"], last_size(definition, "hidden_states")
    if size is None or {x.dtype, out} - set(FLOATS):
        return "rows of one known size in float32, bfloat16 or float16 are served"
    weight, bias = (inputs[n].dtype if n in inputs else None for n in ("weight", "bias"))
    found = codes(definition.meta.semantics, size, "hidden_states", x.dtype, weight, bias, out)
    return [code.draft(list(inputs)) for code in found]
