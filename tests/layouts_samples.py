"""Packages of kernels and tiny models that the tests of Layouts share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LAYERS = '''
try:
    from transformers import Concatenate, WeightConverter
    from transformers.conversion_mapping import WeightRenaming
except ImportError:
    Concatenate = WeightConverter = WeightRenaming = None

import torch
import torch.nn as nn


def normed(x, scale, eps):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return scale * x.to(dtype)


def offset_normed(x, scale, eps):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + scale.float())).type_as(x)


def merged(linears):
    first = linears[0]
    rows = sum(linear.out_features for linear in linears)
    like = dict(device=first.weight.device, dtype=first.weight.dtype)
    return nn.Linear(first.in_features, rows, bias=first.bias is not None, **like)


class ScaledNormLayout(nn.Module):
    conversion_mapping = [WeightRenaming("weight$", "scale")] if WeightRenaming else []

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps


class ScaledNorm(nn.Module):
    can_torch_compile = True

    def forward(self, hidden_states):
        return normed(hidden_states, self.scale, self.variance_epsilon)


class OffsetNormLayout(ScaledNormLayout):
    pass


class OffsetNorm(nn.Module):
    def forward(self, x):
        return offset_normed(x, self.scale, self.variance_epsilon)


class PlainNorm(nn.Module):
    def forward(self, hidden_states):
        return normed(hidden_states, self.weight, self.variance_epsilon)


class NormMLPLayout(nn.Module):
    conversion_mapping = [
        WeightRenaming("NORM.weight", "NORM.scale"),
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "NORM.gate_up.weight", [Concatenate(dim=0)]
        ),
        WeightRenaming("mlp.down_proj.weight", "NORM.down.weight"),
    ] if WeightRenaming else []

    def __init__(self, norm, mlp):
        super().__init__()
        self.eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        self.scale = nn.Parameter(torch.empty_like(norm.weight))
        self.gate_up = merged([mlp.gate_proj, mlp.up_proj])
        self.down = merged([mlp.down_proj])
        self.act_fn = mlp.act_fn


class NormMLP(nn.Module):
    def forward(self, hidden_states):
        gate, up = self.gate_up(normed(hidden_states, self.scale, self.eps)).chunk(2, dim=-1)
        return self.down(self.act_fn(gate) * up)


class OffsetNormMLPLayout(NormMLPLayout):
    pass


class OffsetNormMLP(nn.Module):
    def forward(self, hidden_states):
        gate, up = self.gate_up(offset_normed(hidden_states, self.scale, self.eps)).chunk(2, dim=-1)
        return self.down(self.act_fn(gate) * up)


class KeptNormMLPLayout(nn.Module):
    """Keeps the children as they are: for an MLP whose gate and up are one matrix already."""

    conversion_mapping = [
        WeightRenaming("NORM.weight", "NORM.scale"),
        WeightRenaming("mlp.gate_up_proj.weight", "NORM.gate_up.weight"),
        WeightRenaming("mlp.down_proj.weight", "NORM.down.weight"),
    ] if WeightRenaming else []

    def __init__(self, norm, mlp):
        super().__init__()
        self.eps = norm.variance_epsilon
        self.scale = nn.Parameter(torch.empty_like(norm.weight))
        self.gate_up = merged([mlp.gate_up_proj])
        self.down = merged([mlp.down_proj])
        self.act_fn = mlp.activation_fn


class KeptNormMLP(nn.Module):
    def forward(self, hidden_states):
        gate, up = self.gate_up(normed(hidden_states, self.scale, self.eps)).chunk(2, dim=-1)
        return self.down(up * self.act_fn(gate))


class GateUpLayout(nn.Module):
    conversion_mapping = [
        WeightConverter(["gate_proj.weight", "up_proj.weight"], "gate_up.weight", [Concatenate(dim=0)]),
    ] if WeightRenaming else []

    def __init__(self, mlp):
        super().__init__()
        self.gate_up = merged([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn


class GateUp(nn.Module):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class QKVLayout(nn.Module):
    fusion = "parallel"
    conversion_mapping = [
        WeightConverter(
            [f"q_proj.{kind}", f"k_proj.{kind}", f"v_proj.{kind}"], f"q_proj.qkv.{kind}", [Concatenate(dim=0)]
        )
        for kind in ("weight", "bias")
    ] if WeightRenaming else []

    def __init__(self, q, k, v):
        super().__init__()
        self.qkv = merged([q, k, v])
        self.sizes = [q.out_features, k.out_features, v.out_features]


class QKV(nn.Module):
    def forward(self, input):
        return self.qkv(input).split(self.sizes, dim=-1)
'''


def write_package(folder: Path, layers: str = LAYERS, norm: str = "post_attention_layernorm", version: int = 1) -> Path:
    """A kernel package with these layers; `NORM` in them becomes the name of the norm that a fusion takes."""
    build = folder / "build" / "torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("from . import layers\n", encoding="utf-8")
    (build / "layers.py").write_text(layers.replace("NORM", norm), encoding="utf-8")
    metadata = {
        "id": f"_sample_kernels_{abs(hash((layers, norm, version)))}",
        "name": "sample-kernels",
        "version": version,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
    },
}


def tiny(model_type: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of two small layers with every parameter randomised, in eval mode."""
    config = AutoConfig.for_model(model_type, **{**COMMON, **EXTRA.get(model_type, {}), **overrides})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                # A scale stays about one; a matrix keeps the size of what goes through it.
                parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    return model


def prompt(rows: int = 1, length: int = 7) -> torch.Tensor:
    """Token ids without the special ones."""
    return (torch.arange(rows * length) * 7 % 60 + 3).view(rows, length)


def logits(model: nn.Module, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of a prompt without a cache."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=prompt() if ids is None else ids, use_cache=False).logits
    return found


def generated(model: Any, cache: str | None = None, tokens: int = 6) -> torch.Tensor:
    """Greedy tokens after a prompt."""
    found: torch.Tensor = model.generate(
        prompt(),
        attention_mask=torch.ones_like(prompt()),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        **({"cache_implementation": cache} if cache else {}),
    )
    return found


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Names and copies of all tensors."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether names, shapes and bits are equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
