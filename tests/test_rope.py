"""Recognising rotary embeddings by what they compute, and seating kernels in their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelgraft.families.base import Call, Recognition, Rejection
from kernelgraft.families.points import holds
from kernelgraft.families.reference import as_tuple, run_oracle, run_reference
from kernelgraft.families.rope import FAMILY, rope_seat
from kernelgraft.records import Site, SourceRef

SITE = Site(
    kind="function",
    path="layers.*.attn",
    instances=("layers.0.attn", "layers.1.attn"),
    class_name="package.module.Attention",
    symbol="rotate",
    source=SourceRef(file="package/module.py", first_line=1, last_line=9, sha256="0" * 64),
)


def modeling(name: str, function: str) -> Callable[..., Any]:
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    found: Callable[..., Any] = getattr(module, function)
    return found


def tables(batch: int, length: int, size: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [batch, length, size] (size / 2 for layout `half`); each row starts at another position."""
    frequencies = 10000 ** -(torch.arange(0, size, 2) / size)
    positions = torch.arange(length) + 3 * torch.arange(batch)[:, None]
    angles = positions[..., None] * frequencies
    if layout == "duplicated":
        angles = torch.cat((angles, angles), dim=-1)
    elif layout == "repeated":
        angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    return Call(
        instance="layers.0.attn",
        module=torch.nn.Identity(),
        args=args,
        kwargs=kwargs,
        output=function(*args, **kwargs),
        regime="prefill",
        original=function,
    )


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def recognised(*calls: Call) -> Recognition:
    found = FAMILY.recognise(SITE, calls)
    assert isinstance(found, Recognition), found
    return found


def reference_of(recognition: Recognition) -> Callable[..., Any]:
    """A select that puts each Definition's reference into the seat."""
    by_inputs = {len(d.inputs): d for d in recognition.definitions}
    return lambda *inputs: (
        lambda *values: (lambda out: out if len(out) > 1 else out[0])(run_reference(by_inputs[len(inputs)], values))
    )


def seated(recognition: Recognition, original: Callable[..., Any], select: Callable[..., Any]) -> Callable[..., Any]:
    seat = FAMILY.seat(recognition.semantics)
    return seat.factory(original, select, **seat.constants)


def equal(a: Any, b: Any) -> bool:
    first, second = as_tuple(a), as_tuple(b)
    pairs = zip(first, second, strict=True)
    return len(first) == len(second) and all(
        (x is None and y is None) or (x.dtype == y.dtype and torch.equal(x, y)) for x, y in pairs
    )


# name, function, head size, rotated size, layout of the tables, what is expected
QK = [
    ("llama", "apply_rotary_pos_emb", 80, 80, "duplicated", {"pairs_in": "half", "pairs_out": "half", "table": "full"}),
    ("gpt_neox", "apply_rotary_pos_emb", 96, 24, "duplicated", {"rotary_dim": 24, "placement": "first"}),
    ("olmo", "apply_rotary_pos_emb", 16, 16, "duplicated", {"compute": "input"}),
    ("cohere", "apply_rotary_pos_emb", 96, 96, "repeated", {"pairs_in": "interleaved", "compute": "float32"}),
    ("glm", "apply_rotary_pos_emb", 16, 8, "duplicated", {"pairs_in": "interleaved", "table": "first_half"}),
    ("modernbert", "apply_rotary_pos_emb", 16, 16, "duplicated", {"pairs_in": "half", "compute": "float32"}),
    ("gpt_oss", "apply_rotary_pos_emb", 16, 16, "half", {"pairs_in": "half", "table": "half"}),
    ("nanochat", "apply_rotary_pos_emb", 16, 16, "duplicated", {"direction": "backward"}),
    (
        "deepseek_v3",
        "apply_rotary_pos_emb_interleave",
        16,
        16,
        "duplicated",
        {"pairs_in": "interleaved", "pairs_out": "half"},
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "function", "head_dim", "size", "layout", "expected"), QK, ids=[q[0] for q in QK])
def test_real_functions_of_q_and_k(
    name: str, function: str, head_dim: int, size: int, layout: str, expected: dict[str, Any], dtype: torch.dtype
) -> None:
    original = modeling(name, function)
    q, k = randn(1, 4, 6, head_dim, dtype=dtype), randn(1, 2, 6, head_dim, dtype=dtype)
    call = record(original, q, k, *tables(1, 6, size, layout, dtype))
    found = recognised(call)
    assert {key: found.semantics[key] for key in expected} == expected
    assert found.semantics["table_layout"] == ("free" if layout == "half" else layout)
    (definition,) = found.definitions
    assert definition.meta.reference_error == 0.0
    assert definition.axes["num_heads"].value == 4 and definition.axes["num_kv_heads"].value == 2
    # Through the seat, on other sizes, and with other positions in each row.
    q, k = randn(3, 4, 9, head_dim, dtype=dtype), randn(3, 2, 9, head_dim, dtype=dtype)
    fresh = (q, k, *tables(3, 9, size, layout, dtype))
    assert equal(seated(found, original, reference_of(found))(*fresh), original(*fresh))
    assert equal(seated(found, original, lambda *_: None)(*fresh), original(*fresh))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tensor_with_heads_behind_the_sequence(dtype: torch.dtype) -> None:
    original = modeling("gemma3n", "apply_rotary_pos_emb")
    cos, sin = tables(2, 5, 16, "duplicated", dtype)
    found = recognised(
        record(original, randn(2, 5, 4, 16, dtype=dtype), cos, sin, unsqueeze_dim=2),
        record(original, randn(2, 5, 1, 16, dtype=dtype), cos, sin, unsqueeze_dim=2),
    )
    assert found.semantics["leading"] == [0, 1] and found.semantics["fixed"] == {"unsqueeze_dim": 2}
    (definition,) = found.definitions
    assert list(definition.inputs) == ["q", "cos", "sin"]
    assert definition.inputs["q"].shape == ("batch_size", "seq_len", "num_heads", "head_dim")
    assert definition.axes["num_heads"].type == "var"


def test_tensors_of_another_rank_run_the_original() -> None:
    original = modeling("gemma3n", "apply_rotary_pos_emb")
    cos, sin = tables(2, 5, 16, "duplicated", torch.float32)
    four = (randn(2, 5, 4, 16), cos, sin, -2)
    three = (randn(5, 4, 16), cos[0], sin[0], -2)
    found = recognised(record(original, *four), record(original, *three))
    seen: list[Any] = []
    replacement = seated(found, original, lambda *inputs: seen.append(inputs))
    assert equal(replacement(*four), original(*four))
    assert equal(replacement(*three), original(*three))
    assert len(seen) == 1


def test_tables_in_the_other_order_and_at_the_end_of_the_head() -> None:
    gptj = modeling("gptj", "apply_rotary_pos_emb")
    cos, sin = tables(1, 5, 16, "half", torch.float32)
    found = recognised(record(gptj, randn(1, 5, 4, 16), sin, cos))
    assert found.semantics["tensors"] == ["tensor", "cos", "sin"] and found.semantics["table"] == "half"
    deepseek = modeling("deepseek_v4", "apply_rotary_pos_emb")
    cos, sin = tables(1, 5, 8, "half", torch.float32)
    found = recognised(record(deepseek, randn(1, 4, 5, 16), cos, sin))
    assert found.semantics["placement"] == "last" and found.semantics["rotary_dim"] == 8


@pytest.mark.parametrize(("name", "leading"), [("deepseek_v2", [0, 2]), ("llama4", [0, 1])])
def test_complex_table(name: str, leading: list[int]) -> None:
    original = modeling(name, "apply_rotary_emb")
    freqs = torch.complex(*tables(1, 5, 16, "half", torch.float32))
    shape = (1, 4, 5, 16) if leading == [0, 2] else (1, 5, 4, 16)
    q, k = randn(*shape, dtype=torch.bfloat16), randn(*shape, dtype=torch.bfloat16) + 1
    found = recognised(record(original, q, k, freqs))
    assert found.semantics["table"] == "complex" and found.semantics["leading"] == leading
    assert found.definitions[0].inputs["freqs"].shape is not None
    assert equal(seated(found, original, reference_of(found))(q, k, freqs), original(q, k, freqs))


@pytest.mark.parametrize(
    ("name", "function", "returns"),
    [
        ("qwen4_exp", "apply_rotary_pos_emb", "single"),
        ("mistral_large4", "apply_rotary_pos_emb_interleave", "pair"),
    ],
)
def test_calls_with_and_without_k(name: str, function: str, returns: str) -> None:
    original = modeling(name, function)
    q, k, table = randn(1, 4, 5, 16), randn(1, 2, 5, 16), tables(1, 5, 16, "duplicated", torch.float32)
    alone = record(original, q, None, *table)
    found = recognised(record(original, q, k, *table), alone)
    assert [len(d.inputs) for d in found.definitions] == [4, 3] and found.semantics["without_k"] == returns
    replacement = seated(found, original, reference_of(found))
    assert equal(replacement(q, None, *table), alone.output)
    assert type(replacement(q, None, *table)) is type(alone.output)
    assert equal(replacement(q, k, *table), original(q, k, *table))


def test_the_order_of_casts_is_told_apart() -> None:
    """Two functions that agree in float32 are different computes."""
    table = tables(1, 5, 16, "duplicated", torch.float32)
    args = (randn(1, 4, 5, 16), randn(1, 2, 5, 16), *table)
    names = ["llama", "modernbert"]
    found = [recognised(record(modeling(n, "apply_rotary_pos_emb"), *args)) for n in names]
    assert [f.semantics["compute"] for f in found] == ["input", "float32"]
    mixed = (args[0].bfloat16(), args[1].bfloat16(), *table)
    kept = recognised(record(modeling("olmo", "apply_rotary_pos_emb"), *mixed)).definitions[0]
    grown = recognised(record(modeling("llama", "apply_rotary_pos_emb"), *mixed)).definitions[0]
    assert kept.outputs["q_out"].dtype == "bfloat16" and grown.outputs["q_out"].dtype == "float32"


def test_reference_is_also_the_oracle() -> None:
    original = modeling("cohere", "apply_rotary_pos_emb")
    table = tables(1, 5, 16, "repeated", torch.bfloat16)
    q, k = randn(1, 4, 5, 16, dtype=torch.bfloat16), randn(1, 2, 5, 16, dtype=torch.bfloat16)
    (definition,) = recognised(record(original, q, k, *table)).definitions
    oracle = run_oracle(definition, (q, k, *table))
    assert all(x.dtype == torch.float64 for x in oracle)
    wide = original(q.double(), k.double(), *(t.double() for t in table))
    assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(oracle, wide, strict=True))


def plain(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, axis: int = 1, ids: Any = None
) -> Any:
    """A rotation whose other parameters matter or not."""
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    return turned(q), turned(k)


def test_a_call_with_another_parameter_runs_the_original() -> None:
    table = tables(1, 5, 16, "duplicated", torch.float32)
    args = (randn(1, 5, 5, 16), randn(1, 5, 5, 16) + 1, *table)
    found = recognised(record(plain, *args))
    seen: list[int] = []

    def select(*inputs: Any) -> Any:
        seen.append(len(inputs))
        return reference_of(found)(*inputs)

    replacement = seated(found, plain, select)
    served = [
        lambda: replacement(*args),
        lambda: replacement(*args, 1),
        lambda: replacement(*args[:2], sin=args[3], cos=args[2]),
        lambda: replacement(*args, axis=1, ids=None),
    ]
    for index, call in enumerate(served, start=1):
        assert equal(call(), plain(*args)) and len(seen) == index
    assert equal(replacement(*args, 2), plain(*args, 2))
    assert equal(replacement(*args, axis=2), plain(*args, axis=2))
    assert equal(replacement(*args, ids=args[0]), plain(*args))
    with pytest.raises(TypeError, match="unexpected keyword"):
        replacement(*args, unknown=1)
    with pytest.raises(TypeError, match="multiple values"):
        replacement(*args, q=args[0])
    with pytest.raises(TypeError, match="missing"):
        replacement(*args[:2])
    assert len(seen) == len(served)


def test_a_rotation_that_no_variant_computes_is_rejected() -> None:
    table = tables(1, 5, 16, "duplicated", torch.float32)
    args = (randn(1, 4, 5, 16), randn(1, 2, 5, 16), *table)

    def scaled(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return tuple(x * 1.001 for x in plain(q, k, cos, sin))

    def shifted(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return plain(q, k, cos.roll(1, dims=1), sin.roll(1, dims=1))

    for twist in (scaled, shifted):
        found = FAMILY.recognise(SITE, [record(twist, *args)])
        assert isinstance(found, Rejection) and "no rotation" in found.reason

    def indexed(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ids: torch.Tensor) -> Any:
        return plain(q, k, cos[:, ids], sin[:, ids])

    found = FAMILY.recognise(SITE, [record(indexed, *args, torch.arange(5))])
    assert isinstance(found, Rejection) and "`ids`" in found.reason


def test_other_functions_are_not_rotations() -> None:
    q, k, cos = randn(1, 4, 5, 16), randn(1, 4, 5, 16), tables(1, 5, 16, "duplicated", torch.float32)[0]
    assert FAMILY.recognise(SITE, [record(lambda x, n: x.repeat(1, n, 1, 1), q, 1)]) is None
    assert FAMILY.recognise(SITE, [record(lambda x, y, a, b: (x + a.mean(), y), q, k, cos, cos)]) is None
    assert FAMILY.recognise(SITE, [record(torch.nn.functional.relu, q)]) is None
    assert FAMILY.recognise(SITE, []) is None


@pytest.mark.parametrize("layout", ["duplicated", "repeated", "half"])
def test_fresh_inputs_keep_the_tables_structure(layout: str) -> None:
    if layout == "half":
        original = modeling("gpt_oss", "apply_rotary_pos_emb")
    else:
        original = modeling("llama" if layout == "duplicated" else "cohere", "apply_rotary_pos_emb")
    args = (randn(1, 4, 6, 16), randn(1, 2, 6, 16), *tables(1, 6, 16, layout, torch.float32))
    (definition,) = recognised(record(original, *args)).definitions
    axes = {"batch_size": 3, "seq_len": 7, "table_batch": 3}
    for distribution in ("normal", "huge", "nan"):
        generator = torch.Generator().manual_seed(1)
        q, k, cos, sin = FAMILY.inputs(definition, axes, generator, distribution)
        assert q.shape == (3, 4, 7, 16) and k.shape == (3, 2, 7, 16) and cos.shape == (3, 7, args[2].shape[-1])
        assert torch.allclose(cos**2 + sin**2, torch.ones_like(cos))
        assert not torch.equal(cos[0], cos[1])
        if layout == "duplicated":
            assert torch.equal(*sin.chunk(2, dim=-1))
        if layout == "repeated":
            assert torch.equal(sin[..., 0::2], sin[..., 1::2])
    again = FAMILY.inputs(definition, axes, torch.Generator().manual_seed(1), "normal")
    assert torch.equal(again[0], FAMILY.inputs(definition, axes, torch.Generator().manual_seed(1), "normal")[0])


def test_points_include_a_table_row_per_batch_element() -> None:
    original = modeling("llama", "apply_rotary_pos_emb")
    args = (randn(1, 4, 6, 16), randn(1, 2, 6, 16), *tables(1, 6, 16, "duplicated", torch.float32))
    (definition,) = recognised(record(original, *args)).definitions
    traced = [{"batch_size": 1, "seq_len": 6, "table_batch": 1}]
    points = FAMILY.axis_points(definition, traced)
    assert traced[0] in points and len(points) >= 8
    assert len({p["batch_size"] for p in points if p["table_batch"] == p["batch_size"] > 1}) > 1
    assert any(p["table_batch"] == 1 < p["batch_size"] for p in points)
    assert all(holds(definition.constraints, p) for p in points)
    for point in points[:4]:
        inputs = FAMILY.inputs(definition, point, torch.Generator(), "normal")
        assert all(x.isfinite().all() for x in run_reference(definition, inputs))


def test_what_was_recorded_is_left_alone() -> None:
    original = modeling("glm", "apply_rotary_pos_emb")
    args = (randn(1, 4, 6, 16), randn(1, 2, 6, 16), *tables(1, 6, 8, "duplicated", torch.float32))
    before = [x.clone() for x in args]
    recognised(record(original, *args))
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_the_factory_stands_alone() -> None:
    """Its source is written into emitted files, which have `torch` and annotations only."""
    source = "from __future__ import annotations\n\nimport torch\n\n\n" + inspect.getsource(rope_seat)
    namespace: dict[str, Any] = {}
    exec(compile(source, "<emitted>", "exec"), namespace)
    original = modeling("llama", "apply_rotary_pos_emb")
    args = (randn(1, 4, 6, 16), randn(1, 2, 6, 16), *tables(1, 6, 16, "duplicated", torch.float32))
    found = recognised(record(original, *args))
    replacement = namespace["rope_seat"](original, reference_of(found), **FAMILY.seat(found.semantics).constants)
    assert equal(replacement(*args), original(*args))
