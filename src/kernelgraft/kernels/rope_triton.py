"""Rotary position embedding of q and k in Triton, for CUDA tensors: pairs (i, i + r/2), forward only.

A program takes a few heads of q or of k at one row. For how it starts see `rows_triton`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.cutile.plans import (
    LARGEST_AXIS,
    LARGEST_EXTENT,
    Maker,
    contiguous,
    current,
    eager,
    extent,
    makers,
    power_of_two,
)
from kernelgraft.kernels.rows_triton_plans import OVERLAPPED
from kernelgraft.kernels.triton_launching import Launch, overlaps

HALF = (torch.float16, torch.bfloat16)
TABLES = ("full", "first_half", "half")
"""See `kernelgraft.kernels.rope`."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What can be chosen freely for a rotation; the result is the same."""

    heads: int
    """Heads of a program."""
    warps: int
    early: bool = True
    """Whether to start while the kernel before still runs, where the GPU can."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of known shapes and dtypes makes and launches."""

    launch: Launch | None
    """None: nothing to launch, or tensors that have to be made contiguous first."""
    dtype: torch.dtype
    makes: tuple[Maker, ...] | None


def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    row_axis: int = 2,
    rotary_dim: int | None = None,
    last: bool = False,
    table: str = "full",
    backward: bool = False,
    compute: str = "input",
    cast: bool = True,
) -> tuple[torch.Tensor, ...]:
    """See `kernelgraft.kernels.rope.rope`; q and k have one dtype."""
    run = _run if eager(q, k, cos, sin) else _op
    return tuple(run(q, k, cos, sin, row_axis, rotary_dim, last, table, backward, compute, cast))


def _run(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    row_axis: int,
    rotary_dim: int | None,
    last: bool,
    table: str,
    backward: bool,
    compute: str,
    cast: bool,
) -> list[torch.Tensor]:
    if sin.shape != cos.shape or sin.dtype is not cos.dtype or (k is not None and k.dtype is not q.dtype):
        raise ValueError("cos and sin have one shape and dtype, q and k one dtype")
    device, setting = q.get_device(), (row_axis, rotary_dim, last, table, backward, compute, cast)
    second, strides = (None, None) if k is None else (k.shape, k.stride())
    found = _call(
        q.shape, q.stride(), second, strides, cos.shape, cos.stride(), sin.stride(), device, q.dtype, cos.dtype, setting
    )
    makes = found.makes if device >= 0 and device == current() else None
    if makes is None:
        results = [t.new_empty(t.shape, dtype=found.dtype) for t in (q, k) if t is not None]
    else:
        results = [make() for make in makes]
    if found.launch is not None:
        found.launch(q, k, cos, sin, results[0], None if k is None else results[1])
    elif any(t.numel() for t in results):
        k = None if k is None else k.contiguous()
        return _run(q.contiguous(), k, cos.contiguous(), sin.contiguous(), *setting)
    return results


@functools.lru_cache(maxsize=4096)
def _call(
    q: tuple[int, ...],
    q_strides: tuple[int, ...],
    k: tuple[int, ...] | None,
    k_strides: tuple[int, ...] | None,
    tables: tuple[int, ...],
    cos_strides: tuple[int, ...],
    sin_strides: tuple[int, ...],
    device: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    setting: tuple[Any, ...],
) -> _Call:
    row_axis, rotary_dim, last, table, backward, compute, cast = setting
    turned = q[-1] if rotary_dim is None else rotary_dim
    _check(q, k, tables, row_axis, turned, table)
    result = _dtype(dtype, table_dtype, compute, cast)
    makes = makers(device, *((shape, contiguous(shape), result) for shape in (q, k) if shape is not None))
    if k is None or k_strides is None:
        k, k_strides = (*q[: 3 - row_axis], 0, *q[4 - row_axis :]), q_strides
    cos_steps, sin_steps = _steps(tables, cos_strides), _steps(tables, sin_strides)
    apart = q_strides[3] != 1 or k_strides[3] != 1 or cos_steps != sin_steps or (tables[2] > 1 and cos_steps[2] != 1)
    if apart or not q[0] * q[row_axis] * (q[3 - row_axis] + k[3 - row_axis]) > 0:
        return _Call(None, result, makes)
    rounds = compute != "float32" and dtype is table_dtype and dtype in HALF
    chosen = choose(q[0] * q[row_axis], q[3 - row_axis] + k[3 - row_axis], turned // 2, dtype.itemsize)
    launch = launch_of(
        q, _steps(q, q_strides), k, _steps(k, k_strides), cos_steps, row_axis, turned, last, table, backward, rounds,
        chosen, device,
    )  # fmt: skip
    return _Call(launch, result, makes)


def _check(
    q: tuple[int, ...], k: tuple[int, ...] | None, tables: tuple[int, ...], row_axis: int, turned: int, table: str
) -> None:
    """Raise ValueError unless the shapes fit each other."""
    if len(q) != 4 or row_axis not in (1, 2):
        raise ValueError(f"q has {len(q)} axes and rows in axis {row_axis}, served are four and 1 or 2")
    if not 0 < turned <= q[3] or turned % 2:
        raise ValueError(f"{turned} of {q[3]} channels turn; served is an even number of them")
    if k is not None and (k[0], k[row_axis], k[3]) != (q[0], q[row_axis], q[3]):
        raise ValueError(f"q has the shape {tuple(q)}, k {tuple(k)}")
    if table not in TABLES:
        raise ValueError(f"table `{table}`; known: {', '.join(TABLES)}")
    least = turned if table == "full" else turned // 2
    if len(tables) != 3 or tables[0] not in (1, q[0]) or tables[1] != q[row_axis] or tables[2] < least:
        raise ValueError(f"cos and sin have the shape {tuple(tables)}, q {tuple(q)}")


def _dtype(q: torch.dtype, cos: torch.dtype, compute: str, cast: bool) -> torch.dtype:
    return q if cast else torch.promote_types(torch.float32 if compute == "float32" else q, cos)


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without those that lead nowhere."""
    return tuple(step if size > 1 else 0 for size, step in zip(shape, strides, strict=True))


def launch_of(
    q: tuple[int, ...],
    q_steps: tuple[int, ...],
    k: tuple[int, ...],
    k_steps: tuple[int, ...],
    table_steps: tuple[int, ...],
    row_axis: int,
    turned: int,
    last: bool,
    table: str,
    backward: bool,
    rounds: bool,
    chosen: Chosen,
    device: int,
) -> Launch:
    """The launch of a rotation of q and of k, which may have no heads, with a given configuration."""
    head_axis = 3 - row_axis
    batch, length, width, pairs = q[0], q[row_axis], q[3], turned // 2
    q_heads, k_heads = q[head_axis], k[head_axis]
    groups = -(-q_heads // chosen.heads) + -(-k_heads // chosen.heads)
    swap = batch > length
    most, least = (batch, length) if swap else (length, batch)
    if groups > LARGEST_AXIS or least > LARGEST_AXIS:
        raise ValueError(f"q has the shape {q}, too large for one launch")
    laid = [(q, q_steps), (k, k_steps), (q, contiguous(q)), (k, contiguous(k)), ((batch, length, turned), table_steps)]
    wide = max(extent(shape, steps) for shape, steps in laid) >= LARGEST_EXTENT
    early = chosen.early and most * groups * least <= OVERLAPPED and overlaps(device)
    start, rest_start = (width - turned, 0) if last else (0, turned)
    rest = (
        q_steps[0], q_steps[row_axis], q_steps[head_axis], k_steps[0], k_steps[row_axis], k_steps[head_axis],
        table_steps[0], table_steps[1], length, q_heads, k_heads, width, pairs, power_of_two(pairs), start, rest_start,
        width - turned, power_of_two(max(1, width - turned)), table == "full", backward, rounds, row_axis, chosen.heads,
        swap, wide, early,
    )  # fmt: skip
    # Torch rounds every product of a half type: a multiplication and an addition in one would not.
    options = {"enable_fp_fusion": not rounds, **({"launch_pdl": True} if early else {})}
    return Launch(_kernel, (most, groups, least), rest, device, num_warps=chosen.warps, **options)


def _kernel() -> Any:
    from kernelgraft.kernels.rows_triton_kernels import rope_kernel

    return rope_kernel


def choose(tokens: int, heads: int, pairs: int, itemsize: int) -> Chosen:
    """The free choices for `heads` of q and k together at that many rows."""
    return space(tokens, heads, pairs, itemsize)[0]


def space(tokens: int, heads: int, pairs: int, itemsize: int) -> list[Chosen]:
    """Sensible choices, the default first."""
    tile = power_of_two(pairs)

    def of(height: int) -> Chosen:
        # A lane takes 16 bytes of either channel.
        return Chosen(height, max(1, min(8, height * tile * itemsize // 512)))

    first = 8 if tokens * -(-heads // 8) >= 32 else 4
    return list(dict.fromkeys(of(height) for height in (first, 4, 8, 16, 32)))


_op = torch.library.custom_op("kernelgraft::rope_triton", _run, mutates_args=())


@_op.register_fake
def _fake(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    row_axis: int,
    rotary_dim: int | None,
    last: bool,
    table: str,
    backward: bool,
    compute: str,
    cast: bool,
) -> list[torch.Tensor]:
    dtype = _dtype(q.dtype, cos.dtype, compute, cast)
    return [t.new_empty(t.shape, dtype=dtype) for t in (q, k) if t is not None]
