"""The kernel of `linear_decode`: what a block does, from pieces of the weight to a tile of the result."""

# mypy: disable-error-code="no-untyped-def,assignment"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from kernelgraft.kernels.act_and_mul import activated

ZERO = ct.PaddingMode.ZERO

NO_NORM, NORM_FIRST, NORM_LAST = 0, 1, 2
"""No norm; x is normalised and rounded as the original does; or the factor is taken at the end."""
MOST_STEPS = 16
"""Up to that many steps are written out, and can be kept."""
ABSENT = -1


@dataclass(frozen=True, slots=True)
class Constants:
    """What is compiled into a kernel. `up`, `bias`, `residual`, `vector`: places in `extras`, or ABSENT."""

    width: int
    norm: int
    offset: bool
    rounded: bool
    """Whether the normalised row is rounded before the norm's weight."""
    gated: bool
    act: int
    fast: bool
    up: int
    """ABSENT where `gated`: the weight holds the gate's rows and then those of the other factor."""
    bias: int
    residual: int
    vector: int
    tile: int
    fold: int
    depth: int
    columns: int
    steps: int
    loop: bool
    ahead: bool
    occupancy: int

    @property
    def bare(self) -> bool:
        """True if there are no extras."""
        return self.up == self.bias == self.residual == self.vector == ABSENT


def pieces_of(weight, begin, end, C):
    """Rows of a weight [.., width] as [rows, fold, width / fold]."""
    shape = (weight.shape[0], C.fold, C.width // C.fold)
    whole = ct.Array.from_foreign(weight.foreign_pointer, shape, (weight.strides[0], C.width // C.fold, 1))
    return whole.slice(0, begin, end)


def factors(x, count, eps, C):
    """1 / rms of every row of x: [1, rows, 1]."""
    ROWS = C.columns // C.fold
    across = ct.Array.from_foreign(x.foreign_pointer, (count, C.width), (C.width, 1))
    squares = ct.zeros((ROWS, 1024), dtype=ct.float32)
    for k in range(ct.cdiv(C.width, 1024)):
        piece = ct.astype(ct.load(across, (0, k), (ROWS, 1024), padding_mode=ZERO), ct.float32)
        squares = squares + piece * piece
    return ct.reshape(ct.rsqrt(ct.sum(squares, axis=1) / C.width + eps), (1, ROWS, 1))


def scaled(piece, vector, k, factor, C):
    """Piece k of all columns, [depth, columns], times that of the norm's weight."""
    if C.norm != NO_NORM:
        scale = ct.astype(ct.load(vector, (k, 0), (C.depth, C.fold), order=(1, 0), padding_mode=ZERO), ct.float32)
        if C.offset:
            scale = scale + 1.0
        value = ct.reshape(ct.astype(piece, ct.float32), (C.depth, C.columns // C.fold, C.fold))
        if C.norm == NORM_FIRST:
            value = value * factor
            if C.rounded:
                value = ct.astype(ct.astype(value, piece.dtype), ct.float32)
        value = value * ct.reshape(scale, (C.depth, 1, C.fold))
        piece = ct.astype(ct.reshape(value, (C.depth, C.columns)), piece.dtype)
    return piece


def squared(squares, piece, C):
    """Squares so far plus those of a piece of the columns."""
    if C.norm == NORM_LAST:
        squares = squares + ct.astype(piece, ct.float32) * ct.astype(piece, ct.float32)
    return squares


def piece_of(weight, tile, k, C):
    """Piece k of a tile of weight rows: [tile * fold, depth]."""
    piece = ct.load(weight, (tile, 0, k), (C.tile, C.fold, C.depth), padding_mode=ZERO, latency=8)
    return ct.reshape(piece, (C.tile * C.fold, C.depth))


def added(total, weight, tile, k, columns, C):
    """A total plus the product of piece k of a tile of weight rows with that of the columns."""
    return ct.mma(piece_of(weight, tile, k, C), columns, total)


def unfolded(total, C):
    """The sum over equal places: [tile * fold, columns] to [tile, columns / fold]."""
    if C.fold > 1:
        parts = ct.reshape(total, (C.tile, C.fold, C.columns // C.fold, C.fold))
        place = ct.arange(C.fold, dtype=ct.int32)
        same = ct.reshape(place, (1, C.fold, 1, 1)) == ct.reshape(place, (1, 1, 1, C.fold))
        value = ct.sum(ct.sum(ct.where(same, parts, 0.0), axis=3), axis=1)
    else:
        value = total
    return value


def finish(total, other, squares, extras, addend, y, tile, eps, C):
    """From sums of products to a tile of the result."""
    value = unfolded(total, C)
    if C.norm == NORM_LAST:
        whole = ct.sum(ct.reshape(ct.sum(squares, axis=0), (C.columns // C.fold, C.fold)), axis=1)
        factor = ct.reshape(ct.rsqrt(whole / C.width + eps), (1, C.columns // C.fold))
        value = value * factor
    if C.bias != ABSENT:
        shift = ct.load(extras[C.bias], (tile,), (C.tile,), padding_mode=ZERO, allow_tma=False)
        value = value + ct.reshape(ct.astype(shift, ct.float32), (C.tile, 1))
    if C.gated:
        second = unfolded(other, C)
        if C.norm == NORM_LAST:
            second = second * factor
        value = activated(value, C.act, C.fast) * second
    value = ct.transpose(value)
    if C.residual != ABSENT:
        more = ct.load(addend, (0, tile), (C.columns // C.fold, C.tile), padding_mode=ZERO, allow_tma=False)
        value = value + ct.astype(more, ct.float32)
    ct.store(y, (0, tile), ct.astype(value, y.dtype), allow_tma=False)


def streamed(x, weight, y, extras, count, step, eps, C):
    """All tiles that fall to this block; without `loop` that is one."""
    outputs = weight.shape[0]
    if C.gated and C.up == ABSENT:
        outputs = outputs // 2
    columns = ct.Array.from_foreign(x.foreign_pointer, (count * C.fold, C.width // C.fold), (C.width // C.fold, 1))
    target = ct.Array.from_foreign(y.foreign_pointer, (count, outputs), (step, 1))
    first = pieces_of(weight, 0, outputs, C)
    second = first
    if C.gated and C.up == ABSENT:
        second = pieces_of(weight, outputs, 2 * outputs, C)
    elif C.gated:
        second = pieces_of(extras[C.up], 0, outputs, C)
    scales = columns
    if C.norm != NO_NORM:
        pointer = extras[C.vector].foreign_pointer
        scales = ct.Array.from_foreign(pointer, (C.fold, C.width // C.fold), (C.width // C.fold, 1))
    addend = target
    if C.residual != ABSENT:
        addend = ct.Array.from_foreign(extras[C.residual].foreign_pointer, (count, outputs), (step, 1))
    factor = 1.0
    if C.norm == NORM_FIRST and not C.ahead:
        factor = factors(x, count, eps, C)
    squares = ct.zeros((C.depth, C.columns), dtype=ct.float32)
    if C.loop:
        kept = ()
        for k in ct.static_iter(range(C.steps)):
            raw = ct.load(columns, (k, 0), (C.depth, C.columns), order=(1, 0), padding_mode=ZERO)
            squares = squared(squares, raw, C)
            kept += (scaled(raw, scales, k, factor, C),)
        for tile in range(ct.bid(0), ct.cdiv(outputs, C.tile), ct.num_blocks(0)):
            total = ct.zeros((C.tile * C.fold, C.columns), dtype=ct.float32)
            other = ct.zeros((C.tile * C.fold, C.columns), dtype=ct.float32)
            for k in ct.static_iter(range(C.steps)):
                total = added(total, first, tile, k, kept[k], C)
                if C.gated:
                    other = added(other, second, tile, k, kept[k], C)
            finish(total, other, squares, extras, addend, target, tile, eps, C)
    else:
        tile = ct.bid(0)
        total = ct.zeros((C.tile * C.fold, C.columns), dtype=ct.float32)
        other = ct.zeros((C.tile * C.fold, C.columns), dtype=ct.float32)
        if C.ahead:
            ct.grid_dependency_control_launch_dependents()
            pieces = ()
            others = ()
            for k in ct.static_iter(range(C.steps)):
                pieces += (piece_of(first, tile, k, C),)
                if C.gated:
                    others += (piece_of(second, tile, k, C),)
            ct.grid_dependency_control_wait()
            if C.norm == NORM_FIRST:
                factor = factors(x, count, eps, C)
            for k in ct.static_iter(range(C.steps)):
                raw = ct.load(columns, (k, 0), (C.depth, C.columns), order=(1, 0), padding_mode=ZERO)
                squares = squared(squares, raw, C)
                piece = scaled(raw, scales, k, factor, C)
                total = ct.mma(pieces[k], piece, total)
                if C.gated:
                    other = ct.mma(others[k], piece, other)
        elif C.steps <= MOST_STEPS:
            for k in ct.static_iter(range(C.steps)):
                raw = ct.load(columns, (k, 0), (C.depth, C.columns), order=(1, 0), padding_mode=ZERO)
                squares = squared(squares, raw, C)
                piece = scaled(raw, scales, k, factor, C)
                total = added(total, first, tile, k, piece, C)
                if C.gated:
                    other = added(other, second, tile, k, piece, C)
        else:
            for k in range(C.steps):
                raw = ct.load(columns, (k, 0), (C.depth, C.columns), order=(1, 0), padding_mode=ZERO)
                squares = squared(squares, raw, C)
                piece = scaled(raw, scales, k, factor, C)
                total = added(total, first, tile, k, piece, C)
                if C.gated:
                    other = added(other, second, tile, k, piece, C)
        finish(total, other, squares, extras, addend, target, tile, eps, C)


@functools.lru_cache(maxsize=1024)
def kernel_of(C: Constants) -> Any:
    """The kernel with these constants, which a launch then need not pass: each would cost the host time.

    x: [count, width] without gaps; weight, up: [outputs, width], their rows at any distance, or one of [2 * outputs,
    width]; bias: [outputs]; residual, y: [count, outputs], rows `step` apart; vector: [width].
    """
    if C.bare:

        @ct.kernel(occupancy=C.occupancy)
        def linear_decode_kernel(x, weight, y, count, step):
            streamed(x, weight, y, (), count, step, 0.0, C)

        return linear_decode_kernel

    @ct.kernel(occupancy=C.occupancy)
    def fused_linear_decode_kernel(x, weight, y, extras, count, step, eps):
        streamed(x, weight, y, extras, count, step, eps, C)

    return fused_linear_decode_kernel
