"""What a norm module is made of, found by behaviour: which vectors scale and shift its rows, and its eps.

A norm is a module with one tensor input and one output of the same shape that scales each row (the last axis) to unit
size: the output stays as it is when the input is multiplied by a constant. The module is copied, not called or changed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kernelgraft.families.probe import clone, draw, fresh_parameter

PROBE_ELEMENTS = 1 << 16
"""About how many elements a probe has: enough rows to tell variants apart, few enough to be quick."""


@dataclass(frozen=True)
class Parts:
    """What a norm module is made of; attribute names of tensors, None where there is none."""

    centres: bool
    """True if adding a constant to a row leaves the output as it is."""
    weight: str | None
    bias: str | None
    argument: str
    """Name of forward's first parameter."""
    eps: float
    eps_attribute: str | None
    """Where the module keeps eps; None if it is not an attribute."""
    functions: frozenset[str]
    """Names of the torch functions that its forward calls."""


@dataclass(frozen=True)
class Misfit:
    """Why a module that scales its rows is no norm that can be served."""

    centres: bool
    reason: str


def vectors(module: nn.Module, size: int) -> list[str] | None:
    """Names of the floating vectors of that size that the module owns; None if there is any other parameter in it.

    Other buffers are passed over: some classes keep one that nothing reads.
    """
    if any(True for child in module.children() for _ in child.parameters()):
        return None

    def fits(tensor: torch.Tensor) -> bool:
        return tensor.shape == (size,) and tensor.is_floating_point()

    parameters = dict(module.named_parameters(recurse=False))
    if not all(fits(p) for p in parameters.values()):
        return None
    return [*parameters, *(name for name, b in module.named_buffers(recurse=False) if fits(b))]


def find_parts(module: nn.Module, x: torch.Tensor) -> Parts | Misfit | None:
    """The parts of a norm module that takes tensors like `x`; why it cannot be served; None if it is no norm at all.

    May raise whatever the module raises on fresh values.
    """
    if not x.is_floating_point() or x.ndim < 2 or x.shape[-1] < 2:
        return None
    names = vectors(module, x.shape[-1])
    if names is None or len(names) > 2:
        return None
    copy = fresh_copy(module, torch.float32, seed=1)
    shape = probe_shape(x)
    rows = draw(shape, torch.float32, torch.Generator().manual_seed(2))
    far = 100 * rows
    zero = torch.zeros(())
    with torch.no_grad(), _Functions() as functions:
        large = copy(far.clone())
        if not isinstance(large, torch.Tensor) or large.shape != torch.Size(shape):
            return None
        if not large.isfinite().all() or _close(large, zero) or not _close(copy(3 * far), large):
            return None
        centres = _close(copy(far + 100), large)
        offsets = ((large + copy(-far)) / 2).reshape(-1, shape[-1])
        eps = solve_eps(copy, rows)
        read = [n for n in names if _is_read(copy, n, far, large)]
    bias = None
    if not _close(offsets, zero):
        bias = next((n for n in names if _close(offsets, getattr(copy, n))), None)
        if bias is None:
            return Misfit(centres, "scales its rows and adds something that is not one of its vectors")
    weights = [n for n in read if n != bias]
    if len(weights) > 1:
        return Misfit(centres, "has two vectors that scale its rows; one is served")
    if eps is None:
        return Misfit(centres, "scales its rows, but not by 1 / sqrt(mean square + eps) for any eps")
    value, attribute = name_eps(module, eps, rows)
    argument = list(inspect.signature(type(module).forward).parameters)[1]
    weight = weights[0] if weights else None
    return Parts(centres, weight, bias, argument, value, attribute, frozenset(functions.names))


def solve_eps(copy: nn.Module, rows: torch.Tensor) -> float | None:
    """The eps of x / sqrt(mean square + eps), from how much smaller the outputs of small rows are; 0.0 is a value.

    None if no single eps explains them.
    """
    rows = rows - rows.mean(-1, keepdim=True)
    power = rows.double().pow(2).mean(-1, keepdim=True)

    def odd(scale: float) -> torch.Tensor:
        difference: torch.Tensor = (copy(rows * scale).double() - copy(rows * -scale).double()) / 2
        return difference

    full = odd(1e3)
    telling = full.abs() > full.abs().mean()
    estimates = []
    shrunk = math.nan
    for exponent in range(17):  # down to rows whose squares are still normal numbers in float32
        scale = 10.0**-exponent
        ratio = odd(scale) / full
        shrunk = ratio[telling].median().item()
        if 0.2 < shrunk < 0.98:
            estimates.append((scale**2 * power * (1 / ratio**2 - 1))[telling].median().item())
    if not estimates:
        return 0.0 if shrunk > 0.98 else None
    return min(estimates) if max(estimates) < 1.02 * min(estimates) else None


def name_eps(module: nn.Module, solved: float, rows: torch.Tensor) -> tuple[float, str | None]:
    """The exact value of a solved eps and the attribute that holds it; the nearest short decimal if none does.

    An attribute counts only if the behaviour of a copy follows a change of it.
    """
    for name, value in vars(module).items():
        if type(value) is float and abs(value - solved) <= 0.01 * solved:
            copy = fresh_copy(module, torch.float32, seed=1)
            setattr(copy, name, 0.25)
            with torch.no_grad():
                moved = solve_eps(copy, rows)
            if moved is not None and abs(moved - 0.25) < 0.01:
                return value, name
    for digits in range(3):
        rounded = float(f"{solved:.{digits}e}")
        if abs(rounded - solved) <= 1e-3 * solved:
            return rounded, None
    machine = torch.finfo(torch.float32).eps
    return (machine if abs(machine - solved) <= 1e-3 * solved else solved), None


def fresh_copy(module: nn.Module, dtype: torch.dtype, *, seed: int) -> nn.Module:
    """`probe.clone`, with floating buffers drawn anew too: a weight may be kept as one."""
    copy = clone(module, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, buffer in list(copy.named_buffers(recurse=False)):
        if buffer.is_floating_point():
            setattr(copy, name, fresh_parameter(buffer.shape, generator).to(buffer.dtype))
    return copy


def probe_shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape of `x`, longer along its first axis or shorter along its widest, for about `PROBE_ELEMENTS`."""
    size, shape = x.shape[-1], list(x.shape)
    while math.prod(shape) > PROBE_ELEMENTS and max(shape[:-1]) > 1:
        widest = max(range(len(shape) - 1), key=lambda i: shape[i])
        shape[widest] = (shape[widest] + 1) // 2
    wanted = max(8, min(64, PROBE_ELEMENTS // size))
    shape[0] *= -(-wanted // (math.prod(shape) // size))
    return tuple(shape)


def probe_rows(shape: Sequence[int]) -> torch.Tensor:
    """Float32 rows of every kind: tiny to large (eps shows), with an outlier (a clamp shows), ramps, normal ones."""
    generator = torch.Generator().manual_seed(12)
    rows = draw(shape, torch.float32, generator).view(-1, shape[-1])
    number = rows.shape[0]
    scales = 10.0 ** (torch.rand(number, 1, generator=generator) * 6 - 4)
    kinds = torch.arange(number) % 8
    rows = rows * torch.where(kinds.unsqueeze(1) < 4, scales, torch.ones(()))
    columns = torch.randint(0, shape[-1], (number,), generator=generator)
    rows[kinds == 5, columns[kinds == 5]] = 1000.0
    rows[kinds == 6] = draw((int((kinds == 6).sum()), shape[-1]), torch.float32, generator, "ramp")
    return rows.view(*shape)


def _is_read(copy: nn.Module, name: str, x: torch.Tensor, output: torch.Tensor) -> bool:
    """True if the output follows a change of that vector."""
    vector = getattr(copy, name)
    vector.mul_(2)
    changed: torch.Tensor = copy(x.clone())
    vector.div_(2)
    return not torch.equal(changed, output)


class _Functions(TorchFunctionMode):
    """Records the names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a.float(), b.float().expand_as(a), rtol=2e-3, atol=2e-3))
