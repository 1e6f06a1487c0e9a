"""What only breaks through transformers' own loader and saver, which take a rule for all names of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, revert_weight_conversion

from kernelgraft.layouts.findings import Check, Finding, in_one_line, starred
from kernelgraft.layouts.records import LoadedKernel, Place
from kernelgraft.layouts.rules import Tensors, resolve
from kernelgraft.layouts.samples import Sample, differences, on_meta


def elsewhere(
    root: nn.Module, kernel: LoadedKernel, places: Sequence[Place], samples: Sequence[Sample], everything: Tensors
) -> Iterator[Finding]:
    """Portability findings of one kernel; `everything` are all tensors of the model, on meta."""

    def finding(check: Check, message: str) -> Finding:
        return Finding(check, "portability", message, kernel.name)

    inside = tuple(f"{path}." for place in places for path in place.paths)
    outside = [name for name in everything if not name.startswith(inside)]
    mine = copy.deepcopy(kernel.rules)  # a rule remembers that it was used
    hits = [(rule, [name for name in outside if _hits(rule, name)]) for rule in mine]
    strays = [(rule, names) for rule, names in hits if names]
    if strays:
        rule, names = strays[0]
        count = sum(len(names) for _, names in strays) - 1
        more = f" (and, with the other rules, {count} more)" if count else ""
        yield finding(
            "towers",
            f"the rule `{rule.source_patterns[0]}` → `{rule.target_patterns[0]}` also hits `{names[0]}`{more}, which "
            f"`{kernel.name}` does not replace: write more of the path into its source",
        )
    yield from _own_converters(root, kernel, everything, finding)
    lines: dict[str, None] = {}
    config = getattr(root, "config", None)
    for sample in samples:
        before = on_meta(sample.values())
        shim: Any = SimpleNamespace(_weight_conversions=_used(kernel.rules, before), config=config)
        try:
            back = revert_weight_conversion(shim, resolve(kernel.rules, list(before), config).forward(before))
        except Exception as error:  # whatever an operation raises when it is reversed
            yield finding("save", f"`save_pretrained` of transformers fails for `{kernel.name}`: {in_one_line(error)}")
            return
        lines.update(dict.fromkeys(sorted(differences(before, back))))
    dollars = [pattern for rule in kernel.rules for pattern in rule.source_patterns if "$" in pattern]
    if lines:
        yield finding(
            "save",
            f"transformers' own `save_pretrained` loses what `{kernel.name}Layout` merges or renames: "
            f"{'; '.join(list(lines)[:3])}; {_mend(kernel)}",
        )
    elif dollars:
        yield finding(
            "save", f"some versions of transformers save names with the `$` of `{dollars[0]}`: {_mend(kernel)}"
        )


def _mend(kernel: LoadedKernel) -> str:
    if any("$" in pattern for rule in kernel.rules for pattern in rule.source_patterns):
        return "leave `$` out of the rule (a pattern already ends on a name)"
    return "use an operation with explicit sizes (SizedConcatenate) and plain names in the rules"


def _used(rules: Sequence[Any], names: Mapping[str, Any]) -> list[Any]:
    """Copies of the rules that some name went through, as a load leaves them on the model."""
    mine = [copy.deepcopy(rule) for rule in rules]
    for name in names:
        for rule in mine:
            name, _ = rule.rename_source_key(name)
    return [rule for rule in mine if rule.was_used()]


def _own_converters(root: nn.Module, kernel: LoadedKernel, everything: Tensors, finding: Any) -> Iterator[Finding]:
    """Renamings, which run first, that take names of the checkpoint away from the model's own converters."""
    own = [rule for rule in get_model_conversion_mapping(root) if isinstance(rule, WeightConverter)]
    if not own:
        return
    try:
        checkpoint: dict[str, Any] = revert_weight_conversion(root, dict(everything))
    except Exception:  # a model whose conversion cannot run without its weights tells nothing here
        return
    for rule in (one for one in copy.deepcopy(kernel.rules) if isinstance(one, WeightRenaming)):
        for name in (name for name in checkpoint if any(_hits(one, name) for one in own)):
            renamed, _ = rule.rename_source_key(name)
            if not any(_hits(one, renamed) for one in own):
                yield finding(
                    "towers",
                    f"the rule `{rule.source_patterns[0]}` → `{rule.target_patterns[0]}` takes `{starred(name)}` of "
                    "the checkpoint away from the model's own converters: write more of the path into its source",
                )
                return


def _hits(rule: Any, name: str) -> bool:
    return rule.rename_source_key(name)[1] is not None
