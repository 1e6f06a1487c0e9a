"""The kernels of `linear_decode_triton`; importing this needs Triton."""

# mypy: ignore-errors
# Kernels are no Python: their branches are chosen by constants and their parameters are what a launch passes.

from __future__ import annotations

import triton
import triton.language as tl

IDENTITY = tl.constexpr(0)
SILU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
QUICK_GELU = tl.constexpr(4)
RELU = tl.constexpr(5)
RELU2 = tl.constexpr(6)
SIGMOID = tl.constexpr(7)
ACTIVATIONS = ("identity", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")
"""By number."""

NO_NORM = tl.constexpr(0)
NORM_FIRST = tl.constexpr(1)
NORM_LAST = tl.constexpr(2)


@triton.jit
def activated(x, ACT: tl.constexpr):
    """The activation of float32 values."""
    if ACT == SILU:
        x = x / (1.0 + tl.exp(-x))
    elif ACT == GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.70710678118654752))
    elif ACT == GELU_TANH:
        z = 0.79788456080286536 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * z))
    elif ACT == QUICK_GELU:
        x = x / (1.0 + tl.exp(-1.702 * x))
    elif ACT == RELU:
        x = tl.maximum(x, 0.0)
    elif ACT == RELU2:
        x = tl.maximum(x, 0.0)
        x = x * x
    elif ACT == SIGMOID:
        x = 1.0 / (1.0 + tl.exp(-x))
    return x


@triton.jit
def row_kernel(
    x, weight, up, bias, residual, vector, y, outputs, width, step, up_step, eps,
    NORM: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One row of x, the second axis of the grid, times TILE rows of the weight: products are added lane by lane."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, DEPTH)
    inside = n < outputs
    first = weight + n.to(tl.int64)[:, None] * step
    second = up + n.to(tl.int64)[:, None] * up_step
    total = tl.zeros([TILE, DEPTH], dtype=tl.float32)
    other = tl.zeros([TILE, DEPTH], dtype=tl.float32)
    squares = tl.zeros([DEPTH], dtype=tl.float32)
    for begin in range(0, width, DEPTH):
        at = k + begin
        if EVEN:
            a = tl.load(first + at[None, :], eviction_policy="evict_first")
            b = tl.load(x + row * width + at).to(tl.float32)
        else:
            live = inside[:, None] & (at < width)[None, :]
            a = tl.load(first + at[None, :], mask=live, other=0.0, eviction_policy="evict_first")
            b = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        if NORM != NO_NORM:
            squares += b * b
            scale = tl.load(vector + at, mask=at < width, other=0.0).to(tl.float32)
            if OFFSET:
                scale += 1.0
            b = b * scale
        total += a.to(tl.float32) * b[None, :]
        if GATED:
            if EVEN:
                c = tl.load(second + at[None, :], eviction_policy="evict_first")
            else:
                c = tl.load(second + at[None, :], mask=live, other=0.0, eviction_policy="evict_first")
            other += c.to(tl.float32) * b[None, :]
    value = tl.sum(total, 1)
    factor = 1.0
    if NORM != NO_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        value = value * factor
    if BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        value = activated(value, ACT) * (tl.sum(other, 1) * factor)
    if RESIDUAL:
        value += tl.load(residual + row * outputs + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * outputs + n, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def unfolded(total, TILE: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum over equal places: [TILE * FOLD, COLUMNS] to [TILE, COLUMNS / FOLD]."""
    if FOLD > 1:
        piece = tl.arange(0, TILE * FOLD) % FOLD
        column = tl.arange(0, COLUMNS) % FOLD
        total = tl.where(piece[:, None] == column[None, :], total, 0.0)
        total = tl.sum(tl.reshape(total, [TILE * FOLD, COLUMNS // FOLD, FOLD]), 2)
        total = tl.sum(tl.reshape(total, [TILE, FOLD, COLUMNS // FOLD]), 1)
    return total


@triton.jit
def rows_kernel(
    x, weight, up, bias, residual, vector, y, count, outputs, step, up_step, eps, WIDTH: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr, FOLD: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All rows of x times TILE rows of the weight, each in FOLD pieces, on tensor cores; see `linear_decode`."""
    PIECE: tl.constexpr = WIDTH // FOLD
    ROWS: tl.constexpr = COLUMNS // FOLD
    r = tl.arange(0, TILE * FOLD)
    n = tl.program_id(0) * TILE + r // FOLD
    live = (n < outputs)[:, None]
    first = weight + n.to(tl.int64)[:, None] * step + ((r % FOLD) * PIECE)[:, None]
    second = up + n.to(tl.int64)[:, None] * up_step + ((r % FOLD) * PIECE)[:, None]
    c = tl.arange(0, COLUMNS)
    column = x + ((c // FOLD) * WIDTH + (c % FOLD) * PIECE)[None, :]
    scales = vector + ((c % FOLD) * PIECE)[None, :]
    there = (c // FOLD < count)[None, :]
    total = tl.zeros([TILE * FOLD, COLUMNS], dtype=tl.float32)
    other = tl.zeros([TILE * FOLD, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([DEPTH, COLUMNS], dtype=tl.float32)
    d = tl.arange(0, DEPTH)
    factor = tl.zeros([COLUMNS], dtype=tl.float32) + 1.0
    if NORM == NORM_FIRST:
        for begin in range(0, WIDTH, DEPTH):
            at = (begin + d)[:, None]
            b = tl.load(x + ((c // FOLD) * WIDTH)[None, :] + at, mask=there & (at < WIDTH), other=0.0).to(tl.float32)
            squares += b * b
        factor = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    for begin in tl.range(0, PIECE, DEPTH, num_stages=STAGES):
        at = begin + d
        if PIECE % DEPTH == 0:
            a = tl.load(first + at[None, :], mask=live, other=0.0, eviction_policy="evict_first")
            b = tl.load(column + at[:, None], mask=there, other=0.0)
        else:
            a = tl.load(
                first + at[None, :], mask=live & (at < PIECE)[None, :], other=0.0, eviction_policy="evict_first"
            )
            b = tl.load(column + at[:, None], mask=there & (at < PIECE)[:, None], other=0.0)
        if NORM != NO_NORM:
            wide = b.to(tl.float32)
            if NORM == NORM_LAST:
                squares += wide * wide
            else:
                wide = wide * factor[None, :]
                if ROUND:
                    wide = wide.to(b.dtype).to(tl.float32)
            scale = tl.load(scales + at[:, None], mask=(at < PIECE)[:, None], other=0.0).to(tl.float32)
            if OFFSET:
                scale += 1.0
            b = (wide * scale).to(b.dtype)
        total = tl.dot(a, b, total)
        if GATED:
            if PIECE % DEPTH == 0:
                a = tl.load(second + at[None, :], mask=live, other=0.0, eviction_policy="evict_first")
            else:
                a = tl.load(
                    second + at[None, :], mask=live & (at < PIECE)[None, :], other=0.0, eviction_policy="evict_first"
                )
            other = tl.dot(a, b, other)
    value = unfolded(total, TILE, FOLD, COLUMNS)
    last = tl.zeros([ROWS], dtype=tl.float32) + 1.0
    if NORM == NORM_LAST:
        sums = tl.sum(tl.reshape(tl.sum(squares, 0), [ROWS, FOLD]), 1)
        last = tl.rsqrt(sums / WIDTH + eps)
        value = value * last[None, :]
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m = tl.arange(0, ROWS)
    if BIAS:
        value += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if GATED:
        value = activated(value, ACT) * (unfolded(other, TILE, FOLD, COLUMNS) * last[None, :])
    place = m[None, :].to(tl.int64) * outputs + n[:, None]
    inside = (m < count)[None, :] & (n < outputs)[:, None]
    if RESIDUAL:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)
