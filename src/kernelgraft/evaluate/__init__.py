"""Prove Solutions right (`Judge`), time them (`interleave`), and choose between them (`decide`).

The names are loaded when first used: the judge's child processes import parts of this package and must stay free of the
rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Captured", "Choice", "Judge", "JudgeOptions", "Timing", "decide", "interleave"]

if TYPE_CHECKING:
    from kernelgraft.evaluate.cases import Captured, JudgeOptions
    from kernelgraft.evaluate.judge import Judge
    from kernelgraft.evaluate.measure import Choice, decide
    from kernelgraft.evaluate.timer import Timing, interleave

_HOMES = {
    "Captured": "cases",
    "Choice": "measure",
    "Judge": "judge",
    "JudgeOptions": "cases",
    "Timing": "timer",
    "decide": "measure",
    "interleave": "timer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `kernelgraft.evaluate` has no attribute `{name}`")
    return getattr(importlib.import_module(f"kernelgraft.evaluate.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
