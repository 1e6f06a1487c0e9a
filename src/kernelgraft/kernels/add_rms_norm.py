"""RMS norm beside a residual addition: the norm of a sum (both are results), or a norm added to the residual.

The sum is rounded as torch rounds it, and the norm reads the rounded sum. Gradients are computed by torch in float32.
"""

# mypy: disable-error-code="no-untyped-def"
# Tile functions take no annotations.

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import eager, fire
from kernelgraft.kernels import rows
from kernelgraft.kernels.rms_norm import gradients, rounding


@ct.kernel
def add_rms_norm_kernel(
    residual,
    x,
    weight,
    total,
    y,
    eps,
    width,
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
    TMA: ct.Constant[bool],
):
    """residual, x, total, y: [lead, rows, width]; weight: [width]."""
    rows.norm_rows(
        residual, x, weight, weight, total, y, eps, width, WHERE, False, WEIGHT, False, OFFSET, ROUND_OFFSET, ROUND,
        False, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, LOOP, TMA,
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
    if eager(residual, x, weight):
        return _run_last(residual, x, weight, eps, offset, cast, round_offset, divide)
    return _op_last(residual, x, weight, eps, offset, cast, round_offset, divide)


def _dtype(x: torch.Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x) if dtype is x.dtype else torch.empty_like(x, dtype=dtype)


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
    sum_dtype = x.dtype if residual.dtype is x.dtype else torch.promote_types(residual.dtype, x.dtype)
    how, dtype = rounding(cast, sum_dtype, _dtype(weight))
    total, y = _like(x, sum_dtype), _like(x, dtype)
    if y.numel():
        constants = (rows.SUM_FIRST, weight is not None, offset, round_offset, how, rows.KEEP, divide)
        out, other, source, addend = rows.as_rows(y, total, x, residual)
        _launch(addend, source, other, out, x if weight is None else weight, eps, constants)
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
    how, normed = rounding(cast, x.dtype, _dtype(weight))
    y = _like(x, torch.promote_types(residual.dtype, normed))
    if y.numel():
        again = {_dtype(weight): rows.TO_WEIGHT, x.dtype: rows.TO_INPUT}.get(normed, rows.KEEP)
        constants = (rows.SUM_LAST, weight is not None, offset, round_offset, how, again, divide)
        out, source, addend = rows.as_rows(y, x, residual)
        _launch(addend, source, out, out, x if weight is None else weight, eps, constants)
    return y


def _launch(
    residual: torch.Tensor,
    x: torch.Tensor,
    total: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    constants: tuple[Any, ...],
) -> None:
    plan = rows.plan(add_rms_norm_kernel, x.shape, x.stride(), x.get_device(), eps, constants)
    if plan is not None:
        fire(plan, (residual, x, weight, total, y))
        return
    for part in rows.halves((residual, x, total, y)):
        _launch(part[0], part[1], part[2], part[3], weight, eps, constants)


@torch.library.custom_op("kernelgraft::add_rms_norm", mutates_args=())
def _op_first(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _run_first(residual, x, weight, eps, offset, cast, round_offset, divide)


@_op_first.register_fake
def _fake_first(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.empty_like(x, dtype=torch.promote_types(residual.dtype, x.dtype))
    return total, torch.empty_like(x, dtype=rounding(cast, total.dtype, _dtype(weight))[1])


@torch.library.custom_op("kernelgraft::rms_norm_add", mutates_args=())
def _op_last(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> torch.Tensor:
    return _run_last(residual, x, weight, eps, offset, cast, round_offset, divide)


@_op_last.register_fake
def _fake_last(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> torch.Tensor:
    normed = rounding(cast, x.dtype, _dtype(weight))[1]
    return torch.empty_like(x, dtype=torch.promote_types(residual.dtype, normed))


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
