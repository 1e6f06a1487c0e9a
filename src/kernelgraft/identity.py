"""Which model is this: the identity that records are bound to."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from kernelgraft import machine
from kernelgraft.records import ModelCard

_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation_autoset", "name_or_path")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in sorted(value.items(), key=lambda kv: str(kv[0])) if k not in _VOLATILE}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (int, float, bool, type(None))) else str(value)


def config_sha256(config: Any) -> str:
    """SHA-256 of a configuration without what differs between two copies of one model (paths, versions)."""
    return hashlib.sha256(json.dumps(_plain(config.to_dict()), sort_keys=True).encode()).hexdigest()


def model_card(model: nn.Module, name: str | None = None) -> ModelCard:
    """The card of a live model; shared parameters are counted once."""
    config: Any = model.config
    first = next(model.parameters())
    return ModelCard(
        name=name or type(model).__name__,
        class_name=f"{type(model).__module__}.{type(model).__qualname__}",
        type=config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(first.dtype).removeprefix("torch."),
        device=first.device.type,
        transformers=machine.version("transformers") or "",
        config_sha256=config_sha256(config),
    )
