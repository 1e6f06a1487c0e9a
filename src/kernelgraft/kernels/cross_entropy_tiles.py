"""The kernels of the cross entropy from hidden states: logits of a tile of tokens and words never leave the block.

z = softcap · tanh(scale · hidden · weightᵀ / softcap) are the logits. Exponentials are taken to base two.
"""

# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import functools
import math
from typing import Any

import cuda.tile as ct

ZERO = ct.PaddingMode.ZERO
NEG_INF = ct.PaddingMode.NEG_INF
LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
NEGATIVE_INFINITY = float("-inf")
NO_CAP, QUICK, FINE = 0, 1, 2
"""How logits are capped."""


@functools.lru_cache(maxsize=64)
def with_ctas(kernel: Any, ctas: int | None) -> Any:
    """A kernel with the hint how many blocks work together; the same object each time, as each compiles anew."""
    return kernel if ctas is None else kernel.replace_hints(num_ctas=ctas)


def products(hidden, weight, t, v, TOKENS, WORDS, DEPTH, SWAP):
    """hidden · weightᵀ of some tokens and some words in float32: [TOKENS, WORDS].

    With SWAP words are the rows of the product, which suits few tokens.
    """
    steps = ct.cdiv(hidden.shape[1], DEPTH)
    if SWAP:
        total = ct.zeros((WORDS, TOKENS), dtype=ct.float32)
        for k in range(steps):
            w = ct.load(weight, (v, k), (WORDS, DEPTH), padding_mode=ZERO)
            h = ct.load(hidden, (k, t), (DEPTH, TOKENS), order=(1, 0), padding_mode=ZERO)
            total = ct.mma(w, h, total)
        return ct.transpose(total)
    else:
        total = ct.zeros((TOKENS, WORDS), dtype=ct.float32)
        for k in range(steps):
            h = ct.load(hidden, (t, k), (TOKENS, DEPTH), padding_mode=ZERO)
            w = ct.load(weight, (k, v), (DEPTH, WORDS), order=(1, 0), padding_mode=ZERO)
            total = ct.mma(h, w, total)
        return total


def bent(value, CAP):
    """Hyperbolic tangent; the QUICK one is off by up to 1e-7, however small it is."""
    if CAP == QUICK:
        return 1.0 - ct.truediv(2.0, ct.exp2(value * (2.0 * LOG2_E)) + 1.0, rounding_mode=ct.RoundingMode.APPROX)
    return ct.tanh(value)


def capped(value, scale, softcap, CAP):
    """Logits from products."""
    value = value * scale
    if CAP != NO_CAP:
        value = bent(value * (1.0 / softcap), CAP) * softcap
    return value


def joined(largest, total, value):
    """The running maximum and sum of exponentials [TOKENS, 1], to base two, after more logits [TOKENS, WORDS]."""
    higher = ct.maximum(largest, ct.max(value, axis=1, keepdims=True))
    # All logits -inf so far: their exponentials are zero, not NaN.
    base = ct.where(higher == NEGATIVE_INFINITY, 0.0, higher)
    total = total * ct.exp2(largest - base) + ct.sum(ct.exp2(value - base), axis=1, keepdims=True)
    return higher, total


@ct.kernel
def normaliser_kernel(
    hidden,
    weight,
    partial,
    scale,
    softcap,
    CAP: ct.Constant[int],
    TILES: ct.Constant[int],
    EXACT: ct.Constant[bool],
    TOKENS: ct.Constant[int],
    WORDS: ct.Constant[int],
    DEPTH: ct.Constant[int],
    SWAP: ct.Constant[bool],
):
    """partial: [2, parts, tokens], the largest logit and the sum of exponentials of each part of TILES tiles."""
    across = ct.cdiv(partial.shape[2], TOKENS)
    t, part = ct.bid(0) % across, ct.bid(0) // across
    words = weight.shape[0]
    largest = ct.full((TOKENS, 1), NEGATIVE_INFINITY, dtype=ct.float32)
    total = ct.zeros((TOKENS, 1), dtype=ct.float32)
    for v in range(part * TILES, min(part * TILES + TILES, ct.cdiv(words, WORDS))):
        value = products(hidden, weight, t, v, TOKENS, WORDS, DEPTH, SWAP)
        value = capped(value, scale, softcap, CAP) * LOG2_E
        if not EXACT:
            inside = ct.arange(WORDS, dtype=ct.int32) + v * WORDS < words
            value = ct.where(ct.reshape(inside, (1, WORDS)), value, NEGATIVE_INFINITY)
        largest, total = joined(largest, total, value)
    ct.store(partial, (0, part, t), ct.reshape(largest, (1, 1, TOKENS)))
    ct.store(partial, (1, part, t), ct.reshape(total, (1, 1, TOKENS)))


@ct.kernel
def chunk_normaliser_kernel(
    chunk,
    partial,
    part,
    scale,
    softcap,
    CAP: ct.Constant[int],
    WORDS: ct.Constant[int],
    TILES: ct.Constant[int],
    PIECES: ct.Constant[int],
):
    """chunk: [tokens, words of the chunk], products in memory; partial: as above, PIECES from `part` on.

    A block takes a token's piece of TILES tiles.
    """
    t, piece = ct.bid(0) // PIECES, ct.bid(0) % PIECES
    largest = ct.full((1, 1), NEGATIVE_INFINITY, dtype=ct.float32)
    total = ct.zeros((1, 1), dtype=ct.float32)
    for v in range(piece * TILES, min(piece * TILES + TILES, ct.cdiv(chunk.shape[1], WORDS))):
        value = ct.astype(ct.load(chunk, (t, v), (1, WORDS), padding_mode=ZERO), ct.float32)
        inside = ct.arange(WORDS, dtype=ct.int32) + v * WORDS < chunk.shape[1]
        value = capped(value, scale, softcap, CAP) * LOG2_E
        value = ct.where(ct.reshape(inside, (1, WORDS)), value, NEGATIVE_INFINITY)
        largest, total = joined(largest, total, value)
    ct.store(partial, (0, part + piece, t), ct.reshape(largest, (1, 1, 1)))
    ct.store(partial, (1, part + piece, t), ct.reshape(total, (1, 1, 1)))


@ct.kernel
def loss_kernel(
    hidden: ct.IndexedWithInt64,
    weight: ct.IndexedWithInt64,
    labels,
    partial,
    losses,
    normalisers,
    scale,
    softcap,
    ignored,
    CAP: ct.Constant[int],
    PARTS: ct.Constant[int],
    ROWS: ct.Constant[int],
    DEPTH: ct.Constant[int],
):
    """Normalisers (log of the sum of exponentials) from their parts, the labels' logits, and the losses: [tokens]."""
    t = ct.bid(0)
    largest = ct.load(partial, (0, 0, t), (1, PARTS, ROWS), padding_mode=NEG_INF)
    total = ct.load(partial, (1, 0, t), (1, PARTS, ROWS), padding_mode=ZERO)
    highest = ct.max(largest, axis=1, keepdims=True)
    base = ct.where(highest == NEGATIVE_INFINITY, 0.0, highest)
    total = ct.sum(total * ct.exp2(largest - base), axis=1)
    normaliser = (ct.reshape(base, (ROWS,)) + ct.log2(ct.reshape(total, (ROWS,)))) * LN_2
    label = ct.load(labels, (t,), (ROWS,), padding_mode=ZERO)
    counted = label != ignored
    label = ct.reshape(ct.where(counted, label, 0), (ROWS, 1))
    dots = ct.zeros((ROWS, DEPTH), dtype=ct.float32)
    for k in range(ct.cdiv(hidden.shape[1], DEPTH)):
        h = ct.load(hidden, (t, k), (ROWS, DEPTH), padding_mode=ZERO)
        columns = ct.reshape(ct.arange(DEPTH, dtype=ct.int32) + ct.astype(k * DEPTH, ct.int32), (1, DEPTH))
        w = ct.gather(weight, (label, columns), padding_value=0)
        dots = dots + ct.astype(h, ct.float32) * ct.astype(w, ct.float32)
    logit = capped(ct.sum(dots, axis=1), scale, softcap, CAP)
    ct.store(losses, (t,), ct.where(counted, normaliser - logit, 0.0))
    ct.store(normalisers, (t,), normaliser)


def slopes(value, label, normaliser, slope, first, scale, softcap, CAP, WORDS):
    """The loss's derivatives by products [TOKENS, WORDS], the first word of which has the number `first`."""
    value = value * scale
    inner = slope * scale
    if CAP != NO_CAP:
        part = bent(value * (1.0 / softcap), CAP)
        value = part * softcap
        inner = (1.0 - part * part) * inner
    shares = ct.exp2((value - normaliser) * LOG2_E)
    words = ct.reshape(ct.arange(WORDS, dtype=ct.int32), (1, WORDS)) + first
    return ct.where(words == label, shares - 1.0, shares) * inner


@ct.kernel
def slope_kernel(
    hidden,
    weight,
    labels,
    normalisers,
    grads,
    chunk,
    first,
    scale,
    softcap,
    CAP: ct.Constant[int],
    TOKENS: ct.Constant[int],
    WORDS: ct.Constant[int],
    DEPTH: ct.Constant[int],
    SWAP: ct.Constant[bool],
):
    """chunk: [tokens, words], derivatives by the products of some words, whose `weight` this is, from `first` on.

    grads: [tokens], the derivatives by each token's loss, zero where it is ignored.
    """
    across = ct.cdiv(chunk.shape[0], TOKENS)
    t, v = ct.bid(0) % across, ct.bid(0) // across
    value = products(hidden, weight, t, v, TOKENS, WORDS, DEPTH, SWAP)
    label = ct.reshape(ct.astype(ct.load(labels, (t,), (TOKENS,), padding_mode=ZERO), ct.int32), (TOKENS, 1))
    normaliser = ct.reshape(ct.load(normalisers, (t,), (TOKENS,), padding_mode=ZERO), (TOKENS, 1))
    slope = ct.reshape(ct.load(grads, (t,), (TOKENS,), padding_mode=ZERO), (TOKENS, 1))
    value = slopes(value, label, normaliser, slope, first + v * WORDS, scale, softcap, CAP, WORDS)
    ct.store(chunk, (t, v), ct.astype(value, chunk.dtype))


@ct.kernel
def chunk_slope_kernel(
    products_of,
    labels,
    normalisers,
    grads,
    chunk,
    first,
    scale,
    softcap,
    CAP: ct.Constant[int],
    WORDS: ct.Constant[int],
    TILES: ct.Constant[int],
    PIECES: ct.Constant[int],
):
    """chunk: [tokens, words], the derivatives by `products_of`. A block takes a token's piece of TILES tiles."""
    t, piece = ct.bid(0) // PIECES, ct.bid(0) % PIECES
    label = ct.astype(ct.load(labels, (t,), (1,)), ct.int32)
    normaliser, slope = ct.load(normalisers, (t,), (1,)), ct.load(grads, (t,), (1,))
    for v in range(piece * TILES, min(piece * TILES + TILES, ct.cdiv(chunk.shape[1], WORDS))):
        value = ct.astype(ct.load(products_of, (t, v), (1, WORDS), padding_mode=ZERO), ct.float32)
        value = slopes(value, label, normaliser, slope, first + v * WORDS, scale, softcap, CAP, WORDS)
        ct.store(chunk, (t, v), ct.astype(value, chunk.dtype))
