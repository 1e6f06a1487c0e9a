"""The rules of kernels on the names and shapes of a model, without its weights.

Each kind of place is gone through as apply would: the Layout is built on meta, the rules are run there and back.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import UsageError
from kernelgraft.layouts.elsewhere import elsewhere
from kernelgraft.layouts.findings import Check, Finding, Severity, in_one_line, starred
from kernelgraft.layouts.functions import function_drift
from kernelgraft.layouts.records import Place
from kernelgraft.layouts.rules import resolve
from kernelgraft.layouts.samples import Sample, differences, on_meta, representatives, shape_of
from kernelgraft.layouts.signatures import signature_drift


def dry_run(root: nn.Module, places: Sequence[Place]) -> list[Finding]:
    """Everything that names, shapes and signatures say about these places; nothing is changed or allocated."""
    found: list[Finding] = []
    samples = representatives(root, places)
    config = getattr(root, "config", None)
    for sample in samples:
        found += _place(sample, config)
    everything = on_meta(root.state_dict(keep_vars=True))
    for kernel in {id(place.kernel): place.kernel for place in places}.values():
        if kernel.layout is not None and kernel.rules and not any(f.kernel == kernel.name for f in _errors(found)):
            mine = [place for place in places if place.kernel is kernel]
            found += elsewhere(root, kernel, mine, [s for s in samples if s.place.kernel is kernel], everything)
    return list(dict.fromkeys(found))


def _errors(found: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.severity == "error"]


# --- one place ---


def _place(sample: Sample, config: Any) -> Iterator[Finding]:
    kernel = sample.place.kernel

    def finding(check: Check, message: str, severity: Severity = "error") -> Finding:
        return Finding(check, severity, message, kernel.name)

    if sample.place.function is not None:
        drift = function_drift(sample.place, sample.children[0])
        if drift is not None:
            which = f"at {sample.where}, for the key `{kernel.entry.key}`"
            yield finding("signature", f"{drift}, {which}: give it the parameters of the function by name")
    elif kernel.fusion == "chain" or not kernel.entry.is_fusion:
        drift = signature_drift(kernel.kernel, type(sample.children[0]))
        if drift is not None:
            yield finding(
                "signature", f"{drift}, at {sample.where}: give it the parameters of the installed class by name"
            )
    if not kernel.has_backward and (kernel.layout is None or kernel.layout.forward is nn.Module.forward):
        name = f"`{kernel.name}`"
        what = (
            f"{name} has no backward and its Layout no forward of its own"
            if kernel.layout
            else f"{name} has no backward"
        )
        mend = "give the Layout a forward, which then trains" if kernel.layout else "the original runs in training"
        yield finding("training", f"{what}, so {sample.where} cannot be trained: {mend}", "note")
    if kernel.layout is None:
        return
    try:
        built = sample.built()
    except UsageError as error:
        yield finding("build", in_one_line(error))
        return
    before = on_meta(sample.moved(built.layout))
    try:
        conversion = resolve(kernel.rules, list(before), config)
        made = conversion.forward(before)
        back = conversion.backward(made)
    except Exception as error:  # an operation of a package may raise anything
        yield finding("names", f"`{kernel.name}Layout.conversion_mapping` at {sample.where}: {in_one_line(error)}")
        return
    originals = {id(tensor): name for name, tensor in sample.values().items()}
    state = {f"{sample.place.paths[0]}.{n}": t for n, t in built.layout.state_dict(keep_vars=True).items()}
    wanted = {name: tensor for name, tensor in state.items() if id(tensor) not in originals}
    yield from _names(finding, sample, made, wanted)
    for name in sorted(made.keys() & wanted.keys()):
        if made[name].shape != wanted[name].shape:
            yield finding(
                "shapes",
                f"`{starred(name)}` is {shape_of(wanted[name])} in `{kernel.name}Layout`, the rules make "
                f"{shape_of(made[name])}: correct the Layout's sizes or the dim of the rule",
            )
    for line in sorted(differences(before, back)):
        layout = f"`{kernel.name}Layout.conversion_mapping`"
        yield finding("save", f"{layout} does not come back: {line}; give its operation an exact reverse_op")
    kept = {name: originals[id(tensor)] for name, tensor in state.items() if id(tensor) in originals}
    yield from _kept(finding, sample, kept, config)


def _names(
    finding: Any, sample: Sample, made: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]
) -> Iterator[Finding]:
    """Names that the rules make and the Layout has not, and the other way round."""
    layout, first = f"{sample.place.kernel.name}Layout", sample.place.paths[0]
    left = [name for name in made if name not in wanted]
    sources = set(sample.values())
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
                f"`{layout}` has `{_below(name, first)}`, which nothing fills at {sample.where} ({hint}): "
                "correct the target of the rule or the name in the Layout",
            )
    for name in left:
        what = "goes nowhere" if name in sources else "is made by a rule and goes nowhere"
        yield finding(
            "names",
            f"`{starred(name)}` {what}: `{layout}` has no parameter of that name, "
            "so add a rule to its `conversion_mapping` that takes it, or correct the one that does",
        )


def _kept(finding: Any, sample: Sample, kept: Mapping[str, str], config: Any) -> Iterator[Finding]:
    """What a Layout takes over as it is, under another name, needs a rule where transformers' own loader fills it."""
    layout, first = f"{sample.place.kernel.name}Layout", sample.place.paths[0]
    renamed = {original: name for name, original in kept.items() if name != original}
    if not renamed:
        return
    try:
        made = set(resolve(sample.place.kernel.rules, list(sample.values()), config).forward(on_meta(sample.values())))
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


def _below(name: str, first: str) -> str:
    return name.removeprefix(first + ".") if name.startswith(first + ".") else starred(name)
