"""Models by name: resolve and load them, shrink any configuration, randomise weights, make prompts."""

from __future__ import annotations

from kernelgraft.models.loading import Loaded, configuration, load, wrap
from kernelgraft.models.prompts import left_padded, pad_id, prompt_ids
from kernelgraft.models.randomising import randomise
from kernelgraft.models.shrinking import shrink
from kernelgraft.models.specs import ModelRef, causal_types, presets, resolve

__all__ = [
    "Loaded",
    "ModelRef",
    "causal_types",
    "configuration",
    "left_padded",
    "load",
    "pad_id",
    "presets",
    "prompt_ids",
    "randomise",
    "resolve",
    "shrink",
    "wrap",
]
