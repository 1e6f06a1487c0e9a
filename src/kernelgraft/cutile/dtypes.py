"""cuTile's data types on the CPU: which torch dtype holds a tile's values, and how they lie in memory.

A tile's values are held in a *carrier*: the torch dtype of the same name where torch computes with it, otherwise a
wider one that holds every value exactly (float32 for tf32 and the eight- and four-bit floats, int32 and int64 for the
unsigned integers that torch cannot add). 64-bit unsigned integers lie bit for bit in int64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cuda.tile as ct
import numpy as np
import torch
from cuda.tile import DType
from cuda.tile._cext import foreign_dtype_object_to_native
from cuda.tile._datatype import is_integral, is_signed

CARRIERS: dict[DType, torch.dtype] = {
    ct.bool_: torch.bool,
    ct.int8: torch.int8,
    ct.int16: torch.int16,
    ct.int32: torch.int32,
    ct.int64: torch.int64,
    ct.uint8: torch.uint8,
    ct.uint16: torch.int32,
    ct.uint32: torch.int64,
    ct.uint64: torch.int64,
    ct.float16: torch.float16,
    ct.bfloat16: torch.bfloat16,
    ct.float32: torch.float32,
    ct.float64: torch.float64,
    ct.tfloat32: torch.float32,
    ct.float8_e4m3fn: torch.float32,
    ct.float8_e5m2: torch.float32,
    ct.float8_e8m0fnu: torch.float32,
    ct.float4_e2m1fn: torch.float32,
}
"""cuTile dtype → torch dtype that holds the values of a tile."""

MASKS: dict[DType, int] = {ct.uint16: 0xFFFF, ct.uint32: 0xFFFF_FFFF}
"""Unsigned dtypes whose carrier is wider: results are cut to these bits."""

_SMALL_FLOATS: dict[DType, torch.dtype] = {
    ct.float8_e4m3fn: torch.float8_e4m3fn,
    ct.float8_e5m2: torch.float8_e5m2,
    ct.float8_e8m0fnu: torch.float8_e8m0fnu,
}

_MEMORY_VIEWS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **dict.fromkeys(_SMALL_FLOATS.values(), torch.uint8),
}
_UNSIGNED_SIGN = -(1 << 63)


def carrier(dtype: DType) -> torch.dtype:
    """The torch dtype that holds tiles of `dtype`; NotImplementedError for one that the interpreter lacks."""
    found = CARRIERS.get(dtype)
    if found is None:
        raise NotImplementedError(f"the interpreter has no dtype `{dtype}`; run this kernel on a GPU")
    return found


@lru_cache(maxsize=256)
def _native(dtype: Any) -> DType | None:
    return foreign_dtype_object_to_native(dtype)


def as_dtype(value: Any) -> DType:
    """A dtype of cuTile, torch or NumPy → cuTile's; TileTypeError for anything else."""
    if isinstance(value, DType):
        return value
    found = _native(value) if _may_be_dtype(value) else None
    if found is None:
        raise ct.TileTypeError(f"Expected a dtype constant, but given value has type {type(value).__name__}")
    return found


def is_dtype(value: Any) -> bool:
    """Whether `value` is a dtype that cuTile knows."""
    return isinstance(value, DType) or (_may_be_dtype(value) and _native(value) is not None)


def _may_be_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype | np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """The torch dtype through which memory of `dtype` is read and written."""
    return _MEMORY_VIEWS.get(dtype, dtype)


def decode(raw: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Values read from memory → carrier (a new tensor, never a view of the memory)."""
    small = _SMALL_FLOATS.get(dtype)
    if small is not None:
        return raw.view(small).to(torch.float32)
    held = CARRIERS[dtype]
    if raw.dtype == held:
        return raw.clone()
    data = raw.to(held)
    mask = MASKS.get(dtype)
    return data if mask is None else data & mask


def encode(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Carrier → what is written to memory; exact, or cut to the low bits of an integer."""
    small = _SMALL_FLOATS.get(dtype)
    if small is not None:
        return data.to(small).view(torch.uint8)
    width = {ct.uint16: torch.int16, ct.uint32: torch.int32}.get(dtype)
    return data if width is None else data.to(width)


def wrap(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Cut the result of an integer operation to the bits of `dtype`."""
    mask = MASKS.get(dtype)
    return data if mask is None else data & mask


def ordered(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Values in which `<` means what it means in `dtype`: 64-bit unsigned bits are moved to the signed order."""
    return data ^ _UNSIGNED_SIGN if dtype == ct.uint64 else data


def integer_limits(dtype: DType) -> tuple[int, int]:
    """Smallest and largest value of an integer dtype."""
    bits = dtype.bitwidth
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed(dtype) else (0, (1 << bits) - 1)


def truncate(value: int, dtype: DType) -> int:
    """A Python integer as the carrier of `dtype` holds its low bits."""
    bits = dtype.bitwidth
    value &= (1 << bits) - 1
    top = value >> (bits - 1)
    return value - (1 << bits) if top and (is_signed(dtype) or dtype == ct.uint64) else value


def to_bits(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Carrier of any dtype of 8 bits or more → its bit patterns as a signed integer of that width."""
    width = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[dtype.bitwidth]
    small = _SMALL_FLOATS.get(dtype)
    if small is not None:
        return data.to(small).view(torch.int8)
    if is_integral(dtype):
        return data.to(width) if data.dtype != torch.uint8 else data.view(torch.int8)
    return data.contiguous().view(width)


def from_bits(bits: torch.Tensor, dtype: DType) -> torch.Tensor:
    """The inverse of `to_bits`."""
    small = _SMALL_FLOATS.get(dtype)
    if small is not None:
        return bits.view(small).to(torch.float32)
    if dtype == ct.uint8:
        return bits.view(torch.uint8)
    if is_integral(dtype):
        return wrap(bits.to(CARRIERS[dtype]), dtype)
    return bits.contiguous().view(CARRIERS[dtype])


_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def float4_bits(data: torch.Tensor) -> torch.Tensor:
    """Four-bit floats → their codes, one in each uint8."""
    codes = torch.bucketize(data.abs(), _FLOAT4).to(torch.uint8)
    return codes | (torch.signbit(data).to(torch.uint8) << 3)


def float4_values(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `float4_bits`."""
    size = _FLOAT4[(codes & 7).to(torch.int64)]
    return torch.where(codes >= 8, -size, size)
