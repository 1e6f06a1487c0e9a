"""cuTile kernels: run on any CPU.

`interpreted()` runs every kernel that is launched inside it on CPU tensors; `launch` does so by itself for tensors
that are not on a GPU. Nothing here is imported until it is asked for: `cuda-tile` is an optional extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernelgraft.errors import MissingExtraError

if TYPE_CHECKING:
    from kernelgraft.cutile.arrays import uninitialised, written
    from kernelgraft.cutile.interpreter import interpreted, launch

_WHERE = {
    "interpreted": "interpreter",
    "launch": "interpreter",
    "uninitialised": "arrays",
    "written": "arrays",
}

__all__ = ["interpreted", "launch", "uninitialised", "written"]


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "cuda":
            raise MissingExtraError(
                f"`kernelgraft.cutile.{name}` needs cuda-tile: pip install 'kernelgraft[cutile]'"
            ) from error
        raise
