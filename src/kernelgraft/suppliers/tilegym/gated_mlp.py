"""Which of TileGym's gated activations computes a Definition, and how it is called.

Left out: its exact GELU, whose error function is the tanh approximation (off by up to 5e-4); its packed tanh GELU in
half types, which adds one to the tanh in them.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgraft.records import Definition
from kernelgraft.suppliers.peers import Draft, Operation, Writer, half_precision, other_result
from kernelgraft.suppliers.tilegym.sources import PASS_ON, calling

SILU = ("silu", "silu_python")
TANH = ("gelu_tanh", "gelu_new", "gelu_fast")
"""The same function in one or several steps, which round in a half type."""
WIDEST = 65536
"""Channels of a row, which is one tile."""
NARROWEST_BACKWARD = 1024
"""Channels: the gradient of `swiglu` divides a row among all multiprocessors and divides by zero for narrow ones."""

OPERATIONS = {
    "silu_and_mul": Operation(
        "gated_mlp", "from one tensor, gate first; float32 arithmetic, rounded once; a row is one tile", autograd=True
    ),
    "swiglu": Operation(
        "gated_mlp", "from two tensors; rounds after SiLU and after the product; a row is one tile", autograd=True
    ),
    "geglu": Operation("gated_mlp", "from two tensors; tanh GELU in float32; rounds after it and after the product"),
    "geglu_packed": Operation(
        "gated_mlp",
        "from one tensor of float32, up first; tanh GELU; offsets of 32 bits",
        static_shapes=True,
    ),
}


def _gated(definition: Definition) -> Iterator[Draft | str]:
    semantics = definition.meta.semantics
    packed, activation = semantics["packed"], semantics["activation"]
    size = definition.axes["intermediate_size"].value
    dtype = next(iter(definition.inputs.values())).dtype
    rounds = semantics["upcast"] and half_precision(definition)
    if semantics["clamp"]:
        yield "it has no limit on the values"
    elif activation not in (*SILU, *TANH):
        known = ": its exact GELU is the tanh approximation" if activation.startswith("gelu") else ""
        yield f"it has no activation `{activation}`{known}"
    elif size is None or size > WIDEST:
        yield f"rows of one known size up to {WIDEST} are served"
    elif reason := other_result(definition, {"output": dtype}):
        yield reason
    elif packed == "gate_first" and activation in SILU:
        source = calling("silu_and_mul", definition, "operation(gate_up)", ["return result"], at=", tunes=True")
        yield Draft("silu_and_mul", source)
    elif packed == "up_first" and activation in TANH and half_precision(definition):
        yield f"it takes one plus the tanh in {dtype}, which cancels for negative values"
    elif packed == "up_first" and activation in TANH:
        call = 'operation(gate_up.contiguous(), -1, "tanh")'
        yield Draft("geglu_packed", calling("geglu_packed", definition, call, ["return result"]))
    elif packed is not None:
        yield f"from one tensor it takes gate first for SiLU and up first for tanh GELU, this is {packed}"
    elif rounds:
        yield "it rounds the activation before the product, which the original does not"
    elif activation in SILU:
        call, after = "operation(gate.contiguous(), up.contiguous())", ["return result"]
        if size < NARROWEST_BACKWARD:
            yield Draft("swiglu", calling("swiglu", definition, call, after), {"autograd": False})
        else:
            after = ["return PassOn.apply(result) if result.requires_grad else result"]
            yield Draft("swiglu", calling("swiglu", definition, call, after, parts=(PASS_ON,)))
    else:
        # Its backward overwrites gate and up.
        call = "operation(gate.contiguous(), up.contiguous())"
        yield Draft("geglu", calling("geglu", definition, call, ["return result"]))


WRITERS: dict[str, Writer] = {"gated_mlp": _gated}
