"""How Liger-Kernel's rotary embedding is called for a Definition.

It turns tensors in place if they lie in memory as [batch, length, heads, size], which is how models pass them, so that
a copy of that layout is turned. So does its gradient with the one that comes in.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgraft.records import Definition
from kernelgraft.suppliers.peers import Draft, Operation, Writer, promoted, table_dtype, turn_source, turning

OPERATIONS = {
    "rope": Operation(
        "rope",
        "turns copies of q and k in place, in one launch; products in the dtype of the tables; compiles anew for each "
        "batch size",
        autograd=True,
    ),
}


def _rope(definition: Definition) -> Iterator[Draft | str]:
    shape = turning(definition)
    if isinstance(shape, str):
        yield shape
        return
    q, table = definition.inputs["q"].dtype, table_dtype(definition)
    if promoted(q, table) != table:
        yield f"its products are in {table}, the dtype of the tables, and q is {q}"
        return
    if definition.meta.semantics["compute"] == "float32" and table != "float32":
        yield f"its products are in {table}, the dtype of the tables, the original's in float32"
        return
    rotary = definition.meta.semantics["rotary_dim"]
    turn = [
        f"q = {shape.length_first.format('q')}.clone(memory_format=torch.contiguous_format)",
        f"k = {shape.length_first.format('k')}.clone(memory_format=torch.contiguous_format)",
        "with torch.cuda.device(q.device):",
        f"    a, b, *_ = rope_forward(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotary_dim={rotary})",
        "a, b = a.transpose(1, 2), b.transpose(1, 2)",
        f"return {', '.join(f'{shape.back_from_length_first.format(n)}.contiguous()' for n in ('a', 'b'))}",
    ]
    imports = ["from liger_kernel.ops.rope import rope_forward"]
    yield Draft("rope", turn_source(definition, shape, imports, turn))


WRITERS: dict[str, Writer] = {"rope": _rope}
