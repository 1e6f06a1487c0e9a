"""What there is to tune in the kernels of the attention's heads and of the model's head, with the shapes of models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kernelgraft.cutile.tuning import Tunable, run_with
from kernelgraft.kernels import argmax, cross_entropy, cross_entropy_once, qk_norm_rope, sampling
from kernelgraft.kernels.cross_entropy_chunks import shape_class

HALF = torch.bfloat16
EPS = 1e-6
K, TEMPERATURE, TOP_P = 50, 0.7, 0.9


def generator(device: str, seed: int) -> torch.Generator:
    """The same values in every process."""
    return torch.Generator(device=device).manual_seed(seed)


def tunables() -> list[Tunable]:
    """Normed and turned heads; argmax and sampling over vocabularies; cross entropy from hidden states."""
    heads = ((16, 8, 128), (32, 8, 128), (8, 4, 256), (4, 1, 256))
    found = [_heads(tokens, *sizes) for sizes in heads for tokens in (1, 32, 4096)]
    for rows, width in ((1, 128256), (32, 128256), (1, 262144), (64, 262144)):
        found.append(_best(rows, width))
        found.append(_drawn(rows, width))
    for size in ((4096, 128256, 2048), (16, 128256, 2048)):
        found += [_loss(size, passes) for passes in (("once", "backward", "forward") if size[0] > 16 else ("forward",))]
    return found


def _heads(tokens: int, heads: int, k_heads: int, width: int) -> Tunable:
    # A batch of single tokens where there are few, one sequence where there are many.
    batch, length = (tokens, 1) if tokens <= 32 else (1, tokens)
    key = "qk_norm_rope", qk_norm_rope.shape_class(tokens, heads, width)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        source = generator(device, seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=source).to(HALF)

        packed = normal(batch, length, heads + 2 * k_heads, width)
        q, k, _ = packed.split((heads, k_heads, k_heads), dim=2)
        angles = torch.rand(batch, length, width // 2, device=device, generator=source) * math.tau
        angles = torch.cat((angles, angles), -1)
        return q, k, normal(width), normal(width), angles.cos().to(HALF), angles.sin().to(HALF)

    function: Callable[..., Any] = functools.partial(qk_norm_rope.qk_norm_rope, eps=EPS)

    def run(config: Any, *inputs: torch.Tensor) -> Any:
        return run_with(config, key, (qk_norm_rope,), lambda: function(*inputs))

    def expected(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, *weights, cos, sin = inputs
        found = []
        for x, weight in zip((q, k), weights, strict=True):
            wide = x.double().transpose(1, 2)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
            first, second = wide.chunk(2, -1)
            found.append(wide * cos.double().unsqueeze(1) + torch.cat((-second, first), -1) * sin.double().unsqueeze(1))
        return tuple(found)

    # The norm is rounded twice, each product of the rotation once: values of up to ten times the mean square.
    return Tunable(*key, qk_norm_rope.space(tokens, heads, width), make, run, expected, roundings=30.0)


def _best(rows: int, width: int) -> Tunable:
    key = "argmax", argmax.shape_class(rows, width)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(rows, width, device=device, generator=generator(device, seed)).to(HALF),)

    def run(config: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = run_with(config, key, (argmax,), lambda: argmax.argmax(x))
        return found

    def expected(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(width, device=x.device)
        return torch.where(x == x.amax(-1, keepdim=True), places, width).amin(-1)

    return Tunable(*key, argmax.space(rows, width), make, run, expected)


def _drawn(rows: int, width: int) -> Tunable:
    key = "sampling", sampling.shape_class(rows, width)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        source = generator(device, seed)
        logits = torch.randn(rows, width, device=device, generator=source) * 2
        return logits, torch.rand(rows, device=device, generator=source)

    def run(config: Any, logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        words = {"k": K, "temperature": TEMPERATURE, "top_p": TOP_P}
        call: Callable[[], torch.Tensor] = functools.partial(sampling.sample_top_k, logits, u, **words)  # type: ignore[arg-type]
        found: torch.Tensor = run_with(config, key, (sampling,), call)
        return found

    def expected(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        scores, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
        shares = torch.softmax(scores[:, :K] / TEMPERATURE, dim=-1)
        before = shares.cumsum(-1) - shares
        shares = torch.where(before < TOP_P, shares, 0.0)
        goal = u.double().unsqueeze(-1) * shares.sum(-1, keepdim=True)
        place = ((shares > 0) & (before <= goal)).sum(-1, keepdim=True) - 1
        return tokens.gather(-1, place).squeeze(-1)

    return Tunable(*key, sampling.space(rows, width), make, run, expected)


def _loss(shape: tuple[int, int, int], passes: str) -> Tunable:
    """`passes`: forward, backward, or once, which is the mean of the losses with its gradients."""
    tokens, words, channels = shape
    kernel = {"forward": "cross_entropy", "backward": "cross_entropy_backward", "once": cross_entropy_once.KERNEL}
    key = kernel[passes], shape_class(shape, HALF)
    backward = passes != "forward"

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        source = generator(device, seed)
        hidden = torch.randn(tokens, channels, device=device, generator=source).to(HALF)
        weight = (torch.randn(words, channels, device=device, generator=source) * channels**-0.5 * 2).to(HALF)
        labels = torch.randint(0, words, (tokens,), device=device, generator=source)
        labels[:: tokens // 8] = -100
        if passes == "backward":
            _, normalisers = cross_entropy._run(hidden, weight, labels, -100, 1.0, None)
            return hidden, weight, labels, torch.randn(tokens, device=device, generator=source), normalisers
        if passes == "once":
            return hidden, weight, labels, (labels != -100) / (labels != -100).sum()
        return hidden, weight, labels

    def run(config: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: torch.Tensor) -> Any:
        inputs, numbers = (hidden, weight, labels), (-100, 1.0, None)

        def call() -> Any:
            if passes == "once":
                return tuple(cross_entropy._once(*inputs, *numbers, True, True, True)[1:])
            if passes == "backward":
                return tuple(cross_entropy._slopes(rest[0], *inputs, rest[1], *numbers, True, True))
            return cross_entropy._run(*inputs, *numbers)[0]

        return run_with(config, key, (cross_entropy, cross_entropy_once), call)

    def expected(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *rest: torch.Tensor) -> Any:
        chunks = []
        by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if backward else None
        wide = weight.float()
        for part in range(0, tokens, 512):
            rows = slice(part, part + 512)
            h = hidden[rows].float()
            logits = h @ wide.t()
            if by_weight is None:
                chunks.append(functional.cross_entropy(logits, labels[rows], reduction="none"))
                continue
            counted = labels[rows] != -100
            slope = torch.softmax(logits, -1)
            slope[counted.nonzero().squeeze(-1), labels[rows][counted]] -= 1.0
            slope *= (rest[0][rows] * counted).unsqueeze(-1)
            chunks.append(slope @ wide)
            by_weight += slope.t() @ h
        return torch.cat(chunks) if by_weight is None else (torch.cat(chunks), by_weight)

    space = cross_entropy_once.space() if passes == "once" else cross_entropy.space(shape, HALF, backward)
    module = cross_entropy_once if passes == "once" else cross_entropy
    roundings = 100.0 if backward else 400.0
    return Tunable(*key, space, make, run, expected, roundings=roundings, module=module.__name__)
