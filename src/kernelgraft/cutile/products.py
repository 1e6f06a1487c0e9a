"""Matrix products: summed in the accumulator's precision."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import _datatype as datatype
from cuda.tile._datatype import is_integral

from kernelgraft.cutile.dtypes import CARRIERS, DType
from kernelgraft.cutile.promotion import promote, typed
from kernelgraft.cutile.rounding import convert
from kernelgraft.cutile.shaping import flat
from kernelgraft.cutile.tiles import Tile, fitted, spread

Tensor = torch.Tensor
_TypeError = ct.TileTypeError

_HALF_STEP = 16
"""Columns after which a float16 accumulator is rounded: one tensor-core instruction's depth."""


def _matrix_shapes(x: Tile, y: Tile) -> tuple[Tile, Tile, tuple[int, ...]]:
    left = flat(x, (1, *x.shape)) if x.ndim == 1 else x
    right = flat(y, (*y.shape, 1)) if y.ndim == 1 else y
    if left.shape[-1] != right.shape[-2]:
        raise _TypeError(f"Incompatible shapes for matrix mul on tiles: {left.shape}, {right.shape}.")
    try:
        batch = tuple(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    except RuntimeError:
        raise _TypeError(f"Incompatible shapes for matrix mul on tiles: {left.shape}, {right.shape}.") from None
    output = (*batch, left.shape[-2], right.shape[-1])
    if x.ndim == 1:
        output = (*output[:-2], output[-1])
    return left, right, output[:-1] if y.ndim == 1 else output


def _accumulate(x: Tensor, y: Tensor, acc: Tensor, acc_dtype: DType) -> Tensor:
    """x @ y + acc, summed in the accumulator's precision."""
    if is_integral(acc_dtype):
        exact = torch.matmul(x.double(), y.double()).to(torch.int64) + acc.to(torch.int64)
        return exact.to(CARRIERS[acc_dtype])
    if acc_dtype == ct.float16:
        for start in range(0, x.shape[-1], _HALF_STEP):
            part = torch.matmul(
                x[..., start : start + _HALF_STEP].float(), y[..., start : start + _HALF_STEP, :].float()
            )
            acc = (acc.float() + part).half()
        return acc
    wide = CARRIERS[acc_dtype]
    return torch.matmul(x.to(wide), y.to(wide)) + acc


def _product_poison(x: Tile, y: Tile, acc: Tile | None, shape: torch.Size) -> tuple[Tensor | None, str | None]:
    poison: Tensor | None = None
    origin: str | None = None
    rows = x.poison.any(-1, keepdim=True) if x.poison is not None else None
    columns = y.poison.any(-2, keepdim=True) if y.poison is not None else None
    for mask, source in ((rows, x), (columns, y), (None if acc is None else acc.poison, acc)):
        if mask is not None and source is not None and bool(mask.any()):
            poison = mask if poison is None else poison | mask
            origin = origin or source.origin
    return fitted(poison, shape), origin


def mma(x: Any, y: Any, /, acc: Any, *, use_fast_acc: bool = False) -> Tile:
    """x @ y + acc, in the accumulator's dtype; x and y are not promoted."""
    left, right, start = typed(x), typed(y), typed(acc)
    for name, tile in (("x", left), ("y", right)):
        if tile.ndim < 2:
            raise _TypeError(f"Expect shape of `{name}` to be at least 2D, got {tile.shape}")
    a, b, output = _matrix_shapes(left, right)
    if start.shape != output:
        raise _TypeError(f"Expect acc shape to be {output}, got {start.shape}")
    if use_fast_acc and left._dtype not in (ct.float8_e4m3fn, ct.float8_e5m2):
        raise _TypeError(
            f"use_fast_acc is only supported for fp8 input dtypes (float8_e4m3fn, float8_e5m2), got {left._dtype}"
        )
    datatype._resolve_mma_supported_dtype(left._dtype, right._dtype, start._dtype)
    data = _accumulate(a.data, b.data, start.data, start._dtype)
    poison, origin = _product_poison(a, b, start, data.shape)
    return Tile(data, start._dtype, poison, origin)


def matmul(x: Any, y: Any, /) -> Tile:
    """x @ y in the operands' common dtype, summed in the accumulator that cuTile takes for it."""
    left, right = typed(x), typed(y)
    a, b, output = _matrix_shapes(left, right)
    dtype = promote(left._dtype, right._dtype)
    summed = datatype._resolve_mma_supported_dtype(dtype, dtype, None)
    one, other = convert(a.data, a._dtype, dtype), convert(b.data, b._dtype, dtype)
    zero = torch.zeros((), dtype=CARRIERS[summed])
    data = convert(_accumulate(one, other, zero, summed), summed, dtype)
    poison, origin = _product_poison(a, b, None, data.shape)
    return flat(Tile(data, dtype, poison, origin), output)


def mma_scaled(x: Any, x_scale: Any, y: Any, y_scale: Any, /, acc: Any) -> Tile:
    """(x · x_scale) @ (y · y_scale) + acc, with one scale for each block along the summed dimension."""
    a, a_scale, b, b_scale, start = typed(x), typed(x_scale), typed(y), typed(y_scale), typed(acc)
    for name, tile in (("x", a), ("y", b), ("acc", start), ("x_scale", a_scale), ("y_scale", b_scale)):
        if tile.ndim not in (2, 3):
            raise _TypeError(f"Expect shape of `{name}` to be 2D or 3D, got {tile.shape}")
    datatype._resolve_mma_scaled_supported_dtype(a._dtype, a_scale._dtype, b._dtype, b_scale._dtype, start._dtype)
    allowed = datatype._get_mma_scaled_scaling_block_sizes(a._dtype, a_scale._dtype)
    left = _scaled(a, a_scale, -1, "x", allowed)
    right = _scaled(b, b_scale, -2, "y", allowed)
    _, _, output = _matrix_shapes(left, right)
    if start.shape != output:
        raise _TypeError(f"Expect acc shape to be {output}, got {start.shape}")
    data = torch.matmul(left.data.double(), right.data.double()).float() + start.data
    poison, origin = _product_poison(left, right, start, data.shape)
    return Tile(data, start._dtype, poison, origin)


def _scaled(x: Tile, scale: Tile, axis: int, name: str, allowed: tuple[int, ...]) -> Tile:
    place = axis % x.ndim
    if [s for i, s in enumerate(x.shape) if i != place] != [s for i, s in enumerate(scale.shape) if i != place]:
        raise _TypeError(
            f"{name}_scale shape {scale.shape} is not compatible with {name} shape {x.shape}. "
            f"All dimensions except K axis {place} must match"
        )
    size, rest = divmod(x.shape[place], scale.shape[place])
    if rest or size not in allowed:
        raise _TypeError(
            f"For mma_scaled with dtype={x._dtype}, scale_dtype={scale._dtype}: {name}.shape[{place}] must be an exact"
            f" multiple of {name}_scale.shape[{place}] with scaling block size B = K // K_s in {set(allowed)}, got"
            f" {name}.shape[{place}] = {x.shape[place]} and {name}_scale.shape[{place}] = {scale.shape[place]}"
        )
    data = x.data * scale.data.repeat_interleave(size, place)
    repeated = None if scale.poison is None else scale.poison.repeat_interleave(size, place)
    poison, origin = spread(x, Tile(scale.data, scale._dtype, repeated, scale.origin))
    return Tile(data, ct.float32, fitted(poison, data.shape), origin)
