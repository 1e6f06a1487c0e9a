"""Kernels that bring their own parameters: packages of two classes, on live models and at load time.

A package has `KernelName` (only a forward) and `KernelNameLayout` (the parameters, and `conversion_mapping`: how they
come from those of the modules that it replaces). Importing this is light: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "AppliedLayouts",
    "Entry",
    "Finding",
    "KernelSet",
    "LoadedKernel",
    "Part",
    "Place",
    "SizedConcatenate",
    "Source",
    "apply_layouts",
    "check",
    "find_layouts",
    "from_pretrained",
    "load",
    "load_all",
    "locate",
    "signature_drift",
]

if TYPE_CHECKING:
    from kernelgraft.layouts.applying import AppliedLayouts, apply_layouts, find_layouts
    from kernelgraft.layouts.checking import check
    from kernelgraft.layouts.findings import Finding
    from kernelgraft.layouts.kernel_set import KernelSet
    from kernelgraft.layouts.loading import from_pretrained
    from kernelgraft.layouts.locating import locate
    from kernelgraft.layouts.packages import load, load_all
    from kernelgraft.layouts.records import Entry, LoadedKernel, Part, Place, Source
    from kernelgraft.layouts.rules import SizedConcatenate
    from kernelgraft.layouts.signatures import signature_drift

_HOMES = {
    "AppliedLayouts": "applying",
    "Entry": "records",
    "Finding": "findings",
    "KernelSet": "kernel_set",
    "LoadedKernel": "records",
    "Part": "records",
    "Place": "records",
    "SizedConcatenate": "rules",
    "Source": "records",
    "apply_layouts": "applying",
    "check": "checking",
    "find_layouts": "applying",
    "from_pretrained": "loading",
    "load": "packages",
    "load_all": "packages",
    "locate": "locating",
    "signature_drift": "signatures",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
