"""What the attention kernels share: scores and the softmax of one tile after the other, and the choice of tiles.

Scores of a tile are [rows, keys] or [keys, rows]; the functions take the positions of rows and keys shaped accordingly.
The softmax is kept in powers of two: `top` is the largest exponent seen so far, `total` the sum of the weights.
"""

# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import extent, power_of_two
from kernelgraft.kernels.examples import tensor

ZERO = ct.PaddingMode.ZERO
LOG2E = 1.4426950408889634
HALF = (torch.float16, torch.bfloat16)

NO_MASK, BOOL_MASK, FLOAT_MASK = 0, 1, 2
"""What a mask holds: nothing, whether a key is seen, or what is added to the score."""
LOWEST = -2.0e38
"""Below every exponent of a key that is seen, and finite: differences from it are never NaN."""
LOWEST_ADDED = -1.0e38
"""Masks hold down to -3.4e38, which times log2(e) is no float32; a row of nothing else still averages its keys."""


def product(x, y, acc, FAST):
    """x @ y + acc with float32 sums; float32 factors as sums of two tf32 each, which hold all but their last bit."""
    if FAST:
        return ct.mma(x, y, acc)
    x_high, y_high = ct.astype(x, ct.tfloat32), ct.astype(y, ct.tfloat32)
    x_low = ct.astype(x - ct.astype(x_high, ct.float32), ct.tfloat32)
    y_low = ct.astype(y - ct.astype(y_high, ct.float32), ct.tfloat32)
    acc = ct.mma(x_low, y_high, acc)
    acc = ct.mma(x_high, y_low, acc)
    return ct.mma(x_high, y_high, acc)


def scaled(s, scale, cap, CAPPED, FAST):
    """Limited scores as exponents of two; without a limit they are left as they are, for `exponents` to scale.

    With a limit `scale` is the scaling over the limit, and `cap` the limit times log2(e).
    """
    if CAPPED:
        if FAST:
            below = 1.0 + ct.exp2(s * (scale * 2.8853900817779268), flush_to_zero=True)
            s = cap - ct.truediv(2.0 * cap, below, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
        else:
            s = cap * ct.tanh(s * scale)
    return s


def added(s, mask, scale, CAPPED):
    """Scores with a float mask added, as exponents of two."""
    mask = ct.astype(mask, ct.float32)
    if not CAPPED:
        s = s * scale
    s = s + ct.maximum(mask, LOWEST_ADDED) * LOG2E
    return ct.where(mask > -math.inf, s, -math.inf)


def weigh(s, top, total, scale, AXIS, READY):
    """The weights of a tile's keys, the new `top` and `total`, and the factor for what was summed before.

    READY: the scores are exponents of two; otherwise `scale` makes them so.
    """
    if READY:
        new = ct.maximum(top, ct.max(s, axis=AXIS, keepdims=True))
        p = ct.exp2(s - new, flush_to_zero=True)
    else:
        new = ct.maximum(top, ct.max(s, axis=AXIS, keepdims=True) * scale)
        p = ct.exp2(s * scale - new, flush_to_zero=True)
    factor = ct.exp2(top - new, flush_to_zero=True)
    return p, new, total * factor + ct.sum(p, axis=AXIS, keepdims=True), factor


def share(top, total, sink, SINKS):
    """What the sum of weighted values is multiplied by: one over the weights, of which a sink is one; 0 for no key."""
    if SINKS:
        sink = sink * LOG2E
        new = ct.maximum(top, sink)
        factor = ct.exp2(top - new)
        total = total * factor + ct.exp2(sink - new)
        return factor / total
    return ct.where(total == 0.0, 0.0, 1.0 / ct.where(total == 0.0, 1.0, total))


def pieces(width: int, split: bool) -> tuple[int, int]:
    """Powers of two that hold a head's channels: one and 0, or if `split` two that have less to spare."""
    whole = max(16, power_of_two(width))
    if not split:
        return whole, 0
    first = whole // 2
    if whole == width or first < 16:
        return whole, 0
    rest = max(16, power_of_two(width - first))
    return (first, rest) if rest < first else (whole, 0)


def about(number: int) -> int:
    """The power of two next above, of which sizes form classes."""
    return power_of_two(max(1, number))


def factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """`scale` and `cap` of the kernels."""
    if softcap is None:
        return scaling * LOG2E, 0.0
    return scaling / softcap, softcap * LOG2E


def far(*tensors: torch.Tensor | None) -> bool:
    """True if one has elements that are too far apart for 32-bit offsets."""
    for t in tensors:
        if t is not None and t.untyped_storage().nbytes() > LARGEST and extent(t.shape, t.stride()) > LARGEST:
            return True
    return False


LARGEST = 2**31 - 1


def halves(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: torch.Tensor | None,
    out: torch.Tensor,
) -> Iterator[tuple[Any, ...]]:
    """The tensors of an attention in two parts, by batch or by key heads; out: [batch, q_len, heads, value_dim]."""
    batch, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    group = heads // kv_heads
    whole = batch if batch > 1 else kv_heads
    if whole == 1:
        raise ValueError("one head's keys, values, queries or mask are too large for 32-bit offsets")
    for a, b in ((0, whole // 2), (whole // 2, whole)):
        if batch > 1:
            m = mask if mask is None or mask.shape[0] == 1 else mask[a:b]
            n = None if lengths is None else lengths[a:b]
            yield query[a:b], key[a:b], value[a:b], m, sinks, n, out[a:b]
        else:
            own = slice(a * group, b * group)
            m = mask if mask is None or mask.shape[1] == 1 else mask[:, own]
            s = None if sinks is None else sinks[own]
            yield query[:, own], key[:, a:b], value[:, a:b], m, s, lengths, out[:, :, own]


def result(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The empty result [batch, q_len, heads, value_dim]."""
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[3])


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raise ValueError for tensors that are no attention's."""
    batch, heads, q_len, width = query.shape
    if key.shape[:3] != value.shape[:3] or batch != key.shape[0] or width != key.shape[3]:
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} do not fit")
    if mask is not None:
        a, b, *lengths = mask.shape
        if a not in (1, batch) or b not in (1, heads) or lengths != [q_len, key.shape[2]]:
            raise ValueError(f"mask {list(mask.shape)} does not fit query {list(query.shape)}, key {list(key.shape)}")


def group(heads: int, kv_heads: int, scaling: float) -> int:
    """How many query heads share a key head; ValueError for what is not served."""
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} key heads")
    if scaling <= 0:
        raise ValueError(f"the scaling is {scaling}, served are positive ones")
    return heads // kv_heads


def example(
    device: str, batch: int, lengths: tuple[int, int], heads: tuple[int, int], width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value: a query as its projection leaves it, keys and values as a cache does."""
    query = tensor(device, batch, lengths[0], heads[0], width, dtype=dtype).transpose(1, 2)
    key, value = (tensor(device, batch, heads[1], lengths[1], width, dtype=dtype) for _ in range(2))
    return query, key, value


def left_padded(device: str, batch: int, q_len: int, kv_len: int) -> torch.Tensor:
    """A causal mask whose rows begin later and later: [batch, 1, q_len, kv_len], True where a key is seen."""
    keys = torch.arange(kv_len, device=device)
    last = torch.arange(q_len, device=device).view(1, 1, q_len, 1) + kv_len - q_len
    start = torch.arange(batch, device=device).view(batch, 1, 1, 1) * (kv_len // 4)
    return ((keys <= last) & (keys >= start)) | (keys == last)
