"""Tunables on CPU tensors for the tuner's tests: what configurations may do to whoever tries them."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.cutile.tuning import Tunable


@dataclass(frozen=True)
class Choice:
    """How a configuration behaves, and how long a call takes."""

    does: str = "right"
    ms: float = 1.0


def run(choice: Choice, x: torch.Tensor) -> Any:
    time.sleep(choice.ms / 1e3)
    y = torch.empty_like(x)
    if choice.does == "segfault":
        ctypes.string_at(0)
    elif choice.does == "exit":
        print("the last words", flush=True)
        os._exit(7)
    elif choice.does == "hang":
        time.sleep(600)
    elif choice.does == "raise":
        raise ValueError("refused\nwith a second line")
    elif choice.does == "lazy":
        y[:-1] = 2 * x[:-1]
        return y
    elif choice.does == "overwrite":
        x.mul_(2)
        return x
    elif choice.does == "exit in time":
        if Calls.made >= 6:
            os._exit(9)
        Calls.made += 1
    torch.mul(x, 2.0, out=y)
    if choice.does == "wrong":
        y[3] *= 1.01
    return y


class Calls:
    """Calls of one process."""

    made = 0


def tunable(kernel: str, shape_class: str, *space: Choice, make: Any = None) -> Tunable:
    def inputs(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(1000, generator=torch.Generator().manual_seed(seed)).to(device),)

    return Tunable(kernel, shape_class, space, make or inputs, run, lambda x: x.double() * 2, module=__name__)


def unmade(device: str, seed: int) -> tuple[torch.Tensor, ...]:
    raise RuntimeError("no inputs to be had")


def tunables() -> list[Tunable]:
    """Named by what goes wrong in them."""
    default = Choice(ms=3.0)
    bad = [Choice(does, 0.0) for does in ("wrong", "lazy", "overwrite", "raise", "segfault", "exit", "exit in time")]
    return [
        tunable("good", "fast last", default, Choice(ms=2.0), Choice(ms=0.5)),
        tunable("good", "default best", Choice(ms=0.5), Choice(ms=2.0)),
        tunable("bad", "all sorts", default, *bad, Choice(ms=0.5)),
        tunable("slow", "one hangs", default, Choice("hang", 0.0), Choice(ms=0.5)),
        tunable("hopeless", "nothing right", Choice("wrong"), Choice("raise")),
        tunable("hopeless", "no inputs", default, Choice(ms=0.5), make=unmade),
    ]
