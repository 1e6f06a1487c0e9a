"""Which of Liger-Kernel's gated activations computes a Definition, and how it is called.

The gradients of the operations of two tensors overwrite the tensors that they saved, gate and up themselves: a second
backward pass through the graph is wrong, and so is whoever else reads them. The sources give them copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernelgraft.records import Definition
from kernelgraft.suppliers.liger.sources import TOO_WIDE, WIDEST, calling
from kernelgraft.suppliers.peers import Draft, Operation, Writer, half_precision, other_result

SILU = ("silu", "silu_python")
TANH = ("gelu_tanh", "gelu_new", "gelu_fast")
"""The same function in one or several steps, which round in a half type."""

_PAIR = (
    "from two tensors, one block a row; {} in float32, rounded after it and after the product; its gradient from copies"
)

OPERATIONS = {
    "swiglu": Operation("gated_mlp", _PAIR.format("SiLU"), autograd=True),
    "geglu": Operation("gated_mlp", _PAIR.format("tanh GELU"), autograd=True),
    "swiglu_packed": Operation(
        "gated_mlp",
        "from one tensor, gate first, one block a row; SiLU in float32, rounded after it and after the product",
        autograd=True,
    ),
}

_GRADIENT = '''
class Product(torch.autograd.Function):
    """With a gradient from copies: the package's is written over the gate and the other factor."""

    @staticmethod
    def forward(ctx, gate, up):
        gate, up, product = {name}_forward(gate.contiguous(), up.contiguous())
        ctx.save_for_backward(gate, up)
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        return {name}_backward(gate.clone(), up.clone(), gradient.contiguous())
'''


def _gated(definition: Definition) -> Iterator[Draft | str]:
    semantics = definition.meta.semantics
    packed, activation = semantics["packed"], semantics["activation"]
    size = definition.axes["intermediate_size"].value
    dtype = next(iter(definition.inputs.values())).dtype
    if semantics["clamp"]:
        yield "it has no limit on the values"
    elif activation not in (*SILU, *TANH):
        known = ": of the GELUs it has the tanh approximation" if activation.startswith("gelu") else ""
        yield f"it has no activation `{activation}`{known}"
    elif semantics["upcast"] and half_precision(definition):
        yield "it rounds the activation before the product, which the original does not"
    elif size is None or size > WIDEST:
        yield TOO_WIDE
    elif reason := other_result(definition, {"output": dtype}):
        yield reason
    elif packed == "gate_first" and activation in SILU:
        # Of a tensor with more than two axes it gives back a gradient with two.
        lines = [
            "product = LigerFusedGateUpSiLUMulFunction.apply(gate_up.flatten(0, -2), False)",
            "return product.unflatten(0, gate_up.shape[:-1])",
        ]
        imports = ["from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction"]
        yield Draft("swiglu_packed", calling(imports, definition, lines))
    elif packed is not None:
        yield f"from one tensor it takes gate first and SiLU, this is {packed} and {activation}"
    else:
        name = "swiglu" if activation in SILU else "geglu"
        lines = [
            "if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):",
            "    return Product.apply(gate, up)",
            f"return {name}_forward(gate.contiguous(), up.contiguous())[2]",
        ]
        imports = [f"from liger_kernel.ops.{name} import {name}_backward, {name}_forward"]
        yield Draft(name, calling(imports, definition, lines, _GRADIENT.format(name=name)))


WRITERS: dict[str, Writer] = {"gated_mlp": _gated}
