"""What free GPU memory holds: torch's allocator hands out freed blocks as they were left, and new ones often as zeros.

A Solution whose results come from the allocator without going through torch's Python functions is seen to leave some of
them unwritten only if all blocks that it may be given hold garbage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

SMALL = 1 << 20
"""The allocator has a pool for requests up to this many bytes, with segments of two of them, and one for all others."""
RESERVE = (64 << 20, *(SMALL,) * 16)
"""Free blocks that there are at least before each call, so that none has to come from the driver."""


def requests(segments: Iterable[dict[str, Any]], stream: int) -> list[int]:
    """Sizes in bytes that, allocated in this order on a stream, take every free block of a snapshot's segments.

    The allocator takes the smallest block that is large enough, so that with the largest request first each finds one
    of just its size. Blocks of the small pool that are larger than its requests are taken in pieces.
    """
    found = []
    for segment in segments:
        if segment["stream"] != stream or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"].startswith("active"):
                continue
            if segment["segment_type"] == "small":
                found += [SMALL] * (size // SMALL) + [size % SMALL] * (size % SMALL > 0)
            elif size > SMALL:
                found.append(size)
    return sorted(found, reverse=True)


class FreeMemory:
    """The free blocks of a CUDA device's allocator, for the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.returned: list[int] = []
        """Bytes of the results of a call: as much is free before the next one."""

    def expect(self, results: Sequence[torch.Tensor]) -> None:
        """Results of a call that is going to be repeated."""
        self.returned = [x.untyped_storage().nbytes() for x in results if x.is_cuda]

    def fill(self, byte: int) -> None:
        """Write a byte all over every free block, and have enough of them."""
        enough = [self._full(size, byte) for size in (*RESERVE, *self.returned) if size]
        del enough
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == self._index()]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        taken = [self._full(size, byte) for size in requests(segments, stream)]
        del taken

    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _full(self, size: int, byte: int) -> torch.Tensor:
        return torch.full((size,), byte, dtype=torch.uint8, device=self.device)
