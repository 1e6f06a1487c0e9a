"""What there is to tune in the kernels that are bound by memory, with the shapes of real models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from kernelgraft.cutile.tuning import Tunable, run_with
from kernelgraft.kernels import act_and_mul, add_rms_norm, layer_norm, rms_norm, rope, row_plans

EPS = 1e-6
HALF = torch.bfloat16
ROWS = (1, 4096, 32)
"""Of classes that come in this order: what was compiled for the second serves the third."""
WIDTHS = (4096, 2048, 1024, 2560, 3072)
"""Of hidden states."""


def normal(device: str, seed: int, *shape: int) -> torch.Tensor:
    """Values of a bfloat16 tensor that are the same in every process."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).to(HALF)


def tunables() -> list[Tunable]:
    """Norms alone and beside a residual, rotary embedding, gated products; first those for few rows."""
    return [*_offers(1), *_offers(4096), *_offers(32)]


def _offers(rows: int) -> list[Tunable]:
    norms = [("rms_norm", width) for width in WIDTHS] + [("add_rms_norm", width) for width in WIDTHS]
    norms += [("layer_norm", width) for width in WIDTHS[:2]]
    found = [_norm(name, rows, width) for name, width in norms] + [_norm("rms_norm", 16 * rows, 128)]
    if rows == 4096:
        found += [_norm(name, most, 4096) for most in (16384, 512) for name in ("rms_norm", "add_rms_norm")]
        found += [_norm("layer_norm", 16384, 4096)]
    heads = ((32, 8, 128), (32, 8, 64), (16, 8, 128), (8, 4, 256), (32, 32, 96))
    found += [_turn(rows, *of) for of in heads]
    sizes = {1: (8192,), 32: (32 * 8192, 32 * 14336), 4096: (4096 * 3072, 4096 * 8192)}[rows]
    for size in sizes:
        found.append(_product("silu", act_and_mul.SEPARATE, rows, size // rows))
    for activation, form in (("silu", act_and_mul.GATE_FIRST), ("gelu_tanh", act_and_mul.SEPARATE)):
        found.append(_product(activation, form, rows, sizes[-1] // rows))
    return found


# Norms


def _norm(name: str, rows: int, width: int) -> Tunable:
    modules: dict[str, ModuleType] = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "layer_norm": layer_norm}
    count = {"rms_norm": 1, "add_rms_norm": 2, "layer_norm": 1}[name]
    vectors = 2 if name == "layer_norm" else 1
    key = name, row_plans.shape_class(rows, width, HALF.itemsize)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        shapes = [(1, rows, width)] * count + [(width,)] * vectors
        return tuple(normal(device, 16 * seed + i, *shape) for i, shape in enumerate(shapes))

    function: Callable[..., Any] = getattr(modules[name], name)
    options: dict[str, Any] = {"eps": EPS} if name == "layer_norm" else {"eps": EPS, "cast": "before_weight"}

    def run(config: Any, *inputs: torch.Tensor) -> Any:
        return run_with(config, key, (modules[name], row_plans), functools.partial(function, *inputs, **options))

    def expected(*inputs: torch.Tensor) -> Any:
        x, *rest = inputs
        if name == "layer_norm":
            return functional.layer_norm(x.double(), (width,), rest[0].double(), rest[1].double(), EPS)
        total = x + rest[0] if name == "add_rms_norm" else x
        wide = total.double()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * rest[-1].double()
        return (total, normed) if name == "add_rms_norm" else normed

    return Tunable(*key, row_plans.space(name, rows, width), make, run, expected)


# Gated products


def _product(activation: str, form: int, rows: int, width: int) -> Tunable:
    key = "act_and_mul", act_and_mul.shape_class(rows, width, HALF.itemsize, activation, form)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        if form != act_and_mul.SEPARATE:
            return (normal(device, 2 * seed, 1, rows, 2 * width),)
        return normal(device, 2 * seed, 1, rows, width), normal(device, 2 * seed + 1, 1, rows, width)

    def run(config: Any, *inputs: torch.Tensor) -> Any:
        function: Callable[..., Any] = act_and_mul.act_and_mul
        if form != act_and_mul.SEPARATE:
            function = act_and_mul.packed_act_and_mul
        return run_with(config, key, (act_and_mul,), lambda: function(*inputs, activation))

    def expected(*inputs: torch.Tensor) -> torch.Tensor:
        gate, up = inputs if len(inputs) == 2 else inputs[0].chunk(2, -1)
        return act_and_mul.ACTIVATIONS[activation](gate.double()) * up.double()

    return Tunable(*key, act_and_mul.space(rows, width), make, run, expected)


# Rotary embedding


def _turn(rows: int, heads: int, k_heads: int, width: int) -> Tunable:
    # A batch of single tokens where there are few rows, one sequence where there are many.
    batch, length = (rows, 1) if rows <= 32 else (1, rows)
    key = "rope", rope.shape_class(rows, heads, k_heads, width)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        q, k = (
            normal(device, 4 * seed + i, batch, length, count, width).transpose(1, 2)
            for i, count in enumerate((heads, k_heads))
        )
        generator = torch.Generator(device=device).manual_seed(4 * seed + 2)
        angles = torch.rand(batch, length, width // 2, device=device, generator=generator) * math.tau
        angles = torch.cat((angles, angles), -1)
        return q, k, angles.cos().to(HALF), angles.sin().to(HALF)

    def run(config: Any, *inputs: torch.Tensor) -> Any:
        return run_with(config, key, (rope,), functools.partial(rope.rope, *inputs))

    def expected(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, cos, sin = (x.double() for x in inputs)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        return turned(q), turned(k)

    # Each product is rounded to the inputs' type, as torch does it.
    return Tunable(*key, rope.space(rows, heads, width), make, run, expected, roundings=6.0)
