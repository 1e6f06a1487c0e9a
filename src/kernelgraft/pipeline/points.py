"""How a model will be used: the batches and prompt lengths that the choice of kernels is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernelgraft.errors import UsageError
from kernelgraft.models import Loaded, prompt_ids
from kernelgraft.models.prompts import long_prompt
from kernelgraft.sites import Run

Mode = Literal["eager", "graph"]
MODES: tuple[Mode, ...] = ("eager", "graph")
PROMPT = "The capital of France is"
SEED = 1
GPU_BATCHES, GPU_PREFILLS = (1, 32), (512, 4096)
CPU_BATCHES, CPU_PREFILLS = (1,), (128,)
NEW_TOKENS = 2
"""Of a run at a point: a prefill and one decode step."""


@dataclass(frozen=True)
class Use:
    """What a graft is made for. None: what is usual on the model's device."""

    mode: Mode = "eager"
    """`eager`: a call takes the longer of host and device time. `graph`: device time alone, as in a CUDA graph."""
    batches: tuple[int, ...] | None = None
    """Sequences that are decoded at a time; one is always among them."""
    prefills: tuple[int, ...] | None = None
    """Prompt lengths, besides a short one."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode `{self.mode}` is not {' or '.join(MODES)}")
        if any(n < 1 for n in (*(self.batches or ()), *(self.prefills or ()))):
            raise UsageError("batches and prompt lengths are positive")

    def points(self, device: str) -> tuple[Point, ...]:
        """One sequence with the short prompt, further batches of it, and one sequence with each longer prompt."""
        on_gpu = device.startswith("cuda")
        batches = self.batches if self.batches is not None else GPU_BATCHES if on_gpu else CPU_BATCHES
        prefills = self.prefills if self.prefills is not None else GPU_PREFILLS if on_gpu else CPU_PREFILLS
        found = [BASE, *(Point(b, None) for b in sorted(batches)), *(Point(1, p) for p in sorted(prefills))]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Point:
    """One batch size and one prompt length."""

    batch: int
    prompt_tokens: int | None
    """None: the short prompt that research uses."""

    def __str__(self) -> str:
        return f"{self.batch}×{self.prompt_tokens or 'short'}"


BASE = Point(1, None)


def ids_at(loaded: Loaded, point: Point) -> torch.Tensor:
    """Ids of a point's prompt, int64 [batch, tokens]; rows of a batch differ."""
    short = prompt_ids(loaded, PROMPT)
    if point == BASE:
        return short
    length = point.prompt_tokens or 2 * short.shape[1]
    return long_prompt(loaded, PROMPT, point.batch, length, SEED)


def run_at(loaded: Loaded, point: Point) -> Run:
    """What is generated to record a point's calls."""
    ids = ids_at(loaded, point)
    return Run(ids, torch.ones_like(ids), new_tokens=NEW_TOKENS, cache="dynamic", padded=False)


def too_long(loaded: Loaded, points: Sequence[Point]) -> dict[Point, str]:
    """Points whose prompt does not fit into the model's positions, with the reason."""
    config = loaded.model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return {}
    return {
        p: f"a prompt of {p.prompt_tokens} tokens is longer than the model's {most} positions"
        for p in points
        if p.prompt_tokens is not None and p.prompt_tokens + NEW_TOKENS > most
    }
