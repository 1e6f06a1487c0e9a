"""Calls for the tests of the compile check: what may happen to a child process, and one kernel that is launched."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile import launch

TILE = 16


@ct.kernel
def doubled(x, y, FACTOR: ct.Constant[int]):
    i = ct.bid(0)
    ct.store(y, (i,), ct.load(x, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO) * FACTOR)


@ct.kernel
def of_three(x, y):
    ct.store(y, (0,), ct.load(x, (0,), (3,)))


def double(size: int, device: str = "meta", factor: int = 2) -> torch.Tensor:
    x = torch.ones(size, device=device)
    y = torch.empty_like(x)
    launch((-(-size // TILE),), doubled, (x, y, factor))
    return y


def twice(size: int) -> None:
    double(size)
    double(size, factor=3)


def scaled(factor: int) -> Any:
    def power() -> int:
        return factor

    @ct.kernel
    def kernel(x, y):
        ct.store(y, (0,), ct.load(x, (0,), (TILE,)) * ct.static_eval(power()) * factor)

    return kernel


def made(factor: int) -> None:
    x = torch.empty(TILE, device="meta")
    launch((1,), scaled(factor), (x, x))


def refused_by_the_front_end() -> None:
    x = torch.empty(8, device="meta")
    launch((1,), of_three, (x, x))


def on_a_gpu() -> Any:
    """As launchers do that know of GPUs only."""
    x = torch.empty(100, device="cuda")
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    ct.launch(torch.cuda.current_stream(), (blocks,), doubled, (x, torch.empty_like(x).cuda(), 2))
    return x


def nothing() -> None:
    """Launch nothing."""


def raises() -> None:
    raise ValueError("no such\nshape")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs() -> None:
    time.sleep(600)


_calls: list[int] = []


def changes() -> None:
    _calls.append(1)
    double(16, factor=len(_calls))
