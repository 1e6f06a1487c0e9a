"""Hand-made Definitions of all families, of any size: what the tests of other packages' kernels share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kernelgraft import families
from kernelgraft.evaluate import Captured
from kernelgraft.evaluate.tolerance import compare
from kernelgraft.families import attention as attention_family
from kernelgraft.families import gated_mlp
from kernelgraft.families.reference import as_tuple, define, run_oracle, run_reference
from kernelgraft.families.rope_variants import Variant
from kernelgraft.records import Definition, Site, SourceRef
from kernelgraft.suppliers.guards import bind_axes

SOURCE = SourceRef(file="somewhere/modeling.py", first_line=1, last_line=2, sha256="a" * 64)
SITE = Site(kind="module", path="layers.*.x", instances=("layers.0.x",), class_name="m.X", source=SOURCE)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ROWS = ("batch_size", "seq_len", "hidden_size")

RMS = {"eps": 1e-5, "form": "explicit", "inverse": "rsqrt", "offset": 0, "offset_dtype": None, "with_weight": True}
LAYER = {
    "eps": 1e-5,
    "form": "functional",
    "upcast": False,
    "cast": "none",
    "offset": 0,
    "offset_dtype": None,
    "with_weight": True,
    "with_bias": True,
}


def _norm(family: str, semantics: dict[str, Any], size: int, dtype: torch.dtype, weight: torch.dtype) -> Definition:
    vectors = [r for r in ("weight", "bias") if semantics.get(f"with_{r}")]
    body = families.get(family).source(semantics)  # type: ignore[attr-defined]
    out = _result(body, dtype, weight, 1 + len(vectors))
    return define(
        name=f"{family}_d",
        op_type=family,
        family=family,
        semantics=semantics,
        axes={"batch_size": None, "seq_len": None, "hidden_size": size},
        inputs={"hidden_states": (ROWS, dtype), **{r: (ROWS[-1:], weight) for r in vectors}},
        outputs={"output": (ROWS, out)},
        body=body,
        site=SITE,
        description="a norm",
        reference_error=0.0,
    )


def _result(body: str, dtype: torch.dtype, weight: torch.dtype, count: int) -> torch.dtype:
    namespace: dict[str, Any] = {"torch": torch}
    exec(body, namespace)
    found: torch.dtype = namespace["run"](
        torch.ones(1, 1, 8, dtype=dtype), *[torch.ones(8, dtype=weight)] * (count - 1)
    ).dtype
    return found


def rms_norm(
    size: int, dtype: torch.dtype, *, cast: str = "before_weight", weight: torch.dtype | None = None, **changes: Any
) -> Definition:
    return _norm("rms_norm", {**RMS, "cast": cast, **changes}, size, dtype, weight or dtype)


def layer_norm(size: int, dtype: torch.dtype, *, weight: torch.dtype | None = None, **changes: Any) -> Definition:
    return _norm("layer_norm", {**LAYER, **changes}, size, dtype, weight or dtype)


def residual_norm(
    size: int,
    dtype: torch.dtype,
    *,
    order: str = "pre",
    family: str = "rms_norm",
    residual: torch.dtype | None = None,
    **changes: Any,
) -> Definition:
    norm = {**(RMS if family == "rms_norm" else LAYER), **({"cast": "before_weight"} if family == "rms_norm" else {})}
    norm |= changes
    vectors = [r for r in ("weight", "bias") if norm.get(f"with_{r}")]
    passed = "".join(f", {r}" for r in vectors)
    body = families.get(family).source(norm, function="norm")  # type: ignore[attr-defined]
    body += f"\n\n\ndef run(residual, hidden_states{passed}):\n"
    if order == "pre":
        body += f"    total = residual + hidden_states\n    return total, norm(total{passed})"
    else:
        body += f"    return residual + norm(hidden_states{passed})"
    wide = torch.promote_types(dtype, residual or dtype)
    return define(
        name="residual_norm_d",
        op_type="residual_norm",
        family="residual_norm",
        semantics={"order": order, "norm": {"family": family, **norm}},
        axes={"batch_size": None, "seq_len": None, "hidden_size": size},
        inputs={
            "residual": (ROWS, residual or dtype),
            "hidden_states": (ROWS, dtype),
            **{r: (ROWS[-1:], dtype) for r in vectors},
        },
        outputs={n: (ROWS, wide) for n in (("sum", "normed") if order == "pre" else ("sum",))},
        body=body,
        site=SITE,
        description="a residual norm",
        reference_error=0.0,
    )


def rope(
    size: int,
    dtype: torch.dtype,
    *,
    rotary: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    layout: str = "duplicated",
    tables: torch.dtype | None = None,
    with_k: bool = True,
    rank: int = 4,
    leading: tuple[int, ...] = (0, 2),
    pairs: tuple[str, str] = ("half", "half"),
    **changes: Any,
) -> Definition:
    """`leading` (0, 2): heads before the length; (0, 1): after it."""
    table = changes.pop("table", "full")
    variant = Variant(
        pairs[0],  # type: ignore[arg-type]
        pairs[1],  # type: ignore[arg-type]
        table,
        changes.pop("placement", "first"),
        rotary or size,
        size,
        rank,
        leading,
        swapped=False,
        **changes,
    )
    names = ("pairs_in", "pairs_out", "rotary_dim", "head_dim", "placement", "direction", "table", "compute", "cast")
    semantics = {name: getattr(variant, name) for name in names}
    length = leading[-1]
    labels = {0: "batch_size", length: "seq_len"} if length else {0: "seq_len"}
    shape = [labels.get(axis, "num_heads") for axis in range(rank - 1)]
    axes: dict[str, int | None] = {n: heads if n == "num_heads" else None for n in shape} | {"head_dim": size}
    if with_k:
        axes["num_kv_heads"] = kv_heads
    rows = ["seq_len" if axis == length else "table_batch" for axis in leading]
    axes |= {"table_batch": None} if "table_batch" in rows else {}
    table_dtype = tables or dtype
    if table == "complex":
        axes |= {"pairs": variant.rotary_dim // 2, "parts": 2}
        specs: dict[str, Any] = {"freqs": ([*rows, "pairs", "parts"], F32)}
        table_dtype = F32
    else:
        axes["table_width"] = variant.rotary_dim // (2 if table == "half" else 1)
        specs = {t: ([*rows, "table_width"], table_dtype) for t in ("cos", "sin")}
    inputs: dict[str, Any] = {"q": ([*shape, "head_dim"], dtype)}
    if with_k:
        inputs["k"] = (["num_kv_heads" if n == "num_heads" else n for n in [*shape, "head_dim"]], dtype)
    wide = torch.promote_types(dtype, table_dtype)
    wide = F32 if variant.compute == "float32" else wide
    return define(
        name="rope_d",
        op_type="rope",
        family="rope",
        semantics={**semantics, "table_layout": layout, "leading": list(leading)},
        axes=axes,
        inputs={**inputs, **specs},
        outputs={f"{n}_out": (s, dtype if variant.cast else wide) for n, (s, _) in inputs.items()},
        body=variant.body(with_k=with_k),
        site=SITE,
        description="a rotation",
        reference_error=0.0,
        constraints=["table_batch == 1 or table_batch == batch_size"] if "table_batch" in rows else [],
    )


def gated(activation: str, size: int, dtype: torch.dtype, **changes: Any) -> Definition:
    variant = gated_mlp.Variant(activation, **changes)
    semantics = {name: getattr(variant, name) for name in ("activation", "packed", "upcast", "clamp", "limit")}
    rows = ["batch_size", "seq_len"]
    names = ("gate", "up") if variant.packed is None else ("gate_up",)
    axes: dict[str, int | None] = {"batch_size": None, "seq_len": None, "intermediate_size": size}
    if variant.packed is not None:
        axes["packed_size"] = 2 * size
    width = "intermediate_size" if variant.packed is None else "packed_size"
    return define(
        name="gated_mlp_d",
        op_type="gated_mlp",
        family="gated_mlp",
        semantics=semantics,
        axes=axes,
        inputs={n: ([*rows, width], dtype) for n in names},
        outputs={"output": ([*rows, "intermediate_size"], dtype)},
        body=variant.body(),
        site=SITE,
        description="a gated product",
        reference_error=0.0,
    )


def attention(size: int, dtype: torch.dtype, *, masked: bool = False, **changes: Any) -> Definition:
    semantics = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": size,
        "value_dim": size,
        "scaling": size**-0.5,
        "softcap": None,
        "sinks": False,
        "causal": True,
        "decode_only": False,
        "mask": "bool" if masked else None,
        "mask_heads": 1,
        "sliding_window": None,
        **changes,
    }
    axes: dict[str, int | None] = {
        "batch_size": None,
        "num_heads": semantics["num_heads"],
        "num_kv_heads": semantics["num_kv_heads"],
        "q_len": None,
        "kv_len": None,
        "head_dim": size,
        "value_dim": semantics["value_dim"],
    }
    inputs: dict[str, Any] = {
        "query": (["batch_size", "num_heads", "q_len", "head_dim"], dtype),
        "key": (["batch_size", "num_kv_heads", "kv_len", "head_dim"], dtype),
        "value": (["batch_size", "num_kv_heads", "kv_len", "value_dim"], dtype),
    }
    if masked:
        axes |= {"mask_batch": None, "mask_heads": semantics["mask_heads"]}
        kind = torch.bool if semantics["mask"] == "bool" else dtype
        inputs["attention_mask"] = (["mask_batch", "mask_heads", "q_len", "kv_len"], kind)
    if semantics["sinks"]:
        inputs["sinks"] = (["num_heads"], dtype)
    constraints = ["mask_batch == 1 or mask_batch == batch_size"] if masked else []
    if semantics["decode_only"]:
        constraints = ["q_len == 1"]
    elif semantics["causal"] and not masked:
        constraints = ["q_len == 1 or q_len == kv_len"]
    return define(
        name="attention_d",
        op_type="attention",
        family="attention",
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs={"output": (["batch_size", "q_len", "num_heads", "value_dim"], dtype)},
        body=attention_family.body(semantics, masked=masked),
        site=SITE,
        description="attention",
        reference_error=0.0,
        constraints=constraints,
    )


def captured(definition: Definition, sizes: Sequence[dict[str, int]], device: str = "cpu") -> list[Captured]:
    """Calls of these sizes as a model would make them: the first a prefill, the others decode steps."""
    family, found = families.get(definition.meta.family), []
    names = [name for name, axis in definition.axes.items() if axis.value is None]
    for number, given in enumerate(sizes):
        axes = {name: given.get(name, 1) for name in names}
        made = family.inputs(definition, axes, torch.Generator().manual_seed(number), "normal")
        inputs = tuple(x.to(device) for x in made)
        bound = bind_axes(definition, inputs)
        regime = "prefill" if number == 0 else "decode"
        found.append(Captured(inputs, regime, f"number {number}", {n: bound[n] for n in names}))  # type: ignore[arg-type]
    return found


def sizes_of(definition: Definition) -> list[dict[str, int]]:
    """A short prefill and a decode step."""
    if definition.op_type == "attention":
        prefill = {"batch_size": 2, "q_len": 19, "kv_len": 19, "mask_batch": 2}
        decode = {"batch_size": 2, "q_len": 1, "kv_len": 150, "mask_batch": 1}
        return [decode] if definition.meta.semantics["decode_only"] else [prefill, decode]
    return [{"batch_size": 2, "seq_len": 6, "table_batch": 2}, {"batch_size": 1, "seq_len": 1, "table_batch": 1}]


def check(definition: Definition, function: Any, inputs: Sequence[torch.Tensor]) -> str | None:
    """What is wrong with a function's results for these inputs, in words; None if nothing is. Runs in this process."""
    before = [x.clone() for x in inputs]
    with torch.no_grad():
        actual = as_tuple(function(*inputs))
    native, exact = run_reference(definition, before), run_oracle(definition, before)
    if len(actual) != len(definition.outputs):
        return f"{len(actual)} outputs"
    for name, a, n, e in zip(definition.outputs, actual, native, exact, strict=True):
        if (a.shape, a.dtype, a.device) != (n.shape, n.dtype, n.device):
            return f"{name}: {a.shape} {a.dtype} {a.device}"
        if n.is_contiguous() and not a.is_contiguous():
            return f"{name} is not contiguous"
        if wrong := compare(a.cpu(), n.cpu(), e.cpu(), name=name).wrong:
            return wrong
    changed = [n for n, x, y in zip(definition.inputs, inputs, before, strict=True) if not torch.equal(x, y)]
    return f"changes {changed[0]}" if changed else None


def laid_out(definition: Definition, size: dict[str, int], device: str) -> Iterator[list[torch.Tensor]]:
    """Inputs of one size, contiguous and with their first two axes swapped in memory."""
    inputs = list(captured(definition, [size], device)[0].inputs)
    yield inputs
    yield [x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x for x in inputs]
