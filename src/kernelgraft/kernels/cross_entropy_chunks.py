"""What both ways to the cross entropy share: its products by torch, and how tokens and words are cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernelgraft.cutile.plans import power_of_two, processors
from kernelgraft.kernels import cross_entropy_tiles as tiles

BLOCKS_PER_PROCESSOR = 4
"""Tokens are cut into pieces only as far as it takes to have that many blocks."""
GRAIN = 128
"""Chunks are multiples of that many tokens or words, the last one excepted."""


def shares(tokens: int, words: int, device: int) -> tuple[int, int, int]:
    """Width of a tile of a chunk, tiles of a block, and blocks for a token: one, unless there are few tokens."""
    width = min(4096, power_of_two(words))
    number = -(-words // width)
    each = -(-number // max(1, BLOCKS_PER_PROCESSOR * processors(device) // tokens))
    return width, each, -(-number // each)


def cap(softcap: float | None, dtype: torch.dtype) -> int:
    """How the kernels cap logits."""
    return tiles.NO_CAP if softcap is None else tiles.FINE if dtype is torch.float32 else tiles.QUICK


def spans(other: int, size: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Firsts and lengths of the chunks of an axis (words or tokens), of about equal length.

    `other`: the size of the axis that is not cut; a chunk's logits in float32 take at most `chunk_bytes`, or `GRAIN`.
    """
    most = max(GRAIN, chunk_bytes // (4 * other) // GRAIN * GRAIN)
    number = -(-size // most)
    length = (-(-size // number) + GRAIN - 1) // GRAIN * GRAIN
    for first in range(0, size, length):
        yield first, min(length, size - first)


def shape_class(shape: tuple[int, int, int], dtype: torch.dtype) -> str:
    """The class of shapes (tokens, words, channels) that one tuned configuration serves."""
    width = "wide" if dtype is torch.float32 else "half"
    return f"{width}-{min(power_of_two(shape[0]), 8192)}x{power_of_two(shape[1])}x{power_of_two(shape[2])}"


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a · b in float32, into `out` if that is given."""
    if a.is_cuda and a.dtype is not torch.float32:
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float()) if out is None else torch.mm(a.float(), b.float(), out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a · b to a tensor of float32 or of their dtype; the sum of the product is float32, and rounded once."""
    if a.dtype is total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a.float(), b.float(), out=total)
