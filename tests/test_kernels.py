"""Our cuTile kernels against torch in float64: under the interpreter on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from kernelgraft.cutile import plans
from kernelgraft.kernels import act_and_mul as act_module
from kernelgraft.kernels import add_rms_norm as add_module
from kernelgraft.kernels import layer_norm as layer_module
from kernelgraft.kernels import rms_norm as rms_module
from kernelgraft.kernels import rope as rope_module
from kernelgraft.kernels import row_plans
from kernelgraft.kernels.access import GATHER, LOAD
from kernelgraft.kernels.act_and_mul import ACTIVATIONS, PACKED, act_and_mul, packed_act_and_mul
from kernelgraft.kernels.add_rms_norm import add_rms_norm, rms_norm_add
from kernelgraft.kernels.layer_norm import add_layer_norm, layer_norm, layer_norm_add
from kernelgraft.kernels.rms_norm import CASTS, rms_norm
from kernelgraft.kernels.rope import rope

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [F32, BF16, F16]
SHAPES = [
    (7, 33),
    (1, 1, 513),
    (2, 3, 4, 128),
    (3, 896),
    (1, 2, 4096),
    (2, 5120),
    (0, 64),
    (2, 0, 33),
    (5,),
    (1, 17000),
]
"""Widths that are no power of two, of one piece and of several, wider than registers; no rows at all."""

pytestmark = pytest.mark.filterwarnings("ignore:.*AOTAutograd.*:UserWarning")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    return str(request.param)


def draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def close(
    found: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    *,
    roundings: float = 1.5,
    size: torch.Tensor | None = None,
) -> None:
    """`found` has `dtype` and lies within some roundings of `expected`, which is float64.

    `size`: what is rounded, if that is larger than the result, as where terms cancel.
    """
    assert found.dtype is dtype
    assert found.shape == expected.shape
    if not found.numel():
        return
    unit = {F32: 4e-7, BF16: 2**-8, F16: 2**-11}[dtype]
    distance = (found.double() - expected).abs()
    rounded = expected.abs() if size is None else size
    allowed = unit * roundings * (rounded + expected.pow(2).mean().sqrt() * 0.25 + 1e-30)
    assert bool((distance <= allowed).all()), f"up to {(distance / allowed).max():.2f} times what is allowed"


def exact_rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: bool = False) -> torch.Tensor:
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight.double() + float(offset))


def exact_layer(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, offset: bool = False
) -> torch.Tensor:
    scale = None if weight is None else weight.double() + float(offset)
    shift = None if bias is None else bias.double()
    return functional.layer_norm(x.double(), x.shape[-1:], scale, shift, eps)


# RMS norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, weight = draw(*shape, dtype=dtype, device=device), draw(shape[-1], dtype=dtype, device=device, seed=1)
    close(rms_norm(x, weight, 1e-5), exact_rms(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    ("dtype", "vector"), [(BF16, BF16), (BF16, F32), (F32, BF16), (F16, BF16), (F32, F32)], ids=str
)
def test_rms_norm_rounds_where_the_original_does(
    dtype: torch.dtype, vector: torch.dtype, cast: str, offset: bool, device: str
) -> None:
    x, weight = draw(3, 96, dtype=dtype, device=device), draw(96, dtype=vector, device=device, seed=1)
    inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    normed, scale = x.float() * inverse, weight + 1 if offset else weight
    expected = {
        "before_weight": lambda: scale * normed.to(dtype),
        "after_weight": lambda: (scale.float() * normed).to(dtype),
        "weight_dtype": lambda: scale * (normed.to(vector) if vector in (BF16, F16) else normed),
        "factor": lambda: scale * (x * inverse.to(dtype)),
        "none": lambda: scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    }[cast]()
    found = rms_norm(x, weight, 1e-6, offset=offset, cast=cast, round_offset=True)
    assert found.dtype is expected.dtype
    if cast != "none" and found.dtype is not F32 and device == "cpu":
        # A sum in another order may move a value over the edge of a rounding: a few per thousand at the most.
        assert (found != expected).float().mean() < 0.02
    close(
        found,
        expected.double(),
        found.dtype,
        roundings=4 if BF16 in (dtype, vector) and found.dtype is not F32 else 2e4,
    )


def test_rms_norm_without_weight_and_by_division(device: str) -> None:
    x = draw(4, 200, device=device)
    close(rms_norm(x, None, 1e-6), exact_rms(x, None, 1e-6), F32)
    weight = draw(200, device=device, seed=1)
    close(rms_norm(x, weight, 1e-6, divide=True, offset=True), exact_rms(x, weight, 1e-6, True), F32)


def test_offset_is_added_in_the_weights_dtype_only_if_wanted(device: str) -> None:
    x, weight = draw(3, 256, device=device), draw(256, dtype=BF16, device=device, seed=1) * 0.01
    close(rms_norm(x, weight, 0.0, offset=True), exact_rms(x, weight, 0.0, True), F32)
    rounded = (weight + 1).double()
    found = rms_norm(x, weight, 0.0, offset=True, round_offset=True)
    close(found, exact_rms(x, None, 0.0) * rounded, F32)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "every second row": lambda x: x[:, ::2],
    "slice of the channels": lambda x: x[..., 3:67],
    "every second channel": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(3, -1, -1),
    "heads of a packed projection": lambda x: x.view(3, 10, 3, 32)[:, :, 1:2],
    "one row of each": lambda x: x[:, 4],
    "heads before rows": lambda x: x.view(3, 10, 3, 32).transpose(1, 2),
    "batch last": lambda x: x.view(3, 5, 2, 96).permute(1, 2, 0, 3),
    "batch last, sliced": lambda x: x.view(3, 5, 2, 96).permute(1, 2, 0, 3)[..., :50],
}


@pytest.mark.parametrize("view", STRIDED)
def test_norms_of_strided_inputs(view: str, device: str) -> None:
    x = STRIDED[view](draw(3, 10, 96, dtype=BF16, device=device))
    weight = draw(x.shape[-1], dtype=BF16, device=device, seed=1)
    other = draw(*x.shape, dtype=BF16, device=device, seed=2)
    close(rms_norm(x, weight, 1e-5), exact_rms(x, weight, 1e-5), BF16)
    close(layer_norm(x, weight, weight, 1e-5), exact_layer(x, weight, weight, 1e-5), BF16)
    close(act_and_mul(x, other, "relu"), x.double().relu() * other.double(), BF16)
    if x.shape[-1] % 2 == 0:
        first, second = x.double().chunk(2, -1)
        close(packed_act_and_mul(x, "relu"), first.relu() * second, BF16)
    total, normed = add_rms_norm(x, other, weight, 1e-5)
    assert torch.equal(total, x + other)
    close(rms_norm_add(other, x, weight, 1e-5), other.double() + rms_norm(x, weight, 1e-5).double(), BF16)
    close(normed, exact_rms(x + other, weight, 1e-5), BF16)


@pytest.mark.parametrize("count", [65537, 70000])
def test_more_rows_than_a_grid_has_blocks(count: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(count, 8, dtype=BF16, device=device), draw(8, dtype=BF16, device=device, seed=1)
    close(rms_norm(x, weight, 1e-5), exact_rms(x, weight, 1e-5), BF16)
    if device == "cuda":
        wide = draw(count, 2048, dtype=BF16, device=device)
        close(act_and_mul(wide, wide, "relu"), wide.double().relu() * wide.double(), BF16)


def test_blocks_take_further_tiles_in_turn(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LARGEST_GRID", 3)
    for module in (row_plans, act_module, rope_module):
        monkeypatch.setattr(module, "LARGEST_AXIS", 2)
    clear()
    x, weight = draw(3, 7, 1500, dtype=BF16, device=device), draw(1500, dtype=BF16, device=device, seed=1)
    close(rms_norm(x, weight, 1e-5), exact_rms(x, weight, 1e-5), BF16)
    close(act_and_mul(x, x, "sigmoid"), x.double().sigmoid() * x.double(), BF16, roundings=2.5)
    q, cos, sin = draw(3, 5, 9, 16, device=device), *(draw(1, 9, 16, device=device, seed=s) for s in (2, 3))
    close(rope(q, None, cos, sin)[0], rotated(q, cos, sin), F32)
    clear()


def test_tensors_beyond_an_int32_are_split(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (row_plans, act_module, rope_module):
        monkeypatch.setattr(module, "LARGEST_EXTENT", 2000)
    clear()
    x, weight = draw(5, 9, 100, dtype=BF16, device=device), draw(100, dtype=BF16, device=device, seed=1)
    close(rms_norm(x, weight, 1e-5), exact_rms(x, weight, 1e-5), BF16)
    close(layer_norm_add(x, x, weight, weight), x.double() + exact_layer(x, weight, weight, 1e-5).to(BF16), BF16)
    close(packed_act_and_mul(x, "relu"), x[..., :50].double().relu() * x[..., 50:].double(), BF16)
    q = draw(1, 3, 40, 64, device=device)
    cos, sin = draw(1, 40, 64, device=device, seed=2), draw(1, 40, 64, device=device, seed=3)
    close(rope(q, None, cos, sin)[0], rotated(q, cos, sin), F32)
    clear()


def clear() -> None:
    """Forget the launch plans."""
    row_plans.plan.cache_clear()
    for module in (rms_module, add_module, layer_module, act_module, rope_module):
        module._call.cache_clear()
    for module in (act_module, rope_module):
        module._plan.cache_clear()


# Residual additions


@pytest.mark.parametrize("laid", ["residual", "x", "both"])
def test_results_lie_in_memory_as_those_of_an_addition(laid: str, device: str) -> None:
    residual, x = (draw(3, 5, 64, device=device, seed=s) for s in (0, 1))
    residual, x = (
        t.transpose(0, 1).contiguous().transpose(0, 1) if laid in (name, "both") else t
        for name, t in (("residual", residual), ("x", x))
    )
    wanted = (residual + x).stride()
    assert [t.stride() for t in (*add_rms_norm(residual, x), rms_norm_add(residual, x))] == [wanted] * 3
    assert [t.stride() for t in (*add_layer_norm(residual, x), layer_norm_add(residual, x))] == [wanted] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 513), (1, 896), (1, 4096), (0, 64), (1, 17000)], ids=str)
def test_sum_and_its_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    residual, x = (draw(*shape, dtype=dtype, device=device, seed=s) for s in (0, 1))
    weight, bias = (draw(shape[-1], dtype=dtype, device=device, seed=s) for s in (2, 3))
    before = residual.clone(), x.clone()
    total, normed = add_rms_norm(residual, x, weight, 1e-5, offset=True)
    assert torch.equal(total, residual + x)
    close(normed, exact_rms(total, weight, 1e-5, True), dtype)
    total, normed = add_layer_norm(residual, x, weight, bias, 1e-5)
    assert torch.equal(total, residual + x)
    product = exact_layer(total, weight, None, 1e-5)
    close(normed, exact_layer(total, weight, bias, 1e-5), dtype, size=product.abs() + bias.double().abs())
    close(rms_norm_add(residual, x, weight), residual.double() + exact_rms(x, weight, 1e-6), dtype, roundings=8)
    close(
        layer_norm_add(residual, x, weight), residual.double() + exact_layer(x, weight, None, 1e-5), dtype, roundings=8
    )
    assert torch.equal(before[0], residual)
    assert torch.equal(before[1], x)


def test_sum_of_two_dtypes(device: str) -> None:
    residual, x = draw(3, 64, device=device), draw(3, 64, dtype=BF16, device=device, seed=1)
    weight = draw(64, dtype=BF16, device=device, seed=2)
    total, normed = add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(total, residual + x)
    close(normed, exact_rms(total, weight, 1e-5), F32)
    found = rms_norm_add(residual, x, weight, 1e-5)
    close(found, residual.double() + rms_norm(x, weight, 1e-5).double(), F32)


# Layer norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = draw(*shape, dtype=dtype, device=device) + 3  # far from zero, where a variance of squares would cancel
    weight, bias = (draw(shape[-1], dtype=dtype, device=device, seed=s) for s in (1, 2))
    close(
        layer_norm(x, weight, bias, 1e-5), exact_layer(x, weight, bias, 1e-5), dtype, roundings=8 if dtype is F32 else 3
    )
    close(layer_norm(x, None, None, 1e-5), exact_layer(x, None, None, 1e-5), dtype, roundings=8 if dtype is F32 else 3)


def test_layer_norm_in_steps(device: str) -> None:
    x = draw(5, 96, dtype=BF16, device=device)
    weight, bias = draw(96, dtype=BF16, device=device, seed=1), draw(96, device=device, seed=2)
    expected = functional.layer_norm(x, (96,)) * (weight + 1) + bias
    found = layer_norm(x, weight, bias, round_normed=True, offset=True, round_offset=True, divide=True)
    close(found, expected.double(), F32, roundings=3e4)
    assert layer_norm(x, weight, bias).dtype is BF16


@pytest.mark.parametrize("width", [33, 768, 17000])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_whose_sum_is_no_float32_and_whose_mean_is(width: int, dtype: torch.dtype, device: str) -> None:
    """Their variance is none either, so that the norm is zero, as torch's on a GPU; on a CPU torch may give NaN."""
    usual = draw(4, width, dtype=dtype, device=device)
    weight, bias = (draw(width, dtype=dtype, device=device, seed=s) for s in (1, 2))
    x = usual.clone()
    x[::2] = (x[::2].float().abs() * 1e36 + 2e37).to(dtype)
    assert bool(x[::2].float().sum(-1).isinf().all())
    assert bool(x[::2].double().mean(-1).lt(torch.finfo(F32).max).all())
    other = torch.ones_like(x)

    def found(x: torch.Tensor, other: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        sums = [layer_norm_add(other, x, weight, bias, **options), *add_layer_norm(x, other, weight, bias, **options)]
        return [layer_norm(x, weight, bias, **options), *sums]

    for divide in (False, True):
        normed, added, total, of_total = found(x, other, divide=divide)
        assert torch.equal(normed[::2], bias.expand_as(normed[::2]))
        assert torch.equal(added[::2], (bias.float() + 1).to(dtype).expand_as(added[::2]))
        assert torch.equal(total, x + other)
        assert torch.equal(of_total[::2], bias.expand_as(of_total[::2]))
        alone = found(usual, other, divide=divide)
        for mine, theirs in zip((normed, added, total, of_total), alone, strict=True):
            assert torch.equal(mine[1::2], theirs[1::2])
    for of_squares in (rms_norm(x, weight), add_rms_norm(x, other, weight)[1]):
        assert not bool(of_squares[::2].any())
    assert torch.equal(rms_norm_add(other, x, weight)[::2], other[::2])


# activation(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype, device: str) -> None:
    grid = torch.cat([torch.linspace(-b, b, 501) for b in (1e-3, 1.0, 12.0, 100.0)])
    gate = grid.to(device, dtype).reshape(4, 501)
    up = torch.ones_like(gate)
    expected = ACTIVATIONS[name](gate.double())
    found = act_and_mul(gate, up, name)
    assert found.dtype is dtype
    unit = {F32: 3e-7, BF16: 2**-8, F16: 2**-11}[dtype]
    small = 3e-7 if device == "cuda" or name in ("gelu_tanh", "gelu") else 2.0**-24 if dtype is F16 else 1e-10
    assert bool(((found.double() - expected).abs() <= unit * expected.abs() * 2 + small).all())


@pytest.mark.parametrize("shape", [(7, 33), (1, 1, 513), (2, 3, 896), (4, 4096), (0, 64), (3, 2, 2, 100)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    gate, up = (draw(*shape, dtype=dtype, device=device, seed=s) for s in (0, 1))
    expected = functional.silu(gate.double()) * up.double()
    close(act_and_mul(gate, up), expected, dtype, roundings=2.5)
    close(act_and_mul(gate, up, upcast=True), expected, dtype)
    both = torch.cat((gate, up), dim=-1)
    assert torch.equal(packed_act_and_mul(both), act_and_mul(gate, up))


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("width", [33, 512, 640])
def test_packed_and_limited(packed: str, width: int, device: str) -> None:
    both = draw(3, 5, 2 * width, device=device, scale=2.0)
    first, second = both.chunk(2, -1) if not packed.startswith("inter") else (both[..., 0::2], both[..., 1::2])
    gate, up = (first, second) if packed.endswith("gate_first") else (second, first)
    gate, up = gate.double(), up.double()
    limited = functional.silu(gate.clamp(max=0.75)) * up.clamp(-0.75, 0.75)
    close(packed_act_and_mul(both, packed=packed, clamp="before", limit=0.75), limited, F32)
    limited = functional.silu(gate).clamp(max=0.75) * up.clamp(-0.75, 0.75)
    close(packed_act_and_mul(both, packed=packed, clamp="after", limit=0.75), limited, F32)
    close(packed_act_and_mul(both[:, 1::2], packed=packed), (functional.silu(gate) * up)[:, 1::2], F32)


def test_infinities_and_nan_pass_as_in_torch(device: str) -> None:
    gate = torch.tensor([[float("inf"), float("-inf"), float("nan"), 1.0]], device=device)
    up = torch.ones_like(gate)
    for name, function in ACTIVATIONS.items():
        if name in ("gelu_tanh", "mish", "hardswish", "gelu", "quick_gelu", "silu"):
            continue  # inf times zero: torch's own result depends on the device
        assert torch.allclose(act_and_mul(gate, up, name), function(gate), equal_nan=True), name
    assert bool(act_and_mul(gate, up, "silu")[0, 2].isnan())


def test_gelu_far_below_zero_is_nothing_and_never_infinite(device: str) -> None:
    gate = torch.tensor([[float("-inf"), -3e38, -1e5, -20.0, 1.0]], device=device)
    found = act_and_mul(gate, torch.ones_like(gate), "gelu")
    assert bool(found[0, 0].isnan() | (found[0, 0] == 0))  # minus infinity times zero: NaN in torch
    assert not bool(found[0, 1:4].any())


# Rotary position embedding


def rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    row_axis: int = 2,
    rotary_dim: int | None = None,
    last: bool = False,
    pairs_in: str = "half",
    pairs_out: str = "half",
    table: str = "full",
    backward: bool = False,
) -> torch.Tensor:
    """In float64."""

    def pairs(t: torch.Tensor, how: str) -> tuple[torch.Tensor, ...]:
        return t.chunk(2, -1) if how == "half" else (t[..., 0::2], t[..., 1::2])

    width = x.shape[-1]
    turned = rotary_dim or width
    wide, cos, sin = x.double(), cos.double().unsqueeze(3 - row_axis), sin.double().unsqueeze(3 - row_axis)
    if table == "full":
        (cos_a, cos_b), (sin_a, sin_b) = pairs(cos, pairs_out), pairs(sin, pairs_out)
    else:
        cos_a = cos_b = cos[..., : turned // 2]
        sin_a = sin_b = sin[..., : turned // 2]
    start = width - turned if last else 0
    a, b = pairs(wide[..., start : start + turned], pairs_in)
    if backward:
        sin_a, sin_b = -sin_a, -sin_b
    first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    y = torch.cat((first, second), -1) if pairs_out == "half" else torch.stack((first, second), -1).flatten(-2)
    rest = wide[..., :start] if last else wide[..., turned:]
    return torch.cat((rest, y) if last else (y, rest), -1)


ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"pairs_in": "interleaved", "pairs_out": "interleaved"},
    "interleaved to half": {"pairs_in": "interleaved", "table": "half"},
    "half to interleaved": {"pairs_out": "interleaved", "table": "first_half"},
    "backward": {"backward": True, "table": "half"},
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(("width", "turned"), [(128, 128), (80, 80), (96, 96), (92, 92), (64, 16), (96, 36), (6, 2)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_rope(kind: str, width: int, turned: int, dtype: torch.dtype, device: str) -> None:
    options = {**ROPES[kind], "rotary_dim": turned, "row_axis": 1 + turned // 2 % 2, "last": width == 96}
    q, k = draw(2, 5, 3, width, dtype=dtype, device=device), draw(2, 5, 2, width, dtype=dtype, device=device, seed=1)
    if options["row_axis"] == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    values = turned // 2 if options.get("table") == "half" else turned
    cos, sin = (draw(1 + turned // 8 % 2, 5, values, dtype=dtype, device=device, seed=s) for s in (2, 3))
    found = rope(q, k, cos, sin, compute="float32", **options)
    for x, y in zip((q, k), found, strict=True):
        close(y, rotated(x, cos, sin, **options), dtype)


def test_rope_rounds_products_as_torch_does(device: str) -> None:
    q, k = (draw(1, h, 9, 64, dtype=BF16, device=device) for h in (4, 1))
    cos, sin = (draw(1, 9, 64, dtype=BF16, device=device, seed=s) for s in (2, 3))

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = torch.cat((-x[..., 32:], x[..., :32]), dim=-1)
        return x * cos.unsqueeze(1) + half * sin.unsqueeze(1)

    for x, y in zip((q, k), rope(q, k, cos, sin), strict=True):
        if device == "cpu":
            assert torch.equal(y, turn(x))
        else:  # a GPU may join a product and a sum into one operation with one rounding
            parts = x.double().abs() * cos.abs().unsqueeze(1), x.double().roll(32, -1).abs() * sin.abs().unsqueeze(1)
            assert bool(((y.double() - turn(x.double())).abs() <= 2**-7 * sum(parts)).all())


TUNINGS = [
    plans.Tuning(elements=256, access=LOAD),
    plans.Tuning(elements=4096, blocks=1, occupancy=2, worker_warps=8),
    plans.Tuning(elements=1024, access=LOAD, blocks=2),
    plans.Tuning(elements=128, access=GATHER),
    plans.Tuning(elements=2048, access=GATHER, blocks=1),
]


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_tuning_changes_no_result(tuning: plans.Tuning, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(300, 96, dtype=BF16, device=device), draw(96, dtype=BF16, device=device, seed=1)
    wide = draw(3, 2, 1536, dtype=BF16, device=device)
    q, k = (draw(2, h, 9, 64, device=device) for h in (6, 3))
    cos, sin = (draw(1, 9, 64, device=device, seed=s) for s in (2, 3))
    odd, tables = draw(1, 3, 7, 92, device=device), [draw(1, 7, 80, device=device, seed=s) for s in (2, 3)]
    odd_gate = draw(2, 3, 70, device=device)

    def results() -> list[torch.Tensor]:
        clear()
        norms = [rms_norm(x, weight), *add_rms_norm(x, x, weight), layer_norm(wide), layer_norm(wide[..., :1001])]
        products = [act_and_mul(wide, wide), packed_act_and_mul(wide), packed_act_and_mul(odd_gate)]
        turns = [
            rope(odd, None, *tables, rotary_dim=80, last=last, pairs_in=pairs, pairs_out=pairs)[0]
            for last in (False, True)
            for pairs in ("half", "interleaved")
        ]
        return [*norms, *products, *rope(q, k, cos, sin), *turns]

    expected = results()
    for module in (row_plans, act_module, rope_module):
        fields = {name: getattr(tuning, name) for name in plans.Tuning.__slots__}
        monkeypatch.setattr(module, "SMALL", dataclasses.replace(module.SMALL, **fields))
    for found, wanted in zip(results(), expected, strict=True):
        close(found, wanted.double(), wanted.dtype)
    clear()


def test_rope_of_q_alone_of_packed_heads_and_of_two_dtypes(device: str) -> None:
    packed = draw(2, 7, 5 * 64, dtype=BF16, device=device).view(2, 7, 5, 64)
    q, k = packed[:, :, :3].transpose(1, 2), packed[:, :, 3:4].transpose(1, 2)
    cos, sin = (draw(2, 7, 64, device=device, seed=s) for s in (2, 3))
    for x, y in zip((q, k), rope(q, k, cos, sin), strict=True):
        close(y, rotated(x, cos, sin), BF16)
    (alone,) = rope(q, None, cos, sin, cast=False)
    close(alone, rotated(q, cos, sin), F32)
    assert rope(q[:, :, :0], None, cos[:, :0], sin[:, :0])[0].shape == (2, 3, 0, 64)


# Custom ops


def calls() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    x, other, weight, bias = draw(3, 5, 48), draw(3, 5, 48, seed=1), draw(48, seed=2), draw(48, seed=3)
    q, cos, sin = draw(2, 3, 5, 16), draw(1, 5, 12, seed=4), draw(1, 5, 12, seed=5)
    return {
        "rms_norm": (lambda *a: rms_norm(*a, 1e-5, offset=True), (x, weight)),
        "add_rms_norm": (lambda *a: add_rms_norm(*a, 1e-5), (other, x, weight)),
        "rms_norm_add": (lambda *a: rms_norm_add(*a, 1e-5), (other, x, weight)),
        "layer_norm": (lambda *a: layer_norm(*a, 1e-5, offset=True), (x, weight, bias)),
        "act_and_mul": (lambda *a: act_and_mul(*a, "gelu_tanh"), (x, other)),
        "packed": (lambda *a: packed_act_and_mul(*a, packed="interleaved_up_first", clamp="before", limit=1.0), (x,)),
        "rope": (lambda a, b: rope(a, b, cos, sin, rotary_dim=12), (q, draw(2, 1, 5, 16, seed=6))),
        "rope mixed": (
            lambda a: rope(a, None, cos, sin, rotary_dim=12, last=True, pairs_in="interleaved", backward=True),
            (q,),
        ),
    }


def in_torch(name: str, inputs: tuple[torch.Tensor, ...]) -> Any:
    """The same calls in float64 torch."""
    cos, sin = draw(1, 5, 12, seed=4), draw(1, 5, 12, seed=5)
    mixed = {"rotary_dim": 12, "last": True, "pairs_in": "interleaved", "backward": True}
    return {
        "rms_norm": lambda x, w: exact_rms(x, w, 1e-5, True),
        "add_rms_norm": lambda r, x, w: (r + x, exact_rms(r + x, w, 1e-5)),
        "rms_norm_add": lambda r, x, w: r + exact_rms(x, w, 1e-5),
        "layer_norm": lambda x, w, b: exact_layer(x, w, b, 1e-5, True),
        "act_and_mul": lambda g, u: functional.gelu(g, approximate="tanh") * u,
        "packed": lambda x: functional.silu(x[..., 1::2].clamp(max=1.0)) * x[..., 0::2].clamp(-1.0, 1.0),
        "rope": lambda q, k: (rotated(q, cos, sin, rotary_dim=12), rotated(k, cos, sin, rotary_dim=12)),
        "rope mixed": lambda q: rotated(q, cos, sin, **mixed),
    }[name](*(t.double() for t in inputs))


def as_list(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@pytest.mark.parametrize("name", calls())
def test_gradients(name: str) -> None:
    call, inputs = calls()[name]
    ours = [t.clone().requires_grad_() for t in inputs]
    theirs = [t.double().requires_grad_() for t in inputs]
    outputs, expected = as_list(call(*ours)), as_list(in_torch(name, tuple(theirs)))
    for seed, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        close(found.detach(), wanted.detach(), F32, roundings=3)
        up = draw(*found.shape, seed=seed)
        found.backward(up, retain_graph=True)
        wanted.backward(up.double(), retain_graph=True)
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.grad is not None and wanted.grad is not None
        close(found.grad, wanted.grad, F32, roundings=20)


@pytest.mark.parametrize("name", calls())
def test_ops_trace_without_running(name: str) -> None:
    call, inputs = calls()[name]
    from torch._subclasses.fake_tensor import FakeTensorMode

    expected = as_list(call(*inputs))
    with FakeTensorMode() as mode:
        mode.allow_non_fake_inputs = True  # the tables
        found = as_list(call(*(mode.from_tensor(t) for t in inputs)))
    for fake, real in zip(found, expected, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_a_compiled_function_holds_the_op() -> None:
    x, weight = draw(3, 48), draw(48, seed=2)
    compiled = torch.compile(lambda a, b: rms_norm(a * 2, b, 1e-5) + 1, backend="aot_eager", fullgraph=True)
    close(compiled(x, weight), exact_rms(x * 2, weight, 1e-5) + 1, F32)


def test_fast_path_is_left_where_something_watches() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = draw(2, 16)
    assert plans.eager(x)
    with Watch():
        assert not plans.eager(x)
        rms_norm(x)
    assert any("kernelgraft.rms_norm" in name for name in seen)
    assert not plans.eager(x.requires_grad_())
    with torch.no_grad():
        assert plans.eager(x)


def test_odd_packed_width_is_refused() -> None:
    with pytest.raises(ValueError, match="33 is odd"):
        packed_act_and_mul(draw(2, 33))


@pytest.mark.parametrize(
    "width", [*range(1, 300, 7), 896, 1000, 2560, 3072, 4096, 5120, 7168, 8192, 14336, 16384, 50000]
)
def test_pieces_cover_a_row(width: int) -> None:
    tile, pieces, resident = row_plans.cut(width)
    assert tile & (tile - 1) == 0
    assert (pieces - 1) * tile < width <= pieces * tile
    assert not resident or pieces <= row_plans.RESIDENT_PIECES
