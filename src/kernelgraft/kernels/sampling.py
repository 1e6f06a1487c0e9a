"""Top-k sampling from logits: softcap, temperature, the k largest, the nucleus among them, one draw for each row.

The draw is by given uniform numbers u: of the kept tokens, ordered by falling probability (equal ones by rising index),
the one is taken whose interval of the cumulative probability holds u. So equal inputs give equal tokens.

Two launches. The first finds the k largest of each part of a row, the second the k largest of those and draws. Both
find the k-th largest value bit by bit: logits are read as integers of the same order, and a count of how many are not
below a candidate decides each bit. NaN counts as infinity.
"""

# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import (
    LARGEST_GRID,
    Maker,
    Plan,
    contiguous,
    current,
    eager,
    extent,
    fire,
    hinted,
    makers,
    power_of_two,
)
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels.access import GATHER, TMA
from kernelgraft.kernels.argmax import LARGEST_EXTENT, MAXIMUM
from kernelgraft.kernels.examples import Example, tensor

LARGEST_K = 128
LARGEST_CANDIDATES = 16384
"""Of the second launch; a part is as large as it takes to stay below."""
INFINITY = float("inf")
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """What can be chosen freely for a launch."""

    part: int = 4096
    """Elements of a part, at least."""
    access: int = TMA
    """How a row is read: see `kernelgraft.kernels.access`."""
    worker_warps: int | None = None
    merge_warps: int | None = None
    """Of the second launch."""


def least_rank(HALF):
    """What no value has as its rank."""
    if HALF:
        return -32768
    else:
        return -(2**31)


def rank_of(x, HALF):
    """Integers that are ordered as the values of a tile are: 16 bits of a half type, 32 of float32."""
    value = ct.astype(x, ct.float32)
    value = ct.where(ct.isnan(value), INFINITY, value)
    value = ct.astype(ct.where(value == 0.0, 0.0, value), x.dtype)
    if HALF:
        bits = ct.astype(ct.bitcast(value, ct.int16), ct.int32)
        return bits ^ ((bits >> 31) & 32767)
    else:
        bits = ct.bitcast(value, ct.int32)
        return bits ^ ((bits >> 31) & MAXIMUM)


def value_of(rank, dtype, HALF):
    """The values in float32 that `rank_of` was given."""
    if HALF:
        bits = ct.astype(rank ^ ((rank >> 31) & 32767), ct.int16)
        return ct.astype(ct.bitcast(bits, dtype), ct.float32)
    else:
        return ct.bitcast(rank ^ ((rank >> 31) & MAXIMUM), ct.float32)


def largest(rank, K, HALF):
    """Where each of the K largest of a tile [1, N] goes, 0 to K - 1, and which they are; of equal ones the first."""
    bits = 31
    if HALF:
        bits = 15
    bound = ct.where(ct.sum(ct.where(rank >= 0, 1, 0)) >= K, 0, least_rank(HALF))
    for step in range(bits):
        higher = bound + (1 << (bits - 1 - step))
        bound = ct.where(ct.sum(ct.where(rank >= higher, 1, 0)) >= K, higher, bound)
    above = rank > bound
    equal = rank == bound
    # Two counts in one: those above the bound in the lower half, those equal to it in the upper.
    counts = ct.cumsum(ct.where(above, 1, ct.where(equal, 65536, 0)), axis=1)
    place = ct.where(above, counts & 65535, ct.sum(ct.where(above, 1, 0)) + (counts >> 16)) - 1
    return place, above | (equal & (place < K))


def top_k_of(x, found, index, K, PARTS, PART, HALF, ACCESS):
    """The largest of one part of a row."""
    row, part = index // PARTS, index % PARTS
    token = ct.reshape(ct.arange(PART, dtype=ct.int32), (1, PART)) + part * PART
    if ACCESS >= GATHER:
        tile = ct.gather(x, (row, token), padding_value=0)
    else:
        tile = ct.load(x, (row, part), (1, PART), padding_mode=ct.PaddingMode.ZERO, allow_tma=ACCESS == TMA)
    rank = ct.where(token < x.shape[1], rank_of(tile, HALF), least_rank(HALF))
    place, taken = largest(rank, K, HALF)
    ct.scatter(found, (0, row, part, place), rank, mask=taken)
    ct.scatter(found, (1, row, part, place), token, mask=taken)


@ct.kernel
def top_k_kernel(
    x,
    found,
    K: ct.Constant[int],
    PARTS: ct.Constant[int],
    PART: ct.Constant[int],
    HALF: ct.Constant[bool],
    LOOP: ct.Constant[bool],
    ACCESS: ct.Constant[int],
):
    """x: [rows, width]; found: [2, rows, PARTS + 1, K], ranks and tokens of the K largest of each part of a row."""
    if LOOP:
        for index in range(ct.bid(0), x.shape[0] * PARTS, ct.num_blocks(0)):
            top_k_of(x, found, index, K, PARTS, PART, HALF, ACCESS)
    else:
        top_k_of(x, found, ct.bid(0), K, PARTS, PART, HALF, ACCESS)


@ct.kernel
def draw_kernel(
    x,
    found,
    u,
    y,
    temperature,
    top_p,
    softcap,
    K: ct.Constant[int],
    PARTS: ct.Constant[int],
    TILE: ct.Constant[int],
    BEST: ct.Constant[int],
    CAPPED: ct.Constant[bool],
    NUCLEUS: ct.Constant[bool],
    HALF: ct.Constant[bool],
):
    """found: as `top_k_kernel` leaves it, its last part takes the K largest of all; u, y: [rows].

    x is here for its dtype only. TILE holds the candidates of all parts, BEST holds K.
    """
    row = ct.bid(0)
    last = 0
    if PARTS > 1:
        last = PARTS
        places = ct.reshape(ct.arange(TILE, dtype=ct.int32), (1, TILE))
        part, slot, inside = places // K, places % K, places < PARTS * K
        rank = ct.gather(found, (0, row, part, slot), mask=inside, padding_value=least_rank(HALF))
        token = ct.gather(found, (1, row, part, slot), mask=inside)
        place, taken = largest(rank, K, HALF)
        ct.scatter(found, (0, row, PARTS, place), rank, mask=taken)
        ct.scatter(found, (1, row, PARTS, place), token, mask=taken)
    slot = ct.reshape(ct.arange(BEST, dtype=ct.int32), (1, BEST))
    real = slot < K
    rank = ct.gather(found, (0, row, last, slot), mask=real)
    token = ct.gather(found, (1, row, last, slot), mask=real)
    score = value_of(rank, x.dtype, HALF)
    if CAPPED:
        score = ct.tanh(score / softcap) * softcap
    score = ct.where(real, score / temperature, NEGATIVE_INFINITY)
    top = ct.max(score)
    weight = ct.where(real, ct.where(score == top, 1.0, ct.exp(score - top)), 0.0)
    # What comes before each candidate: [1, BEST] against [BEST, 1].
    other_rank, other_token = ct.reshape(rank, (BEST, 1)), ct.reshape(token, (BEST, 1))
    before = (other_rank > rank) | ((other_rank == rank) & (other_token < token))
    passed = ct.sum(ct.where(before, ct.reshape(weight, (BEST, 1)), 0.0), axis=0, keepdims=True)
    if NUCLEUS:
        weight = ct.where(passed < top_p * ct.sum(weight), weight, 0.0)
    goal = ct.load(u, (row,), (1,)) * ct.sum(weight)
    reached = (weight > 0.0) & (passed <= ct.reshape(goal, (1, 1)))
    nearest = ct.max(ct.where(reached, passed, -1.0))
    drawn = ct.min(ct.where(reached & (passed == nearest), token, MAXIMUM))
    ct.store(y, (row,), ct.astype(drawn, ct.int64))


def sample_top_k(
    logits: torch.Tensor,
    u: torch.Tensor,
    *,
    k: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """A token of each row: int64 [rows].

    logits: [rows, vocabulary], any strides; float32, bfloat16 or float16. u: float32 [rows], in [0, 1). The logits are
    capped to `softcap` · tanh(logits / `softcap`), divided by the temperature (above 0), cut to the `k` largest (1 to
    `LARGEST_K`), then to the fewest whose probability reaches `top_p` (above 0). Arithmetic is float32.
    """
    if not 0 < k <= LARGEST_K:
        raise ValueError(f"k is {k}, served are 1 to {LARGEST_K}")
    if temperature <= 0.0 or top_p <= 0.0 or (softcap is not None and softcap <= 0.0):
        raise ValueError("temperature, top_p and softcap are above 0")
    run = _run if eager(logits, u) else _op
    return run(logits, u, k, temperature, top_p, softcap)


def _run(
    logits: torch.Tensor, u: torch.Tensor, k: int, temperature: float, top_p: float, softcap: float | None
) -> torch.Tensor:
    rows, device, words = logits.shape[0], logits.get_device(), (temperature, top_p, softcap)
    if rows and device >= 0 and device == current():
        steps = _ready(logits.shape, logits.stride(), logits.dtype, device, k, words)
        makes = None if steps is None else _makes(rows, steps.found, device)
        if steps is not None and makes is not None:
            y, found = makes[0](), makes[1]()
            fire(steps.first, (logits, found))
            fire(steps.second, (logits, found, u, y))
            return y
    y = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _launch(logits, u, y, k, words)
    return y


@functools.lru_cache(maxsize=4096)
def _makes(rows: int, found: tuple[int, ...], device: int) -> tuple[Maker, ...] | None:
    """What makes the tokens and what is between the launches."""
    return makers(device, ((rows,), (1,), torch.int64), (found, contiguous(found), torch.int32))


@dataclass(frozen=True, slots=True)
class Steps:
    """The launches for tensors of one shape."""

    first: Plan
    second: Plan
    found: tuple[int, int, int, int]
    """Shape of what is between them."""


def _launch(
    logits: torch.Tensor, u: torch.Tensor, y: torch.Tensor, k: int, words: tuple[float, float, float | None]
) -> None:
    rows, steps = logits.shape[0], _ready(logits.shape, logits.stride(), logits.dtype, logits.get_device(), k, words)
    if steps is None:
        if rows == 1:
            raise ValueError(f"rows of {logits.shape[1]} logits are not served")
        for part in (slice(0, rows // 2), slice(rows // 2, rows)):
            _launch(logits[part], u[part], y[part], k, words)
        return
    found = torch.empty(steps.found, dtype=torch.int32, device=logits.device)
    fire(steps.first, (logits, found))
    fire(steps.second, (logits, found, u, y))


def choose(rows: int, width: int, device: int) -> Choice:
    """The free choices for rows of that width."""
    return chosen(Choice(), "sampling", shape_class(rows, width), device)


def shape_class(rows: int, width: int) -> str:
    """The class of shapes that one tuned configuration serves."""
    return f"{min(power_of_two(rows), 64)}x{power_of_two(width)}"


def space(rows: int, width: int) -> list[Choice]:
    """Configurations worth trying, the default first."""
    found = [
        Choice(part, TMA, warps, merge)
        for part in (1024, 2048, 4096, 8192)
        for warps, merge in ((None, None), (8, None), (8, 8))
    ]
    found += [Choice(part, TMA, 4, 8) for part in (2048, 4096)]
    found += [Choice(part, GATHER) for part in (2048, 4096)]
    return [Choice(), *(c for c in found if c != Choice())]


@functools.lru_cache(maxsize=4096)
def _ready(
    shape: tuple[int, int],
    strides: tuple[int, int],
    dtype: torch.dtype,
    device: int,
    k: int,
    words: tuple[float, float, float | None],
    choice: Choice | None = None,
) -> Steps | None:
    rows, width = shape
    if not width:
        raise ValueError("there is no token to choose from")
    choice, k = choice or choose(rows, width, device), min(k, width)
    part = max(min(choice.part, power_of_two(width)), power_of_two(k))
    while -(-width // part) * k > LARGEST_CANDIDATES:
        part *= 2
    parts = -(-width // part)
    if max(extent(shape, strides), rows * width, 2 * rows * (parts + 1) * k) >= LARGEST_EXTENT or part > 32768:
        return None
    half = dtype is not torch.float32
    kernel = hinted(top_k_kernel, None, choice.worker_warps)
    grid = (min(rows * parts, LARGEST_GRID),)
    first = Plan(kernel, grid, (k, parts, part, half, grid[0] < rows * parts, choice.access))
    temperature, top_p, softcap = words
    constants = (k, parts, power_of_two(parts * k), power_of_two(k), softcap is not None, top_p < 1.0, half)
    numbers = (temperature, top_p, 0.0 if softcap is None else softcap)
    second = Plan(hinted(draw_kernel, None, choice.merge_warps), (rows,), (*numbers, *constants))
    return Steps(first, second, (2, rows, parts + 1, k))


_op = torch.library.custom_op("kernelgraft::sample_top_k", _run, mutates_args=())


@_op.register_fake
def _fake(
    logits: torch.Tensor, u: torch.Tensor, k: int, temperature: float, top_p: float, softcap: float | None
) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def examples() -> list[Example]:
    """One row and batches of the vocabularies of real models."""

    def of(rows: int, width: int, dtype: torch.dtype = torch.float32, **words: Any) -> Callable[[str], Any]:
        def run(device: str) -> torch.Tensor:
            u = torch.rand(rows, device=device)
            return sample_top_k(tensor(device, rows, width, dtype=dtype), u, **words)

        return run

    return [
        Example("1 x 128256, k 50", of(1, 128256, k=50)),
        Example("32 x 128256 bfloat16, k 50, p 0.9", of(32, 128256, torch.bfloat16, k=50, top_p=0.9, temperature=0.7)),
        Example("1 x 262144, k 64, softcap", of(1, 262144, k=64, softcap=30.0)),
        Example("8 x 151936 float16, k 20", of(8, 151936, torch.float16, k=20, top_p=0.8), tune=False),
        Example("3 x 50, k 50", of(3, 50, k=50, top_p=0.95), tune=False),
    ]
