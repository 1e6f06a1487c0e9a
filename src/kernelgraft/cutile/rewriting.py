"""A kernel's Python, rewritten so that it runs with cuTile's meaning where Python's differs.

cuTile compiles a subset of Python in which `range` counts with 32-bit scalars, `max(x, y)` works on tiles, and a
number that a loop carries becomes a typed scalar. The rewritten function keeps file and line numbers (a debugger stops
in it), globals and closure cells; every call in it goes through `Runtime.call`, which rewrites helper functions too.
What stands inside `static_eval`, `static_assert`, `static_iter` and comprehensions' sources stays Python, as in cuTile.
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from kernelgraft.cutile.bits import invert
from kernelgraft.cutile.dtypes import as_dtype, is_dtype
from kernelgraft.cutile.elementwise import made
from kernelgraft.cutile.promotion import typed
from kernelgraft.cutile.tiles import Tile

_RUNTIME = "__kernelgraft_runtime"
_STATIC = {"static_eval", "static_assert", "static_iter", "static_exception"}

stand_ins: dict[Any, Callable[..., Any]] = {}
"""Builtin or host function → what a kernel calls instead; filled by `pythonic`."""

_adapted: weakref.WeakKeyDictionary[types.FunctionType, Callable[..., Any]] = weakref.WeakKeyDictionary()


def adapt_callable(function: Any) -> Any:
    """What a kernel means when it calls `function`: a stand-in, a rewritten function, or the object itself."""
    kind = type(function)
    if kind is types.FunctionType:
        found = _adapted.get(function)
        return _adapt(function) if found is None else found
    if kind is types.MethodType and not isinstance(function.__self__, Tile):
        return types.MethodType(adapt_callable(function.__func__), function.__self__)
    if kind is types.BuiltinFunctionType or isinstance(function, type):
        return stand_ins.get(function, function)
    if isinstance(function, ct.DType):
        return stand_ins[ct.DType](function)
    return function


def _adapt(function: types.FunctionType) -> Callable[..., Any]:
    found: Callable[..., Any]
    if function in stand_ins:
        found = stand_ins[function]
    elif getattr(function, "_cutile_function_wrapper", False) or function.__module__.startswith("cuda.tile"):
        # Stubs and decorated tile functions: they come back through the dispatch mode.
        found = function
    elif _RUNTIME in function.__code__.co_freevars:
        found = function
    else:
        found = rewritten(function)
    _adapted[function] = found
    return found


class Runtime:
    """What rewritten code calls."""

    call = staticmethod(adapt_callable)

    @staticmethod
    def carried(value: Any) -> Any:
        """A Python number that a loop or branch carries, as the typed scalar that the compiler makes of it."""
        if isinstance(value, bool | int | float):
            return typed(value)
        if type(value) is tuple:
            return tuple(Runtime.carried(item) for item in value)
        return value

    @staticmethod
    def dtypes(value: Any) -> Any:
        """A dtype of torch or NumPy, also in a tuple, as cuTile's: what the compiler compares."""
        if type(value) is tuple:
            return tuple(Runtime.dtypes(item) for item in value)
        return as_dtype(value) if not isinstance(value, Tile) and is_dtype(value) else value

    @staticmethod
    def negate(value: Any) -> Any:
        """`not value`, of a tile element by element."""
        if not isinstance(value, Tile):
            return not value
        return invert(value if value.dtype == ct.bool_ else made(value.data != 0, ct.bool_, value))

    @staticmethod
    def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """`yes() if condition else no()`; a number chosen at run time is a typed scalar."""
        chosen = yes() if condition else no()
        return Runtime.carried(chosen) if isinstance(condition, Tile) else chosen

    @staticmethod
    def dynamic(condition: Any) -> bool:
        """Whether a condition is known only at run time."""
        return isinstance(condition, Tile)


def rewritten(function: types.FunctionType) -> types.FunctionType:
    """A copy of `function` with cuTile's meaning; the function itself where its source cannot be had (a lambda)."""
    node = _parsed(function)
    if node is None:
        return function
    _Rewriter().rewrite(node)
    outer = ast.parse(f"def __outer({_RUNTIME}):\n    pass")
    factory = outer.body[0]
    assert isinstance(factory, ast.FunctionDef)
    free = [name for name in function.__code__.co_freevars if name != _RUNTIME]
    factory.args.args += [ast.arg(name) for name in free]
    factory.body = [node]
    ast.fix_missing_locations(outer)
    module = compile(outer, inspect.getfile(function), "exec")
    code = _code_named(_code_named(module, "__outer"), function.__code__.co_name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[_RUNTIME] = types.CellType(Runtime)
    closure = tuple(cells[name] for name in code.co_freevars)
    code = code.replace(co_qualname=function.__code__.co_qualname)
    made_function = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made_function.__kwdefaults__ = function.__kwdefaults__
    made_function.__qualname__ = function.__qualname__
    made_function.__doc__ = function.__doc__
    made_function.__module__ = function.__module__
    return made_function


def _parsed(function: types.FunctionType) -> ast.FunctionDef | None:
    """The function's definition, with the file's line numbers."""
    try:
        lines, first = inspect.findsource(function)
    except (OSError, TypeError):
        return None
    block = inspect.getblock(lines[first:])
    try:
        # One more level of indentation lets a method or nested function stand in a module of its own.
        tree = ast.parse("if True:\n " + " ".join(block))
    except SyntaxError:
        return None
    node = tree.body[0].body[0]  # type: ignore[attr-defined]
    if not isinstance(node, ast.FunctionDef):
        return None
    ast.increment_lineno(node, first - 1)
    node.decorator_list = []
    node.returns = None
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    # Defaults come from the function object.
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.kw_defaults = [None if default is None else ast.Constant(None) for default in node.args.kw_defaults]
    return node


def _code_named(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _runtime(method: str, *arguments: ast.expr) -> ast.Call:
    target = ast.Attribute(ast.Name(_RUNTIME, ast.Load()), method, ast.Load())
    return ast.Call(target, list(arguments), [])


def _as_dtype(node: ast.expr) -> ast.expr:
    return node if isinstance(node, ast.Constant) else ast.copy_location(_runtime("dtypes", node), node)


class _Rewriter(ast.NodeTransformer):
    """Replaces calls, `not`, conditional expressions, and types what loops and branches carry."""

    def __init__(self) -> None:
        self._tests = 0

    def rewrite(self, function: ast.FunctionDef) -> None:
        function.body = self._statements(function.body)

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            result = self.visit(statement)
            found.extend(result if isinstance(result, list) else [result])
        return found

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_static(node):
            return node
        self.generic_visit(node)
        node.func = ast.copy_location(_runtime("call", node.func), node.func)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for operator in node.ops):
            node.left = _as_dtype(node.left)
            node.comparators = [_as_dtype(operand) for operand in node.comparators]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(_runtime("negate", node.operand), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield) for inner in ast.walk(node)):
            return node
        none = ast.arguments([], [], None, [], [], None, [])
        branches = [ast.Lambda(copy.deepcopy(none), branch) for branch in (node.body, node.orelse)]
        return ast.copy_location(_runtime("choose", node.test, *branches), node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        # The source is evaluated at compile time: it stays Python.
        node.ifs = [self.visit(condition) for condition in node.ifs]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = self._statements(node.body)
        node.args = self.visit(node.args)
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        names = _stored(node.body) | _stored(node.orelse)
        self._tests += 1
        test = f"__kernelgraft_test_{self._tests}"
        node.test = self.visit(node.test)
        node.body = self._statements(node.body)
        node.orelse = self._statements(node.orelse)
        if not names:
            return node
        keep = ast.copy_location(ast.Assign([ast.Name(test, ast.Store())], node.test), node.test)
        node.test = ast.copy_location(ast.Name(test, ast.Load()), keep)
        after = ast.If(_runtime("dynamic", ast.Name(test, ast.Load())), _carry(names, node), [])
        return [keep, node, _placed(after, node)]

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        node.iter = self.visit(node.iter)
        static = _is_static(node.iter)
        names = _stored(node.body) - _stored([node.target])
        node.body = self._statements(node.body)
        node.orelse = self._statements(node.orelse)
        if static or not names:
            return node
        node.body = _carry(names, node) + node.body
        return [node, *_carry(names, node)]

    def visit_While(self, node: ast.While) -> ast.AST | list[ast.stmt]:
        node.test = self.visit(node.test)
        names = _stored(node.body)
        node.body = self._statements(node.body)
        node.orelse = self._statements(node.orelse)
        before = _carry(names, node)
        return [*before, node, *_carry(names, node)] if names else node


def _is_static(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _STATIC


def _stored(body: list[Any]) -> set[str]:
    """Names that statements assign, not counting nested functions' own."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _carry(names: set[str], place: ast.stmt) -> list[ast.stmt]:
    """`name = carried(name)` for each name that has a value."""
    found: list[ast.stmt] = []
    for name in sorted(names):
        assign = ast.Assign([ast.Name(name, ast.Store())], _runtime("carried", ast.Name(name, ast.Load())))
        handler = ast.ExceptHandler(ast.Name("NameError", ast.Load()), None, [ast.Pass()])
        found.append(_placed(ast.Try([assign], [handler], [], []), place))
    return found


def _placed(node: ast.stmt, place: ast.stmt) -> ast.stmt:
    """Give generated statements the line of the statement that they belong to."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.expr | ast.stmt | ast.ExceptHandler):
            ast.copy_location(inner, place)
            inner.end_lineno, inner.end_col_offset = place.lineno, place.col_offset
    return node
