"""The table of operations: each function of `cuda.tile` that a kernel may call, and what stands for it here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import cuda.tile as ct
from cuda.tile import _stub as stub

from kernelgraft.cutile import (
    advanced,
    arrays,
    atomics,
    bits,
    elements,
    elementwise,
    making,
    mathematics,
    memory,
    products,
    pythonic,
    reducing,
    shaping,
)
from kernelgraft.cutile.tiles import Tile

Operation = Callable[..., Any]


def _several(function: Operation, names: dict[str, str]) -> dict[str, Operation]:
    return {public: partial(function, name) for public, name in names.items()}


FUNCTIONS: dict[str, dict[str, Operation]] = {
    "block": {
        "bid": pythonic.bid,
        "num_blocks": pythonic.num_blocks,
        "num_tiles": memory.num_tiles,
        "assume_divisible_by": pythonic.assume_divisible_by,
        "grid_dependency_control_wait": pythonic.nothing,
        "grid_dependency_control_launch_dependents": pythonic.nothing,
    },
    "memory": {
        "load": memory.load,
        "store": memory.store,
        "gather": elements.gather,
        "scatter": elements.scatter,
        "load_advanced_indexing": advanced.load_advanced_indexing,
        "store_advanced_indexing": advanced.store_advanced_indexing,
    },
    "atomic": {
        "atomic_cas": atomics.atomic_cas,
        **_several(atomics.atomic, {f"atomic_{name}": name for name in atomics.UPDATES}),
    },
    "making": {
        "arange": making.arange,
        "full": making.full,
        "ones": making.ones,
        "zeros": making.zeros,
        "astile": making.astile,
    },
    "matrix product": {"mma": products.mma, "mma_scaled": products.mma_scaled, "matmul": products.matmul},
    "shape": {
        name: getattr(shaping, name)
        for name in ("expand_dims", "cat", "broadcast_to", "reshape", "permute", "transpose", "extract", "insert")
    },
    "dtype": {name: getattr(making, name) for name in ("astype", "bitcast", "pack_to_bytes", "unpack_from_bytes")},
    "reduction": {
        **_several(reducing.reduce_simple, {"sum": "add", "prod": "mul", "max": "max", "min": "min"}),
        **_several(reducing.argument, {"argmax": "argmax", "argmin": "argmin"}),
        "reduce": reducing.reduce,
    },
    "scan": {
        **_several(reducing.scan_simple, {"cumsum": "add", "cumprod": "mul"}),
        "scan": reducing.scan,
    },
    "arithmetic": {
        **_several(
            elementwise.arithmetic,
            {
                **{name: name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "atan2", "cdiv")},
                "minimum": "min",
                "maximum": "max",
            },
        ),
        "pow": elementwise.power,
        "divmod": elementwise.divmod_,
        "negative": mathematics.negative,
        "abs": mathematics.absolute,
    },
    "bits": {
        **_several(bits.bitwise, {"bitwise_and": "and_", "bitwise_or": "or_", "bitwise_xor": "xor"}),
        **_several(bits.shift, {"bitwise_lshift": "lshift", "bitwise_rshift": "rshift"}),
        "bitwise_not": bits.invert,
    },
    "comparison": {
        **_several(
            bits.compare,
            {
                "equal": "eq",
                "not_equal": "ne",
                "less": "lt",
                "less_equal": "le",
                "greater": "gt",
                "greater_equal": "ge",
            },
        ),
        "isnan": mathematics.isnan,
        "where": mathematics.where,
    },
    "mathematics": _several(
        mathematics.unary,
        {
            name: name
            for name in (
                *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos"),
                *("tan", "sinh", "cosh", "tanh", "floor", "ceil"),
            )
        },
    ),
    "compile time": {
        "static_eval": pythonic.identity,
        "static_assert": pythonic.static_assert,
        "static_iter": pythonic.identity,
        "static_exception": pythonic.identity,
        "ensure_constant": pythonic.ensure_constant,
    },
    "words": {"print": pythonic.print_, "printf": pythonic.printf, "assert_": pythonic.assert_},
}
"""Kind → name in `cuda.tile` → function."""

METHODS: dict[str, dict[str, Operation]] = {
    "Tile": {"item": Tile.item},
    "Array": {
        "slice": arrays.Array.slice,
        "tiled_view": arrays.Array.tiled_view,
        "get_raw_memory": arrays.Array.get_raw_memory,
        "from_foreign": arrays.Array.from_foreign,
    },
    "TiledView": {
        "num_tiles": arrays.TiledView.num_tiles,
        "load": memory.view_load,
        "store": memory.view_store,
        **_several(
            atomics.atomic_store, {f"atomic_store_{name}": name for name in ("add", "max", "min", "and", "or", "xor")}
        ),
    },
    "RawArrayMemory": {
        "load_offset": elements.load_offset,
        "store_offset": elements.store_offset,
        "atomic_cas_offset": atomics.atomic_cas_offset,
        **_several(atomics.atomic_offset, {f"atomic_{name}_offset": name for name in atomics.UPDATES}),
    },
    "Slice": {"__init__": advanced.slice_init},
}
"""Class of `cuda.tile` → method → function that takes the object first."""


def seam(function: Any) -> FunctionType:
    """The function object that the dispatch mode receives: the innermost tile-only wrapper of a public one."""
    found = function
    while getattr(getattr(found, "__wrapped__", None), "_cutile_function_wrapper", False):
        found = found.__wrapped__
    return found


def _table() -> dict[FunctionType, Operation]:
    found = {}
    for group in FUNCTIONS.values():
        for name, operation in group.items():
            # A name that this cuda-tile does not have yet cannot be called.
            if hasattr(ct, name):
                found[seam(getattr(ct, name))] = operation
    for owner, methods in METHODS.items():
        for name, operation in methods.items():
            if hasattr(getattr(stub, owner), name):
                found[seam(getattr(getattr(stub, owner), name))] = operation
    return found


TABLE: dict[FunctionType, Operation] = _table()
"""What the dispatch mode is called with → what is done."""
