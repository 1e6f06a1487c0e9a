"""What was recorded at a site: one call, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from kernelgraft.records import Regime


@dataclass(frozen=True)
class Call:
    """One recorded call of a site, tensors cloned before the call."""

    instance: str
    """Full path of the module."""
    module: nn.Module
    """`module`: the module itself; `function`/`attention`/`statement`: the module whose method makes the call."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    regime: Regime
    original: Callable[..., Any]
    """What ran: `original(*args, **kwargs)` gives `output`. For `module` and `statement` sites args[0] is NOT the
    module: call `original(module, *args, **kwargs)`."""
    cache: Literal["dynamic", "static"] = "dynamic"
    padded: bool = False
    mutated: tuple[str, ...] = ()
    """Names (`args[0]`, `kwargs.x`) of tensors that the call changed in place."""
