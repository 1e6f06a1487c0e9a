"""Families without sites: their Definitions, the references behind them, and our Solutions before the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3 import modeling_qwen3

from kernelgraft import families
from kernelgraft.evaluate import Captured, Judge, JudgeOptions
from kernelgraft.families import cross_entropy, qk_norm_rope, sampling
from kernelgraft.families.reference import reference_function, run_oracle, run_reference
from kernelgraft.families.unsited import Unsited
from kernelgraft.records import Definition, Evaluation, Solution, Status
from kernelgraft.sites.discover import discover

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

DEFINITIONS: dict[str, tuple[Definition, dict[str, int]]] = {
    "argmax": (sampling.definition_for(vocab_size=700, dtype=BF16), {"rows": 3}),
    "argmax of float32": (sampling.definition_for(vocab_size=1500, dtype=F32), {"rows": 2}),
    "top-k": (sampling.definition_for(vocab_size=300, dtype=F32, k=20, temperature=0.7, top_p=0.9), {"rows": 3}),
    "top-k, capped": (sampling.definition_for(vocab_size=40, dtype=BF16, k=50, softcap=5.0), {"rows": 2}),
    "loss": (cross_entropy.definition_for(hidden_size=48, vocab_size=90, dtype=F32), {"tokens": 6}),
    "loss of each": (
        cross_entropy.definition_for(
            hidden_size=32, vocab_size=70, dtype=BF16, reduction="none", softcap=5.0, scale=0.5, ignore_index=3
        ),
        {"tokens": 5},
    ),
    "heads": (
        qk_norm_rope.definition_for(num_heads=4, num_kv_heads=2, head_dim=32, dtype=BF16),
        {"batch_size": 2, "seq_len": 5, "table_batch": 1},
    ),
    "heads, mixed": (
        qk_norm_rope.definition_for(
            num_heads=3,
            num_kv_heads=1,
            head_dim=24,
            dtype=F32,
            eps=1e-5,
            norm={"cast": "after_weight", "offset": 1, "offset_dtype": "float32"},
            rope={"rotary_dim": 12, "placement": "last", "pairs_in": "interleaved", "table": "half"},
        ),
        {"batch_size": 2, "seq_len": 3, "table_batch": 2},
    ),
}


def fresh(name: str, seed: int = 0, distribution: Any = "normal") -> list[torch.Tensor]:
    definition, axes = DEFINITIONS[name]
    generator = torch.Generator().manual_seed(seed)
    return families.get(definition.meta.family).inputs(definition, axes, generator, distribution)


# The families


def test_research_asks_none_of_them() -> None:
    assert not set(families.UNSITED) & set(families.NAMES)
    for name in families.UNSITED:
        family = families.get(name)
        assert isinstance(family, Unsited) and family.name == name
        assert family.kinds == frozenset()
        with pytest.raises(NotImplementedError, match=f"`{name}`"):
            family.seat({})
    config = modeling_qwen3.Qwen3Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
    )
    sites = discover(modeling_qwen3.Qwen3ForCausalLM(config))
    assert sites and all(families.get(name).recognise(site, []) is None for name in families.UNSITED for site in sites)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_points_are_edges_with_few_rows_and_what_was_traced(name: str) -> None:
    definition, axes = DEFINITIONS[name]
    large = {axis: 1 if axis == "table_batch" else 40 for axis in axes}
    points = families.get(definition.meta.family).axis_points(definition, [axes, large])
    assert axes in points and large in points
    assert any(min(p.values()) == 1 for p in points) and len(points) > 8
    for point in points:
        rows = [size for axis, size in point.items() if axis != "table_batch"]
        assert torch.tensor(rows).prod() <= 150 or rows == [size for size in large.values() if size > 1]
        assert point.get("table_batch", 1) in (1, point.get("batch_size"))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions_describe_their_inputs_and_outputs(name: str) -> None:
    definition, axes = DEFINITIONS[name]
    sizes = {n: a.value for n, a in definition.axes.items() if a.value is not None} | axes
    inputs = fresh(name)
    for spec, value in zip(definition.inputs.values(), inputs, strict=True):
        assert list(value.shape) == [sizes[axis] for axis in spec.shape or ()]
        assert str(value.dtype) == f"torch.{spec.dtype}" and value.is_contiguous()
    for spec, value in zip(definition.outputs.values(), run_reference(definition, inputs), strict=True):
        assert list(value.shape) == [sizes[axis] for axis in spec.shape or ()]
        assert str(value.dtype) == f"torch.{spec.dtype}"
    assert definition.reference.startswith("# Source: ")
    assert families.get(definition.meta.family).work(inputs) >= 2
    again = fresh(name, distribution="ramp")
    assert [x.shape for x in again] == [x.shape for x in inputs]


def test_names_and_fingerprints_tell_variants_apart() -> None:
    found = [definition for definition, _ in DEFINITIONS.values()]
    found += [
        sampling.definition_for(vocab_size=300, dtype=F32, k=20, temperature=0.8, top_p=0.9),
        cross_entropy.definition_for(hidden_size=48, vocab_size=90, dtype=F32, ignore_index=-1),
        qk_norm_rope.definition_for(num_heads=4, num_kv_heads=2, head_dim=32, dtype=BF16, eps=1e-5),
    ]
    assert len({d.name for d in found}) == len({d.meta.fingerprint for d in found}) == len(found)
    cited = [d.reference.splitlines()[0] for d in found]
    assert any("generation/logits_process.py#L" in line for line in cited)
    assert any("loss/loss_utils.py#L" in line for line in cited)


# The references


def test_the_argmax_of_a_row_is_its_first_largest() -> None:
    run = reference_function(DEFINITIONS["argmax"][0])
    assert run(torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 9.0, 1.0]])).tolist() == [1, 0]


@pytest.mark.parametrize(("k", "top_p", "temperature"), [(5, 1.0, 1.0), (20, 0.7, 0.5), (40, 0.95, 2.0)])
def test_sampling_keeps_what_the_warpers_of_generation_keep(k: int, top_p: float, temperature: float) -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(k)) * 2
    scores = logits
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(k), TopPLogitsWarper(top_p)):
        scores = warper(torch.zeros(4, 1, dtype=torch.int64), scores)
    shares = torch.softmax(scores.double(), -1)
    definition = sampling.definition_for(vocab_size=60, dtype=F32, k=k, top_p=top_p, temperature=temperature)
    count = 4000
    u = (torch.arange(count) + 0.5) / count
    for row in range(4):
        found = reference_function(definition)(logits[row].expand(count, -1), u)
        counts = torch.bincount(found, minlength=60).double()
        assert ((counts - count * shares[row]).abs() <= 1.0).all()


def test_the_loss_is_that_of_the_logits() -> None:
    hidden, weight, labels = fresh("loss")
    expected = functional.cross_entropy(functional.linear(hidden, weight), labels)
    assert torch.equal(run_reference(DEFINITIONS["loss"][0], (hidden, weight, labels))[0], expected)
    (exact,) = run_oracle(DEFINITIONS["loss"][0], (hidden, weight, labels))
    assert exact.dtype is torch.float64


@pytest.mark.parametrize("style", ["weight after the cast", "one plus the weight before it"])
def test_heads_are_normed_and_turned_as_models_do(style: str) -> None:
    q, k, q_weight, k_weight, cos, sin = fresh("heads")
    if style.startswith("weight"):
        norms = [modeling_qwen3.Qwen3RMSNorm(32, eps=1e-6).to(BF16) for _ in range(2)]
        definition, apply = DEFINITIONS["heads"][0], modeling_qwen3.apply_rotary_pos_emb
    else:
        norms = [modeling_gemma3.Gemma3RMSNorm(32, eps=1e-6).to(BF16) for _ in range(2)]
        norm = {"cast": "after_weight", "offset": 1, "offset_dtype": "float32"}
        definition = qk_norm_rope.definition_for(num_heads=4, num_kv_heads=2, head_dim=32, dtype=BF16, norm=norm)
        apply = modeling_gemma3.apply_rotary_pos_emb
    with torch.no_grad():
        for norm_module, weight in zip(norms, (q_weight, k_weight), strict=True):
            norm_module.weight.copy_(weight)
        expected = apply(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)
    for found, wanted in zip(run_reference(definition, (q, k, q_weight, k_weight, cos, sin)), expected, strict=True):
        assert torch.equal(found, wanted)


# Before the judge


QUICK = JudgeOptions(
    seeds=1, captured=2, seeded_shapes=1, points=3, held_out=1, layouts=("transposed", "offset"), timeout_s=120.0
)


def ours(definition: Definition) -> Solution:
    pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")
    from test_suppliers import MACHINE

    from kernelgraft.suppliers.ours import OwnSupplier

    card = MACHINE.model_copy(update={"versions": {"cuda-tile": "1.7.0", "torch": "2.11.0"}})
    found = OwnSupplier(interpret=True).candidates(definition, card)
    assert isinstance(found, list) and len(found) == 1, found
    return found[0]


def judged(name: str, solution: Solution) -> Evaluation:
    definition, axes = DEFINITIONS[name]
    calls = [Captured(tuple(fresh(name, seed)), "prefill", f"number {seed}", axes) for seed in (1, 2)]
    with Judge(QUICK) as judge:
        return judge.verify(solution, definition, calls)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_our_solution_passes_the_judge(name: str) -> None:
    found = judged(name, ours(DEFINITIONS[name][0]))
    assert found.status is Status.PASSED, found.reason
    assert found.cases > 10 and found.refused == 0


WRONG = {
    "argmax": ("argmax(logits)", "argmax(-logits)"),
    "top-k": ("top_p=0.9", "top_p=0.8"),
    "loss": ("ignore_index=-100", "ignore_index=-1"),
    "heads": ("pairs_in='half'", "pairs_in='interleaved'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_does_not(name: str) -> None:
    right = ours(DEFINITIONS[name][0])
    text = right.sources[0].content
    assert WRONG[name][0] in text
    source = right.sources[0].model_copy(update={"content": text.replace(*WRONG[name])})
    found = judged(name, right.model_copy(update={"sources": (source,)}))
    assert found.status is Status.INCORRECT_NUMERICAL, found


def test_what_is_not_served_is_refused_in_words() -> None:
    from test_suppliers import MACHINE

    pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")
    from kernelgraft.suppliers.base import Refusal
    from kernelgraft.suppliers.ours import OwnSupplier

    card = MACHINE.model_copy(update={"versions": {"cuda-tile": "1.7.0", "torch": "2.11.0"}})
    refused = OwnSupplier(interpret=True).candidates(sampling.definition_for(vocab_size=900, dtype=F32, k=500), card)
    assert isinstance(refused, Refusal) and "k is 500" in refused.reason
