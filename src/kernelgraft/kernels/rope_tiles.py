"""The kernel of `rope`: some heads of q and of k at some rows from memory to memory."""

# ruff: noqa: SIM109
# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import cuda.tile as ct

from kernelgraft.kernels.access import BARE, GATHER, TMA, UNCHECKED, ZERO


def parts(x, lead, head, row, START, PAIRS_IN, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS):
    """Both channels of each pair of a tile: [1, HEADS, ROWS, TILE]."""
    if PAIRS_IN == 1:
        if LENGTH == TILE and START % (2 * TILE) == 0:
            both = ct.load(
                x, (lead, head, row, START // (2 * TILE)), (1, HEADS, ROWS, 2 * TILE),
                order=(0, HEAD_AXIS, ROW_AXIS, 3), padding_mode=ZERO, allow_tma=ACCESS == TMA,
            )  # fmt: skip
        else:
            both = ct.load(
                x.slice(3, START, START + 2 * LENGTH), (lead, head, row, 0), (1, HEADS, ROWS, 2 * TILE),
                order=(0, HEAD_AXIS, ROW_AXIS, 3), padding_mode=ZERO, allow_tma=ACCESS == TMA,
            )  # fmt: skip
        both = ct.reshape(both, (1, HEADS, ROWS, TILE, 2))
        a = ct.reshape(ct.extract(both, (0, 0, 0, 0, 0), (1, HEADS, ROWS, TILE, 1)), (1, HEADS, ROWS, TILE))
        b = ct.reshape(ct.extract(both, (0, 0, 0, 0, 1), (1, HEADS, ROWS, TILE, 1)), (1, HEADS, ROWS, TILE))
    else:
        a = channels(x, lead, head, row, START, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS)
        b = channels(x, lead, head, row, START + LENGTH, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS)
    return a, b


def channels(x, lead, head, row, START, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS):
    """LENGTH channels from START on, in a tile that may be wider."""
    if ACCESS == BARE and LENGTH == TILE and START % TILE == 0:
        return ct.load(
            x, (lead, head, row, START // TILE), (1, HEADS, ROWS, TILE), order=(0, HEAD_AXIS, ROW_AXIS, 3),
            allow_tma=False, check_bounds=False,
        )  # fmt: skip
    if ACCESS == GATHER or ACCESS == UNCHECKED:
        places, inside = elements(lead, head, row, START, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS)
        if LENGTH == TILE:
            return ct.gather(x, places, padding_value=0, check_bounds=ACCESS == GATHER)
        return ct.gather(x, places, mask=inside, padding_value=0, check_bounds=ACCESS == GATHER)
    if LENGTH == TILE and START % TILE == 0:
        return ct.load(
            x, (lead, head, row, START // TILE), (1, HEADS, ROWS, TILE), order=(0, HEAD_AXIS, ROW_AXIS, 3),
            padding_mode=ZERO, allow_tma=ACCESS == TMA,
        )  # fmt: skip
    return ct.load(
        x.slice(3, START, START + LENGTH), (lead, head, row, 0), (1, HEADS, ROWS, TILE),
        order=(0, HEAD_AXIS, ROW_AXIS, 3), padding_mode=ZERO, allow_tma=ACCESS == TMA,
    )  # fmt: skip


def elements(lead, head, row, START, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS):
    """Indices of a tile [1, HEADS, ROWS, TILE] in each of the four axes, and which of its channels count."""
    heads = ct.reshape(ct.arange(HEADS, dtype=ct.int32) + head * HEADS, (1, HEADS, 1, 1))
    rows = ct.reshape(ct.arange(ROWS, dtype=ct.int32) + row * ROWS, (1, 1, ROWS, 1))
    channels = ct.reshape(ct.arange(TILE, dtype=ct.int32), (1, 1, 1, TILE))
    inside = channels < LENGTH
    if HEAD_AXIS == 1:
        return (lead, heads, rows, channels + START), inside
    return (lead, rows, heads, channels + START), inside


def put(y, value, lead, head, row, START, LENGTH, TILE, HEAD_AXIS, ROW_AXIS, ACCESS):
    """Store a tile at LENGTH channels from START on."""
    value = ct.astype(value, y.dtype)
    if ACCESS == BARE and LENGTH == TILE and START % TILE == 0:
        ct.store(
            y, (lead, head, row, START // TILE), value, order=(0, HEAD_AXIS, ROW_AXIS, 3), allow_tma=False,
            check_bounds=False,
        )  # fmt: skip
    elif ACCESS == GATHER or ACCESS == UNCHECKED:
        places, inside = elements(
            lead, head, row, START, LENGTH, TILE, value.shape[1], value.shape[2], HEAD_AXIS
        )  # fmt: skip
        if LENGTH == TILE:
            ct.scatter(y, places, value, check_bounds=ACCESS == GATHER)
        else:
            ct.scatter(y, places, value, mask=inside, check_bounds=ACCESS == GATHER)
    elif LENGTH == TILE and START % TILE == 0:
        ct.store(y, (lead, head, row, START // TILE), value, order=(0, HEAD_AXIS, ROW_AXIS, 3), allow_tma=ACCESS == TMA)
    else:
        ct.store(
            y.slice(3, START, START + LENGTH),
            (lead, head, row, 0),
            value,
            order=(0, HEAD_AXIS, ROW_AXIS, 3),
            allow_tma=ACCESS == TMA,
        )


def table(values, lead, row, FULL, PAIRS_OUT, LENGTH, TILE, ROWS, ACCESS):
    """The table's values for the first and the second channel of each pair: [1, 1, ROWS, TILE]."""
    lead = ct.minimum(lead, values.shape[0] - 1)
    if FULL and PAIRS_OUT == 1:
        both = ct.load(values, (lead, row, 0), (1, ROWS, 2 * TILE), padding_mode=ZERO, allow_tma=ACCESS == TMA)
        both = ct.reshape(both, (1, ROWS, TILE, 2))
        first = ct.extract(both, (0, 0, 0, 0), (1, ROWS, TILE, 1))
        second = ct.extract(both, (0, 0, 0, 1), (1, ROWS, TILE, 1))
    else:
        if LENGTH == TILE and ACCESS == BARE:
            first = ct.load(values, (lead, row, 0), (1, ROWS, TILE), allow_tma=False, check_bounds=False)
        elif LENGTH == TILE:
            first = ct.load(values, (lead, row, 0), (1, ROWS, TILE), padding_mode=ZERO, allow_tma=ACCESS == TMA)
        else:
            first = ct.load(
                values.slice(2, 0, LENGTH), (lead, row, 0), (1, ROWS, TILE), padding_mode=ZERO, allow_tma=ACCESS == TMA
            )
        second = first
        if FULL:
            if LENGTH == TILE and ACCESS == BARE:
                second = ct.load(values, (lead, row, 1), (1, ROWS, TILE), allow_tma=False, check_bounds=False)
            elif LENGTH == TILE:
                second = ct.load(values, (lead, row, 1), (1, ROWS, TILE), padding_mode=ZERO, allow_tma=ACCESS == TMA)
            else:
                second = ct.load(
                    values.slice(2, LENGTH, 2 * LENGTH),
                    (lead, row, 0),
                    (1, ROWS, TILE),
                    padding_mode=ZERO,
                    allow_tma=ACCESS == TMA,
                )
    shape = (1, 1, ROWS, TILE)
    return ct.reshape(first, shape), ct.reshape(second, shape)


def turn(
    x, y, cos_a, cos_b, sin_a, sin_b, lead, head, row, START, PAIRS_IN, PAIRS_OUT, BACKWARD, ROUND, LENGTH, TILE, HEADS,
    ROWS, HEAD_AXIS, ROW_AXIS, REST_START, REST, REST_TILE, ACCESS,
):  # fmt: skip
    """One tile of q or of k."""
    a, b = parts(x, lead, head, row, START, PAIRS_IN, LENGTH, TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS)
    if not ROUND:
        a, b = ct.astype(a, ct.float32), ct.astype(b, ct.float32)
        cos_a, cos_b = ct.astype(cos_a, ct.float32), ct.astype(cos_b, ct.float32)
        sin_a, sin_b = ct.astype(sin_a, ct.float32), ct.astype(sin_b, ct.float32)
    if BACKWARD:
        first = a * cos_a + b * sin_a
        second = b * cos_b - a * sin_b
    else:
        first = a * cos_a - b * sin_a
        second = b * cos_b + a * sin_b
    if PAIRS_OUT == 1:
        shape = (1, HEADS, ROWS, TILE, 1)
        both = ct.cat((ct.reshape(first, shape), ct.reshape(second, shape)), 4)
        both = ct.reshape(both, (1, HEADS, ROWS, 2 * TILE))
        put(y, both, lead, head, row, START, 2 * LENGTH, 2 * TILE, HEAD_AXIS, ROW_AXIS, ACCESS)
    else:
        put(y, first, lead, head, row, START, LENGTH, TILE, HEAD_AXIS, ROW_AXIS, ACCESS)
        put(y, second, lead, head, row, START + LENGTH, LENGTH, TILE, HEAD_AXIS, ROW_AXIS, ACCESS)
    if REST > 0:
        rest = channels(x, lead, head, row, REST_START, REST, REST_TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, ACCESS)
        put(y, rest, lead, head, row, REST_START, REST, REST_TILE, HEAD_AXIS, ROW_AXIS, ACCESS)


def rope_tile(
    q, k, cos, sin, q_out, k_out, lead, row, head, k_tiles, WITH_K, FEWER, HEAD_AXIS, ROW_AXIS, START, LENGTH, TILE,
    REST_START, REST, REST_TILE, PAIRS_IN, PAIRS_OUT, FULL, BACKWARD, ROUND, HEADS, K_HEADS, ROWS, ACCESS,
):  # fmt: skip
    """Some heads of q, and of k where there are that many, at some rows."""
    cos_a, cos_b = table(cos, lead, row, FULL, PAIRS_OUT, LENGTH, TILE, ROWS, ACCESS)
    sin_a, sin_b = table(sin, lead, row, FULL, PAIRS_OUT, LENGTH, TILE, ROWS, ACCESS)
    turn(
        q, q_out, cos_a, cos_b, sin_a, sin_b, lead, head, row, START, PAIRS_IN, PAIRS_OUT, BACKWARD, ROUND, LENGTH,
        TILE, HEADS, ROWS, HEAD_AXIS, ROW_AXIS, REST_START, REST, REST_TILE, ACCESS,
    )  # fmt: skip
    if WITH_K:
        if FEWER:
            if head < k_tiles:
                turn(
                    k, k_out, cos_a, cos_b, sin_a, sin_b, lead, head, row, START, PAIRS_IN, PAIRS_OUT, BACKWARD, ROUND,
                    LENGTH, TILE, K_HEADS, ROWS, HEAD_AXIS, ROW_AXIS, REST_START, REST, REST_TILE, ACCESS,
                )  # fmt: skip
        else:
            turn(
                k, k_out, cos_a, cos_b, sin_a, sin_b, lead, head, row, START, PAIRS_IN, PAIRS_OUT, BACKWARD, ROUND,
                LENGTH, TILE, K_HEADS, ROWS, HEAD_AXIS, ROW_AXIS, REST_START, REST, REST_TILE, ACCESS,
            )  # fmt: skip


@ct.kernel
def rope_kernel(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    WITH_K: ct.Constant[bool],
    FEWER: ct.Constant[bool],
    HEAD_AXIS: ct.Constant[int],
    ROW_AXIS: ct.Constant[int],
    START: ct.Constant[int],
    LENGTH: ct.Constant[int],
    TILE: ct.Constant[int],
    REST_START: ct.Constant[int],
    REST: ct.Constant[int],
    REST_TILE: ct.Constant[int],
    PAIRS_IN: ct.Constant[int],
    PAIRS_OUT: ct.Constant[int],
    FULL: ct.Constant[bool],
    BACKWARD: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    HEADS: ct.Constant[int],
    K_HEADS: ct.Constant[int],
    ROWS: ct.Constant[int],
    LOOP: ct.Constant[bool],
    ACCESS: ct.Constant[int],
):
    """q, k: four axes, the batch first and the channels last; cos, sin: [1 or batch, length, values].

    LENGTH pairs turn, from channel START on; REST channels from REST_START on are copied. A tile has HEADS of q and
    K_HEADS of k; k has no more tiles than q, with FEWER it has fewer.
    """
    tiles = ct.cdiv(q.shape[HEAD_AXIS], HEADS)
    k_tiles = ct.cdiv(k.shape[HEAD_AXIS], K_HEADS)
    if LOOP:
        across = ct.cdiv(q.shape[ROW_AXIS], ROWS) * tiles
        for index in range(ct.bid(0), q.shape[0] * across, ct.num_blocks(0)):
            rope_tile(
                q, k, cos, sin, q_out, k_out, index // across, (index % across) // tiles, index % tiles, k_tiles,
                WITH_K, FEWER, HEAD_AXIS, ROW_AXIS, START, LENGTH, TILE, REST_START, REST, REST_TILE, PAIRS_IN,
                PAIRS_OUT, FULL, BACKWARD, ROUND, HEADS, K_HEADS, ROWS, ACCESS,
            )  # fmt: skip
    else:
        rope_tile(
            q, k, cos, sin, q_out, k_out, ct.bid(2), ct.bid(1), ct.bid(0), k_tiles, WITH_K, FEWER, HEAD_AXIS, ROW_AXIS,
            START, LENGTH, TILE, REST_START, REST, REST_TILE, PAIRS_IN, PAIRS_OUT, FULL, BACKWARD, ROUND, HEADS,
            K_HEADS, ROWS, ACCESS,
        )  # fmt: skip
