"""Kernels are checked on a model before anything is changed: each mistake is found, what is right passes."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_samples import LAYERS, tiny, write_package
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, PreTrainedModel

from kernelgraft import cli
from kernelgraft.errors import GraftError, UsageError
from kernelgraft.layouts.checking import Finding, check, refuse
from kernelgraft.layouts.reading import read_kernels, read_model

NORM_MLP = (
    ("RMSNorm", "model.layers.*.post_attention_layernorm"),
    ("MLP", "model.layers.*.mlp"),
)
QKV = tuple(("Linear", f"model.layers.*.self_attn.{name}_proj") for name in "qkv")
SCALE = 'WeightRenaming("NORM.weight", "NORM.scale")'

RENAMED = """
try:
    from transformers.conversion_mapping import WeightRenaming
except ImportError:
    WeightRenaming = None
import torch
import torch.nn as nn

class RenamedLayout(nn.Module):
    conversion_mapping = [] if WeightRenaming is None else [WeightRenaming("norm.weight", "norm.scale")]
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

class Renamed(nn.Module):
    def forward(self, hidden_states):
        x = hidden_states.float()
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
            hidden_states.dtype)
"""
ATTENTION = """
import torch.nn as nn

class Attention(nn.Module):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, CACHE=None, **kwargs):
        return type(self).forward(self, hidden_states, position_embeddings, MASK, CACHE=CACHE, **kwargs)
"""
KEPT = """
import torch.nn as nn

class KeptLayout(nn.Module):
    conversion_mapping = []
    def __init__(self, mlp):
        super().__init__()
        self.inner = mlp

class Kept(nn.Module):
    def forward(self, x):
        return self.inner(x)
"""
SUM_NORM = """
try:
    from transformers.conversion_mapping import WeightRenaming
except ImportError:
    WeightRenaming = None
import torch
import torch.nn as nn

class SumNormLayout(nn.Module):
    fusion = "residual"
    conversion_mapping = [] if WeightRenaming is None else [WeightRenaming("layernorm.weight", "layernorm.scale")]
    def __init__(self, norm):
        super().__init__()
        self.scale = nn.Parameter(torch.empty_like(norm.weight))
        self.eps = norm.variance_epsilon

class SumNorm(nn.Module):
    def forward(self, hidden_states, residual):
        total = residual + hidden_states
        x = total.float()
        x = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)).to(total.dtype)
        return x, total
"""


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny("llama")


def cache_name() -> str:
    """What the installed transformers calls the cache in an attention's forward."""
    import inspect

    attention = tiny("llama").model.layers[0].self_attn
    return next(n for n in inspect.signature(attention.forward).parameters if n in ("cache", "past_key_values"))


def attention(mask: str = "attention_mask", cache: str | None = None) -> str:
    return ATTENTION.replace("CACHE", cache or cache_name()).replace("MASK", mask)


def only(found: list[Finding], severity: str = "error") -> Finding:
    """The one finding of a severity; it is one line that names its object."""
    mine = [f for f in found if f.severity == severity]
    assert len(mine) == 1, found
    assert "\n" not in str(mine[0])
    assert "`" in str(mine[0])
    return mine[0]


def errors(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.severity == "error"]


# --- what is right ---


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "granite", "smollm3"])
def test_a_fusion_that_fits_has_no_finding(kind: str, tmp_path: Path) -> None:
    assert check({NORM_MLP: f"{write_package(tmp_path)}:NormMLP"}, tiny(kind)) == []


@pytest.mark.parametrize("kernel", ["PlainNorm", "ScaledNorm"])
@pytest.mark.parametrize("kind", ["llama", "phi3", "mixtral", "deepseek_v3"])
def test_a_norm_by_its_class_has_no_error(kernel: str, kind: str, tmp_path: Path) -> None:
    assert errors(check({"RMSNorm": f"{write_package(tmp_path)}:{kernel}"}, tiny(kind))) == []


def test_several_kernels_at_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    place = write_package(tmp_path)
    kernels = {NORM_MLP: f"{place}:NormMLP", QKV: f"{place}:QKV", "RMSNorm": f"{place}:PlainNorm"}
    assert errors(check(kernels, llama)) == []


def test_a_residual_fusion(llama: PreTrainedModel, tmp_path: Path) -> None:
    place = write_package(tmp_path, SUM_NORM)
    right = {(("RMSNorm", "model.layers.*.post_attention_layernorm"),): f"{place}:SumNorm"}
    assert errors(check(right, llama)) == []
    wrong = {(("RMSNorm", "model.layers.*.input_layernorm"),): f"{place}:SumNorm"}
    fault = only(check(wrong, llama))
    assert fault.check == "flow"
    assert "no sum" in str(fault)


def test_a_configuration_is_enough_and_nothing_is_allocated(tmp_path: Path) -> None:
    config, make = read_model("llama-3.1-8b")
    seen: list[nn.Module] = []

    def watched(given: Any) -> nn.Module:
        seen.append(make(given))
        return seen[-1]

    place = write_package(tmp_path)
    assert check({NORM_MLP: f"{place}:NormMLP"}, config, make=watched, numeric=False) == []
    assert all(p.is_meta for model in seen for p in model.parameters())
    assert sum(p.numel() for p in seen[0].parameters()) > 8e9


def test_a_layer_that_a_tiny_model_lacks_is_tried_in_another(tmp_path: Path) -> None:
    config, make = read_model("llama-3.1-8b")
    place = write_package(tmp_path, LAYERS.replace("gate, up = self.gate_up", "up, gate = self.gate_up"))
    key = tuple((name, path.replace("*", "30")) for name, path in NORM_MLP)
    found = check({key: f"{place}:NormMLP"}, config, make=make)
    assert only(found).check == "numbers"


def test_a_live_model_is_left_alone(tmp_path: Path) -> None:
    model = tiny("llama").train()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    modules = [(name, id(m), type(m), dict(m._forward_hooks), sorted(vars(m))) for name, m in model.named_modules()]
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    assert check({NORM_MLP: f"{write_package(tmp_path)}:NormMLP"}, model) == []
    assert torch.equal(torch.rand(3), wanted), "random numbers were drawn"
    assert modules == [
        (name, id(m), type(m), dict(m._forward_hooks), sorted(vars(m))) for name, m in model.named_modules()
    ]
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert model.training


@pytest.mark.parametrize(
    ("kind", "auto", "key"),
    [("bert", AutoModel, "LayerNorm"), ("t5", AutoModelForSeq2SeqLM, "T5LayerNorm")],
)
def test_models_that_are_no_causal_language_models(kind: str, auto: Any, key: str, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    if kind == "t5":
        small = {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 48, "num_layers": 2, "decoder_start_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=64, **small)
    right = """
import torch
import torch.nn as nn
class Norm(nn.Module):
    def forward(self, hidden_states):
        return BODY
"""
    bodies = {
        "bert": "nn.functional.layer_norm(hidden_states, self.normalized_shape, self.weight, self.bias, self.eps)",
        "t5": "self.weight * hidden_states * torch.rsqrt("
        "hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)",
    }
    place = write_package(tmp_path / "right", right.replace("BODY", bodies[kind]))
    assert check({key: f"{place}:Norm"}, config, make=auto.from_config) == []
    unscaled = bodies[kind].replace("self.weight, self.bias", "None, None").replace("self.weight * ", "")
    assert unscaled != bodies[kind]
    place = write_package(tmp_path / "wrong", right.replace("BODY", unscaled))
    assert only(check({key: f"{place}:Norm"}, config, make=auto.from_config)).check == "numbers", "scales were all one"


# --- names, shapes, saving ---


@pytest.mark.parametrize(
    ("old", "new", "kind", "said"),
    [
        (SCALE, SCALE.replace("scale", "gamma"), "names", "`gamma`"),
        (SCALE + ",", "", "names", "no rule takes `weight`"),
        ("WeightRenaming(\"mlp.down_proj.weight\", \"NORM.down.weight\"),\n    ] if WeightRenaming else []\n\n"
         "    def __init__(self, norm, mlp):\n        super().__init__()\n        self.eps = norm.variance_epsilon if",
         "] if WeightRenaming else []\n\n    def __init__(self, norm, mlp):\n        super().__init__()\n"
         "        self.eps = norm.variance_epsilon if", "names", "`down.weight`"),
        ("Concatenate(dim=0)", "Concatenate(dim=1)", "shapes", "[96, 32]"),
        ('["mlp.gate_proj.weight", "mlp.up', '["mlp.gate.weight", "mlp.up', "names", "mlp.gate"),
        ("self.gate_up = merged([mlp.gate_proj, mlp.up_proj])", "self.gate_up = merged([mlp.gate_up_proj])", "build",
         "gate_up_proj"),
    ],
)  # fmt: skip
def test_wrong_rules(old: str, new: str, kind: str, said: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    assert old in LAYERS
    place = write_package(tmp_path, LAYERS.replace(old, new, 1))
    fault = only(check({NORM_MLP: f"{place}:NormMLP"}, llama))
    assert fault.check == kind
    assert said in str(fault)
    assert fault.kernel == "NormMLP"


REVERSE = """
from transformers.core_model_loading import ConversionOps

class Lossy(Concatenate):
    @property
    def reverse_op(self):
        return Back(self.dim)

class Back(ConversionOps):
    def __init__(self, dim):
        self.dim = dim

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        tensor = next(iter(input_dict.values()))
        parts = (tensor[0] if isinstance(tensor, list) else tensor).chunk(2, self.dim)
        return dict(zip(target_patterns, RESULT))
"""


@pytest.mark.parametrize(
    ("result", "said"), [("reversed(parts)", "other values"), ("(parts[0][:1], parts[1])", "is [48, 32] and saved as")]
)
def test_a_reverse_that_does_not_come_back(result: str, said: str, llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = LAYERS.replace("def normed", REVERSE.replace("RESULT", result) + "\n\ndef normed")
    place = write_package(tmp_path, layers.replace("[Concatenate(dim=0)]", "[Lossy(dim=0)]"))
    found = errors(check({NORM_MLP: f"{place}:NormMLP"}, llama))
    assert {f.check for f in found} <= {"save", "build"}
    assert found[0].check == "save"
    assert said in str(found[0])


def test_parts_of_unequal_size_would_be_lost_elsewhere(llama: PreTrainedModel, tmp_path: Path) -> None:
    fault = only(check({QKV: f"{write_package(tmp_path)}:QKV"}, llama), "portability")
    assert fault.check == "save"
    assert "is [16, 32] and saved as [22, 32]" in str(fault)
    assert "SizedConcatenate" in str(fault)
    sized = LAYERS.replace(
        "import torch.nn as nn", "import torch.nn as nn\nfrom kernelgraft.layouts.rules import SizedConcatenate", 1
    ).replace('f"q_proj.qkv.{kind}", [Concatenate(dim=0)]', 'f"q_proj.qkv.{kind}", [SizedConcatenate(0, (32, 16, 16))]')
    assert check({QKV: f"{write_package(tmp_path / 'sized', sized)}:QKV"}, llama) == []


def test_a_dollar_in_a_rule_would_be_saved_elsewhere(llama: PreTrainedModel, tmp_path: Path) -> None:
    found = check({"RMSNorm": f"{write_package(tmp_path)}:ScaledNorm"}, llama)
    assert errors(found) == []
    (fault,) = [f for f in found if f.check == "save"]
    assert "weight$`" in str(fault)
    assert "leave `$` out" in str(fault)
    plain = write_package(tmp_path / "plain", LAYERS.replace('"weight$"', '"weight"'))
    assert not [f for f in check({"RMSNorm": f"{plain}:ScaledNorm"}, llama) if f.check == "save"]


def test_a_rule_that_hits_another_tower(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **text},
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **text},
        image_token_id=60,
    )
    from transformers import LlavaForConditionalGeneration

    place = write_package(tmp_path, RENAMED)
    found = check({"LlamaRMSNorm": f"{place}:Renamed"}, config, make=LlavaForConditionalGeneration._from_config)
    assert errors(found) == []
    fault = only(found, "portability")
    assert fault.check == "towers"
    assert "vision_tower" in str(fault)


def test_a_rule_that_takes_what_a_models_own_converters_need(tmp_path: Path) -> None:
    layers = RENAMED.replace('"norm.weight", "norm.scale"', '"weight", "scale"')
    found = check({"RMSNorm": f"{write_package(tmp_path, layers)}:Renamed"}, tiny("qwen3_moe"), numeric=False)
    assert any("experts" in str(f) and "own converters" in str(f) for f in found if f.check == "towers")
    plain = write_package(tmp_path / "plain", RENAMED)
    assert check({"RMSNorm": f"{plain}:Renamed"}, tiny("qwen3_moe"), numeric=False) == []


def test_what_a_layout_keeps_needs_a_rule_elsewhere(llama: PreTrainedModel, tmp_path: Path) -> None:
    key = (("MLP", "model.layers.*.mlp"),)
    (fault,) = check({key: f"{write_package(tmp_path, KEPT)}:Kept"}, llama)
    assert fault.severity == "portability"
    assert "`inner." in str(fault)
    assert "WeightRenaming" in str(fault)


# --- signatures, training ---


def test_a_parameter_of_another_name_is_drift(llama: PreTrainedModel, tmp_path: Path) -> None:
    other = {"cache": "past_key_values", "past_key_values": "cache"}[cache_name()]
    assert check({"Attention": f"{write_package(tmp_path / 'right', attention())}:Attention"}, llama) == []
    fault = only(check({"Attention": f"{write_package(tmp_path, attention(cache=other))}:Attention"}, llama))
    assert fault.check == "signature"
    assert f"`{cache_name()}`" in str(fault)
    assert f"`{other}`" in str(fault)


def test_a_missing_backward_is_an_error_only_for_training(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = LAYERS.replace("class NormMLP(nn.Module):\n", "class NormMLP(nn.Module):\n    has_backward = False\n")
    kernels = {NORM_MLP: f"{write_package(tmp_path, layers)}:NormMLP"}
    assert errors(check(kernels, llama)) == []
    assert only(check(kernels, llama), "note").check == "training"
    fault = only(check(kernels, llama, training=True))
    assert fault.check == "training"
    assert "give the Layout a forward" in str(fault)


def test_a_gradient_that_does_not_flow(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = LAYERS.replace(
        "normed(hidden_states, self.scale, self.eps)", "normed(hidden_states.detach(), self.scale, self.eps)", 1
    )
    fault = only(check({NORM_MLP: f"{write_package(tmp_path, layers)}:NormMLP"}, llama))
    assert fault.check == "training"
    assert "gradient" in str(fault)


# --- data flow ---


@pytest.mark.parametrize(
    ("kind", "norm", "said"),
    [
        ("olmo2", "post_attention_layernorm", "is not the output of"),
        ("gemma2", "post_attention_layernorm", "is not the output of"),
        ("llama", "input_layernorm", "is not the output of"),
        ("cohere", "input_layernorm", "is also read by `linear`"),
    ],
)
def test_parts_that_do_not_follow_each_other(kind: str, norm: str, said: str, tmp_path: Path) -> None:
    key = (("Norm", f"model.layers.*.{norm}"), ("MLP", "model.layers.*.mlp"))
    fault = only(check({key: f"{write_package(tmp_path, norm=norm)}:NormMLP"}, tiny(kind)))
    assert fault.check == "flow"
    assert said in str(fault)
    assert "`model.layers.*.mlp`" in str(fault)


def test_the_pair_that_does_fit_where_another_does_not(tmp_path: Path) -> None:
    norm = "pre_feedforward_layernorm"
    key = (("RMSNorm", f"model.layers.*.{norm}"), ("MLP", "model.layers.*.mlp"))
    place = write_package(tmp_path, norm=norm)
    assert errors(check({key: f"{place}:OffsetNormMLP"}, tiny("gemma2"))) == []
    assert only(check({key: f"{place}:NormMLP"}, tiny("gemma2"))).check == "numbers", "the weight has an offset of one"


def test_parallel_parts_must_read_one_input(llama: PreTrainedModel, tmp_path: Path) -> None:
    place = write_package(tmp_path, LAYERS.replace("q_proj.qkv", "q_proj.qkv"))
    assert errors(check({QKV: f"{place}:QKV"}, llama)) == []
    key = tuple(("Linear", f"model.layers.*.self_attn.{name}_proj") for name in "qko")
    layers = LAYERS.replace('f"v_proj.{kind}"]', 'f"o_proj.{kind}"]')
    model = tiny("llama", num_key_value_heads=4)
    fault = only(check({key: f"{write_package(tmp_path / 'o', layers)}:QKV"}, model))
    assert fault.check == "flow"
    assert "`q_proj` and `o_proj` read different inputs" in str(fault)


def test_a_weight_that_is_read_past_its_module(tmp_path: Path) -> None:
    model = tiny("llama")
    owner: Any = type(model.model.layers[0])

    class Reading(owner):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states + 0 * self.post_attention_layernorm.weight, *args, **kwargs)

    model.model.layers[1].__class__ = Reading
    from kernelgraft.layouts.chain import check_flow
    from kernelgraft.layouts.kernel_set import KernelSet
    from kernelgraft.layouts.matching import match
    from kernelgraft.layouts.packages import load
    from kernelgraft.layouts.trial import Trial

    (entry,) = KernelSet.of({NORM_MLP: f"{write_package(tmp_path)}:NormMLP"})
    trial = Trial(model, {"input_ids": torch.arange(10, 16)[None]}, None)
    (fault,) = check_flow(trial, match(model, [load(entry)]).places)
    assert "also read by `mul`" in str(fault) or "also read by `__rmul__`" in str(fault)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "hooks were left"


# --- numbers ---


def test_swapped_halves_are_seen(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = LAYERS.replace("gate, up = self.gate_up(normed", "up, gate = self.gate_up(normed", 1)
    fault = only(check({NORM_MLP: f"{write_package(tmp_path, layers)}:NormMLP"}, llama))
    assert fault.check == "numbers"
    assert "the logits of a tiny random model move" in str(fault)
    assert check({NORM_MLP: f"{write_package(tmp_path / 'dry', layers)}:NormMLP"}, llama, numeric=False) == []


def test_the_kernel_that_is_wrong_is_named_among_several(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = LAYERS.replace("gate, up = self.gate_up(normed", "up, gate = self.gate_up(normed", 1)
    place = write_package(tmp_path, layers)
    fault = only(check({NORM_MLP: f"{place}:NormMLP", "RMSNorm": f"{place}:PlainNorm"}, llama))
    assert fault.kernel == "NormMLP"


def test_a_mask_that_is_dropped_is_seen_in_decode_steps(llama: PreTrainedModel, tmp_path: Path) -> None:
    # Without padding the mask says nothing that attention does not do by itself.
    fault = only(check({"Attention": f"{write_package(tmp_path, attention(mask='None'))}:Attention"}, llama))
    assert fault.check == "numbers"
    assert "decode step 0" in str(fault)


def test_a_kernel_that_raises(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = LAYERS.replace("self.act_fn(gate)", "self.act(gate)", 1)
    fault = only(check({NORM_MLP: f"{write_package(tmp_path, layers)}:NormMLP"}, llama))
    assert fault.check == "numbers"
    assert "AttributeError" in str(fault)
    assert "`act`" in str(fault) or "'act'" in str(fault)


@pytest.mark.parametrize(
    "body", ["normed(hidden_states, self.weight, self.variance_epsilon)", "hidden_states * self.weight"]
)
def test_a_kernel_for_short_dtypes_only(body: str, tmp_path: Path) -> None:
    guard = "assert hidden_states.dtype == torch.bfloat16, 'only bfloat16'"
    right = "        return normed(hidden_states, self.weight, self.variance_epsilon)"
    layers = LAYERS.replace(right, f"        {guard}\n        return {body}", 1)
    config = tiny("llama").config
    kernels = {"RMSNorm": f"{write_package(tmp_path, layers)}:PlainNorm"}
    assert "only bfloat16" in str(only(check(kernels, config)))
    config.dtype = torch.bfloat16
    found = check(kernels, config)
    if body.startswith("normed"):
        assert [f.severity for f in found] == ["note"]
        assert "bfloat16" in str(found[0])
    else:
        assert only(found).check == "numbers"


def test_two_threads_check_at_once(tmp_path: Path) -> None:
    place = write_package(tmp_path)
    cases = [(NORM_MLP, "llama", 0), (NORM_MLP, "olmo2", 1)] * 2
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda case: check({case[0]: f"{place}:NormMLP"}, tiny(case[1])), cases))
    assert [len(errors(one)) for one in found] == [case[2] for case in cases]


def test_kernels_for_a_gpu_are_not_run_without_one(llama: PreTrainedModel, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU to run them on")
    layers = LAYERS.replace("gate, up = self.gate_up(normed", "up, gate = self.gate_up(normed", 1)
    found = check({NORM_MLP: {"cuda": f"{write_package(tmp_path, layers)}:NormMLP"}}, llama, device="cuda")
    assert [f.severity for f in found] == ["note"]
    assert "GPU" in str(found[0])
    fault = only(check({NORM_MLP: {"cuda": f"{tmp_path}:NormMLP"}}, llama))
    assert "`cpu`" in str(fault)


# --- what cannot be loaded or reached ---


@pytest.mark.parametrize(
    ("kernels", "kind", "said"),
    [
        ({"NoSuchNorm": "PLACE:PlainNorm"}, "match", "NoSuchNorm"),
        ({(("MLP", "layers.*.mlp"),): "PLACE:GateUp"}, "match", "layers.*.mlp"),
        ({(("RMSNorm", "model.layers.*.mlp"),): "PLACE:GateUp"}, "match", "LlamaMLP"),
        ({"RMSNorm": "PLACE:NoSuchKernel"}, "package", "NoSuchKernel"),
        ({"RMSNorm": "PLACE/nowhere:PlainNorm"}, "package", "nowhere"),
        ({"RMSNorm": "owner/repo"}, "package", "owner/repo"),
        ({"RMSNorm": 3}, "package", "3"),
        ({}, "package", "cpu"),
    ],
)
def test_what_is_not_there(
    kernels: dict[Any, Any], kind: str, said: str, llama: PreTrainedModel, tmp_path: Path
) -> None:
    place = str(write_package(tmp_path))
    given = {k: v.replace("PLACE", place) if isinstance(v, str) else v for k, v in kernels.items()}
    fault = only(check(given, llama))
    assert fault.check == kind
    assert said in str(fault)


def test_one_bad_kernel_does_not_hide_another(llama: PreTrainedModel, tmp_path: Path) -> None:
    layers = LAYERS.replace(SCALE, SCALE.replace("scale", "gamma"))
    place = write_package(tmp_path, layers)
    kernels = {NORM_MLP: f"{place}:NormMLP", "NoSuch": f"{place}:PlainNorm", "RMSNorm": f"{place}:Absent"}
    assert [f.check for f in check(kernels, llama)] == ["package", "match", "names"]


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a model nor a configuration"):
        check({"RMSNorm": f"{tmp_path}:PlainNorm"}, "a name")
    with pytest.raises(UsageError, match="`Linear` is not a transformers model"):
        check({"RMSNorm": f"{tmp_path}:PlainNorm"}, nn.Linear(2, 2))


def test_refuse_raises_for_errors_only() -> None:
    refuse([Finding("save", "portability", "elsewhere"), Finding("training", "note", "so it is")])
    with pytest.raises(GraftError, match=r"first \| second$") as caught:
        refuse([Finding("names", "error", "first"), Finding("save", "note", "so"), Finding("flow", "error", "second")])
    assert caught.value.exit_code == 2
    with pytest.raises(GraftError, match="2 more"):
        refuse([Finding("names", "error", str(n)) for n in range(5)])


# --- the command line ---


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    from rich.console import Console

    monkeypatch.setattr(sys, "argv", ["kernelgraft", "check", *map(str, arguments)])
    monkeypatch.setattr(cli, "people", Console(stderr=True, width=300))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_check_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = write_package(tmp_path / "package")
    pairs = "+".join(f"{name}@{path}" for name, path in NORM_MLP) + f"={place}:NormMLP"
    code, out, err = run(monkeypatch, capsys, pairs, "tiny")
    assert (code, err) == (0, "")
    assert "nothing is wrong with 1 of 1 kernels" in out
    code, out, err = run(monkeypatch, capsys, pairs, "config:olmo2")
    assert code == 2
    (line,) = out.splitlines()
    assert line.startswith("error: `NormMLP` does not fit the data flow")
    assert err.startswith("kernelgraft: 1 finding above")
    assert len(err.splitlines()) == 1
    code, out, _ = run(monkeypatch, capsys, pairs, "config:olmo2", "--no-numeric", "--json", "-")
    assert code == 0
    assert json.loads(out)["passed"] is True


def test_kernels_in_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = write_package(tmp_path / "package")
    (tmp_path / "k.json").write_text(json.dumps([[NORM_MLP, f"{place}:NormMLP"]]))
    (tmp_path / "k.py").write_text(f"kernels = {{{NORM_MLP!r}: {f'{place}:NormMLP'!r}}}\n")
    assert read_kernels(str(tmp_path / "k.json")) == read_kernels(str(tmp_path / "k.py"))
    code, out, _ = run(monkeypatch, capsys, tmp_path / "k.json", "tiny", "--json", "-")
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {"model", "kernels", "passed", "findings"}
    assert answer["findings"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RMSNorm", "`RMSNorm` names no kernels"),
        ("no-such.json", "do not exist"),
        ("a@=x/y:Z", "is no key of a fusion"),
        ("bad.json", "correct the JSON"),
        ("bad.py", "NameError"),
        ("bare.py", "defines no `kernels`"),
    ],
)
def test_kernels_that_cannot_be_read(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.py").write_text("kernels = nothing\n")
    (tmp_path / "bare.py").write_text("other = {}\n")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(monkeypatch, capsys, text, "tiny")
    assert code == 2
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


def test_pins_in_pairs() -> None:
    (first, second) = read_kernels("A=o/r:K@v2; B=o/r:K@main").entries
    assert (first.source.version, first.source.revision) == (2, None)
    assert (second.source.version, second.source.revision) == (None, "main")
    assert not first.source.trust_remote_code
