"""How our rotary embedding kernel is called for a Definition."""

from __future__ import annotations

from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, promoted, source_of

CATALOGUE = {
    "rope": Entry(
        "rope", "q and k in one launch; any even number of rotated channels, half-split or interleaved pairs"
    ),
    "rope_triton": Entry("rope", "the same in Triton, for few rows; half-split pairs", False, "triton"),
}


def _rope_drafts(definition: Definition) -> list[Draft] | str:
    semantics, inputs = definition.meta.semantics, definition.inputs
    shape = inputs["q"].shape or ()
    row = shape.index("seq_len") if "seq_len" in shape else -1
    if (len(shape), row) not in ((4, 1), (4, 2), (3, 0), (3, 1)):
        return "q has the axes batch, heads and length, or two of them"
    lines, tables = _tables(definition)
    rotated = [name for name in ("q", "k") if name in inputs]
    extra = None
    if len(shape) == 3:
        extra, row = (0, 1) if row == 0 else (2, 1)
        lines += [f"{name} = {name}.unsqueeze({extra})" for name in rotated]
    keywords: dict[str, Any] = {"row_axis": row, "rotary_dim": semantics["rotary_dim"]}
    if semantics["placement"] == "last":
        keywords["last"] = True
    pairs = {"pairs_in": semantics["pairs_in"], "pairs_out": semantics["pairs_out"]}
    keywords["table"] = "half" if semantics["table"] == "complex" else semantics["table"]
    if semantics["direction"] == "backward":
        keywords["backward"] = True
    keywords |= {"compute": semantics["compute"], "cast": semantics["cast"]}
    q = inputs["q"].dtype
    table = inputs["freqs" if semantics["table"] == "complex" else "cos"].dtype
    wide = promoted(q, table, "float32" if semantics["compute"] == "float32" else None)
    expected = q if semantics["cast"] else wide
    if (wanted := definition.outputs["q_out"].dtype) != expected:
        return f"its result is {expected}, the definition's {wanted}"
    names = [f"{name}_out" for name in rotated]
    results = [f"{name}.squeeze({extra})" if extra is not None else name for name in names]

    def source(module: str, more: dict[str, Any]) -> str:
        call = call_of("rope", ["q", "k" if "k" in inputs else "None", *tables], keywords | more)
        ending = [f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}", f"return {', '.join(results)}"]
        return source_of(module, "rope", definition, [*lines, *ending])

    drafts = [Draft("rope", source("rope", pairs))]
    if set(pairs.values()) == {"half"} and len({inputs[name].dtype for name in rotated}) == 1:
        guard = {"last_dim_contiguous": tuple(rotated)}
        drafts.append(Draft("rope_triton", source("rope_triton", {}), guard))
    return drafts


def _tables(definition: Definition) -> tuple[list[str], list[str]]:
    """Lines that bring the tables to [1 or batch, length, values], and their names."""
    inputs = definition.inputs
    lines = []
    name = "cos"
    if definition.meta.semantics["table"] == "complex":
        lines, name = ["cos, sin = freqs[..., 0], freqs[..., 1]"], "freqs"
    labels = (inputs[name].shape or ())[: -2 if name == "freqs" else -1]
    length = labels.index("seq_len")
    if len(labels) != 2 or length != 1:
        batch = f"cos.shape[{labels.index('table_batch')}]" if "table_batch" in labels else "1"
        lines.append(f"size = ({batch}, cos.shape[{length}], cos.shape[-1])")
        lines.append("cos, sin = cos.reshape(size), sin.reshape(size)")
    return lines, ["cos", "sin"]


WRITERS = {"rope": _rope_drafts}
