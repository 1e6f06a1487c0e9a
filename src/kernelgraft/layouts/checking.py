"""Check kernels on a model before anything is changed: names and shapes without weights, data flow, numbers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kernelgraft.errors import ConflictError, KernelgraftError, UsageError
from kernelgraft.layouts.chain import check_flow
from kernelgraft.layouts.dry_run import dry_run
from kernelgraft.layouts.findings import Finding, in_one_line, refuse
from kernelgraft.layouts.gate import gate
from kernelgraft.layouts.kernel_set import KernelSet
from kernelgraft.layouts.matching import match, root_of
from kernelgraft.layouts.packages import load
from kernelgraft.layouts.records import LoadedKernel, Place
from kernelgraft.layouts.trial import Maker, Trial, fitted, make_trial
from kernelgraft.models.shrinking import quiet

__all__ = ["Finding", "check", "refuse"]

# One at a time: torch's default dtype and transformers' log level are the process's while tiny models are built.
_checking = threading.RLock()


def check(
    kernels: Any,
    model: Any,
    *,
    make: Maker | None = None,
    device: str | None = None,
    numeric: bool = True,
    training: bool = False,
) -> list[Finding]:
    """All that is wrong with `kernels` on a model, most severe first; an empty list if nothing is. Changes nothing.

    `kernels` is what KernelSet takes, or kernels already loaded; `model` a live model (its weights are not read) or a
    configuration, from which `make` (default: `AutoModelForCausalLM.from_config`) builds it on meta. `device` is the
    type that the kernels are for (default: the live model's, else cpu). `numeric` also runs a tiny random model of the
    same configuration class with them: data flow, logits, eight decode steps, gradients. `training` makes a missing
    backward an error. Raises UsageError if `model` is neither, or cannot be built.
    """
    with _checking:
        return _check(kernels, *_root(model, make), device, numeric, training)


def _check(
    kernels: Any, root: nn.Module, make: Maker, device: str | None, numeric: bool, training: bool
) -> list[Finding]:
    device = device or _device_of(root)
    found: list[Finding] = []
    loaded = _loaded(kernels, device, found)
    places = _places(root, loaded, found)
    found += dry_run(root, places)
    if training:
        found = [_as_error(f) if f.check == "training" and f.severity == "note" else f for f in found]
    wrong = {f.kernel for f in found if f.severity == "error" and f.check != "training"}
    sound = [kernel for kernel in loaded if kernel.name not in wrong and any(p.kernel is kernel for p in places)]
    if numeric and sound:
        found += _tried(root, make, sound, device)
    order = ("error", "portability", "note")
    return sorted(dict.fromkeys(found), key=lambda f: order.index(f.severity))


def _as_error(finding: Finding) -> Finding:
    return Finding(finding.check, "error", finding.message, finding.kernel)


def _root(model: Any, make: Maker | None) -> tuple[nn.Module, Maker]:
    if isinstance(model, nn.Module):
        root = root_of(model)
        if not isinstance(getattr(root, "config", None), PreTrainedConfig):
            raise UsageError(
                f"`{type(model).__name__}` is not a transformers model: give one that from_pretrained returns"
            )
        owner = cast(Any, type(root))
        return root, make or (lambda config: cast(nn.Module, owner._from_config(config)))
    if not isinstance(model, PreTrainedConfig):
        raise UsageError(f"`{type(model).__name__}` is neither a model nor a configuration: give one of them")
    build = make or (lambda config: cast(nn.Module, AutoModelForCausalLM.from_config(config)))
    try:
        with quiet(), torch.device("meta"):
            return build(copy.deepcopy(model)).eval(), build
    except Exception as error:  # whatever a model class raises for a configuration
        raise UsageError(
            f"no model can be built from this `{type(model).__name__}` ({in_one_line(error)}): correct it"
        ) from error


def _device_of(root: nn.Module) -> str:
    device = next((p.device.type for p in root.parameters()), "cpu")
    return "cpu" if device == "meta" else device


def _loaded(kernels: Any, device: str, found: list[Finding]) -> list[LoadedKernel]:
    if isinstance(kernels, Sequence) and kernels and all(isinstance(one, LoadedKernel) for one in kernels):
        return list(kernels)
    try:
        entries = KernelSet.of(kernels).for_device(device)
    except KernelgraftError as error:
        found.append(Finding("package", "error", in_one_line(error, 600)))
        return []
    if not entries:
        found.append(Finding("package", "error", f"none of the kernels is for the device `{device}`: give one"))
    loaded = []
    for entry in entries:
        try:
            loaded.append(load(entry, device=device))
        except KernelgraftError as error:
            found.append(Finding("package", "error", in_one_line(error, 600), entry.kernel_name))
    return loaded


def _places(root: nn.Module, loaded: list[LoadedKernel], found: list[Finding]) -> list[Place]:
    """Where the kernels go; each that matches nothing, or takes what another takes, becomes a finding."""
    reached = []
    for kernel in loaded:
        try:
            match(root, [kernel])
            reached.append(kernel)
        except KernelgraftError as error:
            found.append(Finding("match", "error", in_one_line(error, 600), kernel.name))
    try:
        return list(match(root, reached).places) if reached else []
    except (UsageError, ConflictError) as error:
        found.append(Finding("match", "error", in_one_line(error, 600)))
        return []


def _tried(root: nn.Module, make: Maker, kernels: Sequence[LoadedKernel], device: str) -> list[Finding]:
    if device == "cuda" and not torch.cuda.is_available():
        return [
            Finding(
                "numbers", "note", "the kernels are for a GPU and there is none: data flow and numbers are not checked"
            )
        ]
    try:
        trial = make_trial(root.config, make, device)
    except UsageError as error:
        return [Finding("numbers", "note", in_one_line(error))]
    found: list[Finding] = []
    there = []
    for kernel in kernels:
        mine = fitted(kernel, trial.model)
        if isinstance(mine, str):
            message = f"`{kernel.name}` has no place in a tiny model ({mine}): data flow and numbers are not checked"
            found.append(Finding("numbers", "note", message, kernel.name))
        else:
            there.append(mine)
    return found + (_flow_and_numbers(trial, there) if there else [])


def _flow_and_numbers(trial: Trial, kernels: Sequence[LoadedKernel]) -> list[Finding]:
    found = check_flow(trial, match(trial.model, kernels).places)
    wrong = {finding.kernel for finding in found if finding.severity == "error"}
    sound = [kernel for kernel in kernels if kernel.name not in wrong]
    return found + (_numbers(trial, sound) if sound else [])


def _numbers(trial: Trial, kernels: Sequence[LoadedKernel]) -> list[Finding]:
    """The gate in float32, or in the configuration's own dtype where a kernel only takes that."""
    found = gate(trial, kernels)
    own = getattr(trial.config, "dtype", None)
    if not found or own not in (torch.bfloat16, torch.float16) or not any(" raises " in f.message for f in found):
        return found
    again = gate(trial.to(own), kernels)
    if any(f.severity == "error" for f in again):
        return found
    who = ", ".join(f"`{kernel.name}`" for kernel in kernels)
    return [*again, Finding("numbers", "note", f"{who} cannot be run in float32: the numbers were checked in {own}")]
