"""Gated products in plain torch: the activation's one-call form, and the product taken in its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelgraft.records import Definition, Match
from kernelgraft.suppliers.torch_sources import FLOATS, Draft, write

CATALOGUE = {
    "in_place": "the activation in as few calls as torch has, multiplied in place",
    "steps": "GELU by tanh in the original's own steps, in place",
    "fused": "the activation in one call where the original writes it out",
}

_CALLS = {
    "silu": "torch.nn.functional.silu({x})",
    "gelu": "torch.nn.functional.gelu({x})",
    "gelu_tanh": 'torch.nn.functional.gelu({x}, approximate="tanh")',
    "relu": "torch.relu({x})",
    "relu2": "torch.relu({x}).square_()",
    "relu6": "torch.nn.functional.relu6({x})",
    "leaky_relu": "torch.nn.functional.leaky_relu({x})",
    "sigmoid": "torch.sigmoid({x})",
    "tanh": "torch.tanh({x})",
    "mish": "torch.nn.functional.mish({x})",
    "elu": "torch.nn.functional.elu({x})",
    "softplus": "torch.nn.functional.softplus({x})",
    "hardswish": "torch.nn.functional.hardswish({x})",
    "quick_gelu": "torch.mul({x}, 1.702).sigmoid_().mul_({x})",
}
"""One new tensor that may be written to, from an expression that is cheap to repeat."""
_WRITTEN_OUT = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_python": "gelu", "silu_python": "silu"}
"""Activations that are another one in single steps."""
_TANH_STEPS = {"gelu_new": "0.7978845608028654", "gelu_fast": "0.7978845608"}
"""sqrt(2 / pi) as each of them has it."""


def drafts(definition: Definition) -> list[Draft] | str:
    """See the package."""
    semantics, inputs = definition.meta.semantics, definition.inputs
    name = semantics["activation"]
    one_call = _WRITTEN_OUT.get(name, name)
    dtypes = {s.dtype for s in (*inputs.values(), *definition.outputs.values())}
    if len(dtypes) != 1 or dtypes - set(FLOATS):
        return "gate, up and output of one dtype, float32, bfloat16 or float16, are served"
    if one_call not in _CALLS and one_call != "identity":
        return f"it does not know the activation `{name}`"
    dtype = next(iter(dtypes))
    match: Match = "adapter" if one_call != name else "exact"
    arguments = list(inputs)
    found = [Draft("in_place", write(arguments, _body(semantics, one_call, dtype, _in_place)), match, autograd=False)]
    if name in _TANH_STEPS:
        found.append(Draft("steps", write(arguments, _body(semantics, name, dtype, _in_place)), autograd=False))
    if one_call != name:
        found.append(Draft("fused", write(arguments, _body(semantics, one_call, dtype, _product)), match))
    return found


def _in_place(gate: str, up: str) -> str:
    return f"{gate}.mul_({up})"


def _product(gate: str, up: str) -> str:
    return f"{gate} * {up}"


def _body(semantics: dict[str, Any], activation: str, dtype: str, product: Callable[[str, str], str]) -> list[str]:
    lines = _unpack(semantics["packed"])
    wide = semantics["upcast"] and dtype != "float32"
    limit = repr(semantics["limit"])
    gate, up = "gate", "up"
    if wide:
        lines += ["gate = gate.float()"]
    if semantics["clamp"] == "before":
        lines += [f"gate = gate.clamp(max={limit})"]
    fresh = activation != "identity"
    if activation in _TANH_STEPS:
        lines.append("inner = torch.addcmul(gate, gate * gate, gate, value=0.044715)")
        gate = f"inner.mul_({_TANH_STEPS[activation]}).tanh_().add_(1.0).mul_(gate).mul_(0.5)"
    elif fresh:
        gate = _CALLS[activation].format(x="gate")
    if semantics["clamp"] == "after":
        clamp = "clamp_" if product is _in_place and fresh else "clamp"
        gate, fresh = f"{gate}.{clamp}(max={limit})", True
    if semantics["clamp"] is not None:
        up = f"up{'.float()' if wide else ''}.clamp(min=-{limit}, max={limit})"
    result = product(gate, up) if fresh else _product(gate, up)
    return [*lines, f"return ({result}).to(torch.{dtype})" if wide else f"return {result}"]


def _unpack(packed: str | None) -> list[str]:
    if packed is None:
        return []
    names = "gate, up" if packed.endswith("gate_first") else "up, gate"
    if packed.startswith("interleaved"):
        return [f"{names} = gate_up[..., 0::2], gate_up[..., 1::2]"]
    return [f"{names} = gate_up.chunk(2, -1)"]
