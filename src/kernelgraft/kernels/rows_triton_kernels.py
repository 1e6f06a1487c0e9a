"""The kernels of `rows_triton` and `rope_triton`; importing this needs Triton."""

# mypy: ignore-errors
# ruff: noqa: SIM108, SIM109
# Kernels are no Python: their branches are chosen by constants and their parameters are what a launch passes.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TO_INPUT = tl.constexpr(1)
TO_WEIGHT = tl.constexpr(2)
FACTOR = tl.constexpr(3)
"""Numbers of `kernelgraft.kernels.rows`."""


@triton.jit
def begin(EARLY: tl.constexpr):
    """With EARLY the launch did not wait for the kernel before: nothing is read or written until that has ended.

    Only then may the next kernel start, so that it finds everything before this one done, too.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def take(x, at, live):
    """Elements of x; zero where they are not `live`."""
    if live is None:
        return tl.load(x + at)
    else:
        return tl.load(x + at, mask=live, other=0.0)


@triton.jit
def put(x, at, value, live):
    """Store values into x where they are `live`."""
    if live is None:
        tl.store(x + at, value.to(x.dtype.element_ty))
    else:
        tl.store(x + at, value.to(x.dtype.element_ty), mask=live)


@triton.jit
def together(x, other, PACK: tl.constexpr):
    """x, but only once `other` has arrived: the assembler would ask for a weight no sooner than after the sums.

    It does not know that the second coordinate of every block is zero where the grid has one axis. PACK: values in 32
    bits.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %ctaid.y; and.b32 t, t, $2; or.b32 $0, $1, t; }",
        "=r,r,r",
        [x, other],
        dtype=x.dtype,
        is_pure=True,
        pack=PACK,
    )


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Float32 values as a dtype would hold them."""
    return value.to(DTYPE).to(tl.float32)


@triton.jit
def start(row, inner, outer, step, WIDTH: tl.constexpr):
    """Where rows begin: evenly `step` apart (None: WIDTH), or in groups of `inner` that are `outer` apart."""
    if inner is not None:
        return (row // inner).to(tl.int64) * outer + (row % inner).to(tl.int64) * step
    elif step is None:
        return row.to(tl.int64) * WIDTH
    else:
        return row.to(tl.int64) * step


@triton.jit
def norm_kernel(
    residual, x, weight, bias, total, y, count, inner, residual_step, x_step, y_step, residual_outer, x_outer, y_outer,
    WIDTH: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr, ROUND_OFFSET: tl.constexpr,
    ROUND: tl.constexpr, ROUND_SCALED: tl.constexpr, DIVIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PACK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows: an RMS norm, or CENTRED a layer norm; tensors that are None are left out.

    With a residual the norm is that of the sum, which is stored as `total`. `count`: rows in all, None if every program
    has ROWS of them; for the steps see `start`; with PACK (else 0) the sums wait for the weight, see `together`.
    """
    SEVERAL: tl.constexpr = ROWS > 1
    AXIS: tl.constexpr = 1 if ROWS > 1 else 0
    INVERSE: tl.constexpr = 1.0 / WIDTH
    at = tl.arange(0, TILE)
    row = tl.program_id(0)
    if SEVERAL:
        # Each row reads the weight where its channels will lie in registers; one that were spread would come by way of
        # shared memory.
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
        at = at[None, :] + row * 0
    inside = None
    if WIDTH < TILE:
        inside = at < WIDTH
    live = inside
    if count is not None:
        if inside is None:
            live = row < count
        else:
            live = inside & (row < count)
    begin(EARLY)
    value = take(x, start(row, inner, x_outer, x_step, WIDTH) + at, live)
    if residual is not None:
        other = take(residual, start(row, inner, residual_outer, residual_step, WIDTH) + at, live)
    # Asked for before the sums, so that they arrive with the rows.
    if weight is not None:
        scale = take(weight, at, inside)
    if bias is not None:
        shift = take(bias, at, inside)
    if PACK > 0:
        if weight is not None:
            value = together(value, scale, PACK)
        if bias is not None:
            value = together(value, shift, PACK)
    to = start(row, inner, y_outer, y_step, WIDTH) + at
    if residual is not None:
        value = (other.to(tl.float32) + value.to(tl.float32)).to(total.dtype.element_ty)
        put(total, to, value, live)
    KIND: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    if CENTRED:
        # Shares of the mean and not values: the sum of a row may be no float32 where its mean is one.
        value -= tl.sum(value * INVERSE, AXIS, keep_dims=SEVERAL)
        if inside is not None:
            value = tl.where(inside, value, 0.0)
    variance = tl.sum(value * value, AXIS, keep_dims=SEVERAL) * INVERSE + EPS
    if DIVIDE:
        factor = tl.sqrt(variance)
    else:
        factor = tl.rsqrt(variance)
    if ROUND == FACTOR:
        factor = rounded(factor, KIND)
    if DIVIDE:
        value = value / factor
    else:
        value = value * factor
    if ROUND == TO_INPUT or ROUND == FACTOR:
        value = rounded(value, KIND)
    if ROUND == TO_WEIGHT:
        value = rounded(value, weight.dtype.element_ty)
    if weight is not None:
        by = scale.to(tl.float32)
        if OFFSET:
            by += 1.0
            if ROUND_OFFSET:
                by = rounded(by, weight.dtype.element_ty)
        value *= by
        if ROUND_SCALED:
            value = rounded(value, y.dtype.element_ty)
    if bias is not None:
        value += shift.to(tl.float32)
    put(y, to, value, live)


@triton.jit
def turned(
    x, y, cos_a, cos_b, sin_a, sin_b, b, row, head, pair, inside, x_batch, x_row, x_head, length,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, START: tl.constexpr, REST_START: tl.constexpr,
    REST: tl.constexpr, REST_TILE: tl.constexpr, BACKWARD: tl.constexpr, ROUND: tl.constexpr, ROW_AXIS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The heads [HEADS, 1] of q or of k, of which there are COUNT, at one row."""
    live = inside
    if COUNT % HEADS != 0:
        if inside is None:
            live = head < COUNT
        else:
            live = (head < COUNT) & inside
    x += b * x_batch + row * x_row
    if ROW_AXIS == 2:
        y += (b * COUNT * length + row) * WIDTH
        to = head * length * WIDTH
    else:
        y += (b * length + row) * COUNT * WIDTH
        to = head * WIDTH
    at = head * x_head
    first = take(x + START, at + pair, live)
    second = take(x + (START + PAIRS), at + pair, live)
    if not ROUND:
        first, second = first.to(tl.float32), second.to(tl.float32)
    if BACKWARD:
        a = first * cos_a + second * sin_a
        c = second * cos_b - first * sin_b
    else:
        a = first * cos_a - second * sin_a
        c = second * cos_b + first * sin_b
    put(y + START, to + pair, a, live)
    put(y + (START + PAIRS), to + pair, c, live)
    if REST > 0:
        place = tl.arange(0, REST_TILE)[None, :]
        there = (head < COUNT) & (place < REST)
        put(y + REST_START, to + place, tl.load(x + REST_START + at + place, mask=there, other=0.0), there)


@triton.jit
def rope_kernel(
    q, k, cos, sin, q_out, k_out, q_batch, q_row, q_head, k_batch, k_row, k_head, table_batch, table_row, length,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
    START: tl.constexpr, REST_START: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr, FULL: tl.constexpr,
    BACKWARD: tl.constexpr, ROUND: tl.constexpr, ROW_AXIS: tl.constexpr, HEADS: tl.constexpr, SWAP: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some heads of q, or some of k (K_HEADS is 0 without one), at one row; q_out and k_out are contiguous.

    PAIRS turn, from channel START on; REST channels from REST_START on are copied. FULL: the tables have a value for
    each channel of a pair. With SWAP the grid's first axis is the batch and its last the rows, else the other way; with
    WIDE places are counted in 64 bits.
    """
    group = tl.program_id(1)
    row, b = tl.program_id(0), tl.program_id(2)
    if SWAP:
        row, b = b, row
    if WIDE:
        row, b = row.to(tl.int64), b.to(tl.int64)
    GROUPS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    pair = tl.arange(0, TILE)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    inside = None
    if PAIRS < TILE:
        inside = (pair < PAIRS) & (head >= 0)
    # Each head reads the tables where its channels will lie in registers; one that were spread would come by way of
    # shared memory.
    at = b * table_batch + row * table_row + pair + head * 0
    begin(EARLY)
    cos_a = take(cos, at, inside)
    sin_a = take(sin, at, inside)
    if FULL:
        cos_b = take(cos, at + PAIRS, inside)
        sin_b = take(sin, at + PAIRS, inside)
    else:
        cos_b, sin_b = cos_a, sin_a
    if not ROUND:
        cos_a, cos_b = cos_a.to(tl.float32), cos_b.to(tl.float32)
        sin_a, sin_b = sin_a.to(tl.float32), sin_b.to(tl.float32)
    if group < GROUPS:
        head += group * HEADS
        turned(
            q, q_out, cos_a, cos_b, sin_a, sin_b, b, row, head, pair, inside, q_batch, q_row, q_head,
            length, Q_HEADS, WIDTH, PAIRS, START, REST_START, REST, REST_TILE, BACKWARD, ROUND, ROW_AXIS, HEADS,
        )  # fmt: skip
    elif K_HEADS > 0:
        head += (group - GROUPS) * HEADS
        turned(
            k, k_out, cos_a, cos_b, sin_a, sin_b, b, row, head, pair, inside, k_batch, k_row, k_head,
            length, K_HEADS, WIDTH, PAIRS, START, REST_START, REST, REST_TILE, BACKWARD, ROUND, ROW_AXIS, HEADS,
        )  # fmt: skip
