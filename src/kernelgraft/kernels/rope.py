"""Rotary position embedding of q and k, out of place, in one launch.

Channels a and b of a pair become a cos - b sin and b cos + a sin; pairs are (i, i + r/2) or (2i, 2i + 1), any even
number r of channels turns, the others are copied. Arithmetic is float32, except with `compute="input"` where q
and the tables are of one half type: then it is in that type, as torch's is. Gradients are computed by torch in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.cutile.plans import (
    LARGEST_AXIS,
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
from kernelgraft.kernels.access import GATHER, LOAD, fitting
from kernelgraft.kernels.examples import Example, tensor
from kernelgraft.kernels.rope_gradient import untwist
from kernelgraft.kernels.rope_tiles import rope_kernel
from kernelgraft.kernels.row_plans import about

HALF = (torch.float16, torch.bfloat16)
TABLES = ("full", "first_half", "half")
"""A value for each rotated channel, the same of which only the first half is read, or a value for each pair."""
PAIRS = ("half", "interleaved")


@dataclass(frozen=True, slots=True)
class Turning(Tuning):
    """The choices for a rotation; `elements` counts the pairs of a row that a tile takes."""

    rows: int | None = None
    """Rows of a tile; None: one, or as many as make a little work enough."""


SMALL = Turning(elements=512, access=LOAD)
LARGE = Turning(elements=4096, access=LOAD)
SMALL_ELEMENTS = 2**20
"""Up to that many elements of q, `SMALL` holds, `LARGE` beyond; a tile's elements are counted as pairs."""


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    row_axis: int = 2,
    rotary_dim: int | None = None,
    last: bool = False,
    pairs_in: str = "half",
    pairs_out: str = "half",
    table: str = "full",
    backward: bool = False,
    compute: str = "input",
    cast: bool = True,
) -> tuple[torch.Tensor, ...]:
    """q and, if given, k turned: a tuple of one or two new contiguous tensors.

    q, k: [batch, heads, length, channels], or [batch, length, heads, channels] with `row_axis=1`, any strides;
    cos, sin: [1 or batch, length, values], where `table` (one of `TABLES`) says what the values are; float32, bfloat16
    or float16. `rotary_dim` channels turn (all if None), the first ones or the `last`; `pairs_in`, `pairs_out`: one of
    `PAIRS`. `backward` turns the other way. `compute="float32"` rounds once; `cast` gives q's dtype, otherwise the one
    that torch promotes to.
    """
    if not eager(q, k, cos, sin):
        setting = _setting(q.shape[-1], row_axis, rotary_dim, last, pairs_in, pairs_out, table)
        return tuple(_op(q, k, cos, sin, setting, backward, compute == "float32", cast))
    second, strides = (None, None) if k is None else (k.shape, k.stride())
    device = q.get_device()
    found = _call(
        q.shape, q.stride(), second, strides, device, q.dtype, cos.dtype, row_axis, rotary_dim, last, pairs_in,
        pairs_out, table, backward, compute, cast,
    )  # fmt: skip
    plan = found.plan
    if plan is None:
        setting = _setting(q.shape[-1], row_axis, rotary_dim, last, pairs_in, pairs_out, table)
        return tuple(_run(q, k, cos, sin, setting, backward, compute == "float32", cast))
    makes = found.makes if device >= 0 and device == current() else None
    # Torch takes sizes one by one faster than as a tuple.
    q_out = q.new_empty(*found.q, dtype=found.dtype) if makes is None else makes[0]()
    if k is None:
        fire(plan, (q, q, cos, sin, q_out, q_out))
        return (q_out,)
    k_out = q.new_empty(*found.k, dtype=found.dtype) if makes is None else makes[1]()
    fire(plan, (q, k, cos, sin, q_out, k_out))
    return q_out, k_out


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of known shapes and dtypes makes and launches."""

    plan: Plan | None
    """None if there is nothing to launch or more than one launch."""
    dtype: torch.dtype
    q: tuple[int, ...]
    """Shape of the result."""
    k: tuple[int, ...]
    makes: tuple[Maker, ...] | None
    """What makes the results, see `makers`."""


def _setting(
    width: int, row_axis: int, rotary_dim: int | None, last: bool, pairs_in: str, pairs_out: str, table: str
) -> list[int]:
    """Keywords of `rope` as the numbers that the custom op takes."""
    turned = width if rotary_dim is None else rotary_dim
    start, rest = (width - turned, 0) if last else (0, turned)
    return [row_axis, turned, start, rest, PAIRS.index(pairs_in), PAIRS.index(pairs_out), TABLES.index(table)]


@functools.lru_cache(maxsize=4096)
def _call(
    q: tuple[int, ...],
    q_strides: tuple[int, ...],
    k: tuple[int, ...] | None,
    k_strides: tuple[int, ...] | None,
    device: int,
    q_dtype: torch.dtype,
    table_dtype: torch.dtype,
    row_axis: int,
    rotary_dim: int | None,
    last: bool,
    pairs_in: str,
    pairs_out: str,
    table: str,
    backward: bool,
    compute: str,
    cast: bool,
) -> _Call:
    dtype = _dtype(q_dtype, table_dtype, compute == "float32", cast)
    other, other_strides = k or q, k_strides or q_strides
    plan = None
    if 0 not in q and 0 not in other:
        setting = tuple(_setting(q[-1], row_axis, rotary_dim, last, pairs_in, pairs_out, table))
        constants = (k is not None, *setting, backward, _rounds(q_dtype, table_dtype, compute == "float32"))
        plan = _plan(q, other, q_strides, other_strides, device, constants)
    makes = makers(device, (q, contiguous(q), dtype), (other, contiguous(other), dtype))
    return _Call(plan, dtype, tuple(q), tuple(other), makes)


def _rounds(q: torch.dtype, cos: torch.dtype, wide: bool) -> bool:
    """Whether each product is rounded, as torch does in a half type."""
    return not wide and q is cos and q in HALF


def _dtype(q: torch.dtype, cos: torch.dtype, wide: bool, cast: bool) -> torch.dtype:
    return q if cast else torch.promote_types(torch.float32 if wide else q, cos)


def _run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    setting: Sequence[int],
    backward: bool,
    wide: bool,
    cast: bool,
) -> list[torch.Tensor]:
    outputs = _empty(q, k, cos, wide, cast)
    if q.numel():
        second = (q, outputs[0]) if k is None else (k, outputs[1])
        constants = (k is not None, *setting, backward, _rounds(q.dtype, cos.dtype, wide))
        _launch(q, second[0], cos, sin, outputs[0], second[1], constants)
    return outputs


def _empty(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, wide: bool, cast: bool) -> list[torch.Tensor]:
    tensors = (q,) if k is None else (q, k)
    if cast:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    dtype = _dtype(q.dtype, cos.dtype, wide, cast)
    return [torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in tensors]


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    setting: tuple[Any, ...],
) -> None:
    chosen = _plan(q.shape, k.shape, q.stride(), k.stride(), q.get_device(), setting)
    if chosen is not None:
        fire(chosen, (q, k, cos, sin, q_out, k_out))
        return
    if setting[0]:
        for x, y in ((q, q_out), (k, k_out)):
            _launch(x, x, cos, sin, y, y, (False, *setting[1:]))
        return
    axis = max(range(3), key=lambda i: (q.shape[i] - 1) * q.stride(i))
    size, along = q.shape[axis], {0: 0, setting[1]: 1}.get(axis)
    if size == 1:
        raise ValueError(f"the channels of q lie {q.stride(3)} elements apart, too far for 32-bit offsets")
    for first, count in ((0, size // 2), (size // 2, size - size // 2)):
        x, y = (t.narrow(axis, first, count) for t in (q, q_out))
        tables = [
            t if along is None or (axis == 0 and t.shape[0] == 1) else t.narrow(along, first, count) for t in (cos, sin)
        ]
        _launch(x, x, tables[0], tables[1], y, y, setting)


@functools.lru_cache(maxsize=4096)
def _plan(
    q: tuple[int, ...],
    k: tuple[int, ...],
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    device: int,
    setting: tuple[Any, ...],
) -> Plan | None:
    with_k, row_axis, turned, start, rest_start, pairs_in, pairs_out, table, backward, rounds = setting
    if max(extent(q, q_strides), extent(k, k_strides)) >= LARGEST_EXTENT:
        return None
    head_axis = 3 - row_axis
    length, width = turned // 2, q[3]
    tile, rest = power_of_two(length), width - turned
    q_heads, k_heads = q[head_axis], k[head_axis] if with_k else 1
    plain = bool(with_k) and not rest and not pairs_in and not pairs_out and table == 0 and rounds
    tuning = choose(q[0] * q[row_axis], q_heads, k_heads, width, plain, device)
    heads = max(1, min(power_of_two(max(q_heads, k_heads)), tuning.elements // tile))
    rows = 1 if tuning.rows is None else min(tuning.rows, power_of_two(q[row_axis]))
    # Rows lie apart from heads in memory: several to a tile only where a row alone would be too little work.
    while (
        tuning.rows is None
        and rows < q[row_axis]
        and 2 * rows * heads * tile <= 512
        and q[0] * q[row_axis] // rows > 1024
    ):
        rows *= 2
    tiles = -(-q_heads // heads)
    together = power_of_two(-(-k_heads // tiles))
    down = -(-q[row_axis] // rows)
    loop = tuning.blocks is not None or max(q[0], down) > LARGEST_AXIS
    grid = tuning.grid(q[0] * down * tiles, device) if loop else (tiles, down, q[0])
    exact = q_heads % heads == 0 and k_heads % together == 0 and q[row_axis] % rows == 0
    access = GATHER if tuning.access == LOAD and tile != length else tuning.access
    constants = (
        with_k,
        -(-k_heads // together) < tiles,
        head_axis,
        row_axis,
        start,
        length,
        tile,
        rest_start,
        rest,
        power_of_two(max(rest, 1)),
        pairs_in,
        pairs_out,
        table == TABLES.index("full"),
        backward,
        rounds,
        heads,
        together,
        rows,
        loop,
        fitting(access, exact, device),
    )
    return Plan(tuning.hinted(rope_kernel), grid, constants)


def choose(rows: int, heads: int, k_heads: int, width: int, plain: bool, device: int) -> Turning:
    """The free choices for that many rows of all heads; only `plain` rotations in a half type have been tuned."""
    first = default(rows, heads, width)
    return chosen(first, "rope", shape_class(rows, heads, k_heads, width), device) if plain else first


def default(rows: int, heads: int, width: int) -> Turning:
    """The choices where nothing is tuned."""
    return SMALL if rows * heads * width <= SMALL_ELEMENTS else LARGE


def shape_class(rows: int, heads: int, k_heads: int, width: int) -> str:
    """`32+8x128 r4096`: heads of q and of k, channels, about how many rows."""
    return f"{power_of_two(heads)}+{power_of_two(k_heads)}x{width} r{about(rows)}"


def space(rows: int, heads: int, width: int) -> list[Turning]:
    """Configurations worth trying, the default first."""
    pairs = power_of_two(width // 2)
    every = power_of_two(heads) * pairs
    found = [default(rows, heads, width)]
    if rows * heads * width <= SMALL_ELEMENTS:
        sizes = tuple(dict.fromkeys((128, 256, 512, 1024, every)))
        found += [Turning(elements=elements, access=LOAD) for elements in sizes]
        found += [Turning(elements=elements, access=LOAD, worker_warps=8) for elements in sizes if elements >= 1024]
        found += [Turning(elements=256, access=GATHER, occupancy=4), Turning(elements=512, access=GATHER)]
    else:
        found += [
            Turning(elements=max(every // part, pairs), access=LOAD, occupancy=occupancy, rows=height)
            for part, height, occupancy in (
                (1, 1, None), (1, 1, 16), (2, 1, 16), (1, 2, None), (4, 4, None), (8, 4, None), (8, 8, None),
            )
        ]  # fmt: skip
        found += [Turning(elements=every, access=LOAD, worker_warps=8), Turning(elements=every, access=GATHER)]
        found += [Turning(elements=every // 4, access=GATHER, rows=4)]
    return list(dict.fromkeys(found))


_op = torch.library.custom_op("kernelgraft::rope", _run, mutates_args=())


@_op.register_fake
def _fake(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    setting: Sequence[int],
    backward: bool,
    wide: bool,
    cast: bool,
) -> list[torch.Tensor]:
    return _empty(q, k, cos, wide, cast)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, cos, sin, ctx.setting, ctx.backward, *_ = inputs
    ctx.dtypes = [q.dtype, None if k is None else k.dtype]
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    found = [
        None if g is None else untwist(g, cos, sin, ctx.setting, ctx.backward).to(dtype)
        for g, dtype in zip(grads, ctx.dtypes, strict=False)
    ]
    return found[0], found[1] if len(found) > 1 else None, *[None] * 6


_op.register_autograd(_gradients, setup_context=_setup)


def examples() -> list[Example]:
    """Decode, prefill and batches of 32; grouped heads; widths of 64 to 256, 80, 96 and 92; partial; interleaved."""

    def of(
        batch: int,
        length: int,
        heads: tuple[int, int],
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        tables: torch.dtype | None = None,
        values: int | None = None,
        own: bool = False,
        **options: Any,
    ) -> Callable[[str], Any]:
        def run(device: str) -> Any:
            # As a projection leaves them: heads beside each other, seen with the heads first.
            q, k = (tensor(device, batch, length, h, width, dtype=dtype) for h in heads)
            if options.get("row_axis") != 1:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            shape = (batch if own else 1, length, values or options.get("rotary_dim") or width)
            cos, sin = (tensor(device, *shape, dtype=tables or dtype) for _ in range(2))
            return rope(q, k, cos, sin, **options)

        return run

    both: dict[str, Any] = {"pairs_in": "interleaved", "pairs_out": "interleaved"}
    single = torch.float32
    return [
        Example("decode 32 + 8 heads of 128", of(1, 1, (32, 8), 128)),
        Example("batch 32, 32 + 8 heads of 128, own positions", of(32, 1, (32, 8), 128, own=True)),
        Example("prefill 4096, 32 + 8 heads of 128", of(1, 4096, (32, 8), 128)),
        Example("prefill 4096, 32 + 8 heads of 64", of(1, 4096, (32, 8), 64)),
        Example("prefill 1024, 32 + 32 heads of 96", of(1, 1024, (32, 32), 96)),
        Example("prefill 1024, 8 + 4 heads of 256, float32 tables", of(1, 1024, (8, 4), 256, tables=single)),
        Example("prefill 64, 32 + 32 heads of 80 float16", of(1, 64, (32, 32), 80, dtype=torch.float16), tune=False),
        Example("partial 32 of 80", of(1, 64, (32, 32), 80, rotary_dim=32), tune=False),
        Example("last 64 of 192", of(2, 64, (16, 1), 192, rotary_dim=64, last=True), tune=False),
        Example("interleaved 92", of(1, 64, (4, 4), 92, **both), tune=False),
        Example("interleaved 64, a value a pair", of(1, 64, (16, 16), 64, values=32, table="half", **both), tune=False),
        Example("interleaved in, halves out", of(1, 64, (16, 1), 64, pairs_in="interleaved"), tune=False),
        Example("length before heads, float32", of(1, 64, (16, 4), 128, dtype=single, row_axis=1), tune=False),
        Example("backwards, float32 arithmetic", of(1, 64, (8, 2), 128, backward=True, compute="float32"), tune=False),
    ]
