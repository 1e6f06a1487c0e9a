"""The configuration that emitted tests build their model from: the model's own, cut down if it is large."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kernelgraft import models
from kernelgraft.errors import KernelgraftError, MismatchError, UsageError
from kernelgraft.families.reference import torch_dtype
from kernelgraft.identity import config_sha256
from kernelgraft.models.shrinking import quiet
from kernelgraft.records import Graft, Site
from kernelgraft.store import Inventory

LARGEST_PARAMETERS = 30_000_000
"""A model up to this size is tested as it is."""
VOCABULARY = 512


def configuration(graft: Graft, inventory: Inventory | None, given: Any = None) -> PreTrainedConfig:
    """The configuration of the model that a graft was made for: `given`, or the inventory's, or by the model's name.

    UsageError if there is none, MismatchError if it is another model's.
    """
    config = given
    if config is None and inventory is not None and inventory.has_record("config"):
        config = inventory.load_record("config", dict)
    if config is None:
        config = _by_name(graft.model.name)
    if isinstance(config, dict):
        with quiet():
            config = AutoConfig.for_model(**{"model_type": graft.model.type, **config})
    if config_sha256(config) != graft.model.config_sha256:
        # A model writes its dtype into its configuration.
        with quiet(), torch.device("meta"):
            dtype = torch_dtype(graft.model.dtype)
            config = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).config
    if config_sha256(config) != graft.model.config_sha256:
        raise MismatchError(
            f"the configuration found for `{graft.model.name}` is not that of the graft; give the one of the model"
        )
    return config


def _by_name(name: str) -> Any:
    try:
        ref = models.resolve(name)
        if ref.kind in ("preset", "config"):
            return models.configuration(ref)
        with quiet():
            return AutoConfig.from_pretrained(str(ref.path or ref.name))
    except (KernelgraftError, OSError, ValueError) as error:
        raise UsageError(
            f"the configuration of `{name}` is not found ({' '.join(str(error).split())[:100]}); "
            "give it, or the folder that integrate wrote"
        ) from error


def small(config: PreTrainedConfig, sites: Iterable[Site]) -> PreTrainedConfig:
    """A configuration whose model has every site, with all the sizes that kernels see.

    A large model keeps only the first layers (all those that are the first of their kind) and few words; where that
    cannot be built it stays as it is.
    """
    wanted = [(site.instances[0], site.class_name) for site in sites]
    if _parameters(config, []) <= LARGEST_PARAMETERS:
        return config
    numbers = [int(part) for path, _ in wanted for part in path.split(".") if part.isdigit()]
    smaller = _cut(config, max(numbers, default=0) + 1)
    try:
        _parameters(smaller, wanted)
    except Exception:  # whatever a model class raises for a configuration that it cannot take
        return config
    return smaller


def _cut(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    result = copy.deepcopy(config)
    for node in (result, *(v for v in vars(result).values() if isinstance(v, PreTrainedConfig))):
        before = getattr(node, "num_hidden_layers", None)
        for name, value in list(vars(node).items()):
            if isinstance(value, (list, tuple)) and before and len(value) == before:
                setattr(node, name, value[:layers])
            elif name == "vocab_size" and isinstance(value, int):
                setattr(node, name, min(value, VOCABULARY))
            elif name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
                setattr(node, name, None)
        if isinstance(before, int):
            node.num_hidden_layers = min(before, layers)
    return result


def _parameters(config: PreTrainedConfig, wanted: Iterable[tuple[str, str]]) -> int:
    """Number of parameters; raises if a module is not where it is wanted."""
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for path, class_name in wanted:
        found = type(model.get_submodule(path))
        if f"{found.__module__}.{found.__qualname__}" != class_name:
            raise ValueError(f"`{path}` is a `{found.__qualname__}`")
    return sum(p.numel() for p in model.parameters())
