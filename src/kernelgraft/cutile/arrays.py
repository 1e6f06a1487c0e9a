"""Arrays as a kernel sees them: a tensor's storage, an offset, a shape and strides; and what of it was ever written."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import PaddingMode

from kernelgraft.cutile.dtypes import DType, as_dtype, memory_dtype
from kernelgraft.cutile.faults import fault
from kernelgraft.cutile.promotion import axis_of, integers, tile_shape
from kernelgraft.cutile.tiles import Tile, describe, scalar

_TypeError = ct.TileTypeError


@dataclass
class _Unwritten:
    tensor: weakref.ref[torch.Tensor]
    written: torch.Tensor
    version: int | None


def _version(tensor: torch.Tensor) -> int | None:
    """How often torch has written to a tensor; None where it does not count (in inference mode)."""
    return None if tensor.is_inference() else tensor._version


_unwritten: dict[int, _Unwritten] = {}
"""Storage address → which elements a kernel has written, for tensors allocated without values."""


def uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor's memory as never written, fill it with NaN (integers: 0x55…), and return it.

    The interpreter then reports a kernel that uses what no kernel wrote. A torch operation that writes to the tensor
    ends this for all of it.
    """
    storage = tensor.untyped_storage()
    if not tensor.numel() or tensor.device.type != "cpu":
        return tensor
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x55)
    count = storage.nbytes() // tensor.element_size()
    for address in [a for a, entry in _unwritten.items() if entry.tensor() is None]:
        del _unwritten[address]
    written = torch.zeros(count, dtype=torch.bool)
    _unwritten[storage.data_ptr()] = _Unwritten(weakref.ref(tensor), written, _version(tensor))
    return tensor


def written(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements of a tensor were written since `uninitialised`; all of them for any other tensor."""
    entry = _entry(tensor)
    if entry is None:
        return torch.ones(tensor.shape, dtype=torch.bool)
    return entry.written.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _entry(tensor: torch.Tensor) -> _Unwritten | None:
    address = tensor.untyped_storage().data_ptr()
    entry = _unwritten.get(address)
    if entry is None:
        return None
    owner = entry.tensor()
    if (
        owner is None
        or owner.untyped_storage().data_ptr() != address
        or _version(owner) != entry.version
        or owner.element_size() != tensor.element_size()
    ):
        del _unwritten[address]
        return None
    return entry


def forget_written() -> None:
    """Before a launch: stop watching tensors that torch has written to."""
    for address, entry in list(_unwritten.items()):
        owner = entry.tensor()
        if owner is None or _version(owner) != entry.version:
            del _unwritten[address]


def settle() -> None:
    """After a launch: what kernels wrote is no write of torch's."""
    for entry in _unwritten.values():
        owner = entry.tensor()
        if owner is not None:
            entry.version = _version(owner)


@dataclass(eq=False)
class Memory:
    """One storage, flat, in a dtype that torch can move; and its map of written elements, if it has one."""

    flat: torch.Tensor
    written: torch.Tensor | None
    low: int
    high: int


class Array(ct.Array):
    """A kernel's view of a tensor. Shapes and strides read as scalars of `index_dtype`, or as constants if static."""

    def __init__(
        self,
        memory: Memory,
        offset: int,
        dims: tuple[int, ...],
        steps: tuple[int, ...],
        dtype: DType,
        name: str,
        index_dtype: DType = ct.int32,
        static: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset()),
    ) -> None:
        self.memory = memory
        self.offset = offset
        self.dims = dims
        self.steps = steps
        self.name = name
        self.index_dtype = index_dtype
        self._dtype = dtype
        self._static = static
        self._shape: tuple[Any, ...] | None = None
        self._strides: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str, annotation: Any = None, *, check: bool = True) -> Array:
        """The array of a CPU tensor passed as the kernel's parameter `name`."""
        if tensor.device.type != "cpu":
            raise TypeError(f"`{name}` is on {tensor.device}: the interpreter runs on CPU tensors")
        index_dtype = annotation.index_dtype if annotation else ct.int32
        dims, steps = tuple(tensor.shape), tuple(tensor.stride())
        if index_dtype == ct.int32 and any(abs(n) > 2**31 - 1 for n in (*dims, *steps)):
            raise OverflowError(f"`{name}` has shape {dims}, strides {steps}: annotate it as ct.IndexedWithInt64")
        detached = tensor.detach()
        storage = detached.untyped_storage()
        flat = detached.as_strided((storage.nbytes() // detached.element_size(),), (1,), 0)
        entry = _entry(tensor) if check else None
        extent = sum((n - 1) * s for n, s in zip(dims, steps, strict=True)) + 1 if detached.numel() else 0
        offset = int(detached.storage_offset())
        memory = Memory(flat.view(memory_dtype(flat.dtype)), entry.written if entry else None, offset, offset + extent)
        rank = len(dims)
        fixed = tuple(
            frozenset(axis_of(axis, rank) for axis in axes)
            for axes in ((annotation.static_shape_dims, annotation.static_stride_dims) if annotation else ((), ()))
        )
        return cls(memory, offset, dims, steps, as_dtype(tensor.dtype), name, index_dtype, (fixed[0], fixed[1]))

    @property
    def dtype(self) -> DType:
        """The cuTile dtype of the elements."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes as scalars."""
        if self._shape is None:
            self._shape = self._scalars(self.dims, self._static[0])
        return self._shape

    @property
    def strides(self) -> tuple[Any, ...]:
        """Steps in elements, as scalars."""
        if self._strides is None:
            self._strides = self._scalars(self.steps, self._static[1])
        return self._strides

    def _scalars(self, values: tuple[int, ...], static: frozenset[int]) -> tuple[Any, ...]:
        return tuple(v if i in static else scalar(v, self.index_dtype) for i, v in enumerate(values))

    def __repr__(self) -> str:
        return f"<Array[{self._dtype},{self.dims}:{self.steps}] `{self.name}`>"

    def __getitem__(self, key: Any) -> Any:
        raise _TypeError("Arrays are not directly subscriptable. Use load() or gather() instead.")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _TypeError("Arrays do not support item assignment. Use store() or scatter() instead.")

    def slice(self, axis: Any, start: Any, stop: Any) -> Array:
        """The array restricted to start ≤ index < stop along `axis`."""
        place = axis_of(axis, self.ndim)
        first, last = integers((start, stop), "slice")
        if not 0 <= first <= last <= self.dims[place]:
            fault(f"slice({place}, {first}, {last}) of `{self.name}` of shape {self.dims} is out of bounds")
        dims = (*self.dims[:place], last - first, *self.dims[place + 1 :])
        offset = self.offset + first * self.steps[place]
        static = (self._static[0] - {place}, self._static[1])
        return Array(self.memory, offset, dims, self.steps, self._dtype, self.name, self.index_dtype, static)

    def tiled_view(
        self, tile_shape: Any, *, padding_mode: PaddingMode = PaddingMode.UNDETERMINED, traversal_steps: Any = None
    ) -> Any:
        """The array as a grid of tiles."""
        return TiledView(self, tile_shape, padding_mode, traversal_steps)

    def get_raw_memory(self) -> RawMemory:
        """The array's memory, addressed by elements from its first."""
        return RawMemory(self)

    @property
    def foreign_pointer(self) -> ForeignPointer:
        """The address of the first element."""
        return ForeignPointer(self)

    @staticmethod
    def from_foreign(pointer: Any, shape: Any, strides: Any) -> Array:
        """An array at a foreign pointer."""
        if not isinstance(pointer, ForeignPointer):
            raise _TypeError(f"expected a foreign pointer tile, got {describe(pointer)}")
        dims, steps, base = integers(shape), integers(strides, "strides"), pointer.array
        if len(dims) != len(steps):
            raise _TypeError("shape and strides must have the same rank")
        return Array(base.memory, base.offset, dims, steps, base.dtype, base.name, base.index_dtype)


@dataclass(frozen=True)
class ForeignPointer:
    """Where an array begins."""

    array: Array


class RawMemory(ct._stub.RawArrayMemory):
    """An array's memory without shape: offsets in elements from the array's first."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @property
    def dtype(self) -> DType:
        """The cuTile dtype of the elements."""
        return self.array.dtype


class TiledView(ct.TiledView):
    """An array as a grid of tiles of one shape."""

    def __init__(self, array: Array, shape: Any, padding_mode: PaddingMode, traversal_steps: Any) -> None:
        self.array = array
        self._shape = tile_shape(shape, array.ndim, what="tile_shape", scalar=True)
        self.full_shape = self._shape or (1,) * array.ndim
        self.padding_mode = padding_mode
        self._steps = self.full_shape
        if traversal_steps is not None:
            self._steps = tile_shape(traversal_steps, array.ndim, what="traversal_steps", any_size=True)

    @property
    def dtype(self) -> DType:
        """The cuTile dtype of the elements."""
        return self.array.dtype

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of each tile."""
        return self._shape

    @property
    def traversal_steps(self) -> tuple[int, ...]:
        """Elements between the origins of neighbouring tiles."""
        return self._steps

    def num_tiles(self, axis: Any) -> Tile:
        """How many tiles lie along `axis`."""
        place = axis_of(axis, self.array.ndim)
        return scalar(-(-self.array.dims[place] // self._steps[place]), ct.int32)


class ArrayList(tuple):
    """A list of arrays given as one argument; its index may be a scalar."""

    def __getitem__(self, key: Any) -> Any:
        place = key.__index__()
        if not 0 <= place < len(self):
            fault(f"item {place} of a list of {len(self)} arrays is out of bounds")
        return super().__getitem__(place)
