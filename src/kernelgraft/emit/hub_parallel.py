"""Modules in which a graft patched functions, as two-class kernels: linears that read one input become one.

Such a module (attention, as a rule) calls several linears on the same tensor and hands the results to functions. Its
forward is written down anew from its source: one call of a merged linear, split by sizes that the configuration gives,
and the functions that the graft patched, attention among them, with the graft's dispatch in them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kernelgraft.emit import computes as code
from kernelgraft.models.shrinking import quiet
from kernelgraft.sites import innermost

_TORCH = {"torch": torch, "nn": nn}
_SIMPLE = (bool, int, float, str, type(None))
SIZES = {
    "queries": ("num_attention_heads * head_dim", lambda c, d: c.num_attention_heads * d),
    "keys": ("num_key_value_heads * head_dim", lambda c, d: c.num_key_value_heads * d),
}
"""What the rows of a linear can be in terms of a configuration."""


@dataclass
class HubParallel:
    """A class of modules whose linears of one input become one, and the functions that are patched in it."""

    name: str
    module: str
    owner: str
    paths: list[str]
    source: str
    """Its forward, with the merged linear if there is one."""
    plain: str
    """Its forward as it is."""
    names: list[str]
    """What that takes from the module besides torch."""
    signature: list[str]
    parameters: str
    returns: str
    call: str
    init: str
    passed: str
    merge: dict[str, Any] | None
    functions: dict[str, list[dict[str, Any]]]
    """Name of a global to the seats in it."""
    interfaces: list[str]
    """Those of the globals through which attention functions are looked up."""
    has_backward: bool = True
    can_torch_compile: bool = False
    tried: str | None = None
    families: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """What its kernel is given for in a set of kernels."""
        return self.owner

    @property
    def place(self) -> str:
        """Its key in words."""
        return f"`{self.owner}`"

    @property
    def original(self) -> str:
        """The forward of its Layout, as a function."""
        return _renamed(self.source if self.merge else self.plain, f"{self.name}_original", {})

    @property
    def run(self) -> str:
        """The forward of the kernel, as a function."""
        functions = {name: f"{self.name}_{name}" for name in self.functions}
        return _renamed(self.source if self.merge else self.plain, f"{self.name}_run", functions)


def plan_parallels(
    computes: Sequence[code.Compute],
    classes: Mapping[str, Sequence[str]],
    taken: Sequence[str],
    config: PreTrainedConfig,
    skipped: list[str],
) -> list[HubParallel]:
    """The modules of `classes` (class name to the paths that the graft patched) whose forward can be written anew.

    `computes` have the seats of functions; modules at the paths `taken` have kernels of their own; `skipped` gets a
    line for each class that is left out.
    """
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = []
    for class_name, paths in classes.items():
        module, cls = code.find_class(class_name)
        targets = [
            (compute.family, target)
            for compute in computes
            for target in compute.targets.values()
            if target.kind in ("function", "attention") and any(site.class_name == class_name for site in target.sites)
        ]
        seats = {t.name: [{**seat, "family": family} for seat in t.seats] for family, t in targets}
        one = _read(module, cls, list(paths), seats)
        if any(inner.startswith(f"{path}.") for path in paths for inner in taken):
            one = "modules in it have kernels of their own, and one replacement cannot lie in another"
        if not isinstance(one, str):
            one.interfaces = [t.name for _, t in targets if t.kind == "attention" and t.name in one.functions]
        if isinstance(one, str):
            skipped.append(f"what is patched in `{cls.__name__}`: {one}")
            continue
        merge = _merging(one, model, config)
        if merge is not None:
            one.merge, one.source = merge
        if one.merge or one.functions:
            one.families = sorted({seat["family"] for group in one.functions.values() for seat in group})
            found.append(one)
    return found


def _read(module: str, cls: type, paths: list[str], seats: dict[str, list[dict[str, Any]]]) -> HubParallel | str:
    forward = _undeprecated(cls.forward)  # type: ignore[attr-defined]
    if "." in cls.__qualname__ or inspect.unwrap(forward) is not forward or forward.__closure__:
        return "it is nested, its forward is decorated, or calls that of its base class"
    node = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    assert isinstance(node, ast.FunctionDef)
    defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
    if node.args.posonlyargs or node.args.vararg or not all(isinstance(d, ast.Constant) for d in defaults):
        return "its forward takes positional arguments only, or has defaults that are no constants"
    init = _init(cls)
    if init is None:
        return "its `__init__` cannot be written down"
    node.decorator_list = []
    own = copy.deepcopy(node.args)
    own.args = own.args[1:]
    given = [a.arg for a in own.args] + [f"{a.arg}={a.arg}" for a in own.kwonlyargs]
    names = [
        name
        for name in forward.__code__.co_names
        if name in forward.__globals__ and _TORCH.get(name) is not forward.__globals__[name]
    ]
    return HubParallel(
        name=f"{cls.__name__}Kernel",
        module=module,
        owner=cls.__name__,
        paths=paths,
        source="",
        plain=ast.unparse(node),
        names=names,
        signature=list(inspect.signature(forward).parameters),
        parameters=ast.unparse(own),
        returns=f" -> {ast.unparse(node.returns)}" if node.returns else "",
        call=", ".join([*given, *([f"**{own.kwarg.arg}"] if own.kwarg else [])]),
        init=init[0],
        passed=init[1],
        merge=None,
        functions={name: group for name, group in seats.items() if name in names},
        interfaces=[],
    )


def _undeprecated(forward: Any) -> Any:
    """A forward without what only translates the old names of its arguments, which a model itself does not use."""
    while inspect.unwrap(forward) is not forward and Path(forward.__code__.co_filename).name == "deprecation.py":
        forward = forward.__wrapped__
    return forward


def _init(cls: type) -> tuple[str, str] | None:
    """The parameters of `__init__` as code, and how they are passed on; a decorator of `kernels` is looked through."""
    written = []
    parameters = list(inspect.signature(innermost(cls.__init__)).parameters.values())[1:]  # type: ignore[misc]
    for p in parameters:
        if p.kind is not p.POSITIONAL_OR_KEYWORD or not (p.default is p.empty or isinstance(p.default, _SIMPLE)):
            return None
        written.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return ", ".join(written), ", ".join(f"{p.name}={p.name}" for p in parameters)


# --- merging ---


def _merging(one: HubParallel, model: nn.Module, config: PreTrainedConfig) -> tuple[dict[str, Any], str] | None:
    """How linears are merged, and the forward that calls the merged one; None if that cannot be written."""
    modules = {path: m for path, m in model.named_modules() if type(m).__name__ == one.owner}
    first = next(iter(modules.values()), None)
    if first is None:
        return None
    linears = [name for name, child in first.named_children() if type(child) is nn.Linear]
    node = ast.parse(one.plain).body[0]
    assert isinstance(node, ast.FunctionDef)
    found = _calls_of_one_input(node, linears)
    if found is None:
        return None
    given, parts = found
    name = _merged_name(parts)
    biased = [first.get_submodule(part).bias is not None for part in parts]
    kinds = _sizes(one.owner, parts, model, config)
    if (
        kinds is None
        or len(set(biased)) > 1
        or any(hasattr(m, name) or hasattr(m, f"{name}_sizes") for m in modules.values())
    ):
        return None
    places = sorted({path.rpartition(".")[2] for path in modules})
    merge = {
        "name": name,
        "parts": parts,
        "sizes": [SIZES[kind][0] for kind in kinds],
        "rules": [
            {"sources": [f"{place}.{part}.{kind}" for part in parts], "target": f"{place}.{name}.{kind}"}
            for place in places
            for kind in (("weight", "bias") if biased[0] else ("weight",))
        ],
    }
    return merge, _merged_source(node, given, parts, name)


def _calls_of_one_input(node: ast.FunctionDef, linears: Sequence[str]) -> tuple[str, list[str]] | None:
    """The largest group of linears that plain statements call on one name, each once, and that name."""
    groups: dict[str, list[tuple[str, int]]] = {}
    mentions = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and _is_own(n, linears)]
    for index, statement in enumerate(node.body):
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
            continue
        for call in ast.walk(statement):
            if isinstance(call, ast.Call) and _is_own(call.func, linears) and not call.keywords:
                argument = call.args[0] if len(call.args) == 1 else None
                if isinstance(argument, ast.Name) and mentions.count(call.func.attr) == 1:  # type: ignore[attr-defined]
                    groups.setdefault(argument.id, []).append((call.func.attr, index))  # type: ignore[attr-defined]
    for given, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        between = node.body[members[0][1] : members[-1][1]]
        bound = {n.id for s in between for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if len(members) > 1 and given not in bound:
            return given, [part for part, _ in members]
    return None


def _is_own(node: ast.AST, names: Sequence[str]) -> bool:
    """Whether it is `self.<one of the names>`."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return own and node.attr in names  # type: ignore[attr-defined]


def _merged_name(parts: Sequence[str]) -> str:
    """One name for several: `qkv_proj` for q_proj, k_proj and v_proj."""
    ends = {part.partition("_")[2] for part in parts}
    if len(ends) == 1 and ends != {""}:
        return f"{''.join(part.partition('_')[0] for part in parts)}_{ends.pop()}"
    return "_".join(parts)


def _merged_source(node: ast.FunctionDef, given: str, parts: Sequence[str], name: str) -> str:
    """The forward with one call for all parts."""
    node = copy.deepcopy(node)
    outputs = {part: f"{part}_output" for part in parts}
    done = False
    body: list[ast.stmt] = []
    for statement in node.body:
        if not done and any(_is_own(n, parts) for n in ast.walk(statement)):
            line = f"{', '.join(outputs.values())} = self.{name}({given}).split(self.{name}_sizes, dim=-1)"
            body += ast.parse(line).body
            done = True
        body.append(_Outputs(outputs).visit(statement))
    node.body = body
    return ast.unparse(ast.fix_missing_locations(node))


class _Outputs(ast.NodeTransformer):
    """Puts a name for each call of a part."""

    def __init__(self, outputs: dict[str, str]) -> None:
        self.outputs = outputs

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_own(node.func, list(self.outputs)):
            assert isinstance(node.func, ast.Attribute)
            return ast.Name(self.outputs[node.func.attr], ast.Load())
        return self.generic_visit(node)


class _Names(ast.NodeTransformer):
    """Puts other names for global ones."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def _renamed(source: str, name: str, names: dict[str, str]) -> str:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    node.name = name
    node.body = [_Names(names).visit(statement) for statement in node.body]
    return ast.unparse(ast.fix_missing_locations(node))


def _sizes(owner: str, parts: Sequence[str], model: nn.Module, config: PreTrainedConfig) -> list[str] | None:
    """What the rows of each part are, of `SIZES`: found where heads are shared, right for the model itself."""
    shared = copy.deepcopy(config)
    text: Any = shared.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % 2 or not hasattr(text, "num_key_value_heads"):
        return None
    text.num_key_value_heads = heads // 2
    try:
        with quiet(), torch.device("meta"):
            other = AutoModelForCausalLM.from_config(shared)
    except Exception:  # whatever a model class raises for a configuration that it does not take
        return None
    kinds: list[str] = []
    for part in parts:
        fits = [kind for kind in SIZES if _has_rows(other, owner, part, kind) and _has_rows(model, owner, part, kind)]
        if len(fits) != 1:
            return None
        kinds += fits
    return kinds


def _has_rows(model: nn.Module, owner: str, part: str, kind: str) -> bool:
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return all(rows == SIZES[kind][1](config, head_dim) for rows in _rows(model, owner, part))


def _rows(model: nn.Module, owner: str, part: str) -> Iterator[int]:
    for module in model.modules():
        if type(module).__name__ == owner:
            linear = module.get_submodule(part)
            yield linear.out_features if type(linear) is nn.Linear else -1
