"""RMS norm beside a residual addition: the norm of a sum (both are results), or a norm added to the residual.

The sum is rounded as torch rounds it, and the norm reads the rounded sum. Gradients are computed by torch in float32.
"""

# mypy: disable-error-code="no-untyped-def"
# Tile functions take no annotations.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import current, eager, fire
from kernelgraft.kernels import rows
from kernelgraft.kernels.examples import Example, tensor
from kernelgraft.kernels.rms_norm import gradients, rounding
from kernelgraft.kernels.row_plans import Call, Norm, call, launch


@ct.kernel
def add_rms_norm_kernel(
    residual,
    x,
    total,
    y,
    weight,
    eps,
    inverse,
    WHERE: ct.Constant[int],
    WEIGHT: ct.Constant[bool],
    OFFSET: ct.Constant[bool],
    ROUND_OFFSET: ct.Constant[bool],
    ROUND: ct.Constant[int],
    ROUND_NORMED: ct.Constant[int],
    DIVIDE: ct.Constant[bool],
    ROWS: ct.Constant[int],
    TILE: ct.Constant[int],
    PIECES: ct.Constant[int],
    EXACT: ct.Constant[bool],
    RESIDENT: ct.Constant[bool],
    LOOP: ct.Constant[bool],
    ACCESS: ct.Constant[int],
):
    """residual, x, total, y: [lead, rows, width]; weight: [width]."""
    rows.norm_rows(
        residual, x, weight, weight, total, y, eps, inverse, WHERE, False, WEIGHT, False, OFFSET, ROUND_OFFSET, ROUND,
        False, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, LOOP, ACCESS,
    )  # fmt: skip


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: bool = False,
    cast: str = "after_weight",
    round_offset: bool = False,
    divide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x, and the RMS norm of that sum.

    residual, x: [..., width] of one shape, any strides; weight: [width]; float32, bfloat16 or float16. Keywords as for
    `rms_norm`, whose input is the sum.
    """
    if eager(residual, x, weight):
        return _run_first(residual, x, weight, eps, offset, cast, round_offset, divide)
    total, y = _op_first(residual, x, weight, eps, offset, cast, round_offset, divide)
    return total, y


def rms_norm_add(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: bool = False,
    cast: str = "after_weight",
    round_offset: bool = False,
    divide: bool = False,
) -> torch.Tensor:
    """residual + the RMS norm of x; shapes, dtypes and keywords as for `add_rms_norm`."""
    run = _run_last if eager(residual, x, weight) else _op_last
    return run(residual, x, weight, eps, offset, cast, round_offset, divide)


def _dtype(x: torch.Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def _run_first(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    device, vector = x.get_device(), None if weight is None else weight.dtype
    found = _call(
        rows.SUM_FIRST, x.shape, residual.stride(), x.stride(), device, residual.dtype, x.dtype, vector, eps, offset,
        cast, round_offset, divide,
    )  # fmt: skip
    makes = found.makes if device >= 0 and device == current() else None
    if makes is None:
        first, second = found.norm.dtypes
        total, y = torch.empty_like(residual, dtype=first), torch.empty_like(residual, dtype=second)
    else:
        total, y = makes[0](), makes[1]()
    if found.direct:
        fire(found.plan, (residual, x, total, y, x if weight is None else weight))  # type: ignore[arg-type]
    else:
        launch(found, (residual, x), (total, y), (x if weight is None else weight,))
    return total, y


def _run_last(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> torch.Tensor:
    device, vector = x.get_device(), None if weight is None else weight.dtype
    found = _call(
        rows.SUM_LAST, x.shape, residual.stride(), x.stride(), device, residual.dtype, x.dtype, vector, eps, offset,
        cast, round_offset, divide,
    )  # fmt: skip
    makes = found.makes if device >= 0 and device == current() else None
    y = torch.empty_like(residual, dtype=found.norm.dtypes[1]) if makes is None else makes[1]()
    launch(found, (residual, x), (y, y), (x if weight is None else weight,))
    return y


@functools.lru_cache(maxsize=4096)
def _call(
    where: int,
    shape: tuple[int, ...],
    residual_strides: tuple[int, ...],
    strides: tuple[int, ...],
    device: int,
    residual: torch.dtype,
    x: torch.dtype,
    weight: torch.dtype | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> Call:
    how, again, *results = _semantics(where, cast, residual, x, weight)
    constants = (where, weight is not None, offset, round_offset, how, again, divide)
    return call(Norm(add_rms_norm_kernel, eps, constants, tuple(results)), shape, device, residual_strides, strides)


def _semantics(
    where: int, cast: str, residual: torch.dtype, x: torch.dtype, weight: torch.dtype | None
) -> tuple[int, int, torch.dtype, torch.dtype]:
    """Rounding before the weight and of the norm before the sum; the dtypes of the sum and of the other result."""
    if where == rows.SUM_FIRST:
        total = torch.promote_types(residual, x)
        how, dtype = rounding(cast, total, weight)
        return how, rows.KEEP, total, dtype
    how, normed = rounding(cast, x, weight)
    total = torch.promote_types(residual, normed)
    return how, {weight: rows.TO_WEIGHT, x: rows.TO_INPUT}.get(normed, rows.KEEP), total, total


_op_first = torch.library.custom_op("kernelgraft::add_rms_norm", _run_first, mutates_args=())
_op_last = torch.library.custom_op("kernelgraft::rms_norm_add", _run_last, mutates_args=())


@_op_first.register_fake
def _fake_first(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    *_: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    *_ignored, total, dtype = _semantics(rows.SUM_FIRST, cast, residual.dtype, x.dtype, _dtype(weight))
    return torch.empty_like(residual, dtype=total), torch.empty_like(residual, dtype=dtype)


@_op_last.register_fake
def _fake_last(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    *_: bool,
) -> torch.Tensor:
    *_ignored, total = _semantics(rows.SUM_LAST, cast, residual.dtype, x.dtype, _dtype(weight))
    return torch.empty_like(residual, dtype=total)


def _setup_first(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    residual, x, weight, ctx.eps, ctx.offset, *_ = inputs
    ctx.dtypes = residual.dtype, x.dtype
    ctx.save_for_backward(output[0], weight)


def _backward_first(ctx: Any, of_total: torch.Tensor | None, of_y: torch.Tensor | None) -> tuple[Any, ...]:
    total, weight = ctx.saved_tensors
    of_sum, of_weight = torch.zeros_like(total) if of_total is None else of_total, None
    if of_y is not None:
        through, of_weight = gradients(total, weight, of_y, ctx.eps, ctx.offset, ctx.needs_input_grad[2])
        of_sum = of_sum + through
    return of_sum.to(ctx.dtypes[0]), of_sum.to(ctx.dtypes[1]), of_weight, *[None] * 5


def _setup_last(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    residual, x, weight, ctx.eps, ctx.offset, *_ = inputs
    ctx.dtype = residual.dtype
    ctx.save_for_backward(x, weight)


def _backward_last(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight = gradients(x, weight, grad, ctx.eps, ctx.offset, ctx.needs_input_grad[2])
    return grad.to(ctx.dtype), of_x, of_weight, *[None] * 5


_op_first.register_autograd(_backward_first, setup_context=_setup_first)
_op_last.register_autograd(_backward_last, setup_context=_setup_last)


def examples() -> list[Example]:
    """Decode, prefill and batches of 32, before and after the norm; a width of no power of two."""

    def of(
        *shape: int, last: bool = False, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> Callable[[str], Any]:
        def run(device: str) -> Any:
            residual, x = (tensor(device, *shape, dtype=dtype) for _ in range(2))
            function = rms_norm_add if last else add_rms_norm
            return function(residual, x, tensor(device, shape[-1], dtype=dtype), **options)

        return run

    single = torch.float32
    return [
        Example("decode 1 x 4096", of(1, 1, 4096, cast="before_weight")),
        Example("decode 32 x 4096", of(32, 1, 4096, cast="before_weight")),
        Example("prefill 4096 x 4096", of(1, 4096, 4096, cast="before_weight")),
        Example("prefill 1024 x 1024 float16", of(1, 1024, 1024, dtype=torch.float16, cast="before_weight")),
        Example("norm first, decode 1 x 2560", of(1, 1, 2560, last=True, offset=True)),
        Example("norm first, prefill 1024 x 2560", of(1, 1024, 2560, last=True, offset=True)),
        Example("7 x 513 float32", of(7, 513, dtype=single, cast="none"), tune=False),
        Example("3 x 20000", of(3, 20000), tune=False),
        Example("norm first, 3 x 20000", of(3, 20000, last=True), tune=False),
    ]
