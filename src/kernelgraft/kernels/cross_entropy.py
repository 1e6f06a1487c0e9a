"""Cross entropy of the words that a model's head gives, from hidden states, without a tensor of all logits.

Forward: logits are computed chunk by chunk and only their running maximum and sum of exponentials are kept; each
token's loss is that normaliser less its label's logit. Backward: chunk after chunk of the vocabulary, the derivatives
by the logits are computed anew from the normalisers into a buffer, and torch multiplies them with the weight and the
hidden states; each chunk gives its own rows of the weight's gradient, and the hidden states' gradient is summed in
float32. A mean or a sum whose gradients are wanted comes with them at once instead, each logit computed once: see
`cross_entropy_once`.

Memory beside inputs, gradients and results: forward, 8 bytes for each token and part of the vocabulary, and
`chunk_bytes` with `fused` off; backward, at the most twice `chunk_bytes` (an eighth of all logits in float32, between
`CHUNK_BYTES` and `LARGEST_CHUNK`, or 128 words) and the hidden states' gradient in float32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kernelgraft.cutile.plans import (
    LARGEST_EXTENT,
    Plan,
    eager,
    extent,
    fire,
    hinted,
    power_of_two,
    processors,
)
from kernelgraft.cutile.tuning import chosen, using
from kernelgraft.kernels import cross_entropy_once as at_once
from kernelgraft.kernels import cross_entropy_tiles as tiles
from kernelgraft.kernels.cross_entropy_chunks import add_product, cap, product, shape_class, shares, spans
from kernelgraft.kernels.examples import Example, tensor

CHUNK_BYTES, LARGEST_CHUNK = 2**26, 2**28
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, slots=True)
class Choice:
    """What can be chosen freely for the launches."""

    fused: bool = False
    """Logits by our kernel, which keeps them; else by torch, chunk by chunk through memory, and read from there."""
    tokens: int = 128
    words: int = 256
    depth: int = 64
    """The tile of a product: tokens, words, and channels at a time."""
    chunk_bytes: int = CHUNK_BYTES
    occupancy: int | None = None
    ctas: int | None = None
    worker_warps: int | None = None

    def within(self, shape: tuple[int, int, int]) -> Choice:
        """The same with tiles no larger than (tokens, words, channels) need."""
        sizes = (self.tokens, self.words, self.depth)
        tokens, words, depth = (min(a, max(16, power_of_two(b))) for a, b in zip(sizes, shape, strict=True))
        return replace(self, tokens=min(self.tokens, tokens), words=words, depth=depth)

    @property
    def tile(self) -> tuple[int, int, int, bool]:
        """The kernels' constants."""
        return self.tokens, self.words, self.depth, self.tokens < 64

    def hinted(self, kernel: Any) -> Any:
        """The kernel with the compiler hints."""
        return tiles.with_ctas(hinted(kernel, self.occupancy, self.worker_warps), self.ctas)


def cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Cross entropy of softcap · tanh(scale · hidden · weightᵀ / softcap) against labels, in float32.

    hidden: [..., channels], weight: [words, channels], both of one dtype (float32, bfloat16, float16) and any strides;
    labels: [...], int64 or int32, numbers of words or `ignore_index`. `reduction`: one of `REDUCTIONS`; the mean is
    over the labels that are not ignored, NaN if there are none. Gradients flow to hidden and weight; those of a mean or
    a sum are computed in this call, unless they are float16. Labels outside the vocabulary are not noticed.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"the reduction `{reduction}` is none of {', '.join(REDUCTIONS)}")
    if hidden.dtype is not weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight {weight.dtype}: both must be of one dtype")
    flat = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    numbers = ignore_index, scale, softcap
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    if any(wanted) and reduction != "none" and at_once.fits(hidden.dtype):
        total: torch.Tensor = _once_op(flat, weight, labels.reshape(-1), *numbers, reduction == "mean", *wanted)[0]
        return total
    run = _run if eager(hidden, weight, labels) else _op
    losses, _ = run(flat, weight, labels.reshape(-1), *numbers)
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


# Forward


@dataclass(frozen=True, slots=True)
class Forward:
    """The launches for tensors of one shape."""

    normaliser: Plan | None
    """None if torch computes the products, chunk by chunk."""
    chunks: tuple[tuple[int, int, Plan], ...]
    """Else: of each chunk the first word, the number of words, and what reads its products."""
    parts: int
    loss: Plan


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = hidden.shape[0]
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    normalisers = torch.empty_like(losses)
    if tokens:
        shape, fits = (tokens, *weight.shape), _fits(hidden, weight)
        plans = _plans(shape, hidden.dtype, hidden.get_device(), ignore_index, scale, softcap, fits)
        _forward(hidden, weight, labels, losses, normalisers, plans)
    return losses, normalisers


def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    losses: torch.Tensor,
    normalisers: torch.Tensor,
    plans: Forward,
) -> None:
    partial = torch.empty((2, plans.parts, hidden.shape[0]), dtype=torch.float32, device=hidden.device)
    if plans.normaliser is not None:
        fire(plans.normaliser, (hidden, weight, partial))
    for first, count, plan in plans.chunks:
        fire(plan, (product(hidden, weight[first : first + count].t()), partial))
    fire(plans.loss, (hidden, weight, labels, partial, losses, normalisers))


@functools.lru_cache(maxsize=1024)
def _plans(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: int,
    ignored: int,
    scale: float,
    softcap: float | None,
    fits: bool,
    choice: Choice | None = None,
) -> Forward:
    tokens, words, channels = shape
    choice = (choice or choose(shape, dtype, device, False)).within(shape)
    numbers, how = (scale, softcap or 0.0), cap(softcap, dtype)
    chunks: list[tuple[int, int, Plan]] = []
    normaliser = None
    if choice.fused and fits:
        across, number = -(-tokens // choice.tokens), -(-words // choice.words)
        each = -(-number // max(1, processors(device) // across))
        parts = -(-number // each)
        constants = (how, each, words % choice.words == 0, *choice.tile)
        kernel = choice.hinted(tiles.normaliser_kernel)
        normaliser = Plan(kernel, (across * parts,), (*numbers, *constants))
    else:
        parts = 0
        for first, count in spans(tokens, words, choice.chunk_bytes):
            cut = shares(tokens, count, device)
            plan = Plan(tiles.chunk_normaliser_kernel, (tokens * cut[2],), (parts, *numbers, how, *cut))
            chunks.append((first, count, plan))
            parts += cut[2]
    rows = 8 if tokens >= 1024 else 1
    shapes = (power_of_two(parts), rows, min(256, power_of_two(channels)))
    loss = Plan(tiles.loss_kernel, (-(-tokens // rows),), (*numbers, ignored, how, *shapes))
    return Forward(normaliser, tuple(chunks), parts, loss)


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether kernels that count in int32 can take these tensors; torch's products take any."""
    return all(extent(x.shape, x.stride()) < LARGEST_EXTENT for x in tensors)


# Backward


@dataclass(frozen=True, slots=True)
class Backward:
    """The launches for tensors of one shape."""

    fused: bool
    """Whether the launches compute the products, or are given them."""
    chunks: tuple[tuple[int, int, Plan], ...]
    """Of each chunk the first word, the number of words, and what makes the derivatives by its products."""


def _slopes(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    normalisers: torch.Tensor,
    ignore_index: int,
    scale: float,
    softcap: float | None,
    of_hidden: bool,
    of_weight: bool,
) -> list[torch.Tensor]:
    """The gradients of hidden and of weight, those that are wanted."""
    grad = torch.where(labels == ignore_index, 0.0, grad.float())
    by_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if of_hidden else None
    by_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if of_weight else None
    shape = (hidden.shape[0], *weight.shape)
    if not hidden.shape[0]:
        return [x.zero_().to(hidden.dtype) for x in (by_hidden, by_weight) if x is not None]
    plans = _backward_plans(shape, hidden.dtype, hidden.get_device(), scale, softcap, _fits(hidden, weight))
    space = torch.empty(hidden.shape[0], plans.chunks[0][1], dtype=hidden.dtype, device=hidden.device)
    for first, count, plan in plans.chunks:
        chunk, rows = space[:, :count], weight[first : first + count]
        if plans.fused:
            fire(plan, (hidden, rows, labels, normalisers, grad, chunk))
        else:
            fire(plan, (product(hidden, rows.t()), labels, normalisers, grad, chunk))
        if by_weight is not None:
            torch.mm(chunk.t(), hidden, out=by_weight[first : first + count])
        if by_hidden is not None:
            add_product(by_hidden, chunk, rows)
    return [x.to(hidden.dtype) for x in (by_hidden, by_weight) if x is not None]


@functools.lru_cache(maxsize=1024)
def _backward_plans(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: int,
    scale: float,
    softcap: float | None,
    fits: bool,
    choice: Choice | None = None,
) -> Backward:
    tokens, words, _ = shape
    choice = (choice or choose(shape, dtype, device, True)).within(shape)
    chunks = []
    for first, count in spans(tokens, words, choice.chunk_bytes):
        numbers = (first, scale, softcap or 0.0, cap(softcap, dtype))
        if choice.fused and fits:
            grid = (-(-tokens // choice.tokens) * -(-count // choice.words),)
            plan = Plan(choice.hinted(tiles.slope_kernel), grid, (*numbers, *choice.tile))
        else:
            cut = shares(tokens, count, device)
            plan = Plan(tiles.chunk_slope_kernel, (tokens * cut[2],), (*numbers, *cut))
        chunks.append((first, count, plan))
    return Backward(choice.fused and fits, tuple(chunks))


# Both


def _once(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    scale: float,
    softcap: float | None,
    mean: bool,
    of_hidden: bool,
    of_weight: bool,
) -> list[torch.Tensor]:
    """The sum or the mean of the losses, and the gradients of hidden and of weight, those that are wanted."""
    inputs, numbers, wanted = (hidden, weight, labels), (ignore_index, scale, softcap), (of_hidden, of_weight)
    found = at_once.with_gradients(*inputs, *numbers, mean, *wanted)
    if found is not None:
        return found
    losses, normalisers = _run(*inputs, *numbers)
    up, total = torch.ones_like(losses), losses.sum()
    if mean:
        number = (labels != ignore_index).sum()
        up, total = up / number, total / number
    return [total, *_slopes(up, *inputs, normalisers, *numbers, *wanted)]


# Choices


def choose(shape: tuple[int, int, int], dtype: torch.dtype, device: int, backward: bool) -> Choice:
    """The free choices for one pass over (tokens, words, channels)."""
    kernel = "cross_entropy_backward" if backward else "cross_entropy"
    return chosen(default(shape, backward), kernel, shape_class(shape, dtype), device)


def default(shape: tuple[int, int, int], backward: bool) -> Choice:
    """The choice where nothing is tuned: backward each chunk reads and writes a sum, so they are few."""
    eighth = power_of_two(shape[0] * shape[1]) * 4 // 8 if backward else 0
    return Choice(chunk_bytes=min(LARGEST_CHUNK, max(CHUNK_BYTES, eighth)))


def space(shape: tuple[int, int, int], dtype: torch.dtype, backward: bool = False) -> list[Choice]:
    """Configurations worth trying, the default first."""
    first = default(shape, backward)
    few = max(8, power_of_two(shape[0]))
    if dtype is torch.float32:
        found = [Choice(True, *size) for size in ((64, 64, 32), (128, 64, 32), (128, 128, 16))]
    elif shape[0] <= 32:
        sizes = [(few, words, depth) for words in (64, 128, 256) for depth in (64, 128, 256) if words * depth < 2**15]
        found = [Choice(True, *size) for size in sizes]
    else:
        found = [Choice(True, 128, 256, 64), Choice(True, 128, 128, 64)]
    found = [replace(choice, chunk_bytes=first.chunk_bytes) for choice in found]
    found += [Choice(False, chunk_bytes=2**n) for n in (26, 27, 28)]
    return [first, *(c for c in found if c != first)]


# The op


_op = torch.library.custom_op("kernelgraft::cross_entropy", _run, mutates_args=())
_slopes_op = torch.library.custom_op("kernelgraft::cross_entropy_backward", _slopes, mutates_args=())


@_op.register_fake
def _fake(hidden: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32), hidden.new_empty(
        hidden.shape[0], dtype=torch.float32
    )


@_slopes_op.register_fake
def _fake_slopes(grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x, wanted in ((hidden, rest[-2]), (weight, rest[-1])) if wanted]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, weight, labels, *ctx.words = inputs
    ctx.save_for_backward(hidden, weight, labels, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    wanted = ctx.needs_input_grad[:2]
    found = iter(_slopes_op(grad, *ctx.saved_tensors, *ctx.words, *wanted))
    return *(next(found) if w else None for w in wanted), None, None, None, None


_op.register_autograd(_backward, setup_context=_setup)

_once_op = torch.library.custom_op("kernelgraft::cross_entropy_once", _once, mutates_args=())


@_once_op.register_fake
def _fake_once(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    total = hidden.new_empty((), dtype=torch.float32)
    return [total, *(x.new_empty(x.shape) for x, wanted in ((hidden, rest[-2]), (weight, rest[-1])) if wanted)]


def _setup_once(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.wanted = inputs[-2:]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward_once(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    # Made anew, as the graph may be kept and gone through again.
    found = iter([x * grads[0] for x in ctx.saved_tensors])
    return *(next(found) if wanted else None for wanted in ctx.wanted), *[None] * 7


_once_op.register_autograd(_backward_once, setup_context=_setup_once)


def examples() -> list[Example]:
    """Training and scoring with the heads of real models; few tokens; a softcap."""

    def of(
        tokens: int,
        words: int,
        channels: int,
        dtype: torch.dtype = torch.bfloat16,
        grad: bool = True,
        fused: bool = False,
        once: bool = False,
        **options: Any,
    ) -> Callable[[str], Any]:
        def run(device: str) -> Any:
            if not fused:
                return plain(device)
            key = shape_class((tokens, words, channels), dtype)
            chosen_ones = {(k, key): asdict(Choice(fused=True)) for k in ("cross_entropy", "cross_entropy_backward")}
            with using(chosen_ones, sys.modules[__name__]):
                return plain(device)

        def plain(device: str) -> Any:
            hidden = tensor(device, tokens, channels, dtype=dtype)
            weight = tensor(device, words, channels, dtype=dtype) * channels**-0.5
            labels = torch.randint(0, words, (tokens,), device=device)
            if not grad:
                return cross_entropy(hidden, weight, labels, **options)
            if once:
                return _once(hidden, weight, labels, -100, 1.0, options.get("softcap"), True, True, True)
            losses, normalisers = _run(hidden, weight, labels, -100, 1.0, options.get("softcap"))
            numbers = (-100, 1.0, options.get("softcap"), True, True)
            return _slopes(losses, hidden, weight, labels, normalisers, *numbers)

        return run

    return [
        Example("4096 x 128256 x 2048", of(4096, 128256, 2048)),
        Example("4096 x 128256 x 2048, each logit once", of(4096, 128256, 2048, once=True)),
        Example("1024 x 151936 x 1024", of(1024, 151936, 1024)),
        Example("1024 x 151936 x 1024, logits in our kernel", of(1024, 151936, 1024, fused=True), tune=False),
        Example("512 x 262144 x 1152, softcap", of(512, 262144, 1152, softcap=30.0)),
        Example("16 x 128256 x 2048, no gradient", of(16, 128256, 2048, grad=False)),
        Example("57 x 1021 x 200 float32", of(57, 1021, 200, torch.float32), tune=False),
    ]
