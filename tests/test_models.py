"""The model loader: specs, the bundled model, presets, shrinking, random weights and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernelgraft.errors import UsageError
from kernelgraft.models import (
    Loaded,
    causal_types,
    configuration,
    left_padded,
    load,
    pad_id,
    presets,
    prompt_ids,
    randomise,
    resolve,
    shrink,
    wrap,
)
from kernelgraft.models.randomising import make_decisive
from kernelgraft.models.shrinking import quiet
from kernelgraft.models.specs import TINY

PROMPT = "The capital of France is"
PARAMETERS = {
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "olmo-3-7b": 7_298_011_136,
    "olmoe": 6_919_161_856,
    "phi-3-mini": 3_821_079_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-0.8b": 752_393_024,
}
# Plain, windowed, 1 + w scales, latent attention, experts, state space, hybrids, learned positions, nested.
DIVERSE = [
    "llama",
    "gemma2",
    "gemma4_text",
    "deepseek_v3",
    "qwen3_next",
    "gpt_oss",
    "mamba2",
    "jamba",
    "gpt2",
    "bart",
    "llama4",
    "rwkv",
]
# Models of audio codes, assistants fed by another model's cache, byte patches, a vision tower from an optional package.
NOT_FROM_TEXT = {"musicgen", "musicgen_melody", "gemma4_assistant", "gemma4_unified_assistant", "blt", "gemma3n"}


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return load("tiny")


# --- specs


@pytest.mark.parametrize(
    ("spec", "kind", "name"),
    [
        ("tiny", "tiny", "tiny"),
        ("llama-3.2-1b", "preset", "llama-3.2-1b"),
        ("config:gpt2", "config", "gpt2"),
        ("owner/some.model-7B", "hub", "owner/some.model-7B"),
        (str(TINY), "folder", "tiny"),
    ],
)
def test_resolve_says_what_a_spec_means(spec: str, kind: str, name: str) -> None:
    ref = resolve(spec)
    assert (ref.spec, ref.kind, ref.name) == (spec, kind, name)
    assert (ref.path is not None and ref.path.exists()) == (kind in ("tiny", "preset", "folder"))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("tinny", "did you mean `tiny`"),
        ("qwen3-0.6", "`qwen3-0.6b`"),
        ("llama", "did you mean `config:llama`"),
        ("config:lama", "`config:llama`"),
        ("config:xyzzy", "no causal model type"),
        ("no such thing", "`config:<model_type>`"),
        ("", "give `tiny`"),
        ("./missing", "does not exist"),
        ("/missing/model", "does not exist"),
        ("a/b/c", "does not exist"),
    ],
)
def test_a_wrong_spec_is_named_with_the_next_step(spec: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(spec)
    message = str(caught.value)
    assert f"`{spec}`" in message and expected in message and "\n" not in message


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("text", ['{"model_type": "nonsense"}', "{broken", '{"model_type": "gpt2"}'])
def test_a_folder_that_cannot_load_fails_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        load(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_hub_id_without_a_network_fails_in_one_line() -> None:
    with pytest.raises(UsageError, match="check the id and the network") as caught:
        load("owner/never-downloaded")
    assert "`owner/never-downloaded`" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["gpuu", "cuda:99"])
def test_a_wrong_device_is_named(device: str) -> None:
    with pytest.raises(UsageError, match=f"`{device}`"):
        load("tiny", device=device)


# --- the bundled model


@torch.no_grad()
def test_tiny_continues_with_paris_by_a_clear_margin(tiny: Loaded) -> None:
    ids = prompt_ids(tiny, PROMPT)
    out = tiny.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
    new = out[0, ids.shape[1] :]
    assert tiny.tokenizer.decode(new).startswith(" Paris")
    assert len(new) == 64 and tiny.tokenizer.eos_token_id not in new.tolist()
    top = tiny.model(out).logits[0, ids.shape[1] - 1 : -1].topk(2).values
    assert (top[:12, 0] - top[:12, 1]).min() >= 2


def test_tiny_has_room_and_scales_that_matter(tiny: Loaded) -> None:
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 2_000_000
    norms = [(n, p) for n, p in tiny.model.named_parameters() if "norm" in n]
    assert len(norms) == 13  # 4 a layer (2 on the residual, 2 on heads) and the last
    assert all((p - 1).abs().mean() > 0.1 for _, p in norms)


def test_tiny_loads_in_the_dtype_that_is_asked_for(tiny: Loaded) -> None:
    assert tiny.dtype == torch.float32 and not tiny.model.training
    assert load("tiny", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load(str(TINY)).dtype == torch.bfloat16  # a folder keeps what it stores


def test_a_folder_without_a_tokenizer_loads_without_one(tiny: Loaded, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert loaded.tokenizer is None and loaded.ref.kind == "folder"
    ours, stored = loaded.model.state_dict(), tiny.model.state_dict()
    assert all(torch.equal(ours[name], stored[name]) for name in stored)


def test_wrap_takes_a_live_model_as_it_is(tiny: Loaded) -> None:
    loaded = wrap(tiny.model, tiny.tokenizer, "mine")
    assert loaded.model is tiny.model and loaded.ref.kind == "live" and loaded.ref.name == "mine"
    assert loaded.dtype == torch.float32
    with pytest.raises(UsageError, match="`Linear` is not a transformers model"):
        wrap(torch.nn.Linear(2, 2))


# --- presets


def test_every_preset_has_its_published_number_of_parameters() -> None:
    assert presets() == sorted(PARAMETERS)
    for name in presets():
        config = configuration(resolve(name))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name], name


def test_every_preset_states_where_its_dimensions_come_from() -> None:
    for name in presets():
        path = resolve(name).path
        assert path is not None
        preset = json.loads(path.read_text())
        assert "config.json of " in preset["note"] and f"{PARAMETERS[name]:,}" in preset["note"]
        assert preset["model_type"] in causal_types()


def test_presets_of_experts_and_of_two_kinds_of_attention_keep_their_published_sizes() -> None:
    experts = {
        name: (config.num_local_experts, config.num_experts_per_tok, config.norm_topk_prob, config.num_key_value_heads)
        for name in ("qwen3-30b-a3b", "olmoe")
        if (config := configuration(resolve(name)))
    }
    assert experts == {"qwen3-30b-a3b": (128, 8, True, 4), "olmoe": (64, 8, False, 16)}
    sinks = configuration(resolve("gpt-oss-20b"))
    assert sinks.layer_types.count("sliding_attention") == 12 and sinks.sliding_window == 128
    hybrid = configuration(resolve("qwen3.5-0.8b"))
    assert hybrid.layer_types.count("full_attention") == 6 and hybrid.layer_types[3] == "full_attention"
    assert hybrid.rope_parameters["partial_rotary_factor"] == 0.25


def test_a_preset_shrinks_with_its_relations_kept() -> None:
    config = configuration(resolve("gemma-3-1b"))
    small = shrink(config)
    assert type(small) is type(config) and config.hidden_size == 1152
    assert small.layer_types == ["sliding_attention", "full_attention"] and small.sliding_window == 8
    assert small.num_key_value_heads == 1 and small.hidden_size == small.num_attention_heads * small.head_dim
    assert max(small.bos_token_id, small.eos_token_id, small.pad_token_id) < small.vocab_size == 256
    assert small.rope_parameters == config.rope_parameters


# --- shrinking and random weights


def _fresh(model: PreTrainedModel) -> PreTrainedModel:
    with quiet():
        torch.default_generator.manual_seed(0)
        return type(model)._from_config(model.config)


@pytest.mark.parametrize("name", DIVERSE)
@torch.no_grad()
def test_any_architecture_shrinks_and_every_parameter_is_random(name: str) -> None:
    before = torch.random.get_rng_state()
    loaded = load(f"config:{name}", seed=0)  # the seed of `_fresh`: without `randomise` both would be equal
    model = loaded.model
    assert torch.equal(torch.random.get_rng_state(), before)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    ids = prompt_ids(loaded, PROMPT)
    with quiet():
        logits = model(ids).logits
        out = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert logits.isfinite().all() and logits.std() > 0.01 and out.shape == (1, len(PROMPT) + 4)
    initial = _fresh(model)
    pairs = list(zip(initial.named_parameters(), model.named_parameters(), strict=True))
    assert not [n for (n, old), (m, new) in pairs if n != m or torch.equal(old, new)]
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight  # tied stays tied


def test_constant_vectors_spread_around_their_initial_value() -> None:
    model = load("config:qwen3_next").model  # has 1 + w scales that start at zero and plain ones that start at one
    around_zero = model.model.norm.weight
    around_one = next(p for n, p in model.named_parameters() if n.endswith("linear_attn.norm.weight"))
    assert around_zero.abs().max() <= 0.5 and around_zero.abs().mean() > 0.15
    assert around_one.min() >= 0.5 and around_one.max() <= 1.5 and around_one.std() > 0.15


def test_patterned_parameters_keep_their_signs() -> None:
    model = load("config:mamba2").model
    before = dict(_fresh(model).named_parameters())
    # Steps start at random: seed 0 of the loader is the seed of `_fresh`.
    decays = [(before[n], p) for n, p in model.named_parameters() if n.endswith(("A_log", "dt_bias"))]
    assert len(decays) == 4
    for old, new in decays:
        assert not torch.equal(old, new) and ((old == 0) | (old.sign() == new.sign())).all()
        assert ((new - old).abs() <= 0.25 * old.abs().max() + 1e-6).all()


def test_a_pattern_that_begins_alike_is_no_constant() -> None:
    class Gates(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.Parameter(torch.cat([torch.ones(1500), torch.arange(2.0, 502.0)]))

        def forward(self, input_ids: torch.Tensor) -> Any:
            return SimpleNamespace(logits=self.steps)

    model = Gates()
    before = model.steps.detach().clone()
    randomise(model, 0)
    assert not torch.equal(model.steps, before)
    assert ((model.steps - before).abs() <= 0.25 * before + 1e-6).all()


def test_random_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        return load("config:qwen3", seed=seed).model.state_dict()

    first = weights(3)
    torch.rand(5)  # another state of the global generator
    again, other = weights(3), weights(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_randomise_leaves_the_global_generator_alone_and_tied_weights_tied() -> None:
    model = _fresh(load("config:gemma").model)
    before = torch.random.get_rng_state()
    embedding = model.get_input_embeddings().weight.clone()
    randomise(model, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not torch.equal(model.lm_head.weight, embedding)


@torch.no_grad()
def test_a_decisive_head_prefers_some_tokens() -> None:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=20_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_key_value_heads, config.head_dim, config.tie_word_embeddings = 1, 32, False
    with quiet():
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    ids = torch.arange(64)[None]

    def read() -> tuple[float, float]:
        logits = model(ids).logits[0]
        shares = logits.softmax(-1)
        best = logits.topk(2).values
        return float(-(shares * shares.log()).sum(-1).mean()), float((1 - best[:, 1] / best[:, 0]).median())

    others = {name: p.clone() for name, p in model.named_parameters() if name != "lm_head.weight"}
    (even, near), scaled = read(), model.lm_head.weight
    before = scaled.clone()
    make_decisive(model, 0)
    entropy, gap = read()
    assert even > 9 and 1 < entropy < 8 and gap > 1.5 * near  # of 9.9 for all tokens alike
    assert all(torch.equal(p, others[name]) for name, p in model.named_parameters() if name in others)
    ratio = scaled / before
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4) and 0.4 < ratio[:, 0].log().std() < 0.6
    make_decisive(torch.nn.Linear(2, 2), 0)  # without a head nothing happens


def test_presets_are_decisive(monkeypatch: pytest.MonkeyPatch) -> None:
    small = configuration(resolve("config:llama"))
    monkeypatch.setattr("kernelgraft.models.loading.configuration", lambda ref: small)
    spread = [load(spec).model.lm_head.weight.norm(dim=1).log().std() for spec in ("llama-3.2-1b", "config:llama")]
    assert spread[0] > 0.4 > 0.2 > spread[1]


def test_what_cannot_shrink_says_why() -> None:
    # Its ids are audio codes of several books at once, not text.
    with pytest.raises(UsageError, match=r"`musicgen` cannot be shrunk .*shape") as caught:
        load("config:musicgen")
    assert "\n" not in str(caught.value)


def test_shrink_leaves_its_argument_alone() -> None:
    config = AutoConfig.for_model("qwen3")
    before = config.to_dict()
    small = shrink(config)
    assert config.to_dict() == before and small.num_hidden_layers == 2 and small.hidden_size == 64


@pytest.mark.slow
def test_all_causal_types_load_but_a_known_few() -> None:
    failed = {}
    for name in causal_types():
        try:
            load(f"config:{name}")
        except UsageError as error:
            failed[name] = str(error)
    assert set(failed) <= NOT_FROM_TEXT, failed


# --- prompts


def test_without_a_tokenizer_text_becomes_ordinary_ids() -> None:
    loaded = load("config:llama")
    text = "\x00\x01\x02" + PROMPT  # bytes that would be special ids if they were taken as they are
    ids = prompt_ids(loaded, text)
    assert ids.dtype == torch.int64 and ids.shape == (1, len(text))
    config = loaded.model.config
    assert not {config.bos_token_id, config.eos_token_id} & set(ids.flatten().tolist())
    assert ids.min() >= 0 and ids.max() < config.vocab_size
    assert len(set(ids.flatten().tolist())) == len(set(text))  # each letter its own id
    with pytest.raises(UsageError, match="no tokens"):
        prompt_ids(loaded, "")


@torch.no_grad()
def test_a_left_padded_row_continues_as_it_does_alone(tiny: Loaded) -> None:
    texts = [PROMPT, "Question: Which city is the capital of Japan? Answer:"]
    ids, mask = left_padded(tiny, texts)
    assert ids.dtype == mask.dtype == torch.int64 and ids.shape == mask.shape
    padding = ids.shape[1] - prompt_ids(tiny, PROMPT).shape[1]
    assert padding > 0 and mask[0].tolist() == [0] * padding + [1] * (ids.shape[1] - padding)
    assert (ids[0, :padding] == tiny.tokenizer.pad_token_id).all() and mask[1].all()
    out = tiny.model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    alone = prompt_ids(tiny, PROMPT)
    single = tiny.model.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=8, do_sample=False)
    assert torch.equal(out[0, padding:], single[0])
    assert tiny.tokenizer.decode(out[1, ids.shape[1] :]).startswith(" Tokyo")
    with pytest.raises(UsageError, match="is empty"):
        left_padded(tiny, [])


def test_a_pad_id_is_found_where_none_is_defined() -> None:
    loaded = load("config:mpt")
    assert loaded.model.config.pad_token_id is None
    assert 0 <= pad_id(loaded) < loaded.model.config.vocab_size
    assert loaded.model.generation_config.pad_token_id == pad_id(loaded)
