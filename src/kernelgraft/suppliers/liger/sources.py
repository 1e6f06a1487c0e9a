"""What the sources of Solutions that call Liger-Kernel's operations share."""

from __future__ import annotations

from collections.abc import Sequence

from kernelgraft.records import Definition
from kernelgraft.suppliers.peers import function, text

WIDEST = 65536
"""Channels: a row is one Triton block, and this is the largest."""
TOO_WIDE = f"rows of one known size up to {WIDEST} are served"


def calling(imports: Sequence[str], definition: Definition, lines: Sequence[str], *parts: str) -> str:
    """`kernel` with the Definition's inputs and these lines, on the first input's device.

    Triton launches on the current device, and not all of Liger's launchers make their tensors' the current one.
    """
    first = next(iter(definition.inputs))
    body = [f"with torch.cuda.device({first}.device):", *(f"    {line}" for line in lines)]
    return text(["import torch", *imports], *parts, function("kernel", definition.inputs, body))
