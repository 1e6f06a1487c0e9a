"""Products of a few rows with a weight, bound by reading the weight: act(norm(x) @ weight.T + bias) and their kin.

The weight is the left operand of a matrix product, the rows the right one, so that a handful of rows costs what one
does. A weight's row is cut into `fold` pieces that are rows of their own, and every row of x into `fold` columns: a
tile of 64 such rows then covers few outputs and a long stretch of each, which spreads small weights over the whole GPU.
Of the product of all pieces with all columns only that of equal places counts; they are added in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgraft.cutile.plans import (
    LARGEST_EXTENT,
    Maker,
    Plan,
    contiguous,
    current,
    eager,
    extent,
    fire,
    makers,
    power_of_two,
    processors,
)
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels.act_and_mul import ACTIVATIONS, ALIASES
from kernelgraft.kernels.examples import Example, tensor
from kernelgraft.kernels.linear_forms import Form, dtype_of, form_of, laid, shape_of
from kernelgraft.kernels.linear_tiles import ABSENT, MOST_STEPS, NO_NORM, NORM_FIRST, NORM_LAST, Constants, kernel_of

MOST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Streaming:
    """What can be chosen freely for a launch; results differ by the order of sums only."""

    fold: int
    """Pieces that a row of the weight is cut into."""
    depth: int = 128
    """Elements of a piece that are multiplied at a time."""
    occupancy: int = 2
    """Blocks on a multiprocessor at a time."""
    loop: bool = False
    """Whether a block takes several tiles and keeps its columns, instead of one block a tile."""
    rows: int = 64
    """Pieces in a tile: a multiple of 64, which is what tensor cores take."""
    ahead: bool = False
    """Whether the weight is asked for before the kernel before has ended, for a launch that may overlap with it."""

    def steps(self, width: int) -> int:
        """Products from one end of a piece to the other."""
        return -(-width // (self.fold * self.depth))

    def fits(self, form: Form) -> bool:
        """Whether pieces begin where the memory accelerator can begin, and a block can hold its columns."""
        piece = form.width // self.fold
        whole = self.fold == 1 or (form.width % self.fold == 0 and piece * form.dtype.itemsize % 16 == 0)
        held = not self.loop or self.steps(form.width) <= MOST_STEPS
        few = form.count * self.fold <= MOST_COLUMNS
        return whole and held and few and self.depth <= max(64, power_of_two(piece))


def linear_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: bool = False,
    cast: str = "after_weight",
) -> torch.Tensor:
    """norm(x) @ weight.T + bias + residual for at most `MOST_ROWS` rows.

    x: [..., in], any strides; weight: [out, in] with stride 1 in the last axis; bias: [out]; residual: [..., out]; one
    dtype of float32, bfloat16, float16. norm_weight: [in], of any of these: then x is first put through an RMS norm
    with `eps`, one added to its weight with `offset`, and `cast` one of `CASTS`. Sums are float32, in a fixed order.
    Raises ValueError for more rows, and for tensors that do not fit together.
    """
    if eager(x, weight, bias, residual, norm_weight):
        return _run(x, weight, None, bias, residual, norm_weight, eps, offset, cast, None)
    return _op(x, weight, None, bias, residual, norm_weight, eps, offset, cast, None)


def gated_linear_decode(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: bool = False,
    cast: str = "after_weight",
) -> torch.Tensor:
    """activation(norm(x) @ gate_weight.T) * (norm(x) @ up_weight.T) + residual for at most `MOST_ROWS` rows.

    gate_weight, up_weight: [out, in]; without the second the first is [2 * out, in] and holds both, the gate's rows
    first. `activation`: a name of `act_and_mul.ACTIVATIONS`; its input is not rounded. Otherwise as `linear_decode`.
    """
    if eager(x, gate_weight, up_weight, residual, norm_weight):
        return _run(x, gate_weight, up_weight, None, residual, norm_weight, eps, offset, cast, activation)
    return _op(x, gate_weight, up_weight, None, residual, norm_weight, eps, offset, cast, activation)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of known shapes, strides and dtypes makes and launches."""

    shape: tuple[int, ...]
    """Of the result."""
    form: Form
    makes: tuple[Maker, ...] | None
    """What makes the result, see `makers`."""
    plan: Plan | None
    """None: nothing to launch, more than one launch, or weights whose rows overlap and have to be laid out first."""


@functools.lru_cache(maxsize=4096)
def _call(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    steps: tuple[int, ...],
    dtypes: tuple[torch.dtype | None, ...],
    device: int,
    up: Any = None,
    others: tuple[Any, ...] = (None, None, None),
    eps: float = 0.0,
    offset: bool = False,
    cast: str = "after_weight",
    activation: str | None = None,
) -> _Call:
    """All that a call needs in one look-up; the arguments of `form_of`, with the weight's strides as `steps`."""
    form = form_of(x, (weight, steps), up, others, dtypes, eps, offset, cast, activation)
    apart = [strides[0] for strides in (steps, *(() if up is None else (up[1],)))]
    reach = max(extent(weight, (step, 1)) for step in apart)
    shape = (*x[:-1], form.outputs)
    makes = makers(device, (shape, contiguous(shape), form.dtype))
    if not form.count or not form.outputs or min(apart) < form.width or reach >= LARGEST_EXTENT:
        return _Call(shape, form, makes, None)
    return _Call(shape, form, makes, plan(form, form.outputs, choose(form, device), device))


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    activation: str | None,
) -> torch.Tensor:
    device = x.get_device()
    if up is bias is residual is vector is None and activation is None:
        found = _call(x.shape, weight.shape, weight.stride(), (x.dtype, weight.dtype, None), device)
    else:
        dtypes = x.dtype, weight.dtype, dtype_of(up), dtype_of(bias), dtype_of(residual), dtype_of(vector)
        others = shape_of(bias), shape_of(residual), shape_of(vector)
        found = _call(
            x.shape, weight.shape, weight.stride(), dtypes, device, laid(up), others, eps, offset, cast,
            activation,
        )  # fmt: skip
    makes = found.makes if device >= 0 and device == current() else None
    # Torch takes sizes one by one faster than as a tuple.
    y = x.new_empty(*found.shape) if makes is None else makes[0]()
    if not x.is_contiguous():
        x = x.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    if vector is not None and not vector.is_contiguous():
        vector = vector.contiguous()
    if found.plan is not None:
        fire(found.plan, _tensors(x, weight, up, bias, residual, vector, y))
    elif y.numel():
        _split(found.form, x, weight, up, bias, residual, vector, y)
    return y


def _tensors(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    y: torch.Tensor,
) -> Any:
    """A kernel's tensors: those that are there beside the first three as one tuple, as `plan` numbers them."""
    if up is bias is residual is vector is None:
        return x, weight, y
    return x, weight, y, tuple([t for t in (up, bias, residual, vector) if t is not None])


def launch(
    streaming: Streaming,
    form: Form,
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """One call with a given configuration into y."""
    built = plan(form, form.outputs, streaming, x.get_device())
    fire(built, _tensors(x, weight, up, bias, residual, vector, y))


def _split(
    form: Form,
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """As many launches as 32-bit offsets ask for, with weights laid out."""
    device = x.get_device()
    weight = weight if weight.stride(0) >= form.width else weight.contiguous()
    if form.packed:
        weight, up = weight[: form.outputs], weight[form.outputs :]
        form = replace(form, packed=False)
    if up is not None and up.stride(0) < form.width:
        up = up.contiguous()
    target = y.view(form.count, form.outputs)
    addend = None if residual is None else residual.view(form.count, form.outputs)
    for begin, end in _ranges(form.outputs, max(weight.stride(0), 0 if up is None else up.stride(0))):
        part = replace(form, outputs=end - begin)
        built = plan(part, form.outputs, choose(part, device), device)
        other, shift = (None if t is None else t[begin:end] for t in (up, bias))
        rest = None if addend is None else addend[:, begin:end]
        fire(built, _tensors(x, weight[begin:end], other, shift, rest, vector, target[:, begin:end]))


def _ranges(outputs: int, step: int) -> Iterator[tuple[int, int]]:
    """Rows of a weight in parts that 32-bit offsets reach."""
    most = max(1, (LARGEST_EXTENT - 1) // step)
    most -= most % 128 if most > 128 else 0
    for begin in range(0, outputs, most):
        yield begin, min(begin + most, outputs)


@functools.lru_cache(maxsize=4096)
def plan(form: Form, step: int, streaming: Streaming, device: int) -> Plan:
    """The plan of a launch whose results lie `step` apart."""
    steps = streaming.steps(form.width)
    tile = streaming.rows // streaming.fold
    tiles = -(-form.outputs // tile)
    loop = streaming.loop and steps <= MOST_STEPS
    eps, offset, cast = form.norm or (0.0, False, "after_weight")
    norm = NO_NORM
    if form.norm is not None:
        # Only float16 could overflow where x is multiplied by the weight before it is normalised.
        norm = NORM_FIRST if form.dtype is torch.float16 else NORM_LAST
    given = [form.activation is not None and not form.packed, form.bias, form.residual, form.norm is not None]
    up, bias, residual, vector = (sum(given[:i]) if there else ABSENT for i, there in enumerate(given))
    constants = Constants(
        width=form.width,
        norm=norm,
        offset=offset,
        rounded=cast == "before_weight",
        gated=form.activation is not None,
        act=0 if form.activation is None else _NUMBER[form.activation],
        fast=form.dtype is not torch.float32,
        up=up,
        bias=bias,
        residual=residual,
        vector=vector,
        tile=tile,
        fold=streaming.fold,
        depth=streaming.depth,
        columns=_columns(form, streaming),
        steps=steps,
        loop=loop,
        ahead=streaming.ahead and not loop and steps <= MOST_STEPS,
        occupancy=streaming.occupancy,
    )
    grid = (min(tiles, streaming.occupancy * processors(device)) if loop else tiles,)
    return Plan(kernel_of(constants), grid, (form.count, step) if constants.bare else (form.count, step, eps))


def _columns(form: Form, streaming: Streaming) -> int:
    """Columns of a block: what tensor cores take, or a power of two for float32, which is multiplied without them.

    Sixteen of them in more than eight kept pieces take twice as long as thirty-two, for whatever reason.
    """
    columns = power_of_two(form.count * streaming.fold)
    if form.dtype is torch.float32:
        return columns
    if columns == 16 and streaming.loop and streaming.steps(form.width) > 8:
        return 32
    return max(8, columns)


_NUMBER = {name: number for number, name in enumerate(ACTIVATIONS)}
_NUMBER |= {alias: _NUMBER[name] for alias, name in ALIASES.items()}


def shape_class(form: Form) -> str:
    """What a tuned configuration holds for: sizes, the number of rows rounded up, and how many weights are read."""
    gated = "_gated" if form.activation is not None else ""
    dtype = str(form.dtype).removeprefix("torch.")
    return f"{dtype}_{power_of_two(form.count)}x{form.width}x{form.outputs}{gated}"


def choose(form: Form, device: int) -> Streaming:
    """The free choices for a call."""
    return chosen(default(form, device), "linear_decode", shape_class(form), device)


def default(form: Form, device: int) -> Streaming:
    """Choices that were measured to be good on an H200, for one row within three per cent of the best of fifty."""
    places = 4 * processors(device)  # as many blocks as lie on the GPU at a time
    if form.dtype is torch.float32:
        wanted = [Streaming(fold, 32, 4 if form.count * fold <= 4 else 2) for fold in (4, 2, 1)]
        return next((s for s in wanted if form.count * s.fold <= 8 and s.fits(form)), Streaming(1, 32, 2))
    found = []
    if form.count <= 2:
        narrow = form.outputs < 8 * processors(device) or (form.width > 4096 and 2 * form.outputs <= 8 * places)
        if form.count == 1 and narrow:
            found.append(Streaming(16, 128, 4))
        if form.count == 1 and Streaming(8).steps(form.width) <= 2:
            found.append(Streaming(8, 128, 4))
        found.append(Streaming(8, 128, 3 if form.count == 1 else 2, True))
    if form.count <= 8:
        found += [Streaming(4, 128, 2, True), Streaming(2, 128, 2)]
    elif form.outputs <= 4096:
        found += [Streaming(4, 128, 2, True)] if form.width <= 2048 else [Streaming(2, 128, 2)]
    found += [Streaming(1, 128, 2), Streaming(1, 64, 2)]
    return next((s for s in found if s.fits(form)), Streaming(1, 64, 2))


def space(form: Form, device: int = -1) -> list[Streaming]:
    """Sensible choices for a call, the default first."""
    depths = (128, 256, 64) if form.dtype.itemsize == 2 else (32, 64)
    modes = ((3, True), (4, False), (2, True), (2, False), (1, True), (6, False))
    wanted = [
        default(form, device),
        *(Streaming(fold, 128, *mode) for fold in (8, 16, 4, 2) for mode in modes[:3]),
        *(Streaming(fold, depth, *mode) for fold in (8, 16, 4, 2, 1) for depth in depths for mode in modes),
    ]
    return [s for s in dict.fromkeys(wanted) if s.fits(form)][:40] or [wanted[0]]


_op = torch.library.custom_op("kernelgraft::linear_decode", _run, mutates_args=())


@_op.register_fake
def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    activation: str | None,
) -> torch.Tensor:
    outputs = weight.shape[0] // 2 if activation is not None and up is None else weight.shape[0]
    return x.new_empty((*x.shape[:-1], outputs))


def examples() -> list[Example]:
    """Calls with the shapes of real models, and odd ones."""

    def linear(rows: int, outputs: int, width: int, **more: Any) -> Any:
        def run(device: str) -> torch.Tensor:
            extra: Any = {name: tensor(device, *shape) for name, shape in more.items()}
            return linear_decode(tensor(device, rows, 1, width), tensor(device, outputs, width), **extra)

        return run

    def gated(rows: int, outputs: int, width: int, packed: bool, norm: bool, dtype: torch.dtype) -> Any:
        def run(device: str) -> torch.Tensor:
            weights: Any = [tensor(device, outputs * (1 + packed), width, dtype=dtype) for _ in range(2 - packed)]
            vector = tensor(device, width, dtype=dtype) if norm else None
            return gated_linear_decode(tensor(device, rows, 1, width, dtype=dtype), *weights, norm_weight=vector)

        return run

    half, single = torch.float16, torch.float32
    return [
        Example("6144 of 4096", linear(1, 6144, 4096)),
        Example("3072 of 2048, normalised", linear(1, 3072, 2048, norm_weight=(2048,))),
        Example("2048 of 8192, residual, 8 rows", linear(8, 2048, 8192, residual=(8, 1, 2048))),
        Example("1000 of 1000, bias, 16 rows", linear(16, 1000, 1000, bias=(1000,)), tune=False),
        Example("gated 8192 of 2048, normalised", gated(1, 8192, 2048, False, True, torch.bfloat16)),
        Example("gated 257 of 96, packed, normalised, float16", gated(3, 257, 96, True, True, half), tune=False),
        Example("gated 257 of 100, float32", gated(2, 257, 100, False, False, single), tune=False),
    ]
