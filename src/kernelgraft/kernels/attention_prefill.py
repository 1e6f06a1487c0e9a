"""Attention of many queries, with the softmax kept while the keys pass by; nothing of size q_len times kv_len is made.

A block takes TM queries of one head; of a mask-less causal call it reads only the tiles of keys that its queries see,
of a masked one those between the first and the last key that any of them sees, which a small launch finds before.
Products of half types go to the tensor cores with float32 sums, float32 is multiplied in float32. A head's channels
are held in one or two tiles, so that 96 channels cost 96.
"""

# ruff: noqa: SIM108
# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import Plan, eager, fire, hinted, power_of_two
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels import attention_tiles as tiles
from kernelgraft.kernels.attention_tiles import BOOL_MASK, FLOAT_MASK, LOWEST, NO_MASK, ZERO, about
from kernelgraft.kernels.examples import Example

NEVER = 2**30
"""Where a row of a mask begins that shows nothing."""
GRAIN = 32
"""Queries whose first and last seen key are found together."""
CHUNK = 256
"""Keys of a mask that are looked at together."""
HIDDEN = 0.9
"""A float mask hides a key where it is below that part of the lowest number of its dtype."""
TOGETHER = 48 << 20
"""Bytes of keys and values that blocks running at the same time should share in the cache."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """What can be chosen freely for a launch; the result is the same."""

    queries: int = 64
    keys: int = 128
    worker_warps: int | None = None
    occupancy: int | None = 2
    key_latency: int = 3
    value_latency: int = 3
    split: bool = True
    """Hold 96 channels as 64 and 32 instead of 128 of which 32 are zero."""


def run(
    first, last, q0, q1, k, v, mask, state, b, group, mask_b, mask_h, qi, rows, scale, cap, window, HIDE, CAUSAL,
    WINDOWED, MASK, CAPPED, FAST, D0, D1, V0, V1, TM, TN, KEY_LATENCY, VALUE_LATENCY,
):  # fmt: skip
    """Let the tiles of keys from `first` to before `last` pass by; with HIDE some are not seen by all queries."""
    top, total, acc0, acc1 = state
    columns = ct.reshape(ct.arange(TN, dtype=ct.int32), (1, TN))
    for j in range(first, last):
        k0 = ct.load(
            k, (b, group, 0, j), (1, 1, D0, TN), order=(0, 1, 3, 2), padding_mode=ZERO, latency=KEY_LATENCY
        )  # fmt: skip
        s = tiles.product(q0, ct.reshape(k0, (D0, TN)), ct.zeros((TM, TN), dtype=ct.float32), FAST)
        if D1 > 0:
            k1 = ct.load(
                k, (b, group, D0 // D1, j), (1, 1, D1, TN), order=(0, 1, 3, 2), padding_mode=ZERO, latency=KEY_LATENCY
            )  # fmt: skip
            s = tiles.product(q1, ct.reshape(k1, (D1, TN)), s, FAST)
        s = tiles.scaled(s, scale, cap, CAPPED, FAST)
        if MASK != NO_MASK:
            m = ct.reshape(
                ct.load(mask, (mask_b, mask_h, qi, j), (1, 1, TM, TN), padding_mode=ZERO, allow_tma=False, latency=1),
                (TM, TN),
            )
            if MASK == FLOAT_MASK:
                s = tiles.added(s, m, scale, CAPPED)
            else:
                s = ct.where(m, s, -math.inf)
        if HIDE:
            keys = columns + j * TN
            if CAUSAL:
                seen = keys <= rows
            else:
                seen = keys < k.shape[2]
            if WINDOWED:
                seen = seen & (keys > rows - window)
            s = ct.where(seen, s, -math.inf)
        p, top, total, factor = tiles.weigh(s, top, total, scale, 1, CAPPED or MASK == FLOAT_MASK)
        p = ct.astype(p, v.dtype)
        v0 = ct.load(v, (b, group, j, 0), (1, 1, TN, V0), padding_mode=ZERO, latency=VALUE_LATENCY)
        acc0 = gathered(p, ct.reshape(v0, (TN, V0)), acc0, factor, FAST, TM, V0)
        if V1 > 0:
            v1 = ct.load(v, (b, group, j, V0 // V1), (1, 1, TN, V1), padding_mode=ZERO, latency=VALUE_LATENCY)
            acc1 = gathered(p, ct.reshape(v1, (TN, V1)), acc1, factor, FAST, TM, V1)
    return top, total, acc0, acc1


def gathered(p, values, acc, factor, FAST, TM, WIDTH):
    """acc * factor + p @ values.

    Tensor cores cut off what does not fit into the sum they add to, always towards zero, at every few keys. Over many
    tiles that is several times what a float32 product may be off by, so each tile's product begins at zero and joins
    the others by an addition that rounds to nearest.
    """
    if FAST:
        return tiles.product(p, values, acc * factor, FAST)
    return acc * factor + tiles.product(p, values, ct.zeros((TM, WIDTH), dtype=ct.float32), FAST)


@ct.kernel
def attention_prefill_kernel(
    q,
    k,
    v,
    mask,
    spans,
    sinks,
    out,
    scale,
    cap,
    window,
    CAUSAL: ct.Constant[bool],
    WINDOWED: ct.Constant[bool],
    MASK: ct.Constant[int],
    CAPPED: ct.Constant[bool],
    SINKS: ct.Constant[bool],
    FAST: ct.Constant[bool],
    D0: ct.Constant[int],
    D1: ct.Constant[int],
    V0: ct.Constant[int],
    V1: ct.Constant[int],
    TM: ct.Constant[int],
    TN: ct.Constant[int],
    GRAINS: ct.Constant[int],
    KEY_LATENCY: ct.Constant[int],
    VALUE_LATENCY: ct.Constant[int],
):
    """q, k, v: [batch, heads, length, channels]; mask: [1 or batch, 1 or heads, q_len, kv_len]; sinks: [heads];
    out: [batch, q_len, heads, value_dim]; spans: [2, pairs of the mask, q_len / 32], from `mask_spans_kernel`.

    Grid: heads of a section, tiles of queries, sections. The tiles with most keys come first.
    """
    pair = ct.bid(2) * ct.num_blocks(0) + ct.bid(0)
    heads = q.shape[1]
    b, head = pair // heads, pair % heads
    group = head // (heads // k.shape[1])
    qi = ct.bid(1)
    if CAUSAL:
        qi = ct.num_blocks(1) - 1 - ct.bid(1)
    kv_len = k.shape[2]
    base = qi * TM + kv_len - q.shape[2]
    rows = ct.reshape(ct.arange(TM, dtype=ct.int32), (TM, 1)) + base
    q0 = ct.reshape(ct.load(q, (b, head, qi, 0), (1, 1, TM, D0), padding_mode=ZERO), (TM, D0))
    q1 = q0
    if D1 > 0:
        q1 = ct.reshape(ct.load(q, (b, head, qi, D0 // D1), (1, 1, TM, D1), padding_mode=ZERO), (TM, D1))
    top = ct.full((TM, 1), LOWEST, dtype=ct.float32)
    total = ct.zeros((TM, 1), dtype=ct.float32)
    acc0 = ct.zeros((TM, V0), dtype=ct.float32)
    acc1 = total
    if V1 > 0:
        acc1 = ct.zeros((TM, V1), dtype=ct.float32)
    state = (top, total, acc0, acc1)
    # Tiles of keys: some are seen by some queries from `begin` to before `end`, all by all from `inner` to `full`.
    begin, inner, full, end = 0, 0, kv_len // TN, ct.cdiv(kv_len, TN)
    if CAUSAL:
        full = (base + 1) // TN
        end = ct.cdiv(min(base + TM, kv_len), TN)
    if WINDOWED:
        begin = max(base - window + 1, 0) // TN
        inner = min(ct.cdiv(max(base + TM - window, 0), TN), end)
    mask_b, mask_h = 0, 0
    if MASK != NO_MASK:
        mask_b = min(b, mask.shape[0] - 1)
        mask_h = min(head, mask.shape[1] - 1)
        at = mask_b * mask.shape[1] + mask_h
        # Single numbers: a tile of them would be reduced by one group of warps, which all others would wait for.
        first, last = NEVER, 0
        for grain in ct.static_iter(range(GRAINS)):
            first = min(first, ct.load(spans, (0, at, qi * GRAINS + grain), ()).item())
            last = max(last, ct.load(spans, (1, at, qi * GRAINS + grain), ()).item())
        begin = max(begin, first // TN)
        end = min(end, ct.cdiv(last, TN))
        inner = end
    if (WINDOWED and FAST) or MASK != NO_MASK:
        state = run(
            begin, inner, q0, q1, k, v, mask, state, b, group, mask_b, mask_h, qi, rows, scale, cap, window, True,
            CAUSAL, WINDOWED, MASK, CAPPED, FAST, D0, D1, V0, V1, TM, TN, KEY_LATENCY, VALUE_LATENCY,
        )  # fmt: skip
    if MASK == NO_MASK and FAST:
        state = run(
            inner, full, q0, q1, k, v, mask, state, b, group, mask_b, mask_h, qi, rows, scale, cap, window, False,
            CAUSAL, WINDOWED, MASK, CAPPED, FAST, D0, D1, V0, V1, TM, TN, KEY_LATENCY, VALUE_LATENCY,
        )  # fmt: skip
        state = run(
            max(full, inner), end, q0, q1, k, v, mask, state, b, group, mask_b, mask_h, qi, rows, scale, cap, window,
            True, CAUSAL, WINDOWED, MASK, CAPPED, FAST, D0, D1, V0, V1, TM, TN, KEY_LATENCY, VALUE_LATENCY,
        )  # fmt: skip
    if MASK == NO_MASK and not FAST:
        # Each of these loops is long in float32, so that there is only one.
        state = run(
            begin, end, q0, q1, k, v, mask, state, b, group, mask_b, mask_h, qi, rows, scale, cap, window, True,
            CAUSAL, WINDOWED, MASK, CAPPED, FAST, D0, D1, V0, V1, TM, TN, KEY_LATENCY, VALUE_LATENCY,
        )  # fmt: skip
    top, total, acc0, acc1 = state
    sink = 0.0
    if SINKS:
        sink = ct.astype(ct.load(sinks, (head,), ()), ct.float32)
    factor = tiles.share(top, total, sink, SINKS)
    ct.store(out, (b, qi, head, 0), ct.reshape(ct.astype(acc0 * factor, out.dtype), (1, TM, 1, V0)))
    if V1 > 0:
        ct.store(out, (b, qi, head, V0 // V1), ct.reshape(ct.astype(acc1 * factor, out.dtype), (1, TM, 1, V1)))


@ct.kernel
def mask_spans_kernel(mask, spans, hidden, MASK: ct.Constant[int], ROWS: ct.Constant[int], COLUMNS: ct.Constant[int]):
    """For ROWS queries the first key that any of them sees, and one past the last.

    A row of a float mask that shows nothing sees everything: its weights are equal.
    """
    pair, tile = ct.bid(1), ct.bid(0)
    b, h = pair // mask.shape[1], pair % mask.shape[1]
    q_len, kv_len = mask.shape[2], mask.shape[3]
    rows = ct.reshape(ct.arange(ROWS, dtype=ct.int32), (ROWS, 1)) + tile * ROWS
    columns = ct.reshape(ct.arange(COLUMNS, dtype=ct.int32), (1, COLUMNS))
    first = ct.full((ROWS, 1), NEVER, dtype=ct.int32)
    last = ct.zeros((ROWS, 1), dtype=ct.int32)
    if tile * ROWS < q_len:
        for j in range(ct.cdiv(kv_len, COLUMNS)):
            m = ct.load(mask, (b, h, tile, j), (1, 1, ROWS, COLUMNS), padding_mode=ZERO)
            m = ct.reshape(m, (ROWS, COLUMNS))
            if MASK == FLOAT_MASK:
                m = ct.astype(m, ct.float32) > hidden
            keys = columns + j * COLUMNS
            m = m & (keys < kv_len)
            first = ct.minimum(first, ct.min(ct.where(m, keys, NEVER), axis=1, keepdims=True))
            last = ct.maximum(last, ct.max(ct.where(m, keys + 1, 0), axis=1, keepdims=True))
    if MASK == FLOAT_MASK:
        first = ct.where(last == 0, 0, first)
        last = ct.where(last == 0, kv_len, last)
    inside = rows < q_len
    ct.store(spans, (0, pair, tile), ct.min(ct.where(inside, first, NEVER)))
    ct.store(spans, (1, pair, tile), ct.max(ct.where(inside, last, 0)))


def attention_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    scaling: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax-weighted sums of values: [batch, q_len, heads, value_dim], contiguous, in the query's dtype.

    query: [batch, heads, q_len, head_dim], key: [batch, kv_heads, kv_len, head_dim], value: [batch, kv_heads, kv_len,
    value_dim], any strides; float32, bfloat16 or float16; heads a multiple of kv_heads, channels up to 256. mask: bool
    (True: seen) or float (added to the scores), [1 or batch, 1 or heads, q_len, kv_len]. sinks: [heads], a logit that
    joins each head's softmax. `causal`: the last query sees all keys, each one before it one less; `window`: with
    `causal`, only that many of them. `softcap` limits scores before the mask. A query that sees nothing gives zeros.
    No gradients.
    """
    if eager(query, key, value, mask, sinks):
        return _run(query, key, value, mask, sinks, scaling, causal, window, softcap)
    return _op(query, key, value, mask, sinks, scaling, causal, window, softcap)


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    out = tiles.result(query, value)
    if out.numel():
        tiles.check(query, key, value, mask)
        _launch(query, key, value, mask, sinks, out, _setting(scaling, causal, window, softcap), None)
    return out


@dataclass(frozen=True, slots=True)
class Setting:
    """What an attention computes, besides its tensors."""

    scaling: float
    causal: bool
    window: int | None
    softcap: float | None


_setting = functools.lru_cache(maxsize=256)(Setting)


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    setting: Setting,
    config: Prefill | None,
) -> None:
    if tiles.far(query, key, value, mask, out):
        for q, k, v, m, s, _, part in tiles.halves(query, key, value, mask, sinks, None, out):
            _launch(q, k, v, m, s, part, setting, config)
        return
    shape = query.shape
    main, look = _plan(
        shape, key.shape[1], key.shape[2], value.shape[3], query.dtype, query.get_device(),
        None if mask is None else mask.dtype, None if mask is None else mask.shape[:2], sinks is not None, setting,
        config,
    )  # fmt: skip
    spans = query
    if mask is not None and look is not None:
        spans = torch.empty((2, look.grid[1], look.grid[0]), dtype=torch.int32, device=query.device)
        fire(look, (mask, spans))
    fire(main, (query, key, value, query if mask is None else mask, spans, query if sinks is None else sinks, out))


def choose(heads: int, q_len: int, width: int, dtype: torch.dtype, device: int) -> Prefill:
    """The free choices for query heads of all batches, queries and channels."""
    first = default(width, dtype)
    return (
        first
        if dtype is torch.float32
        else chosen(first, "attention_prefill", shape_class(heads, q_len, width), device)
    )


def default(width: int, dtype: torch.dtype) -> Prefill:
    """The choices where nothing is tuned."""
    if dtype is torch.float32:
        return Prefill(queries=64, keys=32, worker_warps=8, occupancy=None, split=False)
    if width > 128:
        return Prefill(queries=128, keys=64, worker_warps=8, occupancy=1)
    return Prefill()


def shape_class(heads: int, q_len: int, width: int) -> str:
    """`128 h32 q2048`: channels, about how many query heads and queries."""
    return f"{width} h{about(heads)} q{about(q_len)}"


def space(width: int) -> list[Prefill]:
    """Configurations worth trying, the default first."""
    found = [default(width, torch.bfloat16), Prefill(), Prefill(128, 128, 8, 1), Prefill(64, 64, None, 2)]
    found += [Prefill(128, 64, 8, 1), Prefill(64, 64, None, 1), Prefill(64, 64, None, 3)]
    if width != power_of_two(width):
        found += [replace(config, split=False) for config in found[:3]]
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...],
    kv_heads: int,
    kv_len: int,
    value_dim: int,
    dtype: torch.dtype,
    device: int,
    masked: torch.dtype | None,
    pairs: tuple[int, ...] | None,
    sinks: bool,
    setting: Setting,
    config: Prefill | None,
) -> tuple[Plan, Plan | None]:
    batch, heads, q_len, head_dim = shape
    group = tiles.group(heads, kv_heads, setting.scaling)
    if setting.window is not None and not setting.causal:
        raise ValueError("a window without `causal` is not served")
    tuning = config or choose(batch * heads, q_len, max(head_dim, value_dim), dtype, device)
    queries = min(tuning.queries, max(GRAIN, power_of_two(q_len)))
    count = -(-q_len // queries)
    kind = NO_MASK if masked is None else BOOL_MASK if masked is torch.bool else FLOAT_MASK
    scale, cap = tiles.factors(setting.scaling, setting.softcap)
    constants = (
        setting.causal,
        setting.window is not None,
        kind,
        setting.softcap is not None,
        sinks,
        dtype is not torch.float32,
        *tiles.pieces(head_dim, tuning.split),
        *tiles.pieces(value_dim, tuning.split),
        queries,
        tuning.keys,
        max(1, queries // GRAIN),
        tuning.key_latency,
        tuning.value_latency,
    )
    section = sharing(batch * heads, group, kv_len * (head_dim + value_dim) * dtype.itemsize)
    kernel = hinted(attention_prefill_kernel, tuning.occupancy, tuning.worker_warps)
    main = Plan(kernel, (section, count, batch * heads // section), (scale, cap, setting.window or 0, *constants))
    if masked is None:
        return main, None
    hidden = 0.0 if kind == BOOL_MASK else torch.finfo(masked).min * HIDDEN
    assert pairs is not None
    grid = (count * queries // GRAIN, pairs[0] * pairs[1])
    return main, Plan(mask_spans_kernel, grid, (hidden, kind, GRAIN, CHUNK))


def sharing(pairs: int, groups: int, size: int) -> int:
    """How many heads of all batches run side by side: a divisor of `pairs`, whose keys and values fit in the cache."""
    most = max(1, TOGETHER // size) * groups
    return max(n for n in range(1, pairs + 1) if pairs % n == 0 and (n <= most or n == 1))


@torch.library.custom_op("kernelgraft::attention_prefill", mutates_args=())
def _op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return _run(query, key, value, mask, sinks, scaling, causal, window, softcap)


@_op.register_fake
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return tiles.result(query, value)


def examples() -> list[Example]:
    """Prompts of a few models; masks, windows, limits and sinks; a float32 one; a chunk of a longer prompt."""

    def of(
        batch: int,
        lengths: tuple[int, int],
        heads: tuple[int, int],
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        mask: torch.dtype | None = None,
        sinks: bool = False,
        **options: Any,
    ) -> Callable[[str], Any]:
        def run(device: str) -> Any:
            given = tiles.example(device, batch, lengths, heads, width, dtype)
            seen = None if mask is None else tiles.left_padded(device, batch, *lengths).to(mask)
            column = torch.randn(heads[0], device=device) if sinks else None
            return attention_prefill(*given, seen, column, scaling=width**-0.5, **options)

        return run

    causal: dict[str, Any] = {"causal": True}
    return [
        Example("4096, 32 + 8 heads of 128", of(1, (4096, 4096), (32, 8), 128, **causal)),
        Example("2048, 32 + 8 heads of 64", of(1, (2048, 2048), (32, 8), 64, **causal)),
        Example("2048, 16 + 8 heads of 128", of(1, (2048, 2048), (16, 8), 128, **causal)),
        Example("1024, 32 + 32 heads of 96", of(1, (1024, 1024), (32, 32), 96, **causal)),
        Example("2048, 8 + 4 heads of 256, window 1024", of(1, (2048, 2048), (8, 4), 256, window=1024, **causal)),
        Example("100 after 200, 32 + 32 heads of 80", of(2, (100, 300), (32, 32), 80, **causal), tune=False),
        Example("padded, 32 + 8 heads of 128", of(2, (256, 256), (32, 8), 128, mask=torch.bool), tune=False),
        Example("float mask", of(2, (256, 256), (32, 8), 128, mask=torch.bfloat16), tune=False),
        Example("limited", of(1, (256, 256), (8, 4), 256, softcap=50.0, **causal), tune=False),
        Example("sinks, window 128", of(1, (256, 256), (64, 8), 64, sinks=True, window=128, **causal), tune=False),
        Example("full, float16", of(1, (197, 197), (12, 12), 64, dtype=torch.float16), tune=False),
        Example("float32", of(1, (128, 128), (32, 8), 64, dtype=torch.float32, **causal), tune=False),
    ]
