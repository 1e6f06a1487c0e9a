"""RMS norm of each head of q and k, then rotary position embedding, in one launch, out of place.

Every head is normed over its own channels with the weight of q or of k, rounded as the norm alone rounds it, and turned
as `rope` turns it. Gradients are computed by torch from the formulas in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.cutile.plans import (
    LARGEST_EXTENT,
    Maker,
    Plan,
    Tuning,
    contiguous,
    current,
    eager,
    extent,
    fire,
    makers,
    power_of_two,
)
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels import rope
from kernelgraft.kernels.access import LOAD, TMA, fitting
from kernelgraft.kernels.examples import Example
from kernelgraft.kernels.qk_norm_rope_tiles import FLOAT32, OF_INPUT, OF_WEIGHT, qk_norm_rope_kernel
from kernelgraft.kernels.rms_norm import gradients, rounding
from kernelgraft.kernels.rope_gradient import untwist

MEMORY = ("heads", "length")
"""Which of the two axes is the outer one in the results' memory."""


@dataclass(frozen=True, slots=True)
class Choice(Tuning):
    """What can be chosen freely for a launch; a tile's elements are counted as pairs of channels."""

    apart: bool = False
    """Whether q and k have blocks of their own; else a block takes some heads of both."""
    rows: int | None = None
    """Rows of a tile, which then has the fewer heads; None: several only where one alone would be too little work."""


SMALL = Choice(elements=256, access=LOAD, apart=True)
LARGE = Choice(elements=2048, access=LOAD)
SMALL_ELEMENTS = 2**20
"""Up to that many elements of q, `SMALL` holds, `LARGE` beyond."""
ENOUGH_TILES = 4096
"""Rows are put together into one tile only as far as that many tiles are left."""


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    row_axis: int = 1,
    offset: bool = False,
    cast: str = "before_weight",
    round_offset: bool = False,
    divide: bool = False,
    rotary_dim: int | None = None,
    last: bool = False,
    pairs_in: str = "half",
    pairs_out: str = "half",
    table: str = "full",
    compute: str = "input",
    keep: bool = True,
    memory: str = "heads",
) -> tuple[torch.Tensor, ...]:
    """q and, if given, k, their heads normed and turned: a tuple of new tensors [batch, heads, length, channels].

    q, k: [batch, length, heads, channels], or [batch, heads, length, channels] with `row_axis=2`, any strides, of one
    dtype; q_weight, k_weight: [channels], of one dtype, or both None; cos, sin: [1 or batch, length, values]; all
    float32, bfloat16 or float16. `offset`, `cast`, `round_offset`, `divide` as in `rms_norm`, the other words as in
    `rope`; `keep` gives the norm's dtype, otherwise the one that torch promotes it and the tables to. `memory`: the
    results are contiguous (`heads`) or contiguous as [batch, length, heads, channels] (`length`).
    """
    words = (
        row_axis, offset, cast, round_offset, divide, rotary_dim, last, pairs_in, pairs_out, table, compute, keep,
        memory,
    )  # fmt: skip
    if eager(q, k, q_weight, k_weight, cos, sin):
        return _launched(q, k, q_weight, k_weight, cos, sin, eps, words)
    return tuple(_op(q, k, q_weight, k_weight, cos, sin, eps, *words))


def _run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    row_axis: int,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
    rotary_dim: int | None,
    last: bool,
    pairs_in: str,
    pairs_out: str,
    table: str,
    compute: str,
    keep: bool,
    memory: str,
) -> list[torch.Tensor]:
    words = (
        row_axis, offset, cast, round_offset, divide, rotary_dim, last, pairs_in, pairs_out, table, compute, keep,
        memory,
    )  # fmt: skip
    return list(_launched(q, k, q_weight, k_weight, cos, sin, eps, words))


@functools.lru_cache(maxsize=1024)
def _setting(x: torch.dtype, weight: torch.dtype | None, table: torch.dtype, words: tuple[Any, ...]) -> Setting:
    row_axis, offset, cast, round_offset, divide, turned, last, *rest = words
    pairs_in, pairs_out, values, compute, keep, memory = rest
    how, norm = rounding(cast, x, weight)
    wide = compute == "float32"
    return Setting(
        row_axis=row_axis,
        offset=offset,
        round_offset=round_offset,
        rounding=how,
        divide=divide,
        rounded=OF_INPUT if norm is x else OF_WEIGHT if norm is weight else FLOAT32,
        turned=turned,
        last=last,
        pairs_in=rope.PAIRS.index(pairs_in),
        pairs_out=rope.PAIRS.index(pairs_out),
        table=rope.TABLES.index(values),
        round_products=not wide and norm is table and norm in rope.HALF,
        out_axes={"heads": (1, 2), "length": (2, 1)}[memory],
        dtype=norm if keep else torch.promote_types(torch.float32 if wide else norm, table),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """All that the keywords and dtypes of a call decide."""

    row_axis: int
    offset: bool
    round_offset: bool
    rounding: int
    divide: bool
    rounded: int
    turned: int | None
    last: bool
    pairs_in: int
    pairs_out: int
    table: int
    round_products: bool
    out_axes: tuple[int, int]
    """Axes of the heads and of the length in the results' memory."""
    dtype: torch.dtype

    def span(self, width: int) -> tuple[int, int, int]:
        """Where the turned channels begin, how many they are, and where the others begin."""
        turned = width if self.turned is None else self.turned
        return (width - turned, turned, 0) if self.last else (0, turned, turned)

    def memory(self, x: Sequence[int]) -> tuple[int, ...]:
        """The shape in memory of the result for a tensor of this shape."""
        found = [x[0], 0, 0, x[3]]
        found[self.out_axes[0]], found[self.out_axes[1]] = x[3 - self.row_axis], x[self.row_axis]
        return tuple(found)


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of known shapes and dtypes makes and launches."""

    plan: Plan | None
    """None if there is nothing to launch or more than one launch."""
    setting: Setting
    shapes: tuple[tuple[int, ...], ...]
    """Of the results in memory."""
    makes: tuple[Maker, ...] | None
    """What makes the results, see `makers`."""


@functools.lru_cache(maxsize=4096)
def _call(
    q: tuple[int, ...],
    q_strides: tuple[int, ...],
    k: tuple[int, ...] | None,
    k_strides: tuple[int, ...] | None,
    x: torch.dtype,
    weight: torch.dtype | None,
    table: torch.dtype,
    device: int,
    eps: float,
    words: tuple[Any, ...],
) -> _Call:
    setting = _setting(x, weight, table, words)
    shapes = tuple(setting.memory(shape) for shape in ((q,) if k is None else (q, k)))
    plan = None
    if not any(0 in s for s in shapes):
        plan = _plan(q, q_strides, k, k_strides, weight is not None, device, eps, setting)
    makes = makers(device, *((shape, contiguous(shape), setting.dtype) for shape in shapes))
    return _Call(plan, setting, shapes, makes)


def _launched(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    words: tuple[Any, ...],
) -> tuple[torch.Tensor, ...]:
    shape, strides = (None, None) if k is None else (k.shape, k.stride())
    weight, device = None if q_weight is None else q_weight.dtype, q.get_device()
    call = _call(q.shape, q.stride(), shape, strides, q.dtype, weight, cos.dtype, device, eps, words)
    if (makes := call.makes) is None or device != current():
        # Torch takes sizes one by one faster than as a tuple.
        made = tuple([q.new_empty(*shape, dtype=call.setting.dtype) for shape in call.shapes])
    else:
        made = (makes[0](),) if k is None else (makes[0](), makes[1]())
    if call.plan is None:
        for x, scale, y in zip((q, k), (q_weight, k_weight), made, strict=False):
            if x is not None and y.numel():
                _split(x, scale, cos, sin, y, eps, call.setting)
    elif k is None:
        w = q if q_weight is None else q_weight
        fire(call.plan, (q, q, w, w, cos, sin, made[0], made[0]))
    else:
        scales = (q, k) if q_weight is None or k_weight is None else (q_weight, k_weight)
        fire(call.plan, (q, k, *scales, cos, sin, *made))
    return made if call.setting.out_axes == (1, 2) else tuple([y.transpose(1, 2) for y in made])


def _split(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    y: torch.Tensor,
    eps: float,
    setting: Setting,
) -> None:
    """q or k alone, in as many launches as it takes."""
    plan = _plan(x.shape, x.stride(), None, None, weight is not None, x.get_device(), eps, setting)
    if plan is not None:
        w = x if weight is None else weight
        fire(plan, (x, x, w, w, cos, sin, y, y))
        return
    if x.numel() >= LARGEST_EXTENT:
        axis = max(range(3), key=lambda i: x.shape[i])
    else:
        axis = max(range(3), key=lambda i: (x.shape[i] - 1) * x.stride(i))
    size = x.shape[axis]
    if size == 1:
        raise ValueError(f"the channels of q or k lie {x.stride(3)} elements apart, too far for 32-bit offsets")
    y_axis = 0 if axis == 0 else setting.out_axes[int(axis == setting.row_axis)]
    along = {0: 0, setting.row_axis: 1}.get(axis)
    for first, count in ((0, size // 2), (size // 2, size - size // 2)):
        cos_part, sin_part = (
            t if along is None or (axis == 0 and t.shape[0] == 1) else t.narrow(along, first, count) for t in (cos, sin)
        )
        part = x.narrow(axis, first, count), weight, cos_part, sin_part, y.narrow(y_axis, first, count)
        _split(*part, eps, setting)


def choose(tokens: int, heads: int, width: int, device: int) -> Choice:
    """The free choices for that many tokens with that many heads of q."""
    default = SMALL if tokens * heads * width <= SMALL_ELEMENTS else LARGE
    return chosen(default, "qk_norm_rope", shape_class(tokens, heads, width), device)


def shape_class(tokens: int, heads: int, width: int) -> str:
    """The class of shapes that one tuned configuration serves."""
    amount = "few" if tokens <= 8 else "some" if tokens <= 512 else "many"
    return f"{amount}-{heads}x{width}"


def space(tokens: int, heads: int, width: int) -> list[Choice]:
    """Configurations worth trying, the default first."""
    first = SMALL if tokens * heads * width <= SMALL_ELEMENTS else LARGE
    if tokens <= 512:
        found = [
            Choice(elements=elements, access=LOAD, occupancy=occupancy, apart=apart)
            for elements in (128, 256, 512)
            for occupancy in (None, 4)
            for apart in (True, False)
        ]
        found += [Choice(elements=256, access=TMA, apart=apart) for apart in (True, False)]
        return [first, *(c for c in found if c != first)]
    found = [
        Choice(elements=elements, access=LOAD, occupancy=occupancy, apart=apart)
        for elements in (1024, 2048)
        for occupancy in (None, 8)
        for apart in (True, False)
    ]
    # Several rows of a head lie together in the results; heads of a row lie together in q and k.
    for elements, rows in ((1024, 4), (1024, 8), (2048, 8), (2048, 16)):
        found += [Choice(elements=elements, access=LOAD, apart=apart, rows=rows) for apart in (True, False)]
    found += [Choice(elements=2048, access=TMA, rows=rows) for rows in (None, 8)]
    return [first, *(c for c in found if c != first)]


def _plan(
    q: tuple[int, ...],
    q_strides: tuple[int, ...],
    k: tuple[int, ...] | None,
    k_strides: tuple[int, ...] | None,
    weighted: bool,
    device: int,
    eps: float,
    setting: Setting,
    choice: Choice | None = None,
) -> Plan | None:
    """The plan; None if tensors are too large for one launch."""
    for shape, strides in ((q, q_strides), (k or q, k_strides or q_strides)):
        if max(extent(shape, strides), shape[0] * shape[1] * shape[2] * shape[3]) >= LARGEST_EXTENT:
            return None
    head_axis, row_axis = 3 - setting.row_axis, setting.row_axis
    q_heads, k_heads = q[head_axis], k[head_axis] if k is not None else 1
    length, batch, width = q[row_axis], q[0], q[3]
    tuning = choice or choose(batch * length, q_heads, width, device)
    start, turned, rest_start = setting.span(width)
    pairs, rest = turned // 2, width - turned
    tile = power_of_two(pairs)
    apart = tuning.apart and k is not None
    rows_of_tile = min(tuning.rows or 1, power_of_two(length))
    most = max(1, tuning.elements // (tile * rows_of_tile))
    heads = min(power_of_two(max(q_heads, 1 if apart else k_heads)), most)
    tiles = -(-q_heads // heads)
    together = min(power_of_two(k_heads), most) if apart else power_of_two(-(-k_heads // tiles))
    slots = tiles + -(-k_heads // together) if apart else tiles
    # Rows lie apart from heads in memory: by itself a tile has several only where one would be too little work.
    while tuning.rows is None and 2 * rows_of_tile * heads <= most:
        if batch * length // rows_of_tile * slots <= ENOUGH_TILES:
            break
        rows_of_tile *= 2
    count = batch * -(-length // rows_of_tile) * slots
    grid = tuning.grid(count, device)
    ends = ((q_heads, heads), (k_heads, together), (length, rows_of_tile), (rest, power_of_two(max(rest, 1))))
    exact = tile == pairs and start % tile == 0 and all(size % part == 0 for size, part in ends)
    constants = (
        (weighted, setting.offset, setting.round_offset, setting.rounding, setting.divide, setting.rounded),
        (setting.pairs_in, setting.pairs_out, setting.table == rope.TABLES.index("full"), setting.round_products),
        (start, pairs, tile, rest_start, rest, power_of_two(max(rest, 1))),
        (head_axis, row_axis, *setting.out_axes, rows_of_tile, fitting(tuning.access, exact, device)),
        (k is not None, apart, -(-k_heads // together) < tiles, heads, together, grid[0] < count),
    )
    return Plan(tuning.hinted(qk_norm_rope_kernel), grid, (eps, float(width), *constants))


_op = torch.library.custom_op("kernelgraft::qk_norm_rope", _run, mutates_args=())


@_op.register_fake
def _fake(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    *words: Any,
) -> list[torch.Tensor]:
    setting = _setting(q.dtype, None if q_weight is None else q_weight.dtype, cos.dtype, words)
    made = [x.new_empty(setting.memory(x.shape), dtype=setting.dtype) for x in ((q,) if k is None else (q, k))]
    return made if setting.out_axes == (1, 2) else [y.transpose(1, 2) for y in made]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.eps, *ctx.words = inputs[6:]


def _backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
    weight = None if q_weight is None else q_weight.dtype
    setting = _setting(q.dtype, weight, cos.dtype, tuple(ctx.words))
    start, turned, rest_start = setting.span(q.shape[3])
    turn = [setting.row_axis, turned, start, rest_start]
    turn += [setting.pairs_in, setting.pairs_out, setting.table]
    found: list[torch.Tensor | None] = [None] * 4
    for place, (x, scale, grad) in enumerate(zip((q, k), (q_weight, k_weight), grads, strict=False)):
        if grad is not None:
            up = untwist(grad if setting.row_axis == 2 else grad.transpose(1, 2), cos, sin, turn, False)
            wanted = ctx.needs_input_grad[2 + place]
            found[place], found[2 + place] = gradients(x, scale, up, ctx.eps, setting.offset, wanted)
    return *found, *[None] * (3 + len(ctx.words))


_op.register_autograd(_backward, setup_context=_setup)


def examples() -> list[Example]:
    """Calls with the shapes of real models."""

    def example(name: str, batch: int, length: int, heads: tuple[int, int], width: int, **words: Any) -> Example:
        def run(device: str) -> Any:
            def drawn(*shape: int) -> torch.Tensor:
                return torch.randn(shape, device=device, dtype=torch.bfloat16)

            packed = drawn(batch, length, (heads[0] + 2 * heads[1]) * width).view(batch, length, -1, width)
            q, k = packed[:, :, : heads[0]], packed[:, :, heads[0] : sum(heads)]
            turned = words.get("rotary_dim", width)
            cos, sin = drawn(1, length, turned), drawn(1, length, turned)
            return qk_norm_rope(q, k, drawn(width), drawn(width), cos, sin, **words)

        return Example(name, run)

    offset = {"offset": True, "cast": "after_weight"}
    return [
        example("decode 16 + 8 heads of 128", 1, 1, (16, 8), 128),
        example("batch 32, 16 + 8 heads of 128", 32, 1, (16, 8), 128),
        example("prefill 4096, 16 + 8 heads of 128", 1, 4096, (16, 8), 128),
        example("prefill 1024, 8 + 4 heads of 256, one plus the weight", 1, 1024, (8, 4), 256, **offset),
        example("33 tokens, 6 + 2 heads of 96, half turned", 2, 33, (6, 2), 96, rotary_dim=48, memory="length"),
        example(
            "33 tokens, 4 + 4 heads of 80, interleaved",
            2,
            33,
            (4, 4),
            80,
            pairs_in="interleaved",
            pairs_out="interleaved",
        ),
    ]
