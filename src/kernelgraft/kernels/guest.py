"""Calling another package's cuTile launchers: on their tensors' device, without tuning, or under the interpreter.

For the sources of Solutions: `with at(x): y = their_operation(x)`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import TracebackType

import torch

FIXED = "TILEGYM_DISABLE_AUTOTUNE"
"""TileGym's only switch for the tuning of its operations; it is read at every call."""


class at:
    """A context manager in which foreign cuTile launchers serve tensors that lie where `tensor` does.

    On a GPU: such launchers take the current device and its stream, so that the tensor's becomes current. On a CPU:
    the interpreter runs the kernels; on `meta` nothing does. `tunes`: the operation would time configurations at each
    new shape, for seconds; here it takes its fixed one, unless the environment says whether TileGym tunes.
    `zero_padding`: the operation is right only where padding that cuTile leaves undetermined is zero, as GPUs fill it:
    no fault for the interpreter.
    """

    __slots__ = ("_fixed", "_stack", "_tensor", "_tunes", "_zero_padding")

    def __init__(self, tensor: torch.Tensor, *, tunes: bool = False, zero_padding: bool = False) -> None:
        self._tensor, self._tunes, self._zero_padding = tensor, tunes, zero_padding
        self._stack: ExitStack | None = None
        self._fixed = False

    def __enter__(self) -> None:
        tensor = self._tensor
        if tensor.is_cpu:
            from kernelgraft.cutile import interpreted

            self._stack = ExitStack()
            self._stack.enter_context(interpreted(check=not self._zero_padding))
        elif tensor.is_cuda and (device := tensor.get_device()) != torch._C._cuda_getDevice():
            self._stack = ExitStack()
            self._stack.enter_context(torch.cuda.device(device))
        if self._tunes and FIXED not in os.environ:
            os.environ[FIXED] = "1"
            self._fixed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fixed:
            os.environ.pop(FIXED, None)
        if self._stack is not None:
            self._stack.__exit__(kind, error, trace)
