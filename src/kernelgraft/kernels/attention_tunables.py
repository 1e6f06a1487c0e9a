"""What there is to tune in the attention kernels, with the shapes of models."""

from __future__ import annotations

from typing import Any

import torch

from kernelgraft.cutile.plans import power_of_two
from kernelgraft.cutile.tuning import Tunable, run_with
from kernelgraft.kernels import attention_decode, attention_prefill

HALF = torch.bfloat16


def tunables() -> list[Tunable]:
    """Single queries over short and long caches, one row and many; causal prompts of several widths."""
    found = [_decode(batch, length) for length in (4096, 512) for batch in (1, 8, 32)]
    others = ((32, 8, 64), (8, 4, 256), (32, 32, 96), (4, 1, 256))
    found += [_decode(batch, 4096, *sizes) for sizes in others for batch in (1, 32)]
    found += [_decode(batch, 32768) for batch in (1, 8, 32)]
    for batch, length, heads, kv_heads, width in (
        (1, 4096, 32, 8, 128),
        (1, 2048, 32, 8, 128),
        (1, 4096, 32, 8, 64),
        (1, 4096, 8, 4, 256),
        (1, 4096, 32, 32, 96),
    ):
        found.append(_prefill(batch, length, heads, kv_heads, width))
    return found


def _drawn(
    device: str, seed: int, batch: int, lengths: tuple[int, int], heads: tuple[int, int], width: int
) -> tuple[torch.Tensor, ...]:
    source = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=source, dtype=torch.float32).to(HALF)

    query = normal(batch, lengths[0], heads[0], width).transpose(1, 2)
    return query, *(normal(batch, heads[1], lengths[1], width) for _ in range(2))


def _expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In float32, a key head at a time: float64 has no place for the scores of a long prompt."""
    batch, heads, length, width = query.shape
    group = heads // key.shape[1]
    found = query.new_empty((batch, length, heads, value.shape[3]), dtype=torch.float32)
    hidden = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).triu_(key.shape[2] - length + 1)
    for head in range(heads):
        scores = query[:, head].float() @ key[:, head // group].float().mT * width**-0.5
        weights = torch.softmax(scores.masked_fill_(hidden, float("-inf")), -1)
        found[:, :, head] = weights @ value[:, head // group].float()
    return found


def _decode(batch: int, length: int, heads: int = 32, kv_heads: int = 8, width: int = 128) -> Tunable:
    sizes = batch * kv_heads, max(8, power_of_two(heads // kv_heads)), power_of_two(width), length
    key = "attention_decode", attention_decode.shape_class(*sizes)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        return _drawn(device, seed, batch, (1, length), (heads, kv_heads), width)

    def run(config: Any, *inputs: torch.Tensor) -> Any:
        call = attention_decode.attention_decode
        return run_with(config, key, (attention_decode,), lambda: call(*inputs, scaling=width**-0.5))

    # Weights are rounded to the half type, too.
    return Tunable(*key, attention_decode.space(*sizes), make, run, _expected, roundings=8.0)


def _prefill(batch: int, length: int, heads: int, kv_heads: int, width: int) -> Tunable:
    key = "attention_prefill", attention_prefill.shape_class(batch * heads, length, width)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        return _drawn(device, seed, batch, (length, length), (heads, kv_heads), width)

    def run(config: Any, *inputs: torch.Tensor) -> Any:
        call = attention_prefill.attention_prefill
        return run_with(config, key, (attention_prefill,), lambda: call(*inputs, scaling=width**-0.5, causal=True))

    return Tunable(*key, attention_prefill.space(width), make, run, _expected, roundings=8.0)
