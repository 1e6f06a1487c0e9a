"""How our activation and product kernel is called for a Definition."""

from __future__ import annotations

from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, source_of

CATALOGUE = {
    "act_and_mul": Entry(
        "gated_mlp", "activation(gate) * up in one launch, from two tensors or from one that holds both"
    ),
}


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
    call = call_of(function, list(definition.inputs), keywords)
    return Draft("act_and_mul", source_of("act_and_mul", function, definition, [f"return {call}"]))


WRITERS = {"gated_mlp": _gated_draft}
