"""Attention written out: the reference of a variant, the masks that it is tried with, and a comparison with float64.

Used by the `attention` family only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.families.reference import Float64Mode, body_function

LARGEST_ERROR = {torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""relRMSE against float64 up to which a function's output is taken for attention: float32 decides what is computed, the
half types allow for weights and scores that are rounded on the way."""
TIMES_ORIGINAL = 3.0
"""The reference may be this many times as far from float64 as the original is."""


def body(semantics: dict[str, Any], *, masked: bool) -> str:
    """Source of `run(query, key, value[, attention_mask][, sinks])`: float32 arithmetic, one step a line."""
    sinks, groups = semantics["sinks"], semantics["num_heads"] // semantics["num_kv_heads"]
    names = ["query", "key", "value", *(["attention_mask"] if masked else []), *(["sinks"] if sinks else [])]
    lines = [f"def run({', '.join(names)}):"]
    if groups > 1:
        lines.append(f"    key = key.repeat_interleave({groups}, dim=1)")
        lines.append(f"    value = value.repeat_interleave({groups}, dim=1)")
    lines.append(f"    scores = torch.matmul(query.float(), key.float().transpose(2, 3)) * {semantics['scaling']!r}")
    if semantics["softcap"] is not None:
        lines.append(f"    scores = torch.tanh(scores / {semantics['softcap']!r}) * {semantics['softcap']!r}")
    if masked and semantics["mask"] == "float":
        lines.append("    scores = scores + attention_mask.float()")
    elif masked:
        lines.append('    scores = scores.masked_fill(~attention_mask, float("-inf"))')
    elif semantics["causal"]:
        lines += [
            "    q_len, kv_len = scores.shape[-2:]",
            "    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=scores.device).tril(kv_len - q_len)",
            '    scores = scores.masked_fill(~seen, float("-inf"))',
        ]
    if sinks:
        lines.append("    column = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)")
        lines.append("    weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]")
    else:
        lines.append("    weights = torch.softmax(scores, dim=-1)")
    if masked and semantics["mask"] == "bool" and not sinks:
        lines.append("    # A query that sees nothing gives zeros, not the NaN of an empty softmax.")
        lines.append("    weights = weights.masked_fill(~attention_mask.any(dim=-1, keepdim=True), 0.0)")
    lines.append("    output = torch.matmul(weights, value.float())")
    lines.append("    return output.transpose(1, 2).contiguous().to(query.dtype)")
    return "\n".join(lines)


@dataclass(frozen=True)
class Closeness:
    """How far a function and the reference are from float64, and from each other."""

    original: float
    """relRMSE of the original."""
    reference: float
    """relRMSE of the reference."""
    difference: float
    """Largest absolute difference of the two."""
    limit: float
    """Largest relRMSE of the original that is taken for attention in its dtype."""

    @property
    def acceptable(self) -> bool:
        """True if the original computes this, and the reference does so about as precisely."""
        floor = self.limit / 30  # the rounding of the output alone
        return self.original <= self.limit and self.reference <= max(TIMES_ORIGINAL * self.original, floor)


FAR = Closeness(original=float("inf"), reference=float("inf"), difference=float("inf"), limit=0.0)


def compare(
    source: str, inputs: Sequence[torch.Tensor], output: torch.Tensor, rows: torch.Tensor | None = None
) -> Closeness:
    """Judge an output of the original for these inputs by the reference in `source`.

    `rows`: bool [batch, q_len], the queries that are compared; None: all.
    """
    run = body_function(source)
    with torch.no_grad():
        own = run(*inputs).double()
        with Float64Mode():
            oracle = run(*(x.double() if x.is_floating_point() else x for x in inputs))
    if output.shape != oracle.shape:
        return FAR
    if rows is not None:
        own, oracle, output = own[rows], oracle[rows], output[rows]
    if not bool(output.isfinite().all()):
        return FAR
    scale = float(oracle.norm()) or 1.0
    return Closeness(
        original=float((output.double() - oracle).norm()) / scale,
        reference=float((own - oracle).norm()) / scale,
        difference=float((own - output.double()).abs().max()),
        limit=LARGEST_ERROR.get(output.dtype, 0.0),
    )


def seeing(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Queries that a mask lets see a key in every head, bool [batch, q_len]; None without a mask.

    What comes out for the others (padding on the left) nobody uses, and libraries differ: zeros, NaN, some mean.
    """
    if mask is None:
        return None
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return visible.any(dim=-1).all(dim=1).expand(batch, -1)


def make_mask(
    shape: Sequence[int], semantics: dict[str, Any], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A mask as models make them: causal, left padding per row, the window, sometimes keys that are not filled yet.

    Each query sees at least itself. Shape [batch or 1, heads or 1, q_len, kv_len].
    """
    batch, _, q_len, kv_len = shape
    keys, queries = torch.arange(kv_len), torch.arange(q_len)[:, None]
    rows = []
    for _ in range(batch):
        kind, fill, start = torch.rand(3, generator=generator).tolist()
        spare = max(0, kv_len - q_len)
        # With some keys left empty behind the queries, as in a cache of fixed size.
        offset = kv_len - q_len if kind < 0.7 else int(fill * (spare + 1))
        last = queries + offset
        seen = (keys <= last) & (keys >= int(start * (offset + q_len) / 2))
        if semantics["sliding_window"] is not None:
            seen &= keys > last - semantics["sliding_window"]
        rows.append(seen | (keys == last))
    mask = torch.stack(rows)[:, None].expand(*shape).contiguous()
    if semantics["mask"] == "bool":
        return mask
    return torch.zeros(tuple(shape), dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
