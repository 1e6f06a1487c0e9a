"""Load a model with a norm and the MLP after it fused into one module in every layer, and compare."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import kernelgraft

HERE = Path(__file__).resolve().parent
TINY = Path(kernelgraft.__file__).parent / "assets" / "tiny"
PROMPT = torch.arange(5, 21).reshape(1, 16)


def main() -> None:
    """Print how many layers were fused, and that nothing else changed."""
    # The package lies beside this file. Without this line it is looked for in the Hub's cache, then on the Hub.
    os.environ["LOCAL_KERNELS"] = f"owner/my-kernel={HERE / 'my-rms-norm-mlp'}"
    kernels = {
        (
            ("RMSNorm", "model.layers.*.post_attention_layernorm"),
            ("MLP", "model.layers.*.mlp"),
        ): ("owner/my-kernel:RMSNormMLP", {"trust_remote_code": True, "version": 1}),
    }
    plain = AutoModelForCausalLM.from_pretrained(TINY)
    model = kernelgraft.from_pretrained(AutoModelForCausalLM, TINY, kernels=kernels)
    fused = [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj")]
    print(f"{len(fused)} layers are fused, the first at `{fused[0]}`")
    with torch.no_grad():
        difference = (model(PROMPT).logits - plain(PROMPT).logits).abs().max().item()
    tokens = [one.generate(PROMPT, max_new_tokens=16, do_sample=False) for one in (plain, model)]
    print(f"largest difference of a logit: {difference}")
    print(f"the same tokens: {torch.equal(*tokens)}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    print(f"saved as the original: {all(torch.equal(saved[key], value) for key, value in plain.state_dict().items())}")


if __name__ == "__main__":
    main()
