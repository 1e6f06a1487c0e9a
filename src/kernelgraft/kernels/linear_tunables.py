"""What there is to tune in the products of few rows, with the shapes of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from kernelgraft.cutile.tuning import Tunable
from kernelgraft.kernels import linear_decode
from kernelgraft.kernels.linear_decode import Streaming
from kernelgraft.kernels.linear_forms import Form

HALF = torch.bfloat16
EPS = 1e-6
ONE = (
    # Outputs and width; the queries', keys' and values' weights apart or together, gate and up together, down, the head
    *((2048, 2048), (3072, 2048), (8192, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    *((4096, 4096), (6144, 4096), (1024, 4096), (28672, 4096), (4096, 14336)),
    *((1024, 1024), (2048, 1024), (4096, 1024), (6144, 1024), (1024, 2048), (1024, 3072), (151936, 1024)),
    *((1024, 1152), (1152, 1024), (1152, 6912), (262144, 1152)),
)
GATED = ((8192, 2048), (14336, 4096), (3072, 1024), (6912, 1152))
SEVERAL = (
    *((2048, 2048), (3072, 2048), (2048, 8192), (16384, 2048), (4096, 4096), (6144, 4096), (4096, 14336)),
    *((28672, 4096), (4096, 1024), (1024, 3072), (1152, 6912)),
)
PLAIN = (
    *((1, *size) for size in ONE),
    *((16, *size) for size in SEVERAL),
    *((4, *size) for size in ((6144, 4096), (4096, 14336), (28672, 4096))),
)
"""Rows, outputs and width of single products."""
TWO = tuple((rows, *size) for rows in (1, 16) for size in GATED)
"""The same of gate and up with the activation between and an RMS norm in front."""


def tunables() -> list[Tunable]:
    """Products for one row and for several, and two at a time with an activation between."""
    found = [_tunable(*size, None) for size in PLAIN]
    # What one row takes is wanted first.
    return sorted([*found, *(_tunable(*size, "silu") for size in TWO)], key=lambda t: "_1x" not in t.shape_class)


def space(form: Form) -> list[Streaming]:
    """Of a call's sensible choices those that were among the best somewhere, the default first."""
    if form.count == 1:
        found = [Streaming(fold, 128, *mode) for fold in (8, 16, 4) for mode in ((3, True), (4, False), (2, True))]
        found += [Streaming(8, 256, *mode) for mode in ((3, True), (2, False), (2, True))]
        found += [Streaming(16, 128, 1, True), Streaming(4, 128, 1, True), Streaming(8, 64, 6)]
    else:
        modes = ((2, True), (2, False), (3, True), (1, True))
        found = [Streaming(fold, 128, *mode) for fold in (4, 2, 1) for mode in modes]
        found += [Streaming(fold, 64, *mode) for fold in (2, 1) for mode in ((2, False), (4, False))]
    every = [linear_decode.default(form, -1), *(s for s in found if s.fits(form))]
    return list(dict.fromkeys(every))


def _tunable(rows: int, outputs: int, width: int, activation: str | None) -> Tunable:
    # Two products have a norm in front where models have them; what is best without it can be far from it with one.
    norm = None if activation is None else (EPS, False, "after_weight")
    form = Form(rows, outputs, width, HALF, False, False, norm, activation, False)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        source = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=source, dtype=HALF)

        weights = [normal(outputs, width).mul_(width**-0.5) for _ in range(1 if activation is None else 2)]
        return (normal(rows, 1, width), *weights, *(() if norm is None else (1 + 0.1 * normal(width),)))

    def run(
        streaming: Streaming,
        x: torch.Tensor,
        weight: torch.Tensor,
        up: torch.Tensor | None = None,
        vector: torch.Tensor | None = None,
    ) -> Any:
        y = x.new_empty((rows, 1, outputs))
        linear_decode.launch(streaming, form, x, weight, up, None, None, vector, y)
        return y

    def expected(
        x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None, vector: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x.double()
        if up is None or vector is None:
            return x @ weight.double().T
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * vector.double()
        return functional.silu(x @ weight.double().T) * (x @ up.double().T)

    return Tunable(
        kernel="linear_decode",
        shape_class=linear_decode.shape_class(form),
        space=space(form),
        make=make,
        run=run,
        expected=expected,
        roundings=8.0,
    )
