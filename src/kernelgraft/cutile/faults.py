"""What a kernel did wrong at run time, said with the kernel's name, the block and the line."""

from __future__ import annotations

import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import cuda.tile

from kernelgraft.errors import KernelFault

if TYPE_CHECKING:
    from kernelgraft.cutile.launching import Block


class _Current(threading.local):
    block: Block | None = None


current = _Current()
"""The block that runs in this thread."""


def checked() -> bool:
    """Whether undetermined values are tracked."""
    return current.block is None or current.block.check


def block() -> Block:
    """The running block; RuntimeError, as cuTile raises it, outside a kernel."""
    if current.block is None:
        raise RuntimeError("Device functions can only be called from device code.")
    return current.block


@cache
def _libraries() -> tuple[str, str]:
    return str(Path(__file__).resolve().parent), str(Path(cuda.tile.__file__).resolve().parent)


def is_library(filename: str) -> bool:
    """Whether code of this file belongs to the interpreter or to cuTile, not to a kernel."""
    return filename.startswith(_libraries()) or filename == "<string>"


def line() -> str:
    """`file.py:12`, the innermost line of the kernel's own code (or of what it calls)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


def fault(what: str) -> NoReturn:
    """Raise a KernelFault: what happened, in which kernel, block and line."""
    running = current.block
    where = f"kernel `{running.kernel}`, block {running.index}, " if running else ""
    raise KernelFault(f"{where}{line()}: {what}")
