"""The compute families, found by name. One module a family; a module that knows a family knows only that one."""

from __future__ import annotations

import functools
import importlib

from kernelgraft.families.base import Call, Family, Kernel, Recognition, Rejection, Seat, Select

NAMES = ("linear", "rms_norm", "layer_norm", "rope", "gated_mlp", "attention", "residual_norm")
"""In the order in which research asks them."""
UNSITED = ("qk_norm_rope", "sampling", "cross_entropy")
"""Families that no site is found for: research does not ask them, their Definitions are made by `definition_for`."""

__all__ = ["NAMES", "UNSITED", "Call", "Family", "Kernel", "Recognition", "Rejection", "Seat", "Select", "get"]


@functools.cache
def get(name: str) -> Family:
    """The family of that name (`kernelgraft.families.<name>.FAMILY`)."""
    family: Family = importlib.import_module(f"kernelgraft.families.{name}").FAMILY
    return family
