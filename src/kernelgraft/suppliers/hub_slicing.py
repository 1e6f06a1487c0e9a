"""A kernel class of a package as a plain function: its forward, and what that reaches in the package.

The package's code is read, not run. What the forward reads from `self` becomes fields of a tuple: the parameters of the
Layout (or `weight` and `bias`) are inputs, what is called some epsilon is the Definition's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kernelgraft.records import SourceFile

ENTRY = "hub_kernel.py"


class Unsliceable(Exception):
    """Why a kernel cannot be taken out of its package."""


def kernel_classes(layers: ast.Module) -> dict[str, ast.ClassDef]:
    """The classes with a forward in `layers.py`, Layouts left out."""
    found = {node.name: node for node in layers.body if isinstance(node, ast.ClassDef)}
    return {name: node for name, node in found.items() if not name.endswith("Layout") and forward_of(node)}


def forward_of(node: ast.ClassDef) -> ast.FunctionDef | None:
    """The forward that a class defines itself."""
    return next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward"), None)


def flag(node: ast.ClassDef, name: str, default: bool) -> bool:
    """What a class says with `name = True` or `False`."""
    for line in node.body:
        named = isinstance(line, ast.Assign) and any(_is(target, name) for target in line.targets)
        if named and isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            return bool(line.value.value)
    return default


def sliced(build: Path, name: str, inputs: list[str], eps: float) -> tuple[SourceFile, ...]:
    """Sources whose `kernel(*inputs)`, in `ENTRY`, is the forward of the class `name`; raises Unsliceable.

    The first input is the forward's own; the others are parameters.
    """
    layers = ast.parse((build / "layers.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in layers.body if isinstance(node, ast.ClassDef)}
    forward = forward_of(classes[name])
    assert forward is not None
    if len(forward.args.args) != 2 or forward.args.vararg or forward.args.kwarg or forward.args.kwonlyargs:
        raise Unsliceable("its forward takes more than one input")
    own = forward.args.args[0].arg
    read = {n.attr for n in ast.walk(forward) if isinstance(n, ast.Attribute) and _is(n.value, own)}
    parts, files = _reached(layers, forward, build)
    passed_on = [n for n in ast.walk(forward) if isinstance(n, ast.Call) and any(_is(a, own) for a in n.args)]
    if passed_on:
        read |= {n.attr for part in parts for n in ast.walk(part) if isinstance(n, ast.Attribute) and _is(n.value, own)}
    values = _values(read, classes.get(f"{name}Layout"), inputs, eps)
    forward.name, forward.decorator_list = "forward", []
    fields = "".join(f"    {field}: Any\n" for field in values) or "    nothing: Any = None\n"
    given = ", ".join(f"{field}={value}" for field, value in values.items())
    text = "\n\n\n".join(
        [
            "from typing import Any, NamedTuple",
            *(ast.unparse(part) for part in parts),
            f'class Parameters(NamedTuple):\n    """What the forward reads."""\n\n{fields.rstrip()}',
            ast.unparse(forward),
            f"def kernel({', '.join(inputs)}):\n    return forward(Parameters({given}), {inputs[0]})",
        ]
    )
    return (SourceFile(path=ENTRY, content=text + "\n"), *files)


def _values(read: set[str], layout: ast.ClassDef | None, inputs: list[str], eps: float) -> dict[str, str]:
    """What stands for each attribute of `self`."""
    parameters = _parameters(layout) if layout is not None else [n for n in ("weight", "bias") if n in inputs]
    if len(parameters) != len(inputs) - 1:
        raise Unsliceable(f"it has {len(parameters)} parameters, needed are {len(inputs) - 1}")
    known = dict(zip(parameters, inputs[1:], strict=True))
    for attribute in sorted(read - known.keys()):
        if "eps" not in attribute:
            raise Unsliceable(f"what it reads from `self.{attribute}` is not known")
        known[attribute] = repr(eps)
    return {name: value for name, value in known.items() if name in read}


def _parameters(layout: ast.ClassDef) -> list[str]:
    """Attributes that the Layout's `__init__` sets to a Parameter, in order."""
    found = []
    for node in ast.walk(layout):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target, called = node.targets[0], ast.unparse(node.value.func)
            if isinstance(target, ast.Attribute) and called.rpartition(".")[2] == "Parameter":
                found.append(target.attr)
    return found


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _reached(layers: ast.Module, forward: ast.AST, build: Path) -> tuple[list[ast.stmt], list[SourceFile]]:
    """Statements of a module that a function needs, in their order, and the files that they import."""
    bound = {name: node for node in _statements(layers) for name in _names(node)}
    wanted: dict[int, ast.stmt] = {}
    files: dict[str, SourceFile] = {}
    pending = [forward]
    while pending:
        for node in ast.walk(pending.pop()):
            statement = bound.get(node.id) if isinstance(node, ast.Name) else None
            if statement is None or id(statement) in wanted:
                continue
            wanted[id(statement)] = statement
            if isinstance(statement, ast.ImportFrom) and statement.level:
                _add_file(statement, build, files)
            elif not isinstance(statement, ast.Import | ast.ImportFrom):
                pending.append(statement)
    return [node for node in _statements(layers) if id(node) in wanted], list(files.values())


def _add_file(statement: ast.ImportFrom, build: Path, files: dict[str, SourceFile]) -> None:
    path = (statement.module or "").replace(".", "/") + ".py"
    if statement.level != 1 or not (build / path).is_file():
        raise Unsliceable(f"it imports `{'.' * statement.level}{statement.module or ''}`, which is no file beside it")
    if path in files:
        return
    text = (build / path).read_text(encoding="utf-8")
    files[path] = SourceFile(path=path, content=text or "\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            _add_file(node, build, files)


def _statements(module: ast.Module) -> Iterator[ast.stmt]:
    """Top-level statements; those of a `try` stand for it."""
    for node in module.body:
        if isinstance(node, ast.Try):
            yield from node.body
        else:
            yield node


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
