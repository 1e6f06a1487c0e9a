"""Sites: the places of a model that can take a kernel. Find them, record their calls, replace what runs there.

`InterfaceProxy` is imported on first use, so that a record of a call can be read without importing transformers.
"""

from __future__ import annotations

from typing import Any

from kernelgraft.sites.calls import Call
from kernelgraft.sites.install import Undo, current, install
from kernelgraft.sites.rebind import global_functions, innermost, rebind, source_ref

__all__ = [
    "Call",
    "InterfaceProxy",
    "Undo",
    "current",
    "global_functions",
    "innermost",
    "install",
    "rebind",
    "source_ref",
]


def __getattr__(name: str) -> Any:
    if name == "InterfaceProxy":
        from kernelgraft.sites.attention import InterfaceProxy

        return InterfaceProxy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
