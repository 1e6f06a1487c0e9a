"""Attention of few queries over many keys: one that streams keys and values once, at the memory's speed.

A block takes all query heads of one key head and every n-th tile of keys; keys are the rows of the tensor cores'
products and queries their columns, of which eight cost what one does. Where one block a key head would leave most of
the GPU idle, n blocks share it, and a second launch puts their parts together.
"""

# ruff: noqa: SIM108
# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import (
    Maker,
    Plan,
    contiguous,
    current,
    eager,
    fire,
    hinted,
    makers,
    power_of_two,
    processors,
)
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels import attention_tiles as tiles
from kernelgraft.kernels.attention_tiles import BOOL_MASK, FLOAT_MASK, LOWEST, NO_MASK, ZERO, about
from kernelgraft.kernels.examples import Example

MOST_ROWS = 64
"""Query heads of a key head times queries, both rounded up to powers of two."""
TAIL = 16
"""Numbers behind a partial result: the largest exponent eight times, the sum of the weights eight times."""
AT_ONCE = 32
"""Partial results that are put together in one step."""
LATENCY_US, JOIN_US = 2.4, 2.0
"""What a tile of keys costs a block that has the GPU to itself, besides its bytes, and what the second launch costs."""
BLOCK_BYTES_PER_US, BYTES_PER_US = 1.1e5, 4.3e6
"""What one block and all blocks read. The four numbers are an H200's; only `splits` depends on them."""


@dataclass(frozen=True, slots=True)
class Decode:
    """What can be chosen freely for a launch; the result is the same."""

    keys: int = 128
    occupancy: int | None = 4
    worker_warps: int | None = None
    latency: int = 4
    tma: bool = True
    blocks: int = 4
    """Blocks for each multiprocessor that run at the same time, as `splits` counts."""
    splits: int | None = None
    """Blocks that share a key head; None: by the number of key heads and the length."""


@ct.kernel
def attention_decode_kernel(
    q,
    k,
    v,
    mask,
    sinks,
    lengths,
    out,
    scale,
    cap,
    window,
    CAUSAL: ct.Constant[bool],
    WINDOWED: ct.Constant[bool],
    MASK: ct.Constant[int],
    MASK_HEADS: ct.Constant[bool],
    CAPPED: ct.Constant[bool],
    SINKS: ct.Constant[bool],
    LENGTHS: ct.Constant[bool],
    FAST: ct.Constant[bool],
    DIRECT: ct.Constant[bool],
    GROUP: ct.Constant[int],
    HEADS: ct.Constant[int],
    QUERIES: ct.Constant[int],
    D: ct.Constant[int],
    DV: ct.Constant[int],
    TN: ct.Constant[int],
    LATENCY: ct.Constant[int],
    TMA: ct.Constant[bool],
):
    """q, k, v: [batch, heads, length, channels]; mask: [1 or batch, 1 or heads, q_len, kv_len]; sinks: [heads];
    lengths: [batch]; out: [batch, q_len, heads, value_dim] if DIRECT, else [batch, kv_heads, n, rows, DV + TAIL].

    GROUP query heads share a key head; a tile holds HEADS of them times QUERIES queries. Grid: n, kv_heads, batch.
    """
    split, group, b = ct.bid(0), ct.bid(1), ct.bid(2)
    ROWS = HEADS * QUERIES
    q_len = q.shape[2]
    kv_len = k.shape[2]
    if LENGTHS:
        kv_len = min(ct.astype(ct.load(lengths, (b,), ()), ct.int32).item(), kv_len)
    own = q.slice(1, group * GROUP, (group + 1) * GROUP)
    x = ct.load(own, (b, 0, 0, 0), (1, HEADS, QUERIES, D), padding_mode=ZERO, allow_tma=False)
    x = ct.transpose(ct.reshape(x, (ROWS, D)))
    row = ct.reshape(ct.arange(ROWS, dtype=ct.int32), (1, ROWS))
    head, query = group * GROUP + row // QUERIES, row % QUERIES
    last = query + (kv_len - q_len)
    columns = ct.reshape(ct.arange(TN, dtype=ct.int32), (TN, 1))
    begin = 0
    if WINDOWED:
        begin = max(kv_len - q_len - window + 1, 0) // TN
    top = ct.full((1, ROWS), LOWEST, dtype=ct.float32)
    total = ct.zeros((1, ROWS), dtype=ct.float32)
    acc = ct.zeros((DV, ROWS), dtype=ct.float32)
    for j in range(begin + split, ct.cdiv(kv_len, TN), ct.num_blocks(0)):
        kt = ct.load(k, (b, group, j, 0), (1, 1, TN, D), padding_mode=ZERO, latency=LATENCY, allow_tma=TMA)
        s = tiles.product(ct.reshape(kt, (TN, D)), x, ct.zeros((TN, ROWS), dtype=ct.float32), FAST)
        s = tiles.scaled(s, scale, cap, CAPPED, FAST)
        keys = columns + j * TN
        if MASK != NO_MASK:
            mask_b = min(b, mask.shape[0] - 1)
            if MASK_HEADS:
                m = ct.gather(mask, (mask_b, head, query, keys), padding_value=0)
            elif QUERIES > 1:
                m = ct.gather(mask, (mask_b, 0, query, keys), padding_value=0)
            else:
                m = ct.gather(mask, (mask_b, 0, 0, keys), padding_value=0)
            if MASK == FLOAT_MASK:
                s = tiles.added(s, m, scale, CAPPED)
            else:
                s = ct.where(m, s, -math.inf)
        if CAUSAL:
            seen = keys <= last
        else:
            seen = keys < kv_len
        if WINDOWED:
            seen = seen & (keys > last - window)
        s = ct.where(seen, s, -math.inf)
        p, top, total, factor = tiles.weigh(s, top, total, scale, 0, CAPPED or MASK == FLOAT_MASK)
        vt = ct.load(v, (b, group, j, 0), (1, 1, TN, DV), padding_mode=ZERO, latency=LATENCY, allow_tma=TMA)
        vt = ct.transpose(ct.reshape(vt, (TN, DV)))
        acc = tiles.product(vt, ct.astype(p, v.dtype), acc * factor, FAST)
    if DIRECT:
        sink = 0.0
        if SINKS:
            sink = ct.astype(ct.gather(sinks, head, padding_value=0), ct.float32)
        y = ct.astype(acc * tiles.share(top, total, sink, SINKS), out.dtype)
        y = ct.reshape(ct.transpose(y), (1, HEADS, QUERIES, DV))
        part = out.slice(2, group * GROUP, (group + 1) * GROUP)
        ct.store(part, (b, 0, 0, 0), y, order=(0, 2, 1, 3), allow_tma=False)
    else:
        ct.store(out, (b, group, split, 0, 0), ct.reshape(ct.transpose(acc), (1, 1, 1, ROWS, DV)), allow_tma=False)
        first = ct.reshape(ct.arange(TAIL, dtype=ct.int32), (1, TAIL)) < TAIL // 2
        tail = ct.where(first, ct.reshape(top, (ROWS, 1)), ct.reshape(total, (ROWS, 1)))
        ct.store(out, (b, group, split, 0, DV // TAIL), ct.reshape(tail, (1, 1, 1, ROWS, TAIL)), allow_tma=False)


@ct.kernel
def attention_join_kernel(
    parts,
    sinks,
    out,
    SINKS: ct.Constant[bool],
    GROUP: ct.Constant[int],
    QUERIES: ct.Constant[int],
    DV: ct.Constant[int],
    ALL: ct.Constant[int],
    STEP: ct.Constant[int],
    PIECE: ct.Constant[int],
):
    """parts: [batch, kv_heads, n, rows, DV + TAIL]; out: [batch, q_len, heads, value_dim]. ALL: n rounded up.

    Grid: query heads of a key head times queries, kv_heads, batch.
    """
    index, group, b = ct.bid(0), ct.bid(1), ct.bid(2)
    q_len = out.shape[1]
    row = (index // q_len) * QUERIES + index % q_len
    head = group * GROUP + index // q_len
    every = ct.arange(ALL, dtype=ct.int32)
    tops = ct.gather(parts, (b, group, every, row, DV), padding_value=LOWEST)
    totals = ct.gather(parts, (b, group, every, row, DV + TAIL // 2), padding_value=0.0)
    top = ct.max(tops)
    total = ct.sum(totals * ct.exp2(tops - top))
    sink = 0.0
    if SINKS:
        sink = ct.astype(ct.load(sinks, (head,), ()), ct.float32)
    factor = tiles.share(top, total, sink, SINKS)
    some = ct.arange(STEP, dtype=ct.int32)
    for piece in ct.static_iter(range(DV // PIECE)):
        acc = ct.zeros((STEP, PIECE), dtype=ct.float32)
        for i in range(ct.cdiv(parts.shape[2], STEP)):
            weights = ct.exp2(
                ct.gather(parts, (b, group, some + i * STEP, row, DV), padding_value=LOWEST) - top
            )  # fmt: skip
            part = ct.load(parts, (b, group, i, row, piece), (1, 1, STEP, 1, PIECE), padding_mode=ZERO, allow_tma=False)
            acc = acc + ct.reshape(part, (STEP, PIECE)) * ct.reshape(weights, (STEP, 1))
        y = ct.reshape(ct.sum(acc, axis=0) * factor, (1, 1, 1, PIECE))
        ct.store(out, (b, index % q_len, head, piece), ct.astype(y, out.dtype), allow_tma=False)


def attention_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    scaling: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax-weighted sums of values for few queries: [batch, q_len, heads, value_dim], in the query's dtype.

    As `attention_prefill`, with at most `most_queries(heads // kv_heads)` queries; others go there. lengths: [batch]
    int32 or int64, how many keys of each row count, the last of them being the last query's; what lies beyond must be
    finite. No gradients.
    """
    if eager(query, key, value, mask, sinks, lengths):
        return _run(query, key, value, mask, sinks, lengths, scaling, causal, window, softcap)
    return _op(query, key, value, mask, sinks, lengths, scaling, causal, window, softcap)


def most_queries(group: int) -> int:
    """How many queries are served where that many query heads share a key head."""
    return max(1, MOST_ROWS // power_of_two(group))


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: torch.Tensor | None,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    config: Decode | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attention_decode`, into `out` if it is given."""
    batch, heads, length, width = query.shape
    key_batch, kv_heads, kv_len, key_width = key.shape
    value_dim = value.shape[3]
    if not batch * length * heads * value_dim:
        return query.new_empty(batch, length, heads, value_dim)
    if (
        key.shape != value.shape
        or key_batch != batch
        or key_width != width
        or (mask is not None and mask.shape[3] != kv_len)
    ):
        tiles.check(query, key, value, mask)
    if tiles.far(query, key, value, mask):
        out = query.new_empty(batch, length, heads, value_dim) if out is None else out
        for q, k, v, m, s, n, part in tiles.halves(query, key, value, mask, sinks, lengths, out):
            _run(q, k, v, m, s, n, scaling, causal, window, softcap, config, part)
        return out
    size, device = kv_len - 1, query.get_device()
    bits = size.bit_length() - 3
    main, join, shape, makes = _plan(
        query.shape, kv_heads, ((size >> bits) + 1) << bits if bits > 0 else 8, value_dim, query.dtype, device,
        None if mask is None else mask.dtype, mask is not None and mask.shape[1] > 1, sinks is not None,
        lengths is not None, scaling, causal, window, softcap, config,
    )  # fmt: skip
    if device < 0 or device != current():
        makes = None
    if out is None:
        # Torch takes sizes one by one faster than as a tuple.
        out = query.new_empty(batch, length, heads, value_dim) if makes is None else makes[0]()
    # Arguments that the kernel leaves alone have to be some tensor.
    mask, sinks = query if mask is None else mask, query if sinks is None else sinks
    lengths = query if lengths is None else lengths
    if join is None:
        fire(main, (query, key, value, mask, sinks, lengths, out))
    else:
        parts = query.new_empty(*shape, dtype=torch.float32) if makes is None else makes[1]()
        fire(main, (query, key, value, mask, sinks, lengths, parts))
        fire(join, (parts, sinks, out))
    return out


def choose(heads: int, rows: int, width: int, length: int, dtype: torch.dtype, device: int) -> Decode:
    """The free choices for key heads of all batches, rows of a tile, channels (rounded up) and keys."""
    first = default(rows, width, dtype)
    return (
        first
        if dtype is torch.float32
        else chosen(first, "attention_decode", shape_class(heads, rows, width, length), device)
    )


def default(rows: int, width: int, dtype: torch.dtype) -> Decode:
    """The choices where nothing is tuned."""
    if dtype is torch.float32:
        return Decode(keys=64, occupancy=1, blocks=1)
    if rows > 16:
        return Decode(keys=64, occupancy=2, blocks=2)
    return Decode(keys=128 if width <= 128 else 64)


def shape_class(heads: int, rows: int, width: int, length: int) -> str:
    """`8x128 h64 k4096`: rows of a tile, channels, about how many key heads and keys."""
    return f"{rows}x{width} h{about(heads)} k{about(length)}"


def space(heads: int, rows: int, width: int, length: int) -> list[Decode]:
    """Configurations worth trying, the default first."""
    first = default(rows, width, torch.bfloat16)
    found = [first, Decode(128, 2, blocks=2), Decode(64, 4), Decode(64, 2, blocks=2)]
    most = max(1, min(length // 64, 8 * 132 // heads))
    found += [dataclasses.replace(first, splits=n) for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]
    # Half as many blocks have memory for several tiles at a time; one block a key head saves the second launch.
    found += [Decode(128, 2, blocks=2, splits=n) for n in (1, 2) if n <= most and (heads >= 64 or length <= 1024)]
    if heads >= 128:
        found += [Decode(128, 1, latency=6, blocks=1, splits=1), Decode(256, 1, blocks=1, splits=1)]
    if length <= 1024:  # all of it at once, in smaller tiles
        found += [Decode(64, 4, splits=-(-length // 64)), Decode(32, 2, splits=-(-length // 32))]
        found += [Decode(64, 4, splits=max(1, length // 128)), Decode(64, 4, tma=False, splits=-(-length // 64))]
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...],
    kv_heads: int,
    longest: int,
    value_dim: int,
    dtype: torch.dtype,
    device: int,
    masked: torch.dtype | None,
    mask_heads: bool,
    sinks: bool,
    lengths: bool,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    config: Decode | None,
) -> tuple[Plan, Plan | None, tuple[int, ...], tuple[Maker, ...] | None]:
    """The launch, the one that joins its parts, their shape, and what makes result and parts.

    For numbers of keys up to one of four an octave.
    """
    batch, heads, q_len, head_dim = shape
    group = tiles.group(heads, kv_heads, scaling)
    if q_len > most_queries(group):
        raise ValueError(
            f"{q_len} queries of {group} heads are more than attention_decode takes; use attention_prefill"
        )
    if window is not None and not causal:
        raise ValueError("a window without `causal` is not served")
    d, dv = max(16, power_of_two(head_dim)), max(16, power_of_two(value_dim))
    queries = power_of_two(q_len)
    together = max(power_of_two(group), 8 // queries)
    seen = longest if window is None else min(longest, window + q_len)
    tuning = config or choose(batch * kv_heads, together * queries, max(d, dv), seen, dtype, device)
    size = tuning.keys * (head_dim + value_dim) * dtype.itemsize
    blocks = tuning.blocks * processors(device)
    parts = tuning.splits or splits(batch * kv_heads, -(-seen // tuning.keys), size, blocks)
    kind = NO_MASK if masked is None else BOOL_MASK if masked is torch.bool else FLOAT_MASK
    scale, cap = tiles.factors(scaling, softcap)
    constants = (
        causal,
        window is not None,
        kind,
        mask_heads,
        softcap is not None,
        sinks,
        lengths,
        dtype is not torch.float32,
        parts == 1,
        group,
        together,
        queries,
        d,
        dv,
        tuning.keys,
        tuning.latency,
        tuning.tma,
    )
    kernel = hinted(attention_decode_kernel, tuning.occupancy, tuning.worker_warps)
    main = Plan(kernel, (parts, kv_heads, batch), (scale, cap, window or 0, *constants))
    result = ((batch, q_len, heads, value_dim), contiguous((batch, q_len, heads, value_dim)), dtype)
    if parts == 1:
        return main, None, (), makers(device, result)
    every = power_of_two(parts)
    settings = (sinks, group, queries, dv, every, min(every, AT_ONCE), min(dv, 128))
    join = Plan(attention_join_kernel, (group * q_len, kv_heads, batch), settings)
    partial = (batch, kv_heads, parts, together * queries, dv + TAIL)
    return main, join, partial, makers(device, result, (partial, contiguous(partial), torch.float32))


def splits(heads: int, length: int, size: int, blocks: int) -> int:
    """How many blocks should share a key head: `length` tiles of `size` bytes each, that many `blocks` run at a time.

    With few blocks a tile takes as long as memory takes to answer, with many as long as all blocks' bytes do.
    """
    alone = LATENCY_US + size / BLOCK_BYTES_PER_US

    def cost(parts: int) -> float:
        tile = math.hypot(alone, min(heads * parts, blocks) * size / BYTES_PER_US)
        rounds = -(-heads * parts // blocks)
        return rounds * -(-length // parts) * tile + (JOIN_US if parts > 1 else 0.0)

    return min(range(1, max(1, min(length, 2 * blocks // heads)) + 1), key=cost)


@torch.library.custom_op("kernelgraft::attention_decode", mutates_args=())
def _op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: torch.Tensor | None,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return _run(query, key, value, mask, sinks, lengths, scaling, causal, window, softcap)


@_op.register_fake
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lengths: torch.Tensor | None,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return tiles.result(query, value)


def examples() -> list[Example]:
    """Single queries of a few models over short and long caches; a cache of fixed size; eight queries; float32."""

    def of(
        batch: int,
        lengths: tuple[int, int],
        heads: tuple[int, int],
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        mask: torch.dtype | None = None,
        lengths_given: bool = False,
        sinks: bool = False,
        **options: Any,
    ) -> Callable[[str], Any]:
        def run(device: str) -> Any:
            given = tiles.example(device, batch, lengths, heads, width, dtype)
            seen = None if mask is None else tiles.left_padded(device, batch, *lengths).to(mask)
            used = torch.full((batch,), lengths[1] // 2, dtype=torch.int32, device=device) if lengths_given else None
            column = torch.randn(heads[0], device=device) if sinks else None
            options.setdefault("causal", mask is None)
            return attention_decode(*given, seen, column, used, scaling=width**-0.5, **options)

        return run

    return [
        Example("4096 keys, 32 + 8 heads of 128", of(1, (1, 4096), (32, 8), 128)),
        Example("batch 8, 4096 keys, 32 + 8 heads of 128", of(8, (1, 4096), (32, 8), 128)),
        Example("batch 32, 512 keys, 32 + 8 heads of 64", of(32, (1, 512), (32, 8), 64)),
        Example("4096 keys, 16 + 8 heads of 128", of(1, (1, 4096), (16, 8), 128)),
        Example("4096 keys, 32 + 32 heads of 96", of(1, (1, 4096), (32, 32), 96)),
        Example("4096 keys, 4 + 1 heads of 256, window 512", of(1, (1, 4096), (4, 1), 256, window=512)),
        Example("half of 4096 keys", of(4, (1, 4096), (32, 8), 128, lengths_given=True), tune=False),
        Example("a number of keys that is odd, heads of 80", of(2, (1, 333), (32, 32), 80), tune=False),
        Example("padded", of(4, (1, 1024), (32, 8), 128, mask=torch.bool), tune=False),
        Example("float mask", of(4, (1, 1024), (32, 8), 128, mask=torch.bfloat16), tune=False),
        Example("limited", of(1, (1, 1024), (8, 4), 256, softcap=50.0), tune=False),
        Example("sinks", of(1, (1, 1024), (64, 8), 64, sinks=True), tune=False),
        Example("eight queries", of(1, (8, 1024), (32, 8), 128), tune=False),
        Example("float32", of(1, (1, 256), (32, 8), 64, dtype=torch.float32), tune=False),
    ]
