"""Layer norm of rows, alone or beside a residual addition: (x - mean) / sqrt(variance + eps) * weight + bias.

Arithmetic is float32 with the variance taken from the distances to the mean. Gradients are computed by torch in
float32; the forms with a residual have none.
"""

# mypy: disable-error-code="no-untyped-def"
# Tile functions take no annotations.

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import eager, fire
from kernelgraft.kernels import rows


@ct.kernel
def layer_norm_kernel(
    residual,
    x,
    weight,
    bias,
    total,
    y,
    eps,
    width,
    WHERE: ct.Constant[int],
    WEIGHT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    OFFSET: ct.Constant[bool],
    ROUND_OFFSET: ct.Constant[bool],
    ROUND: ct.Constant[int],
    ROUND_SCALED: ct.Constant[bool],
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
    """residual, x, total, y: [lead, rows, width]; weight, bias: [width]."""
    rows.norm_rows(
        residual, x, weight, bias, total, y, eps, width, WHERE, True, WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND,
        ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, LOOP, TMA,
    )  # fmt: skip


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: bool = False,
    round_offset: bool = False,
    round_normed: bool = False,
    divide: bool = False,
) -> torch.Tensor:
    """Layer norm over the last axis.

    x: [..., width], any strides; weight, bias: [width]; float32, bfloat16 or float16. `offset` adds one to the weight,
    with `round_offset` in the weight's dtype. `round_normed`: weight and bias are applied to the norm rounded to x's
    dtype, and the result has the dtype that torch promotes them to; otherwise it has x's. `divide` by the root instead
    of multiplying by its inverse.
    """
    if eager(x, weight, bias):
        return _run(x, weight, bias, eps, offset, round_offset, round_normed, divide)
    return _op(x, weight, bias, eps, offset, round_offset, round_normed, divide)


def add_layer_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: bool = False,
    round_offset: bool = False,
    round_normed: bool = False,
    divide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x, and the layer norm of that sum; for shapes, dtypes and keywords see `layer_norm`."""
    if eager(residual, x, weight, bias):
        return _run_first(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)
    total, y = _op_first(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)
    return total, y


def layer_norm_add(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: bool = False,
    round_offset: bool = False,
    round_normed: bool = False,
    divide: bool = False,
) -> torch.Tensor:
    """residual + the layer norm of x; for shapes, dtypes and keywords see `layer_norm`."""
    if eager(residual, x, weight, bias):
        return _run_last(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)
    return _op_last(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)


def result_dtype(
    x: torch.dtype, weight: torch.Tensor | None, bias: torch.Tensor | None, round_normed: bool
) -> torch.dtype:
    """The dtype of a layer norm of x."""
    if round_normed:
        for vector in (weight, bias):
            if vector is not None and vector.dtype is not x:
                x = torch.promote_types(x, vector.dtype)
    return x


def _constants(
    where: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    again: int,
    divide: bool,
) -> tuple[Any, ...]:
    vectors = weight is not None or bias is not None
    first = rows.TO_INPUT if round_normed and vectors else rows.KEEP
    scaled = round_normed and weight is not None and bias is not None
    return where, weight is not None, bias is not None, offset, round_offset, first, scaled, again, divide


def _run(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    y = torch.empty_like(x, dtype=result_dtype(x.dtype, weight, bias, round_normed))
    if y.numel():
        constants = _constants(rows.NO_SUM, weight, bias, offset, round_offset, round_normed, rows.KEEP, divide)
        out, source = rows.as_rows(y, x)
        _launch(source, source, out, out, weight, bias, eps, constants)
    return y


def _run_first(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.empty_like(x, dtype=torch.promote_types(residual.dtype, x.dtype))
    y = torch.empty_like(x, dtype=result_dtype(total.dtype, weight, bias, round_normed))
    if y.numel():
        constants = _constants(rows.SUM_FIRST, weight, bias, offset, round_offset, round_normed, rows.KEEP, divide)
        out, other, source, addend = rows.as_rows(y, total, x, residual)
        _launch(addend, source, other, out, weight, bias, eps, constants)
    return total, y


def _run_last(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    normed = result_dtype(x.dtype, weight, bias, round_normed)
    y = torch.empty_like(x, dtype=torch.promote_types(residual.dtype, normed))
    if y.numel():
        known = {None if weight is None else weight.dtype: rows.TO_WEIGHT, x.dtype: rows.TO_INPUT}
        again = known.get(normed, rows.KEEP)
        constants = _constants(rows.SUM_LAST, weight, bias, offset, round_offset, round_normed, again, divide)
        out, source, addend = rows.as_rows(y, x, residual)
        _launch(addend, source, out, out, weight, bias, eps, constants)
    return y


def _launch(
    residual: torch.Tensor,
    x: torch.Tensor,
    total: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    constants: tuple[Any, ...],
) -> None:
    plan = rows.plan(layer_norm_kernel, x.shape, x.stride(), x.get_device(), eps, constants)
    if plan is not None:
        fire(plan, (residual, x, x if weight is None else weight, x if bias is None else bias, total, y))
        return
    for part in rows.halves((residual, x, total, y)):
        _launch(part[0], part[1], part[2], part[3], weight, bias, eps, constants)


@torch.library.custom_op("kernelgraft::layer_norm", mutates_args=())
def _op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    return _run(x, weight, bias, eps, offset, round_offset, round_normed, divide)


@_op.register_fake
def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    return torch.empty_like(x, dtype=result_dtype(x.dtype, weight, bias, round_normed))


@torch.library.custom_op("kernelgraft::add_layer_norm", mutates_args=())
def _op_first(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _run_first(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)


@_op_first.register_fake
def _fake_first(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.empty_like(x, dtype=torch.promote_types(residual.dtype, x.dtype))
    return total, torch.empty_like(x, dtype=result_dtype(total.dtype, weight, bias, round_normed))


@torch.library.custom_op("kernelgraft::layer_norm_add", mutates_args=())
def _op_last(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    return _run_last(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)


@_op_last.register_fake
def _fake_last(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    normed = result_dtype(x.dtype, weight, bias, round_normed)
    return torch.empty_like(x, dtype=torch.promote_types(residual.dtype, normed))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.eps, ctx.offset, *_ = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    wide, up = x.float(), grad.float()
    centred = wide - wide.mean(-1, keepdim=True)
    factor = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + ctx.eps)
    normed = centred * factor
    inner = up if weight is None else up * (weight.float() + float(ctx.offset))
    projected = normed * (inner * normed).mean(-1, keepdim=True)
    of_x = (factor * (inner - inner.mean(-1, keepdim=True) - projected)).to(x.dtype)
    of_weight = of_bias = None
    if weight is not None and ctx.needs_input_grad[1]:
        of_weight = (up * normed).flatten(0, -2).sum(0).to(weight.dtype)
    if ctx.bias is not None and ctx.needs_input_grad[2]:
        of_bias = up.flatten(0, -2).sum(0).to(ctx.bias)
    return of_x, of_weight, of_bias, *[None] * 5


_op.register_autograd(_backward, setup_context=_setup)
