"""Rotary position embedding: pairs of channels of q (and k) are turned by the angle of their position.

Found at calls of a global function. Semantics of a recognised site:

- `pairs_in`, `pairs_out`: which channels form a pair before and after, `half` (i, i + r/2) or `interleaved`
  (2i, 2i + 1);
- `rotary_dim`, `head_dim`, `placement`: how many channels turn, and whether they are the `first` or the `last` ones;
- `direction`: `forward` (a cos - b sin, b cos + a sin) or `backward` (the other signs);
- `table`: cos and sin have a value for each rotated channel (`full`; of `first_half` only that half is read), for each
  pair (`half`), or are one `complex` table, whose real view [..., r/2, 2] is the Definition's input `freqs`;
- `table_layout`: how the values of a full table repeat: `duplicated` halves, `repeated` twice in a row, or `free`;
- `leading`: for each leading axis of the tables, the axis of q that it goes with;
- `compute`: products are taken in float32 (`float32`) or as torch promotes the inputs (`input`); `cast`: the result has
  q's dtype;
- `parameters`, `tensors`, `fixed`, `defaults`, `without_k`, `rank`: what the seat needs.

Not covered: q and k of different lengths, tables with one row per head, rotation of parts of the sequence only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from kernelgraft.families.base import Call, Distribution, Family, Recognition, Rejection, Seat
from kernelgraft.families.points import axis_points
from kernelgraft.families.probe import DIFFERENT, Match, draw, same, worst
from kernelgraft.families.reference import body_function, define, dtype_name, torch_dtype
from kernelgraft.families.rope_variants import Bound, Geometry, Variant, bind, identify, outputs_of
from kernelgraft.records import Definition, Site


def rope_seat(
    original: Callable[..., Any],
    select: Callable[..., Any],
    *,
    parameters: list[str],
    tensors: list[str],
    fixed: dict[str, Any],
    defaults: dict[str, Any],
    complex_table: bool,
    without_k: str | None,
    rank: int,
) -> Callable[..., Any]:
    """Replace the function; a call in which anything but the `tensors` differs from `fixed` runs the original.

    `parameters` are the function's, in order; `tensors` those that are inputs of the Definition, in its order;
    `defaults` what `fixed` parameters are when they are not given; `without_k` says what a call without k returns (a
    `single` tensor or a `pair` with None), None if no such call is served; `rank` is the number of axes of q.
    """
    plans: dict[Any, Any] = {}

    def plan(count: int, names: list[str]) -> Any:
        """Where the inputs of such a call are (index, name, None: absent), and what must be equal; None: not served."""
        places: dict[str, Any] = {name: index for index, name in enumerate(parameters[:count])}
        if count > len(parameters) or any(name in places for name in names):
            return None
        places.update({name: name for name in names})
        if any(name not in tensors and name not in fixed for name in places):
            return None
        if any(name not in places and defaults.get(name, original) != value for name, value in fixed.items()):
            return None
        checks = [(places[name], value) for name, value in fixed.items() if name in places]
        return [places.get(name) for name in tensors], checks

    def replacement(*args: Any, **kwargs: Any) -> Any:
        key = (len(args), *kwargs)
        if key not in plans:
            plans[key] = plan(len(args), list(kwargs))
        if plans[key] is None:
            return original(*args, **kwargs)
        places, checks = plans[key]
        for place, value in checks:
            given = args[place] if type(place) is int else kwargs[place]
            if type(given) is not type(value) or given != value:
                return original(*args, **kwargs)
        inputs: list[Any] = [args[p] if type(p) is int else None if p is None else kwargs[p] for p in places]
        alone = without_k is not None and inputs[1] is None
        if alone:
            del inputs[1]
        for x in inputs:
            if not isinstance(x, torch.Tensor):
                return original(*args, **kwargs)
        if inputs[0].ndim != rank:
            return original(*args, **kwargs)
        if complex_table:
            if not inputs[-1].is_complex():
                return original(*args, **kwargs)
            inputs[-1] = torch.view_as_real(inputs[-1])
        kernel = select(*inputs)
        if kernel is None:
            return original(*args, **kwargs)
        outputs = kernel(*inputs)
        if isinstance(outputs, (tuple, list)):
            outputs = tuple(outputs) if len(outputs) > 1 else outputs[0]
        return (outputs, None) if alone and without_k == "pair" else outputs

    return replacement


class Rope(Family):
    """Rotary position embedding, of q and k or of one tensor alone."""

    name: ClassVar[str] = "rope"
    kinds: ClassVar[frozenset[str]] = frozenset({"function"})
    without_gradient: ClassVar[frozenset[str]] = frozenset({"cos", "sin", "freqs"})

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """See `Family.recognise`."""
        found = [bind(call) for call in calls]
        bounds = [b for b in found if isinstance(b, Bound)]
        if not bounds:
            reason = next((b for b in found if isinstance(b, str)), None)
            return Rejection(self.name, reason) if reason else None
        # The longest call shows best which axis is the sequence and how the tables repeat.
        bounds.sort(key=lambda b: max(b.value(b.tables[0]).shape[:-1]), reverse=True)
        groups = [g for g in ([b for b in bounds if b.k], [b for b in bounds if not b.k]) if g]
        chosen = []
        for group in groups:
            if isinstance(found_variant := identify(group[0]), str):
                return Rejection(self.name, found_variant)
            chosen.append(found_variant)
        if any(v != chosen[0] for v in chosen):
            return Rejection(self.name, "calls with and without k differ in more than k")
        variant, geometry = chosen[0]
        semantics = _semantics([group[0] for group in groups], variant)
        definitions = []
        for group in groups:
            served, match = self._check(group, variant, semantics)
            if not match.acceptable:
                return Rejection(self.name, f"the reference is {match.max_ulp:.1f} ulp away from a captured call")
            definitions.append(_definition(site, served, variant, geometry, semantics, match))
        return Recognition(self.name, semantics, tuple(definitions))

    def _check(self, group: list[Bound], variant: Variant, semantics: dict[str, Any]) -> tuple[list[Bound], Match]:
        """The captured calls that the seat serves, and how well the reference reproduces them through it."""
        seat, run = self.seat(semantics), body_function(variant.body(with_k=group[0].k is not None))
        served, matches = [], []
        for bound in group:
            inputs: list[Any] = []

            def select(*given: Any, inputs: list[Any] = inputs) -> Callable[..., Any]:
                inputs.extend(given)
                return run

            replacement = seat.factory(bound.call.original, select, **seat.constants)
            with torch.no_grad():
                output = replacement(*bound.call.args, **bound.call.kwargs)
            if inputs:
                served.append(bound)
                matches.append(same(outputs_of(output), bound.outputs))
        return served, worst(matches) if matches else DIFFERENT

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """See `Family.seat`."""
        names = ("parameters", "tensors", "fixed", "defaults", "without_k", "rank")
        constants = {name: semantics[name] for name in names}
        return Seat(rope_seat, {**constants, "complex_table": semantics["table"] == "complex"})

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`; the tables come from random angles and repeat as the captured ones do."""
        sizes = {name: axes[name] if axis.value is None else axis.value for name, axis in definition.axes.items()}
        result: list[torch.Tensor] = []
        tables: dict[str, torch.Tensor] = {}
        for name, spec in definition.inputs.items():
            shape, dtype = [sizes[axis] for axis in spec.shape or ()], torch_dtype(spec.dtype)
            if name in ("q", "k"):
                result.append(draw(shape, dtype, generator, distribution))
                continue
            tables = tables or _tables(shape[: -2 if name == "freqs" else -1], definition.meta.semantics, generator)
            result.append(tables[name].to(dtype).contiguous())
        return result

    def axis_points(self, definition: Definition, traced: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """See `Family.axis_points`; also tables with a row per batch element."""
        points = axis_points(definition, traced)
        if "table_batch" in definition.axes and points:
            points += [{**points[0], "batch_size": b, "table_batch": b, "seq_len": s} for b, s in ((2, 5), (3, 17))]
        return [p for i, p in enumerate(points) if p not in points[:i]]


def _tables(leading: list[int], semantics: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Fresh float32 tables by input name."""
    full = semantics["table"] in ("full", "first_half")
    layout = semantics["table_layout"]
    width = semantics["rotary_dim"] // (1 if full and layout == "free" else 2)
    angles = (torch.rand([*leading, width], generator=generator) * 2 - 1) * torch.pi
    if full and layout == "duplicated":
        angles = torch.cat((angles, angles), dim=-1)
    elif full and layout == "repeated":
        angles = angles.repeat_interleave(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return {"cos": cos, "sin": sin, "freqs": torch.stack((cos, sin), dim=-1)}


def _layout(bound: Bound, variant: Variant) -> str:
    """How the values of the captured tables repeat."""
    if variant.table not in ("half", "complex"):
        tables = [bound.value(name) for name in bound.tables]
        if all(torch.equal(*t.chunk(2, dim=-1)) for t in tables):
            return "duplicated"
        if all(torch.equal(t[..., 0::2], t[..., 1::2]) for t in tables):
            return "repeated"
    return "free"


def _semantics(firsts: list[Bound], variant: Variant) -> dict[str, Any]:
    """Everything that tells this variant and its seat apart, as JSON values."""
    first, last = firsts[0], firsts[-1]
    fixed = {name: value for name, value in last.fixed.items() if name != first.k}
    parameters = first.arguments.signature.parameters.values()
    without_k = None
    if len(firsts) == 2:
        without_k = "single" if isinstance(last.call.output, torch.Tensor) else "pair"
    return {
        "pairs_in": variant.pairs_in,
        "pairs_out": variant.pairs_out,
        "rotary_dim": variant.rotary_dim,
        "head_dim": variant.head_dim,
        "placement": variant.placement,
        "direction": variant.direction,
        "table": variant.table,
        "table_layout": _layout(first, variant),
        "leading": list(variant.leading),
        "compute": variant.compute,
        "cast": variant.cast,
        "parameters": [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)],
        "tensors": [*first.rotated, *variant.arranged(first.tables)],
        "fixed": fixed,
        "defaults": {p.name: p.default for p in parameters if p.name in fixed and p.default is not p.empty},
        "without_k": without_k,
        "rank": variant.rank,
    }


def _definition(
    site: Site, group: list[Bound], variant: Variant, geometry: Geometry, semantics: dict[str, Any], match: Match
) -> Definition:
    """The Definition of the calls with k, or of those without."""
    first = group[0]
    q, table = first.value(first.q), first.value(first.tables[0])
    axes: dict[str, int | None] = {}
    inputs: dict[str, tuple[Sequence[str] | None, torch.dtype]] = {}
    outputs: dict[str, tuple[Sequence[str] | None, torch.dtype]] = {}
    known = {geometry.batch: "batch_size", geometry.sequence: "seq_len", q.ndim - 1: "head_dim"}
    for index, (role, name) in enumerate(zip(("q", "k"), first.rotated, strict=False)):
        shape = []
        for axis, size in enumerate(first.value(name).shape):
            label = known.get(axis, ("num_heads", "num_kv_heads")[index])
            # One tensor after the other may pass through the same call, with another number of heads.
            varies = len({b.value(b.rotated[index]).shape[axis] for b in group}) > 1
            axes[label] = None if varies or label in ("batch_size", "seq_len") else size
            shape.append(label)
        inputs[role] = (shape, q.dtype)
        outputs[f"{role}_out"] = (shape, first.outputs[0].dtype)
    labels = {geometry.sequence: "seq_len", geometry.batch: "table_batch"}
    rows = [labels.get(axis, "one") for axis in geometry.leading]
    axes |= {label: 1 if label == "one" else None for label in rows}
    if variant.table == "complex":
        axes |= {"pairs": table.shape[-1], "parts": 2}
        inputs["freqs"] = ([*rows, "pairs", "parts"], torch.view_as_real(table).dtype)
    else:
        axes["table_width"] = table.shape[-1]
        inputs |= {name: ([*rows, "table_width"], table.dtype) for name in ("cos", "sin")}
    style = variant.pairs_in if variant.pairs_in == variant.pairs_out else f"{variant.pairs_in}_to_{variant.pairs_out}"
    text = json.dumps([semantics, axes, str(inputs)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    roles = "qk" if first.k else "q"
    return define(
        name=f"rope_{style}_{roles}_d{variant.head_dim}_r{variant.rotary_dim}_{dtype_name(q.dtype)}_{digest}",
        op_type="rope",
        family=Rope.name,
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        body=variant.body(with_k=first.k is not None),
        site=site,
        description=f"Rotary position embedding: {variant.rotary_dim} of {variant.head_dim} channels turn.",
        reference_error=match.max_absolute,
        constraints=["table_batch == 1 or table_batch == batch_size"] if "table_batch" in rows else [],
    )


FAMILY = Rope()
