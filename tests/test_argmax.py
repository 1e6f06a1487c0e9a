"""argmax and top-k sampling against torch: under the interpreter on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from kernelgraft.kernels import argmax as argmax_module
from kernelgraft.kernels import sampling as sampling_module
from kernelgraft.kernels.argmax import argmax
from kernelgraft.kernels.sampling import LARGEST_K, sample_top_k

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [F32, BF16, F16]
INF, NAN = math.inf, math.nan


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    return str(request.param)


@pytest.fixture
def fresh() -> Iterator[None]:
    """No launch plans from before, none for after."""
    for module in (argmax_module, sampling_module):
        module._ready.cache_clear()
    yield
    for module in (argmax_module, sampling_module):
        module._ready.cache_clear()


def spare(device: str, needless: bool) -> None:
    """Leave a variant out on a GPU, where each is compiled for about a second."""
    if device == "cuda" and needless:
        pytest.skip("other variants of it run on the GPU")


def draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def numbers(rows: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Uniform numbers in [0, 1)."""
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed)).to(device)


# argmax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 9001), (3, 1021), (5, 17), (2, 2, 300), (1, 1), (140, 40), (7,), (0, 5), (2, 0, 5)], ids=str
)
def test_the_largest_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    spare(device, dtype is F16 and shape[0] != 3)
    x = draw(*shape, dtype=dtype)
    found = argmax(x.to(device))
    assert found.dtype is torch.int64
    assert torch.equal(found.cpu(), x.argmax(-1))


ROWS = [
    [-INF, -INF, -INF, -INF, -INF],
    [1, INF, 2, INF, 0],
    [NAN, INF, NAN, 1, 2],
    [INF, -INF, 3, NAN, 1],
    [0.0, -0.0, 0.0, -1, -2],
    [-0.0, 0.0, -1, -1, -1],
    [-3, -2, -2, -5, -INF],
    [-1e-40, -2e-40, 0.0, 1e-40, 1e-40],
]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("times", [1, 700])
def test_ties_infinities_and_nan(times: int, dtype: torch.dtype, device: str) -> None:
    x = torch.tensor(ROWS).to(dtype).repeat_interleave(times, 1)
    assert torch.equal(argmax(x.to(device)).cpu(), x.argmax(-1))
    assert torch.equal(argmax(x.flip(1).to(device)).cpu(), x.flip(1).argmax(-1))


@pytest.mark.parametrize("place", [0, 4095, 4096, 8999])
def test_one_large_value_anywhere(place: int, device: str) -> None:
    x = torch.zeros(2, 9000)
    x[1, place] = 1.0
    assert argmax(x.to(device)).tolist() == [0, place]


def test_strided_rows(device: str) -> None:
    x = draw(3, 4, 600, dtype=BF16)
    views = [x[:, 2], x.transpose(1, 2), x[:2, :, ::3], x[:2, :, 5:], x[:1].expand(2, -1, -1), x.permute(2, 0, 1)[:9]]
    for view in views:
        on_device = view.to(device) if view.is_contiguous() else _like(view, device)
        assert torch.equal(argmax(on_device).cpu(), view.contiguous().argmax(-1))


def _like(view: torch.Tensor, device: str) -> torch.Tensor:
    """The same view of the same memory, on a device."""
    whole = torch.as_strided(view, (view.untyped_storage().size() // view.element_size(),), (1,), 0).to(device)
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


CHOICES = [
    argmax_module.Choice(tile=64, blocks=1, access=2),
    argmax_module.Choice(tile=256, blocks=4, access=0, occupancy=2, worker_warps=8),
    argmax_module.Choice(tile=8192, blocks=1),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_changes_no_index(
    choice: argmax_module.Choice, device: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setattr(argmax_module, "choose", lambda *_: choice)
    monkeypatch.setattr(argmax_module, "LARGEST_GRID", 100)
    for rows, width in ((1, 5000), (150, 300)):
        x = draw(rows, width, dtype=BF16)
        assert torch.equal(argmax(x.to(device)).cpu(), x.argmax(-1))
        ties = x.clamp(max=1.0)
        ties[:, : width // 3] = 0.0
        assert torch.equal(argmax(ties.to(device)).cpu(), ties.argmax(-1))


def test_rows_beyond_an_int32_are_split(device: str, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(argmax_module, "LARGEST_EXTENT", 1000)
    monkeypatch.setattr(sampling_module, "LARGEST_EXTENT", 1000)
    x = draw(7, 300)
    assert torch.equal(argmax(x.to(device)).cpu(), x.argmax(-1))
    found = sample_top_k(x.to(device), numbers(7, device=device), k=3)
    assert torch.equal(found.cpu(), sampled(x, numbers(7), 3))
    with pytest.raises(ValueError, match="too long"):
        argmax(draw(2, 1001, device=device))
    with pytest.raises(ValueError, match="not served"):
        sample_top_k(draw(1, 1001, device=device), numbers(1, device=device), k=3)


# Top-k sampling


def sampled(
    logits: torch.Tensor,
    u: torch.Tensor,
    k: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """In float64."""
    wide = logits.double()
    wide = torch.where(wide.isnan(), INF, wide)
    scores, tokens = wide.sort(dim=-1, descending=True, stable=True)
    scores, tokens = scores[:, :k], tokens[:, :k]
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores / temperature
    shares = torch.where(scores == scores[:, :1], 1.0, (scores - scores[:, :1]).exp())
    before = shares.cumsum(-1) - shares
    shares = torch.where(before < top_p * shares.sum(-1, keepdim=True), shares, 0.0)
    reached = (shares > 0) & (before <= u.double().unsqueeze(-1) * shares.sum(-1, keepdim=True))
    place = (reached * torch.arange(1, scores.shape[1] + 1)).amax(-1, keepdim=True) - 1
    return tokens.gather(-1, place).squeeze(-1)


CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": ((3, 5000), {"k": 50}),
    "few": ((7, 300), {"k": 20, "top_p": 0.8, "temperature": 0.7}),
    "capped": ((2, 4100), {"k": 64, "softcap": 3.0, "temperature": 0.5}),
    "more than there are": ((5, 17), {"k": 50}),
    "one": ((3, 9000), {"k": 1}),
    "most": ((2, 9000), {"k": LARGEST_K, "top_p": 0.5, "temperature": 2.0}),
    "a word": ((4, 1), {"k": 3}),
    "nothing": ((0, 40), {"k": 3}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_float64(case: str, dtype: torch.dtype, device: str) -> None:
    spare(device, dtype is not F32 and case not in ("few", "most"))
    shape, words = CASES[case]
    logits = draw(*shape, dtype=dtype, scale=3.0)
    for seed in range(3 if shape[1] < 1000 or device == "cuda" else 1):
        u = numbers(shape[0], seed)
        found = sample_top_k(logits.to(device), u.to(device), **words)
        assert found.dtype is torch.int64
        assert torch.equal(found.cpu(), sampled(logits, u, **words))


@pytest.mark.parametrize("k", [3, 100])
def test_sampling_among_ties_infinities_and_nan(k: int, device: str) -> None:
    logits = torch.tensor(ROWS).repeat_interleave(300, 1)
    for seed in range(3):
        u = numbers(len(ROWS), seed)
        found = sample_top_k(logits.to(device), u.to(device), k=k)
        assert torch.equal(found.cpu(), sampled(logits, u, k))


def test_every_kept_token_is_drawn_as_often_as_its_share_says(device: str) -> None:
    logits = draw(1, 40, scale=2.0)
    rows = 250
    u = (torch.arange(rows) + 0.5) / rows
    found = sample_top_k(logits.expand(rows, -1).to(device), u.to(device), k=6, top_p=0.9).cpu()
    scores, tokens = logits[0].double().topk(6)
    shares = torch.softmax(scores, -1)
    shares = torch.where(shares.cumsum(-1) - shares < 0.9, shares, 0.0)
    counts = torch.bincount(found, minlength=40).double()
    assert ((counts[tokens] - rows * shares / shares.sum()).abs() <= 1.0).all()
    assert counts.sum() == counts[tokens].sum()


def test_the_ends_of_the_interval(device: str) -> None:
    logits = draw(2, 700)
    order = logits.argsort(-1, descending=True)
    ends = torch.tensor([0.0, 1 - 2**-24], device=device)
    found = sample_top_k(logits.to(device), ends, k=10).cpu()
    assert found.tolist() == [order[0, 0].item(), order[1, 9].item()]
    masked = logits.clone()
    masked[:, 5:] = -INF  # of the ten largest five have no share at all
    found = sample_top_k(masked.to(device), ends, k=10).cpu()
    assert (found < 5).all()


SPLITS = [sampling_module.Choice(part=128, access=2), sampling_module.Choice(part=512, access=0, worker_warps=8)]


@pytest.mark.parametrize("choice", SPLITS, ids=str)
def test_parts_change_no_token(
    choice: sampling_module.Choice, device: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setattr(sampling_module, "choose", lambda *_: choice)
    monkeypatch.setattr(sampling_module, "LARGEST_GRID", 5)
    monkeypatch.setattr(sampling_module, "LARGEST_CANDIDATES", 512)
    logits, u = draw(2, 3000, dtype=BF16), numbers(2)
    found = sample_top_k(logits.to(device)[:, ::2], u.to(device), k=50, top_p=0.95)
    assert torch.equal(found.cpu(), sampled(logits[:, ::2], u, 50, top_p=0.95))


@pytest.mark.parametrize("words", [{"k": 0}, {"k": 129}, {"k": 5, "temperature": 0.0}, {"k": 5, "top_p": 0.0}], ids=str)
def test_what_sampling_refuses(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"served are 1 to 128|above 0"):
        sample_top_k(draw(1, 40), numbers(1), **words)


# Custom ops


def test_the_ops() -> None:
    logits, u = draw(2, 60), numbers(2)
    torch.library.opcheck(argmax_module._op, (logits,))
    torch.library.opcheck(sampling_module._op, (logits, u, 5, 0.7, 0.9, None))
    compiled = torch.compile(lambda x, n: (argmax(x + 1), sample_top_k(x, n, k=5)), backend="aot_eager", fullgraph=True)
    found = compiled(logits, u)
    assert torch.equal(found[0], argmax(logits))
    assert torch.equal(found[1], sample_top_k(logits, u, k=5))


def test_examples_run_and_the_spaces_are_valid(device: str) -> None:
    for module in (argmax_module, sampling_module):
        for example in module.examples():
            if device == "cuda" or example.name.startswith("3 x"):
                assert (example.run(device) >= 0).all()
        for size in ((1, 128256), (64, 262144)):
            space: list[Any] = module.space(*size)
            assert space[0] == module.choose(*size, -1) and len(set(space)) == len(space) <= 40
