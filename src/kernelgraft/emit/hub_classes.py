"""The classes of modules that a graft patched, as code for two-class kernels: forwards, Layouts, rules."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kernelgraft.emit import computes as code
from kernelgraft.emit.sources import Merged
from kernelgraft.models.shrinking import quiet
from kernelgraft.records import Graft

_TORCH = {"torch": torch, "nn": nn}
"""Names that layers.py has."""
_SIMPLE = (bool, int, float, str, type(None))
MERGED = "gate_up_proj"
"""What a merged linear is called."""


@dataclass
class HubClass:
    """A class of modules and the kernel that stands in for its forward."""

    name: str
    module: str
    owner: str
    family: str
    seats: list[dict[str, Any]]
    original: str
    """Source of its forward, as a function."""
    names: list[str]
    """What that takes from the module besides torch."""
    parameters: str
    returns: str
    call: str
    input: str
    semantics: dict[str, Any]
    merge: dict[str, Any] | None = None
    tail: str = ""
    has_backward: bool = True
    can_torch_compile: bool = False
    paths: list[str] = field(default_factory=list)
    """Modules of the model that the graft patched."""
    alone: bool = True
    """False if fusions take all its modules: it then needs no kernel of its own."""
    tried: str | None = None
    """A module that fusions leave to it."""

    @property
    def key(self) -> str:
        """What its kernel is given for in a set of kernels."""
        return self.owner

    @property
    def place(self) -> str:
        """Its key in words."""
        return f"`{self.owner}`"


def classes_of(compute: code.Compute, skipped: list[str]) -> list[HubClass]:
    """The classes of modules that a compute is put on; `skipped` gets a line for each that cannot be exported."""
    found = []
    for target in compute.targets.values():
        _, cls = code.find_class(target.sites[0].class_name)
        reason = "it is nested" if "." in target.owner else _read(cls)
        if isinstance(reason, str):
            skipped.append(f"{compute.family} of `{target.owner}`: {reason}")
            continue
        semantics = next(p.semantics for p in compute.patches if target.sites[0] in p.sites)
        paths = [path for site in target.sites for path in site.instances]
        found.append(
            HubClass(
                name=f"{target.owner}Kernel",
                module=target.module,
                owner=target.owner,
                family=compute.family,
                seats=target.seats,
                semantics=semantics,
                paths=paths,
                **reason,
            )
        )
    return found


def _read(cls: type) -> dict[str, Any] | str:
    """The forward of a class as code that stands alone, or why it cannot."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    if forward is not cls.forward or forward.__closure__:  # type: ignore[attr-defined]
        return "its forward is decorated, or calls that of its base class"
    tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args.args[1:]
    if not arguments or node.args.vararg or node.args.kwarg or node.args.kwonlyargs or node.args.posonlyargs:
        return "its forward takes more than named arguments"
    names = []
    for name in forward.__code__.co_names:
        value = forward.__globals__.get(name)
        if name in forward.__globals__ and _TORCH.get(name) is not value:
            names.append(name)
    node.decorator_list = []
    own = f"{cls.__name__}Kernel_original"
    text = Merged({"torch", "nn", *names}).add(ast.unparse(tree), "forward", own)
    arguments_only = ast.arguments([], arguments, None, [], [], None, node.args.defaults)
    return {
        "original": text,
        "names": names,
        "parameters": ast.unparse(arguments_only),
        "returns": f" -> {ast.unparse(node.returns)}" if node.returns else "",
        "call": ", ".join(a.arg for a in arguments),
        "input": arguments[0].arg,
    }


def plan_merges(classes: Sequence[HubClass], built: Sequence[code.Compute], graft: Graft, config: Any) -> None:
    """Say which linears of a class become one: those of a gated product that read the same input, of equal size."""
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for one in classes:
        compute = next(c for c in built if c.family == one.family)
        one.tail = "product"
        for path in one.semantics.get("tail") or []:
            one.tail = f"self.{path}({one.tail})"
        modules = {n: m for n, m in model.named_modules() if type(m).__name__ == one.owner}
        if _can_merge(one, list(modules.values()), compute, graft):
            one.merge = _merge(one, modules, compute)


def _can_merge(one: HubClass, modules: Sequence[nn.Module], compute: code.Compute, graft: Graft) -> bool:
    heads = one.semantics.get("heads") or []
    if len(heads) != 2 or any("." in h for h in heads) or one.semantics["packed"] or one.semantics["eval_only"]:
        return False
    if len(one.seats) != 1 or not compute.references or _init(one) is None:
        return False
    # Halves of one tensor are not contiguous.
    if any(graft.solutions[s].meta.guard.contiguous for p in compute.patches for s in p.solutions):
        return False
    return all(_alike(m, heads) and not hasattr(m, MERGED) for m in modules)


def _merge(one: HubClass, modules: dict[str, nn.Module], compute: code.Compute) -> dict[str, Any]:
    heads = one.semantics["heads"]
    biased = next(iter(modules.values())).get_submodule(heads[0]).bias is not None
    rules = [
        {"sources": [f"{place}.{head}.{kind}" for head in heads], "target": f"{place}.{MERGED}.{kind}"}
        for place in sorted({name.rpartition(".")[2] for name in modules})
        for kind in (("weight", "bias") if biased else ("weight",))
    ]
    definition = next(d for p in compute.patches for d in p.definitions if d in compute.references)
    init = _init(one) or {}
    return {"name": MERGED, "parts": heads, "reference": compute.references[definition], "rules": rules, **init}


def _alike(module: nn.Module, heads: Sequence[str]) -> bool:
    """Whether two children are plain linears of one size."""
    linears = [module.get_submodule(head) for head in heads]
    shapes = {(tuple(x.weight.shape), x.bias is None) for x in linears if type(x) is nn.Linear}
    return len(shapes) == 1 and all(type(x) is nn.Linear for x in linears)


def _init(one: HubClass) -> dict[str, str] | None:
    """The parameters of the class's `__init__` as code, and how they are passed on; None if they cannot be written."""
    _, cls = code.find_class(f"{one.module}.{one.owner}")
    written = []
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    for p in parameters:
        if p.kind is not p.POSITIONAL_OR_KEYWORD or not (p.default is p.empty or isinstance(p.default, _SIMPLE)):
            return None
        written.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    return {"init": ", ".join(written), "passed": ", ".join(f"{p.name}={p.name}" for p in parameters)}
