"""Which of TileGym's norms computes a Definition, and how it is called.

Left out: `persistent_layer_norm` stores bfloat16 whatever it is given, and takes the variance as a difference of means,
which cancels in rows far from zero; the layer norm of its liger suite does the latter too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgraft.records import Definition
from kernelgraft.suppliers.peers import Draft, Operation, Writer, other_result
from kernelgraft.suppliers.tilegym.sources import calling

WIDEST = 65536
"""Channels: from there on a row is no longer one tile that compiles."""
WIDEST_LEGACY_BYTES = 65536

OPERATIONS = {
    "rms_norm": Operation(
        "rms_norm",
        "float32 arithmetic, also the weight's, rounded once: less often than an original that casts before the weight",
        autograd=True,
    ),
    "layer_norm": Operation("layer_norm", "two passes for the statistics, float32 arithmetic, rounded once"),
    "layer_norm_shaped": Operation(
        "layer_norm",
        "two passes for the statistics, float32 arithmetic, rounded once; the number of rows is compiled in",
        static_shapes=True,
    ),
    "add_rms_norm": Operation(
        "residual_norm",
        "sum and RMS norm in one launch, the norm of the rounded sum; rounds before the weight where the original "
        "does, else once; its first call for a row size times seven configurations",
        autograd=True,
    ),
}


def _rms_norm(definition: Definition) -> Iterator[Draft | str]:
    semantics, inputs = definition.meta.semantics, definition.inputs
    x = inputs["hidden_states"].dtype
    size = definition.axes["hidden_size"].value
    if "weight" not in inputs:
        yield "it needs a weight"
    elif size is None or size > WIDEST:
        yield f"rows of one known size up to {WIDEST} are served"
    elif reason := other_result(definition, {"output": x}):
        yield reason
    else:
        offset = float(semantics["offset"])
        call = f"operation(hidden_states, ({size},), weight, {semantics['eps']!r}, offset={offset!r})"
        # Its backward raises for an offset.
        yield Draft(
            "rms_norm", calling("rms_norm", definition, call, ["return result"]), {"autograd": not semantics["offset"]}
        )


def _layer_norm(definition: Definition) -> Iterator[Draft | str]:
    semantics, inputs = definition.meta.semantics, definition.inputs
    x = inputs["hidden_states"]
    size, bytes_each = definition.axes["hidden_size"].value, 4 if x.dtype == "float32" else 2
    if "weight" not in inputs or "bias" not in inputs:
        yield "it needs a weight and a bias"
        return
    if reason := other_result(definition, {"output": x.dtype}):
        yield reason
        return
    if size is None or size * bytes_each >= WIDEST_LEGACY_BYTES:
        yield "rows of one known size below 64 KB are served"
    else:
        # A tensor that is not contiguous it would give back uninitialised.
        call = f"operation(hidden_states.contiguous(), ({size},), weight, bias, {semantics['eps']!r}"
        call += f", weight_shift={float(semantics['offset'])!r})"
        yield Draft("layer_norm", calling("layer_norm", definition, call, ["return result"]))
    if size is not None and size <= WIDEST:
        rank = len(x.shape or ())
        call = f"operation(hidden_states, {rank - 1}, {rank}, weight, bias, {semantics['eps']!r}"
        call += f", weight_shift={float(semantics['offset'])!r})"
        yield Draft("layer_norm_shaped", calling("layer_norm_shaped", definition, call, ["return result"]))


def _residual_norm(definition: Definition) -> Iterator[Draft | str]:
    inputs, order, norm = definition.inputs, definition.meta.semantics["order"], definition.meta.semantics["norm"]
    x = inputs["hidden_states"].dtype
    size = definition.axes["hidden_size"].value
    if norm["family"] != "rms_norm":
        yield "it has a residual addition beside an RMS norm only"
    elif order != "pre":
        yield "it adds before the norm only"
    elif "weight" not in inputs:
        yield "it needs a weight"
    elif inputs["residual"].dtype != x:
        yield f"it rounds the sum to {x}, the dtype of hidden_states, and the residual is {inputs['residual'].dtype}"
    elif size is None or size > WIDEST:
        yield f"rows of one known size up to {WIDEST} are served"
    elif reason := other_result(definition, {"sum": x, "normed": x}):
        yield reason
    else:
        # 0: the norm is rounded before the weight; 1: all in float32, rounded once.
        mode = 0 if norm["cast"] in ("before_weight", "weight_dtype") and inputs["weight"].dtype == x else 1
        call = f"operation(hidden_states, residual, weight, {norm['eps']!r}, {float(norm['offset'])!r}, {mode})"
        yield Draft("add_rms_norm", calling("add_rms_norm", definition, call, ["return result[1], result[0]"]))


WRITERS: dict[str, Writer] = {"rms_norm": _rms_norm, "layer_norm": _layer_norm, "residual_norm": _residual_norm}
