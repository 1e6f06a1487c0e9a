"""Layouts on live models: the same numbers, files and training as before; reverted to the same objects and bits."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import layout_samples as samples
import pytest
import torch
from layout_samples import (
    EVERYTHING,
    FUSED,
    IDS,
    KEPT,
    MERGED_GATE_UP,
    MERGED_QKV,
    RENAME,
    generated,
    loaded,
    logits,
    tiny,
)
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Concatenate,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    WeightConverter,
)
from transformers.conversion_mapping import WeightRenaming
from transformers.models.llama import modeling_llama

from kernelgraft import models
from kernelgraft.errors import ConflictError, GraftError, UsageError
from kernelgraft.layouts.applying import apply_layouts, find_layouts
from kernelgraft.layouts.records import LoadedKernel

apply = functools.partial(apply_layouts, check=False)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SETS = {
    "rename": (RENAME,),
    "chain": (FUSED,),
    "chain beside a rename": (RENAME, FUSED),
    "rename beside a chain": (FUSED, RENAME),
    "kept children": (KEPT,),
    "parallel gate and up": (MERGED_GATE_UP,),
    "parallel q, k and v": (MERGED_QKV,),
    "residual": (samples.ADDED,),
    "two fusions under one parent": (samples.ADDED, loaded(samples.NORM_MLP[1:], samples.OneMLP, samples.OneMLPLayout)),
    "everything": EVERYTHING,
}
every_set = pytest.mark.parametrize("kernels", SETS.values(), ids=SETS)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=0, atol=0, msg=key)


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def reloaded(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


# --- numbers ---


@every_set
def test_numbers_are_the_same_and_reverting_gives_back_objects_and_bits(kernels: Sequence[LoadedKernel]) -> None:
    model = tiny()
    before, state, tokens = logits(model), bits(model), generated(model)
    objects, modules = dict(model.named_parameters()), dict(model.named_modules())
    applied = apply(model, kernels)
    assert any(row["state"] == "replaced" for row in applied.report())
    assert not any(module.training for module in model.modules())
    assert torch.equal(logits(model), before)
    assert torch.equal(generated(model), tokens)
    assert torch.equal(generated(model, cache_implementation="static", disable_compile=True), tokens)
    assert_same(applied.state_dict(), state)
    applied.revert()
    assert not applied.active and find_layouts(model) is None
    after = dict(model.named_parameters())
    assert list(after) == list(objects) and all(after[key] is objects[key] for key in objects)
    assert dict(model.named_modules()) == modules
    assert_same(bits(model), state)
    assert torch.equal(logits(model), before)
    assert all(p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes for p in objects.values())
    applied.revert()


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "glm4", "mixtral", "qwen3_moe", "smollm3"]
)
def test_a_renaming_layout_fits_every_norm_of_a_model(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    before, state = logits(model), bits(model)
    applied = apply(model, [RENAME])
    assert not [name for name, _ in model.named_parameters() if name.endswith("norm.weight")]
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    assert_same(bits(reloaded(tmp_path)), state)
    applied.revert()
    assert_same(bits(model), state)


class GainLayerNormLayout(nn.Module):
    conversion_mapping: ClassVar = [WeightRenaming("weight", "gain"), WeightRenaming("bias", "shift")]

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(normalized_shape))
        self.shift = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps


class GainLayerNorm(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(input, self.gain.shape, self.gain, self.shift, self.eps)


@pytest.mark.parametrize(("model_type", "count"), [("gpt_neox", 5), ("opt", 5)])
def test_a_class_of_torch_is_replaced_like_any_other(model_type: str, count: int, tmp_path: Path) -> None:
    model = tiny(model_type, word_embed_proj_dim=32, ffn_dim=48)
    before, state = logits(model), bits(model)
    applied = apply(model, [loaded("LayerNorm", GainLayerNorm, GainLayerNormLayout)])
    assert len(applied.report()) == count
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    assert_same(bits(reloaded(tmp_path)), state)


def test_a_rule_reaches_the_replaced_modules_and_no_other_tower(tmp_path: Path) -> None:
    vision = CLIPVisionConfig(
        **{
            k: samples.SMALL[k]
            for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        },
        image_size=8,
        patch_size=4,
    )
    text = LlamaConfig(**samples.SMALL)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=63)).eval()
    models.randomise(model, seed=3)
    before, state = logits(model), bits(model)
    key = tuple((name, path.replace("model.", "model.language_model.", 1)) for name, path in samples.NORM_MLP)
    renamed = loaded("RMSNorm", samples.CustomRMSNorm, samples.CustomRMSNormLayout)
    applied = apply(model, [renamed, loaded(key, samples.RMSNormMLP, samples.RMSNormMLPLayout)])
    assert not [row for row in applied.report() if "vision" in row["path"]]
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    plain, info = LlavaForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same(bits(plain), state)


def test_arguments_of_other_names_are_given_by_position() -> None:
    model = tiny("gemma2")
    before = logits(model)
    with apply(model, [loaded("RMSNorm", samples.OffsetRMSNorm, samples.OffsetRMSNormLayout)]) as applied:
        assert {row["state"] for row in applied.report()} == {"replaced"}
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "granite", "smollm3", "qwen3"])
def test_the_chain_fits_models_of_that_data_flow_in_bf16(model_type: str) -> None:
    model = tiny(model_type, torch.bfloat16)
    before = logits(model)
    with apply(model, [FUSED]):
        torch.testing.assert_close(logits(model), before, rtol=0.05, atol=0.05)


def test_q_k_and_v_of_unequal_sizes_and_with_biases_are_merged(tmp_path: Path) -> None:
    model = tiny("qwen2")
    assert model.model.layers[0].self_attn.k_proj.bias is not None
    before, state = logits(model), bits(model)
    apply(model, [MERGED_QKV])
    assert model.model.layers[1].self_attn.q_proj.qkv.weight.shape == (64, 32)
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    assert_same(bits(reloaded(tmp_path)), state)


def test_a_kernel_without_a_layout_runs_on_the_module_itself() -> None:
    model = tiny()
    before, norm = logits(model), model.model.norm
    forward = type(norm).forward
    applied = apply(model, [loaded("Qwen3RMSNorm", samples.Stateless)])
    assert model.model.norm is norm and norm.forward.__func__.__wrapped__ is samples.Stateless.forward
    assert torch.equal(logits(model), before)
    model.train()
    assert norm.forward.__func__.__wrapped__ is samples.Stateless.forward, "train() does not bring the original back"
    applied.revert()
    assert norm.forward.__func__ is forward


def test_merged_tensors_have_one_storage_and_the_originals_are_views() -> None:
    model = tiny()
    gate, up = (getattr(model.model.layers[0].mlp, name).weight for name in ("gate_proj", "up_proj"))
    applied = apply(model, [FUSED])
    merged = model.model.layers[0].post_attention_layernorm.gate_up_proj.weight
    for part in (gate, up):
        assert part.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()
    with torch.no_grad():
        merged.fill_(2.0)
    assert bool((gate == 2).all()) and bool((up == 2).all())
    applied.revert()
    assert model.model.layers[0].mlp.gate_proj.weight is gate and bool((gate == 2).all())


def test_shares_of_one_call_never_serve_another() -> None:
    model = tiny()
    attention = model.model.layers[0].self_attn
    parts = [getattr(attention, f"{name}_proj") for name in "qkv"]
    apply(model, [MERGED_QKV])
    mine = [getattr(attention, f"{name}_proj") for name in "qkv"]
    one, other = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    whole, calls = type(mine[0])._kernelgraft_whole, []
    mine[0].qkv.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        for x in (one, other):
            for part, old in zip(mine, parts, strict=True):
                torch.testing.assert_close(part(x), old(x))
        assert len(calls) == 2 and whole is type(mine[0])._kernelgraft_whole
        torch.testing.assert_close(mine[0](one), parts[0](one))
        torch.testing.assert_close(mine[1](other), parts[1](other))
        torch.testing.assert_close(mine[2](one), parts[2](one))
        torch.testing.assert_close(mine[2](one), parts[2](one))
        torch.testing.assert_close(mine[0](one), parts[0](one))
        one.mul_(2)
        torch.testing.assert_close(mine[1](one), parts[1](one))
    assert mine[0](one).requires_grad and mine[1](one).requires_grad
    assert torch.equal(generated(copy.deepcopy(model)), generated(model))
    with torch.inference_mode():
        torch.testing.assert_close(mine[1](one), parts[1](one))


def test_a_reverted_layout_is_freed() -> None:
    model = tiny()
    applied = apply(model, EVERYTHING)
    gone = weakref.ref(model.model.layers[0].mlp.gate_proj.gate_up.weight)
    applied.revert()
    gc.collect()
    assert gone() is None and {row["state"] for row in applied.report()} >= {"reverted"}


# --- which modules ---


def test_one_named_layer_is_one_replaced_layer() -> None:
    model = tiny()
    key = tuple((name, path.replace("*", "1")) for name, path in samples.NORM_MLP)
    applied = apply(model, [loaded(key, samples.RMSNormMLP, samples.RMSNormMLPLayout)])
    assert [row["path"] for row in applied.report() if row["state"] == "replaced"] == [
        "model.layers.1.post_attention_layernorm"
    ]
    assert type(model.model.layers[0].mlp).__name__ == "Qwen3MLP"


def test_another_model_of_the_class_and_the_class_itself_stay() -> None:
    model, other = tiny(), tiny()
    before = {name: type(module) for name, module in other.named_modules()}
    attributes = dict(vars(samples.RMSNormMLPLayout))
    apply(model, EVERYTHING)
    assert {name: type(module) for name, module in other.named_modules()} == before
    assert {name: type(module) for name, module in tiny().named_modules()} == before
    assert dict(vars(samples.RMSNormMLPLayout)) == attributes
    assert torch.equal(logits(model), logits(other))


def test_a_dense_layer_of_a_mixture_is_fused_and_the_others_stay() -> None:
    model = tiny("qwen3_moe", mlp_only_layers=[0], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    before = logits(model)
    key = (("RMSNorm", samples.NORM_MLP[0][1]), ("M", samples.NORM_MLP[1][1]))
    with pytest.raises(UsageError, match=r"cannot be built for `model\.layers\.1"):
        apply(model, [loaded(key, samples.RMSNormMLP, samples.RMSNormMLPLayout)])
    applied = apply(model, [FUSED])
    states = {row["path"]: row["state"] for row in applied.report()}
    assert states["model.layers.0.mlp"] == "passed on" and states["model.layers.1.mlp"] == "untouched"
    assert torch.equal(logits(model), before)


# --- files ---


@every_set
def test_a_saved_model_is_the_original_for_plain_transformers(kernels: Sequence[LoadedKernel], tmp_path: Path) -> None:
    model = tiny()
    before, state = logits(model), bits(model)
    apply(model, kernels)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    plain = reloaded(tmp_path)
    assert_same(bits(plain), state)
    assert torch.equal(logits(plain), before)
    assert torch.equal(logits(model), before)


@every_set
def test_training_is_the_same_and_what_was_trained_is_saved_and_given_back(
    kernels: Sequence[LoadedKernel], tmp_path: Path
) -> None:
    model, plain = tiny(), tiny()
    applied = apply(model, kernels)
    for one in (model, plain):
        one.train()
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(one).backward()
            optimizer.step()
    gradients = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    torch.testing.assert_close(applied.state_dict(), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    saved = bits(reloaded(tmp_path))
    assert_same(saved, applied.state_dict())
    applied.revert()
    assert model.training and all(module.training for module in model.modules())
    assert_same(bits(model), saved)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss_of(model), loss_of(plain), rtol=1e-5, atol=1e-6)


def test_gradients_from_before_are_kept() -> None:
    model = tiny().train()
    loss_of(model).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    applied = apply(model, EVERYTHING)
    layer = model.model.layers[0]
    wanted = torch.cat([gradients[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(layer.mlp.gate_proj.gate_up.weight.grad, wanted)
    applied.revert()
    assert_same({name: p.grad for name, p in model.named_parameters()}, gradients)


def test_nothing_stays_behind_and_the_mode_is_kept() -> None:
    model = tiny().train()
    applied = apply(model, EVERYTHING)
    assert all(module.training for module in model.modules())
    assert any(module._load_state_dict_pre_hooks for module in model.modules())
    applied.revert()
    for module in model.modules():
        assert not module._load_state_dict_pre_hooks
        assert not [name for name in vars(module) if "kernelgraft" in name or name == "forward"]


@every_set
def test_a_state_dict_speaks_of_the_parameters_and_either_form_is_loaded(kernels: Sequence[LoadedKernel]) -> None:
    model, other = tiny(), tiny()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    original = bits(other)
    applied = apply(model, kernels)
    assert set(model.state_dict()) - {"lm_head.weight"} == {name for name, _ in model.named_parameters()} - {
        "lm_head.weight"
    }
    model.load_state_dict(original)
    assert_same(applied.state_dict(), original)
    converted = bits(model)
    model.load_state_dict({key: value * 2 for key, value in converted.items()})
    assert_same(applied.state_dict(), {key: value * 2 for key, value in original.items()})
    applied.revert()
    model.load_state_dict(original)
    assert_same(bits(model), original)


def test_a_part_of_the_model_saves_original_names_too(tmp_path: Path) -> None:
    model = tiny()
    state = bits(model.model)
    apply(model, [FUSED])
    model.model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    assert_same(load_file(tmp_path / "model.safetensors"), state)


def test_saving_as_before_after_the_last_revert(tmp_path: Path) -> None:
    model = tiny()
    first = apply(model, [MERGED_QKV])
    second = apply(model, [FUSED])
    first.revert()
    model.save_pretrained(tmp_path / "one")
    reloaded(tmp_path / "one")
    second.revert()
    assert "save_pretrained" not in vars(model) and not any(name.startswith("_kernelgraft") for name in vars(model))


# --- what else must survive ---


@every_set
def test_a_deep_copy_runs_saves_and_reverts_by_itself(kernels: Sequence[LoadedKernel], tmp_path: Path) -> None:
    model = tiny()
    before, state = logits(model), bits(model)
    applied = apply(model, kernels)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(other), before)
    other.save_pretrained(tmp_path)
    assert_same(bits(reloaded(tmp_path)), state)
    mine = find_layouts(other)
    assert mine is not None and mine is not applied
    mine.revert()
    assert_same(bits(other), state)
    assert torch.equal(logits(other), before)
    assert applied.active and find_layouts(model) is applied


def test_a_pickle_is_refused_in_words_or_is_the_original() -> None:
    model = tiny()
    try:
        pickle.dumps(model)
    except AttributeError as error:
        pytest.skip(f"the plain model cannot be pickled with `kernels` installed: {error}")
    before = logits(model)
    with apply(model, EVERYTHING):
        with pytest.raises(UsageError, match="cannot be pickled; use `save_pretrained`"):
            pickle.dumps(model)
        shallow = copy.copy(model.model.norm)
        assert type(shallow) is type(model.model.norm) and shallow.scale is model.model.norm.scale
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), before)
    apply(model, [loaded("Qwen3RMSNorm", samples.Stateless)])
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(again), before) and find_layouts(again) is None


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    before = logits(model)
    applied = apply(model, EVERYTHING)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(reloaded(tmp_path)), before)
    applied.revert()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_hidden_states_and_attentions_are_recorded() -> None:
    model = tiny()
    wanted = model(IDS, output_hidden_states=True, output_attentions=True)
    apply(model, EVERYTHING)
    got = model(IDS, output_hidden_states=True, output_attentions=True)
    for kind in ("hidden_states", "attentions"):
        assert len(got[kind]) == len(wanted[kind])
        for one, other in zip(got[kind], wanted[kind], strict=True):
            assert torch.equal(one, other)


class AttentionLayout(nn.Module):
    """One projection for q, k and v inside the attention: a string key, of unequal parts."""

    conversion_mapping: ClassVar = [
        WeightConverter(
            [f"self_attn.{name}_proj.weight" for name in "qkv"], "self_attn.qkv_proj.weight", [Concatenate(dim=0)]
        )
    ]

    def __init__(self, config: Any, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.sizes = [config.head_dim * n for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=False)


class Attention(nn.Module):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.config.head_dim)
        query, key, value = (
            part.view(shape).transpose(1, 2) for part in self.qkv_proj(hidden_states).split(self.sizes, -1)
        )
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        scaling = self.config.head_dim**-0.5
        output, weights = modeling_llama.eager_attention_forward(self, query, key, value, attention_mask, scaling)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights


class OldAttention(nn.Module):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        return Attention.forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


def test_an_attention_layout_decodes_saves_and_is_recorded(tmp_path: Path) -> None:
    model = tiny("llama")
    state, tokens = bits(model), generated(model)
    wanted = model(IDS, output_attentions=True).attentions
    own = type(model.model.layers[0].self_attn)
    right, wrong, name = Attention, OldAttention, "cache"
    if name not in inspect.signature(own.forward).parameters:
        right, wrong, name = OldAttention, Attention, "past_key_values"
    with pytest.raises(UsageError, match=f"`{name}`"):
        apply(model, [loaded("Attention", wrong, AttentionLayout)])
    applied = apply(model, [loaded("Attention", right, AttentionLayout)])
    attention = model.model.layers[0].self_attn
    assert attention.qkv_proj.weight.shape == (64, 32) and isinstance(attention, own)
    assert torch.equal(generated(model), tokens)
    got = model(IDS, output_attentions=True).attentions
    assert len(got) == 2 and all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    model.save_pretrained(tmp_path)
    assert_same(bits(reloaded(tmp_path)), state)
    assert torch.equal(generated(copy.deepcopy(model)), tokens)
    applied.revert()
    assert_same(bits(model), state)
    assert len(model(IDS, output_attentions=True).attentions) == 2


def test_reverting_what_was_offloaded_since_is_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    before = logits(model)
    applied = apply(model, EVERYTHING)
    accelerate.dispatch_model(model, {"model": "disk", "lm_head": "cpu"}, main_device="cpu", offload_dir=str(tmp_path))
    with pytest.raises(GraftError, match="is offloaded"):
        applied.revert()
    accelerate.hooks.remove_hook_from_submodules(model)
    applied.revert()
    assert torch.equal(logits(model), before)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, plain = tiny(), tiny()
    applied = apply(model, EVERYTHING)
    for one in (model, plain):
        one.train()
        one.gradient_checkpointing_enable()
        loss_of(one).backward()
    applied.revert()
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_torch_compile_traces_it_whole() -> None:
    model = tiny()
    before = logits(model)
    apply(model, EVERYTHING)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled), before)
    torch._dynamo.reset()


def test_half_and_back_reverts_in_the_dtype_of_now() -> None:
    model = tiny()
    applied = apply(model, EVERYTHING)
    part = model.model.layers[0].mlp.gate_proj
    original = weakref.ref(part._kernelgraft_views.originals["model.layers.0.mlp.up_proj.weight"])
    model.to(torch.bfloat16)
    storage = part.gate_up.weight.untyped_storage().data_ptr()
    assert original().untyped_storage().data_ptr() == storage, "the old storage is not kept alive"
    copied = copy.deepcopy(model)
    views = copied.model.layers[0].mlp.gate_proj._kernelgraft_views
    assert {t.numel() for t in views.originals.values()} == {0}, "a copy has the values once"
    other = copied.to(torch.float16).model.layers[0].mlp.gate_proj
    assert {t.dtype for t in other._kernelgraft_views.originals.values()} == {torch.float16}
    assert original().untyped_storage().data_ptr() == storage
    wanted = applied.state_dict()
    applied.revert()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_same(bits(model), wanted)


def test_frozen_parameters_stay_frozen() -> None:
    model = tiny()
    model.requires_grad_(False)
    applied = apply(model, EVERYTHING)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    applied.revert()
    assert all(p.requires_grad for p in model.parameters())
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    with pytest.raises(UsageError, match="are frozen and some are not"):
        apply(model, [FUSED])


def test_hooks_move_with_their_handles() -> None:
    model = tiny()
    layer = model.model.layers[0]
    seen: list[str] = []
    handles = [
        layer.input_layernorm.register_forward_hook(lambda *_: seen.append("norm")),
        layer.post_attention_layernorm.register_forward_pre_hook(lambda *_: seen.append("before")),
        layer.mlp.register_forward_hook(lambda *_: seen.append("after")),
    ]
    wanted: list[torch.Tensor] = []
    handles.append(layer.mlp.register_forward_hook(lambda _m, _a, out: wanted.append(out)))
    logits(model)
    applied = apply(model, [RENAME, FUSED])
    logits(model)
    assert seen == ["norm", "before", "after"] * 2 and torch.equal(wanted[0], wanted[1])
    for handle in handles:
        handle.remove()
    logits(model)
    assert len(seen) == 6
    later = model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append("later"))
    applied.revert()
    logits(model)
    later.remove()
    logits(model)
    assert seen[6:] == ["later"]


class Watcher:
    def __deepcopy__(self, memo: Any) -> None:
        raise AssertionError("what a hook is bound to was copied")

    def watch(self, *_: Any) -> None:
        return None


def test_what_a_hook_is_bound_to_is_not_copied() -> None:
    model = tiny()
    model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(Watcher().watch)
    model.model.layers[0].mlp.down_proj.__dict__["watcher"] = Watcher()
    with apply(model, [FUSED]):
        assert len(model.model.layers[0].post_attention_layernorm._forward_pre_hooks) == 1


@pytest.mark.parametrize("path", ["post_attention_layernorm", "mlp.gate_proj"])
def test_a_hook_on_what_vanishes_is_refused(path: str) -> None:
    model = tiny()
    model.model.layers[1].get_submodule(path).register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match=rf"`model\.layers\.1\.{path}` has a hook"):
        apply(model, [FUSED])
    assert find_layouts(model) is None


def test_an_adapter_that_is_kept_works_and_what_it_would_lose_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny()
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    before = logits(adapted)
    with pytest.raises(UsageError, match=r"adapter"):
        apply(adapted, [FUSED])
    with pytest.raises(UsageError, match=r"adapter"):
        apply(adapted, [MERGED_QKV])
    assert torch.equal(logits(adapted), before)
    applied = apply(adapted, [RENAME, KEPT])
    assert torch.equal(logits(adapted), before)
    loss_of(adapted).backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)
    applied.revert()
    assert torch.equal(logits(adapted), before)
    adapted.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(tiny(), tmp_path).eval()), before)


def test_an_adapter_attaches_after_trains_and_merges(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny()
    applied = apply(model, [RENAME, FUSED])
    config = peft.LoraConfig(target_modules=["q_proj", "gate_up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    loss_of(adapted.train()).backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)
    adapted.eval()
    adapted.save_pretrained(tmp_path / "adapter")
    wanted = logits(adapted)
    with pytest.raises(GraftError, match="merge the adapter first"):
        applied.revert()
    assert torch.equal(logits(adapted), wanted)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(reloaded(tmp_path / "merged")), logits(merged), rtol=0, atol=0)
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-4)
    applied.revert()
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-4)


def test_accelerate_dispatches_what_was_converted(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    before, state = logits(model), bits(model)
    apply(model, EVERYTHING)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path / "off"), force_hooks=True)
    assert any(p.is_meta for p in model.parameters())
    assert torch.equal(logits(model), before)
    model.train()
    model.eval()
    assert torch.equal(logits(model), before)
    with pytest.warns(UserWarning, match="offloaded modules"):
        model.save_pretrained(tmp_path / "saved")
    assert_same(bits(reloaded(tmp_path / "saved")), state)


def test_what_is_offloaded_already_is_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    places = {"model": "disk", "lm_head": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    with pytest.raises(UsageError, match="offloaded"):
        apply(model, [FUSED])


def test_a_dispatched_model_is_converted_under_its_hooks() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    before = logits(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    for module in model.modules():
        if not list(module.children()):
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook("cpu"))
    applied = apply(model, [RENAME, MERGED_GATE_UP])
    assert all("_hf_hook" in vars(m) for m in (model.model.norm, model.model.layers[0].mlp.gate_proj))
    assert torch.equal(logits(model), before)
    applied.revert()
    assert torch.equal(logits(model), before)
    assert hasattr(model.model.norm, "_hf_hook")


def test_a_model_is_freed_when_its_last_reference_goes() -> None:
    model = tiny()
    apply(model, EVERYTHING)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# --- kernels that cannot do everything ---


def flagged(name: str, own: bool, **flags: bool) -> LoadedKernel:
    kernel = type(name, (nn.Module,), {"forward": samples.CustomRMSNorm.forward, **flags})

    def forward(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return samples.CustomRMSNorm.forward(self, hidden_states) * 2

    body = {"forward": forward} if own else {}
    return loaded("RMSNorm", kernel, type(f"{name}Layout", (samples.EveryRMSNormLayout,), body))


def test_without_a_backward_the_layouts_own_forward_trains() -> None:
    model = tiny()
    before = logits(model)
    apply(model, [flagged("A", own=True, has_backward=False)])
    assert torch.equal(logits(model), before), "without gradients the kernel runs"
    assert not torch.equal(model(IDS).logits, before), "with them the Layout's own forward"
    loss_of(model).backward()
    assert model.model.norm.scale.grad is not None


def test_without_a_backward_and_an_own_forward_a_backward_pass_says_so() -> None:
    model = tiny()
    before = logits(model)
    apply(model, [flagged("B", own=False, has_backward=False)])
    assert torch.equal(model(IDS).logits, before)
    with pytest.raises(UsageError, match="has_backward = False"):
        loss_of(model).backward()


def test_what_cannot_be_compiled_is_left_to_the_layouts_own_forward() -> None:
    model = tiny()
    before = logits(model)
    apply(model, [flagged("C", own=True)])
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(torch.compile(model, backend="eager")), before)
    torch._dynamo.reset()
    model = tiny()
    apply(model, [flagged("D", own=True, can_torch_compile=True)])
    assert torch.equal(logits(torch.compile(model, backend="eager")), before)
    torch._dynamo.reset()


# --- refusals: one line, and the model unchanged ---


class Swapped(samples.RMSNormMLPLayout):
    conversion_mapping: ClassVar = samples.RMSNormMLPLayout.conversion_mapping[:2]


class WrongName(samples.EveryRMSNormLayout):
    conversion_mapping: ClassVar = [WeightRenaming("weight", "gain")]


class WrongDim(samples.RMSNormMLPLayout):
    conversion_mapping: ClassVar = [
        samples.RMSNormMLPLayout.conversion_mapping[0],
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "post_attention_layernorm.gate_up_proj.weight",
            [Concatenate(dim=1)],
        ),
        samples.RMSNormMLPLayout.conversion_mapping[2],
    ]


class LacksSource(samples.RMSNormMLPLayout):
    conversion_mapping: ClassVar = [
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.ups_proj.weight"],
            "post_attention_layernorm.gate_up_proj.weight",
            [Concatenate(dim=0)],
        ),
    ]


class NoRules(samples.EveryRMSNormLayout):
    conversion_mapping: ClassVar[list[Any]] = []


class OtherArguments(samples.EveryRMSNormLayout):
    def __init__(self, hidden_size: int, eps: float, groups: int):
        super().__init__(hidden_size, eps)


class OtherForward(nn.Module):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden_states


FLIPPED = tuple(reversed(samples.NORM_MLP))
REFUSED = {
    "a rule too few": (loaded(samples.NORM_MLP, samples.RMSNormMLP, Swapped), r"`model\.layers\.0\.mlp\.down_proj"),
    "a wrong name": (loaded("RMSNorm", samples.EveryRMSNorm, WrongName), r"becomes `.*gain`, which"),
    "a wrong dim": (loaded(samples.NORM_MLP, samples.RMSNormMLP, WrongDim), r"of shape \(48, 64\).*\(96, 32\)"),
    "a source too few": (loaded(samples.NORM_MLP, samples.RMSNormMLP, LacksSource), r"`mlp\.ups_proj\.weight`"),
    "no rules": (loaded("RMSNorm", samples.EveryRMSNorm, NoRules), r"stays `.*norm\.weight`"),
    "other arguments": (loaded("RMSNorm", samples.EveryRMSNorm, OtherArguments), r"wants `groups`"),
    "another signature": (loaded("RMSNorm", OtherForward, samples.EveryRMSNormLayout), r"`residual`"),
    "pairs in the other order": (loaded(FLIPPED, samples.RMSNormMLP, samples.RMSNormMLPLayout), r"variance_epsilon"),
    "no layout": (loaded(samples.NORM_MLP, samples.RMSNormMLP), r"no `RMSNormMLPLayout`"),
    "a norm of no sum": (
        loaded((("RMSNorm", "model.layers.*.input_layernorm"),), samples.AddNorm, samples.AddNormLayout),
        r"does not add right before",
    ),
}


@pytest.mark.parametrize(("kernel", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_and_nothing_is_changed(kernel: LoadedKernel, message: str) -> None:
    model = tiny()
    state, modules, before = bits(model), dict(model.named_modules()), logits(model)
    with pytest.raises(UsageError, match=message) as caught:
        apply(model, [MERGED_QKV, kernel])
    assert "\n" not in str(caught.value)
    assert dict(model.named_modules()) == modules and find_layouts(model) is None
    assert_same(bits(model), state)
    assert torch.equal(logits(model), before)


class UsesItTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Module()
        self.norm.weight, self.norm.variance_epsilon = nn.Parameter(torch.ones(3)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x + self.norm.weight
        y = self.norm(total)
        return y


def test_a_norm_that_is_used_twice_is_no_residual_fusion() -> None:
    with pytest.raises(UsageError, match="uses `norm` 2 times"):
        apply(UsesItTwice(), [loaded((("Module", "norm"),), samples.AddNorm, SameNamesLayout)])


class SameNamesLayout(samples.AddNormLayout):
    conversion_mapping: ClassVar = [WeightRenaming("weight", "scale")]


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelgraft.layouts import seating

    model = tiny()
    objects, modules, state = dict(model.named_parameters()), dict(model.named_modules()), bits(model)
    real, calls = seating._fill, []

    def failing(seat: Any) -> Any:
        calls.append(seat)
        if len(calls) == 4:
            raise MemoryError("no memory")
        return real(seat)

    monkeypatch.setattr(seating, "_fill", failing)
    with pytest.raises(MemoryError):
        apply(model, EVERYTHING)
    assert dict(model.named_modules()) == modules and "save_pretrained" not in vars(model)
    assert all(p is objects[name] for name, p in model.named_parameters())
    assert_same(bits(model), state)


def test_a_layout_on_a_layout_is_refused_and_another_beside_it_is_not() -> None:
    model = tiny()
    before = logits(model)
    apply(model, [FUSED])
    with pytest.raises(UsageError):
        apply(model, [FUSED])
    second = apply(model, [loaded("Qwen3RMSNorm", samples.EveryRMSNorm, samples.EveryRMSNormLayout)])
    assert find_layouts(model) is second
    assert torch.equal(logits(model), before)


def test_tied_and_quantised_parameters_are_not_merged() -> None:
    model = tiny()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    with pytest.raises(UsageError, match="is tied"):
        apply(model, [FUSED])
    model = tiny()
    down = model.model.layers[0].mlp.down_proj
    down.weight = nn.Parameter(down.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UsageError, match="quantised"):
        apply(model, [FUSED])


def test_overlapping_fusions_are_refused() -> None:
    with pytest.raises(ConflictError, match="keep one"):
        apply(tiny(), [FUSED, samples.ADDED])
    with pytest.raises(ConflictError, match="lies inside"):
        apply(tiny(), [FUSED, MERGED_GATE_UP])


# --- meaning: what the checks find is refused before anything is changed ---


@pytest.mark.parametrize("kernels", [(RENAME, FUSED), EVERYTHING], ids=["chain", "everything"])
def test_kernels_that_mean_the_same_pass_the_check(kernels: Sequence[LoadedKernel]) -> None:
    model = tiny()
    before = logits(model)
    with apply_layouts(model, kernels):
        assert torch.equal(logits(model), before)


def test_a_chain_that_is_none_in_this_model_is_refused() -> None:
    model = tiny("olmo2")
    modules = dict(model.named_modules())
    with pytest.raises(GraftError, match="post_attention_layernorm"):
        apply_layouts(model, [FUSED])
    assert dict(model.named_modules()) == modules
    key = (("RMSNorm", "model.layers.*.input_layernorm"), samples.NORM_MLP[1])

    class WrongPairLayout(samples.RMSNormMLPLayout):
        conversion_mapping: ClassVar = [
            WeightRenaming("input_layernorm.weight", "input_layernorm.scale"),
            WeightConverter(
                ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
                "input_layernorm.gate_up_proj.weight",
                [Concatenate(dim=0)],
            ),
            WeightRenaming("mlp.down_proj.weight", "input_layernorm.down_proj.weight"),
        ]

    with pytest.raises(GraftError, match="input_layernorm"):
        apply_layouts(tiny(), [loaded(key, samples.RMSNormMLP, WrongPairLayout)])
