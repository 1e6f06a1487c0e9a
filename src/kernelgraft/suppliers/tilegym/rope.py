"""Which of TileGym's rotary embeddings computes a Definition, and how it is called.

Both turn their inputs in place, so that copies are turned. The first takes tiles of half the rotated channels and is
wrong where that half is no power of two; it reads only the shapes of a position argument and of an axis to unsqueeze.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgraft.records import Definition
from kernelgraft.suppliers.peers import (
    Draft,
    Operation,
    Turning,
    Writer,
    power_of_two,
    promoted,
    table_dtype,
    turn_source,
    turning,
)
from kernelgraft.suppliers.tilegym.sources import AT, UNTRACED, imported

OPERATIONS = {
    "rope": Operation(
        "rope",
        "turns copies of q and k in place, in one launch; products in the promoted dtype; the length is compiled in",
        autograd=True,
        static_shapes=True,
    ),
    "rope_padded": Operation(
        "rope",
        "for halves of a head that are no power of two: turns padded copies of q and k in place, in one launch; "
        "float32 products; the length is compiled in",
        autograd=True,
        static_shapes=True,
    ),
}


def _rope(definition: Definition) -> Iterator[Draft | str]:
    shape = turning(definition)
    if isinstance(shape, str):
        yield shape
        return
    semantics, q, table = definition.meta.semantics, definition.inputs["q"].dtype, table_dtype(definition)
    rotary, size = semantics["rotary_dim"], semantics["head_dim"]
    if power_of_two(rotary // 2):
        if promoted(q, table) not in (q, table):
            yield f"it does not multiply {q} by {table}"
        elif semantics["compute"] == "float32" and promoted(q, table) != "float32":
            yield f"its products are in {promoted(q, table)}, the original's in float32"
        elif rotary < size and (semantics["table"] in ("half", "complex") or int(size * (rotary / size)) != rotary):
            yield "of a head that it turns in part it wants tables as wide as that part"
        else:
            yield Draft("rope", _in_place(definition, shape, rotary, size))
    elif rotary < size:
        yield f"of a head it turns a part of twice a power of two, not {rotary}"
    else:
        yield Draft("rope_padded", _padded(definition, shape))


def _in_place(definition: Definition, shape: Turning, rotary: int, size: int) -> str:
    part = f", partial_rotary_factor={rotary / size!r}" if rotary < size else ""
    q, k = (shape.heads_first.format(name) for name in ("q", "k"))
    turn = [
        "q = q.clone(memory_format=torch.contiguous_format)",
        "k = k.clone(memory_format=torch.contiguous_format)",
        "with at(q, tunes=True):",
        f"    a, b = operation({q}, {k}, cos, sin{part})",
        f"return {', '.join(f'{shape.back_from_heads_first.format(n)}.contiguous()' for n in ('a', 'b'))}",
    ]
    return turn_source(definition, shape, ["", AT, imported("rope")], turn, UNTRACED)


def _padded(definition: Definition, shape: Turning) -> str:
    turn = [
        f"q = {shape.length_first.format('q')}.clone(memory_format=torch.contiguous_format)",
        f"k = {shape.length_first.format('k')}.clone(memory_format=torch.contiguous_format)",
        "with at(q):",
        "    a, b = operation(q.transpose(1, 2), k.transpose(1, 2), cos, sin)",
        "a, b = a.transpose(1, 2), b.transpose(1, 2)",
        f"return {', '.join(f'{shape.back_from_length_first.format(n)}.contiguous()' for n in ('a', 'b'))}",
    ]
    return turn_source(definition, shape, ["", AT, imported("rope_padded")], turn, UNTRACED)


WRITERS: dict[str, Writer] = {"rope": _rope}
