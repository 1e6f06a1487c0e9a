"""Which of our norm kernels computes a Definition, with or without a residual addition, and how it is called."""

from __future__ import annotations

from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.ours.drafts import Draft, Entry, call_of, promoted, source_of

CATALOGUE = {
    "rms_norm": Entry("rms_norm", "one launch; the weight or one plus it; every place where the original rounds"),
    "layer_norm": Entry("layer_norm", "one launch; with or without weight and bias"),
    "add_rms_norm": Entry("residual_norm", "a residual addition and an RMS norm, before or after it, in one launch"),
    "add_layer_norm": Entry(
        "residual_norm", "a residual addition and a layer norm, before or after it, in one launch", autograd=False
    ),
    "rms_norm_triton": Entry("rms_norm", "the same in Triton, for short rows", False, "triton"),
    "layer_norm_triton": Entry("layer_norm", "the same in Triton, for short rows", False, "triton"),
    "add_rms_norm_triton": Entry("residual_norm", "a sum and its RMS norm in Triton, for short rows", False, "triton"),
}
WIDEST_IN_TRITON = 16384
"""Channels of a row."""


def _norm(
    norm: dict[str, Any], family: str, x: str, weight: str | None, bias: str | None
) -> tuple[dict[str, Any], str] | str:
    """Keywords of a norm's function for its semantics, and the dtype of its result; why it cannot compute them."""
    keywords: dict[str, Any] = {}
    if norm["offset"]:
        keywords = {"offset": True, "round_offset": norm["offset_dtype"] == "weight"}
    if norm.get("inverse") == "division":
        keywords["divide"] = True
    plain = norm["form"] == "functional" and not norm.get("upcast")
    if plain and {weight, bias} - {None, x}:
        return "torch's own call does not mix dtypes"
    if family == "layer_norm":
        if norm["form"] == "functional" or norm["cast"] == "after_weight":
            return keywords, x
        return keywords | {"round_normed": True}, promoted(x, weight, bias)
    cast = norm["cast"]
    keywords["cast"] = cast
    if weight is None or cast == "after_weight":
        return keywords, x
    if cast == "weight_dtype":
        return keywords, weight if weight != "float32" else "float32"
    return keywords, promoted(x, weight)


def _vectors(definition: Definition) -> tuple[str | None, str | None]:
    weight, bias = (definition.inputs[n].dtype if n in definition.inputs else None for n in ("weight", "bias"))
    return weight, bias


def _norm_drafts(definition: Definition) -> list[Draft] | str:
    family, semantics = definition.meta.family, definition.meta.semantics
    x = definition.inputs["hidden_states"].dtype
    found = _norm(semantics, family, x, *_vectors(definition))
    if isinstance(found, str):
        return found
    keywords, dtype = found
    if (wanted := definition.outputs["output"].dtype) != dtype:
        return f"its result is {dtype}, the definition's {wanted}"
    call = call_of(family, _norm_arguments(definition, family), {"eps": semantics["eps"], **keywords})
    draft = Draft(family, source_of(family, family, definition, [f"return {call}"]))
    return [draft, *_in_triton(family, definition, call)]


def _in_triton(function: str, definition: Definition, call: str) -> list[Draft]:
    """The same call of a function of `rows_triton`, unless the rows are too wide."""
    width = definition.axes[(definition.inputs["hidden_states"].shape or ("",))[-1]].value
    if width is None or width > WIDEST_IN_TRITON:
        return []
    guard = {"last_dim_contiguous": tuple(n for n in definition.inputs if n in ("residual", "hidden_states"))}
    return [Draft(f"{function}_triton", source_of("rows_triton", function, definition, [f"return {call}"]), guard)]


def _norm_arguments(definition: Definition, family: str) -> list[str]:
    """All inputs by position; a bias without a weight leaves the weight's place empty.

    Torch's own norms give a contiguous result whatever the strides of their input, ours keeps them.
    """
    names = list(definition.inputs)
    semantics = definition.meta.semantics
    if semantics.get("norm", semantics)["form"].startswith("functional"):
        names = [f"{name}.contiguous()" if name in ("hidden_states", "residual") else name for name in names]
    if family == "layer_norm" and "bias" in names and "weight" not in names:
        names.insert(names.index("bias"), "None")
    return names


def _residual_drafts(definition: Definition) -> list[Draft] | str:
    order, norm = definition.meta.semantics["order"], definition.meta.semantics["norm"]
    family, inputs = norm["family"], definition.inputs
    residual, x = inputs["residual"].dtype, inputs["hidden_states"].dtype
    total = promoted(residual, x)
    found = _norm(norm, family, total if order == "pre" else x, *_vectors(definition))
    if isinstance(found, str):
        return found
    keywords, dtype = found
    expected = {"sum": total, "normed": dtype} if order == "pre" else {"sum": promoted(residual, dtype)}
    for name, spec in definition.outputs.items():
        if spec.dtype != expected[name]:
            return f"its {name} is {expected[name]}, the definition's {spec.dtype}"
    function = f"add_{family}" if order == "pre" else f"{family}_add"
    module = "add_rms_norm" if family == "rms_norm" else "layer_norm"
    call = call_of(function, _norm_arguments(definition, family), {"eps": norm["eps"], **keywords})
    draft = Draft(f"add_{family}", source_of(module, function, definition, [f"return {call}"]))
    return [draft, *(_in_triton(function, definition, call) if function == "add_rms_norm" else [])]


WRITERS = {"rms_norm": _norm_drafts, "layer_norm": _norm_drafts, "residual_norm": _residual_drafts}
