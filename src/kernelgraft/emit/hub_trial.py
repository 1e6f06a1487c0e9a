"""Try an emitted package of kernels: on the model's configuration, and its gradients and traces on a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kernelgraft.families.reference import torch_dtype
from kernelgraft.layouts.applying import apply_layouts
from kernelgraft.layouts.checking import check
from kernelgraft.layouts.findings import Finding
from kernelgraft.layouts.packages import load_all
from kernelgraft.models import randomise
from kernelgraft.models.shrinking import quiet
from kernelgraft.records import ModelCard

if TYPE_CHECKING:
    from kernelgraft.emit.hub_fitting import Kernel

# relRMSE up to which two gradients of one compute are the same.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def keys(root: Path, kernels: Sequence[Kernel]) -> dict[Any, str]:
    """The kernels of a package in a folder, as KernelSet takes them."""
    return {one.key: f"{root}:{one.name}" for one in kernels}


def fits(root: Path, kernels: Sequence[Kernel], config: PreTrainedConfig, device: str) -> list[Finding]:
    """What the check of Layouts says of a package on the model that its graft was made for."""
    return check(keys(root, kernels), config, device=device)


def measure(root: Path, kernels: Sequence[Kernel], config: PreTrainedConfig, card: ModelCard) -> str:
    """Set `has_backward` and `can_torch_compile` of each kernel by trying; how it was done, in words.

    A kernel has a backward if its gradients are those of its Layout's own forward, and can be compiled if torch.compile
    traces its forward without a break, to the same result.
    """
    device = card.device.partition(":")[0]
    if device == "cuda" and not torch.cuda.is_available():
        for one in kernels:
            # Calls that a kernel has no gradient for run the original: its guard says so.
            one.has_backward, one.can_torch_compile = True, False
        return "not measured, for want of a GPU: gradients hold by the guards, tracing is not claimed"
    dtype = torch_dtype(card.dtype)
    # Built on its device: a wide model takes long on a CPU. Every value is then drawn anew.
    with quiet(), torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    randomise(model, 0)
    loaded = load_all(keys(root, kernels), device=device)
    paths = [one.tried or one.paths[0] for one in kernels]
    with apply_layouts(model, loaded, check=False):
        calls = _calls(model, paths)
        for one, path, kernel in zip(kernels, paths, loaded, strict=True):
            module, inputs = model.get_submodule(path), calls[path]
            layout = kernel.layout
            assert layout is not None
            ours, own = _bound(kernel.kernel.forward, module), _bound(layout.forward, module)
            one.has_backward = _same_gradients(ours, own, module, inputs, TOLERANCE.get(dtype, 1e-4))
            one.can_torch_compile = _traces(ours, inputs)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    return f"measured on {where} with torch {torch.__version__}, {card.dtype}"


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _bound(forward: Callable[..., Any], module: nn.Module) -> Callable[[Inputs], torch.Tensor]:
    """A forward of a module's inputs; of several outputs the first."""

    def run(inputs: Inputs) -> torch.Tensor:
        out = forward(module, *inputs[0], **inputs[1])
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return run


def _calls(model: nn.Module, paths: Sequence[str]) -> dict[str, Inputs]:
    """The inputs of modules in one run on a few tokens."""
    found: dict[str, Inputs] = {}

    def keeper(path: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.setdefault(path, (args, kwargs))

        return keep

    hooks = [model.get_submodule(p).register_forward_pre_hook(keeper(p), with_kwargs=True) for p in paths]
    try:
        size = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]
        device = next(model.parameters()).device
        with torch.no_grad():
            model(input_ids=(torch.arange(6, device=device) % size)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _same_gradients(
    ours: Callable[[Inputs], torch.Tensor],
    own: Callable[[Inputs], torch.Tensor],
    module: nn.Module,
    inputs: Inputs,
    tolerance: float,
) -> bool:
    parameters = [p for p in module.parameters() if p.requires_grad]

    def gradients(forward: Callable[[Inputs], torch.Tensor]) -> list[torch.Tensor] | None:
        leaves: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1]

        out = forward((tuple(leaf(x) for x in inputs[0]), {name: leaf(x) for name, x in inputs[1].items()}))
        if not out.requires_grad:
            return None
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
        found = torch.autograd.grad(out, [*leaves, *parameters], weights, allow_unused=True)
        return [torch.zeros(()) if gradient is None else gradient for gradient in found]

    try:
        with torch.enable_grad():
            mine, theirs = gradients(ours), gradients(own)
    except (RuntimeError, NotImplementedError):  # what autograd raises for an operation without a gradient
        return False
    if mine is None or theirs is None:
        return False
    same = all(a.shape == b.shape for a, b in zip(mine, theirs, strict=True))
    return same and all(_relative(a, b) <= tolerance for a, b in zip(mine, theirs, strict=True))


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.double().norm())
    difference = float((actual.double() - expected.double()).norm())
    return difference / scale if scale else difference


def _traces(forward: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> bool:
    """Whether a forward is traced whole, and then gives the same."""
    with torch.no_grad():
        expected = forward(inputs)
        try:
            actual = torch.compile(forward, fullgraph=True, backend="eager")(inputs)
        except Exception:  # whatever a tracer raises is why it cannot
            return False
        finally:
            torch.compiler.reset()
    return _relative(actual, expected) <= 1e-5
