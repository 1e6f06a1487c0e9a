"""How many threads torch computes one operator with, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_at_most(count: int) -> Iterator[None]:
    """Threads that wait for each other at every small operator lose much where other processes want the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
