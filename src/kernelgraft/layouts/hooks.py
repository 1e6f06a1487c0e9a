"""Hooks on modules that a Layout replaces: moved where they mean the same, refused where they cannot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from kernelgraft.errors import UsageError
from kernelgraft.layouts.records import Place

_BEFORE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_ALL = (*_BEFORE, *_AFTER, *_BACKWARD)


def check(place: Place, children: Sequence[nn.Module], kept: frozenset[int]) -> None:
    """Raises UsageError for a hook that would be lost, or would see other values than before.

    The input of the first child and the output of the last of a chain are what they were; what lies between is not.
    """
    alone = len(children) == 1 and not (place.kernel.entry.is_fusion and place.kernel.fusion == "residual")
    chain = place.kernel.fusion == "chain"
    for index, (path, child) in enumerate(zip(place.paths, children, strict=True)):
        for name, module in child.named_modules():
            if id(module) in kept:
                continue
            allowed: set[str] = set()
            if module is child and alone:
                allowed = set(_ALL)
            elif module is child and chain:
                allowed |= set(_BEFORE) if index == 0 else set()
                allowed |= set(_AFTER) if index == len(children) - 1 else set()
            elif module is child and place.kernel.fusion == "parallel":
                allowed = {*_BEFORE, *_AFTER}
            wrong = [kind for kind in _ALL if getattr(module, kind) and kind not in allowed]
            if wrong:
                full = f"{path}.{name}" if name else path
                raise UsageError(
                    f"`{full}` has a hook ({wrong[0].strip('_')}) that `{place.kernel.name}` cannot keep; remove it"
                )


def move(place: Place, children: Sequence[nn.Module], stand_ins: Sequence[nn.Module]) -> None:
    """Let the new modules use the very dictionaries of the old: handles of hooks go on working.

    An accelerate hook of the first child goes to the Layout, so that inputs come to its device.
    """
    chain = place.kernel.entry.is_fusion and place.kernel.fusion == "chain" and len(children) > 1
    for index, (child, module) in enumerate(zip(children, stand_ins, strict=True)):
        kinds = set(_ALL)
        if chain:
            kinds -= set(_BEFORE) if index else set()
            kinds -= set(_AFTER) if index < len(children) - 1 else set()
        for kind in kinds:
            shared = getattr(child, kind)
            shared.update(getattr(module, kind))
            module.__dict__[kind] = shared
    hook: Any = children[0].__dict__.get("_hf_hook")
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(stand_ins[0], copy.copy(hook))
