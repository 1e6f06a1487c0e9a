"""The numbers: a tiny random model with the kernels on it, against itself without them and in wider arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import KernelgraftError
from kernelgraft.layouts.findings import Check, Finding, Severity, in_one_line
from kernelgraft.layouts.matching import match
from kernelgraft.layouts.records import LoadedKernel
from kernelgraft.layouts.rules import resolve
from kernelgraft.layouts.samples import differences, representatives
from kernelgraft.layouts.saving import original_state_dict
from kernelgraft.layouts.trial import Trial
from kernelgraft.models.shrinking import quiet

DECODE_STEPS = 8
FACTOR = 4.0
"""The error with kernels may be this many times the original's own rounding."""
FLOOR_EPS = 64.0
"""Plus this many machine epsilons in float32 (a sixteenth of it in shorter dtypes): its error can be small by luck."""
NEGLIGIBLE = 1e-3
"""A gradient smaller than this part of all gradients is measured against this part: it may be zero but for rounding."""


@dataclass(frozen=True)
class Reference:
    """What the model does without kernels."""

    logits: torch.Tensor
    wide: torch.Tensor
    """float64, or `logits` where the model cannot be run so."""
    steps: tuple[torch.Tensor, ...]
    tokens: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    wide_gradients: dict[str, torch.Tensor]
    """Both empty for a model that cannot be trained as it is."""
    notes: tuple[str, ...] = ()
    """What the model cannot do without kernels either."""


def reference(trial: Trial) -> Reference:
    """Run the model without kernels, once."""
    logits = _logits(trial, trial.model)
    steps: tuple[torch.Tensor, ...] = ()
    tokens: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = {}
    notes: list[str] = []
    try:
        steps, tokens = _decode(trial, trial.model)
    except Exception as error:  # a model that generates in another way
        notes.append(f"a tiny model does not generate ({in_one_line(error, 120)}): decode steps are not checked")
    try:
        gradients = _gradients(trial, trial.model)
    except Exception as error:  # a model that has no backward
        notes.append(f"a tiny model has no gradients ({in_one_line(error, 120)}): training is not checked")
    try:
        double = copy.deepcopy(trial.model).double()
        wide, wide_gradients = _logits(trial, double), _gradients(trial, double) if gradients else {}
    except (RuntimeError, TypeError, NotImplementedError):  # code that is written for one dtype
        wide, wide_gradients = logits, gradients
    return Reference(logits, wide, steps, tokens, gradients, wide_gradients, tuple(notes))


def gate(trial: Trial, kernels: Sequence[LoadedKernel]) -> list[Finding]:
    """One finding for each way in which the kernels change what the model says, saves or learns, naming the guilty."""
    found = [finding for kernel in kernels for finding in _saved(trial, kernel)]
    wanted = reference(trial)
    found += [Finding("numbers", "note", note) for note in wanted.notes]
    together = _judged(trial, kernels, wanted)
    if len(kernels) > 1 and together:
        alone = [finding for kernel in kernels for finding in _judged(trial, [kernel], wanted)]
        return found + (alone or together)
    return found + together


def _saved(trial: Trial, kernel: LoadedKernel) -> list[Finding]:
    """Values that the rules do not bring back bit for bit."""
    if kernel.layout is None:
        return []
    found = []
    for sample in representatives(trial.model, match(trial.model, [kernel]).places):
        before = sample.moved(sample.built().layout)
        conversion = resolve(kernel.rules, list(before), getattr(trial.model, "config", None))
        for line in sorted(differences(before, conversion.backward(conversion.forward(before)))):
            message = f"`{kernel.name}Layout.conversion_mapping` does not come back: {line}; correct its reverse_op"
            found.append(Finding("save", "error", message, kernel.name))
    return list(dict.fromkeys(found))


def _judged(trial: Trial, kernels: Sequence[LoadedKernel], wanted: Reference) -> list[Finding]:
    from kernelgraft.layouts.applying import apply_layouts

    name = kernels[0].name if len(kernels) == 1 else None
    who = " and ".join(f"`{kernel.name}`" for kernel in kernels)

    def finding(check: Check, message: str, severity: Severity = "error") -> Finding:
        return Finding(check, severity, message, name)

    model = copy.deepcopy(trial.model)
    try:
        apply_layouts(model, kernels, check=False)
    except KernelgraftError as error:
        return [finding("build", in_one_line(error))]
    try:
        logits = _logits(trial, model)
        steps, tokens = _decode(trial, model) if wanted.steps else ((), None)
    except Exception as error:  # whatever a kernel's forward raises
        return [finding("numbers", _raised(who, "in a run", error, "correct the kernel or its Layout"))]
    own = _error(wanted.logits, wanted.wide)
    limit = FACTOR * own + _floor(wanted)
    off = _error(logits, wanted.wide)
    if not off <= limit:
        said = f"the logits of a tiny random model move by {off:.1e} (relative RMSE; its own rounding is {own:.1e})"
        return [finding("numbers", f"with {who} {said}: the kernel or its rules compute something else")]
    for step, (ours, theirs) in enumerate(zip(steps, wanted.steps, strict=True)):
        off = _error(ours, theirs)
        if not off <= 4 * limit:
            said = f"the logits of decode step {step} move by {off:.1e}, those of one forward do not"
            return [finding("numbers", f"with {who} {said}: does the kernel use the cache and the mask it is given?")]
        if (
            tokens is not None
            and wanted.tokens is not None
            and not torch.equal(tokens[:, step], wanted.tokens[:, step])
        ):
            break  # two tokens as good as equal: what follows is another text
    if wanted.wide_gradients and all(kernel.has_backward or _trains_itself(kernel) for kernel in kernels):
        otherwise = "give the Layout a forward that trains" if any(k.layout for k in kernels) else "the original trains"
        mend = f"write its backward, or set has_backward = False and {otherwise}"
        return _trained(trial, model, who, wanted, finding, mend)
    return []


def _floor(wanted: Reference) -> float:
    info = torch.finfo(wanted.logits.dtype)
    return FLOOR_EPS * info.eps / (1 if info.bits >= 32 else 16)


def _trains_itself(kernel: LoadedKernel) -> bool:
    return kernel.layout is not None and kernel.layout.forward is not nn.Module.forward


def _trained(
    trial: Trial, model: nn.Module, who: str, wanted: Reference, finding: Callable[..., Finding], mend: str
) -> list[Finding]:
    try:
        gradients = _gradients(trial, model)
    except Exception as error:  # whatever a kernel's backward raises
        return [finding("training", _raised(who, "in training", error, mend))]
    total = torch.stack([g.pow(2).mean() for g in wanted.wide_gradients.values()]).max().sqrt()
    for name, theirs in wanted.wide_gradients.items():
        if name not in gradients:
            return [finding("training", f"with {who} no gradient reaches `{name}`: {mend}")]
        least = float(total) * NEGLIGIBLE
        own, off = _error(wanted.gradients[name], theirs, least), _error(gradients[name], theirs, least)
        if not off <= 2 * FACTOR * own + _floor(wanted):
            gone = not bool(gradients[name].any()) and bool(theirs.any())
            said = "is gone" if gone else f"moves by {off:.1e} (relative RMSE)"
            return [finding("training", f"with {who} the gradient of `{name}` {said}: {mend}")]
    return []


def _raised(who: str, where: str, error: Exception, mend: str) -> str:
    return f"{who} raises {type(error).__name__} {where} of a tiny model ({in_one_line(error, 160)}): {mend}"


# --- running ---


def _logits(trial: Trial, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return trial.outputs(model)


def _decode(trial: Trial, model: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Logits of eight greedy steps after a left-padded batch, and the tokens chosen."""
    if trial.padded is None:
        return (), None
    with torch.no_grad(), quiet():
        out = model.generate(
            **trial.padded,
            max_new_tokens=DECODE_STEPS,
            min_new_tokens=DECODE_STEPS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return tuple(out.logits), out.sequences[:, -len(out.logits) :]


def _gradients(trial: Trial, model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of a fixed projection of the outputs, in train mode, under the original names."""
    model.train()
    try:
        with torch.enable_grad():
            out = trial.outputs(model)
            direction = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype, device=out.device)
            (out.softmax(-1) * direction).sum().backward()
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters(remove_duplicate=False)
            if p.is_floating_point()
        }
        return {name: grad.clone() for name, grad in original_state_dict(model, grads).items()}
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()


def _error(got: torch.Tensor, wanted: torch.Tensor, least: float = 1e-30) -> float:
    """Root mean square of the difference over that of `wanted` (or `least`); infinite where not both are finite."""
    finite = torch.isfinite(wanted)
    if got.shape != wanted.shape or not torch.equal(finite, torch.isfinite(got)):
        return float("inf")
    difference, scale = (got.double() - wanted.double())[finite], wanted.double()[finite]
    if not difference.numel():
        return 0.0
    return float(difference.pow(2).mean().sqrt() / scale.pow(2).mean().sqrt().clamp_min(max(least, 1e-30)))
