"""The Triton norms and rotation against torch in float64: on a GPU, and on a CPU where Triton interprets."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peer_definitions as made
import pytest
import torch

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from kernelgraft.kernels import rope as tile_rope
from kernelgraft.kernels import rope_triton, rows_triton, rows_triton_plans, triton_launching
from kernelgraft.kernels.rms_norm import CASTS
from kernelgraft.kernels.rope_triton import rope
from kernelgraft.kernels.rows_triton import WIDEST, add_rms_norm, layer_norm, rms_norm
from kernelgraft.kernels.rows_triton_plans import Chosen, Lain, lie
from kernelgraft.records import MachineCard
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.ours import OwnSupplier

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [F32, BF16, F16]
UNIT = {F32: 2**-23, BF16: 2**-8, F16: 2**-11}
EPS = 1e-5
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.filterwarnings("ignore:.*AOTAutograd.*:UserWarning")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="Triton interprets")]),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    pytest.importorskip("triton")
    return str(request.param)


def draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, roundings: float = 4.0) -> None:
    """`found` has `dtype` and lies within some roundings of `expected`, which is float64."""
    assert found.dtype is dtype
    assert found.shape == expected.shape
    if found.numel():
        unit = UNIT[dtype] * roundings * (2 if dtype is F32 else 1)
        distance = (found.double() - expected).abs()
        allowed = unit * (expected.abs() + 0.5 * expected.pow(2).mean().sqrt() + 1e-30)
        assert bool((distance <= allowed).all()), f"up to {(distance / allowed).max():.2f} times what is allowed"


def is_sum(total: torch.Tensor, residual: torch.Tensor, x: torch.Tensor) -> None:
    """`total` is the sum bit by bit; Triton's interpreter cuts bfloat16 off instead of rounding it."""
    if total.is_cuda or total.dtype is not BF16:
        assert torch.equal(total, residual + x)
    close(total, residual.double() + x.double(), total.dtype)


def normed(x: torch.Tensor, weight: torch.Tensor | None = None, offset: bool = False) -> torch.Tensor:
    wide = x.double()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return wide if weight is None else wide * (weight.double() + float(offset))


def centred(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), EPS)


SHAPES = [
    (1, 1, 4096),
    (32, 1, 1024),
    (3, 2560),
    (7, 513),
    (5, 80),
    (600, 96),
    (2, 3, 4, 128),
    (64,),
    (2, 0, 64),
    (3, 1),
]
"""Decode, rows that are no whole tile, narrow ones of which a program takes several, one row, none, one channel."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, residual = (draw(*shape, dtype=dtype, device=device, seed=s) for s in (0, 1))
    weight, bias = (draw(shape[-1], dtype=dtype, device=device, seed=s) for s in (2, 3))
    close(rms_norm(x, weight, EPS), normed(x, weight), dtype)
    total, y = add_rms_norm(residual, x, weight, EPS)
    is_sum(total, residual, x)
    close(y, normed(total, weight), dtype)
    if shape[-1] > 1:  # of one channel the distance from the mean is nothing
        close(layer_norm(x, weight, bias, EPS), centred(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_every_place_of_rounding(cast: str, dtype: torch.dtype, device: str) -> None:
    x, vector = draw(3, 1024, dtype=dtype, device=device), draw(1024, device=device, seed=1)
    for weight in (None, vector, vector.to(dtype)):
        found = rms_norm(x, weight, EPS, cast=cast)
        kept = weight is not None and cast != "after_weight"
        wanted = weight.dtype if kept and weight is not None else dtype
        assert found.dtype is wanted
        # What is rounded before a float32 weight is as coarse as its dtype.
        close(found.to(dtype), normed(x, weight), dtype)
    if cast in ("before_weight", "factor") and dtype is not F32 and (device, dtype) != ("cpu", BF16):
        factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        factor = factor.to(dtype).float() if cast == "factor" else factor
        expected = vector.to(dtype) * (x.float() * factor).to(dtype)
        assert (rms_norm(x, vector.to(dtype), EPS, cast=cast) != expected).float().mean() < 0.01


def test_offsets_and_division(device: str) -> None:
    x, weight, bias = (draw(2, 200, dtype=F16, device=device), *draw(2, 200, dtype=F16, device=device, seed=1))
    close(rms_norm(x, weight, EPS, offset=True), normed(x, weight, True), F16)
    close(rms_norm(x, weight, EPS, offset=True, round_offset=True, divide=True), normed(x, weight, True), F16)
    found = layer_norm(x, weight, bias, EPS, offset=True, divide=True)
    close(found, centred(x, weight.double() + 1, bias), F16)
    close(layer_norm(x, None, bias, EPS), centred(x, torch.ones_like(weight), bias), F16)
    assert layer_norm(x, weight.float(), bias, EPS, round_normed=True).dtype is F32
    assert layer_norm(x, weight.float(), bias, EPS).dtype is F16


def test_a_sum_of_two_dtypes_is_one_that_torch_promotes_to(device: str) -> None:
    x, residual = draw(3, 640, dtype=BF16, device=device), draw(3, 640, device=device, seed=1)
    total, y = add_rms_norm(residual, x, draw(640, dtype=BF16, device=device), EPS)
    is_sum(total, residual, x)
    assert y.dtype is F32


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "not aligned": lambda x: torch.cat([x, x[..., :1]], -1)[..., 1:],
    "heads first": lambda x: x.transpose(1, 2),
    "heads of a wider row": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "batch inside": lambda x: x.transpose(0, 1),
    "one row repeated": lambda x: x[:1, :1].expand(x.shape),
    "channels apart": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_lie_in_memory_as_they_like(layout: str, device: str) -> None:
    x, residual = (LAYOUTS[layout](draw(2, 3, 4, 96, dtype=F16, device=device, seed=s)) for s in (0, 1))
    weight = draw(192, dtype=F16, device=device)[::2]
    found = rms_norm(x, weight, EPS)
    close(found, normed(x, weight), F16)
    assert found.stride() == torch.empty_like(x).stride()
    total, y = add_rms_norm(residual.contiguous(), x, weight.contiguous(), EPS)
    is_sum(total, residual, x)
    close(y, normed(total, weight), F16)


def test_layer_norm_far_from_zero(device: str) -> None:
    x, ones = draw(4, 512, device=device) + 1000, torch.ones(512, device=device)
    assert float((layer_norm(x, ones, 0 * ones, EPS).double() - centred(x, ones, 0 * ones)).abs().max()) < 1e-3


@pytest.mark.parametrize("width", [4096, 640, 128])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_configurations_are_right(dtype: torch.dtype, width: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = (draw(9, width, dtype=dtype, device=device, seed=s) for s in (0, 1))
    weight = draw(width, dtype=dtype, device=device, seed=2)
    choices = rows_triton_plans.space(9, width, dtype.itemsize)
    for chosen in [*choices, Chosen(4, early=False), Chosen(4, together=False), Chosen(2, 2, early=False)]:
        monkeypatch.setattr(rows_triton, "choose", lambda *_, c=chosen: c)
        rows_triton._call.cache_clear()
        total, y = add_rms_norm(residual, x, weight, EPS)
        is_sum(total, residual, x)
        close(y, normed(total, weight), dtype)
    rows_triton._call.cache_clear()


ROTATIONS: dict[str, dict[str, Any]] = {
    "32 + 8 heads of 64": {"heads": (32, 8), "width": 64},
    "heads of 80, batch": {"heads": (5, 1), "width": 80, "batch": 3},
    "heads of 96, length first": {"heads": (4, 2), "width": 96, "row_axis": 1, "batch": 2},
    "own positions": {"heads": (16, 8), "width": 128, "batch": 5, "length": 1, "own": True},
    "partial": {"heads": (4, 2), "width": 80, "rotary_dim": 32},
    "the last channels": {"heads": (9, 1), "width": 192, "rotary_dim": 64, "last": True},
    "a value a pair": {"heads": (4, 4), "width": 64, "table": "half", "values": 32},
    "first half read": {"heads": (4, 0), "width": 64, "table": "first_half"},
    "backward": {"heads": (4, 2), "width": 64, "backward": True},
    "float32 arithmetic": {"heads": (4, 2), "width": 64, "compute": "float32", "tables": F32, "cast": False},
    "nothing": {"heads": (4, 2), "width": 64, "length": 0},
}


def rotation(dtype: torch.dtype, device: str, options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of `rope`."""
    options = dict(options)
    heads, width, batch = options.pop("heads"), options.pop("width"), options.pop("batch", 1)
    length, own, values = options.pop("length", 3), options.pop("own", False), options.pop("values", None)
    tables = options.pop("tables", dtype)
    q, k = (draw(batch, length, h, width, dtype=dtype, device=device, seed=h) if h else None for h in heads)
    if options.get("row_axis") != 1:
        q, k = (None if t is None else t.transpose(1, 2) for t in (q, k))
    shape = (batch if own else 1, length, values or options.get("rotary_dim") or width)
    cos, sin = (draw(*shape, dtype=tables, device=device, seed=s) for s in (7, 8))
    return (q, k, cos, sin), options


def turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, row_axis: int = 2, rotary_dim: int | None = None,
    last: bool = False, table: str = "full", backward: bool = False, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """A rotation in float64."""
    x, cos, sin = x.double(), cos.double().unsqueeze(3 - row_axis), sin.double().unsqueeze(3 - row_axis)
    count = rotary_dim or x.shape[-1]
    if table != "full":
        cos, sin = (t[..., : count // 2].repeat(1, 1, 1, 2) for t in (cos, sin))
    sin = -sin if backward else sin
    start = x.shape[-1] - count if last else 0
    part = x[..., start : start + count]
    a, b = part.chunk(2, -1)
    part = part * cos + torch.cat([-b, a], -1) * sin
    return torch.cat([x[..., :start], part, x[..., start + count :]], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations(case: str, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype is BF16 and ROTATIONS[case].get("compute") != "float32":
        pytest.skip("Triton's interpreter has no arithmetic in bfloat16")
    (q, k, cos, sin), options = rotation(dtype, device, ROTATIONS[case])
    found = rope(q, k, cos, sin, **options)
    assert len(found) == 1 + (k is not None)
    for one, x in zip(found, (q, k), strict=False):
        wanted = dtype if options.get("cast", True) else F32
        close(one, turned(x, cos, sin, **options), wanted)
        assert one.is_contiguous()
    if case == "32 + 8 heads of 64" and dtype is not F32:
        half = torch.cat([-q[..., 32:], q[..., :32]], -1)
        assert torch.equal(found[0], q * cos.unsqueeze(1) + half * sin.unsqueeze(1))  # every product rounded


@pytest.mark.parametrize("layout", ["channels apart", "odd"])
def test_rotations_of_other_layouts(layout: str, device: str) -> None:
    (q, k, cos, sin), _ = rotation(F16, device, {"heads": (4, 2), "width": 64})
    if layout == "channels apart":
        q, sin = torch.stack([q, q], -1)[..., 0], torch.stack([sin, sin], -1)[..., 0]
    else:
        q, cos = torch.cat([q, q[..., :1]], -1)[..., 1:], torch.cat([cos, cos[..., :1]], -1)[..., 1:]
    for one, x in zip(rope(q, k, cos, sin), (q, k), strict=True):
        close(one, turned(x, cos, sin), F16)


def test_rotations_in_any_configuration(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, cos, sin), _ = rotation(F16, device, {"heads": (10, 3), "width": 64, "batch": 4})
    for chosen in [*rope_triton.space(12, 13, 32, 2), rope_triton.Chosen(2, 1, early=False)]:
        monkeypatch.setattr(rope_triton, "choose", lambda *_, c=chosen: c)
        rope_triton._call.cache_clear()
        for one, x in zip(rope(q, k, cos, sin), (q, k), strict=True):
            close(one, turned(x, cos, sin), F16)
    rope_triton._call.cache_clear()


def test_places_beyond_an_int32_are_counted_in_64_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_triton, "LARGEST_EXTENT", 100)
    rope_triton._call.cache_clear()
    (q, k, cos, sin), _ = rotation(F16, device, {"heads": (4, 2), "width": 64, "batch": 2})
    for one, x in zip(rope(q, k, cos, sin), (q, k), strict=True):
        close(one, turned(x, cos, sin), F16)
    rope_triton._call.cache_clear()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, device: str) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, q: torch.Tensor, t: torch.Tensor) -> Any:
        total, y = add_rms_norm(x, rms_norm(x, w), w)
        return total, layer_norm(y, w, w), rope(q, q, t, t)

    x, w = draw(2, 1, 64, dtype=F16, device=device), draw(64, dtype=F16, device=device)
    (q, _, cos, _), _ = rotation(F16, device, {"heads": (4, 2), "width": 64})
    torch._dynamo.reset()
    found = torch.compile(layer, fullgraph=True, backend=backend)(x, w, q, cos)
    for a, b in zip((*found[:2], *found[2]), (*layer(x, w, q, cos)[:2], *layer(x, w, q, cos)[2]), strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()


def test_the_ops_are_good_ones(device: str) -> None:
    ops: Any = torch.ops.kernelgraft
    x, w = draw(2, 1, 64, dtype=F16, device=device), draw(64, device=device)
    (q, k, cos, sin), _ = rotation(F16, device, {"heads": (4, 2), "width": 64})
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for op, arguments in (
        (ops.rms_norm_triton, (x, w, EPS, True, "before_weight", False, False)),
        (ops.add_rms_norm_triton, (x.float(), x, None, EPS, False, "after_weight", False, True)),
        (ops.layer_norm_triton, (x, w, w, EPS, False, False, True, False)),
        (ops.rope_triton, (q, k, cos, sin, 2, None, False, "full", False, "input", True)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)


def test_a_gradient_is_refused_by_name(device: str) -> None:
    x, w = draw(2, 64, device=device).requires_grad_(), draw(64, device=device)
    with pytest.raises(RuntimeError, match="rms_norm_triton"):
        rms_norm(x, w).sum().backward()
    with torch.no_grad():
        close(rms_norm(x, w, EPS), normed(x, w), F32)


# On a GPU only


@pytest.mark.gpu
def test_a_million_rows() -> None:
    pytest.importorskip("triton")
    for width in (64, 640):
        x, weight = torch.randn(70_001, 1, width, device="cuda", dtype=BF16), draw(width, dtype=BF16, device="cuda")
        close(rms_norm(x, weight, EPS), normed(x, weight), BF16)
    q = torch.randn(70_001, 1, 2, 64, device="cuda", dtype=BF16).transpose(1, 2)
    cos = draw(1, 1, 64, dtype=BF16, device="cuda")
    first, second = q.chunk(2, -1)
    # Among so many values there are products that are far larger than their sum, so that each rounding counts.
    assert torch.equal(rope(q, None, cos, cos)[0], q * cos + torch.cat((-second, first), -1) * cos)


def chain(x: torch.Tensor, weight: torch.Tensor, big: torch.Tensor, q: torch.Tensor, cos: torch.Tensor) -> Any:
    """Kernels of ours and torch's that read what the one just before wrote, even as a weight or a table."""
    for _ in range(2):
        h = (x[0] @ big)[None]
        total, y = add_rms_norm(x, h, weight, EPS)
        weight = weight * 0.5 + 0.5 * y[0, 0].abs()
        y = rms_norm(y, weight, EPS)
        (twisted,) = rope(q, None, cos * y[..., :128], cos)
        x = layer_norm(total + y + twisted.reshape(1, 1, 4096), weight, weight, EPS)
        x = rms_norm(rms_norm(x, weight, EPS), None, EPS)
    return x


def chained(x: torch.Tensor, weight: torch.Tensor, big: torch.Tensor, q: torch.Tensor, cos: torch.Tensor) -> Any:
    """The same by torch in float64."""
    x, weight, big, q, cos = (t.double() for t in (x, weight, big, q, cos))
    for _ in range(2):
        total = x + (x[0] @ big)[None]
        y = normed(total, weight)
        weight = weight * 0.5 + 0.5 * y[0, 0].abs()
        y = normed(y, weight)
        twisted = turned(q, cos * y[..., :128], cos)
        x = centred(total + y + twisted.reshape(1, 1, 4096), weight, weight)
        x = normed(normed(x, weight))
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_a_kernel_that_starts_early_reads_what_the_one_before_wrote(captured: bool) -> None:
    pytest.importorskip("triton")
    weight, big = torch.ones(4096, device="cuda"), draw(4096, 4096, device="cuda", scale=1 / 64)
    q, cos = draw(1, 1, 32, 128, device="cuda").transpose(1, 2), draw(1, 1, 128, device="cuda")
    # What an earlier call has left in memory is that of another x.
    inputs = [draw(1, 1, 4096, device="cuda", seed=s) for s in range(4)]
    expected = [chained(x, weight, big, q, cos) for x in inputs]
    x = inputs[0].clone()
    if captured:
        chain(x, weight, big, q, cos)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(x, weight, big, q, cos)
    for i in range(40):
        x.copy_(inputs[i % 4])
        if captured:
            graph.replay()
        else:
            found = chain(x, weight, big, q, cos)
        assert float((found - expected[i % 4]).abs().max()) < 1e-2


# What needs no Triton


def card(**versions: str) -> MachineCard:
    return MachineCard(
        platform="L", cpu="c", cores=2, gpu="a gpu", compute_capability="sm_90", python="3.11",
        versions={"torch": "2.13", "cuda-tile": "1.7.0", **versions},
    )  # fmt: skip


DEFINITIONS: dict[str, Callable[[], Any]] = {
    "rms_norm_triton": lambda: made.rms_norm(2560, BF16),
    "layer_norm_triton": lambda: made.layer_norm(768, F32),
    "add_rms_norm_triton": lambda: made.residual_norm(4096, BF16),
    "rope_triton": lambda: made.rope(80, F16, rotary=32, heads=32, kv_heads=32),
}


@pytest.mark.parametrize("kernel", DEFINITIONS)
def test_it_is_offered_beside_the_cutile_one(kernel: str) -> None:
    definition = DEFINITIONS[kernel]()
    supplier = OwnSupplier(interpret=False)
    found: Any = supplier.candidates(definition, card(triton="3.6.0"))
    assert [s.spec.language for s in found] == ["cuda-tile", "triton"]
    assert found[1].name == f"kernelgraft_{kernel}_{definition.name}"
    assert not found[1].meta.guard.autograd
    without: Any = supplier.candidates(definition, card())
    assert [s.name for s in without] == [found[0].name]


def test_where_it_cannot_serve_only_the_cutile_one_is_offered() -> None:
    supplier, there = OwnSupplier(interpret=False), card(triton="3.6.0")
    for definition in (
        made.rms_norm(WIDEST + 16, BF16),
        made.residual_norm(4096, BF16, order="post"),
        made.residual_norm(768, BF16, family="layer_norm"),
        made.rope(64, BF16, pairs=("interleaved", "half"), heads=8, kv_heads=8),
    ):
        found: Any = supplier.candidates(definition, there)
        assert [s.spec.language for s in found] == ["cuda-tile"], definition.name


def test_the_guard_refuses_channels_apart() -> None:
    definition = made.rms_norm(64, F32)
    found: Any = OwnSupplier(interpret=False).candidates(definition, card(triton="3.6.0"))
    guard = found[1].meta.guard.model_copy(update={"devices": ("cpu",)})
    x, weight = draw(2, 3, 64), draw(64)
    assert refuses(guard, definition, (x, weight)) is None
    assert "stride 2" in str(refuses(guard, definition, (torch.stack([x, x], -1)[..., 0], weight)))


def test_how_rows_lie() -> None:
    assert lie((2, 3, 8), (24, 8, 1), (24, 8, 1)) == Lain(6, None, (8, 8), (0, 0))
    assert lie((8,), (1,)) == Lain(1, None, (8,), (0,))
    assert lie((2, 3, 8), (24, 8, 1), (48, 16, 1)) == Lain(6, None, (8, 16), (0, 0))
    assert lie((2, 3, 8), (24, 8, 1), (100, 8, 1)) == Lain(6, 3, (8, 8), (24, 100))
    assert lie((2, 3, 8), (8, 16, 1), (8, 16, 1)) == Lain(6, None, (8, 8), (0, 0))
    assert lie((2, 3, 8), (24, 8, 1), (0, 0, 1)) == Lain(6, None, (8, 0), (0, 0))
    assert lie((2, 3, 4, 8), (96, 32, 8, 1), (300, 50, 8, 1)) is None
    assert lie((2, 3, 8), (24, 8, 1), (48, 16, 2)) is None


def test_choices_fit() -> None:
    for width in (1, 64, 96, 128, 513, 1024, 2560, 4096, WIDEST):
        for count in (1, 32, 4096, 10**6):
            for size in (2, 4):
                choices = rows_triton_plans.space(count, width, size)
                assert len(choices) == len(set(choices)) <= 8
                for one in choices:
                    assert one.warps in (1, 2, 4, 8, 16, 32), one
                    assert one.rows & (one.rows - 1) == 0 < one.rows, one
    assert rows_triton_plans.choose(1, 4096, 2).rows == 1
    assert rows_triton_plans.choose(10**5, 128, 2).rows > 1
    for heads, pairs in ((40, 32), (40, 64), (2, 128), (16, 48)):
        for one in rope_triton.space(1, heads, pairs, 2):
            assert one.warps in (1, 2, 4, 8), one


def test_refusals_say_why() -> None:
    x, w = draw(2, 64), draw(64)
    q, t = draw(1, 2, 3, 64), draw(1, 3, 64)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("served are up to", lambda: rms_norm(draw(1, WIDEST + 1))),
        ("64 channels", lambda: rms_norm(x, w[:63])),
        ("64 channels", lambda: layer_norm(x, w, x)),
        ("residual has the shape", lambda: add_rms_norm(x[:1], x, w)),
        ("one dtype", lambda: rope(q, q.half(), t, t)),
        ("one shape", lambda: rope(q, q, t, t[..., :3])),
        ("even number", lambda: rope(q, q, t, t, rotary_dim=31)),
        ("table `odd`", lambda: rope(q, q, t, t, table="odd")),
        ("cos and sin have", lambda: rope(q, q, t[:, :2], t[:, :2])),
        ("cos and sin have", lambda: rope(q, q, t[..., :32], t[..., :32])),
        ("four and 1 or 2", lambda: rope(q[0], None, t, t)),
        ("k ", lambda: rope(q, q[:, :, :2], t, t)),
    ]
    for words, call in refused:
        with pytest.raises(ValueError, match=words):
            call()


def test_nothing_at_all_needs_no_triton() -> None:
    x = torch.empty(2, 0, 64)
    assert rms_norm(x, draw(64)).shape == x.shape
    assert [t.shape for t in add_rms_norm(x, x.half())] == [x.shape] * 2
    q = torch.empty(0, 2, 3, 64)
    assert rope(q, None, draw(1, 3, 64), draw(1, 3, 64))[0].shape == q.shape
    assert tile_rope.TABLES == rope_triton.TABLES


class Recorder:
    """A Triton kernel that only remembers how it was launched, and what it makes."""

    def __init__(self) -> None:
        self.slow: list[tuple[Any, ...]] = []
        self.fast: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = 7, (4, 1, 0)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Recorder:
            self.slow.append((grid, arguments, options))
            return self

        return launch

    def run(self, *arguments: Any) -> None:
        self.fast.append(arguments)


def test_launches_after_the_first_go_straight_to_what_triton_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    hook = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=hook)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(triton_launching, "current", lambda: 0)
    monkeypatch.setattr(triton_launching, "_stream", lambda device: 99)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    kernel = Recorder()
    launch = triton_launching.Launch(lambda: kernel, (3, 1, 1), (5, None), 0, num_warps=8)
    x, y = torch.zeros(8), torch.zeros(8)
    for _ in range(3):
        launch(None, x, None, None, None, y)
    assert kernel.slow == [((3, 1, 1), (None, x, None, None, None, y, 5, None), {"num_warps": 8})]
    pointers = (0, x.data_ptr(), 0, 0, 0, y.data_ptr())
    assert kernel.fast == [(3, 1, 1, 99, 7, (4, 1, 0), None, None, None, *pointers, 5, None)] * 2
    launch(None, x[1:], None, None, None, y)  # what was made for aligned tensors reads 16 bytes at a time
    launch(None, x[1:], None, None, None, y)
    assert (len(kernel.slow), len(kernel.fast)) == (2, 3)
    launch(None, x, None, None, None, y[1:])  # nor does what was made for another mixture do
    launch(None, x, None, None, None, y[1:])
    assert (len(kernel.slow), len(kernel.fast)) == (3, 4)
    hook.calls.append(print)  # a profiler
    launch(None, x, None, None, None, y)
    assert (len(kernel.slow), len(kernel.fast)) == (4, 4)
    hook.calls.clear()
    monkeypatch.setattr(triton_launching, "current", lambda: 1)
    launch(None, x, None, None, None, y)
    assert (len(kernel.slow), len(kernel.fast)) == (5, 4)
