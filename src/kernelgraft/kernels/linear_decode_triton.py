"""The functions of `linear_decode` in Triton, for CUDA tensors; Triton is imported at the first call.

One row, and float32, are multiplied lane by lane; two to sixteen rows of the half types go through tensor cores with
the same folding as there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kernelgraft.cutile.plans import current, eager, power_of_two
from kernelgraft.kernels.linear_forms import Form, dtype_of, form_of, laid, shape_of

ALIASES = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_python": "gelu", "silu_python": "silu"}


@dataclass(frozen=True, slots=True)
class Lanes:
    """What can be chosen freely for one row."""

    tile: int
    """Rows of the weight that a block takes."""
    depth: int
    """Elements of each that are multiplied at a time."""
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Cores:
    """What can be chosen freely for several rows."""

    fold: int
    depth: int = 64
    stages: int = 4
    warps: int = 4
    rows: int = 64
    """Pieces in a tile."""


def linear_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: bool = False,
    cast: str = "after_weight",
) -> torch.Tensor:
    """See `kernelgraft.kernels.linear_decode.linear_decode`."""
    if eager(x, weight, bias, residual, norm_weight):
        return _run(x, weight, None, bias, residual, norm_weight, eps, offset, cast, None)
    return _op(x, weight, None, bias, residual, norm_weight, eps, offset, cast, None)


def gated_linear_decode(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: bool = False,
    cast: str = "after_weight",
) -> torch.Tensor:
    """See `kernelgraft.kernels.linear_decode.gated_linear_decode`; the activations are those of the Triton kernels."""
    if eager(x, gate_weight, up_weight, residual, norm_weight):
        return _run(x, gate_weight, up_weight, None, residual, norm_weight, eps, offset, cast, activation)
    return _op(x, gate_weight, up_weight, None, residual, norm_weight, eps, offset, cast, activation)


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    activation: str | None,
) -> torch.Tensor:
    form = form_of(
        x.shape,
        (weight.shape, weight.stride()),
        laid(up),
        (shape_of(bias), shape_of(residual), shape_of(vector)),
        (x.dtype, weight.dtype, dtype_of(up), dtype_of(bias), dtype_of(residual), dtype_of(vector)),
        eps,
        offset,
        cast,
        activation,
    )
    y = x.new_empty(*x.shape[:-1], form.outputs)
    if y.numel():
        if x.get_device() == current():
            launch(choose(form), form, x, weight, up, bias, residual, vector, y)
        else:
            with torch.cuda.device(x.device):
                launch(choose(form), form, x, weight, up, bias, residual, vector, y)
    return y


def launch(
    chosen: Lanes | Cores,
    form: Form,
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """One call with a given configuration into y, on the current device."""
    from kernelgraft.kernels import linear_decode_triton_kernels as kernels

    if form.packed:
        weight, up = weight[: form.outputs], weight[form.outputs :]
    x, other = x.contiguous(), weight if up is None else up
    shift, addend, scales = (x if t is None else t.contiguous() for t in (bias, residual, vector))
    eps, offset, cast = form.norm or (0.0, False, "after_weight")
    number = 0 if form.activation is None else _number(form.activation)
    tensors = (x, weight, other, shift, addend, scales, y)
    flags = {
        "OFFSET": offset,
        "GATED": form.activation is not None,
        "ACT": number,
        "BIAS": form.bias,
        "RESIDUAL": form.residual,
    }
    steps = weight.stride(0), other.stride(0)
    if isinstance(chosen, Lanes):
        even = form.outputs % chosen.tile == 0 and form.width % chosen.depth == 0
        grid: tuple[int, ...] = (-(-form.outputs // chosen.tile), form.count)
        kernels.row_kernel[grid](
            *tensors, form.outputs, form.width, *steps, eps, NORM=0 if form.norm is None else 2, **flags,
            TILE=chosen.tile, DEPTH=chosen.depth, EVEN=even, num_warps=chosen.warps,
        )  # fmt: skip
        return
    tile = chosen.rows // chosen.fold
    # Only float16 could overflow where x is multiplied by the norm's weight before it is normalised.
    how = 0 if form.norm is None else 1 if form.dtype is torch.float16 else 2
    kernels.rows_kernel[(-(-form.outputs // tile),)](
        *tensors, form.count, form.outputs, *steps, eps, WIDTH=form.width, NORM=how, ROUND=cast == "before_weight",
        **flags, TILE=tile, FOLD=chosen.fold, DEPTH=chosen.depth,
        COLUMNS=max(16, power_of_two(form.count * chosen.fold)), STAGES=chosen.stages, num_warps=chosen.warps,
    )  # fmt: skip


@functools.cache
def _number(activation: str) -> int:
    from kernelgraft.kernels.linear_decode_triton_kernels import ACTIVATIONS

    name = ALIASES.get(activation, activation)
    if name not in ACTIVATIONS:
        raise ValueError(f"activation `{activation}`; known: {', '.join((*ACTIVATIONS, *ALIASES))}")
    return ACTIVATIONS.index(name)


@functools.lru_cache(maxsize=4096)
def choose(form: Form) -> Lanes | Cores:
    """The free choices for a call."""
    return space(form)[0]


def space(form: Form) -> list[Lanes | Cores]:
    """Sensible choices for a call, the default first."""
    if form.count == 1 or form.dtype is torch.float32:
        depth = min(1024, max(64, power_of_two(form.width)))
        lanes = [Lanes(2, 1024, 4), Lanes(1, 1024, 2), Lanes(2, 512, 2), Lanes(4, 2048, 4), Lanes(4, 1024, 4)]
        fitting = [c for c in lanes if c.depth <= power_of_two(form.width)]
        return list(fitting) or [Lanes(max(2, 2048 // depth), depth, 4)]
    folds = (4, 1, 2, 8) if form.count <= 8 else (1, 2, 4)
    cores = [
        Cores(fold, depth, stages)
        for depth, stages in ((64, 6), (64, 4), (128, 4))
        for fold in folds
        if form.width % fold == 0 and (form.width // fold) % 8 == 0 and form.count * fold <= 64
    ]
    return list(cores) or [Cores(1, 64, 4)]


_op = torch.library.custom_op("kernelgraft::linear_decode_triton", _run, mutates_args=())


@_op.register_fake
def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    vector: torch.Tensor | None,
    eps: float,
    offset: bool,
    cast: str,
    activation: str | None,
) -> torch.Tensor:
    outputs = weight.shape[0] // 2 if activation is not None and up is None else weight.shape[0]
    return x.new_empty((*x.shape[:-1], outputs))
