"""A method with some of its statements replaced by calls, as plain source that stands outside its class."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Sequence

from kernelgraft.errors import RebindError
from kernelgraft.records import Site
from kernelgraft.sites import injected_name, innermost, transformer
from kernelgraft.sites.rebind import function_tree

_DOCUMENTATION = ("auto_docstring",)
"""Decorators that only write a docstring."""


def statement_source(site: Site, name: str) -> str:
    """`def <name>(self, residual, hidden_states)`: what the statements of a site do."""
    norm = f"self.{site.symbol}"
    if site.detail["order"] == "pre":
        body = f"    total = residual + hidden_states\n    return total, {norm}(total)\n"
    else:
        body = f"    return residual + {norm}(hidden_states)\n"
    return f"def {name}(self, residual, hidden_states):\n{body}"


def rewritten(cls: type, method: str, sites: Sequence[Site], name: str, module: str) -> str:
    """`def <name>(*, statement_<line>, …)`, which returns the method with these statements left to its arguments.

    `module` is what the file calls the class's module: names that the method takes from there are looked up in it.
    Raises RebindError for a method that cannot stand outside its class.
    """
    function = innermost(getattr(cls, method))
    if set(function.__code__.co_freevars) - {"__class__"}:
        raise RebindError(f"`{cls.__qualname__}.{method}` uses variables of an enclosing function")
    tree = transformer(sites)(function_tree(function))
    tree.decorator_list = _decorators(function)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    tree.returns = None
    local = set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)
    tree = ast.fix_missing_locations(_Outside(cls, module, local, function.__globals__.keys()).visit(tree))
    text = re.sub(r"\b__kernelgraft_(\d+)\b", r"statement_\1", ast.unparse(tree))
    text = re.sub(r"\b_kernelgraft_(\d+)_normed\b", r"normed_\1", text)
    arguments = ", ".join(f"statement_{injected_name(s).rpartition('_')[2]}" for s in sites)
    body = textwrap.indent(text, "    ")
    return f"def {name}(*, {arguments}):\n{body}\n\n    return {tree.name}\n"


def _decorators(function: object) -> list[ast.expr]:
    source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
    found = ast.parse(source).body[0]
    assert isinstance(found, ast.FunctionDef)
    return [d for d in found.decorator_list if ast.unparse(d).partition("(")[0] not in _DOCUMENTATION]


class _Outside(ast.NodeTransformer):
    """Globals become attributes of the module that they come from; `super()` gets its arguments."""

    def __init__(self, cls: type, module: str, local: set[str], names: object) -> None:
        self.cls, self.module, self.local, self.names = cls, module, local, names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = node.id in self.names  # type: ignore[operator]
        if isinstance(node.ctx, ast.Load) and known and node.id not in self.local and not hasattr(builtins, node.id):
            return ast.copy_location(ast.Attribute(ast.Name(self.module, ast.Load()), node.id, ast.Load()), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        plain = isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args
        self.generic_visit(node)
        if plain:
            owner = ast.parse(f"{self.module}.{self.cls.__qualname__}", mode="eval").body
            node.args = [owner, ast.Name("self", ast.Load())]
        return node
