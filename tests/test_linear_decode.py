"""Products of few rows with a weight against torch in float64: under the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from kernelgraft.cutile import interpreted, tuning
from kernelgraft.kernels import linear_decode as module
from kernelgraft.kernels.act_and_mul import ACTIVATIONS
from kernelgraft.kernels.linear_decode import (
    Streaming,
    choose,
    default,
    gated_linear_decode,
    launch,
    linear_decode,
    space,
)
from kernelgraft.kernels.linear_forms import MOST_ROWS, Form

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [F32, BF16, F16]
UNIT = {F32: 2**-23, BF16: 2**-8, F16: 2**-11}
EPS = 1e-5
TRITON = pytest.param("triton", marks=pytest.mark.gpu)

pytestmark = pytest.mark.filterwarnings("ignore:.*AOTAutograd.*:UserWarning")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu), TRITON])
def where(request: pytest.FixtureRequest) -> Any:
    """The functions, and the device on which they are called; Triton runs on a GPU only."""
    if request.param == "triton":
        pytest.importorskip("triton")
        from kernelgraft.kernels import linear_decode_triton

        return linear_decode_triton.linear_decode, linear_decode_triton.gated_linear_decode, "cuda"
    return linear_decode, gated_linear_decode, request.param


def draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def weight_of(out: int, width: int, **more: Any) -> torch.Tensor:
    return draw(out, width, scale=width**-0.5, **more)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, roundings: float = 2.0) -> None:
    """`found` has `dtype` and lies within some roundings of `expected`, which is float64.

    A rounding is one of the value or, where terms cancel, of the root mean square. Products in float32 are off by the
    rounding of every sum, those of half types hardly by more than that of the result.
    """
    assert found.dtype is dtype
    assert found.shape == expected.shape
    if not found.numel():
        return
    unit = UNIT[dtype] * roundings * (4 if dtype is F32 else 1)
    distance = (found.double() - expected).abs()
    allowed = unit * (expected.abs() + 0.5 * expected.pow(2).mean().sqrt() + 1e-30)
    assert bool((distance <= allowed).all()), f"up to {(distance / allowed).max():.2f} times what is allowed"


def normed(x: torch.Tensor, vector: torch.Tensor, offset: bool = False) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (vector.double() + float(offset))


SIZES = [(40, 256), (70, 100), (1, 64), (9, 8), (33, 1000), (130, 136), (65, 513), (8, 3)]
"""Outputs and widths: whole tiles and not, pieces that can be folded by eight, four, one, widths of odd bytes."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_size(size: tuple[int, int], dtype: torch.dtype, where: Any) -> None:
    linear, _, device = where
    for rows in (1, 3):
        x, weight = draw(rows, 1, size[1], dtype=dtype, device=device), weight_of(*size, dtype=dtype, device=device)
        close(linear(x, weight), x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("rows", range(MOST_ROWS + 1))
def test_any_number_of_rows(rows: int, where: Any) -> None:
    linear, _, device = where
    x, weight = draw(rows, 264, dtype=BF16, device=device), weight_of(50, 264, dtype=BF16, device=device)
    bias = draw(50, dtype=BF16, device=device, seed=1)
    close(linear(x, weight, bias), x.double() @ weight.double().T + bias.double(), BF16)


def test_leading_axes_and_nothing_at_all(where: Any) -> None:
    linear, _, device = where
    weight = weight_of(24, 64, device=device)
    for shape in ((64,), (1, 2, 3, 64), (2, 0, 64)):
        x = draw(*shape, device=device)
        close(linear(x, weight), x.double() @ weight.double().T, F32)
    assert linear(draw(2, 64, device=device), weight[:0]).shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(40, 256), (70, 100)], ids=str)
def test_what_is_put_before_and_after(size: tuple[int, int], dtype: torch.dtype, where: Any) -> None:
    linear, gated, device = where
    x = draw(3, 1, size[1], dtype=dtype, device=device)
    weight, up = (weight_of(*size, dtype=dtype, device=device, seed=s) for s in (0, 1))
    bias, vector = draw(size[0], dtype=dtype, device=device, seed=2), draw(size[1], device=device, seed=3) * 0.2 + 1
    residual = draw(3, 1, size[0], dtype=dtype, device=device, seed=4)
    product = x.double() @ weight.double().T
    close(linear(x, weight, bias, residual=residual), product + bias.double() + residual.double(), dtype)
    rows = normed(x, vector)
    close(linear(x, weight, norm_weight=vector, eps=EPS), rows @ weight.double().T, dtype)
    half = vector.to(dtype)
    found = linear(x, weight, norm_weight=half - 1, eps=EPS, offset=True, residual=residual)
    close(found, normed(x, half - 1, True) @ weight.double().T + residual.double(), dtype)
    expected = functional.silu(product) * (x.double() @ up.double().T)
    close(gated(x, weight, up), expected, dtype, roundings=4)
    close(gated(x, torch.cat([weight, up])), expected, dtype, roundings=4)
    expected = functional.silu(rows @ weight.double().T) * (rows @ up.double().T) + residual.double()
    found = gated(x, weight, up, norm_weight=vector, eps=EPS, residual=residual)
    close(found, expected, dtype, roundings=4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, where: Any) -> None:
    _, gated, device = where
    x, gate, up = draw(2, 64, device=device), weight_of(24, 64, device=device), weight_of(24, 64, device=device, seed=1)
    if gated is not gated_linear_decode:
        from kernelgraft.kernels.linear_decode_triton_kernels import ACTIVATIONS as known

        if activation not in known:
            with pytest.raises(ValueError, match="known"):
                gated(x, gate, up, activation)
            return
    expected = ACTIVATIONS[activation](x.double() @ gate.double().T) * (x.double() @ up.double().T)
    close(gated(x, gate, up, activation), expected, F32, roundings=6)


@pytest.mark.parametrize("cast", ["before_weight", "after_weight"])
def test_float16_is_normalised_before_it_could_overflow(cast: str, where: Any) -> None:
    linear, _, device = where
    x, vector = draw(2, 256, dtype=F16, device=device, scale=9000), draw(256, dtype=F16, device=device, scale=30)
    weight = weight_of(40, 256, dtype=F16, device=device)
    rows = normed(x, vector)
    close(linear(x, weight, norm_weight=vector, eps=EPS, cast=cast), rows @ weight.double().T, F16, roundings=4)


def test_places_that_are_not_numbers_stay_where_they_are(where: Any) -> None:
    linear, _, device = where
    x, weight = draw(3, 256, dtype=BF16, device=device), weight_of(40, 256, dtype=BF16, device=device)
    x[1, 200] = torch.inf
    weight[7, 3] = torch.nan
    found, expected = linear(x, weight), x.float() @ weight.float().T
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows apart": lambda w: torch.cat([w, w], 1)[:, : w.shape[1]],
    "rows an odd distance apart": lambda w: torch.cat([w, w[:, :3]], 1)[:, : w.shape[1]],
    "not aligned": lambda w: torch.cat([w, w[:, :1]], 1)[:, 1:],
    "every second row": lambda w: torch.stack([w, w], 1)[:, 0],
    "one row repeated": lambda w: w[:1].expand(w.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_lie_in_memory_as_they_like(layout: str, where: Any) -> None:
    linear, gated, device = where
    x = draw(2, 1, 256, dtype=BF16, device=device)
    weight, up = (LAYOUTS[layout](weight_of(40, 256, dtype=BF16, device=device, seed=s)) for s in (0, 1))
    product = x.double() @ weight.double().T
    close(linear(x, weight), product, BF16)
    close(gated(x, weight, up, "identity"), product * (x.double() @ up.double().T), BF16, roundings=4)
    close(gated(x, weight, None, "identity"), product[..., :20] * product[..., 20:], BF16, roundings=4)


def test_other_tensors_of_any_strides(where: Any) -> None:
    linear, _, device = where
    weight = weight_of(40, 128, dtype=BF16, device=device)
    x = draw(128, 3, dtype=BF16, device=device).t()
    bias, vector = draw(80, dtype=BF16, device=device)[::2], draw(256, dtype=BF16, device=device)[::2]
    residual = draw(40, 3, dtype=BF16, device=device).t()
    found = linear(x, weight, bias, residual=residual, norm_weight=vector, eps=EPS)
    close(found, normed(x, vector) @ weight.double().T + bias.double() + residual.double(), BF16)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_configurations_are_right(dtype: torch.dtype, where: Any) -> None:
    linear, _, device = where
    if linear is not linear_decode:
        pytest.skip("of cuTile's kernel")
    for rows, gated in ((1, False), (3, True)):
        form = Form(rows, 72, 512, dtype, False, False, (EPS, False, "after_weight"), "silu" if gated else None, False)
        x, vector = draw(rows, 512, dtype=dtype, device=device), draw(512, dtype=dtype, device=device, seed=9)
        weight, up = (weight_of(72, 512, dtype=dtype, device=device, seed=s) for s in (0, 1))
        expected = normed(x, vector) @ weight.double().T
        if gated:
            expected = functional.silu(expected) * (normed(x, vector) @ up.double().T)
        configurations = space(form)
        assert len(configurations) == len(set(configurations)) <= 40
        configurations = configurations[::7]  # each is a compilation; the tuner tries them all
        for streaming in [*configurations, Streaming(4, 64, rows=128), Streaming(8, 32, ahead=True)]:
            if streaming.ahead and device == "cuda" and torch.cuda.get_device_capability()[0] < 9:
                continue
            y = torch.empty(rows, 72, dtype=dtype, device=device)
            launch(streaming, form, x, weight, up if gated else None, None, None, vector, y)
            close(y, expected, dtype, roundings=4)


def test_sums_are_the_same_every_time_and_in_any_order_of_blocks(where: Any) -> None:
    linear, _, device = where
    x, weight = draw(2, 1024, device=device), weight_of(40, 1024, device=device)
    first = linear(x, weight)
    assert torch.equal(linear(x, weight), first)
    if device == "cpu":
        with interpreted(shuffle=3):
            assert torch.equal(linear(x, weight), first)


def test_weights_beyond_an_int32_take_more_launches(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, gated, device = where
    if linear is not linear_decode:
        pytest.skip("Triton counts in int64")
    monkeypatch.setattr(module, "LARGEST_EXTENT", 5000)
    for cached in (module._call, module.plan):
        cached.cache_clear()
    x, weight, up = draw(2, 100, device=device), weight_of(70, 100, device=device), weight_of(70, 100, device=device)
    bias, residual = draw(70, device=device), draw(2, 70, device=device)
    close(linear(x, weight, bias, residual=residual), x.double() @ weight.double().T + bias + residual, F32)
    expected = functional.silu(x.double() @ weight.double().T) * (x.double() @ up.double().T)
    close(gated(x, torch.cat([weight, up])), expected, F32, roundings=4)
    module._call.cache_clear()


@pytest.mark.gpu
def test_weights_beyond_an_int32() -> None:
    weight = torch.randn(270_000, 8192, device="cuda", dtype=BF16)
    x = draw(1, 8192, dtype=BF16, device="cuda")
    rows = torch.tensor([0, 1, 131_071, 262_015, 262_016, 262_143, 262_144, 269_999], device="cuda")
    close(linear_decode(x, weight)[:, rows], x.double() @ weight[rows].double().T, BF16)


def test_refusals_say_why(where: Any) -> None:
    linear, gated, device = where
    x, weight = draw(2, 64, device=device), weight_of(24, 64, device=device)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("17 rows; at most 16", lambda: linear(draw(17, 64, device=device), weight)),
        ("do not fit", lambda: linear(draw(2, 63, device=device), weight)),
        ("do not fit", lambda: gated(x, weight[:23])),
        ("do not fit", lambda: linear(x[:, :0], weight[:, :0])),
        ("stride 24", lambda: linear(x, weight_of(64, 24, device=device).t())),
        ("shape", lambda: linear(x, weight, weight[0])),
        ("shape", lambda: linear(x, weight, residual=x)),
        ("shape", lambda: linear(x, weight, norm_weight=weight[:, 0])),
        ("shape", lambda: gated(x, weight, weight[1:])),
        ("dtype", lambda: linear(x, weight.to(BF16))),
        ("dtype", lambda: linear(x.double(), weight.double())),
        ("cast `none`", lambda: linear(x, weight, norm_weight=x[0], cast="none")),
    ]
    for words, call in refused:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, where: Any) -> None:
    linear, gated, device = where

    def layer(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return linear(gated(x, weight, up, norm_weight=vector), weight.t().contiguous(), residual=x)

    x, vector = draw(2, 1, 64, device=device), draw(64, device=device)
    weight, up = weight_of(40, 64, device=device), weight_of(40, 64, device=device, seed=1)
    torch._dynamo.reset()
    found = torch.compile(layer, fullgraph=True, backend=backend)(x, weight, up, vector)
    assert torch.equal(found, layer(x, weight, up, vector))
    torch._dynamo.reset()


def test_the_op_is_a_good_one(where: Any) -> None:
    _, gated, device = where
    name = "linear_decode" if gated is gated_linear_decode else "linear_decode_triton"
    op: Any = getattr(torch.ops.kernelgraft, name).default
    x, weight, vector = draw(2, 1, 64, device=device), weight_of(40, 64, device=device), draw(64, device=device)
    bias, residual = draw(40, device=device), draw(2, 1, 40, device=device)
    for arguments in (
        (x, weight, None, bias, residual, None, EPS, False, "after_weight", None),
        (x, weight, weight, None, None, vector, EPS, True, "before_weight", "silu"),
        (x, weight, None, None, None, None, EPS, False, "after_weight", "relu"),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))


def test_a_gradient_is_refused_by_name(where: Any) -> None:
    linear, _, device = where
    x, weight = draw(2, 64, device=device), weight_of(24, 64, device=device).requires_grad_()
    found = linear(x, weight)
    with pytest.raises(RuntimeError, match="linear_decode"):
        found.sum().backward()
    with torch.no_grad():
        close(linear(x, weight), x.double() @ weight.double().T, F32)


def test_a_tuned_configuration_is_laid_over_the_default() -> None:
    form = Form(1, 96, 512, BF16, False, False, None, None, False)
    assert choose(form, -1) == default(form, -1) == space(form)[0]
    entry = {"fold": 2, "depth": 64, "occupancy": 1, "loop": False}
    with tuning.using({("linear_decode", module.shape_class(form)): entry}):
        assert choose(form, -1) == replace(default(form, -1), **entry)
        assert choose(replace(form, outputs=97), -1) == default(replace(form, outputs=97), -1)


def test_defaults_fit() -> None:
    for width in (3, 64, 100, 576, 1024, 2048, 4096, 14336, 53248):
        for rows in (1, 2, 5, 8, 9, 16):
            for dtype in DTYPES:
                form = Form(rows, 4096, width, dtype, False, False, None, None, False)
                for streaming in space(form):
                    assert streaming.fits(form), (form, streaming)


def test_what_is_offered_to_the_tuner_runs() -> None:
    from kernelgraft.kernels.linear_tunables import tunables

    offered = tunables()
    assert len({t.name for t in offered}) == len(offered)
    # The smallest of one row, gated and not: the interpreter takes its time.
    alone = sorted(
        (t for t in offered if "_1x" in t.name), key=lambda t: math.prod(map(int, re.findall(r"\d+", t.name)))
    )
    for one in (alone[0], next(t for t in alone if "gated" in t.name)):
        inputs = one.make("cpu", 0)
        assert one.space[0].fold > 1
        close(one.run(one.space[0], *inputs), one.expected(*inputs), BF16, roundings=one.roundings)
