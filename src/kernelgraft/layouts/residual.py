"""Residual additions that a fused norm takes over: the parent's statements are rewritten on that instance.

A Layout of fusion "residual" stands at the name of a norm that reads the sum of a residual and a branch. Its kernel's
forward is called as `forward(hidden_states, residual)` with the branch and the residual, and returns `(output, sum)`:
the normed sum (or what further parts of the fusion make of it), and the sum that the parent goes on with.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from kernelgraft.errors import RebindError, UsageError
from kernelgraft.layouts.records import Place
from kernelgraft.records import Site
from kernelgraft.sites import current, injected_name, rebind, source_ref, statements
from kernelgraft.sites.rebind import function_tree

Function = Callable[..., Any]


def with_addition(parent: nn.Module, place: Place) -> Function:
    """The parent's forward in which the addition is left to the Layout; nothing is changed yet.

    Instances of one class share it: torch.compile sees one piece of code. Raises UsageError if the forward does not
    add right before it calls the norm, or calls the norm elsewhere too.
    """
    owner: Any = type(parent)
    return _rewritten(current(parent), place.names[0], owner, place.kernel.name)


@functools.lru_cache(maxsize=64)
def _rewritten(method: Function, norm: str, owner: type[nn.Module], kernel: str) -> Function:
    where = f"the forward of `{owner.__name__}`"
    try:
        tree = function_tree(method)
    except RebindError as error:
        raise UsageError(f"{where} cannot be rewritten: {error}") from error
    found = [match for match in statements.find(tree) if match.norm == norm]
    before = [match for match in found if match.order == "pre"]
    if len(before) != 1:
        why = "adds after it" if found and not before else "does not add right before it"
        raise UsageError(f"{where} calls `{norm}` but {why}; `{kernel}` fuses a norm of a sum")
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == norm]
    if len(reads) != 1:
        raise UsageError(f"{where} uses `{norm}` {len(reads)} times; `{kernel}` can stand for one use")
    site = Site(
        kind="statement",
        path="*",
        instances=(),
        class_name=f"{owner.__module__}.{owner.__qualname__}",
        symbol=norm,
        detail={"order": "pre", "index": before[0].line},
        source=source_ref(method),
    )
    return rebind(method, names={injected_name(site): _call(norm)}, transform=statements.transformer([site]))


def _call(norm: str) -> Function:
    def add_and_norm(module: nn.Module, residual: Any, hidden_states: Any) -> Any:
        output, total = getattr(module, norm)(hidden_states, residual)
        return total, output

    return add_and_norm
