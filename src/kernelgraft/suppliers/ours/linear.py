"""Products with a weight: kernels for few rows, whose time is that of reading the weight."""

from __future__ import annotations

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, source_of

CATALOGUE = {
    "linear_decode": Entry("linear", "x @ weight.T + bias for up to 16 rows, as fast as the weight is read", False),
    "linear_decode_triton": Entry("linear", "the same in Triton", False, "triton"),
}
MOST_ROWS = 16


def _drafts(definition: Definition) -> list[Draft] | str:
    rows = (definition.inputs["hidden_states"].shape or ())[:-1]
    if any(definition.axes[axis].value is not None for axis in rows):
        return "the number of rows is fixed"
    # The first axis counts sequences, the others what is new of each.
    guard = {
        "max_axes": {axis: 1 for axis in rows} | {rows[0]: MOST_ROWS},
        "last_dim_contiguous": ("weight",),
    }
    call = call_of("linear_decode", list(definition.inputs), {})
    return [Draft(name, source_of(name, "linear_decode", definition, [f"return {call}"]), guard) for name in CATALOGUE]


WRITERS = {"linear": _drafts}
