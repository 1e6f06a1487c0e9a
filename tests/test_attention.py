"""Recognising attention by what it computes, with real models' calls and masks, and seating kernels in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kernelgraft.families.attention import FAMILY, attention_seat
from kernelgraft.families.attention_reference import compare, make_mask
from kernelgraft.families.base import Call, Recognition, Rejection
from kernelgraft.families.points import holds
from kernelgraft.families.reference import run_oracle, run_reference
from kernelgraft.records import Definition, Site, SourceRef
from kernelgraft.sites import Run, capture, discover

SITE = Site(
    kind="attention",
    path="layers.*.attn",
    instances=("layers.0.attn",),
    class_name="package.module.Attention",
    symbol="ATTENTION",
    source=SourceRef(file="package/module.py", first_line=1, last_line=9, sha256="0" * 64),
)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def model(kind: str, implementation: str, dtype: torch.dtype, **settings: Any) -> Any:
    """A model of transformers of two layers with random weights."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + spread / 4)
    return made.eval().to(dtype)


def recorded(made: Any) -> list[tuple[Site, list[Call]]]:
    """Attention sites and their calls: a dynamic cache, a left-padded batch, a static cache."""
    ids = torch.arange(2, 11)[None]
    padded = torch.cat((torch.tensor([[0, 0, 0, 0, 5, 6, 7, 8, 9]]), ids))
    mask = (padded != 0).long()
    runs = [
        Run(ids, torch.ones_like(ids), 3),
        Run(padded, mask, 3, padded=True),
        Run(ids, torch.ones_like(ids), 3, cache="static"),
    ]
    sites = [site for site in discover(made) if site.kind == "attention"]
    calls = capture(made, sites, runs).calls
    return [(site, calls[site.key]) for site in sites]


def recognised(calls: list[Call], site: Site = SITE) -> Recognition:
    found = FAMILY.recognise(site, calls)
    assert isinstance(found, Recognition), found
    return found


def rejected(calls: list[Call]) -> str:
    found = FAMILY.recognise(SITE, calls)
    assert isinstance(found, Rejection), found
    return found.reason


def definition(found: Recognition, *, masked: bool) -> Definition:
    return next(d for d in found.definitions if ("attention_mask" in d.inputs) == masked)


def reference_of(found: Recognition, seen: list[Any]) -> Callable[..., Any]:
    by_inputs = {len(d.inputs): d for d in found.definitions}

    def select(*inputs: Any) -> Callable[..., Any]:
        seen.append(inputs)
        return lambda *values: run_reference(by_inputs[len(inputs)], values)[0]

    return select


def seated(found: Recognition, original: Callable[..., Any], select: Callable[..., Any]) -> Callable[..., Any]:
    seat = FAMILY.seat(found.semantics)
    return seat.factory(original, select, **seat.constants)


WINDOW = {"sliding_window": 4}
MODELS = [
    ("Qwen3", "sdpa", {}, {"mask": "bool", "causal": True, "slices_keys": True}),
    ("Qwen3", "eager", {}, {"mask": "float", "causal": None}),
    ("Mistral", "sdpa", WINDOW, {"mask": "bool", "sliding_window": 4}),
    ("Gemma2", "eager", {**WINDOW, "attn_logit_softcapping": 20.0}, {"mask": "float", "softcap": 20.0}),
    ("GptOss", "eager", {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}, {"sinks": True}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "implementation", "settings", "expected"), MODELS, ids=[m[0] + m[1] for m in MODELS])
def test_real_models(
    kind: str, implementation: str, settings: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype
) -> None:
    made = model(kind, implementation, dtype, **settings)
    windows = set()
    for site, calls in recorded(made):
        found = recognised(calls, site)
        shared = {k: v for k, v in expected.items() if k != "sliding_window"}
        assert {key: found.semantics[key] for key in shared} == shared
        assert (found.semantics["num_heads"], found.semantics["num_kv_heads"]) == (4, 2)
        windows.add(found.semantics["sliding_window"])
        served = 0
        for call in calls:
            seen: list[Any] = []
            with torch.no_grad():
                output, weights = seated(found, call.original, reference_of(found, seen))(*call.args, **call.kwargs)
                usual = seated(found, call.original, lambda *_: None)(*call.args, **call.kwargs)
            assert torch.equal(usual[0], call.output[0])
            assert output.shape == call.output[0].shape and output.dtype == dtype and (weights is None or not seen)
            difference = (output.double() - call.output[0].double()).norm() / call.output[0].double().norm()
            assert difference < TOLERANCE[dtype]
            served += len(seen)
        assert served == len(calls)
        assert any(call.padded for call in calls) and any(call.cache == "static" for call in calls)
        for each in found.definitions:
            assert each.meta.reference_error is not None and each.meta.reference_error < 20 * TOLERANCE[dtype]
    assert expected.get("sliding_window", settings.get("sliding_window")) in windows


class Owner(nn.Module):
    """What an attention function reads from its module."""

    def __init__(self, *, heads: int = 4, kv_heads: int = 2, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups = heads // kv_heads
        self.is_causal = is_causal
        self.sinks = nn.Parameter(torch.linspace(-1, 1, heads))
        self.config = transformers.PretrainedConfig()


def tensors(batch: int, q_len: int, kv_len: int, *, value_dim: int = 8, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((batch, 4, q_len, 8), generator=generator)
    key = torch.randn((batch, 2, kv_len, 8), generator=generator)
    return query, key, torch.randn((batch, 2, kv_len, value_dim), generator=generator)


def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    with torch.no_grad():
        output = function(*args, **kwargs)
    return Call(
        instance="layers.0.attn",
        module=args[0],
        args=args,
        kwargs=kwargs,
        output=output,
        regime="prefill",
        original=function,
    )


USUAL: dict[str, Any] = {"dropout": 0.0, "scaling": 0.3}


def eager(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Attention written out, with hooks for twists: `change` alters the scores."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3) * kwargs["scaling"]
    scores = kwargs.get("change", lambda s: s)(scores)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.float().softmax(dim=-1).to(query.dtype)
    return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2).contiguous(), weights


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda *args, **kwargs: eager(*args, **kwargs, change=change)


def float_mask(*shape: int) -> torch.Tensor:
    semantics = {"mask": "float", "sliding_window": None}
    return make_mask(shape, semantics, torch.float32, torch.Generator().manual_seed(0))


def test_causal_full_and_decode_only() -> None:
    module = Owner()
    prefill = record(sdpa_attention_forward, module, *tensors(1, 5, 5), None, **USUAL)
    decode = record(sdpa_attention_forward, module, *tensors(1, 1, 6), None, **USUAL)
    causal = recognised([prefill, decode]).semantics
    assert causal["causal"] is True and causal["slices_keys"] and not causal["decode_only"] and causal["mask"] == "bool"
    found = recognised([decode])  # a fresh longer call shows the rest
    assert found.semantics["causal"] is True and definition(found, masked=False).constraints == (
        "q_len == 1 or q_len == kv_len",
    )
    full = recognised([record(sdpa_attention_forward, Owner(is_causal=False), *tensors(1, 5, 7), None, **USUAL)])
    assert full.semantics["causal"] is False and definition(full, masked=False).constraints == ()

    def one_query(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if query.shape[2] > 1:
            raise ValueError("one query at a time")
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    single = recognised([record(one_query, module, *tensors(1, 1, 6), None, **USUAL)])
    assert single.semantics["decode_only"] and single.definitions[0].constraints == ("q_len == 1",)


def test_values_of_another_size() -> None:
    call = record(sdpa_attention_forward, Owner(), *tensors(2, 5, 5, value_dim=6), None, **USUAL)
    found = recognised([call])
    (output,) = definition(found, masked=False).outputs.values()
    assert output.shape == ("batch_size", "q_len", "num_heads", "value_dim")


def test_scaling_defaults_to_the_head_size() -> None:
    found = recognised([record(sdpa_attention_forward, Owner(), *tensors(1, 5, 5), None)])
    assert found.semantics["scaling"] == 8**-0.5
    given = recognised([record(sdpa_attention_forward, Owner(), *tensors(1, 5, 5), None, scaling=None)])
    assert given.semantics["scaling"] == 8**-0.5
    other = recognised([record(sdpa_attention_forward, Owner(), *tensors(1, 5, 5), None, scaling=0.1)])
    assert other.definitions[0].name != found.definitions[0].name


def test_more_keys_than_queries_without_a_mask() -> None:
    """As in the prefill of a cache of fixed size: only the keys that are filled count."""
    found = recognised([record(sdpa_attention_forward, Owner(), *tensors(1, 5, 5), None, **USUAL)])
    args, seen = tensors(2, 3, 8), []
    replacement = seated(found, sdpa_attention_forward, reference_of(found, seen))
    output = replacement(Owner(), *args, None, **USUAL)[0]
    assert [x.shape[2] for x in seen[0]] == [3, 3, 3]
    assert torch.allclose(output, sdpa_attention_forward(Owner(), *args, None, **USUAL)[0], atol=1e-5)
    fewer = tensors(1, 5, 3)
    assert torch.equal(
        replacement(Owner(), *fewer, None, **USUAL)[0], sdpa_attention_forward(Owner(), *fewer, None, **USUAL)[0]
    )
    assert len(seen) == 1


def test_calls_that_the_seat_leaves_to_the_original() -> None:
    module = Owner()
    keywords = {**USUAL, "position_ids": torch.arange(5), "use_cache": True, "cu_seq_lens_q": None}
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    args = tensors(1, 5, 5)
    calls = [record(sdpa_attention_forward, module, *args, m, **keywords) for m in (None, mask)]
    found = recognised(calls)
    assert found.semantics["neutral"] == ["position_ids", "use_cache"]
    seen: list[Any] = []
    replacement = seated(found, sdpa_attention_forward, reference_of(found, seen))

    def count(module: Any, *args: Any, **kwargs: Any) -> int:
        before = len(seen)
        with torch.no_grad():
            output = replacement(module, *args, **kwargs)[0]
            usual = sdpa_attention_forward(module, *args, **kwargs)[0]
        torch.testing.assert_close(output, usual, rtol=0, atol=1e-5)
        return len(seen) - before

    assert count(module, *args, None, **USUAL) == 1
    assert count(module, *args, mask, **{**keywords, "position_ids": None, "use_cache": False}) == 1
    assert count(module, *args, attention_mask=None, scaling=0.3) == 1
    assert count(module, *args, None, dropout=0.0) == 0  # another scaling: the default
    assert count(module, *args, None, dropout=0.0, scaling=0.2) == 0
    assert count(module, *args, None, **USUAL, unknown=1) == 0
    assert count(module, *args, None, **{**keywords, "cu_seq_lens_q": torch.tensor([0, 5])}) == 0
    assert count(module, *args, None, **USUAL, position_bias=torch.ones(1, 4, 5, 5)) == 0
    assert count(module, *args, None, **USUAL, output_attentions=True) == 0
    assert count(module, *args, None, **USUAL, is_causal=False) == 0
    assert count(module, *args, None, 0.0, 0.3) == 0  # further positional arguments
    assert count(Owner(is_causal=False), *args, None, **USUAL) == 0
    assert count(module, *args, torch.zeros(1, 1, 5, 5), **USUAL) == 0  # another kind of mask
    assert count(module, *args, mask.expand(1, 4, 5, 5), **USUAL) == 0  # one mask per head
    torch.manual_seed(0)
    dropped = sdpa_attention_forward(module, *args, None, scaling=0.3, dropout=0.5)[0]
    torch.manual_seed(0)
    assert torch.equal(replacement(module, *args, None, scaling=0.3, dropout=0.5)[0], dropped)


def test_weights_are_returned_when_they_are_asked_for() -> None:
    module = Owner()
    args, mask = tensors(1, 5, 5), float_mask(1, 1, 5, 5)
    found = recognised([record(eager, module, *args, mask, **USUAL)])
    assert found.semantics["weights"] and found.semantics["causal"] is None
    replacement = seated(found, eager, reference_of(found, []))
    assert replacement(module, *args, mask, **USUAL)[1] is None
    assert replacement(module, *args, mask, **USUAL, output_attentions=True)[1] is not None
    module.config.output_attentions = True
    assert replacement(module, *args, mask, **USUAL)[1] is not None
    assert replacement(module, *args, None, **USUAL)[1] is not None  # no unmasked call was recorded


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (changed(lambda s: s + torch.arange(s.shape[-1])), "with a mask"),
        (changed(lambda s: s.clamp(max=20)), "with a mask"),
        (changed(lambda s: torch.tanh(s / 50) * 50), "with a mask"),
        (changed(lambda s: s.relu()), "with a mask"),
        (lambda *args, **kwargs: (eager(*args, **kwargs)[0] * 1.001, None), "with a mask"),
        (lambda *args, **kwargs: (eager(*args, **kwargs)[0].transpose(1, 2), None), "its output is not"),
    ],
    ids=["bias", "limit", "softcap", "relu", "scaled", "layout"],
)
def test_other_scores_are_rejected(function: Callable[..., Any], reason: str) -> None:
    assert reason in rejected([record(function, Owner(), *tensors(1, 5, 5), float_mask(1, 1, 5, 5), **USUAL)])


def test_a_keyword_that_matters_is_named() -> None:
    def sparse(module: Any, query: Any, key: Any, value: Any, mask: Any, indices: Any = None, **kwargs: Any) -> Any:
        if indices is not None:
            key, value = key[:, :, indices], value[:, :, indices]
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    def windowed(module: Any, *args: Any, sliding_window: Any = None, **kwargs: Any) -> Any:
        mask = torch.ones(5, 5, dtype=torch.bool).tril().triu(1 - sliding_window)
        return sdpa_attention_forward(module, *args[:3], mask, **kwargs)

    args = tensors(1, 5, 5)
    assert "`indices`" in rejected([record(sparse, Owner(), *args, None, **USUAL, indices=torch.arange(5))])
    assert "`sliding_window`" in rejected([record(windowed, Owner(), *args, None, **USUAL, sliding_window=9)])
    biased = {**USUAL, "position_bias": torch.zeros(1, 4, 5, 5)}
    assert "position bias" in rejected([record(sdpa_attention_forward, Owner(), *args, None, **biased)])
    each = [record(sdpa_attention_forward, Owner(), *args, None, scaling=s) for s in (0.1, 0.2)]
    assert "`scaling` differs" in rejected(each)


def test_other_structures_are_rejected() -> None:
    query, key, value = tensors(1, 5, 5)

    def flat(module: Any, query: Any, *rest: Any) -> Any:
        return query, None

    assert "query is not a tensor" in rejected([record(flat, Owner(), query[0], key, value, None)])
    assert "mask is a str" in rejected([record(flat, Owner(), query, key, value, "blocks")])
    assert "do not belong together" in rejected([record(flat, Owner(), query, key, value[:, :, 1:], None)])
    assert "do not divide" in rejected([record(flat, Owner(), query[:, :3], key, value, None)])


def test_sinks_that_are_passed_but_not_used() -> None:
    module = Owner()
    call = record(sdpa_attention_forward, module, *tensors(1, 5, 5), None, **USUAL, s_aux=module.sinks)
    found = recognised([call])
    assert not found.semantics["sinks"] and "s_aux" in found.semantics["neutral"]


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    module, args = Owner(), tensors(2, 5, 5)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[0, :, :2] = False
    found = recognised([record(sdpa_attention_forward, module, *args, mask, **USUAL)])
    masked = definition(found, masked=True)
    (output,) = run_reference(masked, (*args, mask))
    assert torch.equal(output[0, :2], torch.zeros_like(output[0, :2])) and bool(output.isfinite().all())
    assert bool(run_oracle(masked, (*args, mask))[0].isfinite().all())


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_have_the_structure_of_models(kind: str) -> None:
    semantics = {"mask": kind, "sliding_window": 3}
    generator = torch.Generator().manual_seed(0)
    made = [make_mask((4, 2, 5, 9), semantics, torch.bfloat16, generator) for _ in range(20)]
    seen = torch.stack(made) if kind == "bool" else torch.stack(made) == 0
    assert seen.shape == (20, 4, 2, 5, 9) and bool(seen.any(dim=-1).all())
    assert int(seen.sum(dim=-1).max()) <= 3  # the window
    assert not bool((seen[..., 0, 5:]).any())  # the future of the first query
    assert len({tuple(row.flatten().tolist()) for row in seen[:, :, 0].flatten(0, 1)}) > 5  # padding and empty keys
    assert torch.equal(seen[:, :, 0], seen[:, :, 1])
    if kind == "float":
        assert float(made[0].min()) == torch.finfo(torch.bfloat16).min


def both_definitions() -> Recognition:
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    calls = [record(sdpa_attention_forward, Owner(), *tensors(2, 5, 5), m, **USUAL) for m in (None, mask)]
    return recognised(calls)


def test_points_and_work() -> None:
    found = both_definitions()
    traced = {"batch_size": 2, "q_len": 5, "kv_len": 5}
    for masked in (False, True):
        each = definition(found, masked=masked)
        known = {**traced, "mask_batch": 2} if masked else traced
        points = FAMILY.axis_points(each, [known])
        assert points[0] == known and len(points) >= 8
        assert all(holds(each.constraints, p) and set(p) == set(known) for p in points)
        assert any(p["q_len"] == 1 < p["kv_len"] for p in points) and any(p["q_len"] > 100 for p in points)
        assert any(p["q_len"] != p["kv_len"] and p["q_len"] > 1 for p in points) == masked
        for point in points[:5]:
            inputs = FAMILY.inputs(each, point, torch.Generator().manual_seed(0), "normal")
            assert bool(run_reference(each, inputs)[0].isfinite().all())
            assert FAMILY.work(inputs) == point["batch_size"] * point["q_len"]


@pytest.mark.parametrize("distribution", ["normal", "huge", "inf", "nan", "ramp"])
def test_fresh_inputs(distribution: Any) -> None:
    each = definition(both_definitions(), masked=True)
    axes = {"batch_size": 2, "q_len": 3, "kv_len": 4, "mask_batch": 1}
    query, key, value, mask = FAMILY.inputs(each, axes, torch.Generator().manual_seed(0), distribution)
    assert query.shape == (2, 4, 3, 8) and mask.shape == (1, 1, 3, 4) and mask.dtype == torch.bool
    (output,) = run_reference(each, (query, key, value, mask))
    broken = output.isnan().any(dim=-1)
    if distribution in ("inf", "nan"):  # one query of one head
        assert int(broken.sum()) == 1 and bool(broken[0, -1, 0])
    else:
        assert not bool(broken.any())
    assert distribution != "huge" or float(value.abs().max()) > 1e30


def test_the_comparison_tells_precision_apart() -> None:
    each = definition(both_definitions(), masked=False)
    source = each.reference
    inputs = FAMILY.inputs(each, {"batch_size": 1, "q_len": 9, "kv_len": 9}, torch.Generator().manual_seed(0), "normal")
    right = run_reference(each, inputs)[0]
    assert compare(source, inputs, right).acceptable
    assert not compare(source, inputs, right * (1 + 1e-4)).acceptable
    assert not compare(source, inputs, right.roll(1, dims=1)).acceptable
    assert not compare(source, inputs, right.fill_(float("nan"))).acceptable


def test_the_module_is_left_alone() -> None:
    made = model("Qwen3", "sdpa", torch.float32)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    sites = recorded(made)
    attributes = {name: set(vars(child)) for name, child in made.named_modules()}
    for site, calls in sites:
        recognised(calls, site)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert {name: set(vars(child)) for name, child in made.named_modules()} == attributes


def test_the_factory_stands_alone() -> None:
    """Its source is written into emitted files, which have `torch` and annotations only."""
    source = "from __future__ import annotations\n\nimport torch\n\n\n" + inspect.getsource(attention_seat)
    namespace: dict[str, Any] = {}
    exec(compile(source, "<emitted>", "exec"), namespace)
    found, args, seen = both_definitions(), tensors(1, 5, 5), []
    constants = FAMILY.seat(found.semantics).constants
    replacement = namespace["attention_seat"](sdpa_attention_forward, reference_of(found, seen), **constants)
    output = replacement(Owner(), *args, None, **USUAL)[0]
    assert torch.allclose(output, sdpa_attention_forward(Owner(), *args, None, **USUAL)[0], atol=1e-5)
    assert len(seen) == 1
