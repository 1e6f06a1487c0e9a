"""The static gate (check C2): what a Solution's sources may say.

An allow-list for imports and module-level code; denials for what could keep state between calls, look around in the
judge's process, or fall back in silence.

It reads the text and runs nothing. It is the first gate, not the only one: the dynamic checks run without trusting it.
It does not follow values through local variables, nor look into the packages that it allows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kernelgraft.evaluate import rules
from kernelgraft.records import Definition, Solution


@dataclass(frozen=True)
class Findings:
    """What the static gate found, in words, in the order of the sources."""

    denied: tuple[str, ...]
    warnings: tuple[str, ...]
    """Nothing forbidden, but the comparison gets stricter (see `tolerance.RATIO_WARNED`)."""


def inspect_sources(solution: Solution, definition: Definition) -> Findings:
    """Read all sources of a Solution; raises nothing: a syntax error is a denial."""
    denied: list[str] = []
    warnings: list[str] = []
    files: list[_File] = []
    for source in solution.sources:
        if not source.path.endswith(".py"):
            denied.append(f"`{source.path}` is not Python, which cannot be read here")
            continue
        try:
            files.append(_File(source.path, ast.parse(source.content)))
        except SyntaxError as error:
            denied.append(f"{source.path}:{error.lineno}: syntax error: {error.msg}")
    limited = solution.spec.language in rules.KERNEL_LANGUAGES and solution.meta.supplier not in rules.TORCH_SUPPLIERS
    for file in files:
        denied.extend(file.denials(limited))
        warnings.extend(file.narrow(_narrower(definition)))
    denied.extend(_fallbacks(files, solution.entry_symbol))
    return Findings(tuple(dict.fromkeys(denied)), tuple(dict.fromkeys(warnings)))


def _narrower(definition: Definition) -> frozenset[str]:
    """Names of floating dtypes with fewer bits than the narrowest declared one."""
    specs = [*definition.inputs.values(), *definition.outputs.values()]
    bits = [rules.FLOAT_BITS[s.dtype] for s in specs if s.dtype in rules.FLOAT_BITS]
    lowest = min(bits, default=0)
    return frozenset(name for name, width in rules.FLOAT_BITS.items() if width < lowest)


def _fallbacks(files: list[_File], entry: str) -> Iterator[str]:
    """`try` at module level, or in a function that the entry function reaches by name."""
    functions: dict[str, list[tuple[_File, ast.AST]]] = {}
    reached: list[str] = [entry]
    for file in files:
        for node in file.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                functions.setdefault(node.name, []).append((file, node))
            else:
                reached.extend(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
                yield from (f"{file.at(t)}: `try` at module level" for t in ast.walk(node) if isinstance(t, rules.TRY))
    seen: set[str] = set()
    while reached:
        name = reached.pop()
        if name in seen:
            continue
        seen.add(name)
        for file, found in functions.get(name, ()):
            for inner in ast.walk(found):
                if isinstance(inner, rules.TRY):
                    yield f"{file.at(inner)}: `try` in `{name}`: a failure must not fall back in silence"
                elif isinstance(inner, ast.Name):
                    reached.append(inner.id)
                elif isinstance(inner, ast.Attribute):
                    reached.append(inner.attr)


class _File:
    """One parsed source with its import aliases."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path, self.tree = path, tree
        self.aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for a in node.names:
                    root = a.name.partition(".")[0]
                    self.aliases[a.asname or root] = a.name if a.asname else root
            elif isinstance(node, ast.ImportFrom):
                for a in node.names:
                    self.aliases[a.asname or a.name] = f"{'.' * node.level}{node.module or ''}.{a.name}"
        self.top = {n for node in tree.body for n in _bound(node)}

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}"

    def dotted(self, node: ast.AST) -> str | None:
        """`F.silu` → `torch.nn.functional.silu`; None if it is not a chain of attributes on a name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])

    def narrow(self, names: frozenset[str]) -> Iterator[str]:
        for node in ast.walk(self.tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
            if rules.DTYPE_METHODS.get(name or "", name) in names:
                yield f"{self.at(node)}: mentions {name}, which is narrower than the declared dtypes"

    def denials(self, limited: bool) -> list[str]:
        walker = _Walker(self, limited)
        for node in self.tree.body:
            walker.module_level(node)
        return walker.found


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds in its own scope."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Store, ast.Del)):
            yield inner.id
        elif isinstance(inner, ast.alias):
            yield (inner.asname or inner.name).partition(".")[0]


class _Walker(ast.NodeVisitor):
    """Collects denials; `scopes` are the names bound by the enclosing functions, innermost last."""

    def __init__(self, file: _File, limited: bool) -> None:
        self.file, self.limited = file, limited
        self.found: list[str] = []
        self.scopes: list[set[str]] = []
        self.owners: list[str] = []
        """Enclosing classes and functions, `*` before a function that runs on the device."""
        self.writable: list[str | None] = []
        """Per enclosing function: its first parameter, if its attributes may be set (`self` while constructing)."""

    def deny(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{self.file.at(node)}: {what}")

    def local(self, name: str) -> bool:
        return any(name in scope for scope in self.scopes)

    # Statements that run at import

    def module_level(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = all(isinstance(t, ast.Name) for t in targets)
            public = named and [t.id for t in targets if isinstance(t, ast.Name)] == ["__all__"]
            if not named:
                self.deny(node, "sets an attribute or an item at module level")
            elif node.value is not None and not public and not self.constant(node.value):
                self.deny(node, "keeps something that can change at module level")
            if node.value is not None and not public:
                self.visit(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            self.visit(node)
        elif not isinstance(node, rules.TRY):  # `_fallbacks` names those
            self.deny(node, f"runs code at module level ({type(node).__name__.lower()})")
            self.visit(node)

    def constant(self, node: ast.AST) -> bool:
        """True if the value of an expression cannot change: constants, names, their tuples, and a few calls."""
        if isinstance(node, (ast.Constant, ast.Name, ast.Lambda)):
            return True
        if isinstance(node, ast.Attribute):
            return self.file.dotted(node) is not None
        if isinstance(node, (ast.Tuple, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript)):
            return all(self.constant(c) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr))
        if isinstance(node, ast.Call):
            name = self.file.dotted(node.func) or ""
            if name in rules.CONSTANT_CALLS or name.startswith(rules.CONSTANT_CALL_PREFIXES):
                return all(self.argument(a) for a in [*node.args, *(k.value for k in node.keywords)])
        return False

    def argument(self, node: ast.AST) -> bool:
        """As `constant`, but a list or dict written in place is fine: nothing else holds it."""
        if isinstance(node, (ast.List, ast.Tuple)):
            return all(self.argument(e) for e in node.elts)
        if isinstance(node, ast.Dict):
            return all(self.argument(e) for e in [*(k for k in node.keys if k), *node.values])
        return self.constant(node)

    # Imports

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not rules.importable(alias.name):
                self.deny(node, f"imports `{alias.name}`")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level:
            return
        module = node.module or ""
        for alias in node.names:
            full = f"{module}.{alias.name}"
            if alias.name == "*" or not (rules.importable(module) or rules.importable(full)):
                self.deny(node, f"imports `{full}`")
            elif reason := rules.denied_path(full):
                self.deny(node, reason)

    # Definitions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        on_device = False
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = self.file.dotted(call) or "?"
            on_device |= name.startswith(rules.DEVICE_PREFIXES)
            if name in rules.CACHES:
                self.cached(node)
            elif name not in rules.DECORATORS and not name.startswith(rules.DEVICE_PREFIXES):
                self.deny(decorator, f"decorates `{node.name}` with `{name}`")
            if isinstance(decorator, ast.Call):
                self.visit(decorator)
        self.defaults(node.args, node.name)
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        in_class = bool(self.owners) and self.owners[-1].startswith(".")
        first = arguments[0] if in_class and arguments else None
        opens = node.name == "__init__" or (in_class and self.owners[-1] == "..Function")
        if node.name.startswith("__") and node.name not in rules.DUNDER_METHODS:
            self.deny(node, f"defines `{node.name}`")
        self.owners.append("*" if on_device or "*" in self.owners else node.name)
        self.writable.append(first if opens else None)
        self.scopes.append(_locals(node))
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()
        self.writable.pop()
        self.owners.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.deny(node, f"defines the coroutine `{node.name}`")

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.defaults(node.args, "lambda")
        self.scopes.append({a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)})
        self.visit(node.body)
        self.scopes.pop()

    def defaults(self, arguments: ast.arguments, name: str) -> None:
        for default in [*arguments.defaults, *(d for d in arguments.kw_defaults if d)]:
            if not self.constant(default):
                self.deny(default, f"`{name}` has a default that can change between calls")
            self.visit(default)

    def cached(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        plain = all(a.annotation and ast.unparse(a.annotation) in rules.CACHE_KEYS for a in arguments)
        if not plain or node.args.vararg or node.args.kwarg:
            self.deny(node, f"caches `{node.name}` on arguments that are not annotated as plain numbers or dtypes")
        for inner in ast.walk(node):
            made = self.file.dotted(inner.func) if isinstance(inner, ast.Call) else None
            if isinstance(inner, rules.DISPLAYS) or made in rules.CONTAINERS:
                self.deny(inner, f"caches something that can change in `{node.name}`")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [self.file.dotted(b) or "?" for b in node.bases]
        for base in bases:
            if base not in rules.BASES:
                self.deny(node, f"derives `{node.name}` from `{base}`")
        if node.keywords or node.decorator_list:
            self.deny(node, f"`{node.name}` has a metaclass or a decorator")
        self.owners.append("..Function" if rules.FUNCTION in bases else f".{node.name}")
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self.visit(statement)
            elif not isinstance(statement, ast.Pass):
                self.module_level(statement)
        self.owners.pop()

    # Names, attributes, calls

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and not self.local(node.id):
            if node.id in self.file.top - self.file.aliases.keys():
                return
            if node.id in rules.DENIED_NAMES or (node.id.startswith("__") and node.id != "__name__"):
                self.deny(node, f"uses `{node.id}`")
            elif (path := self.file.aliases.get(node.id)) and (reason := rules.denied_path(path)):
                self.deny(node, reason)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.file.dotted(node)
        if node.attr.startswith("_"):
            self.deny(node, f"reads the private attribute `{node.attr}`")
        elif node.attr in rules.DENIED_ATTRIBUTES:
            self.deny(node, f"uses `.{node.attr}`")
        elif path and path.partition(".")[0] in rules.ROOTS and (reason := rules.denied_path(path)):
            self.deny(node, reason)
        elif self.computes(node, path):
            self.deny(node, f"computes with torch (`{path or '.' + node.attr}`) outside a kernel")
        self.generic_visit(node)

    def computes(self, node: ast.Attribute, path: str | None) -> bool:
        if not self.limited or "*" in self.owners:
            return False
        if path and path.startswith("torch."):
            return not rules.on_host(path)
        known = path is not None and path.partition(".")[0] in rules.ROOTS
        return not known and node.attr in rules.COMPUTE_METHODS

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.MatMult) and self.limited and "*" not in self.owners:
            self.deny(node, "computes with torch (`@`) outside a kernel")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and not self.local("getattr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
            if not isinstance(name, str):
                self.deny(node, "uses `getattr` with a name that is computed")
            elif name.startswith("_") or name in rules.DENIED_ATTRIBUTES or name in rules.DENIED_MODULES:
                self.deny(node, f"reads the attribute `{name}`")
        elif isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) > 1:
            self.deny(node, "makes a class with `type`")
        self.generic_visit(node)

    # Writes

    def visit_Global(self, node: ast.Global) -> None:
        self.deny(node, f"`global {', '.join(node.names)}`")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.deny(node, f"`nonlocal {', '.join(node.names)}`")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.targets(node.targets)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.targets([node.target])
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.targets([node.target])
        if node.value is not None:
            self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.targets(node.targets)

    def visit_For(self, node: ast.For) -> None:
        self.targets([node.target])
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        self.targets([node.optional_vars] if node.optional_vars else [])
        self.generic_visit(node)

    def targets(self, targets: Iterable[ast.expr]) -> None:
        for target in targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                self.targets(target.elts)
            elif isinstance(target, ast.Starred):
                self.targets([target.value])
            elif isinstance(target, ast.Attribute):
                own = self.writable[-1] if self.writable else None
                if not (isinstance(target.value, ast.Name) and target.value.id == own):
                    self.deny(target, f"sets the attribute `{ast.unparse(target)}`, which outlives the call")
            elif isinstance(target, ast.Subscript):
                root: ast.expr = target
                while isinstance(root, (ast.Subscript, ast.Attribute)):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in self.file.top and not self.local(root.id):
                    self.deny(target, f"writes into `{root.id}`, which outlives the call")


def _locals(node: ast.FunctionDef) -> set[str]:
    """Names that a function binds itself, not those of functions inside it."""
    names = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    pending: list[ast.AST] = list(node.body)
    while pending:
        inner = pending.pop()
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            names.add(inner.name)
        elif not isinstance(inner, ast.Lambda):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                names.add(inner.id)
            pending.extend(ast.iter_child_nodes(inner))
    return names
