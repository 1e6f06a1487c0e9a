"""How our kernel for normed and turned heads is called for a Definition."""

from __future__ import annotations

from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, source_of

CATALOGUE = {
    "qk_norm_rope": Entry(
        "qk_norm_rope",
        "norms of the heads of q and k and their rotation in one launch; any even number of rotated channels",
    ),
}


def _draft(definition: Definition) -> Draft | str:
    norm, rope = definition.meta.semantics["norm"], definition.meta.semantics["rope"]
    keywords: dict[str, Any] = {"eps": norm["eps"], "cast": norm["cast"]}
    if norm["offset"]:
        keywords |= {"offset": True, "round_offset": norm["offset_dtype"] == "weight"}
    if norm["inverse"] == "division":
        keywords["divide"] = True
    keywords["rotary_dim"] = rope["rotary_dim"]
    if rope["placement"] == "last":
        keywords["last"] = True
    keywords |= {"pairs_in": rope["pairs_in"], "pairs_out": rope["pairs_out"], "table": rope["table"]}
    keywords |= {"compute": rope["compute"], "keep": rope["cast"]}
    call = call_of("qk_norm_rope", list(definition.inputs), keywords)
    return Draft("qk_norm_rope", source_of("qk_norm_rope", "qk_norm_rope", definition, [f"return {call}"]))


WRITERS = {"qk_norm_rope": _draft}
