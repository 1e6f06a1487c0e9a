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
PLAIN = (
    *((1, out, width) for out, width in ((3072, 2048), (2048, 2048), (8192, 2048), (16384, 2048), (2048, 8192))),
    *((1, out, width) for out, width in ((6144, 4096), (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))),
    (1, 128256, 2048),
    *((rows, out, width) for rows in (4, 8, 16) for out, width in ((3072, 2048), (2048, 8192), (6144, 4096))),
)
"""Rows, outputs and width of single products."""
GATED = ((1, 8192, 2048), (1, 14336, 4096), (8, 14336, 4096))


def tunables() -> list[Tunable]:
    """Products for one row and for several, and two at a time with an activation between."""
    return [_tunable(*size, None) for size in PLAIN] + [_tunable(*size, "silu") for size in GATED]


def _tunable(rows: int, outputs: int, width: int, activation: str | None) -> Tunable:
    form = Form(rows, outputs, width, HALF, False, False, None, activation, False)

    def make(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        source = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=source, dtype=HALF)

        weights = [normal(outputs, width).mul_(width**-0.5) for _ in range(1 if activation is None else 2)]
        return (normal(rows, 1, width), *weights)

    def run(streaming: Streaming, x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None) -> Any:
        y = x.new_empty((rows, 1, outputs))
        linear_decode.launch(streaming, form, x, weight, up, None, None, None, y)
        return y

    def expected(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        product = x.double() @ weight.double().T
        return product if up is None else functional.silu(product) * (x.double() @ up.double().T)

    return Tunable(
        kernel="linear_decode",
        shape_class=linear_decode.shape_class(form),
        space=linear_decode.space(form),
        make=make,
        run=run,
        expected=expected,
        roundings=8.0,
    )
