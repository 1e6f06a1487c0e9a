"""kernelgraft: fast kernels in transformers models, proved on the model's own calls.

    graft = kernelgraft.integrate(model, tokenizer=tokenizer, out="graft")
    with kernelgraft.apply(graft, model) as applied:
        model.generate(...)
        applied.report()

Importing the package is light: torch and transformers are loaded when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "Graft",
    "KernelSet",
    "KernelgraftError",
    "apply",
    "apply_layouts",
    "doctor",
    "export",
    "from_pretrained",
    "integrate",
    "load",
]

if TYPE_CHECKING:
    from kernelgraft.api import doctor, load
    from kernelgraft.emit import export
    from kernelgraft.errors import KernelgraftError
    from kernelgraft.layouts import KernelSet, apply_layouts, from_pretrained
    from kernelgraft.patch import Applied, apply
    from kernelgraft.pipeline import integrate
    from kernelgraft.records import Graft

_HOMES = {
    "Applied": "kernelgraft.patch",
    "Graft": "kernelgraft.records",
    "KernelSet": "kernelgraft.layouts",
    "KernelgraftError": "kernelgraft.errors",
    "apply": "kernelgraft.patch",
    "apply_layouts": "kernelgraft.layouts",
    "doctor": "kernelgraft.api",
    "export": "kernelgraft.emit",
    "from_pretrained": "kernelgraft.layouts",
    "integrate": "kernelgraft.pipeline",
    "load": "kernelgraft.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `kernelgraft` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
