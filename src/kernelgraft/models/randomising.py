"""Give a model random weights that leave nothing at its initial value.

A freshly built model hides mistakes: its norm weights are all one, its biases zero. After `randomise` a kernel that
forgets a scale, a bias or the `1 +` of a scale gives other numbers. What a tensor is for is read from its initial
values and its owner's structure, never from its name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from kernelgraft.errors import UsageError
from kernelgraft.models.shrinking import quiet

SPREAD = 0.5  # of a scale around its initial value, relative (absolute around zero)
BIAS_STD = 0.1
HEAD_SPREAD = 0.5  # standard deviation of the logarithm of an output row's scale
STRUCTURED = (0.25, 0.05, 0.0)  # relative perturbations of patterned tensors, tried from the left


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Randomise every floating-point parameter and learned buffer in place, deterministically by `seed`.

    Matrices become N(0, 1/fan_in); constant vectors spread by half of their value around it, or uniformly in ±0.5
    around zero when they are their module's only parameter (a `1 + w` scale), else N(0, 0.1²) (a bias), as does small
    noise. Patterned tensors (decay rates, time steps) keep their signs and move by a quarter at most; a persistent
    buffer that holds a pattern is a table computed from the configuration and stays. Tied weights stay tied, and
    torch's global generators are left as they were. Values depend on the device's generator: seed on the CPU for equal
    weights everywhere. Raises UsageError when logits are not finite even with patterned tensors kept.
    """
    patterned: list[tuple[torch.Tensor, torch.Tensor]] = []
    generators: dict[torch.device, torch.Generator] = {}
    for owner, tensor in _tensors(model):
        generator = generators.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(seed))
        if not _refresh(owner, tensor, generator) and isinstance(tensor, nn.Parameter):
            patterned.append((tensor, tensor.clone()))
    for spread in STRUCTURED:
        for tensor, initial in patterned:
            tensor.copy_(_perturbed(initial, spread, generators[tensor.device]))
        if _finite(model):
            return
    raise UsageError(f"`{type(model).__name__}` gives non-finite logits with random weights; try another seed")


@torch.no_grad()
def make_decisive(model: nn.Module, seed: int) -> None:
    """Scale the rows of the output head, in place, log-normally: some tokens are likelier than others, as in language.

    With equally scaled rows the probabilities over a large vocabulary are next to uniform, and the two largest logits
    are often equal in a 16-bit dtype. Without an output head nothing is done.
    """
    find = getattr(model, "get_output_embeddings", None)
    weight = getattr(find() if find is not None else None, "weight", None)
    if isinstance(weight, torch.Tensor):
        # Not the numbers that the first matrix is made of.
        generator = torch.Generator(weight.device).manual_seed(seed + 1_000_003)
        scale = torch.empty(weight.shape[0], 1, device=weight.device).normal_(0, HEAD_SPREAD, generator=generator)
        weight.mul_(scale.exp_())


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Each floating-point parameter and persistent buffer once, with the module that owns it."""
    seen: set[int] = set()
    for module in model.modules():
        buffers = [b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
        for tensor in (*module._parameters.values(), *buffers):
            if tensor is not None and id(tensor) not in seen and tensor.is_floating_point() and tensor.numel():
                seen.add(id(tensor))
                yield module, tensor


def _refresh(owner: nn.Module, tensor: torch.Tensor, generator: torch.Generator) -> bool:
    """Give a matrix, a constant or small noise new values; false, with nothing done, for a patterned tensor."""

    def uniform() -> torch.Tensor:
        return 2 * torch.rand(tensor.shape, device=tensor.device, generator=generator) - 1

    # In place and in the tensor's own dtype: matrices are most of a model, and a float32 copy doubles the time.
    if _constant(tensor):
        if (value := tensor.flatten()[0].float()) != 0:
            tensor.copy_(value * (1 + SPREAD * uniform()))
            return True
        if tensor.squeeze().ndim < 2:
            if tensor.numel() > 1 and sum(1 for _ in owner.parameters(recurse=False)) == 1:
                tensor.copy_(SPREAD * uniform())
            else:
                tensor.normal_(0, BIAS_STD, generator=generator)
            return True
    elif not isinstance(tensor, nn.Parameter):
        return False
    elif tensor.squeeze().ndim < 2:
        is_noise = bool(tensor.min() < 0 < tensor.max() and tensor.abs().max() < SPREAD)
        if is_noise:
            tensor.normal_(0, BIAS_STD, generator=generator)
        return is_noise
    elif _repeats(tensor):
        return False
    tensor.normal_(0, _fan_in(owner, tensor) ** -0.5, generator=generator)
    return True


def _constant(tensor: torch.Tensor) -> bool:
    """Whether all values are equal; most tensors show at their beginning that they are not."""
    return all(bool((part == part[0]).all()) for part in (tensor.flatten()[:1024], tensor.flatten()))


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether the first two rows are equal, as in a decay matrix that holds one ramp per channel."""
    rows = tensor.flatten(0, -2)
    return rows.shape[0] > 1 and torch.equal(rows[0], rows[1])


def _fan_in(owner: nn.Module, tensor: torch.Tensor) -> int:
    if isinstance(owner, Conv1D):  # stored as [in, out]
        return tensor.shape[0]
    return tensor[0].numel() if isinstance(owner, nn.modules.conv._ConvNd) else tensor.shape[-1]


def _perturbed(initial: torch.Tensor, spread: float, generator: torch.Generator) -> torch.Tensor:
    noise = 2 * torch.rand(initial.shape, device=initial.device, dtype=torch.float32, generator=generator) - 1
    values = initial.float()
    size = torch.where(values == 0, values.abs().mean(), values.abs())  # relative, so that no sign changes
    return values + spread * noise * torch.where(size.isfinite(), size, 0.0)


def _finite(model: nn.Module) -> bool:
    """Whether the logits of a short prompt are finite; true for a model without memory (meta device)."""
    device = next(model.parameters()).device
    if device.type == "meta":
        return True
    with quiet():
        ids = torch.arange(20, 26, device=device)[None]
        return bool(model(input_ids=ids).logits.isfinite().all())
