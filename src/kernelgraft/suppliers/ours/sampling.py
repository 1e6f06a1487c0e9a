"""How our argmax and sampling kernels are called for a Definition."""

from __future__ import annotations

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, source_of

CATALOGUE = {
    "argmax": Entry("sampling", "the whole GPU for one row; ties and NaN as in torch", autograd=False),
    "sample_top_k": Entry(
        "sampling", "softcap, temperature, top-k, top-p and the draw by u in two launches", autograd=False
    ),
}


def _draft(definition: Definition) -> Draft | str:
    semantics = definition.meta.semantics
    if semantics["method"] == "argmax":
        return Draft("argmax", source_of("argmax", "argmax", definition, ["return argmax(logits)"]))
    from kernelgraft.kernels.sampling import LARGEST_K

    if semantics["k"] > LARGEST_K:
        return f"k is {semantics['k']}, served are up to {LARGEST_K}"
    call = call_of("sample_top_k", ["logits", "u"], {n: semantics[n] for n in ("k", "temperature", "top_p", "softcap")})
    return Draft("sample_top_k", source_of("sampling", "sample_top_k", definition, [f"return {call}"]))


WRITERS = {"sampling": _draft}
