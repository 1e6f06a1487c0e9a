"""Launching: one block after the other over a grid, on CPU tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._annotated_function import HeterogeneousTupleNode, HomogeneousTupleNode
from cuda.tile._dispatch_mode import DispatchMode
from cuda.tile._exception import FunctionDesc, Loc

from kernelgraft.cutile import pythonic  # noqa: F401  (fills the table of builtins)
from kernelgraft.cutile.arrays import Array, ArrayList, forget_written, settle
from kernelgraft.cutile.faults import current, is_library
from kernelgraft.cutile.operations import TABLE
from kernelgraft.cutile.rewriting import adapt_callable
from kernelgraft.cutile.tiles import scalar


@dataclass
class Block:
    """The block that runs."""

    kernel: str
    index: tuple[int, int, int]
    grid: tuple[int, int, int]
    check: bool = True


class Interpreter(DispatchMode):
    """cuTile's seam: every tile function that is called while this mode is current is done here, on CPU tensors."""

    def call_tile_function_from_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do an operation of `cuda.tile`, or run a `@ct.function` of the user's."""
        operation = TABLE.get(func)
        if operation is not None:
            return operation(*args, **kwargs)
        if getattr(func, "_cutile_python_stub", None) is not None:
            raise NotImplementedError(f"the interpreter has no operation `{func.__name__}`; run this kernel on a GPU")
        return adapt_callable(func.__wrapped__)(*args, **kwargs)


def _argument(value: Any, name: str, annotation: Any, check: bool) -> Any:
    """One launch argument as the kernel sees it."""
    if isinstance(annotation, HomogeneousTupleNode):
        return tuple(_argument(v, f"{name}[{i}]", annotation.each, check) for i, v in enumerate(value))
    if isinstance(annotation, HeterogeneousTupleNode):
        if len(value) != len(annotation.items):
            raise TypeError(
                f"Invalid kernel parameter '{name}': Received a tuple of length {len(value)}"
                f" but the annotation implies length {len(annotation.items)}."
            )
        pairs = zip(value, annotation.items, strict=True)
        return tuple(_argument(v, f"{name}[{i}]", node, check) for i, (v, node) in enumerate(pairs))
    if annotation.constant:
        if isinstance(value, tuple):
            return tuple(_argument(v, f"{name}[{i}]", annotation, check) for i, v in enumerate(value))
        if not isinstance(value, bool | int | float):
            raise TypeError(
                f"kernel parameter `{name}`: a constant is a bool, int or float, not {type(value).__name__}"
            )
        return value
    if isinstance(value, torch.Tensor):
        return Array.of(value, name, annotation.array, check=check)
    if isinstance(value, list):
        element = annotation.list.element if annotation.list else None
        return ArrayList(Array.of(v, f"{name}[{i}]", element, check=check) for i, v in enumerate(value))
    if isinstance(value, tuple):
        return tuple(_argument(v, f"{name}[{i}]", annotation, check) for i, v in enumerate(value))
    if isinstance(value, bool):
        return scalar(value, ct.bool_)
    if isinstance(value, int):
        dtype = annotation.scalar.dtype if annotation.scalar else ct.int32
        if not -(2 ** (dtype.bitwidth - 1)) <= value < 2 ** (dtype.bitwidth - 1):
            raise OverflowError(
                f"Kernel parameter '{name}': {value} does not fit {dtype}: annotate it as ct.ScalarInt64"
            )
        return scalar(value, dtype)
    if isinstance(value, float):
        return scalar(value, ct.float32)
    raise TypeError(f"kernel parameter `{name}`: cuTile takes no {type(value).__name__}")


def _grid(grid: Sequence[int]) -> tuple[int, int, int]:
    sizes = [int(size) for size in grid]
    if not 1 <= len(sizes) <= 3 or any(size < 0 for size in sizes):
        raise ValueError(f"a grid has one to three sizes that are not negative, got {tuple(grid)}")
    x, y, z = (*sizes, 1, 1, 1)[:3]
    if x > 2**31 - 1 or max(y, z) > 65_535:
        raise ValueError(f"a GPU takes grids up to (2147483647, 65535, 65535), got {tuple(grid)}")
    return x, y, z


def _order(grid: tuple[int, int, int], shuffle: int | None) -> Iterable[tuple[int, int, int]]:
    x, y, z = grid
    blocks = ((i, j, k) for k, j, i in itertools.product(range(z), range(y), range(x)))
    if shuffle is None:
        return blocks
    listed = list(blocks)
    random.Random(shuffle).shuffle(listed)
    return listed


def interpret(
    grid: Sequence[int], kernel: Any, args: Sequence[Any], *, shuffle: int | None = None, check: bool = True
) -> None:
    """Run `kernel` over `grid` on CPU tensors.

    `shuffle` (a seed) runs the blocks in a random order. With `check`, the compiler's front end types the kernel
    first, and uses of undetermined padding and of memory that was never written (`uninitialised`) are faults; without
    it such padding is zero, as GPUs happen to fill it.
    """
    annotated = kernel._annotated_function
    names = list(annotated.pysig.parameters)
    if len(args) != len(names):
        raise TypeError(f"kernel `{kernel._pyfunc.__name__}` takes {len(names)} arguments, got {len(args)}")
    sizes = _grid(grid)
    forget_written()
    if check:
        from kernelgraft.cutile.typecheck import check_types

        check_types(kernel, args)
    given = [
        _argument(value, name, node, check)
        for value, name, node in zip(args, names, annotated.parameter_annotations, strict=True)
    ]
    run = adapt_callable(kernel._pyfunc)
    name = kernel._pyfunc.__name__
    before = current.block
    with torch.no_grad(), torch._C.DisableTorchFunction(), Interpreter().as_current():
        try:
            for index in _order(sizes, shuffle):
                current.block = Block(name, index, sizes, check)
                run(*given)
        except ct.TileError as error:
            if error.loc.is_unknown():
                error.loc = _place(error) or error.loc
            raise
        finally:
            current.block = before
            settle()


def _place(error: BaseException) -> Loc | None:
    """Where in the kernel's own code an error of cuTile's was raised."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            desc = FunctionDesc(code.co_name, code.co_filename, code.co_firstlineno, 1)
            found = Loc(trace.tb_lineno, 0, code.co_filename, function=desc)
        trace = trace.tb_next
    return found
