"""The rules of kernels on the names and shapes of a model, without its weights.

Each place is gone through as apply would: the Layout is built on meta, the rules are run there and back. Then the same
rules are tried on all names of the model, as transformers' own loader and saver would, to tell what breaks only there.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, revert_weight_conversion

from kernelgraft.errors import UsageError
from kernelgraft.layouts.building import Built, build
from kernelgraft.layouts.findings import Check, Finding, Severity, in_one_line, starred
from kernelgraft.layouts.packages import signature_drift
from kernelgraft.layouts.records import LoadedKernel, Place
from kernelgraft.layouts.rules import Tensors, resolve


@dataclass(frozen=True)
class Site:
    """A place that stands for all places of its kind in the model."""

    place: Place
    children: tuple[nn.Module, ...]
    count: int

    @property
    def where(self) -> str:
        """How messages name it."""
        return " + ".join(f"`{path}`" for path in dict.fromkeys(starred(p) for p in self.place.paths))

    def values(self) -> Tensors:
        """Parameters and buffers of the children themselves, by full name."""
        return {
            f"{path}.{name}": tensor
            for path, child in zip(self.place.paths, self.children, strict=True)
            for name, tensor in child.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }

    def built(self) -> Built:
        """The Layout of this place, on meta. Raises UsageError."""
        return build(self.place, self.children)

    def moved(self, layout: nn.Module) -> Tensors:
        """Those that the rules take to the Layout: all but what it holds as it is."""
        held = {id(t) for t in layout.state_dict(keep_vars=True).values()}
        return {name: tensor for name, tensor in self.values().items() if id(tensor) not in held}


def representatives(root: nn.Module, places: Sequence[Place]) -> list[Site]:
    """One place of each kind: same kernel, path up to indices, classes, names and shapes."""
    kinds: dict[Any, list[Site]] = {}
    for place in places:
        children = tuple(root.get_submodule(path) for path in place.paths)
        looks = tuple(
            (type(child), tuple((name, tuple(t.shape)) for name, t in child.state_dict(keep_vars=True).items()))
            for child in children
        )
        key = (id(place.kernel), starred(place.parent), tuple(starred(name) for name in place.names), looks)
        kinds.setdefault(key, []).append(Site(place, children, 1))
    return [Site(group[0].place, group[0].children, len(group)) for group in kinds.values()]


def dry_run(root: nn.Module, places: Sequence[Place]) -> list[Finding]:
    """Everything that names, shapes and signatures say about these places; nothing is changed or allocated."""
    found: list[Finding] = []
    sites = representatives(root, places)
    config = getattr(root, "config", None)
    for site in sites:
        found += _place(site, config)
    everything = _all_meta(root.state_dict(keep_vars=True))
    for kernel in {id(place.kernel): place.kernel for place in places}.values():
        if kernel.layout is not None and kernel.rules and not any(f.kernel == kernel.name for f in _errors(found)):
            mine = [place for place in places if place.kernel is kernel]
            found += _elsewhere(root, kernel, mine, [s for s in sites if s.place.kernel is kernel], everything)
    return list(dict.fromkeys(found))


def _errors(found: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.severity == "error"]


# --- one place ---


def _place(site: Site, config: Any) -> Iterator[Finding]:
    kernel = site.place.kernel

    def finding(check: Check, message: str, severity: Severity = "error") -> Finding:
        return Finding(check, severity, message, kernel.name)

    if kernel.fusion == "chain" or not kernel.entry.is_fusion:
        drift = signature_drift(kernel.kernel, type(site.children[0]))
        if drift is not None:
            yield finding(
                "signature", f"{drift}, at {site.where}: give it the parameters of the installed class by name"
            )
    if not kernel.has_backward and (kernel.layout is None or kernel.layout.forward is nn.Module.forward):
        name = f"`{kernel.name}`"
        what = (
            f"{name} has no backward and its Layout no forward of its own"
            if kernel.layout
            else f"{name} has no backward"
        )
        mend = "give the Layout a forward, which then trains" if kernel.layout else "the original runs in training"
        yield finding("training", f"{what}, so {site.where} cannot be trained: {mend}", "note")
    if kernel.layout is None:
        return
    try:
        built = site.built()
    except UsageError as error:
        yield finding("build", in_one_line(error))
        return
    before = _all_meta(site.moved(built.layout))
    try:
        conversion = resolve(kernel.rules, list(before), config)
        made = conversion.forward(before)
        back = conversion.backward(made)
    except Exception as error:  # an operation of a package may raise anything
        yield finding("names", f"`{kernel.name}Layout.conversion_mapping` at {site.where}: {in_one_line(error)}")
        return
    originals = {id(tensor): name for name, tensor in site.values().items()}
    state = {f"{site.place.paths[0]}.{n}": t for n, t in built.layout.state_dict(keep_vars=True).items()}
    wanted = {name: tensor for name, tensor in state.items() if id(tensor) not in originals}
    yield from _names(finding, site, made, wanted)
    for name in sorted(made.keys() & wanted.keys()):
        if made[name].shape != wanted[name].shape:
            yield finding(
                "shapes",
                f"`{starred(name)}` is {_shape(wanted[name])} in `{kernel.name}Layout`, the rules make "
                f"{_shape(made[name])}: correct the Layout's sizes or the dim of the rule",
            )
    for line in sorted(differences(before, back)):
        layout = f"`{kernel.name}Layout.conversion_mapping`"
        yield finding("save", f"{layout} does not come back: {line}; give its operation an exact reverse_op")
    kept = {name: originals[id(tensor)] for name, tensor in state.items() if id(tensor) in originals}
    yield from _kept(finding, site, kept, config)


def _names(finding: Any, site: Site, made: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    """Names that the rules make and the Layout has not, and the other way round."""
    layout, first = f"{site.place.kernel.name}Layout", site.place.paths[0]
    left = [name for name in made if name not in wanted]
    sources = set(site.values())
    for name in wanted:
        if name not in made:
            offered = difflib.get_close_matches(name, left, 1, 0.3) or left[:1]
            left = [other for other in left if other not in offered]  # one mistake, one line
            hint = "no rule makes it"
            if offered:
                verb = "no rule takes" if offered[0] in sources else "the rules make"
                hint = f"{verb} `{_below(offered[0], first)}`"
            yield finding(
                "names",
                f"`{layout}` has `{_below(name, first)}`, which nothing fills at {site.where} ({hint}): "
                "correct the target of the rule or the name in the Layout",
            )
    for name in left:
        what = "goes nowhere" if name in sources else "is made by a rule and goes nowhere"
        yield finding(
            "names",
            f"`{starred(name)}` {what}: `{layout}` has no parameter of that name, "
            "so add a rule to its `conversion_mapping` that takes it, or correct the one that does",
        )


def _kept(finding: Any, site: Site, kept: Mapping[str, str], config: Any) -> Iterator[Finding]:
    """What a Layout takes over as it is, under another name, needs a rule where transformers' own loader fills it."""
    layout, first = f"{site.place.kernel.name}Layout", site.place.paths[0]
    renamed = {original: name for name, original in kept.items() if name != original}
    if not renamed:
        return
    try:
        made = set(resolve(site.place.kernel.rules, list(site.values()), config).forward(_all_meta(site.values())))
    except UsageError as error:
        yield finding(
            "names",
            f"transformers' own loader fails on `{layout}.conversion_mapping`: {in_one_line(error)}",
            "portability",
        )
        return
    bare = [original for original, name in renamed.items() if name not in made]
    if bare:
        more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
        yield finding(
            "names",
            f"`{layout}` keeps `{starred(bare[0])}`{more} as `{_below(renamed[bare[0]], first)}` without a rule: "
            "add a WeightRenaming, or transformers' own loader leaves it unfilled",
            "portability",
        )


def _all_meta(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: _meta(tensor) for name, tensor in tensors.items()}


def _below(name: str, first: str) -> str:
    return name.removeprefix(first + ".") if name.startswith(first + ".") else starred(name)


def differences(before: Mapping[str, torch.Tensor], back: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Where names, shapes and (off meta) values that come back differ from those that went in, in words."""
    for name in before.keys() | back.keys():
        if name not in back:
            others = difflib.get_close_matches(name, [n for n in back if n not in before], 1, 0.3)
            yield (
                f"`{starred(name)}` is saved as `{starred(others[0])}`" if others else f"`{starred(name)}` is not saved"
            )
        elif name in before and before[name].shape != back[name].shape:
            yield f"`{starred(name)}` is {_shape(before[name])} and saved as {_shape(back[name])}"
        elif name in before and not before[name].is_meta and not torch.equal(before[name], back[name]):
            yield f"`{starred(name)}` is saved with other values"


def _shape(tensor: torch.Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


# --- the whole model, as transformers' own loader sees it ---


def _elsewhere(
    root: nn.Module, kernel: LoadedKernel, places: Sequence[Place], sites: Sequence[Site], everything: Tensors
) -> Iterator[Finding]:
    """What only breaks through transformers' own loader and saver, which take a rule for the whole model."""

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
    for site in sites:
        before = _all_meta(site.values())
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
