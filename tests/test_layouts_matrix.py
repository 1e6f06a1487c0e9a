"""Twelve architectures, four kinds of kernels, put on while loading and on a live model: each in all that it is for.

A cell either works (logits, generation with both caches, a training step, saving for a plain load, undoing) or is
refused in one line with the model unchanged. The kernels are those of `layouts_samples`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_samples import generated, logits, prompt, same_state, state_of, tiny, write_package
from transformers import AutoModelForCausalLM

import kernelgraft
from kernelgraft.errors import KernelgraftError
from kernelgraft.layouts import find_layouts

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "granite",
    "smollm3",
    "phi3",
    "olmo2",
    "gemma2",
    "glm4",
    "mixtral",
    "deepseek_v3",
)
KINDS = ("rename", "norm_mlp", "gate_up", "qkv")
LAYER = "model.layers.*"
MERGED_MLP = ("phi3", "glm4")
"""Those that have gate and up in one matrix already."""
REFUSED = {
    ("norm_mlp", "olmo2"): "post_attention_layernorm",  # its norm follows what it normalises
    ("norm_mlp", "mixtral"): "MixtralSparseMoeBlock",
    ("gate_up", "phi3"): "gate_proj",
    ("gate_up", "glm4"): "gate_proj",
    ("gate_up", "mixtral"): "MixtralSparseMoeBlock",
    ("qkv", "phi3"): "q_proj",
    ("qkv", "deepseek_v3"): "q_proj",
}
"""Cells in which the data flow or the structure forbids it, and what the line must name."""


def kernels_for(kind: str, architecture: str, package: Path) -> dict[Any, str]:
    """The set of kernels of a cell."""
    norm = "pre_feedforward_layernorm" if architecture == "gemma2" else "post_attention_layernorm"
    offset = architecture == "gemma2"
    if kind == "rename":
        return {"RMSNorm": f"{package}:{'OffsetNorm' if offset else 'ScaledNorm'}"}
    if kind == "norm_mlp":
        name = "OffsetNormMLP" if offset else "KeptNormMLP" if architecture in MERGED_MLP else "NormMLP"
        return {(("RMSNorm", f"{LAYER}.{norm}"), ("MLP", f"{LAYER}.mlp")): f"{package}:{name}"}
    if kind == "gate_up":
        return {(("MLP", f"{LAYER}.mlp"),): f"{package}:GateUp"}
    return {tuple(("Linear", f"{LAYER}.self_attn.{name}_proj") for name in "qkv"): f"{package}:QKV"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One package for each name of the norm that a fusion takes."""
    root = tmp_path_factory.mktemp("packages")
    return {
        norm: write_package(root / norm, norm=norm)
        for norm in ("post_attention_layernorm", "pre_feedforward_layernorm")
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each architecture, made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")

    class Made(dict[str, Path]):
        def __missing__(self, architecture: str) -> Path:
            tiny(architecture).save_pretrained(root / architecture)
            self[architecture] = root / architecture
            return self[architecture]

    return Made()


def gradients(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one training step, and the gradient of the embeddings, through all layers."""
    model.train()
    loss = model(input_ids=prompt(2), labels=prompt(2)).loss
    loss.backward()
    embeddings = model.get_input_embeddings().weight
    assert embeddings.grad is not None
    found = embeddings.grad.clone()
    model.eval()
    return loss.detach(), found


def converted(when: str, model: Any, kernels: dict[Any, str], check: bool = True) -> Any:
    """The model itself with the kernels on it, or another loaded with them from where it came."""
    if when == "load":
        return kernelgraft.from_pretrained(
            AutoModelForCausalLM, model.config.name_or_path, kernels=kernels, check=check
        )
    kernelgraft.apply_layouts(model, kernels, check=check)
    return model


CELLS = [(a, k) for a in ARCHITECTURES for k in KINDS]


@pytest.mark.parametrize("when", ["load", "live"])
@pytest.mark.parametrize(("architecture", "kind"), CELLS)
def test_cell(
    architecture: str,
    kind: str,
    when: str,
    packages: dict[str, Path],
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    package = packages["pre_feedforward_layernorm" if architecture == "gemma2" else "post_attention_layernorm"]
    kernels = kernels_for(kind, architecture, package)
    folder = checkpoints[architecture]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    before = state_of(plain)

    if (kind, architecture) in REFUSED:
        with pytest.raises(KernelgraftError, match=REFUSED[kind, architecture]) as caught:
            converted(when, plain, kernels)
        assert "\n" not in str(caught.value)
        assert same_state(state_of(plain), before)
        assert find_layouts(plain) is None
        return

    if when == "load":
        model = converted(when, plain, kernels)
        originals = None
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        originals = dict(model.named_parameters(remove_duplicate=False))
        converted(when, model, kernels, check=False)  # the same on both ways, so it runs on one
    applied = find_layouts(model)
    assert applied is not None
    assert any(row["state"] == "replaced" for row in applied.report())
    assert not model.training

    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    tokens = generated(plain)
    assert torch.equal(generated(model), tokens)
    assert torch.equal(generated(model, "static"), tokens)
    for mine, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert same_state(state_of(again), before)

    applied.revert()
    assert same_state(state_of(model), before)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    if originals is not None:
        after = dict(model.named_parameters(remove_duplicate=False))
        assert all(after[name] is parameter for name, parameter in originals.items())
    assert torch.equal(logits(model), logits(plain))
