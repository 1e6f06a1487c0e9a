"""What is an error, a leak or silently wrong with transformers' own KernelConfig is right here: one test a case.

In the comments: what transformers 5.22 and 5.24 with kernels 0.17 do.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_samples import COMMON, LAYERS, generated, logits, prompt, same_state, state_of, tiny, write_package
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    KernelConfig,
)

import kernelgraft
from kernelgraft.errors import KernelgraftError
from kernelgraft.layouts import find_layouts

NORM_AND_MLP = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
QKV = tuple(("Linear", f"model.layers.*.self_attn.{name}_proj") for name in "qkv")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with norms in the attention too."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny("qwen3").save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Whatever a test does: transformers' own registries and classes are those of before."""
    from transformers import conversion_mapping, monkey_patching
    from transformers.models.qwen3 import modeling_qwen3

    before = dict(vars(modeling_qwen3))
    recorders = dict(modeling_qwen3.Qwen3Model._can_record_outputs)
    yield
    assert not monkey_patching.get_patch_mapping()
    assert conversion_mapping.get_checkpoint_conversion_mapping("qwen3") is None
    assert dict(vars(modeling_qwen3)) == before
    assert modeling_qwen3.Qwen3Model._can_record_outputs == recorders


def loaded(folder: Path, kernels: Any, **kwargs: Any) -> Any:
    return kernelgraft.from_pretrained(AutoModelForCausalLM, folder, kernels=kernels, **kwargs)


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def own_package(folder: Path, layers: str) -> Path:
    """A package with further layers."""
    return write_package(folder / "own", LAYERS + textwrap.dedent(layers), norm="post_attention_layernorm")


def replaced(model: Any) -> list[str]:
    applied = find_layouts(model)
    assert applied is not None
    return [row["path"] for row in applied.report() if row["state"] == "replaced"]


def assert_equal_logits(model: Any, other: Any) -> None:
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-5, atol=1e-5)


def refusal(folder: Path, kernels: Any, match: str) -> str:
    """The one line with which a load is refused."""
    with pytest.raises(KernelgraftError, match=match) as caught:
        loaded(folder, kernels)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- devices, versions and places of packages ---


def test_a_cpu_takes_kernels_and_kernels_is_not_needed(folder: Path, package: Path) -> None:
    # ValueError: Only devices in ['cuda', ...] are supported, got: cpu; RuntimeError: requires kernels to be installed
    before = "kernels" in sys.modules
    model = loaded(folder, {"RMSNorm": f"{package}:ScaledNorm"})
    assert len(replaced(model)) == 2 * 4 + 1
    assert ("kernels" in sys.modules) == before
    assert_equal_logits(model, plain(folder))


@pytest.mark.parametrize("key", ["RMSNorm", NORM_AND_MLP])
def test_use_local_kernel_takes_a_folder(folder: Path, package: Path, key: Any) -> None:
    # AttributeError: 'tuple' object has no attribute 'split'
    name = "ScaledNorm" if isinstance(key, str) else "NormMLP"
    model = loaded(folder, KernelConfig({key: f"{package}:{name}"}, use_local_kernel=True))
    assert_equal_logits(model, plain(folder))


@pytest.mark.parametrize("key", ["RMSNorm", NORM_AND_MLP])
def test_a_live_model_takes_a_local_layout(folder: Path, package: Path, key: Any) -> None:
    # AttributeError: 'Qwen3RMSNorm' object has no attribute 'scale'; Layer ((...)) is not registered in the model
    model = plain(folder)
    kernelgraft.apply_layouts(model, {key: f"{package}:{'ScaledNorm' if isinstance(key, str) else 'NormMLP'}"})
    assert_equal_logits(model, plain(folder))


@pytest.mark.parametrize("value", ["owner/sample:ScaledNorm", ("owner/sample:ScaledNorm", {"version": 1})])
def test_local_kernels_serves_any_spelling(
    folder: Path, package: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ValueError: Version 1 of 'owner/sample' is not available in the local cache
    monkeypatch.setenv("LOCAL_KERNELS", f"owner/sample={package}")
    assert_equal_logits(loaded(folder, {"RMSNorm": value}), plain(folder))


def test_a_repository_that_is_not_here_is_one_line(folder: Path) -> None:
    # ConnectError from the HTTP client
    refusal(
        folder, {"RMSNorm": ("owner/nowhere:ScaledNorm", {"version": 1, "trust_remote_code": True})}, "owner/nowhere"
    )


def test_two_devices_are_two_kernels(folder: Path, package: Path) -> None:
    # ValueError: Expected exactly one kernel repo regardless of device/mode specificity
    here, there = f"{package}:ScaledNorm", "/nowhere:Other"
    assert_equal_logits(loaded(folder, {"RMSNorm": {"cuda": there, "cpu": here}}), plain(folder))


def test_a_kernel_for_another_device_is_not_used(folder: Path, package: Path) -> None:
    # the device key is ignored and the kernel used
    refusal(folder, {"RMSNorm": {"cuda": f"{package}:ScaledNorm"}}, "`cpu`")


def test_default_kernels_are_never_added(package: Path, tmp_path: Path) -> None:
    # ValueError: Version 1 of 'kernels-community/megablocks' is not available in the local cache
    model = tiny("gpt_oss", num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2)
    model.save_pretrained(tmp_path / "m")
    one = loaded(tmp_path / "m", KernelConfig({"RMSNorm": f"{package}:ScaledNorm"}, use_local_kernel=True))
    assert {type(m).__name__ for m in one.modules() if type(m).__name__.endswith("Layout")} == {"ScaledNormLayout"}
    assert_equal_logits(one, model)


# --- keys ---


@pytest.mark.parametrize("key", ["RMSNorm", "Qwen3RMSNorm", "^Qwen3RMSNorm$"])
@pytest.mark.parametrize("kernel", ["ScaledNorm", "PlainNorm"])
def test_a_class_name_is_one_with_and_without_a_layout(folder: Path, package: Path, key: str, kernel: str) -> None:
    # without: ValueError: Layer Qwen3RMSNorm is not registered in the model, please register it first
    model = loaded(folder, {key: f"{package}:{kernel}"}, check=key == "RMSNorm")
    assert len(replaced(model)) == 9
    assert_equal_logits(model, plain(folder))


OWN_LAYER_NORM = """
class OwnNormLayout(nn.Module):
    conversion_mapping = [WeightRenaming("weight$", "gain"), WeightRenaming("bias$", "shift")]

    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(normalized_shape))
        self.shift = nn.Parameter(torch.empty(normalized_shape))
        self.eps = eps


class OwnNorm(nn.Module):
    def forward(self, input):
        return torch.nn.functional.layer_norm(input, self.gain.shape, self.gain, self.shift, self.eps)
"""


def test_a_class_of_torch_is_a_key(tmp_path: Path) -> None:
    # ValueError: Layer MyLN is not registered in the model
    own = own_package(tmp_path, OWN_LAYER_NORM)
    config = AutoConfig.for_model("bert", **{**COMMON, "max_position_embeddings": 32, "is_decoder": False})
    model = AutoModelForMaskedLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "m")
    one = kernelgraft.from_pretrained(AutoModelForMaskedLM, tmp_path / "m", kernels={"LayerNorm": f"{own}:OwnNorm"})
    with torch.no_grad():
        assert torch.equal(one(input_ids=prompt()).logits, model(input_ids=prompt()).logits)
    one.save_pretrained(tmp_path / "n")
    saved, again = load_file(tmp_path / "m/model.safetensors"), load_file(tmp_path / "n/model.safetensors")
    assert same_state(saved, again)


def test_an_encoder_and_decoder_take_kernels(tmp_path: Path) -> None:
    own = own_package(
        tmp_path,
        """
        class EncoderNormLayout(ScaledNormLayout):
            pass


        class EncoderNorm(nn.Module):
            def forward(self, hidden_states):
                return normed(hidden_states, self.scale, self.variance_epsilon)
        """,
    )
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "m")
    kernels = {"T5LayerNorm": f"{own}:EncoderNorm"}
    one = kernelgraft.from_pretrained(AutoModelForSeq2SeqLM, tmp_path / "m", kernels=kernels)
    with torch.no_grad():
        given = {"input_ids": prompt(), "decoder_input_ids": prompt()[:, :3]}
        assert torch.equal(one(**given).logits, model(**given).logits)


def test_a_layout_may_be_named_like_what_it_replaces(tmp_path: Path) -> None:
    # AttributeError: 'CustomRMSNormLayout' object has no attribute 'weight', from the model's _init_weights
    own = own_package(
        tmp_path,
        """
        class CustomRMSNormLayout(ScaledNormLayout):
            pass


        class CustomRMSNorm(nn.Module):
            def forward(self, x):
                return offset_normed(x, self.scale, self.variance_epsilon)
        """,
    )
    model = tiny("gemma2")
    model.save_pretrained(tmp_path / "m")
    assert_equal_logits(loaded(tmp_path / "m", {"RMSNorm": f"{own}:CustomRMSNorm"}), model)


def test_arguments_fit_by_position_where_names_differ(package: Path, tmp_path: Path) -> None:
    # TypeError: __init__() got an unexpected keyword argument 'dim'
    model = tiny("gemma3_text", sliding_window=16, layer_types=["full_attention", "sliding_attention"])
    model.save_pretrained(tmp_path / "m")
    assert_equal_logits(loaded(tmp_path / "m", {"RMSNorm": f"{package}:OffsetNorm"}), model)


def test_a_key_that_matches_nothing_is_named(folder: Path, package: Path) -> None:
    # ValueError: Layer CustomRMSNorm is not registered in the model: names the kernel, not the key
    refusal(folder, {"RMSNrom": f"{package}:ScaledNorm"}, "`RMSNrom`")


def test_an_unknown_kernel_is_named_with_what_there_is(folder: Path, package: Path) -> None:
    refusal(folder, {"RMSNorm": f"{package}:ScaledNrom"}, "`ScaledNorm`")


def test_a_kernel_for_a_function_takes_what_it_takes(folder: Path, package: Path) -> None:
    # upstream counts parameters; and the function object is shared, see test_layouts_functions.py::test_nothing_leaks
    said = refusal(folder, {"rotary_pos_emb": f"{package}:PlainNorm"}, "`rotary_pos_emb`")
    assert "`PlainNorm.forward` lacks `q`" in said
    assert "`apply_rotary_pos_emb`" in said


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ((("RMSNorm", "model.layers.**.norm"), ("MLP", "model.layers.**.mlp")), r"\*\*"),
        ((("RMSNorm", "model.norm"), ("MLP", "model.layers.*.mlp")), "parent"),
        ((("RMSNorm", "layers.*.post_attention_layernorm"), ("MLP", "layers.*.mlp")), "model.layers"),
        ((("Nonsense", NORM_AND_MLP[0][1]), NORM_AND_MLP[1]), "`Nonsense`"),  # upstream: never read
        ((NORM_AND_MLP[0], ("Qwen2MLP", NORM_AND_MLP[1][1])), "`Qwen3MLP`"),
        ((NORM_AND_MLP[1], NORM_AND_MLP[0]), "cannot be built"),  # AttributeError: ... no attribute 'variance_epsilon'
        ((("RMSNorm", "model.layers.*.*_layernorm"), NORM_AND_MLP[1]), "input_layernorm"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(folder: Path, package: Path, key: Any, match: str) -> None:
    refusal(folder, {key: f"{package}:NormMLP"}, match)


@pytest.mark.parametrize(
    "paths",
    [
        ("model.layers.*.post_attention_*", "model.layers.*.ml*"),  # ValueError: ... expected child modules
        ("*.layers.*.post_attention_layernorm", "*.layers.*.mlp"),
        ("model.*.1.post_attention_layernorm", "model.*.1.mlp"),
    ],
)
def test_wildcards_stand_anywhere(folder: Path, package: Path, paths: tuple[str, str]) -> None:
    key = (("RMSNorm", paths[0]), ("MLP", paths[1]))
    model = loaded(folder, {key: f"{package}:NormMLP"}, check=False)
    assert len(replaced(model)) == (1 if ".1." in paths[0] else 2)
    assert_equal_logits(model, plain(folder))


def test_a_base_model_has_its_own_paths(folder: Path, package: Path) -> None:
    key = tuple((name, path.removeprefix("model.")) for name, path in NORM_AND_MLP)
    model = kernelgraft.from_pretrained(AutoModel, folder, kernels={key: f"{package}:NormMLP"})
    with torch.no_grad():
        ours = model(input_ids=prompt()).last_hidden_state
        theirs = AutoModel.from_pretrained(folder)(input_ids=prompt()).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- which layers ---


def test_a_pattern_for_one_layer_touches_one_layer(folder: Path, package: Path) -> None:
    # all layers are fused
    key = tuple((name, path.replace("*", "0")) for name, path in NORM_AND_MLP)
    model = loaded(folder, {key: f"{package}:NormMLP"})
    assert replaced(model) == ["model.layers.0.post_attention_layernorm"]
    assert type(model.model.layers[1].mlp).__name__ == "Qwen3MLP"
    assert_equal_logits(model, plain(folder))


def test_a_dense_layer_of_a_mixture_is_fused_alone(package: Path, tmp_path: Path) -> None:
    # AttributeError: the parent class is patched, so the layers with experts are too
    model = tiny("deepseek_v3")
    model.save_pretrained(tmp_path / "m")
    key = tuple((name, path.replace("*", "0")) for name, path in NORM_AND_MLP)
    one = loaded(tmp_path / "m", {key: f"{package}:NormMLP"})
    assert replaced(one) == ["model.layers.0.post_attention_layernorm"]
    assert_equal_logits(one, model)
    one.save_pretrained(tmp_path / "n")
    assert same_state(load_file(tmp_path / "m/model.safetensors"), load_file(tmp_path / "n/model.safetensors"))


def test_two_fusions_stand_under_one_parent(folder: Path, tmp_path: Path) -> None:
    # the last one wins: ValueError: Layer RMSNormMLP is not registered in the model
    own = own_package(
        tmp_path,
        """
        class TakenNormLayout(nn.Module):
            conversion_mapping = [WeightRenaming("norm.weight$", "norm.scale")]

            def __init__(self, norm):
                super().__init__()
                self.scale, self.variance_epsilon = nn.Parameter(torch.empty_like(norm.weight)), norm.variance_epsilon


        class TakenNorm(nn.Module):
            def forward(self, hidden_states):
                return normed(hidden_states, self.scale, self.variance_epsilon)


        class SplitQKLayout(QKVLayout):
            conversion_mapping = [
                WeightConverter(
                    ["q_proj.weight", "k_proj.weight"], "q_proj.qkv.weight", [Concatenate(dim=0)]
                )
            ]

            def __init__(self, q, k):
                super().__init__(q, k, k)
                self.qkv = merged([q, k])
                self.sizes = self.sizes[:2]


        class SplitQK(nn.Module):
            def forward(self, input):
                return self.qkv(input).split(self.sizes, dim=-1)
        """,
    )
    kernels: dict[Any, str] = {NORM_AND_MLP: f"{own}:NormMLP", QKV[:2]: f"{own}:SplitQK"}
    for path in ("input_layernorm", "self_attn.q_norm"):
        kernels[(("RMSNorm", f"model.layers.*.{path}"),)] = f"{own}:TakenNorm"
    model = loaded(folder, kernels)
    names = [path.removeprefix("model.layers.1.") for path in replaced(model) if ".1." in path]
    assert sorted(names) == ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.q_proj"]
    assert_equal_logits(model, plain(folder))


@pytest.mark.parametrize("first", [0, 1])
def test_a_norm_key_stands_beside_a_fusion_that_takes_a_norm(folder: Path, package: Path, first: int) -> None:
    # AttributeError: 'CustomRMSNormLayout' object has no attribute 'weight', in either order
    pairs: list[tuple[Any, str]] = [("RMSNorm", f"{package}:ScaledNorm"), (NORM_AND_MLP, f"{package}:NormMLP")]
    model = loaded(folder, dict([pairs[first], pairs[1 - first]]))
    assert type(model.model.layers[0].post_attention_layernorm).__name__ == "NormMLPLayout"
    assert type(model.model.layers[0].input_layernorm).__name__ == "ScaledNormLayout"
    assert_equal_logits(model, plain(folder))


def test_one_module_in_two_fusions_is_refused(folder: Path, package: Path) -> None:
    pair = ((NORM_AND_MLP[1]),)
    with pytest.raises(KernelgraftError, match="mlp"):
        loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP", pair: f"{package}:GateUp"})


# --- meaning ---


def test_a_norm_after_its_branch_is_refused(package: Path, tmp_path: Path) -> None:
    # loads without a message; logits are off by 0.755
    tiny("olmo2").save_pretrained(tmp_path / "m")
    refusal(tmp_path / "m", {NORM_AND_MLP: f"{package}:NormMLP"}, "post_attention_layernorm")


def test_the_wrong_pair_is_refused(folder: Path, tmp_path: Path) -> None:
    # loads without a message; logits are off by 0.47
    own = write_package(tmp_path / "own", norm="input_layernorm")
    key = (("RMSNorm", "model.layers.*.input_layernorm"), NORM_AND_MLP[1])
    refusal(folder, {key: f"{own}:NormMLP"}, "input_layernorm")


@pytest.mark.parametrize("architecture", ["phi3", "glm4"])
def test_modules_of_another_build_are_refused_in_one_line(package: Path, tmp_path: Path, architecture: str) -> None:
    # AttributeError: 'Phi3MLP' object has no attribute 'gate_proj', out of the Layout
    tiny(architecture).save_pretrained(tmp_path / "m")
    line = refusal(tmp_path / "m", {NORM_AND_MLP: f"{package}:NormMLP"}, "gate_proj")
    assert "NormMLPLayout" in line


def test_a_fusion_without_a_layout_is_refused(folder: Path, package: Path) -> None:
    refusal(folder, {NORM_AND_MLP: f"{package}:PlainNorm"}, "PlainNormLayout")


WRONG = {
    # key, what is wrong with its rules or sizes, what the line names
    "no_rules": ('conversion_mapping = [WeightRenaming("weight$", "scale")] if WeightRenaming else []', "", "scale"),
    "wrong_name": ('"scale")] if', '"gain")] if', "scale"),  # NaN logits: uninitialised memory
    "wrong_shape": ("torch.ones(hidden_size)", "torch.ones(hidden_size + 1)", "33"),  # after the weights were read
    "wrong_merge_dim": ('["gate_proj.weight", "up_proj.weight"], "gate_up.weight", [Concatenate(dim=0)', "", "gate_up"),
    "swapped": ('"gate_proj.weight", "up_proj.weight"', '"up_proj.weight", "gate_proj.weight"', "GateUp"),  # silent
}


@pytest.mark.parametrize("case", WRONG)
def test_rules_that_are_wrong_are_refused_before_weights_are_read(folder: Path, tmp_path: Path, case: str) -> None:
    old, new, match = WRONG[case]
    if case == "wrong_merge_dim":
        new = old.replace("dim=0", "dim=1")
    assert old in LAYERS
    own = write_package(tmp_path / "own", LAYERS.replace(old, new))
    key: Any = (NORM_AND_MLP[1],) if case in ("wrong_merge_dim", "swapped") else "RMSNorm"
    name = "ScaledNorm" if key == "RMSNorm" else "GateUp"
    empty = tmp_path / "empty"  # a configuration without weights: reading them would raise OSError
    AutoConfig.from_pretrained(folder).save_pretrained(empty)
    refusal(empty, {key: f"{own}:{name}"}, match)


def test_a_kernel_that_reads_what_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    # loads; fails at the first forward
    own = own_package(
        tmp_path,
        """
        class Lost(nn.Module):
            def forward(self, hidden_states):
                return normed(hidden_states, self.scale, self.variance_epsilon)
        """,
    )
    refusal(folder, {"RMSNorm": f"{own}:Lost"}, "Lost")


@pytest.mark.parametrize("member", ["constant = 1", "def help(self):\n        return 1"])
def test_a_member_of_a_kernel_is_named(folder: Path, tmp_path: Path, member: str) -> None:
    # TypeError: ... must not contain additional members
    text = f"""
class Extra(nn.Module):
    {member}

    def forward(self, hidden_states):
        return hidden_states
"""
    refusal(folder, {"RMSNorm": f"{own_package(tmp_path, text)}:Extra"}, "`constant`|`help`")


def test_a_renamed_parameter_of_the_model_is_seen(folder: Path, tmp_path: Path) -> None:
    # **kwargs swallows it: prefill equal, decode logits off by 0.5 to 0.7, no message
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    now = list(inspect.signature(Qwen3Attention.forward).parameters)
    old = "past_key_values" if "cache" in now else "cache"
    own = own_package(
        tmp_path,
        f"""
        class Attention(nn.Module):
            def forward(self, hidden_states, position_embeddings, attention_mask, {old}=None, **kwargs):
                return hidden_states, None
        """,
    )
    refusal(folder, {"Qwen3Attention": f"{own}:Attention"}, "cache|past_key_values")


# --- rules and saving ---


def test_anchored_rules_save_the_original_names(folder: Path, package: Path, tmp_path: Path) -> None:
    # `$` in a source pattern: loads right, saves keys that end in a literal `$`
    assert '"weight$"' in LAYERS
    model = loaded(folder, {"RMSNorm": f"{package}:ScaledNorm"})
    model.save_pretrained(tmp_path / "n")
    assert same_state(load_file(folder / "model.safetensors"), load_file(tmp_path / "n/model.safetensors"))


def test_a_merge_of_unequal_parts_is_saved_as_it_was(folder: Path, package: Path, tmp_path: Path) -> None:
    # writes q (43,64), k (43,64), v (42,64) for (64,64), (32,64), (32,64), no message
    model = loaded(folder, {QKV: f"{package}:QKV"})
    model.save_pretrained(tmp_path / "n")
    saved = load_file(tmp_path / "n/model.safetensors")
    assert saved["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    assert saved["model.layers.0.self_attn.v_proj.weight"].shape == (16, 32)
    assert same_state(load_file(folder / "model.safetensors"), saved)


def test_trained_weights_are_saved_under_the_original_names(folder: Path, package: Path, tmp_path: Path) -> None:
    model = loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP"})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=prompt(2), labels=prompt(2)).loss.backward()
    optimizer.step()
    model.eval()
    model.save_pretrained(tmp_path / "n")
    again = plain(tmp_path / "n")
    assert_equal_logits(again, model)
    assert not torch.equal(logits(again), logits(plain(folder)))


def test_a_rule_for_norms_leaves_another_tower_alone(package: Path, tmp_path: Path) -> None:
    # also hits the vision tower's LayerNorms: MISSING, re-initialised
    text = {"model_type": "llama", **COMMON, "vocab_size": 66}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 8,
        "patch_size": 4,
        "projection_dim": 32,
    }
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=65)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path / "m")
    kernels = {"LlamaRMSNorm": f"{package}:ScaledNorm"}
    one = kernelgraft.from_pretrained(AutoModelForImageTextToText, tmp_path / "m", kernels=kernels)
    ids = torch.cat([torch.full((1, 4), 65), prompt()], dim=1)
    pixels = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(
            one(input_ids=ids, pixel_values=pixels).logits, model(input_ids=ids, pixel_values=pixels).logits
        )
    one.save_pretrained(tmp_path / "n")
    assert same_state(load_file(tmp_path / "m/model.safetensors"), load_file(tmp_path / "n/model.safetensors"))


def test_a_mixture_keeps_its_own_converters(package: Path, tmp_path: Path) -> None:
    # renaming `.mlp.` takes the keys away from the built-in converters: missing keys, logits off by 0.027
    model = tiny("mixtral")
    model.save_pretrained(tmp_path / "m")
    one = loaded(tmp_path / "m", {"RMSNorm": f"{package}:ScaledNorm", QKV: f"{package}:QKV"})
    assert_equal_logits(one, model)
    one.save_pretrained(tmp_path / "n")
    assert same_state(load_file(tmp_path / "m/model.safetensors"), load_file(tmp_path / "n/model.safetensors"))


# --- modes ---


@pytest.mark.parametrize("kernel", ["PlainNorm", "ScaledNorm"])
def test_training_and_evaluating_keep_the_kernel(folder: Path, package: Path, kernel: str) -> None:
    # stateless: train() silently goes back to the original; Layout: TypeError ... 'Tensor' and 'NoneType'
    model, other = loaded(folder, {"RMSNorm": f"{package}:{kernel}"}), plain(folder)
    paths = replaced(model)
    losses = []
    for one in (model, other):
        one.train()
        loss = one(input_ids=prompt(2), labels=prompt(2)).loss
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1])
    assert replaced(model) == paths
    model.eval()
    other.eval()
    assert_equal_logits(model, other)


def test_it_compiles_in_one_graph(folder: Path, package: Path) -> None:
    model = loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP", "RMSNorm": f"{package}:ScaledNorm"})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), logits(plain(folder)), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_hidden_states_are_all_there(folder: Path, package: Path) -> None:
    # 0 or 1 entries instead of 3, also on models built before
    built_before = plain(folder)
    model = loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP"})
    for one in (model, built_before, plain(folder)):
        with torch.no_grad():
            states = one(input_ids=prompt(), output_hidden_states=True).hidden_states
        assert len(states) == 3


def test_generation_is_equal(folder: Path, package: Path) -> None:
    model = loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP"})
    assert torch.equal(generated(model), generated(plain(folder)))


def test_a_dispatched_model_keeps_its_hooks(folder: Path, package: Path, tmp_path: Path) -> None:
    # after train(); eval(): RuntimeError: Tensor on device cpu is not on the expected device meta!
    from accelerate import cpu_offload

    kernels = {"RMSNorm": f"{package}:PlainNorm"}
    model = loaded(folder, kernels)
    cpu_offload(model, execution_device=torch.device("cpu"))
    model.train()
    model.eval()
    assert_equal_logits(model, plain(folder))


def test_a_copy_is_a_model_of_its_own(folder: Path, package: Path) -> None:
    model = loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP"})
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_equal_logits(again, plain(folder))
    applied = find_layouts(again)
    assert applied is not None
    applied.revert()
    assert same_state(state_of(again), state_of(plain(folder)))


# --- the process ---


def test_a_plain_load_afterwards_is_plain(folder: Path, package: Path) -> None:
    # FusedQwen3DecoderLayer, TypeError at forward; from_config too
    loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP"})
    one = plain(folder)
    two = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for model in (one, two):
        assert not [m for m in model.modules() if "Fused" in type(m).__name__ or "Layout" in type(m).__name__]
    assert logits(one).isfinite().all()
    assert find_layouts(one) is None


def test_a_load_that_raises_leaves_nothing(folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the patched classes stay in the modules for good; every later load of that model fails
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    kernels = {NORM_AND_MLP: f"{package}:NormMLP"}
    original, calls = Qwen3Model.__init__, []

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # the first is the dry run
            raise RuntimeError("out of memory")
        original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3Model, "__init__", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            loaded(folder, kernels, check=False)
    assert_equal_logits(loaded(folder, kernels), plain(folder))


def test_one_kernel_config_loads_twice_and_nothing_grows(folder: Path, package: Path) -> None:
    # AttributeError: 'dict' object has no attribute 'partition'; with new ones, rules 3 -> 6 -> ... per load
    config = KernelConfig({NORM_AND_MLP: f"{package}:NormMLP"}, use_local_kernel=True)
    given = copy.deepcopy(config.kernel_mapping)
    for _ in range(2):
        model = loaded(folder, config, check=False)
        assert_equal_logits(model, plain(folder))
    assert config.kernel_mapping == given


def test_another_thread_gets_the_plain_class(folder: Path, package: Path) -> None:
    # got the fused class
    kernels = {NORM_AND_MLP: f"{package}:NormMLP"}
    config = AutoConfig.from_pretrained(folder)
    seen: list[str] = []
    stop = threading.Event()

    def build() -> None:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

        while not stop.is_set():
            seen.extend(type(m).__name__ for m in Qwen3ForCausalLM(copy.deepcopy(config)).modules())

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(3):
            loaded(folder, kernels, check=False)
    finally:
        stop.set()
        thread.join()
    assert seen
    assert not [name for name in seen if "Fused" in name or "Layout" in name]


def test_the_saved_configuration_is_the_original(folder: Path, package: Path, tmp_path: Path) -> None:
    # fusion_config is written into config.json; a KernelConfig raises NotImplementedError
    loaded(folder, {NORM_AND_MLP: f"{package}:NormMLP"}).save_pretrained(tmp_path / "n")
    one, other = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "n"))
    assert one == other


# --- quantised weights: quantising while loading is in test_layouts_loading.py ---


def test_a_quantised_checkpoint_is_refused(folder: Path, package: Path, tmp_path: Path) -> None:
    # quant states UNEXPECTED; ValueError: quant_state is required at forward
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path / "m")
    refusal(tmp_path / "m", {NORM_AND_MLP: f"{package}:NormMLP"}, "quantised already")
