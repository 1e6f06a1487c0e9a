"""How our cross entropy from hidden states is called for a Definition."""

from __future__ import annotations

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, source_of

CATALOGUE = {
    "cross_entropy": Entry("cross_entropy", "no tensor of all logits, forward and backward; mean, sum or each token's"),
}


def _draft(definition: Definition) -> Draft | str:
    names = ("ignore_index", "reduction", "scale", "softcap")
    call = call_of("cross_entropy", list(definition.inputs), {name: definition.meta.semantics[name] for name in names})
    return Draft("cross_entropy", source_of("cross_entropy", "cross_entropy", definition, [f"return {call}"]))


WRITERS = {"cross_entropy": _draft}
