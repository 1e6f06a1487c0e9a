"""Norms of rows in Triton: `rms_norm`, `add_rms_norm` and `layer_norm` as in cuTile, for CUDA tensors, forward only.

A program takes a row, or several narrow ones. At decode sizes most of the time is that of launching and of waiting for
memory, so kernels start while the one before still runs (they wait for it before they touch memory) and ask for rows
and weights at once. Triton is imported at the first launch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.cutile.plans import Maker, current, eager, like, makers
from kernelgraft.kernels import rows
from kernelgraft.kernels.rms_norm import rounding
from kernelgraft.kernels.rows_triton_plans import choose, launch_of, lie
from kernelgraft.kernels.triton_launching import Launch

WIDEST = 16384
"""Channels of a row; they stay in registers."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A norm of tensors of known shapes: what is left to do is to make the results and to launch."""

    launch: Launch | None
    """None: nothing to launch, or inputs whose rows have first to be brought to lie as the results'."""
    dtypes: tuple[torch.dtype, ...]
    """Of the results."""
    makes: tuple[Maker, ...] | None


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
    """See `kernelgraft.kernels.rms_norm.rms_norm`; up to `WIDEST` channels."""
    run = _run_rms if eager(x, weight) else _op_rms
    return run(x, weight, eps, offset, cast, round_offset, divide)


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
    """See `kernelgraft.kernels.add_rms_norm.add_rms_norm`; up to `WIDEST` channels."""
    run = _run_add if eager(residual, x, weight) else _op_add
    total, y = run(residual, x, weight, eps, offset, cast, round_offset, divide)
    return total, y


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
    """See `kernelgraft.kernels.layer_norm.layer_norm`; up to `WIDEST` channels."""
    run = _run_layer if eager(x, weight, bias) else _op_layer
    return run(x, weight, bias, eps, offset, round_offset, round_normed, divide)


Vector = tuple[torch.dtype, tuple[int, ...], bool]
"""What there is to know of a weight or a bias: dtype, shape, whether it is contiguous."""


def _seen(t: torch.Tensor | None) -> Vector | None:
    return None if t is None else (t.dtype, t.shape, t.is_contiguous())


def _run_rms(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> torch.Tensor:
    return _alone(x, weight, None, (eps, offset, round_offset, divide, cast))


def _run_layer(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    return _alone(x, weight, bias, (eps, offset, round_offset, divide, round_normed))


def _alone(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, semantics: tuple[Any, ...]
) -> torch.Tensor:
    device = x.get_device()
    found = _call(x.shape, x.stride(), None, device, None, x.dtype, _seen(weight), _seen(bias), semantics)
    makes = found.makes if device >= 0 and device == current() else None
    y = torch.empty_like(x, dtype=found.dtypes[0]) if makes is None else makes[0]()
    if found.launch is not None:
        found.launch(None, x, weight, bias, None, y)
    elif y.numel():
        _relaid(y, None, x, weight, bias, None, semantics)
    return y


def _run_add(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    round_offset: bool,
    divide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    device, semantics = x.get_device(), (eps, offset, round_offset, divide, cast)
    if residual.shape != x.shape:
        raise ValueError(f"residual has the shape {tuple(residual.shape)}, x {tuple(x.shape)}")
    found = _call(
        x.shape, x.stride(), residual.stride(), device, residual.dtype, x.dtype, _seen(weight), None, semantics
    )
    makes = found.makes if device >= 0 and device == current() else None
    if makes is None:
        y, total = (torch.empty_like(residual, dtype=dtype) for dtype in found.dtypes)
    else:
        y, total = makes[0](), makes[1]()
    if found.launch is not None:
        found.launch(residual, x, weight, None, total, y)
    elif y.numel():
        _relaid(y, residual, x, weight, None, total, semantics)
    return total, y


def _relaid(
    y: torch.Tensor,
    residual: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    semantics: tuple[Any, ...],
) -> None:
    """A norm of tensors that lie as no kernel takes them: of contiguous copies, into contiguous results."""
    x, residual, weight, bias = (None if t is None else t.contiguous() for t in (x, residual, weight, bias))  # type: ignore[assignment]
    strides, dtype = (None, None) if residual is None else (residual.stride(), residual.dtype)
    found = _call(x.shape, x.stride(), strides, x.get_device(), dtype, x.dtype, _seen(weight), _seen(bias), semantics)
    y_rows, total_rows = (
        None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (y, total)
    )
    assert found.launch is not None
    found.launch(residual, x, weight, bias, total_rows, y_rows)
    for result, made in ((y, y_rows), (total, total_rows)):
        if result is not None and made is not None:
            result.copy_(made)


@functools.lru_cache(maxsize=4096)
def _call(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    residual_strides: tuple[int, ...] | None,
    device: int,
    residual: torch.dtype | None,
    x: torch.dtype,
    weight: Vector | None,
    bias: Vector | None,
    semantics: tuple[Any, ...],
) -> _Call:
    """`semantics`: eps, offset, round_offset and divide; then the cast of an RMS norm, or whether a layer norm is
    rounded before its weight. The first result is the norm, the second the sum."""
    if not shape or shape[-1] > WIDEST:
        raise ValueError(f"rows of the shape {tuple(shape)}; served are up to {WIDEST} channels")
    for vector in (weight, bias):
        if vector is not None and tuple(vector[1]) != (shape[-1],):
            raise ValueError(f"a weight or bias has the shape {tuple(vector[1])}, the rows have {shape[-1]} channels")
    last = semantics[-1]
    total = x if residual is None else torch.promote_types(residual, x)
    how, scaled, dtype = _rounding(
        last, total, None if weight is None else weight[0], None if bias is None else bias[0]
    )
    results = (dtype,) if residual is None else (dtype, total)
    first = strides if residual_strides is None else residual_strides
    steps = like(shape, first)
    makes = makers(device, *((shape, steps, result) for result in results))
    lain = None
    if 0 not in shape and all(vector is None or vector[2] for vector in (weight, bias)):
        lain = lie(shape, steps, strides, first)
    if lain is None:
        return _Call(None, results, makes)
    chosen = choose(lain.count, shape[-1], x.itemsize)
    dtypes = residual, x, None if weight is None else weight[0], None if bias is None else bias[0]
    return _Call(launch_of(lain, shape[-1], dtypes, semantics, how, scaled, chosen, device), results, makes)


def _rounding(
    last: str | bool, x: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None
) -> tuple[int, bool, torch.dtype]:
    """Rounding before the weight, whether the product with it is rounded, and the dtype of the norm."""
    if isinstance(last, str):
        how, dtype = rounding(last, x, weight)
        return how, False, dtype
    dtype = x
    for vector in (weight, bias) if last else ():
        dtype = dtype if vector is None else torch.promote_types(dtype, vector)
    how = rows.TO_INPUT if last and not weight is bias is None else rows.KEEP
    return how, last and weight is not None and bias is not None, dtype


_op_rms = torch.library.custom_op("kernelgraft::rms_norm_triton", _run_rms, mutates_args=())
_op_add = torch.library.custom_op("kernelgraft::add_rms_norm_triton", _run_add, mutates_args=())
_op_layer = torch.library.custom_op("kernelgraft::layer_norm_triton", _run_layer, mutates_args=())


@_op_rms.register_fake
def _fake_rms(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: bool, cast: str, *_: bool
) -> torch.Tensor:
    return torch.empty_like(x, dtype=_rounding(cast, x.dtype, None if weight is None else weight.dtype, None)[2])


@_op_add.register_fake
def _fake_add(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    *_: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.promote_types(residual.dtype, x.dtype)
    dtype = _rounding(cast, total, None if weight is None else weight.dtype, None)[2]
    return torch.empty_like(residual, dtype=total), torch.empty_like(residual, dtype=dtype)


@_op_layer.register_fake
def _fake_layer(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    offset: bool,
    round_offset: bool,
    round_normed: bool,
    divide: bool,
) -> torch.Tensor:
    dtypes = (None if t is None else t.dtype for t in (weight, bias))
    return torch.empty_like(x, dtype=_rounding(round_normed, x.dtype, *dtypes)[2])
