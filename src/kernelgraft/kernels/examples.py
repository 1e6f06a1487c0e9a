"""Calls of our kernels with the shapes of real models, for whoever compiles or tunes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from kernelgraft.cutile.tuning import shipped, using

MODULES: tuple[str, ...] = (
    "act_and_mul",
    "add_rms_norm",
    "argmax",
    "attention_decode",
    "attention_prefill",
    "cross_entropy",
    "layer_norm",
    "linear_decode",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "sampling",
)
"""Modules of this package that have `examples() -> list[Example]`."""


@dataclass(frozen=True)
class Example:
    """One call: `run("meta")` works out its launches, `run("cpu")` and `run("cuda")` do it on random tensors."""

    name: str
    run: Callable[[str], Any]
    tune: bool = True
    """False for a variant of the kernel that is to be compiled, but whose speed is that of another example."""


def tuned_modules() -> list[str]:
    """Modules of this package that may have `tunables() -> list[Tunable]`: kernels, and those whose names end so."""
    names = [found.name for found in iter_modules(import_module(f"{__package__}").__path__)]
    return [f"{__package__}.{name}" for name in names if name in MODULES or name.endswith("_tunables")]


def examples() -> dict[str, list[Example]]:
    """The examples of all kernels by module name."""
    return {name: import_module(f"{__package__}.{name}").examples() for name in MODULES}


def run(module: str, index: int, device: str = "meta") -> Any:
    """Run one example."""
    found: list[Example] = import_module(f"{__package__}.{module}").examples()
    return found[index].run(device)


def run_tuned(module: str, index: int, slug: str, device: str = "meta") -> Any:
    """Run one example with the configurations that the package ships for a GPU (`Gpu.slug`), on any device."""
    import_module(f"{__package__}.{module}")
    plans = [held for name, held in list(sys.modules.items()) if name.startswith(f"{__package__}.")]
    entries = {key: value for gpu, held in shipped().items() if gpu.slug == slug for key, value in held.items()}
    with using(entries, *plans):
        return run(module, index, device)


def tensor(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values."""
    return torch.randn(shape, dtype=dtype, device=device)
