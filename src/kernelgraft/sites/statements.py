"""Residual additions next to a norm, found and rewritten in a method's syntax tree.

Two shapes are known, in one block of statements:

`pre`: `T = A + B`, then only assignments of one name to another, then `Y = self.<path>(T)`: the norm reads the sum.
Also written `Y = self.<path>(A + B)`, where the sum is not kept. `post`: `X = self.<path>(E)` directly followed by `T
= R + X`: the sum reads the norm.

An addition that could be both counts as `post`. Whether what is called at `<path>` is a norm is for the caller to
say. Not covered: in-place additions (`T += B`, which may change a tensor that others hold), norms reached through a
subscript, additions in a helper function.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from kernelgraft.errors import RebindError
from kernelgraft.records import Site
from kernelgraft.sites.rebind import Transform
from kernelgraft.sites.source import INJECTED

Order = Literal["pre", "post"]


@dataclass(frozen=True)
class Found:
    """One addition with its norm, in one syntax tree."""

    order: Order
    norm: str
    """Attribute path of the norm, from self."""
    line: int
    """Line of the addition, counted from the `def`: it tells the places of one method apart."""
    last: int
    """Line of the last of its statements, counted from the `def`."""
    block: list[ast.stmt]
    add: ast.Assign
    call: ast.Assign
    residual: ast.expr
    hidden_states: ast.expr


def find(tree: ast.FunctionDef) -> list[Found]:
    """All additions next to a call of a submodule, in the order of their lines; they may share statements."""
    owner = _owner(tree)
    found = [
        match
        for block in _blocks(tree)
        for index in range(len(block))
        for match in (shape(tree, block, index, owner) for shape in (_post, _pre, _inline))
        if match
    ]
    return sorted(found, key=lambda f: (f.line, f.order))


def select(found: Iterable[Found], is_norm: Callable[[str], bool]) -> list[Found]:
    """Those whose path is a norm, no statement in two of them, in the order in which they are written."""
    taken: set[int] = set()
    chosen: list[Found] = []
    # "post" sorts before "pre" so that an addition between two norms goes to the first.
    for match in sorted((f for f in found if is_norm(f.norm)), key=lambda f: (f.order, f.line)):
        statements = {id(match.add), id(match.call)}
        if not taken & statements:
            taken |= statements
            chosen.append(match)
    return sorted(chosen, key=lambda f: f.line)


def injected_name(site: Site) -> str:
    """The global through which the rewritten method calls this site's replacement; one per place of the method."""
    return f"{INJECTED}{site.detail['index']}"


def transformer(sites: Iterable[Site]) -> Transform:
    """The rewrite of a method that calls, at each of these statement sites, the global `injected_name(site)` instead.

    The global is called as `f(self, residual, hidden_states)` and returns `(sum, normed)` for order `pre`, `sum` for
    `post`. The transform raises RebindError if a site's statements are not there, or belong to two of the sites.
    """
    wanted = list(sites)

    def transform(tree: ast.FunctionDef) -> ast.FunctionDef:
        rewritten: set[int] = set()
        here = {(f.order, f.norm, f.line): f for f in find(tree)}
        for site in wanted:
            found = here.get((site.detail["order"], site.symbol or "", site.detail["index"]))
            if found is None or not {id(found.add), id(found.call)} <= {id(s) for s in found.block} - rewritten:
                raise RebindError(f"`{site.key}`: its statements are not in the method, or are replaced already")
            rewritten |= {id(found.add), id(found.call)}
            _rewrite(found, injected_name(site), _owner(tree))
        return tree

    return transform


def original(site: Site) -> Callable[..., Any]:
    """What the statements of a site compute: `f(module, residual, hidden_states)`, returns as its replacement does."""
    norm_of = operator.attrgetter(site.symbol or "")  # much faster than `get_submodule`, and this is a hot path

    def pre(module: nn.Module, residual: Any, hidden_states: Any) -> Any:
        total = residual + hidden_states
        return total, norm_of(module)(total)

    def post(module: nn.Module, residual: Any, hidden_states: Any) -> Any:
        return residual + norm_of(module)(hidden_states)

    return pre if site.detail["order"] == "pre" else post


def _owner(tree: ast.FunctionDef) -> str:
    """The name of the first parameter."""
    parameters = tree.args.posonlyargs + tree.args.args
    return parameters[0].arg if parameters else ""


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """Every list of statements of a function, not those of functions defined inside it."""
    blocks: list[list[ast.stmt]] = []
    for field in ("body", "orelse", "finalbody"):
        block = getattr(tree, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            blocks.append(block)
            for statement in block:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    blocks += _blocks(statement)
    for part in [*getattr(tree, "handlers", ()), *getattr(tree, "cases", ())]:
        blocks += _blocks(part)
    return blocks


def _pre(tree: ast.FunctionDef, block: list[ast.stmt], index: int, owner: str) -> Found | None:
    add = _addition(block[index])
    if add is None:
        return None
    holders = {_target(add)}
    for call in block[index + 1 :]:
        assert isinstance(add.value, ast.BinOp)
        path = _norm_path(call, owner)
        if path:
            assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call)
            argument = call.value.args[0]
            if not isinstance(argument, ast.Name) or argument.id not in holders:
                return None
            residual, hidden = _sides(tree, add.value, add)
            return _found("pre", tree, block, add, call, path, residual, hidden)
        source = call.value if isinstance(call, ast.Assign) else None
        if not isinstance(source, ast.Name) or not _target(call):
            return None
        holders = (holders | {_target(call)}) if source.id in holders else (holders - {_target(call)})
    return None


def _inline(tree: ast.FunctionDef, block: list[ast.stmt], index: int, owner: str) -> Found | None:
    call = block[index]
    path = _norm_path(call, owner)
    if not path or not isinstance(call, ast.Assign) or not isinstance(call.value, ast.Call):
        return None
    total = call.value.args[0]
    if not isinstance(total, ast.BinOp) or not _is_addition(total):
        return None
    residual, hidden = _sides(tree, total, call)
    return _found("pre", tree, block, call, call, path, residual, hidden)


def _post(tree: ast.FunctionDef, block: list[ast.stmt], index: int, owner: str) -> Found | None:
    call = block[index]
    path = _norm_path(call, owner)
    add = _addition(block[index + 1]) if path and index + 1 < len(block) else None
    if not path or add is None:
        return None
    assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call) and isinstance(add.value, ast.BinOp)
    normed = _target(call)
    names = [n.id if isinstance(n, ast.Name) else "" for n in (add.value.left, add.value.right)]
    if normed not in names or names[0] == names[1] or "" in names:
        return None
    # The normed tensor itself is not computed by a replacement, so nothing else may read it.
    if _target(add) != normed and _loads(tree, normed) != 1:
        return None
    residual = add.value.left if names[1] == normed else add.value.right
    return _found("post", tree, block, add, call, path, residual, call.value.args[0])


def _found(
    order: Order,
    tree: ast.FunctionDef,
    block: list[ast.stmt],
    add: ast.Assign,
    call: ast.Assign,
    path: str,
    residual: ast.expr,
    hidden_states: ast.expr,
) -> Found | None:
    if any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield)) for n in [*ast.walk(add), *ast.walk(call)]):
        return None
    lines = [n.end_lineno or n.lineno for n in (add, call)]
    return Found(
        order, path, add.lineno - tree.lineno, max(lines) - tree.lineno, block, add, call, residual, hidden_states
    )


def _addition(statement: ast.stmt) -> ast.Assign | None:
    """`statement` if it assigns a sum to one name."""
    return (
        statement
        if _target(statement) and isinstance(statement, ast.Assign) and _is_addition(statement.value)
        else None
    )


def _is_addition(value: ast.expr) -> bool:
    """True for a sum of which at least one part is a bare name."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return False
    return isinstance(value.left, ast.Name) or isinstance(value.right, ast.Name)


def _target(statement: ast.stmt) -> str:
    """The one name that a statement assigns to; empty if it does anything else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def _norm_path(statement: ast.stmt, owner: str) -> str:
    """`a.b` if the statement is `<name> = self.a.b(<one argument>)`, else empty."""
    if not _target(statement) or not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return ""
    call = statement.value
    if len(call.args) != 1 or call.keywords or isinstance(call.args[0], ast.Starred):
        return ""
    parts: list[str] = []
    node = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if isinstance(node, ast.Name) and node.id == owner else ""


def _loads(tree: ast.FunctionDef, name: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(tree))


def _sides(tree: ast.FunctionDef, total: ast.BinOp, statement: ast.Assign) -> tuple[ast.expr, ast.expr]:
    """Residual and branch of a sum: the residual is the bare name set aside before the branch, else the left part.

    Sums commute bit for bit, so this decides the naming of the inputs, not their values.
    """
    left, right = total.left, total.right
    if isinstance(left, ast.Name) and isinstance(right, ast.Name):
        swapped = _set_aside(tree, right.id, statement) and not _set_aside(tree, left.id, statement)
    else:
        swapped = not isinstance(left, ast.Name)
    return (right, left) if swapped else (left, right)


def _set_aside(tree: ast.FunctionDef, name: str, before: ast.Assign) -> bool:
    """True if the last assignment to `name` above is a plain copy, or a sum, or if there is only the parameter."""
    last: ast.AST | None = None
    for node in ast.walk(tree):
        targets: Sequence[ast.expr] = ()
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = (node.target,)
        stored = any(isinstance(n, ast.Name) and n.id == name for t in targets for n in ast.walk(t))
        if stored and _place(node) < _place(before) and (last is None or _place(last) < _place(node)):
            last = node
    if last is None:
        return True
    value = last.value if isinstance(last, ast.Assign) else None
    return isinstance(value, ast.Name) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add))


def _place(node: ast.AST) -> tuple[int, int]:
    return (node.lineno, node.col_offset)  # type: ignore[attr-defined]


def _rewrite(found: Found, name: str, owner: str) -> None:
    """Change the statements in place; lines stay those of the addition and of the norm."""
    arguments = [ast.Name(owner, ast.Load()), found.residual, found.hidden_states]
    call = ast.Call(ast.Name(name, ast.Load()), arguments, [])
    if found.add is found.call:
        pair = ast.Subscript(call, ast.Constant(1), ast.Load())
        found.call.value = ast.copy_location(pair, found.call.value)
        return
    if found.order == "post":
        found.add.value = ast.copy_location(call, found.add.value)
        found.block.remove(found.call)
        return
    normed = f"_{name.strip('_')}_normed"
    store: list[ast.expr] = [found.add.targets[0], ast.Name(normed, ast.Store())]
    found.add.targets = [ast.Tuple(store, ast.Store())]
    found.add.value = ast.copy_location(call, found.add.value)
    found.call.value = ast.copy_location(ast.Name(normed, ast.Load()), found.call.value)
    # Not kept alive beyond the statement that takes it over.
    forget = ast.copy_location(ast.Delete([ast.Name(normed, ast.Del())]), found.call)
    found.block.insert(found.block.index(found.call) + 1, forget)
