"""A Layout's `conversion_mapping` on the tensors of one place, there and back.

The rules are transformers' own objects and are asked as its loader asks them: all renamings in turn, then at most one
converter for a key. They see only the keys of the modules that are replaced, so a rule cannot reach another tower or
the keys of a model's own converters. The way back goes by what was recorded on the way there, never by the patterns:
`$`, anchors and parts of unequal sizes come back exactly.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from kernelgraft.errors import UsageError

Sizes = Sequence[int] | Callable[[Any], Sequence[int]]
Tensors = dict[str, torch.Tensor]


class SizedConcatenate(ConversionOps):
    """Concatenate along `dim` parts of stated sizes, so that splitting gives exactly those parts again.

    `sizes` has one length along `dim` for each source pattern, or is a function of the model's configuration that
    gives them. For a package's `conversion_mapping`, in place of `Concatenate`; transformers' own loader takes it too.
    """

    def __init__(self, dim: int = 0, sizes: Sizes = ()) -> None:
        self.dim = dim
        self.sizes = sizes

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """One tensor under the target pattern. Raises UsageError if a part has another size."""
        parts = [_one(input_dict[pattern]) for pattern in source_patterns if pattern in input_dict]
        wanted = _sizes(self.sizes, kwargs.get("config"))
        found = [part.shape[self.dim] for part in parts]
        if found != wanted:
            raise UsageError(f"`{target_patterns[0]}` is made of parts of sizes {found}, the rule says {wanted}")
        return {target_patterns[0]: torch.cat(parts, dim=self.dim)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The split into those sizes."""
        return SizedSplit(self.dim, self.sizes)


class SizedSplit(ConversionOps):
    """Split along `dim` into parts of stated sizes: the reverse of `SizedConcatenate`."""

    def __init__(self, dim: int = 0, sizes: Sizes = ()) -> None:
        self.dim = dim
        self.sizes = sizes

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """One view for each target pattern."""
        whole = _one(next(iter(input_dict.values())))
        parts = torch.split(whole, _sizes(self.sizes, kwargs.get("config")), dim=self.dim)
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """The concatenation of those sizes."""
        return SizedConcatenate(self.dim, self.sizes)


@dataclass(frozen=True)
class Step:
    """What happens to some keys together: one key renamed, or several through one converter."""

    sources: tuple[tuple[str, ...], ...]
    """Keys by source pattern of the converter, in its order; one tuple of one key for a renaming."""
    target: str
    """The new key; for a converter, the one that its first target pattern stands in."""
    converter: Any = None
    patterns: tuple[str, ...] = ()
    """The source patterns that `sources` belong to."""

    @property
    def keys(self) -> tuple[str, ...]:
        """All source keys, flat."""
        return tuple(key for group in self.sources for key in group)


@dataclass(frozen=True)
class Conversion:
    """The rules of one place, resolved to its keys. `forward` and `backward` may be called any number of times."""

    steps: tuple[Step, ...]
    config: Any = None
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Lengths of what each plain `Concatenate` put together, by target: written by `forward`, read by `backward`."""
    made: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """New keys by the target of their step."""

    def forward(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Original keys to new ones. A renamed tensor is the same object; others are fresh (or meta, like theirs)."""
        found: Tensors = {}
        for step in self.steps:
            results = self._through(step, tensors)
            for key, tensor in results.items():
                if key in found:
                    raise UsageError(f"two rules make `{key}`; correct the `conversion_mapping`")
                found[key] = tensor
            self.made[step.target] = tuple(results)
        return found

    def backward(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """New keys to the original ones, views where the rules allow. `forward` must have run (meta tensors do).

        Steps of which a new key is not in `tensors` are left out.
        """
        found: Tensors = {}
        for step in self.steps:
            if all(key in tensors for key in self.made[step.target]):
                found.update(self._back(step, tensors))
        return found

    def complete(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """The new keys that `backward` uses of these."""
        found: set[str] = set()
        for step in self.steps:
            if all(key in tensors for key in self.made[step.target]):
                found.update(self.made[step.target])
        return found

    def _through(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        if step.converter is None:
            return {step.target: tensors[step.sources[0][0]]}
        devices = {tensors[key].device for key in step.keys}
        if len(devices) > 1:
            raise UsageError(f"the parts of `{step.target}` lie on {sorted(map(str, devices))}; put them on one device")
        rule = step.converter
        held: dict[str, Any] = {
            pattern: [tensors[key].detach() for key in keys]
            for pattern, keys in zip(step.patterns, step.sources, strict=True)
        }
        for index, operation in enumerate(rule.operations):
            if _is_plain_concatenate(operation):
                parts = [t for pattern in rule.source_patterns for t in _many(held.get(pattern, []))]
                self.sizes[f"{index}:{step.target}"] = tuple(part.shape[operation.dim] for part in parts)
            held = self._run(operation, held, rule.source_patterns, rule.target_patterns, step.target)
        return _expanded(held, step.target)

    def _back(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        if step.converter is None:
            return {step.sources[0][0]: tensors[step.target]}
        rule = step.converter
        prefix, suffix = _around(step.target, rule.target_patterns)
        held: dict[str, Any] = {}
        for key in self.made[step.target]:
            held[key.removeprefix(prefix).removesuffix(suffix)] = [tensors[key].detach()]
        for index in reversed(range(len(rule.operations))):
            operation, sizes = rule.operations[index], self.sizes.get(f"{index}:{step.target}")
            if sizes is not None:
                parts = torch.split(_one(next(iter(held.values()))), list(sizes), dim=operation.dim)
                held = _dealt(parts, step)
            else:
                held = self._run(operation.reverse_op, held, rule.target_patterns, rule.source_patterns, step.target)
        return _undealt(held, step)

    def _run(
        self, operation: Any, held: dict[str, Any], sources: Sequence[str], targets: Sequence[str], name: str
    ) -> dict[str, Any]:
        with torch.no_grad():
            found: dict[str, Any] = operation.convert(
                dict(held),
                source_patterns=list(sources),
                target_patterns=list(targets),
                full_layer_name=name,
                model=None,
                config=self.config,
                missing_keys=None,
            )
        return found


def resolve(rules: Sequence[Any], keys: Sequence[str], config: Any = None) -> Conversion:
    """Which rule does what with these keys (full names in the model). The rules themselves are not changed.

    Raises UsageError for a rule that is no renaming or converter, and for a converter that lacks one of its sources.
    """
    mine = [copy.deepcopy(rule) for rule in rules]
    for rule in mine:
        if not isinstance(rule, (WeightRenaming, WeightConverter)):
            raise UsageError(
                f"`conversion_mapping` holds a `{type(rule).__name__}`; use WeightRenaming and WeightConverter"
            )
    renamings = [rule for rule in mine if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mine if isinstance(rule, WeightConverter)]
    steps: list[Step] = []
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for key in sorted(keys, key=_natural):
        name = key
        for rule in renamings:
            name, _ = rule.rename_source_key(name)
        for rule in converters:
            name, pattern = rule.rename_source_key(name)
            if pattern is not None:
                _, group = groups.setdefault(name, (rule, {}))
                group.setdefault(pattern, []).append(key)
                break
        else:
            steps.append(Step(((key,),), name))
    for target, (rule, group) in groups.items():
        lacking = [pattern for pattern in rule.source_patterns if pattern not in group]
        if lacking:
            raise UsageError(f"nothing here matches `{lacking[0]}`, a source of `{target}`; correct the rule")
        patterns = tuple(rule.source_patterns)
        steps.append(Step(tuple(tuple(group[p]) for p in patterns), target, rule, patterns))
    return Conversion(tuple(steps), config)


def _is_plain_concatenate(operation: Any) -> bool:
    """transformers' own: its reverse cuts equal parts, whatever was put together."""
    return type(operation).__name__ == "Concatenate" and type(operation).__module__.startswith("transformers.")


def _dealt(parts: Sequence[torch.Tensor], step: Step) -> dict[str, Any]:
    """The parts of a concatenation under the patterns of their sources."""
    if len(parts) == len(step.patterns):
        return {pattern: [part] for pattern, part in zip(step.patterns, parts, strict=True)}
    held: dict[str, Any] = {}
    rest = list(parts)
    for pattern, keys in zip(step.patterns, step.sources, strict=True):
        held[pattern], rest = rest[: len(keys)], rest[len(keys) :]
    return held


def _undealt(held: Mapping[str, Any], step: Step) -> Tensors:
    """The results of the reversed operations under the original keys."""
    found: Tensors = {}
    for pattern, keys in zip(step.patterns, step.sources, strict=True):
        if pattern in held and len(_many(held[pattern])) == len(keys):
            found.update(zip(keys, _many(held[pattern]), strict=True))
            continue
        # A reversed merge of a list names its results with the index in the place of the pattern's `*`.
        for index, key in enumerate(keys):
            name = pattern.replace("*", str(index))
            if name not in held:
                raise UsageError(f"the rules for `{step.target}` do not give back `{key}`; their reverse is missing")
            found[key] = _one(held[name])
    return found


def _expanded(held: Mapping[str, Any], target: str) -> Tensors:
    """Results by target pattern to results by full key."""
    around = next((target.partition(pattern) for pattern in held if pattern in target), None)
    prefix, suffix = (around[0], around[2]) if around else ("", "")
    return {prefix + key + suffix: _one(value) for key, value in held.items()}


def _around(target: str, patterns: Sequence[str]) -> tuple[str, str]:
    around = next((target.partition(pattern) for pattern in patterns if pattern in target), None)
    return (around[0], around[2]) if around else ("", "")


def _sizes(sizes: Sizes, config: Any) -> list[int]:
    return [int(size) for size in (sizes(config) if callable(sizes) else sizes)]


def _many(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _one(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return tensor


def _natural(key: str) -> list[tuple[int, Any]]:
    """Numbers in order of value: experts come in their order."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"\.", key)]
