"""How our attention kernels are called for a Definition."""

from __future__ import annotations

from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, source_of

WIDEST = 256
"""Channels of a head."""
MOST_ROWS = 64
"""What attention_decode takes: query heads of a key head, rounded up to a power of two, times queries."""

CATALOGUE = {
    "attention_decode": Entry(
        "attention",
        "few queries over many keys, shared among blocks; masks, softcap, sinks, any number of query heads a key head",
        autograd=False,
    ),
    "attention_prefill": Entry(
        "attention",
        "many queries; reads only keys that are seen; masks, softcap, sinks, any number of query heads a key head",
        autograd=False,
    ),
}


def _attention_drafts(definition: Definition) -> list[Draft] | str:
    semantics, inputs = definition.meta.semantics, definition.inputs
    if max(semantics["head_dim"], semantics["value_dim"]) > WIDEST:
        return f"heads of up to {WIDEST} channels are served"
    if semantics["scaling"] <= 0:
        return "positive scalings are served"
    masked = "attention_mask" in inputs
    causal = not masked and bool(semantics["causal"])
    arguments = ["query", "key", "value"]
    if masked or semantics["sinks"]:
        arguments.append("attention_mask" if masked else "None")
    if semantics["sinks"]:
        arguments.append("sinks")
    keywords: dict[str, Any] = {"scaling": semantics["scaling"], "causal": causal}
    if semantics["softcap"] is not None:
        keywords["softcap"] = semantics["softcap"]

    def draft(kernel: str, guard: dict[str, Any]) -> Draft:
        call = call_of(kernel, arguments, keywords)
        return Draft(kernel, source_of(kernel, kernel, definition, [f"return {call}"]), guard)

    group = semantics["num_heads"] // semantics["num_kv_heads"]
    few = max(1, MOST_ROWS // (1 << (group - 1).bit_length()))
    found = [draft("attention_decode", {"max_axes": {"q_len": few}})]
    if not semantics["decode_only"]:
        found.append(draft("attention_prefill", {}))
    return found


WRITERS = {"attention": _attention_drafts}
