"""Rounding of carriers to cuTile's dtypes: nearest-even, the directed modes, saturation, float to integer."""

from __future__ import annotations

import cuda.tile as ct
import torch
from cuda.tile import RoundingMode
from cuda.tile._datatype import is_boolean, is_float, is_integral, is_signed

from kernelgraft.cutile.dtypes import CARRIERS, DType, carrier, wrap

LARGEST: dict[DType, float] = {ct.float8_e4m3fn: 448.0, ct.float8_e5m2: 57344.0, ct.float4_e2m1fn: 6.0}
"""Finite maxima of the dtypes to which a conversion saturates."""

_EIGHT_BITS = {ct.float8_e4m3fn: torch.float8_e4m3fn, ct.float8_e5m2: torch.float8_e5m2}
_MANTISSA_BITS = {ct.float16: 10, ct.bfloat16: 7, ct.float32: 23, ct.tfloat32: 10}


def narrow_odd(value: torch.Tensor) -> torch.Tensor:
    """float64 → float32 rounded to odd, so that a second rounding to fewer bits gives what one rounding would."""
    near = value.to(torch.float32)
    back = near.to(torch.float64)
    bits = near.view(torch.int32)
    inexact = (back != value) & value.isfinite()
    cut = torch.where(back.abs() > value.abs(), bits - 1, bits)
    return torch.where(inexact, cut | 1, bits).view(torch.float32)


def round_float32(value: torch.Tensor, dtype: DType) -> torch.Tensor:
    """float32 (or a narrower float, exactly held) → carrier of `dtype`, to nearest with ties to even."""
    held = CARRIERS[dtype]
    if dtype == ct.tfloat32:
        return _round_tf32(value.to(torch.float32))
    if dtype in _EIGHT_BITS:
        largest = LARGEST[dtype]
        return value.to(torch.float32).clamp(-largest, largest).to(_EIGHT_BITS[dtype]).to(torch.float32)
    if dtype == ct.float4_e2m1fn:
        return _round_fp4(value.to(torch.float32))
    if dtype == ct.float8_e8m0fnu:
        return _power_of_two(value.to(torch.float64), None)
    return value.to(held)


def round_float64(value: torch.Tensor, dtype: DType) -> torch.Tensor:
    """float64 → carrier of `dtype` in one rounding to nearest with ties to even."""
    if dtype in (ct.float64, ct.float32):
        return value.to(CARRIERS[dtype])
    if dtype == ct.float8_e8m0fnu:
        return _power_of_two(value, None)
    return round_float32(narrow_odd(value), dtype)


def _round_tf32(value: torch.Tensor) -> torch.Tensor:
    bits = value.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(value.isfinite(), rounded, bits).view(torch.float32)


def _round_fp4(value: torch.Tensor) -> torch.Tensor:
    size = value.abs().clamp(max=6.0)
    # Steps of 0.5 to 2, of 1 to 4, of 2 above; torch rounds halves to even, and so do the steps' even mantissas.
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, value)


def _power_of_two(value: torch.Tensor, mode: RoundingMode | None) -> torch.Tensor:
    mantissa, exponent = torch.frexp(value)
    exact = mantissa == 0.5
    up = {RoundingMode.RZ: False, RoundingMode.RP: True}.get(mode) if mode else None
    raised = ~exact if up else torch.zeros_like(exact) if up is not None else mantissa >= 0.75
    power = (exponent - 1 + raised.to(exponent.dtype)).clamp(-127, 127)
    two = torch.ldexp(torch.ones_like(value), power)
    two = torch.where(value.isinf(), 2.0**127, torch.where(value <= 0, 2.0**-127, two))
    return torch.where(value.isnan(), value, two).to(torch.float32)


def round_directed(value: torch.Tensor, dtype: DType, mode: RoundingMode) -> torch.Tensor:
    """float64 → carrier of `dtype` rounded in `mode` (RN, RZ, RM, RP, RA); no saturation to infinity towards zero."""
    if dtype == ct.float8_e8m0fnu:
        return _power_of_two(value, mode)
    near = round_float64(value, dtype)
    if mode == RoundingMode.RN or dtype == ct.float64:
        return near
    if dtype not in _MANTISSA_BITS:
        raise NotImplementedError(f"the interpreter does not round to {dtype} with {mode}; run this kernel on a GPU")
    below = torch.where(near.to(torch.float64) > value, _step(near, dtype, up=False), near)
    above = torch.where(near.to(torch.float64) < value, _step(near, dtype, up=True), near)
    if mode == RoundingMode.RM:
        chosen = below
    elif mode == RoundingMode.RP:
        chosen = above
    elif mode == RoundingMode.RZ:
        chosen = torch.where(value >= 0, below, above)
    elif mode == RoundingMode.RA:
        tie = (value - below.to(torch.float64)) == (above.to(torch.float64) - value)
        chosen = torch.where(tie, torch.where(value >= 0, above, below), near)
    else:
        raise NotImplementedError(f"the interpreter does not round with {mode}")
    return torch.where(value.isfinite(), chosen, near)


def _step(value: torch.Tensor, dtype: DType, *, up: bool) -> torch.Tensor:
    """The neighbour of each value in `dtype`."""
    width = {2: torch.int16, 4: torch.int32}[value.element_size()]
    one = 1 << 13 if dtype == ct.tfloat32 else 1
    bits = value.view(width)
    away = (value > 0) if up else (value < 0)
    smallest = torch.full_like(bits, one)
    at_zero = smallest if up else smallest | torch.iinfo(width).min
    return torch.where(value == 0, at_zero, torch.where(away, bits + one, bits - one)).view(value.dtype)


def convert(data: torch.Tensor, source: DType, target: DType, mode: RoundingMode | None = None) -> torch.Tensor:
    """Carrier of `source` → carrier of `target`, as cuTile's conversions do.

    Integers keep their low bits; floats to integers are cut towards zero and saturate, to eight bits through sixteen;
    NaN gives 0, but the highest bit alone from float64 or to 64 bits. Floats to floats round once in `mode` (default to
    nearest even), to the eight-bit floats with saturation.
    """
    if source == target:
        return data
    held = carrier(target)
    if is_boolean(target):
        return data != 0
    if is_float(target):
        if is_float(source):
            return _float_to_float(data, source, target, mode)
        if source == ct.uint64:
            return round_float64(_unsigned_to_float64(data), target)
        if source == ct.int64 and held == torch.float32 and target == ct.float32:
            return data.to(torch.float32)
        return round_float64(data.to(torch.float64), target)
    if is_integral(source) or is_boolean(source):
        return wrap(data.to(held), target)
    return _float_to_integer(data, source, target)


def _float_to_float(data: torch.Tensor, source: DType, target: DType, mode: RoundingMode | None) -> torch.Tensor:
    if mode not in (None, RoundingMode.RN) and target != ct.float64:
        return round_directed(data.to(torch.float64), target, mode)
    return round_float64(data, target) if source == ct.float64 else round_float32(data, target)


def _unsigned_to_float64(data: torch.Tensor) -> torch.Tensor:
    high = (data >> 32) & 0xFFFF_FFFF
    return high.to(torch.float64) * 2.0**32 + (data & 0xFFFF_FFFF).to(torch.float64)


def _float_to_integer(data: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    """As the GPU's instructions do it: eight bits are the low ones of sixteen, to which the value saturates."""
    signed, width = is_signed(target), max(target.bitwidth, 16)
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)
    wide = torch.nan_to_num(data.to(torch.float64), nan=0.0).trunc()
    if width == 64:
        # The limits are no float64: what reaches the upper one is set apart.
        half = (wide >= 2.0**63).to(torch.float64) * (0.0 if signed else 2.0**63)
        bits = (wide - half).clamp(float(low), 2.0**63 - 1024).to(torch.int64) | (half > 0).to(torch.int64) << 63
        whole = torch.where(wide >= float(high), high if signed else -1, bits)
    else:
        whole = wide.clamp(low, high).to(torch.int64)
    if source == ct.float64 or width == 64:
        # 1 << (width - 1), which as signed 64 bits is the smallest.
        whole = torch.where(data.isnan(), -(2**63) if width == 64 else 2 ** (width - 1), whole)
    return wrap(whole.to(CARRIERS[target]), target)
