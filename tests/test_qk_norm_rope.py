"""The norm of q's and k's heads with rotary embedding in one launch, against torch in float64 and step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from kernelgraft.cutile import plans
from kernelgraft.kernels import qk_norm_rope as module
from kernelgraft.kernels.qk_norm_rope import Choice, qk_norm_rope
from kernelgraft.kernels.rms_norm import CASTS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = pytest.mark.filterwarnings("ignore:.*AOTAutograd.*:UserWarning")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernel runs."""
    return str(request.param)


@pytest.fixture
def fresh() -> Iterator[Callable[[], None]]:
    """Forgets the launch plans, also at the end."""

    def forget() -> None:
        module._call.cache_clear()

    forget()
    yield forget
    forget()


def spare(device: str, needless: bool) -> None:
    """Leave a variant out on a GPU, where each is compiled for about a second."""
    if device == "cuda" and needless:
        pytest.skip("other variants of it run on the GPU")


def draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def scales(width: int, dtype: torch.dtype = F32, device: str = "cpu") -> list[torch.Tensor]:
    """Weights of q's and k's norms, between 0.5 and 1.5, with signs."""
    found = []
    for seed in (2, 3):
        values = draw(width, seed=seed)
        found.append(((values.abs() % 1 + 0.5) * values.sign()).to(device, dtype))
    return found


def tables(*shape: int, dtype: torch.dtype = F32, device: str = "cpu") -> list[torch.Tensor]:
    """cos and sin of any angles."""
    angles = draw(*shape, seed=4) * 3
    return [angles.cos().to(device, dtype), angles.sin().to(device, dtype)]


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, roundings: float) -> None:
    """`found` has `dtype` and lies within some roundings of `expected`, which is float64."""
    assert found.dtype is dtype
    assert found.shape == expected.shape
    unit = {F32: 4e-7, BF16: 2**-8, F16: 2**-11}[dtype]
    distance = (found.double() - expected).abs()
    allowed = unit * roundings * (expected.abs() + expected.pow(2).mean().sqrt())
    assert bool((distance <= allowed).all()), f"up to {(distance / allowed).max():.2f} times what is allowed"


def pairs(x: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.chunk(2, -1) if how == "half" else (x[..., 0::2], x[..., 1::2])
    return first, second


def exact(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    row_axis: int = 1,
    offset: bool = False,
    rotary_dim: int | None = None,
    last: bool = False,
    pairs_in: str = "half",
    pairs_out: str = "half",
    table: str = "full",
    **_: Any,
) -> torch.Tensor:
    """In float64: [batch, heads, length, channels]."""
    wide, cos, sin = x.double(), cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    wide = wide.transpose(1, 2) if row_axis == 1 else wide
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = wide if weight is None else wide * (weight.double() + float(offset))
    width = x.shape[-1]
    turned = rotary_dim or width
    if table == "full":
        (cos_a, cos_b), (sin_a, sin_b) = pairs(cos, pairs_out), pairs(sin, pairs_out)
    else:
        cos_a = cos_b = cos[..., : turned // 2]
        sin_a = sin_b = sin[..., : turned // 2]
    start = width - turned if last else 0
    a, b = pairs(wide[..., start : start + turned], pairs_in)
    first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    y = torch.cat((first, second), -1) if pairs_out == "half" else torch.stack((first, second), -1).flatten(-2)
    rest = wide[..., :start] if last else wide[..., turned:]
    return torch.cat((rest, y) if last else (y, rest), -1)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"pairs_in": "interleaved", "pairs_out": "interleaved", "memory": "length"},
    "interleaved to half": {"pairs_in": "interleaved", "table": "half", "offset": True, "cast": "after_weight"},
    "half to interleaved": {"pairs_out": "interleaved", "table": "first_half", "divide": True},
}
WIDTHS = [(128, 128), (80, 80), (96, 96), (64, 16), (96, 36), (6, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "turned"), WIDTHS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_any_rotary_size(kind: str, width: int, turned: int, dtype: torch.dtype, device: str) -> None:
    spare(device, dtype is F32 and width != 96)
    options = {**KINDS[kind], "rotary_dim": turned, "row_axis": 1 + turned // 2 % 2, "last": width == 96}
    q, k = draw(2, 5, 3, width, dtype=dtype, device=device), draw(2, 5, 2, width, dtype=dtype, device=device, seed=1)
    if options["row_axis"] == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    weights = scales(width, dtype, device)
    values = turned // 2 if options.get("table") == "half" else turned
    cos, sin = tables(1 + turned // 8 % 2, 5, values, dtype=dtype, device=device)
    found = qk_norm_rope(q, k, *weights, cos, sin, compute="float32", **options)
    for x, w, y in zip((q, k), weights, found, strict=True):
        close(y, exact(x, w, cos, sin, **options), dtype, roundings=4)
        assert y.transpose(1, 2).is_contiguous() if "memory" in options else y.is_contiguous()


def steps(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cast: str, offset: bool
) -> torch.Tensor:
    """As models write it: a norm module, a transposition, the rotary function."""
    inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    scale = weight + 1 if offset else weight
    half = weight.dtype in (BF16, F16)
    value = {
        "before_weight": lambda: scale * (x.float() * inverse).to(x.dtype),
        "after_weight": lambda: (scale.float() * (x.float() * inverse)).to(x.dtype),
        "weight_dtype": lambda: scale * ((x.float() * inverse).to(weight.dtype) if half else x.float() * inverse),
        "factor": lambda: scale * (x * inverse.to(x.dtype)),
        "none": lambda: scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    }[cast]()
    value = value.transpose(1, 2)
    half_turned = torch.cat((-value[..., value.shape[-1] // 2 :], value[..., : value.shape[-1] // 2]), dim=-1)
    return value * cos.unsqueeze(1) + half_turned * sin.unsqueeze(1)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    ("dtype", "vector", "table"), [(BF16, BF16, BF16), (BF16, F32, BF16), (F16, F16, F32), (F32, F32, F32)], ids=str
)
def test_rounds_where_the_steps_do(
    dtype: torch.dtype, vector: torch.dtype, table: torch.dtype, cast: str, offset: bool, device: str
) -> None:
    spare(device, offset or cast not in ("before_weight", "after_weight"))
    q, k = draw(1, 7, 3, 96, dtype=dtype, device=device), draw(1, 7, 1, 96, dtype=dtype, device=device, seed=1)
    weights = scales(96, vector, device)
    cos, sin = tables(1, 7, 96, dtype=table, device=device)
    found = qk_norm_rope(q, k, *weights, cos, sin, cast=cast, offset=offset, round_offset=True, keep=False)
    for x, w, y in zip((q, k), weights, found, strict=True):
        expected = steps(x, w, cos, sin, cast, offset)
        assert y.dtype is expected.dtype
        if cast != "none" and y.dtype is not F32 and device == "cpu":
            # A sum in another order may move a value over the edge of a rounding: a few per thousand at the most.
            assert (y != expected).float().mean() < 0.02
        close(y, expected.double(), y.dtype, roundings=4 if y.dtype is not F32 else 10 if dtype is F32 else 3e4)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "packed": lambda x: x.view(2, 6, 6, 32)[:, :, 1:4],
    "heads first": lambda x: x.view(2, 6, 6, 32).transpose(1, 2).contiguous().transpose(1, 2),
    "every second row": lambda x: x.view(2, 6, 6, 32)[:, ::2],
    "every second channel": lambda x: x.view(2, 6, 3, 64)[..., ::2],
    "expanded": lambda x: x.view(2, 6, 6, 32)[:1].expand(3, -1, -1, -1),
    "channels apart": lambda x: x.view(2, 6, 32, 6).transpose(2, 3),
    "from the middle": lambda x: x.view(-1)[5 : 5 + 2 * 3 * 2 * 32].view(2, 3, 2, 32),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_inputs(view: str, device: str) -> None:
    q = VIEWS[view](draw(2, 6, 192, dtype=BF16, device=device))
    k = VIEWS[view](draw(2, 6, 192, dtype=BF16, device=device, seed=1))
    weights = [w[::2] for w in scales(64, BF16, device)]
    cos, sin = (t.transpose(1, 2) for t in tables(q.shape[0], 32, q.shape[1], dtype=BF16, device=device))
    before = q.clone(), k.clone()
    found = qk_norm_rope(q, k, *weights, cos, sin, compute="float32")
    for x, w, y, old in zip((q, k), weights, found, before, strict=True):
        close(y, exact(x, w, cos, sin), BF16, roundings=4)
        assert torch.equal(x, old)


@pytest.mark.parametrize("shape", [(0, 3, 2, 32), (2, 0, 2, 32), (1, 1, 5, 32), (1, 1, 1, 256)], ids=str)
def test_nothing_or_little(shape: tuple[int, ...], device: str) -> None:
    q, weight = draw(*shape, device=device), draw(shape[-1], device=device)
    cos, sin = tables(1, shape[1], shape[-1], device=device)
    for y in qk_norm_rope(q, q[:, :, :1], weight, weight, cos, sin):
        assert y.shape == (shape[0], y.shape[1], shape[1], shape[3])
    if q.numel():
        (alone,) = qk_norm_rope(q, None, weight, None, cos, sin)
        close(alone, exact(q, weight, cos, sin), F32, roundings=4)
        bare, _ = qk_norm_rope(q, q, None, None, cos, sin, eps=0.0)
        close(bare, exact(q, None, cos, sin, 0.0), F32, roundings=4)


def test_more_heads_of_k_than_of_q_and_odd_numbers(device: str) -> None:
    for heads, kv_heads in ((1, 7), (5, 3), (12, 1), (3, 3)):
        q, k = draw(1, 4, heads, 64, device=device), draw(1, 4, kv_heads, 64, device=device, seed=1)
        weights = scales(64, device=device)
        cos, sin = tables(1, 4, 64, device=device)
        for x, w, y in zip((q, k), weights, qk_norm_rope(q, k, *weights, cos, sin), strict=True):
            close(y, exact(x, w, cos, sin), F32, roundings=4)


CHOICES = [
    Choice(elements=64, access=0, apart=True),
    Choice(elements=64, apart=False, access=0),
    Choice(elements=1024, apart=False, blocks=1, occupancy=2, worker_warps=8),
    Choice(elements=4096, apart=True, access=0, blocks=2),
    Choice(elements=256, apart=True, rows=8),
    Choice(elements=128, apart=False, rows=4, blocks=1),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_changes_no_result(
    choice: Choice, device: str, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]
) -> None:
    monkeypatch.setattr(module, "choose", lambda *_: choice)
    monkeypatch.setattr(plans, "LARGEST_GRID", 5)
    q, k = draw(2, 9, 6, 64, device=device), draw(2, 9, 3, 64, device=device, seed=1)
    weights = scales(64, device=device)
    cos, sin = tables(1, 9, 32, device=device)
    options = {"rotary_dim": 32}
    for x, w, y in zip((q, k), weights, qk_norm_rope(q, k, *weights, cos, sin, **options), strict=True):
        close(y, exact(x, w, cos, sin, **options), F32, roundings=4)


def test_a_tile_takes_as_many_rows_as_it_is_told_and_the_fewer_heads() -> None:
    setting = module._setting(BF16, BF16, BF16, (1, False, "before_weight", False, False, None, False, "half", "half",
                                                 "full", "input", True, "heads"))  # fmt: skip
    shapes = (1, 4096, 16, 128), (4096 * 2048, 2048, 128, 1), (1, 4096, 8, 128), (4096 * 1024, 1024, 128, 1)
    found = {}
    for rows in (None, 8, 16):
        plan = module._plan(*shapes, True, -1, 1e-6, setting, Choice(elements=1024, rows=rows))
        assert plan is not None
        _, _, _, seat, share = plan.constants[2:]
        found[rows] = (seat[4], *share[3:5], plan.grid[0])
    assert found == {None: (1, 16, 8, 4096), 8: (8, 2, 1, 512 * 8), 16: (16, 1, 1, 256 * 16)}


def test_several_rows_share_a_tile(device: str, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]) -> None:
    monkeypatch.setattr(module, "ENOUGH_TILES", 10)
    q, k = draw(2, 99, 2, 8, dtype=BF16, device=device), draw(2, 99, 1, 8, dtype=BF16, device=device, seed=1)
    weights = scales(8, BF16, device)
    cos, sin = tables(1, 99, 8, dtype=BF16, device=device)
    found = qk_norm_rope(q, k, *weights, cos, sin, compute="float32")
    for x, w, y in zip((q, k), weights, found, strict=True):
        close(y, exact(x, w, cos, sin), BF16, roundings=4)


def test_tensors_beyond_an_int32_are_split(
    device: str, monkeypatch: pytest.MonkeyPatch, fresh: Callable[[], None]
) -> None:
    monkeypatch.setattr(module, "LARGEST_EXTENT", 700)
    for memory in module.MEMORY:
        q, k = draw(2, 9, 6, 32, device=device), draw(1, 9, 2, 32, device=device, seed=1).expand(2, -1, -1, -1)
        weights = scales(32, device=device)
        cos, sin = tables(2, 9, 32, device=device)
        found = qk_norm_rope(q, k, *weights, cos, sin, memory=memory)
        for x, w, y in zip((q, k), weights, found, strict=True):
            close(y, exact(x, w, cos, sin), F32, roundings=4)


def inputs(width: int = 16, turned: int = 12) -> list[torch.Tensor]:
    return [draw(2, 5, 3, width), draw(2, 5, 2, width, seed=1), *scales(width), *tables(1, 5, turned)]


GRADIENTS: dict[str, dict[str, Any]] = {
    "plain": {"rotary_dim": 12},
    "mixed": {"rotary_dim": 12, "last": True, "pairs_in": "interleaved", "offset": True, "memory": "length"},
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    words, tensors = GRADIENTS[name], inputs()
    ours = [t.clone().requires_grad_() for t in tensors[:4]] + tensors[4:]
    theirs = [t.double().requires_grad_() for t in tensors[:4]] + tensors[4:]
    outputs = qk_norm_rope(*ours, **words)
    expected = [exact(theirs[i], theirs[2 + i], theirs[4], theirs[5], **words) for i in range(2)]
    for seed, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        up = draw(*found.shape, seed=seed)
        found.backward(up, retain_graph=True)
        wanted.backward(up.double(), retain_graph=True)
    for found, wanted in zip(ours[:4], theirs[:4], strict=True):
        assert found.grad is not None and wanted.grad is not None
        close(found.grad, wanted.grad, F32, roundings=20)


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_op(name: str) -> None:
    tensors, words = inputs(), GRADIENTS[name]
    values = {"row_axis": 1, "offset": False, "cast": "before_weight", "round_offset": False, "divide": False}
    values |= {"rotary_dim": None, "last": False, "pairs_in": "half", "pairs_out": "half", "table": "full"}
    values |= {"compute": "input", "keep": True, "memory": "heads"}
    wanted = [t.requires_grad_() for t in tensors[:4]] + tensors[4:]
    torch.library.opcheck(module._op, (*wanted, 1e-6, *(values | words).values()))
    compiled = torch.compile(lambda *a: qk_norm_rope(*a, **words), backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*inputs()), qk_norm_rope(*inputs(), **words), strict=True):
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_examples_run_and_the_space_is_valid(device: str) -> None:
    for example in module.examples():
        if device == "cuda" or not example.name.startswith(("prefill", "batch 32")):
            assert all(y.isfinite().all() for y in example.run(device))
    for size in ((1, 16, 128), (32, 16, 128), (4096, 32, 64)):
        space = module.space(*size)
        assert space[0] == module.choose(*size, -1) and len(set(space)) == len(space) <= 40
