"""A tiny model of the same configuration class, with random weights, to try kernels on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import UsageError
from kernelgraft.layouts.findings import in_one_line
from kernelgraft.layouts.matching import match
from kernelgraft.layouts.records import LoadedKernel, Part
from kernelgraft.models import left_padded, randomise, shrink, wrap
from kernelgraft.models.shrinking import quiet

Maker = Callable[[Any], nn.Module]
"""Builds a model from a configuration, as `AutoModelForCausalLM.from_config` does."""
SMALL = 3_000_000
"""Parameters up to which a model is tried at its own sizes."""
TEXTS = ("Nine words are enough to see it all here", "Fewer here")


@dataclass(frozen=True)
class Trial:
    """A tiny model in float32 on a device, and inputs for it."""

    model: nn.Module
    inputs: dict[str, torch.Tensor]
    """Two rows of the same length, without padding."""
    padded: dict[str, torch.Tensor] | None
    """A left-padded batch to generate from; None for a model that does not generate."""
    config: Any = None
    """The configuration of the real model, with its dtype."""

    def to(self, dtype: torch.dtype) -> Trial:
        """The same in another dtype, the model a copy."""
        return replace(self, model=copy.deepcopy(self.model).to(dtype))

    def outputs(self, model: nn.Module | None = None, **more: Any) -> torch.Tensor:
        """Logits of the inputs, or the last hidden state of a model without them."""
        with quiet():
            out = (model or self.model)(**self.inputs, **more)
        found = getattr(out, "logits", None)
        tensor: torch.Tensor = out.last_hidden_state if found is None else found
        return tensor


def make_trial(config: Any, make: Maker, device: str = "cpu", seed: int = 0) -> Trial:
    """A tiny model like those that `make` builds from `config`. Raises UsageError if it cannot be built or run."""
    what = type(config).__name__
    try:
        model = _built(config, make, seed)
        what = type(model).__name__
        trial = replace(_with_inputs(model.to(device), device), config=config)
        with torch.no_grad():
            trial.outputs()
    except Exception as error:  # a model that wants other inputs than text raises whatever it likes
        said = (
            in_one_line(error, 160)
            if isinstance(error, UsageError)
            else f"{type(error).__name__}: {in_one_line(error, 120)}"
        )
        raise UsageError(
            f"a tiny model of `{what}` cannot be run on text ({said}); its data flow and numbers are not checked"
        ) from error
    return trial


def _built(config: Any, make: Maker, seed: int) -> nn.Module:
    """Of the configuration itself if it is small, else of one shrunk; every parameter random, float32, eval mode."""
    own = copy.deepcopy(config)
    with quiet(), torch.device("meta"):
        small = sum(p.numel() for p in make(copy.deepcopy(own)).parameters()) <= SMALL
    chosen = own if small else shrink(own)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = make(chosen).float().eval()
    _randomise(model, seed)
    _without_dropout(model)
    return model


def _randomise(model: nn.Module, seed: int) -> None:
    head: Any = getattr(model, "get_output_embeddings", None)
    if head is not None and head() is not None and not getattr(model.config, "is_encoder_decoder", False):
        randomise(model, seed)
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.2 * noise)


def _without_dropout(model: nn.Module) -> None:
    """Training is compared, so nothing may be drawn."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _with_inputs(model: nn.Module, device: str) -> Trial:
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    text = config.get_text_config()
    can = getattr(model, "can_generate", None)
    if callable(can) and can():
        loaded = wrap(model)
        ids, mask = left_padded(loaded, list(TEXTS))
        model.generation_config.pad_token_id = int(ids[1, 0])  # type: ignore[union-attr]
        rows = ids[:1].repeat(2, 1)
        rows[1] = rows[1, torch.randperm(rows.shape[1], generator=generator)]
        padded = {"input_ids": ids, "attention_mask": mask}
    else:
        size = int(getattr(text, "vocab_size", 32))
        rows = torch.randint(min(5, size - 1), size, (2, 9), generator=generator)
        padded = None
    inputs = {"input_ids": rows.to(device)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = rows[:, :5].to(device)
    return Trial(model, inputs, None if padded is None else {n: t.to(device) for n, t in padded.items()})


def fitted(kernel: LoadedKernel, root: nn.Module) -> LoadedKernel | str:
    """The kernel with a key that finds modules in a tiny `root`; in words why there are none.

    A tiny model has fewer layers: an index that it lacks becomes `*`.
    """
    reason = ""
    for candidate in (kernel, _with_stars(kernel)):
        try:
            match(root, [candidate])
            return candidate
        except UsageError as error:
            reason = in_one_line(error)
    return reason


def _with_stars(kernel: LoadedKernel) -> LoadedKernel:
    if isinstance(kernel.entry.key, str):
        return kernel
    parts = tuple(
        Part(p.class_name, None if p.path is None else ".".join("*" if s.isdigit() else s for s in p.path.split(".")))
        for p in kernel.entry.key
    )
    return replace(kernel, entry=replace(kernel.entry, key=parts))
