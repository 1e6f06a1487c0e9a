"""Norms and the gated products that they feed, as fusions of two-class kernels.

A fused kernel stands at the norm; its Layout has what both modules have, and the rules that carry the second one's
tensors to the first one's place. What is proposed here, the check of Layouts decides upon.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kernelgraft.emit.hub_classes import HubClass
from kernelgraft.errors import UsageError
from kernelgraft.layouts.findings import starred
from kernelgraft.layouts.trial import Trial, make_trial
from kernelgraft.models.shrinking import quiet

NORMS = ("rms_norm", "layer_norm")
PRODUCT = "gated_mlp"


@dataclass
class HubFusion:
    """A norm and the module that reads its output, and no other does, in one kernel."""

    name: str
    norm: HubClass
    mlp: HubClass
    norm_path: str
    """Where it stands, with `*` for each index."""
    mlp_path: str
    parents: list[str]
    parameters: list[str]
    """Of the second module, by their paths in it."""
    has_backward: bool = True
    can_torch_compile: bool = False
    tried: str | None = None
    """A module to try it at; None: any of its own."""

    @property
    def key(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """What it is given for in a set of kernels."""
        return (self.norm.owner, self.norm_path), (self.mlp.owner, self.mlp_path)

    @property
    def place(self) -> str:
        """Its key in words."""
        return " and ".join(f"`{owner}` at `{path}`" for owner, path in self.key)

    @property
    def merge(self) -> dict[str, Any] | None:
        """The linears that become one, as HubClass has them."""
        return self.mlp.merge

    @property
    def paths(self) -> list[str]:
        """Where it stands in the model."""
        return [f"{parent}.{self._norm_name}" for parent in self.parents]

    @property
    def taken(self) -> set[str]:
        """The modules that it takes."""
        return {f"{parent}.{name}" for parent in self.parents for name in (self._norm_name, self._mlp_name)}

    @property
    def merged(self) -> list[dict[str, Any]]:
        """Sources and target of each tensor that is made of several."""
        if self.mlp.merge is None:
            return []
        parts, merged = self.mlp.merge["parts"], self.mlp.merge["name"]
        kinds = dict.fromkeys(p.rpartition(".")[2] for p in self.parameters if p.partition(".")[0] in parts)
        return [
            {
                "sources": [f"{self._mlp_name}.{part}.{kind}" for part in parts],
                "target": f"{self._norm_name}.{merged}.{kind}",
            }
            for kind in kinds
        ]

    @property
    def renamed(self) -> list[tuple[str, str]]:
        """Old and new name of each other tensor of the second module; those of the norm keep theirs."""
        parts = self.mlp.merge["parts"] if self.mlp.merge else []
        others = [p for p in self.parameters if p.partition(".")[0] not in parts]
        return [(f"{self._mlp_name}.{p}", f"{self._norm_name}.{p}") for p in others]

    @property
    def _norm_name(self) -> str:
        return self.norm_path.rpartition(".")[2]

    @property
    def _mlp_name(self) -> str:
        return self.mlp_path.rpartition(".")[2]


def plan_fusions(classes: Sequence[HubClass], config: PreTrainedConfig) -> list[HubFusion]:
    """Which norms go with which gated products: each of their parents has both, patched, and calls them in turn."""
    norms = {one.owner: one for one in classes if one.family in NORMS and "," not in one.call}
    mlps = {one.owner: one for one in classes if one.family == PRODUCT and "," not in one.call}
    if not norms or not mlps:
        return []
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        trial = make_trial(config, AutoModelForCausalLM.from_config)
    except UsageError:  # nothing can be said of the flow
        return []
    found: list[HubFusion] = []
    for norm_path, mlp_path in _chains(trial, set(norms), set(mlps)):
        for norm in norms.values():
            for mlp in mlps.values():
                parents = _parents(model, norm_path, mlp_path, norm, mlp)
                if parents and _together(model, f"{parents[0]}.{norm_path.rpartition('.')[2]}", mlp_path, parents, mlp):
                    second = model.get_submodule(f"{parents[0]}.{mlp_path.rpartition('.')[2]}")
                    names = [name for name, _ in second.named_parameters()]
                    label = _name(norm.owner, mlp.owner, len(found))
                    found.append(HubFusion(label, norm, mlp, norm_path, mlp_path, parents, names))
    return found


def settle(classes: Sequence[HubClass], fusions: Sequence[HubFusion]) -> None:
    """Say of each class whether modules are left to it."""
    taken = {path for fusion in fusions for path in fusion.taken}
    for one in classes:
        one.alone = any(path not in taken for path in one.paths)
        one.tried = next((path for path in one.paths if path not in taken), None)


def _name(norm: str, mlp: str, number: int) -> str:
    """One name of two classes: what both begin with stands once."""
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(norm, mlp, strict=False)))
    return f"{norm}{mlp[shared:]}Kernel{number + 1 if number else ''}"


def _chains(trial: Trial, norms: set[str], mlps: set[str]) -> list[tuple[str, str]]:
    """Paths, starred, of a norm and of what is always given its very output, both children of one module."""
    made: dict[int, str] = {}
    alive: list[Any] = []
    seen: dict[str, set[str | None]] = {}
    handles = []

    def leave(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            made[id(output)] = path
            alive.append(output)

        return hook

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            source = made.get(id(given[0])) if len(given) == 1 else None
            together = source is not None and source.rpartition(".")[0] == path.rpartition(".")[0]
            seen.setdefault(starred(path), set()).add(starred(source) if source and together else None)

        return hook

    for path, module in trial.model.named_modules():
        if type(module).__name__ in norms:
            handles.append(module.register_forward_hook(leave(path)))
        elif type(module).__name__ in mlps:
            handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
    try:
        with torch.no_grad():
            trial.outputs()
    finally:
        for handle in handles:
            handle.remove()
    return [(source, path) for path, sources in seen.items() if len(sources) == 1 for source in sources if source]


def _parents(model: nn.Module, norm_path: str, mlp_path: str, norm: HubClass, mlp: HubClass) -> list[str]:
    """The modules that have both parts, if all of their class do: transformers fuses by the parent's class."""
    pattern, first = norm_path.rpartition(".")[::2]
    second = mlp_path.rpartition(".")[2]
    modules = dict(model.named_modules())
    parents = [path for path in modules if starred(path) == pattern]
    classes = {type(modules[path]) for path in parents}
    if not parents or sum(type(m) in classes for m in modules.values()) != len(parents):
        return []
    patched = (set(norm.paths), set(mlp.paths))
    if all(f"{p}.{first}" in patched[0] and f"{p}.{second}" in patched[1] for p in parents):
        return parents
    return []


def _together(model: nn.Module, norm_path: str, mlp_path: str, parents: Sequence[str], mlp: HubClass) -> bool:
    """Whether one module can have what both have: no name twice, no buffer, and no method of the second class."""
    norm = model.get_submodule(norm_path)
    second = model.get_submodule(f"{parents[0]}.{mlp_path.rpartition('.')[2]}")
    own = set(_names(second))
    if any(hasattr(norm, name) for name in own) or next(second.buffers(), None) is not None:
        return False
    return next(norm.buffers(), None) is None and _read(mlp.original) <= own | {"training"}


def _names(module: nn.Module) -> Iterator[str]:
    """What an instance has of its own."""
    yield from (name for name in vars(module) if not name.startswith("_") and name != "training")
    yield from module._parameters
    yield from module._modules


def _read(source: str) -> set[str]:
    """The attributes of `self` that a function reads."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
