"""Sites: the places of a model that can take a kernel. Find them, record their calls, replace what runs there.

`InterfaceProxy` is imported on first use, so that a record of a call can be read without importing transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelgraft.sites.calls import Call
from kernelgraft.sites.capture import Capture, Run, capture, generate
from kernelgraft.sites.discover import discover
from kernelgraft.sites.install import Undo, current, install
from kernelgraft.sites.rebind import callee, global_functions, innermost, rebind, source_ref
from kernelgraft.sites.statements import injected_name, original, transformer

if TYPE_CHECKING:
    from kernelgraft.sites.attention import InterfaceProxy

__all__ = [
    "Call",
    "Capture",
    "InterfaceProxy",
    "Run",
    "Undo",
    "callee",
    "capture",
    "current",
    "discover",
    "generate",
    "global_functions",
    "injected_name",
    "innermost",
    "install",
    "original",
    "rebind",
    "source_ref",
    "transformer",
]


def __getattr__(name: str) -> Any:
    if name == "InterfaceProxy":
        from kernelgraft.sites.attention import InterfaceProxy

        return InterfaceProxy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
