"""Layer norm of rows, alone or beside a residual addition: (x - mean) / sqrt(variance + eps) * weight + bias.

Arithmetic is float32 with the variance taken from the distances to the mean. Gradients are computed by torch in
float32; the forms with a residual have none.
"""

# mypy: disable-error-code="no-untyped-def"
# Tile functions take no annotations.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.plans import current, eager
from kernelgraft.kernels import rows
from kernelgraft.kernels.examples import Example, tensor
from kernelgraft.kernels.row_plans import Call, Norm, call, launch


@ct.kernel
def layer_norm_kernel(
    residual,
    x,
    total,
    y,
    weight,
    bias,
    eps,
    inverse,
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
    ACCESS: ct.Constant[int],
):
    """residual, x, total, y: [lead, rows, width]; weight, bias: [width]."""
    rows.norm_rows(
        residual, x, weight, bias, total, y, eps, inverse, WHERE, True, WEIGHT, BIAS, OFFSET, ROUND_OFFSET, ROUND,
        ROUND_SCALED, ROUND_NORMED, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, LOOP, ACCESS,
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
    run = _run if eager(x, weight, bias) else _op
    return run(x, weight, bias, eps, offset, round_offset, round_normed, divide)


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
    run = _run_first if eager(residual, x, weight, bias) else _op_first
    total, y = run(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)
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
    run = _run_last if eager(residual, x, weight, bias) else _op_last
    return run(residual, x, weight, bias, eps, offset, round_offset, round_normed, divide)


def _dtype(x: torch.Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


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
    dtypes = x.dtype, x.dtype, _dtype(weight), _dtype(bias)
    device = x.get_device()
    found = _call(rows.NO_SUM, x.shape, (x.stride(),), device, dtypes, eps, offset, round_offset, round_normed, divide)
    makes = found.makes if device >= 0 and device == current() else None
    y = torch.empty_like(x, dtype=found.norm.dtypes[1]) if makes is None else makes[1]()
    launch(found, (x, x), (y, y), (x if weight is None else weight, x if bias is None else bias))
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
    dtypes = residual.dtype, x.dtype, _dtype(weight), _dtype(bias)
    strides, device = (residual.stride(), x.stride()), x.get_device()
    found = _call(
        rows.SUM_FIRST, x.shape, strides, device, dtypes, eps, offset, round_offset, round_normed, divide
    )  # fmt: skip
    makes = found.makes if device >= 0 and device == current() else None
    if makes is None:
        first, second = found.norm.dtypes
        total, y = torch.empty_like(residual, dtype=first), torch.empty_like(residual, dtype=second)
    else:
        total, y = makes[0](), makes[1]()
    launch(found, (residual, x), (total, y), (x if weight is None else weight, x if bias is None else bias))
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
    dtypes = residual.dtype, x.dtype, _dtype(weight), _dtype(bias)
    strides, device = (residual.stride(), x.stride()), x.get_device()
    found = _call(
        rows.SUM_LAST, x.shape, strides, device, dtypes, eps, offset, round_offset, round_normed, divide
    )  # fmt: skip
    makes = found.makes if device >= 0 and device == current() else None
    y = torch.empty_like(residual, dtype=found.norm.dtypes[1]) if makes is None else makes[1]()
    launch(found, (residual, x), (y, y), (x if weight is None else weight, x if bias is None else bias))
    return y


@functools.lru_cache(maxsize=4096)
def _call(
    where: int,
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    device: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype | None],
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> Call:
    *_, weight, bias = dtypes
    again, *results = _semantics(where, round_normed, *dtypes)
    first = rows.TO_INPUT if round_normed and not weight is bias is None else rows.KEEP
    scaled = round_normed and weight is not None and bias is not None
    constants = (where, weight is not None, bias is not None, offset, round_offset, first, scaled, again, divide)
    return call(Norm(layer_norm_kernel, eps, constants, tuple(results)), shape, device, *strides)


def _semantics(
    where: int,
    round_normed: bool,
    residual: torch.dtype,
    x: torch.dtype,
    weight: torch.dtype | None,
    bias: torch.dtype | None,
) -> tuple[int, torch.dtype, torch.dtype]:
    """Rounding of the norm before it is added; the dtypes of the sum and of the norm or what it is added to."""
    total = torch.promote_types(residual, x) if where == rows.SUM_FIRST else x
    normed = total
    if round_normed:
        for vector in (weight, bias):
            normed = normed if vector is None else torch.promote_types(normed, vector)
    if where != rows.SUM_LAST:
        return rows.KEEP, total, normed
    result = torch.promote_types(residual, normed)
    return {weight: rows.TO_WEIGHT, x: rows.TO_INPUT}.get(normed, rows.KEEP), result, result


_op = torch.library.custom_op("kernelgraft::layer_norm", _run, mutates_args=())
_op_first = torch.library.custom_op("kernelgraft::add_layer_norm", _run_first, mutates_args=())
_op_last = torch.library.custom_op("kernelgraft::layer_norm_add", _run_last, mutates_args=())


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
    dtypes = x.dtype, x.dtype, _dtype(weight), _dtype(bias)
    return torch.empty_like(x, dtype=_semantics(rows.NO_SUM, round_normed, *dtypes)[2])


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
    dtypes = residual.dtype, x.dtype, _dtype(weight), _dtype(bias)
    _, total, normed = _semantics(rows.SUM_FIRST, round_normed, *dtypes)
    return torch.empty_like(residual, dtype=total), torch.empty_like(residual, dtype=normed)


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
    dtypes = residual.dtype, x.dtype, _dtype(weight), _dtype(bias)
    return torch.empty_like(residual, dtype=_semantics(rows.SUM_LAST, round_normed, *dtypes)[2])


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


def examples() -> list[Example]:
    """Decode, prefill and batches of 32, alone and beside a residual addition; a width of no power of two."""

    def of(
        function: Callable[..., Any],
        *shape: int,
        dtype: torch.dtype = torch.bfloat16,
        vectors: tuple[bool, bool] = (True, True),
        **options: Any,
    ) -> Callable[[str], Any]:
        def run(device: str) -> Any:
            inputs = [tensor(device, *shape, dtype=dtype) for _ in range(1 if function is layer_norm else 2)]
            weight, bias = (tensor(device, shape[-1], dtype=dtype) if there else None for there in vectors)
            return function(*inputs, weight, bias, **options)

        return run

    single = torch.float32
    return [
        Example("decode 1 x 4096", of(layer_norm, 1, 1, 4096)),
        Example("decode 32 x 4096", of(layer_norm, 32, 1, 4096)),
        Example("prefill 4096 x 4096", of(layer_norm, 1, 4096, 4096)),
        Example("sum first, decode 1 x 2560", of(add_layer_norm, 1, 1, 2560)),
        Example("sum first, prefill 4096 x 2560", of(add_layer_norm, 1, 4096, 2560)),
        Example("norm first, prefill 1024 x 768 float16", of(layer_norm_add, 1, 1024, 768, dtype=torch.float16)),
        Example("7 x 513 float32, rounded", of(layer_norm, 7, 513, dtype=single, round_normed=True), tune=False),
        Example("3 x 20000 without bias", of(layer_norm, 3, 20000, vectors=(True, False), offset=True), tune=False),
        Example("2 x 896 without weight and bias", of(layer_norm, 2, 896, vectors=(False, False)), tune=False),
    ]
