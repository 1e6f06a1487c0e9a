"""Attention in plain torch: the fused call without repeated keys, query heads packed as rows, cuDNN, two products."""

from __future__ import annotations

from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.torch_sources import FLOATS, Draft, cast, write

CATALOGUE = {
    "packed": "scaled_dot_product_attention for one query: the query heads of a key head are its rows",
    "grouped": "scaled_dot_product_attention without repeating keys and values",
    "cudnn": "cuDNN's attention, whichever torch would choose, keys not repeated",
    "products": "two matrix products around a float32 softmax, with softcap and sinks, keys not repeated",
}

GPU_ONLY = ("cudnn",)
ALIGNED = 8
"""Elements: 16 bytes of a 16-bit dtype; an allocation begins at a multiple of more."""


def drafts(definition: Definition) -> list[Draft] | str:
    """See the package."""
    semantics, inputs = definition.meta.semantics, definition.inputs
    floats = {s.dtype for n, s in inputs.items() if n != "attention_mask"}
    if floats - set(FLOATS):
        return "tensors in float32, bfloat16 or float16 are served"
    masked, arguments = "attention_mask" in inputs, list(inputs)
    if semantics["softcap"] is not None or semantics["sinks"]:
        return [Draft("products", write(arguments, _products(definition, masked)), autograd=False)]
    # Over a single key the exact gradient of the query is zero, and that of the fused call is rounding noise: none is
    # claimed.
    found = [Draft("grouped", write(arguments, _grouped(semantics, masked)), autograd=False)]
    if _groups(semantics) > 1:
        packed = Draft("packed", write(arguments, _packed(semantics, masked)), autograd=False, max_axes={"q_len": 1})
        found.insert(0, packed)
    width = semantics["head_dim"]
    if not masked and "float32" not in floats and width == semantics["value_dim"] <= 128 and not width % 8:
        source = _cudnn(semantics, arguments)
        found.append(Draft("cudnn", source, autograd=False, dependencies=("torch", "kernelgraft")))
    return found


def _aligned(semantics: dict[str, Any], masked: bool) -> list[str]:
    """The tensors, or copies of those that begin elsewhere than every 16 bytes.

    torch chooses among its fused kernels by sizes and strides. On CUDA some of them (cuDNN's, the first choice where a
    GPU has it, and the memory-efficient one) read from elsewhere if a tensor begins in between, and give other numbers.
    A compiled function cannot ask where a tensor begins, and is left what the original is.
    """
    names = ["query", "key", "value", *(["attention_mask"] if masked and semantics["mask"] == "float" else [])]
    listed = ", ".join(names)
    return [
        "if not torch.compiler.is_compiling():",
        f"    {listed} = [x.clone() if x.storage_offset() % {ALIGNED} else x for x in ({listed})]",
    ]


def _groups(semantics: dict[str, Any]) -> int:
    groups: int = semantics["num_heads"] // semantics["num_kv_heads"]
    return groups


def _grouped(semantics: dict[str, Any], masked: bool) -> list[str]:
    options = [f"scale={semantics['scaling']!r}"]
    if masked:
        options.insert(0, "attn_mask=attention_mask")
    elif semantics["causal"] and not semantics["decode_only"]:
        options.insert(0, "is_causal=query.shape[2] > 1")
    if _groups(semantics) > 1:
        options.append("enable_gqa=True")
    call = f"torch.nn.functional.scaled_dot_product_attention(query, key, value, {', '.join(options)})"
    return [*_aligned(semantics, masked), f"output = {call}", "return output.transpose(1, 2).contiguous()"]


def _packed(semantics: dict[str, Any], masked: bool) -> list[str]:
    """One query a sequence: without queries to tell apart, each key head sees its query heads as queries."""
    heads, kv_heads, groups = semantics["num_heads"], semantics["num_kv_heads"], _groups(semantics)
    lines = [
        *_aligned(semantics, masked),
        "batch = query.shape[0]",
        f"query = query.reshape(batch, {kv_heads}, {groups}, {semantics['head_dim']})",
    ]
    options = [f"scale={semantics['scaling']!r}"]
    if masked:
        options.insert(0, "attn_mask=attention_mask")
        if semantics["mask_heads"] > 1:
            lines.append(f"attention_mask = attention_mask.reshape(-1, {kv_heads}, {groups}, key.shape[2])")
    call = f"torch.nn.functional.scaled_dot_product_attention(query, key, value, {', '.join(options)})"
    return [
        *lines,
        f"output = {call}",
        f"return output.reshape(batch, 1, {heads}, {semantics['value_dim']}).contiguous()",
    ]


def _cudnn(semantics: dict[str, Any], arguments: list[str]) -> str:
    causal = "query.shape[2] > 1" if semantics["causal"] and not semantics["decode_only"] else "False"
    options = f"scaling={semantics['scaling']!r}, causal={causal}"
    body = [
        "from kernelgraft.kernels.cudnn_attention import cudnn_attention",
        "",
        "",
        f"def kernel({', '.join(arguments)}):",
        f"    return cudnn_attention(query, key, value, {options})",
    ]
    return "\n".join(body) + "\n"


def _products(definition: Definition, masked: bool) -> list[str]:
    semantics, dtype = definition.meta.semantics, definition.inputs["query"].dtype
    heads, kv_heads, groups = semantics["num_heads"], semantics["num_kv_heads"], _groups(semantics)
    wide = "" if dtype == "float32" else ".float()"
    softcap = semantics["softcap"]
    lines = [
        "batch, _, q_len, head_dim = query.shape",
        "kv_len = key.shape[2]",
        f"query = query{wide}.reshape(batch, {kv_heads}, {groups} * q_len, head_dim)",
        f"scores = torch.matmul(query, key{wide}.transpose(2, 3)).view(batch, {heads}, q_len, kv_len)",
    ]
    if softcap is None:
        lines.append(f"scores.mul_({semantics['scaling']!r})")
    else:
        lines.append(f"scores.mul_({semantics['scaling'] / softcap!r}).tanh_().mul_({softcap!r})")
    if masked and semantics["mask"] == "float":
        lines.append("scores.add_(attention_mask)")
    elif masked:
        lines.append('scores.masked_fill_(attention_mask.logical_not(), float("-inf"))')
    elif semantics["causal"] and not semantics["decode_only"]:
        lines += [
            "if q_len > 1:",
            "    hidden = torch.ones(q_len, kv_len, dtype=torch.bool, device=scores.device).triu_(1)",
            '    scores.masked_fill_(hidden, float("-inf"))',
        ]
    if semantics["sinks"]:
        sinks = cast("sinks", definition.inputs["sinks"].dtype, "float32")
        lines += [
            f"column = {sinks}.view(1, {heads}, 1, 1)",
            f"scores = torch.cat((scores, column.expand(batch, {heads}, q_len, 1)), -1)",
            "weights = torch.softmax(scores, -1).narrow(-1, 0, kv_len)",
        ]
    else:
        lines.append("weights = torch.softmax(scores, -1)")
    if masked and semantics["mask"] == "bool" and not semantics["sinks"]:
        lines.append("weights = weights.masked_fill_(attention_mask.any(-1, keepdim=True).logical_not(), 0.0)")
    lines += [
        f"weights = weights.reshape(batch, {kv_heads}, {groups} * q_len, kv_len)",
        f"output = torch.matmul(weights, value{wide}).view(batch, {heads}, q_len, {semantics['value_dim']})",
        f"return output.transpose(1, 2).contiguous(){'' if not wide else f'.to(torch.{dtype})'}",
    ]
    return lines
