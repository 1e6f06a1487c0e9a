"""What the norm kernels share: one tile of rows from memory to memory.

Tensors are seen as [lead, rows, width] with any strides. A tile is some rows of one lead index, `PIECES` times `TILE`
wide; with `RESIDENT` they stay in registers, so that a row is read once, wider rows are read again.
"""

# ruff: noqa: SIM108, SIM109
# mypy: disable-error-code="no-untyped-def,assignment"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import cuda.tile as ct

from kernelgraft.kernels.access import give, take, take_vector

NO_SUM, SUM_FIRST, SUM_LAST = 0, 1, 2
"""Where a residual is added: nowhere, before the norm (both are stored), or to the norm."""
KEEP, TO_INPUT, TO_WEIGHT, FACTOR = 0, 1, 2, 3
"""Rounding before the weight: none, to the input's dtype, to the weight's; or the factor to the input's dtype."""


def norm_rows(
    residual, x, weight, bias, total, y, eps, inverse, WHERE, CENTRED, WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND,
    ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, LOOP, ACCESS,
):  # fmt: skip
    """Every tile of rows that falls to this block; without LOOP that is one, and the grid has an axis for the lead.

    `inverse`: one over the width, by which torch multiplies as well.
    """
    across = ct.cdiv(x.shape[1], ROWS)
    scales = ()
    shifts = ()
    if RESIDENT:
        # Asked for before the rows, so that they arrive together; blocks that take several tiles load them once.
        for p in ct.static_iter(range(PIECES)):
            if WEIGHT:
                scales += (take_vector(weight, p, TILE, ACCESS),)
            if BIAS:
                shifts += (take_vector(bias, p, TILE, ACCESS),)
    if LOOP:
        for index in range(ct.bid(0), x.shape[0] * across, ct.num_blocks(0)):
            norm_tile(
                residual, x, weight, bias, total, y, eps, inverse, index // across, index % across, scales, shifts,
                WHERE, CENTRED, WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND, ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS,
                TILE, PIECES, EXACT, RESIDENT, ACCESS,
            )  # fmt: skip
    else:
        norm_tile(
            residual, x, weight, bias, total, y, eps, inverse, ct.bid(1), ct.bid(0), scales, shifts, WHERE, CENTRED,
            WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND, ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT,
            RESIDENT, ACCESS,
        )  # fmt: skip


def norm_tile(
    residual, x, weight, bias, total, y, eps, inverse, lead, row, scales, shifts, WHERE, CENTRED, WEIGHT, BIAS, OFFSET,
    ROUND_OFFSET, ROUND, ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, ACCESS,
):  # fmt: skip
    """One tile of rows; `scales` and `shifts` are the pieces of weight and bias where rows are resident."""
    pieces = ()
    if RESIDENT:
        for p in ct.static_iter(range(PIECES)):
            pieces += (input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, ACCESS),)
    mean = ct.zeros((1, ROWS, 1), dtype=ct.float32)
    if CENTRED:
        # Shares of the mean and not values are added: the sum of a row may be no float32 where its mean is one.
        shares = ct.zeros((1, ROWS, TILE), dtype=ct.float32)
        if RESIDENT:
            for p in ct.static_iter(range(PIECES)):
                shares = shares + ct.astype(pieces[p], ct.float32) * inverse
        else:
            for p in range(PIECES):
                piece = input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, ACCESS)
                shares = shares + ct.astype(piece, ct.float32) * inverse
        mean = ct.sum(shares, axis=2, keepdims=True)
    squares = ct.zeros((1, ROWS, TILE), dtype=ct.float32)
    if RESIDENT:
        for p in ct.static_iter(range(PIECES)):
            squares = squares + squared(pieces[p], mean, p, x.shape[2], CENTRED, TILE, EXACT)
    else:
        for p in range(PIECES):
            piece = input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, ACCESS)
            squares = squares + squared(piece, mean, p, x.shape[2], CENTRED, TILE, EXACT)
    variance = ct.sum(squares, axis=2, keepdims=True) * inverse + eps
    if DIVIDE:
        factor = ct.sqrt(variance)
    else:
        factor = ct.rsqrt(variance)
    if RESIDENT:
        for p in ct.static_iter(range(PIECES)):
            value = normalised(pieces[p], mean, factor, weight, CENTRED, ROUND, DIVIDE)
            if WEIGHT:
                value = weighted(value, scales[p], y, OFFSET, ROUND_OFFSET, ROUND_SCALED, TILE)
            if BIAS:
                value = value + ct.reshape(ct.astype(shifts[p], ct.float32), (1, 1, TILE))
            if WHERE == SUM_FIRST:
                give(total, pieces[p], lead, row, p, ROWS, TILE, ACCESS)
            output_piece(value, residual, x, weight, y, lead, row, p, WHERE, ROUND_NORMED, ROWS, TILE, ACCESS)
    else:
        for p in range(PIECES):
            piece = input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, ACCESS)
            value = normalised(piece, mean, factor, weight, CENTRED, ROUND, DIVIDE)
            if WEIGHT:
                scale = take_vector(weight, p, TILE, ACCESS)
                value = weighted(value, scale, y, OFFSET, ROUND_OFFSET, ROUND_SCALED, TILE)
            if BIAS:
                shift = take_vector(bias, p, TILE, ACCESS)
                value = value + ct.reshape(ct.astype(shift, ct.float32), (1, 1, TILE))
            if WHERE == SUM_FIRST:
                give(total, piece, lead, row, p, ROWS, TILE, ACCESS)
            output_piece(value, residual, x, weight, y, lead, row, p, WHERE, ROUND_NORMED, ROWS, TILE, ACCESS)


def input_piece(residual, x, total, lead, row, p, WHERE, ROWS, TILE, ACCESS):
    """What the norm reads: the input, or its sum with the residual, rounded as that is stored."""
    piece = take(x, lead, row, p, ROWS, TILE, ACCESS)
    if WHERE == SUM_FIRST:
        other = take(residual, lead, row, p, ROWS, TILE, ACCESS)
        piece = ct.astype(ct.astype(other, ct.float32) + ct.astype(piece, ct.float32), total.dtype)
    return piece


def squared(piece, mean, p, columns, CENTRED, TILE, EXACT):
    """Squares of a piece, or of its distance from the mean; zero beyond the row."""
    value = ct.astype(piece, ct.float32)
    if CENTRED:
        value = value - mean
        if not EXACT:
            inside = ct.arange(TILE, dtype=ct.int32) + p * TILE < columns
            value = ct.where(ct.reshape(inside, (1, 1, TILE)), value, 0.0)
    return value * value


def normalised(piece, mean, factor, weight, CENTRED, ROUND, DIVIDE):
    """A piece of the norm before its weight in float32, rounded where the semantics say so."""
    value = ct.astype(piece, ct.float32)
    if CENTRED:
        value = value - mean
    if ROUND == FACTOR:
        factor = ct.astype(ct.astype(factor, piece.dtype), ct.float32)
    if DIVIDE:
        value = value / factor
    else:
        value = value * factor
    if ROUND == TO_INPUT or ROUND == FACTOR:
        value = ct.astype(ct.astype(value, piece.dtype), ct.float32)
    if ROUND == TO_WEIGHT:
        value = ct.astype(ct.astype(value, weight.dtype), ct.float32)
    return value


def weighted(value, piece, y, OFFSET, ROUND_OFFSET, ROUND_SCALED, TILE):
    """A piece of the norm times one of the weight."""
    scale = ct.astype(piece, ct.float32)
    if OFFSET:
        scale = scale + 1.0
        if ROUND_OFFSET:
            scale = ct.astype(ct.astype(scale, piece.dtype), ct.float32)
    value = value * ct.reshape(scale, (1, 1, TILE))
    if ROUND_SCALED:
        value = ct.astype(ct.astype(value, y.dtype), ct.float32)
    return value


def output_piece(value, residual, x, weight, y, lead, row, p, WHERE, ROUND_NORMED, ROWS, TILE, ACCESS):
    """Add the residual where it comes last, round, store."""
    if WHERE == SUM_LAST:
        if ROUND_NORMED == TO_INPUT:
            value = ct.astype(ct.astype(value, x.dtype), ct.float32)
        if ROUND_NORMED == TO_WEIGHT:
            value = ct.astype(ct.astype(value, weight.dtype), ct.float32)
        value = value + ct.astype(
            take(residual, lead, row, p, ROWS, TILE, ACCESS),
            ct.float32,
        )
    give(y, ct.astype(value, y.dtype), lead, row, p, ROWS, TILE, ACCESS)
