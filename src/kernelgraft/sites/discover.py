"""Find the places of a model that can take a kernel, by its module tree and the code of its methods.

Not covered: the root module itself; functions that a method reaches otherwise than as a global (through an attribute, a
module, a table); what is called two methods deep.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import RebindError
from kernelgraft.records import Site, SiteKind
from kernelgraft.sites.install import current
from kernelgraft.sites.rebind import function_tree, global_functions, innermost, source_ref
from kernelgraft.sites.source import loaded_globals
from kernelgraft.sites.statements import Found, find, select

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_PLAIN = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Identity, nn.modules.dropout._DropoutNd)


@dataclass(frozen=True)
class _Place:
    """One site of one instance, before instances are grouped."""

    kind: SiteKind
    method: str
    symbol: str | None
    order: str | None = None
    index: int | None = None
    last: int | None = None


def discover(model: nn.Module, *, products: bool = False) -> list[Site]:
    """All sites of `model`, in model order; `Site.key` is unique in the list.

    `products` adds the modules of exactly torch's Linear class, of which a model has more than of all else together.
    Instances of one class at one path pattern make one Site, unless their scalar attributes, functions or parameter
    shapes differ. A module whose forward was replaced by something that is not a method is left out.
    """
    methods = _Methods()
    patterns = path_patterns(model)
    offsets = _index_attributes(model, patterns)
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        product = products and type(module) is nn.Linear
        if not path or (_uninteresting(module) and not product):
            continue
        try:
            places = methods.places(module)
        except RebindError:
            continue
        own, whole = _own(module, offsets), _identity(module, offsets)
        for place in places:
            # A statement depends on its own method and the norm, not on the rest of the layer.
            statement = place.kind == "statement"
            identity = (own, _identity(module.get_submodule(place.symbol or ""), offsets)) if statement else whole
            groups[(patterns[path], type(module), place, identity)].append(path)
    sites = [_site(model, pattern, place, tuple(paths)) for (pattern, _, place, _), paths in groups.items()]
    return _distinct(sites)


def _site(model: nn.Module, pattern: str, place: _Place, instances: tuple[str, ...]) -> Site:
    module = model.get_submodule(instances[0])
    method = current(module, place.method)
    detail: dict[str, Any] = {}
    if place.kind == "function":
        source = source_ref(global_functions(method)[place.symbol or ""])
    elif place.kind == "statement":
        detail = {"order": place.order, "index": place.index}
        begin = function_tree(method).lineno
        source = source_ref(method, first=begin + (place.index or 0), last=begin + (place.last or 0))
    else:
        source = source_ref(method)
    # The calls that get recorded go to this attention function; another one has other masks and other outputs.
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if place.kind == "attention" and isinstance(name, str):
        detail = {"implementation": name}
    return Site(
        kind=place.kind,
        path=pattern,
        instances=instances,
        class_name=f"{type(module).__module__}.{type(module).__qualname__}",
        method=place.method,
        symbol=place.symbol,
        detail=detail,
        source=source,
    )


def _distinct(sites: list[Site]) -> list[Site]:
    """Number the sites that would share a key."""
    shared = Counter(site.key for site in sites)
    seen: Counter[str] = Counter()
    numbered = []
    for site in sites:
        seen[site.key] += 1
        extra = {"variant": seen[site.key]} if shared[site.key] > 1 else {}
        numbered.append(site.model_copy(update={"detail": {**site.detail, **extra}}))
    return numbered


class _Methods:
    """What the methods of a class hold; read once per function, since many instances share it."""

    def __init__(self) -> None:
        self._read: dict[FunctionType, tuple[list[_Place], list[Found], list[str]]] = {}

    def places(self, module: nn.Module) -> list[_Place]:
        """The sites of one module: itself, and what its forward, and the methods that forward calls, hold."""
        forward = current(module, "forward")
        if forward is nn.Module.forward:  # never written: a mere holder of other modules
            return []
        found = [_Place("module", "forward", None)]
        _, _, called = self._of(forward, "forward")
        names = ["forward", *(n for n in called if _own_method(module, n))]
        for name in names:
            try:
                held, additions, _ = self._of(current(module, name), name)
            except RebindError:
                continue
            found += held
            for match in select(additions, lambda path: _may_be_norm(module, path)):
                found.append(_Place("statement", name, match.norm, match.order, match.line, match.last))
        return found

    def _of(self, method: FunctionType, name: str) -> tuple[list[_Place], list[Found], list[str]]:
        if method not in self._read:
            self._read[method] = _read(method, name)
        return self._read[method]


def _read(method: FunctionType, name: str) -> tuple[list[_Place], list[Found], list[str]]:
    """Function and attention sites, additions next to a submodule's call, and the methods of self that are called."""
    from transformers import AttentionInterface

    inner = innermost(method)
    source_ref(inner)
    held = [
        _Place("attention", name, symbol)
        for symbol in sorted(loaded_globals(inner.__code__))
        if isinstance(inner.__globals__.get(symbol), AttentionInterface)
    ]
    try:
        tree = function_tree(method)
    except RebindError:  # a source that cannot be rewritten can still be rebound
        return held, [], []
    called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    names = {f.id for f in called if isinstance(f, ast.Name)}
    for symbol, function in global_functions(method).items():
        if symbol in names and _modelling(function, inner):
            held.append(_Place("function", name, symbol))
    owner = inner.__code__.co_varnames[:1]
    mine = [
        f.attr
        for f in called
        if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and (f.value.id,) == owner
    ]
    return held, find(tree), list(dict.fromkeys(mine))


def _modelling(function: FunctionType, caller: FunctionType) -> bool:
    """True for a function of a model's own code, as against a utility of the library."""
    return function.__module__ == caller.__module__ or function.__module__.startswith("transformers.models.")


def _own_method(module: nn.Module, name: str) -> bool:
    """True if `name` is a method written for this kind of model, not one of torch's or the library's base classes."""
    found = inspect.getattr_static(type(module), name, None)
    if not isinstance(found, FunctionType) or name == "forward":
        return False
    own = type(module).__module__
    return found.__module__ == own or found.__module__.startswith("transformers.models.")


def _may_be_norm(module: nn.Module, path: str) -> bool:
    """True for a submodule that holds no matrix and is nothing plain: it can only work per channel."""
    try:
        child = module.get_submodule(path)
    except AttributeError:
        return False
    return not _uninteresting(child) and all(p.dim() <= 1 for p in child.parameters())


def _uninteresting(module: nn.Module) -> bool:
    """Containers, matrices, look-ups and single activations: what no family serves."""
    home = type(module).__module__
    return isinstance(module, (*_CONTAINERS, *_PLAIN)) or home in (
        "torch.nn.modules.activation",
        "transformers.activations",
    )


def path_patterns(model: nn.Module) -> dict[str, str]:
    """Every module path with the indices of lists replaced by `*`."""
    patterns = {"": ""}
    lists = {path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.ModuleList)}
    for path, _ in model.named_modules(remove_duplicate=False):
        if path:
            parent, _, name = path.rpartition(".")
            prefix = patterns.get(parent, parent)
            patterns[path] = f"{prefix}.{'*' if parent in lists else name}".lstrip(".")
    return patterns


_INDEX_WORDS = ("idx", "index", "layer_id", "layer_number")


def _index_attributes(model: nn.Module, patterns: dict[str, str]) -> frozenset[tuple[type, str]]:
    """(class, attribute) of whole numbers that only say which layer it is: they differ as the list indices do.

    With few instances that can be chance, so then the attribute's name has to say so as well.
    """
    seen: dict[tuple[str, type, str], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for path, module in model.named_modules():
        indices = tuple(int(p) for p, q in zip(path.split("."), patterns[path].split("."), strict=True) if q == "*")
        if indices:
            for name, value in vars(module).items():
                if type(value) is int:
                    seen[(patterns[path], type(module), name)].append((value, indices))
    found: set[tuple[type, str]] = set()
    others: set[tuple[type, str]] = set()
    for (_, kind, name), values in seen.items():
        positions = range(len(values[0][1]))
        follows = any(len({value - indices[p] for value, indices in values}) == 1 for p in positions)
        named = any(word in name for word in _INDEX_WORDS)
        (found if named or (follows and len(values) >= 4) else others).add((kind, name))
    return frozenset(found - others)


def _identity(module: nn.Module, skip: frozenset[tuple[type, str]]) -> Hashable:
    """What tells two instances of a class apart: their own state, and that of everything below them."""
    return tuple((name, type(child), _own(child, skip)) for name, child in module.named_modules())


def _own(module: nn.Module, skip: frozenset[tuple[type, str]]) -> Hashable:
    """Scalars, functions and tensor shapes that a module holds itself."""
    scalars = [
        (name, _plain(value))
        for name, value in sorted(vars(module).items())
        if (type(module), name) not in skip and name not in _TORCH_STATE and _plain(value) is not None
    ]
    tensors = [(n, tuple(t.shape), t.dtype) for n, t in _tensors(module)]
    return (*scalars, *tensors)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _plain(value: Any) -> Hashable:
    """A value as something comparable; None for what does not count (other objects)."""
    if isinstance(value, (bool, int, float, str, complex, torch.dtype)):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)):
        parts = tuple(_plain(v) for v in value)
        return None if None in parts else (type(value).__name__, *parts)
    if isinstance(value, functools.partial):
        keywords = tuple((k, _plain(v)) for k, v in sorted(value.keywords.items()))
        return ("partial", _plain(value.func), _plain(value.args), keywords)
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return (value.__module__, value.__qualname__)
    return None


_TORCH_STATE = frozenset(vars(nn.Module()))
"""Attributes of every module: hooks, training flag."""
