"""Put several sources into one file: imports once, at the head, and every top-level name once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Merged:
    """What the file gets."""

    taken: set[str]
    """Names that the file uses already; those that are added join them."""
    imports: list[str] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    """Name to the import that binds it."""

    def add(self, source: str, symbol: str, name: str) -> str:
        """The code of a source without its imports, in which the function `symbol` is called `name`.

        Any other top-level name that is taken gets a number.
        """
        tree = ast.parse(source)
        self.taken.add(name)
        renamed = {symbol: name}
        removed: list[ast.stmt] = []
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                removed.append(node)
                for line, bound in _imports(node):
                    self._import(line, bound, renamed)
                continue
            for bound in _bound(node):
                if bound not in renamed:
                    renamed[bound] = _free(bound, self.taken)
                    self.taken.add(renamed[bound])
        return _rewritten(source, tree, renamed, removed).strip("\n") + "\n"

    def _import(self, line: str, name: str, renamed: dict[str, str]) -> None:
        if name in self.taken and self.bound.get(name) != line:
            renamed[name] = _free(name, self.taken)
            line = f"{line.partition(' as ')[0]} as {renamed[name]}"
            name = renamed[name]
        self.taken.add(name)
        self.bound[name] = line
        if line not in self.imports:
            self.imports.append(line)


def identifier(name: str) -> str:
    """A name as a Python identifier."""
    return re.sub(r"\W", "_", name)


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Each import of a statement as a line of its own, and the name that it binds; future imports are left out."""
    for alias in node.names:
        suffix = f" as {alias.asname}" if alias.asname else ""
        if isinstance(node, ast.Import):
            yield f"import {alias.name}{suffix}", alias.asname or alias.name.partition(".")[0]
        elif node.module != "__future__":
            yield f"from {'.' * node.level}{node.module or ''} import {alias.name}{suffix}", alias.asname or alias.name


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif not isinstance(node, ast.Expr):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id


def _free(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _rewritten(source: str, tree: ast.Module, renamed: dict[str, str], removed: list[ast.stmt]) -> str:
    """The text with global names replaced where they stand, so that comments and layout stay; some statements gone."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    edits = [
        (node.lineno, column, old, renamed[old])
        for node, column, old in _places(tree, frozenset(), source.splitlines())
        if renamed.get(old, old) != old
    ]
    for line, column, old, new in sorted(edits, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + new.encode() + text[column + len(old.encode()) :]
    for node in removed:
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[line - 1] = b""
    return b"".join(lines).decode()


def _places(
    node: ast.AST, shadowed: frozenset[str], lines: list[str], *, member: bool = False
) -> Iterator[tuple[ast.expr | ast.stmt, int, str]]:
    """Where a name means the global one: node, byte column, name. Names bound in a function are that function's.

    `member`: the node stands in a class, so its own name is an attribute.
    """
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in shadowed and not member:
        head = re.match(r"\s*(?:async\s+)?(?:def|class)\s+", lines[node.lineno - 1])
        if head:
            yield node, len(head.group().encode()), node.name
    if isinstance(node, ast.Name) and node.id not in shadowed:
        yield node, node.col_offset, node.id
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        arguments = node.args
        outside = [*arguments.defaults, *(d for d in arguments.kw_defaults if d)]
        outside += [a.annotation for a in ast.walk(arguments) if isinstance(a, ast.arg) and a.annotation]
        if isinstance(node, ast.FunctionDef):
            outside += [*node.decorator_list, *([node.returns] if node.returns else [])]
        for expression in outside:
            yield from _places(expression, shadowed, lines)
        inside = shadowed | _locals(node)
        for part in node.body if isinstance(node.body, list) else [node.body]:
            yield from _places(part, inside, lines)
        return
    for child in ast.iter_child_nodes(node):
        yield from _places(child, shadowed, lines, member=isinstance(node, ast.ClassDef))


def _locals(node: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    names = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    pending: list[ast.AST] = list(node.body) if isinstance(node.body, list) else []
    while pending:
        inner = pending.pop()
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            names.add(inner.name)
        elif not isinstance(inner, ast.Lambda):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
            pending.extend(ast.iter_child_nodes(inner))
    return frozenset(names)
