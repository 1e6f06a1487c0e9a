"""The attention kernels against torch in float64: under the interpreter on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from test_suppliers import ATTENTION as VARIANTS
from test_suppliers import MACHINE, attention_definition, check, fresh_inputs, sizes_of

from kernelgraft.cutile import products
from kernelgraft.evaluate import Captured, Judge
from kernelgraft.evaluate.cases import JudgeOptions
from kernelgraft.evaluate.static import inspect_sources
from kernelgraft.kernels import attention_decode as decode_module
from kernelgraft.kernels import attention_prefill as prefill_module
from kernelgraft.kernels import attention_tiles
from kernelgraft.kernels.attention_decode import Decode, attention_decode, most_queries, splits
from kernelgraft.kernels.attention_prefill import Prefill, attention_prefill
from kernelgraft.records import Definition, Solution
from kernelgraft.suppliers.base import Refusal
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.load import load
from kernelgraft.suppliers.ours import OwnSupplier

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [F32, BF16, F16]
UNIT = {F32: 2**-19, BF16: 2**-8, F16: 2**-10.5}
"""One rounding, or in float32 what the rounding of scores does to weights, for torch as well; tf32 would be 2**-11."""
Attention = Callable[..., torch.Tensor]
KERNELS: dict[str, Attention] = {"prefill": attention_prefill, "decode": attention_decode}

pytestmark = pytest.mark.filterwarnings("ignore:.*AOTAutograd.*:UserWarning")


@pytest.fixture
def device() -> str:
    """Where the kernels run: each signature costs a GPU a second of compiling, so that it gets `CALLS` only."""
    return "cpu"


@pytest.fixture(params=KERNELS)
def attention(request: pytest.FixtureRequest) -> Attention:
    """Each kernel."""
    return KERNELS[request.param]


def draw(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def inputs(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, width: int, value: int, dtype: torch.dtype = F32,
    device: str = "cpu",
) -> list[torch.Tensor]:  # fmt: skip
    """query, key, value as models pass them: the query as its projection leaves it, keys and values from a cache."""
    query = draw(batch, q_len, heads, width, dtype=dtype, device=device).transpose(1, 2)
    key = draw(batch, kv_heads, kv_len, width, dtype=dtype, device=device, seed=1)
    return [query, key, draw(batch, kv_heads, kv_len, value, dtype=dtype, device=device, seed=2)]


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    scaling: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """In float64; a query that sees nothing gives zeros, except under a float mask of lowest numbers."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ key.mT * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    q_len, kv_len = scores.shape[-2:]
    place = torch.arange(q_len, device=query.device)[:, None] + kv_len - q_len
    keys = torch.arange(kv_len, device=query.device)
    seen = torch.ones_like(place, dtype=torch.bool) & (keys >= 0)
    if causal:
        seen = seen & (keys <= place)
    if window is not None:
        seen = seen & (keys > place - window)
    scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return (weights @ value).transpose(1, 2)


def close(found: torch.Tensor, expected: torch.Tensor, *, roundings: float = 3.0) -> None:
    """`found` lies within some roundings of `expected`, of each value and of the values' size."""
    assert found.shape == expected.shape
    assert found.is_contiguous()
    if not found.numel():
        return
    size = expected.abs() + expected.pow(2).mean().sqrt()
    distance = (found.double() - expected).abs()
    allowed = UNIT[found.dtype] * roundings * size + 1e-30
    assert bool((distance <= allowed).all()), f"up to {(distance / allowed).max():.2f} times what is allowed"


SHAPES = [
    (1, 4, 2, 1, 1, 64, 64),
    (2, 6, 2, 1, 150, 80, 96),
    (1, 8, 8, 1, 300, 128, 48),
    (2, 8, 1, 5, 133, 64, 64),
    (1, 3, 1, 3, 40, 32, 32),
    (1, 2, 1, 1, 70, 256, 256),
    (1, 4, 4, 1, 90, 96, 96),
    (1, 7, 1, 8, 8, 40, 24),
    (1, 16, 1, 1, 260, 128, 128),
    (1, 4, 1, 8, 140, 128, 128),
]
"""batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim; few enough queries for both kernels."""
LONGER = [
    (1, 2, 1, 130, 130, 64, 64),
    (2, 3, 3, 70, 200, 96, 80),
    (1, 2, 2, 33, 257, 128, 256),
    (1, 2, 1, 260, 260, 80, 32),
    (1, 1, 1, 200, 201, 256, 16),
]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_of_both(shape: tuple[int, ...], dtype: torch.dtype, attention: Attention, device: str) -> None:
    given = inputs(*shape, dtype=dtype, device=device)
    for causal in (True, False) if dtype is BF16 else (True,):
        close(attention(*given, scaling=0.2, causal=causal), exact(*given, scaling=0.2, causal=causal))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", LONGER, ids=str)
def test_many_queries(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    given = inputs(*shape, dtype=dtype, device=device)
    for causal in (True, False) if dtype is BF16 else (True,):
        close(attention_prefill(*given, scaling=0.15, causal=causal), exact(*given, scaling=0.15, causal=causal))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "dtype"), [(1, 200, BF16), (4, 90, F32), (150, 150, BF16), (40, 190, F32)], ids=str
)
def test_options(q_len: int, kv_len: int, dtype: torch.dtype, device: str) -> None:
    given = inputs(2, 4, 2, q_len, kv_len, 64, 32, dtype=dtype, device=device)
    sinks = draw(4, device=device, seed=5)
    for options in (
        {"causal": True, "window": 30},
        {"causal": True, "window": 1},
        {"causal": True, "window": 1000, "softcap": 2.0},
        {"softcap": 5.0, "sinks": sinks},
        {"causal": True, "sinks": sinks.to(dtype)},
        {"causal": True, "window": 70, "sinks": sinks, "softcap": 3.0},
    ):
        expected = exact(*given, scaling=0.3, **options)
        close(attention_prefill(*given, scaling=0.3, **options), expected)
        if q_len <= most_queries(2):
            close(attention_decode(*given, scaling=0.3, **{"causal": False, **options}), expected)


def masks(batch: int, heads: int, q_len: int, kv_len: int, device: str) -> list[torch.Tensor]:
    """True where a key is seen; in the first kind each query sees something."""
    keys, queries = torch.arange(kv_len), torch.arange(q_len)[:, None]
    causal = keys <= queries + kv_len - q_len
    padded = torch.stack([causal & (keys >= kv_len // 3 * b) | (keys == queries) for b in range(batch)])[:, None]
    generator = torch.Generator().manual_seed(3)
    scattered = torch.rand((1, heads, q_len, kv_len), generator=generator) < 0.3
    short = (keys < kv_len // 2).expand(batch, 1, q_len, kv_len)
    empty = torch.zeros(1, 1, q_len, kv_len, dtype=torch.bool)
    return [m.to(device) for m in (padded, scattered, short, empty)]


@pytest.mark.parametrize(("q_len", "kv_len", "dtype"), [(1, 200, BF16), (3, 70, F32), (140, 160, BF16)], ids=str)
def test_masks(q_len: int, kv_len: int, dtype: torch.dtype, device: str) -> None:
    batch, heads = 2, 4
    given = inputs(batch, heads, 2, q_len, kv_len, 64, 64, dtype=dtype, device=device)
    sinks = draw(heads, device=device, seed=5)
    for number, seen in enumerate(masks(batch, heads, q_len, kv_len, device)[: 4 if dtype is BF16 else 2]):
        added = draw(*seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
        for mask in (seen, added):
            options: dict[str, Any] = {"sinks": sinks} if number % 2 else {}
            expected = exact(*given, mask, scaling=0.2, **options)
            if mask is added and number == 3:
                expected = expected * 0  # a sink takes everything where the mask shows nothing
            close(attention_prefill(*given, mask, scaling=0.2, **options), expected)
            if q_len <= most_queries(2):
                close(attention_decode(*given, mask, scaling=0.2, causal=False, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 40])
def test_rows_that_see_nothing(q_len: int, dtype: torch.dtype, device: str) -> None:
    given = inputs(1, 2, 1, q_len, 150, 32, 32, dtype=dtype, device=device)
    seen = torch.ones(1, 1, q_len, 150, dtype=torch.bool, device=device)
    seen[..., -1, :] = False
    lowest = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
    for kernel in KERNELS.values() if q_len == 1 else (attention_prefill,):
        hidden = kernel(*given, seen, scaling=0.2, causal=False)
        assert bool((hidden[:, -1] == 0).all())
        # All numbers of a row lowest: all keys count the same, as in the original (float16 leaves some of the scores).
        found = kernel(*given, lowest, scaling=0.2, causal=False)[:, -1]
        close(found, exact(*given, lowest, scaling=0.2)[:, -1], roundings=10 if dtype is F16 else 3)
        infinite = kernel(*given, torch.where(seen, 0.0, -math.inf).to(dtype), scaling=0.2, causal=False)
        assert bool((infinite[:, -1] == 0).all())
        if q_len > 1:
            close(hidden[:, :-1].contiguous(), exact(*given, scaling=0.2)[:, :-1])
            close(infinite[:, :-1].contiguous(), exact(*given, scaling=0.2)[:, :-1])


def test_lengths_of_each_row(device: str) -> None:
    for q_len, dtype in ((1, BF16), (3, F32)):
        query, key, value = inputs(3, 4, 2, q_len, 200, 64, 64, dtype=dtype, device=device)
        for integer in (torch.int32, torch.int64):
            lengths = torch.tensor([q_len, 77, 200], dtype=integer, device=device)
            found = attention_decode(query, key, value, lengths=lengths, scaling=0.2, window=50)
            for row, length in enumerate(lengths.tolist()):
                parts = query[row : row + 1], key[row : row + 1, :, :length], value[row : row + 1, :, :length]
                close(found[row : row + 1], exact(*parts, scaling=0.2, causal=True, window=50))


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "length before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "slice of the channels": lambda x: torch.cat((x, x, x), -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "off by one": lambda x: torch.cat((x[..., :1], x), -1)[..., 1:],
    "channels apart": lambda x: torch.stack((x, x), -1)[..., 1],
    "a longer cache": lambda x: torch.cat((x, x + 1), 2)[:, :, : x.shape[2]],
    "one for all rows": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("view", STRIDED)
def test_strided_inputs(view: str, attention: Attention, device: str) -> None:
    given = [STRIDED[view](x) for x in inputs(2, 4, 2, 3, 90, 48, 80, dtype=BF16, device=device)]
    mask = STRIDED[view](masks(2, 4, 3, 90, device)[0].float()).bool() if "channels" not in view else None
    close(attention(*given, mask, scaling=0.2), exact(*given, mask, scaling=0.2, causal=attention is attention_decode))


def test_nothing_to_compute(attention: Attention, device: str) -> None:
    for shape in ((0, 4, 2, 1, 9, 32, 32), (2, 4, 2, 0, 9, 32, 16)):
        found = attention(*inputs(*shape, dtype=BF16, device=device), scaling=1.0)
        assert found.shape == (shape[0], shape[3], shape[1], shape[6])
        assert found.dtype is BF16


def test_huge_values_and_numbers_that_are_none(attention: Attention, device: str) -> None:
    query, key, value = inputs(1, 2, 2, 2, 70, 32, 32, device=device)
    huge = query * 1e3, key, value * 1e30
    close(attention(*huge, scaling=1.0, causal=True), exact(*huge, scaling=1.0, causal=True), roundings=2000)
    query[0, 1, 0, 0] = math.nan
    found = attention(query, key, value, scaling=1.0, causal=True)
    assert bool(found[0, 0, 1].isnan().all())
    assert int(found.isnan().sum()) == 32


def cut_off(x: torch.Tensor, y: torch.Tensor, acc: torch.Tensor, _: Any) -> torch.Tensor:
    """x @ y + acc as tensor cores sum tf32 products: a few at a time, each sum rounded towards zero."""
    for start in range(0, x.shape[-1], 8):
        part = x[..., start : start + 8].double() @ y[..., start : start + 8, :].double()
        total = acc.double() + part
        rounded = total.float()
        acc = torch.where(rounded.abs() > total.abs(), torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
    return acc


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("spread", ["normal", "positive"])
def test_float32_is_exact_where_tensor_cores_round_towards_zero(
    spread: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "cpu":
        monkeypatch.setattr(products, "_accumulate", cut_off)
    given = inputs(1, 1, 1, 514, 514, 80, 80, device=where)
    if spread == "positive":
        given[2] = given[2].abs() + 1
    expected = exact(*given, scaling=80**-0.5, causal=True)
    found = attention_prefill(*given, scaling=80**-0.5, causal=True)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 6e-7, f"relRMSE {error:.2g}"  # summed by tensor cores from tile to tile: 1.5e-6


Call = tuple[str, tuple[int, ...], torch.dtype, dict[str, Any]]
CALLS: dict[str, Call] = {
    "decode, in parts": ("decode", (2, 8, 2, 1, 1000, 128, 128), BF16, {}),
    "decode, not in parts": ("decode", (2, 8, 2, 1, 65, 128, 128), BF16, {}),
    "decode, one query head a key head, 80 and 96 channels": ("decode", (2, 3, 3, 1, 333, 80, 96), F16, {}),
    "decode, 16 rows": ("decode", (1, 16, 1, 1, 700, 64, 64), BF16, {}),
    "decode, 32 rows, 3 queries of 4": ("decode", (1, 8, 1, 3, 700, 128, 128), BF16, {"causal": True}),
    "decode, 256 channels, limited": ("decode", (1, 4, 2, 1, 600, 256, 256), BF16, {"softcap": 5.0}),
    "decode, window and sinks": ("decode", (2, 8, 2, 1, 1000, 64, 64), BF16, {"window": 300, "sinks": True}),
    "decode, bool mask": ("decode", (2, 8, 2, 1, 1000, 128, 128), BF16, {"mask": torch.bool}),
    "decode, float mask": ("decode", (2, 8, 2, 1, 1000, 128, 128), BF16, {"mask": BF16}),
    "decode, float32": ("decode", (2, 4, 2, 1, 300, 64, 64), F32, {}),
    "prefill": ("prefill", (2, 4, 2, 400, 400, 128, 128), BF16, {"causal": True}),
    "prefill, odd lengths, 64 channels": ("prefill", (1, 4, 1, 129, 333, 64, 64), F16, {"causal": True}),
    "prefill, not causal": ("prefill", (1, 2, 2, 197, 197, 64, 64), BF16, {}),
    "prefill, 96 and 80 channels": ("prefill", (1, 3, 3, 200, 200, 96, 80), BF16, {"causal": True}),
    "prefill, 256 channels, window": ("prefill", (1, 2, 1, 300, 300, 256, 256), BF16, {"causal": True, "window": 100}),
    "prefill, limited, sinks": ("prefill", (1, 4, 2, 300, 300, 64, 64), BF16, {"softcap": 5.0, "sinks": True}),
    "prefill, bool mask": ("prefill", (2, 4, 2, 300, 300, 128, 128), BF16, {"mask": torch.bool}),
    "prefill, float mask": ("prefill", (2, 4, 2, 300, 300, 128, 128), BF16, {"mask": BF16}),
    "prefill, float32": ("prefill", (1, 2, 1, 150, 150, 64, 64), F32, {"causal": True}),
}


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_calls_on_every_device(name: str, where: str) -> None:
    kernel, shape, dtype, options = CALLS[name]
    given, words = inputs(*shape, dtype=dtype, device=where), dict(options)
    kind, mask = words.pop("mask", None), None
    words["sinks"] = draw(shape[1], device=where, seed=5) if words.get("sinks") else None
    if kind is not None:
        seen = masks(shape[0], shape[1], shape[3], shape[4], where)[0]
        mask = seen if kind is torch.bool else torch.zeros(seen.shape, dtype=kind, device=where)
        if kind is not torch.bool:
            mask.masked_fill_(~seen, torch.finfo(kind).min)[..., -1, :] = torch.finfo(
                kind
            ).min  # a row that sees nothing
    if "window" in words and kernel == "decode":
        words["causal"] = True
    expected = exact(*given, mask, scaling=0.1, **words)
    close(KERNELS[kernel](*given, mask, scaling=0.1, **{"causal": False, **words}), expected)


@pytest.mark.parametrize("where", DEVICES)
def test_memory_that_is_not_aligned(where: str) -> None:
    given = [STRIDED["off by one"](x) for x in inputs(1, 4, 2, 1, 300, 64, 64, dtype=BF16, device=where)]
    for kernel in KERNELS.values():
        close(kernel(*given, scaling=0.2, causal=True), exact(*given, scaling=0.2, causal=True))


@pytest.mark.parametrize("where", DEVICES)
def test_nothing_beside_a_head_is_read(where: str) -> None:
    """What lies beside and behind the tensors is not a number."""
    given = []
    for x in inputs(1, 3, 3, 2, 70, 80, 80, dtype=BF16, device=where):
        wide = torch.full((*x.shape[:2], x.shape[2] + 64, 128), math.nan, dtype=BF16, device=where)
        wide[:, :, : x.shape[2], :80] = x
        given.append(wide[:, :, : x.shape[2], :80])
    for kernel in KERNELS.values():
        close(kernel(*given, scaling=0.2, causal=True), exact(*given, scaling=0.2, causal=True))


@pytest.mark.parametrize("where", DEVICES)
def test_lengths_on_every_device(where: str) -> None:
    query, key, value = inputs(3, 8, 2, 1, 1000, 128, 128, dtype=BF16, device=where)
    lengths = torch.tensor([1, 377, 1000], dtype=torch.int32, device=where)
    found = attention_decode(query, key, value, lengths=lengths, scaling=0.1)
    for row, length in enumerate(lengths.tolist()):
        parts = query[row : row + 1], key[row : row + 1, :, :length], value[row : row + 1, :, :length]
        close(found[row : row + 1], exact(*parts, scaling=0.1))


PREFILLS = [Prefill(queries=32, keys=64), Prefill(queries=64, keys=16, split=False), Prefill(queries=128, keys=128)]
DECODES = [Decode(keys=32, splits=1), Decode(keys=64, splits=3), Decode(keys=16, splits=70), Decode(keys=128, splits=2)]


def test_configurations_change_no_result(device: str) -> None:
    given = inputs(1, 4, 2, 100, 171, 96, 96, dtype=BF16, device=device)
    expected = exact(*given, scaling=0.2, causal=True)
    for prefill in PREFILLS:
        out = torch.empty(expected.shape, dtype=BF16, device=device)
        setting = prefill_module.Setting(0.2, True, None, None)
        prefill_module._launch(*given, None, None, out, setting, prefill)
        close(out, expected)
    given = inputs(2, 4, 2, 1, 1171, 64, 256, dtype=BF16, device=device)
    sinks = draw(4, device=device)
    expected = exact(*given, None, sinks, scaling=0.2)
    for decode in DECODES:
        out = torch.empty(expected.shape, dtype=BF16, device=device)
        decode_module._run(*given, None, sinks, None, 0.2, True, None, None, decode, out)
        close(out, expected)
    given = inputs(1, 4, 2, 3, 171, 32, 32, dtype=BF16, device=device)
    expected = exact(*given, scaling=0.2, causal=True, window=11)
    for decode in (Decode(keys=16, splits=1), Decode(keys=16, splits=2)):
        out = torch.empty(expected.shape, dtype=BF16, device=device)
        decode_module._run(*given, None, None, None, 0.2, True, 11, None, decode, out)
        close(out, expected)


def test_tensors_beyond_an_int32_are_split(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(3, 4, 2, 2, 90, 32, 32, dtype=BF16, device=device)
    mask, sinks = masks(3, 4, 2, 90, device)[0], draw(4, device=device)
    for limit in (9000, 2900):
        monkeypatch.setattr(attention_tiles, "LARGEST", limit)
        for kernel in KERNELS.values():
            found = kernel(*given, mask, sinks, scaling=0.2, causal=False)
            close(found, exact(*given, mask, sinks, scaling=0.2))
    monkeypatch.setattr(attention_tiles, "LARGEST", 1000)
    for kernel in KERNELS.values():
        with pytest.raises(ValueError, match="too large for 32-bit offsets"):
            kernel(*given, scaling=0.2)


def test_what_does_not_fit_is_refused(attention: Attention) -> None:
    query, key, value = inputs(2, 4, 2, 1, 9, 32, 32)
    with pytest.raises(ValueError, match="do not fit"):
        attention(query, key, value[:, :, :8], scaling=1.0)
    with pytest.raises(ValueError, match="do not divide"):
        attention(query[:, :3], key, value, scaling=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        attention(query[..., :16], key, value, scaling=1.0)
    with pytest.raises(ValueError, match="scaling"):
        attention(query, key, value, scaling=-1.0)
    with pytest.raises(ValueError, match="mask"):
        attention(query, key, value, torch.ones(2, 1, 1, 8, dtype=torch.bool), scaling=1.0)
    with pytest.raises(ValueError, match="window"):
        attention(query, key, value, scaling=1.0, causal=False, window=3)
    with pytest.raises(ValueError, match="use attention_prefill"):
        attention_decode(*inputs(1, 4, 2, 40, 40, 32, 32), scaling=1.0)


def test_plans_do_not_grow_with_the_length() -> None:
    decode_module._plan.cache_clear()
    for kv_len in range(1025, 1400, 40):
        query, key, value = (x.to("meta") for x in (torch.empty(1, 4, 1, 16), *[torch.empty(1, 2, kv_len, 16)] * 2))
        from kernelgraft.cutile.recording import recording

        with recording() as launches:
            attention_decode(query, key, value, scaling=1.0)
        assert launches
    assert decode_module._plan.cache_info().currsize == 2


def test_splits_fill_the_gpu_and_no_more() -> None:
    tile = 128 * 256 * 2
    assert splits(heads=8, length=1, size=tile, blocks=528) == 1
    assert splits(heads=8, length=4, size=tile, blocks=528) == 4
    assert splits(heads=8, length=256, size=tile, blocks=528) == 64
    assert splits(heads=64, length=32, size=tile, blocks=528) == 8
    assert splits(heads=1024, length=256, size=tile, blocks=528) == 1


def test_blocks_in_any_order() -> None:
    from kernelgraft.cutile import interpreted

    given = inputs(1, 4, 2, 3, 150, 32, 32)
    for kernel in KERNELS.values():
        expected = kernel(*given, scaling=0.2, causal=True)
        with interpreted(shuffle=1):
            assert torch.equal(kernel(*given, scaling=0.2, causal=True), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_function(backend: str, attention: Attention, device: str) -> None:
    given = inputs(1, 4, 2, 2, 40, 32, 32, dtype=BF16, device=device)
    sinks = draw(4, device=device)
    torch._dynamo.reset()

    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(query * 2, key, value, None, sinks, scaling=0.2, causal=True) + 1

    assert torch.equal(torch.compile(function, fullgraph=True, backend=backend)(*given), function(*given))


def test_registered_as_torch_asks(device: str) -> None:
    query, key, value = inputs(1, 4, 2, 2, 40, 32, 16, dtype=BF16, device=device)
    mask = masks(1, 4, 2, 40, device)[0]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(prefill_module._op, (query, key, value, mask, None, 0.2, False, None, None), test_utils=tests)
    torch.library.opcheck(decode_module._op, (query, key, value, None, None, None, 0.2, True, 8, 2.0), test_utils=tests)


# Solutions

TILE = MACHINE.model_copy(update={"versions": {"cuda-tile": "1.7.0", "torch": "2.11.0"}})
INTERPRETED = OwnSupplier(interpret=True)


def solutions(definition: Definition) -> list[Solution]:
    found = INTERPRETED.candidates(definition, TILE)
    assert not isinstance(found, Refusal), found
    return found


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_solutions_compute_their_definition(name: str, dtype: torch.dtype) -> None:
    definition = attention_definition(dtype, **VARIANTS[name])
    offered = solutions(definition)
    assert [s.sources[0].path for s in offered][: 1 + (name != "one query")] == [
        "attention_decode.py",
        "attention_prefill.py",
    ][: len(offered)]
    for ours in offered:
        findings = inspect_sources(ours, definition)
        assert not findings.denied and not findings.warnings, findings
        for seed, sizes in enumerate(sizes_of(definition)):
            given = fresh_inputs(definition, seed, **sizes)
            assert refuses(ours.meta.guard, definition, given) is None
            check(definition, load(ours), given, f"{name} {sizes}")
        assert "gradient" in str(refuses(ours.meta.guard, definition, [given[0].requires_grad_(), *given[1:]]))


def test_few_queries_are_those_that_the_kernel_takes() -> None:
    definition = attention_definition(BF16, masked=False)
    decode, prefill = solutions(definition)
    most = most_queries(2)
    for q_len, served in ((most, True), (most + 1, False)):
        given = fresh_inputs(definition, batch_size=1, q_len=q_len, kv_len=q_len)
        assert (refuses(decode.meta.guard, definition, given) is None) is served
        assert refuses(prefill.meta.guard, definition, given) is None
    assert "gradient" not in str(refuses(decode.meta.guard, definition, fresh_inputs(definition)))
    for changes, reason in (({"head_dim": 512}, "256"), ({"scaling": -1.0}, "positive")):
        other = definition.model_copy(
            update={"meta": definition.meta.model_copy(update={"semantics": {**definition.meta.semantics, **changes}})}
        )
        refused = INTERPRETED.candidates(other, TILE)
        assert isinstance(refused, Refusal) and reason in refused.reason


@pytest.mark.parametrize("name", ["float mask"])
def test_the_judge_accepts_them(name: str) -> None:
    definition = attention_definition(BF16, **VARIANTS[name])
    options = replace(JudgeOptions.quick(), seeds=1, points=4, held_out=0, captured=2)
    captured = []
    for number, sizes in enumerate(sizes_of(definition)[1:3]):
        given = tuple(fresh_inputs(definition, number, **sizes))
        axes = {axis: size for axis, size in sizes.items() if axis in definition.axes}
        captured.append(Captured(given, "decode" if sizes["q_len"] == 1 else "prefill", str(number), axes))
    with Judge(options) as judge:
        for ours in solutions(definition):
            served = [c for c in captured if refuses(ours.meta.guard, definition, c.inputs) is None]
            evaluation = judge.verify(ours, definition, served)
            assert evaluation.status == "PASSED", evaluation
