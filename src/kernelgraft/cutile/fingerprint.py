"""The hash of a kernel: of the code that its launches depend on, and of nothing else in its module.

That is every `@ct.kernel`, the function `choose`, whatever calls `choose` (the launch plans; in a module without them
those of the modules that it imports), and all that these reach by name, in the module itself, in other kernel modules
and in the launch plans' own. Comments, documentation, gradients and the registration with torch do not count, nor does
what only the function `default` reaches: an entry takes its place.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path

CHOICE, DEFAULT = "choose", "default"
FOLLOWED = ("kernelgraft.kernels.", "kernelgraft.cutile.plans")
"""Modules whose definitions count where a kernel reaches them."""


class _Source:
    """One module's top-level definitions by name, and where its imported names come from."""

    def __init__(self, file: Path) -> None:
        self.text = file.read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.nodes: dict[str, ast.stmt] = {}
        self.modules: dict[str, str] = {}
        """Local name → module."""
        self.names: dict[str, tuple[str, str]] = {}
        """Local name → module and the name there."""
        for node in ast.parse(self.text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.nodes[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                    self.nodes.setdefault(name.id, node)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    local, whole = alias.asname or alias.name, f"{node.module}.{alias.name}"
                    if whole.startswith(FOLLOWED) and _file(whole) is not None:
                        self.modules[local] = whole
                    elif node.module.startswith(FOLLOWED):
                        self.names[local] = (node.module, alias.name)

    def kernels(self) -> list[str]:
        """Functions that are kernels."""
        functions = {n: f for n, f in self.nodes.items() if isinstance(f, ast.FunctionDef)}
        return [n for n, f in functions.items() if any("kernel" in _words(d) for d in f.decorator_list)]

    def choosers(self) -> list[str]:
        """The choice and the functions that call it."""
        functions = {n: f for n, f in self.nodes.items() if isinstance(f, ast.FunctionDef)}
        return [n for n, f in functions.items() if n == CHOICE or CHOICE in _words(f)]

    def imported(self) -> set[str]:
        """The modules whose definitions may count."""
        return {*self.modules.values(), *(module for module, _ in self.names.values())}

    def reached(self, name: str) -> list[tuple[str | None, str]]:
        """What a definition reaches: (module, name), the module None for this one."""
        found: list[tuple[str | None, str]] = []
        for node in ast.walk(self.nodes[name]):
            if isinstance(node, ast.Name):
                if node.id in self.nodes:
                    found.append((None, node.id))
                elif node.id in self.names:
                    found.append(self.names[node.id])
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.modules:
                found.append((self.modules[node.value.id], node.attr))
        return found

    def code(self, name: str) -> str:
        """A definition's lines without comments, blank lines, indentation and documentation."""
        node = self.nodes[name]
        left_out: set[int] = set()
        for inner in ast.walk(node):
            text = inner.value if isinstance(inner, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                left_out.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        lines = [
            self.lines[number - 1].partition("  # ")[0].strip()
            for number in range(first, (node.end_lineno or node.lineno) + 1)
            if number not in left_out
        ]
        return "\n".join(line for line in lines if line and not line.startswith("#"))


def _words(node: ast.AST) -> set[str]:
    """Every name and attribute in a piece of code."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


@functools.cache
def fingerprint(module: str) -> str:
    """The hash of a kernel module's kernels, `sha256:…`; an empty string if there is no such module."""
    if _file(module) is None:
        return ""
    found = sorted((name, code) for (_, name), code in reached(module).items())  # wherever it stands
    text = "\n".join(f"{name}\n{code}" for name, code in found)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def reached(module: str) -> dict[tuple[str, str], str]:
    """The code that counts, by module and name."""
    sources: dict[str, _Source] = {}

    def source(name: str) -> _Source | None:
        if name not in sources and (file := _file(name)) is not None:
            sources[name] = _Source(file)
        return sources.get(name)

    first = source(module)
    assert first is not None
    waiting = [(module, name) for name in (*first.kernels(), *first.choosers())]
    if not first.choosers():
        others = ((name, source(name)) for name in first.imported())
        waiting += [(name, chooser) for name, other in others if other is not None for chooser in other.choosers()]
    if not waiting:
        waiting = [(module, name) for name in first.nodes]
    codes: dict[tuple[str, str], str] = {}
    while waiting:
        place = waiting.pop()
        held = source(place[0])
        if place in codes or held is None or place[1] not in held.nodes or place[1] == DEFAULT:
            continue
        codes[place] = held.code(place[1])
        waiting += [(other or place[0], name) for other, name in held.reached(place[1])]
    return codes
