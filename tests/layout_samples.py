"""Kernels with Layouts as a package's layers.py has them, and small models with random parameters to put them on."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Concatenate, WeightConverter
from transformers.conversion_mapping import WeightRenaming

from kernelgraft import models
from kernelgraft.layouts.records import Entry, LoadedKernel, Part, Source


class CustomRMSNormLayout(nn.Module):
    conversion_mapping: ClassVar = [WeightRenaming("norm.weight", "norm.scale")]

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps


class CustomRMSNorm(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.scale * hidden_states.to(input_dtype)


class OffsetRMSNorm(nn.Module):
    """The same for norms whose weight is an offset from one."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        h = hidden_states.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (h * (1.0 + self.scale.float())).type_as(hidden_states)


class OffsetRMSNormLayout(CustomRMSNormLayout):
    pass


class EveryRMSNormLayout(CustomRMSNormLayout):
    """For models whose norms have other names than `…norm`."""

    conversion_mapping: ClassVar = [WeightRenaming("weight", "scale")]


class EveryRMSNorm(nn.Module):
    forward = CustomRMSNorm.forward


class RMSNormMLPLayout(nn.Module):
    conversion_mapping: ClassVar = [
        WeightRenaming("post_attention_layernorm.weight", "post_attention_layernorm.scale"),
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "post_attention_layernorm.gate_up_proj.weight",
            [Concatenate(dim=0)],
        ),
        WeightRenaming("mlp.down_proj.weight", "post_attention_layernorm.down_proj.weight"),
    ]

    def __init__(self, norm, mlp):
        super().__init__()
        self.variance_epsilon = norm.variance_epsilon
        self.scale = nn.Parameter(torch.empty_like(norm.weight))
        self.gate_up_proj = nn.Linear(
            mlp.gate_proj.in_features,
            mlp.gate_proj.out_features + mlp.up_proj.out_features,
            bias=mlp.gate_proj.bias is not None,
            device=mlp.gate_proj.weight.device,
            dtype=mlp.gate_proj.weight.dtype,
        )
        self.down_proj = nn.Linear(
            mlp.down_proj.in_features,
            mlp.down_proj.out_features,
            bias=mlp.down_proj.bias is not None,
            device=mlp.down_proj.weight.device,
            dtype=mlp.down_proj.weight.dtype,
        )
        self.act_fn = mlp.act_fn


class RMSNormMLP(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.scale * hidden_states.to(input_dtype)
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class QKVLayout(nn.Module):
    """Plain Concatenate: with grouped heads transformers itself would save it wrongly."""

    fusion = "parallel"
    conversion_mapping: ClassVar = [
        WeightConverter(
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            "self_attn.q_proj.qkv.weight",
            [Concatenate(dim=0)],
        ),
        WeightConverter(
            ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
            "self_attn.q_proj.qkv.bias",
            [Concatenate(dim=0)],
        ),
    ]

    def __init__(self, q, k, v):
        super().__init__()
        self.sizes = [part.out_features for part in (q, k, v)]
        self.qkv = nn.Linear(q.in_features, sum(self.sizes), bias=q.bias is not None)


class QKV(nn.Module):
    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(input).split(self.sizes, dim=-1)


class GateUpLayout(nn.Module):
    fusion = "parallel"
    conversion_mapping: ClassVar = [
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_proj.gate_up.weight", [Concatenate(dim=0)]
        )
    ]

    def __init__(self, gate, up):
        super().__init__()
        self.gate_up = nn.Linear(gate.in_features, gate.out_features + up.out_features, bias=False)


class GateUp(nn.Module):
    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.gate_up(input).chunk(2, dim=-1)


class KeepingLayout(nn.Module):
    """Keeps both children as they are."""

    conversion_mapping: ClassVar = [
        WeightRenaming("post_attention_layernorm.weight", "post_attention_layernorm.norm.weight"),
        WeightRenaming("mlp.", "post_attention_layernorm.mlp."),
    ]

    def __init__(self, norm, mlp):
        super().__init__()
        self.norm, self.mlp = norm, mlp


class Keeping(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(hidden_states))


class AddNormLayout(nn.Module):
    fusion = "residual"
    conversion_mapping: ClassVar = [WeightRenaming("layernorm.weight", "layernorm.scale")]

    def __init__(self, norm):
        super().__init__()
        self.variance_epsilon = norm.variance_epsilon
        self.scale = nn.Parameter(torch.empty_like(norm.weight))


class AddNorm(nn.Module):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + hidden_states
        h = total.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.scale * h.to(total.dtype), total


class OneMLPLayout(nn.Module):
    """A fusion of one part."""

    conversion_mapping: ClassVar = [
        WeightConverter(["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_up.weight", [Concatenate(dim=0)])
    ]

    def __init__(self, mlp):
        super().__init__()
        self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn
        self.gate_up = nn.Linear(mlp.gate_proj.in_features, 2 * mlp.gate_proj.out_features, bias=False)


class OneMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


class Stateless(nn.Module):
    """No Layout: takes the parameters of the module as they are."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        h = hidden_states.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(hidden_states.dtype)


LAYER = "model.layers.*."
NORM_MLP = (("RMSNorm", LAYER + "post_attention_layernorm"), ("MLP", LAYER + "mlp"))
QKV_KEY = tuple(("Linear", f"{LAYER}self_attn.{name}_proj") for name in "qkv")
GATE_UP = (("Linear", LAYER + "mlp.gate_proj"), ("Linear", LAYER + "mlp.up_proj"))


def loaded(key: Any, kernel: type[nn.Module], layout: type[nn.Module] | None = None) -> LoadedKernel:
    """A kernel as it comes from a package, with the rules of its Layout."""
    parts = key if isinstance(key, str) else tuple(Part(*pair) for pair in key)
    rules = () if layout is None else tuple(layout.conversion_mapping)
    return LoadedKernel(Entry(parts, Source(repo="owner/kernel"), kernel.__name__), kernel, layout, rules)


RENAME = loaded("RMSNorm", EveryRMSNorm, EveryRMSNormLayout)
FUSED = loaded(NORM_MLP, RMSNormMLP, RMSNormMLPLayout)
MERGED_QKV = loaded(QKV_KEY, QKV, QKVLayout)
MERGED_GATE_UP = loaded(GATE_UP, GateUp, GateUpLayout)
KEPT = loaded(NORM_MLP, Keeping, KeepingLayout)

ADDED = loaded(NORM_MLP[:1], AddNorm, AddNormLayout)
EVERYTHING = (ADDED, MERGED_QKV, MERGED_GATE_UP, RENAME)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(model_type: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal model of two layers with grouped heads; every parameter random."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    models.randomise(model, seed=3)
    return model.to(dtype)


IDS = torch.tensor([[5, 9, 33, 21, 7, 40], [3, 8, 60, 2, 11, 19]])


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


@torch.no_grad()
def generated(model: Any, **kwargs: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(
        IDS, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(IDS), **kwargs
    )
    return found
