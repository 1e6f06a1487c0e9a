"""The source of a Solution that calls one of TileGym's operations."""

from __future__ import annotations

import json
from pathlib import Path

from kernelgraft.records import Definition
from kernelgraft.suppliers.peers import function, text

WHERE: dict[str, list[str]] = json.loads((Path(__file__).parent / "ops.json").read_text(encoding="utf-8"))
"""Our name of an operation → the module that implements it in cuTile, and the function."""
AT = "from kernelgraft.kernels.guest import at"
UNTRACED = "@torch.compiler.disable\n"
"""Before `kernel`: torch.compile calls it instead of tracing into TileGym."""

PASS_ON = '''
class PassOn(torch.autograd.Function):
    """Gives TileGym's backward a contiguous gradient, the only kind that it takes."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()
'''


def imported(operation: str) -> str:
    """The line that imports an operation as `operation`."""
    module, name = WHERE[operation]
    return f"from {module} import {name} as operation"


def calling(
    operation: str, definition: Definition, call: str, after: list[str], *, at: str = "", parts: tuple[str, ...] = ()
) -> str:
    """`kernel` with the Definition's inputs: `result = <call>` where the first input lies, then the lines `after`.

    `at` are further arguments of the context, `parts` further functions and classes.
    """
    first = next(iter(definition.inputs))
    lines = [f"with at({first}{at}):", f"    result = {call}", *after]
    return text(
        ["import torch", "", AT, imported(operation)],
        *parts,
        UNTRACED + function("kernel", definition.inputs, lines),
    )
