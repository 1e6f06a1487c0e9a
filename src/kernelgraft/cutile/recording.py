"""Recording launches: what a call would launch, without launching it, on tensors that have no memory (`meta`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernelgraft.cutile.interpreter import Options, standing_in


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A launch that was asked for: one to three sizes, a `ct.kernel` with its hints, and all arguments."""

    grid: tuple[int, ...]
    kernel: Any
    args: tuple[Any, ...]


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Put every cuTile launch that is asked for meanwhile on a list instead of doing it.

    Whatever is launched through `kernelgraft` on tensors that are not on a GPU is recorded, and whatever calls
    `ct.launch`; nothing is computed, so results keep the values that their memory happens to have. Tensors that a
    launcher asks for on a GPU come on `meta`, and without a GPU it is told of one as in `interpreted()`.
    """
    launches: list[Launch] = []

    def record(grid: Sequence[int], kernel: Any, args: Sequence[Any]) -> None:
        launches.append(Launch(tuple(int(size) for size in grid), kernel, tuple(args)))

    with standing_in(Options(instead=record), "meta"):
        yield launches
