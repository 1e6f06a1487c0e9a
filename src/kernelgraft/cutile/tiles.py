"""A tile's value on the CPU, and the poison that marks elements without a determined value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile.dtypes import DType, carrier, truncate
from kernelgraft.cutile.faults import fault
from kernelgraft.cutile.rounding import round_float64

Number = bool | int | float


class Tile(ct.Tile):
    """Values of one tile. Immutable: operations make new tiles, so that views may be shared.

    `data` is the carrier tensor of the tile's shape. `poison` marks elements whose value is not determined (padding
    without a mode, memory that was never written, what a division by zero gives); `origin` says where they came from.
    """

    __slots__ = ("_dtype", "data", "origin", "poison")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, data: torch.Tensor, dtype: DType, poison: torch.Tensor | None = None, origin: str | None = None
    ) -> None:
        self.data = data
        self._dtype = dtype
        self.poison = poison
        self.origin = origin

    @property
    def dtype(self) -> DType:
        """The cuTile dtype of the elements."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tile's shape."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.data.dim()

    def item(self) -> Tile:
        """The only element as a tile of no dimensions."""
        if self.data.numel() != 1:
            raise ct.TileTypeError(f"Cannot reshape {self.shape} to ()")
        return Tile(self.data.reshape(()), self._dtype, reshaped(self.poison, ()), self.origin)

    def __getitem__(self, key: Any) -> Tile:
        """`x[:, None]`: new dimensions; anything else is refused, as in cuTile."""
        keys = key if isinstance(key, tuple) else (key,)
        if key is not None and not isinstance(key, tuple):
            raise ct.TileTypeError("Directly indexing a tile is not supported; use `extract()` or `item()` instead.")
        for item in keys:
            if not (item is None or item is Ellipsis or item == slice(None)):
                raise ct.TileTypeError(
                    f"Expected `None|np.newaxis` or `ellipsis` or full slice (`:`), but got {item}."
                    " Hint: Directly indexing a tile is not supported, use `extract` or `item`."
                )
        slices = sum(isinstance(item, slice) for item in keys)
        if slices > self.ndim:
            raise ct.TileTypeError(f"Tile is {self.ndim}-dimensional, but {slices} were indexed")
        return moved(self, lambda data: data[keys])

    def __bool__(self) -> bool:
        if self.data.dim():
            raise ct.TileTypeError(f"Expected a scalar value, but given value has type {describe(self)}")
        return bool(self.number("branches on"))

    def __index__(self) -> int:
        if self.data.dim() or self.data.is_floating_point() or self._dtype == ct.bool_:
            raise ct.TileTypeError(f"Expected an integer scalar, but given value has type {describe(self)}")
        return int(self.number("counts or indexes with"))

    def number(self, use: str) -> Number:
        """The value of a tile of no dimensions as a Python number; a fault that says `use` if it is poisoned."""
        if self.poison is not None and bool(self.poison):
            fault(f"{use} a value from {self.origin}")
        value = self.data.item()
        return value + (1 << 64) if self._dtype == ct.uint64 and value < 0 else value

    def __iter__(self) -> Any:
        raise ct.TileTypeError("Tiles cannot be iterated over; use `ct.extract`")

    def __pos__(self) -> Tile:
        return Tile(self.data.to(torch.int32), ct.int32, self.poison, self.origin) if self._dtype == ct.bool_ else self

    def __abs__(self) -> Any:
        return ct.abs(self)

    def __format__(self, spec: str) -> str:
        return _text(self.data.tolist(), spec or ("f" if self.data.is_floating_point() else "d"))

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return f"<{describe(self)}>"


def _text(values: Any, spec: str) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_text(value, spec) for value in values) + "]"
    return format(int(values) if isinstance(values, bool) else values, spec)


def describe(value: Any) -> str:
    """A value's type as cuTile's messages write it."""
    if isinstance(value, Tile):
        return f"Tile[{value.dtype},{_shape_text(value.shape)}]"
    return type(value).__name__


def _shape_text(shape: tuple[int, ...]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"


_constants: dict[tuple[type, Number, DType], torch.Tensor] = {}


def constant(value: Number, dtype: DType) -> torch.Tensor:
    """A Python number as a carrier tensor of no dimensions: integers keep their low bits, floats are rounded."""
    key = (type(value), value, dtype)
    found = _constants.get(key)
    if found is not None and (value or math.copysign(1.0, value) > 0):
        return found
    made = _make_constant(value, dtype)
    if value == value and len(_constants) < 10_000 and (value or math.copysign(1.0, value) > 0):
        _constants[key] = made
    return made


def _make_constant(value: Number, dtype: DType) -> torch.Tensor:
    held = carrier(dtype)
    if held == torch.bool:
        return torch.tensor(bool(value))
    if not held.is_floating_point:
        return torch.tensor(truncate(int(value), dtype), dtype=held)
    if held == torch.float64:
        return torch.tensor(float(value), dtype=held)
    return round_float64(torch.tensor(float(value), dtype=torch.float64), dtype)


def scalar(value: Number, dtype: DType) -> Tile:
    """A tile of no dimensions with a determined value."""
    return Tile(constant(value, dtype), dtype)


def int32(value: int) -> Tile:
    """A 32-bit scalar, as block indices and shapes are."""
    return Tile(constant(value, ct.int32), ct.int32)


def reshaped(poison: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A poison mask in another shape."""
    return None if poison is None else poison.reshape(shape)


def spread(*tiles: Any) -> tuple[torch.Tensor | None, str | None]:
    """The union of several operands' poison (broadcast by torch), and where the first of it came from."""
    poison: torch.Tensor | None = None
    origin: str | None = None
    for tile in tiles:
        if isinstance(tile, Tile) and tile.poison is not None:
            poison = tile.poison if poison is None else poison | tile.poison
            origin = origin or tile.origin
    return poison, origin


def fitted(poison: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Poison broadcast to the shape of the result that it belongs to."""
    return poison if poison is None or poison.shape == shape else poison.expand(shape)


def moved(x: Tile, move: Callable[[torch.Tensor], torch.Tensor]) -> Tile:
    """A tile whose elements are moved or repeated, and its poison with them."""
    return Tile(move(x.data), x._dtype, None if x.poison is None else move(x.poison), x.origin)
