"""Guards and seats as plain Python: which kernel serves a call, written out as the conditions that decide it."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence

from kernelgraft.families.base import Family
from kernelgraft.records import Definition, Guard, Seat, Solution


def fits(definition: Definition, name: str) -> str:
    """`def <name>(<inputs>)`: True for a call that is one of the Definition's, whatever a guard says."""
    places = axis_places(definition)
    tests: list[str] = []
    for argument, spec in definition.inputs.items():
        if spec.shape is None:
            continue
        tests += [f"{argument}.dtype == torch.{spec.dtype}", f"{argument}.dim() == {len(spec.shape)}"]
    for argument, spec in definition.inputs.items():
        for index, axis in enumerate(spec.shape or ()):
            size, here = definition.axes[axis].value, f"{argument}.shape[{index}]"
            if size is not None:
                tests.append(f"{here} == {size}")
            elif places[axis] != here:
                tests.append(f"{here} == {places[axis]}")
    tests += [_constraint(c, definition) for c in definition.constraints]
    tensors = [n for n, s in definition.inputs.items() if s.shape is not None]
    conditions = [f"plain({', '.join(tensors)})", *tests]
    body = "\n        and ".join(conditions)
    arguments = ", ".join(definition.inputs)
    return f"def {name}({arguments}):\n    return (\n        {body}\n    )\n"


def select(
    definition: Definition,
    name: str,
    fits_name: str,
    seats: Sequence[Seat],
    solutions: Mapping[str, Solution],
    entries: Mapping[str, str],
    work_name: str,
) -> str:
    """`def <name>(<inputs>)`: the kernel for a call, or None: the original serves.

    Of the seats the one measured at the same sizes decides, else that nearest in log(work).
    """
    arguments = ", ".join(definition.inputs)
    ordered = sorted(seats, key=lambda s: s.work)
    lines = [f"if not {fits_name}({arguments}):", "    return None"]
    static = any(solutions[s.solution].meta.guard.static_shapes for s in seats if s.seated and s.solution)
    for seat in ordered:
        if seat.axes is not None and (static or needs_work(seats)):
            places = axis_places(definition)
            equal = " and ".join(f"{places[axis]} == {size}" for axis, size in seat.axes.items())
            lines += [f"if {equal}:", *_indented(_serve(seat, definition, solutions, entries, measured=True))]
    lines += _by_work(ordered, definition, solutions, entries, f"{work_name}(({arguments},))")
    return f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)


def needs_work(seats: Sequence[Seat]) -> bool:
    """True if the seats of a Definition do not all say the same."""
    return len({_choice(s) for s in seats}) > 1


def work(family: Family, name: str) -> str:
    """The family's size of a call as a function of the tuple of inputs."""
    source = textwrap.dedent(inspect.getsource(type(family).work))
    head = re.compile(r"def work\(self, inputs[^)]*\)[^:]*:")
    return head.sub(f"def {name}(inputs):", source, count=1)


def axis_places(definition: Definition) -> dict[str, str]:
    """For each axis an expression that gives its size from the inputs."""
    places: dict[str, str] = {}
    for argument, spec in definition.inputs.items():
        for index, axis in enumerate(spec.shape or ()):
            places.setdefault(axis, f"{argument}.shape[{index}]")
    return places


def _choice(seat: Seat) -> str | None:
    return seat.solution if seat.seated else None


def _by_work(
    seats: Sequence[Seat],
    definition: Definition,
    solutions: Mapping[str, Solution],
    entries: Mapping[str, str],
    size: str,
) -> list[str]:
    """Neighbours with the same choice are one; the border between two lies in the middle of their log(work)."""
    groups: list[list[Seat]] = []
    for seat in seats:
        if groups and _choice(groups[-1][-1]) == _choice(seat):
            groups[-1].append(seat)
        else:
            groups.append([seat])
    lines = []
    if len(groups) > 1:
        lines.append(f"work = {size}")
    for group, following in itertools.pairwise(groups):
        border = math.isqrt(group[-1].work * following[0].work)
        lines += [f"if work <= {border}:", *_indented(_serve(group[0], definition, solutions, entries))]
    return lines + _serve(groups[-1][0], definition, solutions, entries) if groups else ["return None"]


def _serve(
    seat: Seat,
    definition: Definition,
    solutions: Mapping[str, Solution],
    entries: Mapping[str, str],
    *,
    measured: bool = False,
) -> list[str]:
    """Statements that return the seat's kernel if its guard holds."""
    if not seat.seated or seat.solution is None:
        return ["return None"]
    guard = solutions[seat.solution].meta.guard
    tests = _guard(guard, definition)
    if guard.static_shapes and not measured:
        return ["return None  # compiled for the measured shapes only"]
    entry = entries[seat.solution]
    comment = f"# {guard.text}" if guard.text else "# any call"
    if not tests:
        return [comment, f"return {entry}"]
    condition = " and ".join(tests)
    if len(condition) < 80:
        return [comment, f"return {entry} if {condition} else None"]
    return [
        comment,
        "if (",
        f"    {tests[0]}",
        *(f"    and {t}" for t in tests[1:]),
        "):",
        f"    return {entry}",
        "return None",
    ]


def _guard(guard: Guard, definition: Definition) -> list[str]:
    places = axis_places(definition)
    tensors = [n for n, s in definition.inputs.items() if s.shape is not None]
    floating = {s.dtype for s in definition.inputs.values() if "float" in s.dtype}
    tests = [f"{tensors[0]}.device.type in {guard.devices!r}"]
    if not floating <= set(guard.dtypes):
        tests.append("False")
    if not guard.autograd:
        tests.append(f"not needs_gradient({', '.join(tensors)})")
    tests += [f"{n}.is_contiguous()" for n in guard.contiguous if n in tensors]
    tests += [f"({n}.shape[-1] <= 1 or {n}.stride(-1) == 1)" for n in guard.last_dim_contiguous if n in tensors]
    tests += [f"{places[axis]} <= {size}" if axis in places else "False" for axis, size in guard.max_axes.items()]
    tests += [f"{places[a]} in (1, {places[b]})" for a, b in guard.equal_axes]
    return tests


def _constraint(text: str, definition: Definition) -> str:
    """A constraint with its axes written as sizes of the inputs."""
    places = {n: str(a.value) for n, a in definition.axes.items() if a.value is not None} | axis_places(definition)

    class Sizes(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.parse(places[node.id], mode="eval").body if node.id in places else node

    return f"({ast.unparse(Sizes().visit(ast.parse(text, mode='eval')))})"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
