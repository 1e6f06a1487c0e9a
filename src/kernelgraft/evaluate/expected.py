"""What a Solution's outputs are compared with: the original's own result, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft.families.reference import (
    Float64Mode,
    as_tuple,
    reference_function,
    run_oracle,
    run_reference,
    torch_dtype,
)
from kernelgraft.records import Definition
from kernelgraft.suppliers.guards import bind_axes


@dataclass(frozen=True)
class Expected:
    """Two right answers for one case, one tensor per name."""

    native: dict[str, torch.Tensor]
    """In the case's dtypes: the yardstick of the tolerance, and what shape, dtype, device and contiguity must be."""
    exact: dict[str, torch.Tensor]
    """Float64, same shapes."""


def outputs(definition: Definition, inputs: Sequence[Any], original: Callable[..., Any] | None) -> Expected:
    """Outputs by the original (None: the reference) and by the oracle. Raises what the reference raises."""
    if original is None:
        native = run_reference(definition, inputs)
    else:
        with torch.no_grad():
            native = as_tuple(original(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)))
    exact = run_oracle(definition, inputs)
    return Expected(
        dict(zip(definition.outputs, native, strict=True)), dict(zip(definition.outputs, exact, strict=True))
    )


def cotangents(definition: Definition, inputs: Sequence[Any], seed: int) -> list[torch.Tensor | None]:
    """Gradients that flow into the outputs, N(0, 1), on the CPU; None for outputs that are not floating."""
    generator = torch.Generator().manual_seed(seed)
    sizes = bind_axes(definition, inputs)
    found: list[torch.Tensor | None] = []
    for spec in definition.outputs.values():
        dtype = torch_dtype(spec.dtype)
        shape = [sizes[axis] for axis in spec.shape or ()]
        found.append(torch.randn(shape, generator=generator).to(dtype) if dtype.is_floating_point else None)
    return found


def gradients(
    definition: Definition, inputs: Sequence[Any], given: Sequence[torch.Tensor | None], wanted: Sequence[int]
) -> Expected | None:
    """Gradients of the wanted inputs through the reference; None if the reference gives none."""
    native = _gradients(definition, inputs, given, wanted)
    if native is None:
        return None
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    with Float64Mode():
        exact = _gradients(definition, wide, [None if c is None else c.double() for c in given], wanted)
    assert exact is not None
    return Expected(native, exact)


def _gradients(
    definition: Definition, inputs: Sequence[Any], given: Sequence[torch.Tensor | None], wanted: Sequence[int]
) -> dict[str, torch.Tensor] | None:
    names = list(definition.inputs)
    with torch.enable_grad():
        leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        for index in wanted:
            leaves[index].requires_grad_()
        results = as_tuple(reference_function(definition)(*leaves))
        pairs = [(y, c.to(y.device)) for y, c in zip(results, given, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            return None
        found = torch.autograd.grad(
            [y for y, _ in pairs], [leaves[i] for i in wanted], [c for _, c in pairs], allow_unused=True
        )
    return dict(_named(names, wanted, found))


def _named(
    names: Sequence[str], wanted: Sequence[int], found: Sequence[torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor]]:
    for index, gradient in zip(wanted, found, strict=True):
        if gradient is not None:
            yield f"the gradient of {names[index]}", gradient
