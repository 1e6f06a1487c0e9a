"""RMS norm of each head of q and k, then rotary position embedding: what attention does before the scores.

Semantics: `norm`, those of the family `rms_norm` (`eps`, `cast`, `offset`, `offset_dtype`, `inverse`); `rope`:
`rotary_dim`, `placement` (`first` or `last`), `pairs_in`, `pairs_out`, `table` (`full`, `first_half`, `half`),
`compute` (`input`, `float32`) and `cast` (the result has the norm's dtype). q and k come as projections leave them,
[batch, length, heads, head_dim], and go as [batch, heads, length, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kernelgraft import families
from kernelgraft.families.base import Distribution
from kernelgraft.families.norms import NormFamily
from kernelgraft.families.probe import draw
from kernelgraft.families.reference import torch_dtype
from kernelgraft.families.unsited import Shapes, Unsited, written
from kernelgraft.records import Definition


class QkNormRope(Unsited):
    """Norm and rotation of heads as one compute."""

    name: ClassVar[str] = "qk_norm_rope"

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`; the tables come from random angles, the weights scale by 0.5 to 1.5."""
        sizes = {n: a.value for n, a in definition.axes.items() if a.value is not None} | axes
        semantics, made = definition.meta.semantics, []
        tables: dict[str, torch.Tensor] = {}
        for name, spec in definition.inputs.items():
            shape, dtype = [sizes[axis] for axis in spec.shape or ()], torch_dtype(spec.dtype)
            if name in ("q", "k"):
                made.append(draw(shape, dtype, generator, distribution))
            elif name in ("cos", "sin"):
                tables = tables or _tables(shape[:-1], semantics["rope"], generator)
                made.append(tables[name].to(dtype).contiguous())
            else:
                values = torch.rand(shape, generator=generator) + 0.5 - semantics["norm"]["offset"]
                made.append(values.to(dtype))
        return made

    def axis_points(self, definition: Definition, traced: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """See `Family.axis_points`; also tables with a row per batch element."""
        found = []
        for point in super().axis_points(definition, [{**t, "table_batch": 1} for t in traced]):
            for rows in dict.fromkeys((1, point["batch_size"])):
                if (other := {**point, "table_batch": rows}) not in found:
                    found.append(other)
        return found

    def work(self, inputs: Sequence[Any]) -> int:
        """See `Family.work`: heads of q at all positions."""
        return int(inputs[0].shape[0] * inputs[0].shape[1] * inputs[0].shape[2])


def _tables(leading: list[int], rope: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    angles = (torch.rand([*leading, rope["rotary_dim"] // 2], generator=generator) * 2 - 1) * math.pi
    if rope["table"] != "half" and rope["pairs_out"] == "half":
        angles = torch.cat((angles, angles), dim=-1)
    elif rope["table"] != "half":
        angles = angles.repeat_interleave(2, dim=-1)
    return {"cos": angles.cos(), "sin": angles.sin()}


def reference(norm: dict[str, Any], rope: dict[str, Any]) -> str:
    """Source of `run(q, k, q_weight, k_weight, cos, sin)`: the norm's own reference, then the rotation."""
    rms_norm = families.get("rms_norm")
    assert isinstance(rms_norm, NormFamily)
    size = rope["rotary_dim"]
    halves = {"half": "{0}.chunk(2, dim=-1)", "interleaved": "{0}[..., 0::2], {0}[..., 1::2]"}
    turned, rest = (f"x[..., :{size}]", f"x[..., {size}:]")
    if rope["placement"] == "last":
        turned, rest = (f"x[..., -{size}:]", f"x[..., :-{size}]")
    order = "rest, y" if rope["placement"] == "last" else "y, rest"
    wide, back = (".float()", "") if rope["compute"] == "float32" else ("", "")
    if rope["cast"]:
        back = ".to(x.dtype)"
    joined = "torch.cat((first, second), dim=-1)"
    if rope["pairs_out"] == "interleaved":
        joined = "torch.stack((first, second), dim=-1).flatten(-2)"
    tables = [
        f"    cos_a, cos_b = {halves[rope['pairs_out']].format('cos')}",
        f"    sin_a, sin_b = {halves[rope['pairs_out']].format('sin')}",
    ]
    if rope["table"] != "full":
        part = f"[..., : {size // 2}]"
        tables = [f"    cos_a = cos_b = cos{part}", f"    sin_a = sin_b = sin{part}"]
    lines = [
        rms_norm.source({**norm, "form": "explicit", "with_weight": True}, function="norm"),
        "",
        "",
        "def run(q, k, q_weight, k_weight, cos, sin):",
        "    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)",
        *tables,
        "",
        "    def turn(x):",
        f"        turned, rest = {turned}, {rest}",
        f"        a, b = {halves[rope['pairs_in']].format('turned')}",
        f"        a, b = a{wide}, b{wide}",
        "        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b",
        f"        y = {joined}{back}",
        f"        return torch.cat(({order}), dim=-1).contiguous()",
        "",
        "    return turn(norm(q, q_weight).transpose(1, 2)), turn(norm(k, k_weight).transpose(1, 2))",
    ]
    return "\n".join(lines)


def definition_for(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    norm: dict[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
) -> Definition:
    """The compute for heads of these sizes; `norm` and `rope` are semantics that differ from the plain ones.

    Plain: the norm is cast before its weight, every channel turns in half-split pairs by a full table in q's dtype.
    """
    inverse = {"inverse": "rsqrt", "cast": "before_weight", "offset": 0, "offset_dtype": None}
    semantics: dict[str, Any] = {
        "norm": {"eps": eps, **inverse, **(norm or {})},
        "rope": {
            **{"rotary_dim": head_dim, "placement": "first", "pairs_in": "half", "pairs_out": "half", "table": "full"},
            **{"compute": "input", "cast": True},
            **(rope or {}),
        },
    }
    turned = semantics["rope"]["rotary_dim"]
    vector, table = weight_dtype or dtype, table_dtype or dtype
    normed = normed_dtype(semantics["norm"]["cast"], dtype, vector)
    result = normed
    if not semantics["rope"]["cast"]:
        wide = torch.float32 if semantics["rope"]["compute"] == "float32" else normed
        result = torch.promote_types(wide, table)
    axes: dict[str, int | None] = {"batch_size": None, "seq_len": None, "num_heads": num_heads}
    axes |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "table_batch": None}
    axes["table_width"] = turned // 2 if semantics["rope"]["table"] == "half" else turned
    rows = ("table_batch", "seq_len", "table_width")
    inputs: Shapes = {
        "q": (("batch_size", "seq_len", "num_heads", "head_dim"), dtype),
        "k": (("batch_size", "seq_len", "num_kv_heads", "head_dim"), dtype),
        "q_weight": (("head_dim",), vector),
        "k_weight": (("head_dim",), vector),
        "cos": (rows, table),
        "sin": (rows, table),
    }
    outputs: Shapes = {
        "q_out": (("batch_size", "num_heads", "seq_len", "head_dim"), result),
        "k_out": (("batch_size", "num_kv_heads", "seq_len", "head_dim"), result),
    }
    return written(
        FAMILY.name,
        f"qk_norm_rope_h{num_heads}_{num_kv_heads}_d{head_dim}_r{turned}",
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        body=reference(semantics["norm"], semantics["rope"]),
        source="kernelgraft.families.qk_norm_rope:reference",
        description=f"RMS norm of each head, then {turned} of its {head_dim} channels turn.",
        constraints=("table_batch == 1 or table_batch == batch_size",),
    )


def normed_dtype(cast: str, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """The dtype of the norm's result."""
    if cast == "after_weight":
        return x
    if cast == "weight_dtype" and weight is torch.float32:
        return weight
    return weight if cast == "weight_dtype" else torch.promote_types(x, weight)


FAMILY = QkNormRope()
