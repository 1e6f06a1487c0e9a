"""Research: find a model's sites, record their calls while it generates, and say what each computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kernelgraft import families, machine
from kernelgraft.errors import MismatchError, RecordError
from kernelgraft.families.base import Call, Recognition, Rejection
from kernelgraft.families.reference import as_tuple, reference_function
from kernelgraft.identity import model_card
from kernelgraft.models import Loaded, left_padded, prompt_ids
from kernelgraft.pipeline.points import PROMPT
from kernelgraft.pipeline.progress import Progress, silent
from kernelgraft.records import Definition, Research, ResearchRow, Site, WorkloadMeta
from kernelgraft.sites import Run, capture, current, discover
from kernelgraft.store import Inventory
from kernelgraft.suppliers.guards import bind_axes
from kernelgraft.suppliers.ours import INTERPRET

SHORT_PROMPT = "The capital"
"""Beside `PROMPT` in the left-padded batch."""
NEW_TOKENS = 4
NOT_CALLED, NO_FAMILY = "not called while generating", "no family"
UNREMARKABLE = (NOT_CALLED, NO_FAMILY)
"""Reasons for leaving a site that are no news; they are in the record."""
LARGE_PARAMETER = 1 << 20
"""Parameters of more elements are neither copied nor stored with each call that reads them; the model has them."""


@dataclass(frozen=True)
class Bound:
    """One captured call as a Definition sees it."""

    site: Site
    call: Call
    definition: Definition
    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Compute:
    """Sites of one family that share their Definitions: one row of the plan, one patch of the graft."""

    family: str
    semantics: dict[str, Any]
    definitions: tuple[Definition, ...]
    sites: list[Site] = field(default_factory=list)
    bound: list[Bound] = field(default_factory=list)


def standard_runs(loaded: Loaded) -> list[Run]:
    """What the model generates while it is recorded: dynamic cache, static cache, and a left-padded batch of two."""
    ids = prompt_ids(loaded, PROMPT)
    padded, mask = left_padded(loaded, [PROMPT, SHORT_PROMPT])
    return [
        Run(input_ids=ids, attention_mask=torch.ones_like(ids), new_tokens=NEW_TOKENS, cache="dynamic", padded=False),
        Run(input_ids=padded, attention_mask=mask, new_tokens=NEW_TOKENS, cache="dynamic", padded=True),
        Run(input_ids=ids, attention_mask=torch.ones_like(ids), new_tokens=NEW_TOKENS, cache="static", padded=False),
    ]


def bind(site: Site, call: Call, recognition: Recognition) -> Bound | None:
    """Run the site's seat on a recorded call to see the Definition's inputs; None: the original has to serve it.

    That is so where the seat says it, and where the inputs are not the Definition's (a broadcast residual, say), which
    the guard refuses when the model runs.
    """
    by_inputs = {len(d.inputs): d for d in recognition.definitions}
    seen: list[Bound] = []

    def select(*inputs: Any) -> Callable[..., Any] | None:
        definition = by_inputs.get(len(inputs))
        if definition is None or not belongs(definition, inputs):
            return None

        def kernel(*values: Any) -> Any:
            outputs = reference_function(definition)(*values)
            kept = tuple(_kept(v) if isinstance(v, torch.Tensor) else v for v in values)
            seen.append(Bound(site, call, definition, kept, as_tuple(outputs)))
            return outputs

        return kernel

    seat = families.get(recognition.family).seat(recognition.semantics)
    replacement = seat.factory(call.original, select, **seat.constants)
    with torch.no_grad():
        replay(site, call, replacement)
    return seen[0] if seen else None


def _kept(value: torch.Tensor) -> torch.Tensor:
    """A copy; of a large parameter, which no call changes, the parameter itself."""
    return value if _is_large(value) else value.detach().clone()


def _is_large(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.numel() > LARGE_PARAMETER


def replay(site: Site, call: Call, function: Callable[..., Any]) -> Any:
    """Make a recorded call again through `function`: the original, or what a seat put in its place."""
    if site.kind in ("module", "statement"):
        return function(call.module, *call.args, **call.kwargs)
    return function(*call.args, **call.kwargs)


def foreign_patch(model: nn.Module, site: Site) -> str | None:
    """The package that replaced the site's method before us, or None."""
    module = model.get_submodule(site.instances[0])
    package = (getattr(current(module, site.method), "__module__", None) or "").partition(".")[0]
    own = type(module).__module__.partition(".")[0]
    known = {own, "transformers", "torch", "accelerate", "peft"}
    return None if package in known else package


def recognise(site: Site, calls: Sequence[Call]) -> tuple[Recognition | None, str | None]:
    """Ask each family that knows this kind of site; the first that recognises it has it. Else the reasons given."""
    if not calls:
        return None, NOT_CALLED
    written = sorted({name for call in calls for name in call.mutated})
    if written:
        return None, f"writes into its arguments in place: {', '.join(written)}"
    reasons = []
    for name in families.NAMES:
        family = families.get(name)
        if site.kind not in family.kinds:
            continue
        found = family.recognise(site, calls)
        if isinstance(found, Recognition):
            return found, None
        if isinstance(found, Rejection):
            reasons.append(f"{found.family}: {found.reason}")
    return None, "; ".join(reasons) or NO_FAMILY


def research(loaded: Loaded, inventory: Inventory, *, progress: Progress = silent) -> tuple[Research, list[Compute]]:
    """Discover, capture, recognise; write Definitions, Workloads and `research.json` in place of older records.

    The live model is left exactly as it was. Returns the record and the computes with their captured calls.
    """
    model = loaded.model
    progress("research", 0, None, "finding sites")
    sites = discover(model, products=_products(model))
    progress("research", 0, len(sites), f"recording {len(sites)} sites while generating")
    captured = capture(model, sites, standard_runs(loaded))
    rows: list[ResearchRow] = []
    computes: dict[tuple[str, ...], Compute] = {}
    stored: list[Bound] = []
    for done, site in enumerate(sites):
        progress("research", done, len(sites), site.key)
        calls = captured.calls.get(site.key, [])
        recognition: Recognition | None
        reason: str | None
        if package := foreign_patch(model, site):
            recognition, reason = None, f"already patched by `{package}`"
        else:
            recognition, reason = recognise(site, calls)
        if recognition is None and reason not in UNREMARKABLE:
            progress("research", done, len(sites), f"{site.key} is left: {reason}")
        counts: dict[str, int] = {regime: n for regime, n in captured.counts.get(site.key, {}).items()}
        row = ResearchRow(site=site, calls=counts, reason=reason)
        if recognition is not None:
            found = [b for b in (bind(site, call, recognition) for call in calls) if b is not None]
            if found:
                names = tuple(d.name for d in recognition.definitions)
                row = row.model_copy(
                    update={"family": recognition.family, "definitions": names, "semantics": recognition.semantics}
                )
                compute = computes.setdefault(
                    names, Compute(recognition.family, recognition.semantics, recognition.definitions)
                )
                compute.sites.append(site)
                compute.bound.extend(found)
                stored.extend(b for b in found if not any(_is_large(x) for x in b.inputs))
            else:
                row = row.model_copy(update={"reason": f"{recognition.family}: no call has inputs of one shape"})
        rows.append(row)
    progress("research", len(sites), len(sites), f"{len(computes)} computes recognised")
    record = Research(model=model_card(model, loaded.ref.spec), machine=machine.read(), prompt=PROMPT, rows=tuple(rows))
    inventory.clear()  # only now: what stood there before stays if anything above fails
    for compute in computes.values():
        for definition in compute.definitions:
            inventory.save_definition(definition)
    for bound in stored:
        _store(inventory, bound)
    inventory.save_record("config", model.config.to_dict())
    inventory.save_record("research", record)
    return record, list(computes.values())


def _products(model: nn.Module) -> bool:
    """True where somebody has another product than torch's: on a GPU, and where our kernels are interpreted."""
    on_gpu = any(p.is_cuda for p in model.parameters())
    return on_gpu or machine.environment(INTERPRET) == "1"


def belongs(definition: Definition, inputs: Sequence[Any]) -> bool:
    """True if these are inputs of the Definition: dtypes, ranks, and sizes that agree."""
    try:
        bind_axes(definition, inputs)
    except ValueError:
        return False
    return True


def axes_of(definition: Definition, inputs: Sequence[Any]) -> dict[str, int]:
    """Sizes of the var axes of a Definition, read off its inputs."""
    sizes = bind_axes(definition, inputs)
    return {name: sizes[name] for name, axis in definition.axes.items() if axis.value is None}


def computes_of(record: Research, definitions: dict[str, Definition]) -> list[Compute]:
    """The computes that a research record holds, without captured calls."""
    computes: dict[tuple[str, ...], Compute] = {}
    for row in record.rows:
        if row.family is not None:
            missing = [name for name in row.definitions if name not in definitions]
            if missing:
                raise RecordError(f"definition `{missing[0]}` is missing: run `kernelgraft research` again")
            own = tuple(definitions[name] for name in row.definitions)
            compute = computes.setdefault(row.definitions, Compute(row.family, row.semantics, own))
            compute.sites.append(row.site)
    return list(computes.values())


def recapture(loaded: Loaded, record: Research, definitions: dict[str, Definition]) -> list[Compute]:
    """The computes of a research record with their calls, recorded again from the live model.

    Raises MismatchError if the model is not the one that was researched.
    """
    card = model_card(loaded.model, loaded.ref.spec)
    if card != record.model:
        raise MismatchError(
            f"`{card.name}` is not the model that was researched ({record.model.name}, {record.model.class_name}, "
            f"transformers {record.model.transformers}): run `kernelgraft research` again"
        )
    computes = computes_of(record, definitions)
    captured = capture(loaded.model, [s for c in computes for s in c.sites], standard_runs(loaded))
    for compute in computes:
        recognition = Recognition(compute.family, compute.semantics, compute.definitions)
        for site in compute.sites:
            found = (bind(site, call, recognition) for call in captured.calls.get(site.key, []))
            compute.bound.extend(bound for bound in found if bound)
    return computes


def _store(inventory: Inventory, bound: Bound) -> None:
    meta = WorkloadMeta(
        regime=bound.call.regime,
        cache=bound.call.cache,
        padded=bound.call.padded,
        site=bound.site.key,
        instance=bound.call.instance,
    )
    inventory.save_workload(bound.definition, meta, bound.inputs, bound.outputs)
