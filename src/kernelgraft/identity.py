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


LOCAL = "_kernelgraft_local"
"""Key in the instance dictionary of a split model of which only one rank's part is there just now: what `split_of` and
the count of parameters were before."""


def split_of(model: nn.Module) -> str | None:
    """How parameters are split over processes that each compute their own part, e.g. `tp=2`; None: each has them whole.

    What FSDP splits is whole again while a module runs, so that it does not count.
    """
    if LOCAL in model.__dict__:
        return str(model.__dict__[LOCAL][0])
    gathered = any(c.__name__ == "FSDPModule" for m in model.modules() for c in type(m).__mro__)
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        placements: Any = getattr(parameter, "placements", ())
        # The names of a mesh are those of all its axes or none; one without names is for one thing.
        names = mesh.mesh_dim_names or ("dp" if gathered else "tp",) * mesh.ndim
        for axis, placement in enumerate(placements):
            if not placement.is_replicate() and mesh.size(axis) > 1 and (names[axis] == "tp" or not gathered):
                sizes[names[axis]] = mesh.size(axis)
    return ", ".join(f"{name}={size}" for name, size in sorted(sizes.items())) or None


def model_card(model: nn.Module, name: str | None = None) -> ModelCard:
    """The card of a live model; shared parameters are counted once."""
    config: Any = model.config
    first = next(model.parameters())
    count = sum(p.numel() for p in model.parameters())
    return ModelCard(
        name=name or type(model).__name__,
        class_name=f"{type(model).__module__}.{type(model).__qualname__}",
        type=config.model_type,
        parameters=model.__dict__[LOCAL][1] if LOCAL in model.__dict__ else count,
        dtype=str(first.dtype).removeprefix("torch."),
        device=first.device.type,
        transformers=machine.version("transformers") or "",
        config_sha256=config_sha256(config),
        split=split_of(model),
    )
