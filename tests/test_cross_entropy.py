"""Cross entropy from hidden states against torch in float64, with its gradients and without a tensor of all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from torch.utils._python_dispatch import TorchDispatchMode

from kernelgraft.kernels import cross_entropy as module
from kernelgraft.kernels import cross_entropy_once as once
from kernelgraft.kernels.cross_entropy import REDUCTIONS, Choice, cross_entropy

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = {"tokens": 16, "words": 64, "depth": 32}
CHOICES: dict[str, Choice | None] = {
    "default": None,
    "fused": Choice(**SMALL, chunk_bytes=4 * 20 * 128),
    "chunks": Choice(fused=False, chunk_bytes=4 * 20 * 128),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*AOTAutograd.*:UserWarning")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    return str(request.param)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets the choice; the launch plans are forgotten then, and at the end."""

    def forget() -> None:
        module._plans.cache_clear()
        module._backward_plans.cache_clear()
        once._groups.cache_clear()

    def use(choice: Choice | None, together: once.Choice | None = None) -> None:
        """With a choice of the two passes they are taken one after the other, unless `together` says something else."""
        if choice is not None:
            monkeypatch.setattr(module, "choose", lambda *_: choice)
        together = together or (None if choice is None else once.Choice(once=False))
        if together is not None:
            monkeypatch.setattr(once, "choose", lambda *_: together)
        forget()

    yield use
    forget()


def spare(device: str, needless: bool) -> None:
    """Leave a variant out on a GPU, where each is compiled for about a second."""
    if device == "cuda" and needless:
        pytest.skip("other variants of it run on the GPU")


def draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


def inputs(
    tokens: int, words: int, channels: int, dtype: torch.dtype, device: str, ignored: int = -100
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head's weight and labels, a fifth of which are ignored."""
    labels = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(tokens))
    labels[2::5] = ignored
    hidden = draw(tokens, channels, dtype=dtype, device=device)
    weight = draw(words, channels, dtype=dtype, device=device, seed=1, scale=2 * channels**-0.5)
    return hidden, weight, labels.to(device)


def exact(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """In float64."""
    logits = hidden.double() @ weight.double().t() * scale
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    return functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, roundings: float) -> None:
    """`found` has `dtype` and lies within some roundings of `expected`, which is float64."""
    assert found.dtype is dtype
    assert found.shape == expected.shape
    unit = {F32: 2**-24, BF16: 2**-9, F16: 2**-12}[dtype]
    allowed = unit * roundings * (expected.abs() + expected.pow(2).mean().sqrt())
    distance = (found.double() - expected).abs()
    assert bool((distance <= allowed).all()), f"up to {(distance / allowed).max():.2f} times what is allowed"


WORDS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "softcap": 3.0},
    {"reduction": "none", "scale": 0.25},
    {"reduction": "mean", "scale": 2.0, "softcap": 5.0, "ignore_index": 7},
]

ON_GPU = [(F32, "default", 1), (BF16, "default", 0), (BF16, "chunks", 3), (F16, "default", 2), (BF16, "fused", 1)]


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_losses_and_gradients(
    dtype: torch.dtype, choice: str, words: dict[str, Any], device: str, choose: Callable[..., None]
) -> None:
    turn = WORDS.index(words)
    spare(device, (dtype, choice, turn) not in ON_GPU)
    choose(CHOICES[choice])
    hidden, weight, labels = inputs(20, 301, 72, dtype, device, words.get("ignore_index", -100))
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    theirs = [x.double().requires_grad_() for x in (hidden, weight)]
    found, expected = cross_entropy(*ours, labels, **words), exact(*theirs, labels, **words)
    close(found.detach(), expected.detach(), F32, roundings=16)
    up = draw(*found.shape, device=device, seed=3)
    found.backward(up)
    expected.backward(up.double())
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.grad is not None and wanted.grad is not None
        close(mine.grad, wanted.grad, dtype, roundings=64 if dtype is F32 else 12)


@pytest.mark.parametrize("size", [(1, 40, 16), (3, 17, 5), (40, 1000, 33), (130, 50, 64)], ids=str)
def test_odd_sizes(size: tuple[int, int, int], device: str) -> None:
    spare(device, size[0] in (1, 130))
    for dtype in (F32, BF16):
        hidden, weight, labels = inputs(*size, dtype, device)
        close(cross_entropy(hidden, weight, labels), exact(hidden, weight, labels), F32, roundings=16)


def test_many_tokens_and_every_axis_in_several_tiles(device: str, choose: Callable[..., None]) -> None:
    choose(Choice(tokens=64, words=64, depth=32, chunk_bytes=4 * 150 * 256))
    hidden, weight, labels = inputs(150, 700, 100, BF16, device)
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    theirs = [x.double().requires_grad_() for x in (hidden, weight)]
    cross_entropy(*ours, labels).backward()
    exact(*theirs, labels).backward()
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.grad is not None and wanted.grad is not None
        close(mine.grad, wanted.grad, BF16, roundings=12)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_each_logit_once_in_groups_of_tokens(
    dtype: torch.dtype, device: str, choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(None, once.Choice(chunk_bytes=1))  # chunks of 128 tokens
    products: list[tuple[int, ...]] = []
    monkeypatch.setattr(once, "product", noted := lambda *a: products.append(a[1].shape) or product(*a))
    product = module.product
    assert noted is once.product
    sums: list[torch.dtype] = []
    add = module.add_product
    monkeypatch.setattr(once, "add_product", lambda total, a, b: sums.append(total.dtype) or add(total, a, b))
    hidden, weight, labels = inputs(300, 301, 40, dtype, device)
    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    theirs = [x.double().requires_grad_() for x in (hidden, weight)]
    loss, expected = cross_entropy(*ours, labels, softcap=6.0), exact(*theirs, labels, softcap=6.0)
    # Three chunks of logits; the hidden states' gradient by two groups of chunks of a half type, by three else.
    groups, first = (3, 128) if dtype is F32 else (2, 256)
    assert sorted(products) == sorted([(40, 301)] * 3 + [(301, 40)] * groups + [(first, 40)])
    assert sums == [F32] * (groups - 1), "what is summed over groups is rounded at each of them"
    close(loss.detach(), expected.detach(), F32, roundings=16)
    for factor in (1.0, -2.5):  # the graph is gone through twice
        for x in (*ours, *theirs):
            x.grad = None
        (loss * factor).backward(retain_graph=True)
        (expected * factor).backward(retain_graph=True)
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine.grad is not None and wanted.grad is not None
            close(mine.grad, wanted.grad, dtype, roundings=64 if dtype is F32 else 12)


def test_when_each_logit_is_computed_once(choose: Callable[..., None]) -> None:
    def groups(tokens: int, dtype: torch.dtype) -> list[list[int]]:
        found = once._groups((tokens, 128256, 2048), dtype, -1, -100, 1.0, None)
        return [[part.count for part in group] for group in found]

    assert groups(4096, BF16) == [[512, 512]] * 4
    assert groups(4096, F32) == [[512]] * 8
    assert groups(8192, BF16) and not groups(16384, BF16) and groups(16384, F32)
    assert not once.fits(F16)
    choose(None, once.Choice(once=False))
    assert not groups(4096, BF16)


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "with_gradients", lambda *_: pytest.fail("gradients"))
    hidden, weight, labels = inputs(6, 40, 32, F32, "cpu")
    hidden.requires_grad_()
    with torch.no_grad():
        assert not cross_entropy(hidden, weight, labels).requires_grad
    assert cross_entropy(hidden, weight, labels, reduction="none").requires_grad
    assert cross_entropy(hidden.half(), weight.half(), labels).requires_grad


def test_views_and_leading_axes(device: str) -> None:
    hidden, weight, labels = inputs(24, 90, 64, BF16, device)
    batch = hidden.view(2, 12, 64)[:, :-1], weight[::2, 8:40], labels.view(2, 12)[:, 1:]
    hidden = batch[0][..., 16:48]
    small = torch.where(batch[2] < 45, batch[2], -100)
    expected = exact(hidden.reshape(22, 32), batch[1], small.reshape(-1), reduction="none").view(2, 11)
    close(cross_entropy(hidden, batch[1], small, reduction="none"), expected, F32, roundings=16)
    turned = cross_entropy(hidden, batch[1].t().contiguous().t(), small.to(torch.int32), reduction="none")
    close(turned, expected, F32, roundings=16)


def test_nothing_to_learn_from(device: str) -> None:
    hidden, weight, labels = inputs(6, 40, 32, F32, device)
    nothing = torch.full_like(labels, -100)
    assert bool(cross_entropy(hidden, weight, nothing).isnan())
    assert float(cross_entropy(hidden, weight, nothing, reduction="sum")) == 0.0
    wanted = hidden.clone().requires_grad_()
    cross_entropy(wanted, weight, nothing, reduction="sum").backward()
    assert wanted.grad is not None and not wanted.grad.any()
    empty = hidden[:0].clone().requires_grad_(), weight.clone().requires_grad_()
    loss = cross_entropy(*empty, labels[:0], reduction="sum")
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert empty[0].grad is not None and empty[0].grad.shape == (0, 32)
    assert empty[1].grad is not None and not empty[1].grad.any()


def test_extreme_logits(device: str) -> None:
    hidden, weight, labels = inputs(8, 130, 32, F32, device)
    far = hidden * 1e4
    close(cross_entropy(far, weight, labels), exact(far, weight, labels), F32, roundings=16)
    capped = {"softcap": 30.0, "reduction": "none"}
    # A product of 10⁴ is rounded by 10⁻³ before it is capped.
    close(cross_entropy(far, weight, labels, **capped), exact(far, weight, labels, **capped), F32, roundings=400)
    spoilt = hidden.clone()
    spoilt[1, 3], spoilt[3, 0] = float("nan"), float("inf")
    found = cross_entropy(spoilt, weight, labels, reduction="none")
    assert found.isnan().tolist() == exact(spoilt, weight, labels, reduction="none").isnan().tolist()


@pytest.mark.parametrize("choice", CHOICES)
def test_words_that_cannot_come(choice: str, device: str, choose: Callable[..., None]) -> None:
    spare(device, choice == "fused")
    choose(CHOICES[choice])
    hidden, weight, labels = inputs(20, 301, 32, F32, device)
    hidden[:, 0], labels = hidden[:, 0].abs() + 0.5, labels.clamp(min=-100, max=300)
    weight[:140, 0] = float("-inf")  # more words than a chunk or a tile has
    labels = torch.where(labels >= 0, labels.clamp(min=140), labels)
    close(cross_entropy(hidden, weight, labels), exact(hidden, weight, labels), F32, roundings=16)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=str)
def test_only_wanted_gradients_are_computed(wanted: tuple[bool, bool], device: str) -> None:
    hidden, weight, labels = inputs(10, 70, 32, F32, device)
    ours = [x.clone().requires_grad_(w) for x, w in zip((hidden, weight), wanted, strict=True)]
    theirs = [x.double().requires_grad_() for x in (hidden, weight)]
    cross_entropy(*ours, labels).backward()
    exact(*theirs, labels).backward()
    for mine, other, is_wanted in zip(ours, theirs, wanted, strict=True):
        assert (mine.grad is not None) is is_wanted
        if mine.grad is not None and other.grad is not None:
            close(mine.grad, other.grad, F32, roundings=64)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that torch makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, torch.Tensor) and x._base is None:
                self.elements = max(self.elements, x.numel())
        return found


@pytest.mark.parametrize("choice", ["fused", "chunks"])
def test_no_tensor_is_as_large_as_the_logits(choice: str, choose: Callable[..., None]) -> None:
    choose(CHOICES[choice])
    tokens, words, channels = 20, 1500, 8
    hidden, weight, labels = inputs(tokens, words, channels, BF16, "cpu")
    with Largest() as seen:
        losses, normalisers = module._run(hidden, weight, labels, -100, 1.0, None)
        module._slopes(losses, hidden, weight, labels, normalisers, -100, 1.0, None, True, True)
    assert 0 < seen.elements <= max(weight.numel(), 20 * 128)
    choose(None, once.Choice(chunk_bytes=1))
    hidden, weight, labels = inputs(600, 1500, 8, BF16, "cpu")
    with Largest() as seen:
        module._once(hidden, weight, labels, -100, 1.0, None, True, True, True)
    assert 0 < seen.elements <= 2 * 128 * 1536
    # A chunk has 128 words at least, however little room there is.
    assert [count for _, count in module.spans(10**6, 1000, 1)] == [128] * 7 + [104]


def test_what_is_refused() -> None:
    hidden, weight, labels = inputs(4, 40, 32, F32, "cpu")
    with pytest.raises(ValueError, match="`median` is none of mean, sum, none"):
        cross_entropy(hidden, weight, labels, reduction="median")
    with pytest.raises(ValueError, match="both must be of one dtype"):
        cross_entropy(hidden, weight.to(BF16), labels)
    assert REDUCTIONS == ("mean", "sum", "none")


def test_the_op() -> None:
    hidden, weight, labels = inputs(5, 40, 16, F32, "cpu")
    wanted = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.library.opcheck(module._op, (*wanted, labels, -100, 1.0, None))
    _, normalisers = module._run(hidden, weight, labels, -100, 1.0, None)
    rest = (labels, normalisers, -100, 1.0, None, True, True)
    torch.library.opcheck(module._slopes_op, (torch.ones(5), hidden, weight, *rest))
    torch.library.opcheck(module._once_op, (*wanted, labels, -100, 1.0, None, True, True, True))
    compiled = torch.compile(lambda *a: cross_entropy(*a, softcap=4.0), backend="aot_eager", fullgraph=True)
    loss = compiled(*wanted, labels)
    loss.backward()
    other = hidden.clone().requires_grad_()
    expected = cross_entropy(other, weight, labels, softcap=4.0)
    expected.backward()
    assert torch.equal(loss, expected) and torch.equal(wanted[0].grad, other.grad)  # type: ignore[arg-type]


def test_examples_run_and_the_spaces_are_valid(device: str) -> None:
    for example in module.examples():
        if example.name.startswith("57") or (device == "cuda" and example.name.startswith(("16 ", "4096"))):
            found = example.run(device)
            tensors = [x for x in ([found] if isinstance(found, torch.Tensor) else found) if x is not None]
            assert tensors and all(x.isfinite().all() for x in tensors)
    for shape in ((4096, 128256, 2048), (16, 128256, 2048)):
        for dtype in (BF16, F32):
            for backward in (False, True):
                space = module.space(shape, dtype, backward)
                assert space[0] == module.choose(shape, dtype, -1, backward) and len(set(space)) == len(space) <= 12
    assert once.space()[0] == once.choose((4096, 128256, 2048), BF16, -1)
    # A chunk holds an eighth of the logits where that is neither too little nor too much.
    sizes = [module.default((tokens, 128256, 2048), True).chunk_bytes for tokens in (64, 2048, 4096, 65536)]
    assert sizes == [2**26, 2**27, 2**28, 2**28]
    assert module.default((4096, 128256, 2048), False).chunk_bytes == 2**26
