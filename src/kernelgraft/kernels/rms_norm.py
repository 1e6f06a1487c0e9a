"""RMS norm of rows: x / sqrt(mean(x²) + eps), times a weight or one plus it.

Arithmetic is float32; results are rounded where the `cast` of the original rounds them. Gradients are computed by torch
from the formula in float32.
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
from kernelgraft.kernels.row_plans import Call, Norm, call, launch

CASTS = ("before_weight", "after_weight", "weight_dtype", "factor", "none")
"""Where the original leaves float32; with `none` it never enters it, and this kernel rounds at the end."""
HALF = (torch.float16, torch.bfloat16)


@ct.kernel
def rms_norm_kernel(
    x,
    y,
    weight,
    eps,
    inverse,
    WEIGHT: ct.Constant[bool],
    OFFSET: ct.Constant[bool],
    ROUND_OFFSET: ct.Constant[bool],
    ROUND: ct.Constant[int],
    DIVIDE: ct.Constant[bool],
    ROWS: ct.Constant[int],
    TILE: ct.Constant[int],
    PIECES: ct.Constant[int],
    EXACT: ct.Constant[bool],
    RESIDENT: ct.Constant[bool],
    LOOP: ct.Constant[bool],
    ACCESS: ct.Constant[int],
):
    """x, y: [lead, rows, width]; weight: [width]."""
    rows.norm_rows(
        x, x, weight, weight, y, y, eps, inverse, rows.NO_SUM, False, WEIGHT, False, OFFSET, ROUND_OFFSET, ROUND,
        False, rows.KEEP, DIVIDE, ROWS, TILE, PIECES, EXACT, RESIDENT, LOOP, ACCESS,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def rounding(cast: str, x: torch.dtype, weight: torch.dtype | None) -> tuple[int, torch.dtype]:
    """How a cast rounds before the weight, and the dtype of its result."""
    if weight is None:
        return (rows.FACTOR if cast == "factor" else rows.KEEP), x
    if cast == "after_weight":
        return rows.KEEP, x
    if cast == "weight_dtype":
        return (rows.TO_WEIGHT, weight) if weight in HALF else (rows.KEEP, torch.float32)
    how = {"before_weight": rows.TO_INPUT, "factor": rows.FACTOR, "none": rows.KEEP}[cast]
    return how, torch.promote_types(x, weight)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: bool = False,
    cast: str = "after_weight",
    round_offset: bool = False,
    divide: bool = False,
) -> torch.Tensor:
    """RMS norm over the last axis.

    x: [..., width], any strides; weight: [width]; float32, bfloat16 or float16. `offset` adds one to the weight, with
    `round_offset` in the weight's dtype; `cast`: one of `CASTS`; `divide` by the root instead of multiplying by its
    inverse.
    """
    run = _run if eager(x, weight) else _op
    return run(x, weight, eps, offset, cast, round_offset, divide)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> torch.Tensor:
    vector = None if weight is None else weight.dtype
    device = x.get_device()
    found = _call(x.shape, x.stride(), device, x.dtype, vector, eps, offset, cast, round_offset, divide)
    makes = found.makes if device >= 0 and device == current() else None
    y = torch.empty_like(x, dtype=found.norm.dtypes[0]) if makes is None else makes[0]()
    if found.direct:
        fire(found.plan, (x, y, x if weight is None else weight))  # type: ignore[arg-type]
    else:
        launch(found, (x,), (y,), (x if weight is None else weight,))
    return y


@functools.lru_cache(maxsize=4096)
def _call(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    device: int,
    x: torch.dtype,
    weight: torch.dtype | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> Call:
    how, dtype = rounding(cast, x, weight)
    norm = Norm(rms_norm_kernel, eps, (weight is not None, offset, round_offset, how, divide), (dtype,))
    return call(norm, shape, device, strides)


_op = torch.library.custom_op("kernelgraft::rms_norm", _run, mutates_args=())


@_op.register_fake
def _fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: bool, cast: str, *_: bool) -> torch.Tensor:
    return torch.empty_like(x, dtype=rounding(cast, x.dtype, None if weight is None else weight.dtype)[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.eps, ctx.offset, *_ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    return (*gradients(x, weight, grad, ctx.eps, ctx.offset, ctx.needs_input_grad[1]), *[None] * 5)


def gradients(
    x: torch.Tensor, weight: torch.Tensor | None, grad: torch.Tensor, eps: float, offset: bool, of_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of an RMS norm for x and, if wanted, its weight: computed in float32."""
    wide, up = x.float(), grad.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scaled = up if weight is None else up * (weight.float() + float(offset))
    normed = wide * factor
    of_x = factor * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    total = None
    if weight is not None and of_weight:
        total = (up * normed).flatten(0, -2).sum(0).to(weight.dtype)
    return of_x.to(x.dtype), total


_op.register_autograd(_backward, setup_context=_setup)


def examples() -> list[Example]:
    """Decode, prefill and batches of 32; narrow heads; a width of no power of two, one wider than registers."""
    half, single = torch.bfloat16, torch.float32

    def of(
        *shape: int, x: torch.dtype = half, weight: torch.dtype | None = half, **options: Any
    ) -> Callable[[str], Any]:
        def run(device: str) -> torch.Tensor:
            vector = None if weight is None else tensor(device, shape[-1], dtype=weight)
            return rms_norm(tensor(device, *shape, dtype=x), vector, **options)

        return run

    return [
        Example("decode 1 x 4096", of(1, 1, 4096, cast="before_weight")),
        Example("decode 32 x 4096", of(32, 1, 4096, cast="before_weight")),
        Example("prefill 4096 x 4096", of(1, 4096, 4096, cast="before_weight")),
        Example("prefill 4096 x 16 heads of 128", of(1, 4096, 16, 128, cast="before_weight")),
        Example("prefill 1024 x 2560, one plus the weight", of(1, 1024, 2560, offset=True)),
        Example("prefill 1024 x 3072 float16", of(1, 1024, 3072, x=torch.float16, weight=torch.float16)),
        Example("7 x 513 float32", of(7, 513, x=single, weight=single, cast="none"), tune=False),
        Example("3 x 20000, float32 weight", of(3, 20000, weight=single, cast="weight_dtype"), tune=False),
        Example("2 x 896 without weight, divided", of(2, 896, weight=None, cast="factor", divide=True), tune=False),
    ]
