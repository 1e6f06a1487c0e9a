"""The kernel of `qk_norm_rope`: some heads at some rows from memory to memory.

A tile's channels are kept in three pieces: the first and the second channel of each pair, and those that do not turn.
"""

# ruff: noqa: SIM102, SIM108
# mypy: disable-error-code="no-untyped-def,assignment"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import cuda.tile as ct

from kernelgraft.kernels import rope_tiles, rows
from kernelgraft.kernels.access import BARE, TMA, ZERO

OF_INPUT, OF_WEIGHT, FLOAT32 = 0, 1, 2
"""Which dtype the norm's result has."""

# Constants come in tuples:
# NORM: WEIGHT, OFFSET, ROUND_OFFSET, ROUND, DIVIDE, NORMED
# PAIRS: PAIRS_IN, PAIRS_OUT, FULL, ROUND_PRODUCTS
# SPAN: START, LENGTH, TILE, REST_START, REST, REST_TILE
# SEAT: HEAD_AXIS, ROW_AXIS, Y_HEAD_AXIS, Y_ROW_AXIS, ROWS, ACCESS
# SHARE: WITH_K, APART, FEWER, HEADS, K_HEADS, LOOP


def vector(values, START, LENGTH, TILE, ACCESS):
    """LENGTH values from START on, in a tile that may be wider."""
    if ACCESS == BARE and LENGTH == TILE and START % TILE == 0:
        return ct.load(values, (START // TILE,), (TILE,), allow_tma=False, check_bounds=False)
    if ACCESS == TMA and LENGTH == TILE and START % TILE == 0:
        return ct.load(values, (START // TILE,), (TILE,), padding_mode=ZERO, allow_tma=True)
    places = ct.arange(TILE, dtype=ct.int32)
    return ct.gather(values, places + START, mask=places < LENGTH, padding_value=0)


# Channels 2i and 2i + 1 are gathered and scattered one by one: where a load of both was taken apart again, the compiler
# (13.4, sm_90) read 32 bits from an address that was divisible by 16 only.


def alternate(values, START, PARITY, LENGTH, TILE):
    """Every second value of 2 LENGTH from START on, in a tile that may be wider."""
    places = ct.arange(TILE, dtype=ct.int32)
    return ct.gather(values, 2 * places + (START + PARITY), mask=places < LENGTH, padding_value=0)


def alternate_turns(values, lead, row, PARITY, LENGTH, TILE, ROWS):
    """A table's values for the first or the second channel of each pair: [1, 1, ROWS, TILE]."""
    lead = ct.minimum(lead, values.shape[0] - 1)
    lines = ct.reshape(ct.arange(ROWS, dtype=ct.int32) + row * ROWS, (1, 1, ROWS, 1))
    places = ct.reshape(ct.arange(TILE, dtype=ct.int32), (1, 1, 1, TILE))
    return ct.gather(values, (lead, lines, 2 * places + PARITY), mask=places < LENGTH, padding_value=0)


def alternate_places(lead, head, row, START, PARITY, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS):
    """Indices of the first or the second channels of some heads at some rows, and which of them count."""
    heads = ct.reshape(ct.arange(HEADS, dtype=ct.int32) + head * HEADS, (1, HEADS, 1, 1))
    lines = ct.reshape(ct.arange(ROWS, dtype=ct.int32) + row * ROWS, (1, 1, ROWS, 1))
    places = ct.reshape(ct.arange(TILE, dtype=ct.int32), (1, 1, 1, TILE))
    channels = 2 * places + (START + PARITY)
    if HEAD_AXIS == 1:
        return (lead, heads, lines, channels), places < LENGTH
    return (lead, lines, heads, channels), places < LENGTH


def load_scales(weight, NORM, PAIRS, SPAN, ACCESS):
    """The weight for the first and the second channel of each pair, and for the rest; nothing without a weight."""
    START, LENGTH, TILE, REST_START, REST, REST_TILE = SPAN
    found = ()
    if NORM[0]:
        if PAIRS[0] == 1:
            found += (alternate(weight, START, 0, LENGTH, TILE), alternate(weight, START, 1, LENGTH, TILE))
        else:
            found += (vector(weight, START, LENGTH, TILE, ACCESS),)
            found += (vector(weight, START + LENGTH, LENGTH, TILE, ACCESS),)
        if REST > 0:
            found += (vector(weight, REST_START, REST, REST_TILE, ACCESS),)
    return found


def load_turns(cos, sin, lead, row, PAIRS, SPAN, ROWS, ACCESS):
    """cos of the first and the second channels, then sin of them, each [1, 1, ROWS, TILE]."""
    PAIRS_OUT, FULL, ROUND_PRODUCTS = PAIRS[1], PAIRS[2], PAIRS[3]
    LENGTH, TILE = SPAN[1], SPAN[2]
    if FULL and PAIRS_OUT == 1:
        found = (
            alternate_turns(cos, lead, row, 0, LENGTH, TILE, ROWS),
            alternate_turns(cos, lead, row, 1, LENGTH, TILE, ROWS),
            alternate_turns(sin, lead, row, 0, LENGTH, TILE, ROWS),
            alternate_turns(sin, lead, row, 1, LENGTH, TILE, ROWS),
        )
    else:
        found = rope_tiles.table(cos, lead, row, FULL, PAIRS_OUT, LENGTH, TILE, ROWS, ACCESS)
        found += rope_tiles.table(sin, lead, row, FULL, PAIRS_OUT, LENGTH, TILE, ROWS, ACCESS)
    turns = ()
    for i in ct.static_iter(range(4)):
        if ROUND_PRODUCTS:
            turns += (found[i],)
        else:
            turns += (ct.astype(found[i], ct.float32),)
    return turns


def load_heads(x, lead, head, row, PAIRS, SPAN, SEAT, HEADS):
    """Both channels of each pair of some heads at some rows, and the rest."""
    START, LENGTH, TILE, REST_START, REST, REST_TILE = SPAN
    HEAD_AXIS, ROW_AXIS, ROWS, ACCESS = SEAT[0], SEAT[1], SEAT[4], SEAT[5]
    if PAIRS[0] == 1:
        found = ()
        for parity in ct.static_iter(range(2)):
            places, inside = alternate_places(lead, head, row, START, parity, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS)
            found += (ct.gather(x, places, mask=inside, padding_value=0),)
    else:
        found = rope_tiles.parts(x, lead, head, row, START, 0, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS)
    if REST > 0:
        rest = rope_tiles.channels(
            x, lead, head, row, REST_START, REST, REST_TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS
        )  # fmt: skip
        found += (rest,)
    return found


def squares(piece):
    """Sum of squares over the channels: [1, HEADS, ROWS, 1]."""
    wide = ct.astype(piece, ct.float32)
    return ct.sum(wide * wide, axis=3, keepdims=True)


def normed(p, pieces, scales, x, weight, factor, NORM, TILE):
    """One piece of the norm, rounded as the norm alone gives it."""
    WEIGHT, OFFSET, ROUND_OFFSET, ROUND, DIVIDE, NORMED = NORM
    value = rows.normalised(pieces[p], factor, factor, weight, False, ROUND, DIVIDE)
    if WEIGHT:
        value = rows.weighted(value, scales[p], x, OFFSET, ROUND_OFFSET, False, TILE)
    if NORMED == OF_INPUT:
        value = ct.astype(value, x.dtype)
    if NORMED == OF_WEIGHT:
        value = ct.astype(value, weight.dtype)
    return value


def finish(pieces, scales, turns, x, weight, y, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, HEADS):
    """Norm, turn and store some heads at some rows."""
    START, LENGTH, TILE, REST_START, REST, REST_TILE = SPAN
    HEAD_AXIS, ROW_AXIS, ROWS, ACCESS = SEAT[2], SEAT[3], SEAT[4], SEAT[5]
    total = squares(pieces[0]) + squares(pieces[1])
    if REST > 0:
        total = total + squares(pieces[2])
    variance = total / width + eps
    if NORM[4]:
        factor = ct.sqrt(variance)
    else:
        factor = ct.rsqrt(variance)
    a = normed(0, pieces, scales, x, weight, factor, NORM, TILE)
    b = normed(1, pieces, scales, x, weight, factor, NORM, TILE)
    if not PAIRS[3]:
        a, b = ct.astype(a, ct.float32), ct.astype(b, ct.float32)
    first = a * turns[0] - b * turns[2]
    second = b * turns[1] + a * turns[3]
    if PAIRS[1] == 1:
        places, inside = alternate_places(lead, head, row, START, 0, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS)
        ct.scatter(y, places, ct.astype(first, y.dtype), mask=inside)
        places, inside = alternate_places(lead, head, row, START, 1, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS)
        ct.scatter(y, places, ct.astype(second, y.dtype), mask=inside)
    else:
        rope_tiles.put(y, first, lead, head, row, START, LENGTH, TILE, HEAD_AXIS, ROW_AXIS, ACCESS)
        rope_tiles.put(y, second, lead, head, row, START + LENGTH, LENGTH, TILE, HEAD_AXIS, ROW_AXIS, ACCESS)
    if REST > 0:
        rest = normed(2, pieces, scales, x, weight, factor, NORM, REST_TILE)
        rope_tiles.put(y, rest, lead, head, row, REST_START, REST, REST_TILE, HEAD_AXIS, ROW_AXIS, ACCESS)


def some_heads(x, weight, y, turns, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, HEADS):
    """Load, norm, turn and store."""
    scales = load_scales(weight, NORM, PAIRS, SPAN, SEAT[5])
    pieces = load_heads(x, lead, head, row, PAIRS, SPAN, SEAT, HEADS)
    finish(pieces, scales, turns, x, weight, y, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, HEADS)


def turned_tile(
    index, q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, width, tiles, slots, across, WITH_K, APART, FEWER,
    NORM, PAIRS, SPAN, SEAT, HEADS, K_HEADS,
):  # fmt: skip
    """One tile: some heads of q, of k, or of both at some rows."""
    lead, row, head = index // across, (index % across) // slots, index % slots
    turns = load_turns(cos, sin, lead, row, PAIRS, SPAN, SEAT[4], SEAT[5])
    if APART:
        if head < tiles:
            some_heads(
                q, q_weight, q_out, turns, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, HEADS
            )  # fmt: skip
        else:
            some_heads(
                k, k_weight, k_out, turns, eps, width, lead, head - tiles, row, NORM, PAIRS, SPAN, SEAT, K_HEADS
            )  # fmt: skip
    elif WITH_K and not FEWER:
        scales = load_scales(q_weight, NORM, PAIRS, SPAN, SEAT[5])
        pieces = load_heads(q, lead, head, row, PAIRS, SPAN, SEAT, HEADS)
        k_scales = load_scales(k_weight, NORM, PAIRS, SPAN, SEAT[5])
        k_pieces = load_heads(k, lead, head, row, PAIRS, SPAN, SEAT, K_HEADS)
        finish(
            pieces, scales, turns, q, q_weight, q_out, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, HEADS
        )  # fmt: skip
        finish(
            k_pieces, k_scales, turns, k, k_weight, k_out, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, K_HEADS
        )  # fmt: skip
    else:
        some_heads(q, q_weight, q_out, turns, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, HEADS)
        if WITH_K:
            if head < ct.cdiv(k.shape[SEAT[0]], K_HEADS):
                some_heads(
                    k, k_weight, k_out, turns, eps, width, lead, head, row, NORM, PAIRS, SPAN, SEAT, K_HEADS
                )  # fmt: skip


@ct.kernel
def qk_norm_rope_kernel(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    q_out,
    k_out,
    eps,
    width,
    NORM: ct.Constant[tuple],
    PAIRS: ct.Constant[tuple],
    SPAN: ct.Constant[tuple],
    SEAT: ct.Constant[tuple],
    SHARE: ct.Constant[tuple],
):
    """q, k: four axes, the batch first and the channels last; cos, sin: [1 or batch, length, values].

    LENGTH pairs turn, from channel START on; REST channels from REST_START on do not. A tile has HEADS of q and K_HEADS
    of k. APART: blocks of k follow those of q; else k has no more tiles than q, with FEWER it has fewer.
    """
    WITH_K, APART, FEWER, HEADS, K_HEADS, LOOP = SHARE
    HEAD_AXIS, ROW_AXIS, ROWS = SEAT[0], SEAT[1], SEAT[4]
    tiles = ct.cdiv(q.shape[HEAD_AXIS], HEADS)
    if APART:
        slots = tiles + ct.cdiv(k.shape[HEAD_AXIS], K_HEADS)
    else:
        slots = tiles
    across = ct.cdiv(q.shape[ROW_AXIS], ROWS) * slots
    if LOOP:
        for index in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
            turned_tile(
                index, q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, width, tiles, slots, across, WITH_K,
                APART, FEWER, NORM, PAIRS, SPAN, SEAT, HEADS, K_HEADS,
            )  # fmt: skip
    else:
        turned_tile(
            ct.bid(0), q, k, q_weight, k_weight, cos, sin, q_out, k_out, eps, width, tiles, slots, across, WITH_K,
            APART, FEWER, NORM, PAIRS, SPAN, SEAT, HEADS, K_HEADS,
        )  # fmt: skip
