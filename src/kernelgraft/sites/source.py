"""Code and the source it was compiled from: read a function's syntax tree, compile a changed one, cite its lines."""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernelgraft.errors import RebindError
from kernelgraft.records import SourceRef

INJECTED = "__kernelgraft_"
"""Prefix of the globals that a rewrite may introduce; exempt from the mangling of private names."""

_PUBLISHED = {"transformers": "huggingface/transformers/blob/v{}/src", "torch": "pytorch/pytorch/blob/v{}"}
"""Where the sources of a release stand."""


@functools.lru_cache(maxsize=1024)
def loaded_globals(code: types.CodeType) -> frozenset[str]:
    """Names that `code`, or a function defined inside it, loads as globals."""
    found: set[str] = set()
    for each in _nested(code):
        found.update(i.argval for i in dis.get_instructions(each) if i.opname == "LOAD_GLOBAL")
    return frozenset(found)


def read_tree(code: types.CodeType) -> ast.FunctionDef:
    """A private copy of the syntax tree that `code` was compiled from, with the line numbers of the file.

    Raises RebindError if there is no source, or if it does not compile to this code.
    """
    # Read once, since every layer of a model shares its code; equal code can come from two files.
    return copy.deepcopy(_read_tree(code, code.co_filename))


@functools.lru_cache(maxsize=1024)
def _read_tree(code: types.CodeType, filename: str) -> ast.FunctionDef:
    try:
        lines, first = inspect.getsourcelines(code)
        # A method's lines are parsed under an `if`, because dedenting would change strings that span lines.
        indented = lines[0][:1].isspace()
        body: list[Any] = ast.parse(("if True:\n" if indented else "") + "".join(lines)).body
        found = body[0].body[0] if indented else body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise RebindError(f"`{code.co_qualname}` has no source to rewrite ({error})") from error
    if not isinstance(found, ast.FunctionDef):
        raise RebindError(f"`{code.co_qualname}` is not written as a `def`")
    ast.increment_lineno(found, first - 1 - indented)
    if not _same_code(compile_tree(found, code), code):
        raise RebindError(f"`{code.co_qualname}`: the source on disk is not that of the loaded code; restart Python")
    return found


def compile_tree(tree: ast.FunctionDef, code: types.CodeType) -> types.CodeType:
    """The code of `tree` as if it stood where `code` was written: same free variables, same private names."""
    body: ast.FunctionDef = copy.deepcopy(tree)
    parents = code.co_qualname.split(".")[:-1]
    if parents and parents[-1] != "<locals>":
        _Mangle(parents[-1]).visit(body)
    outer = ast.parse(f"def {INJECTED}outer({', '.join(code.co_freevars)}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [body]
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    whole = compile(module, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    found = next(c for c in itertools.islice(_nested(whole), 2, None) if c.co_name == tree.name)
    return found.replace(co_qualname=code.co_qualname)


_FUTURE = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)


def cite(plain: Callable[..., Any] | type, first: int | None, last: int | None, symbol: str | None) -> SourceRef:
    """Where a plain function or class is written, or lines `first` to `last` of that file."""
    try:
        lines, begin = inspect.getsourcelines(plain)
        path = inspect.getsourcefile(plain) or ""
    except (OSError, TypeError) as error:
        raise RebindError(f"`{plain.__qualname__}` has no source to cite ({error})") from error
    first = begin if first is None else first
    last = begin + len(lines) - 1 if last is None else last
    file = _inside(path, plain.__module__)
    home = file.partition("/")[0]
    release = importlib.metadata.version(home).partition("+")[0] if home in _PUBLISHED else ""
    tagged = re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", release)
    return SourceRef(
        file=file,
        first_line=first,
        last_line=last,
        sha256=hashlib.sha256("".join(linecache.getlines(path)[first - 1 : last]).encode()).hexdigest(),
        url=f"https://github.com/{_PUBLISHED[home].format(release)}/{file}#L{first}-L{last}" if tagged else None,
        symbol=symbol or plain.__qualname__,
    )


def _inside(path: str, module: str) -> str:
    """`path` relative to the folder that holds its top package; the bare file name for a module outside packages."""
    top = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    if top and Path(top).name == "__init__.py" and Path(path).is_relative_to(Path(top).parent):
        return Path(path).relative_to(Path(top).parents[1]).as_posix()
    return Path(path).name


class _Mangle(ast.NodeTransformer):
    """Private names (`__x`) as the compiler mangles them inside a class."""

    def __init__(self, class_name: str) -> None:
        self.prefix = "_" + class_name.lstrip("_")

    def _mangled(self, name: str) -> str:
        private = re.fullmatch(r"__\w*(?<!__)", name) and not name.startswith(INJECTED)
        return self.prefix + name if private else name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._mangled(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self._mangled(node.attr)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        self.generic_visit(node)
        node.arg = self._mangled(node.arg)
        return node


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _same_code(ours: types.CodeType, loaded: types.CodeType) -> bool:
    """True if both do the same, whatever their line numbers and the compiler's choice of call instructions.

    That choice depends on what the rest of the file imports, which a function compiled alone does not show.
    """

    def plain(code: types.CodeType) -> list[Any]:
        steps = [
            ("LOAD_ATTR" if i.opname == "LOAD_METHOD" else i.opname, None if i.opcode in _JUMPS else str(i.argval))
            for i in dis.get_instructions(code)
            if i.opname not in ("PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG")
        ]
        return [s for s in steps if "<code object" not in str(s[1])]

    return [plain(c) for c in _nested(ours)] == [plain(c) for c in _nested(loaded)]


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
