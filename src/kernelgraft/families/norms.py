"""What the norm families share: choosing the variant that has a module's bits, the Definition, and fresh inputs.

Not covered: groups within a row, weights of more than one axis, a second (gating) input. They are rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from kernelgraft.families.base import Call, Distribution, Family, Recognition, Rejection
from kernelgraft.families.norm_parts import Misfit, Parts, find_parts, fresh_copy, probe_rows, probe_shape, vectors
from kernelgraft.families.probe import DIFFERENT, PROBE_DTYPES, TOLERANCE_ULP, Match, draw, same, worst
from kernelgraft.families.reference import define, dtype_name, reference_function, torch_dtype
from kernelgraft.records import Definition, Site

SEAT_KEYS = ("weight", "bias", "argument", "eps_attribute")
"""Semantics that say where the module keeps things; the others say what is computed and go into the Definition."""


class NormFamily(Family):
    """A family of norms: a subclass lists its variants, writes one as code, and seats it."""

    kinds: ClassVar[frozenset[str]] = frozenset({"module"})
    centres: ClassVar[bool]
    """True if the norm subtracts the mean of a row."""

    @abstractmethod
    def variants(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """Semantics to try, without eps and seat keys; of two that give the same bits the first is taken."""

    @abstractmethod
    def source(self, semantics: dict[str, Any], *, function: str = "run") -> str:
        """Python text of `def <function>(hidden_states[, weight[, bias]])`; needs the global `torch` only."""

    def tensors(self, semantics: dict[str, Any]) -> dict[str, str]:
        """The Definition's inputs after `hidden_states` (`weight`, `bias`), each with the module's attribute."""
        return {role: semantics[role] for role in ("weight", "bias") if semantics.get(role) is not None}

    def draw_vector(self, role: str, semantics: dict[str, Any], size: int, generator: torch.Generator) -> torch.Tensor:
        """Float32 values of a weight (within 0.5 of the value that scales by one) or a bias (within 0.5 of zero)."""
        centre = 1 - semantics["offset"] if role == "weight" else 0
        return torch.rand(size, generator=generator) - 0.5 + centre

    def recognise_module(self, module: nn.Module, x: torch.Tensor) -> dict[str, Any] | Rejection | None:
        """Semantics of a norm module that is called with tensors like `x` (floating, last axis = row).

        The module is neither called nor changed: copies are. None: not a norm of this family.
        """
        try:
            parts = find_parts(module, x)
        except Exception:  # cannot be copied, or fails on fresh values of the captured shape: a norm does neither
            return None
        if parts is None or parts.centres != self.centres:
            return None
        if isinstance(parts, Misfit):
            return self._reject(parts.reason)
        return self._choose(module, x, parts)

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """See `Family.recognise`."""
        if not calls:
            return None
        inputs = [_only_tensor(call) for call in calls]
        x = inputs[0]
        if x is None:
            return self._reject_gated(calls[0])
        semantics = self.recognise_module(calls[0].module, x)
        if semantics is None or isinstance(semantics, Rejection):
            return semantics
        if any(call.mutated for call in calls):
            return self._reject("changes its input in place")
        like_first = [
            (call, y)
            for call, y in zip(calls, inputs, strict=True)
            if y is not None and (y.dtype, y.ndim) == (x.dtype, x.ndim)
        ]
        axes = row_axes([tuple(y.shape) for _, y in like_first])
        definition = self._define(site, calls[0], x, semantics, axes)
        error = reproduce(definition, self, semantics, [call for call, _ in like_first])
        if isinstance(error, str):
            return self._reject(error)
        return Recognition(self.name, semantics, (with_error(definition, error),))

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs` and `draw_vector`."""
        return draw_inputs(self, definition, definition.meta.semantics, axes, generator, distribution)

    def _reject(self, reason: str) -> Rejection:
        return Rejection(self.name, reason)

    def _reject_gated(self, call: Call) -> Rejection | None:
        first = next((v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.Tensor) and v.ndim), None)
        output = call.output
        if first is None or not isinstance(output, torch.Tensor) or output.shape != first.shape:
            return None
        if self.centres or len(vectors(call.module, first.shape[-1]) or ()) != 1:
            return None
        return self._reject("owns one vector like a norm, but is called with more than one argument (gated?)")

    def _choose(self, module: nn.Module, x: torch.Tensor, parts: Parts) -> dict[str, Any] | Rejection:
        """The variant with the smallest error on random rows and vectors, in the live dtypes, float32 and bfloat16.

        Mixed dtypes, which the module may not even take, only tell apart variants that are alike otherwise.
        """
        attributes = [a for a in (parts.weight, parts.bias) if a is not None]
        live = getattr(module, attributes[0]).dtype if attributes else x.dtype
        required = dict.fromkeys([*((d, d) for d in PROBE_DTYPES), (x.dtype, live)])
        mixed = [(a, b) for a in PROBE_DTYPES for b in PROBE_DTYPES if attributes and (a, b) not in required]
        probes = [p for pair in required if (p := _probe(module, x, pair, attributes)) is not None]
        extras = [p for pair in mixed if (p := _probe(module, x, pair, attributes)) is not None]
        found: list[tuple[Match, Match, dict[str, Any]]] = []
        for variant in self.variants(parts):
            seat = {key: getattr(parts, key) for key in SEAT_KEYS}
            semantics = {"eps": parts.eps, **variant, "with_weight": parts.weight is not None, **seat}
            run = _function(self.source(semantics))
            match = _judge(run, probes)
            found.append((match, _judge(run, extras) if match.acceptable else DIFFERENT, semantics))
        if not probes or not found:
            return self._reject("a copy with random vectors cannot be run" if found else "has a bias")
        found.sort(key=lambda f: f[:2])  # stable: of equals, the one listed first stays first
        best, best_extra, chosen = found[0]
        if not best.acceptable:
            return self._reject(
                f"scales its rows like a {self.name}, but the closest of {len(found)} variants is {best.max_ulp:.3g}"
                f" ulp away (at most {TOLERANCE_ULP:g})"
            )
        run = _function(self.source(chosen))
        rivals = [s for match, extra, s in found[1:] if not best.bit_equal and (match, extra) == (best, best_extra)]
        for rival in rivals:
            other = _function(self.source(rival))
            if not all(same(_attempt(other, p), _attempt(run, p)).bit_equal for p in probes):
                return self._reject("two variants fit equally well and no probe tells them apart")
        return chosen

    def _define(
        self, site: Site, call: Call, x: torch.Tensor, semantics: dict[str, Any], axes: dict[str, int | None]
    ) -> Definition:
        held = self.tensors(semantics)
        definition = define(
            name=self.name,
            op_type=self.name,
            family=self.name,
            semantics=compute_only(semantics),
            axes=axes,
            inputs={
                "hidden_states": (tuple(axes), x.dtype),
                **{role: (("hidden_size",), getattr(call.module, a).dtype) for role, a in held.items()},
            },
            outputs={"output": (tuple(axes), call.output.dtype)},
            body=self.source(semantics),
            site=site,
            description=f"{self.name} over the last axis, eps {semantics['eps']:g}",
            reference_error=0.0,
        )
        return named(definition, f"{self.name}_h{x.shape[-1]}_r{x.ndim}_{dtype_name(x.dtype)}", semantics)


def compute_only(semantics: dict[str, Any]) -> dict[str, Any]:
    """Semantics without the keys that say where a module keeps its parts."""
    return {k: v for k, v in semantics.items() if k not in SEAT_KEYS}


def named(definition: Definition, stem: str, semantics: dict[str, Any]) -> Definition:
    """The Definition under a name of its own for each fingerprint and each way of seating it.

    Sites that share a Definition share a seat, so two places that keep the weight differently must not share the name.
    """
    identity = definition.meta.fingerprint + json.dumps(semantics, sort_keys=True)
    return definition.model_copy(update={"name": f"{stem}_{hashlib.sha256(identity.encode()).hexdigest()[:8]}"})


def with_error(definition: Definition, error: float) -> Definition:
    """The Definition with the largest absolute difference of its reference from the captured outputs."""
    return definition.model_copy(update={"meta": definition.meta.model_copy(update={"reference_error": error})})


def row_axes(shapes: Sequence[tuple[int, ...]]) -> dict[str, int | None]:
    """Axis names of tensors of rows, in order, from all shapes seen: the size of const axes, None for var ones.

    Of the two middle axes of 4-D tensors the one that never changes is the heads'.
    """
    first, rank = shapes[0], len(shapes[0])
    if rank == 2:
        return {"num_rows": None, "hidden_size": first[-1]}
    fixed = [len({s[i] for s in shapes}) == 1 for i in range(rank)]
    if rank == 4 and fixed[1] and not fixed[2]:
        return {"batch_size": None, "num_heads": first[1], "seq_len": None, "hidden_size": first[-1]}
    names = ["num_heads"] if rank == 4 else [f"size_{i}" for i in range(2, rank - 1)]
    middle = {name: first[i] if fixed[i] else None for i, name in enumerate(names, start=2)}
    return {"batch_size": None, "seq_len": None, **middle, "hidden_size": first[-1]}


def reproduce(definition: Definition, family: Family, semantics: dict[str, Any], calls: Sequence[Call]) -> float | str:
    """Run the Definition's reference through the family's seat on captured calls.

    Gives the largest absolute difference from the captured outputs, or why they are not reproduced.
    """
    run = reference_function(definition)
    reached: list[bool] = []

    def select(*inputs: Any) -> Callable[..., Any]:
        reached.append(True)
        return run

    seat = family.seat(semantics)
    largest = 0.0
    for call in calls:
        reached.clear()
        replacement = seat.factory(call.original, select, **seat.constants)
        try:
            with torch.no_grad():
                output = replacement(call.module, *call.args, **call.kwargs)
        except (RuntimeError, NotImplementedError) as error:  # e.g. weights that accelerate keeps elsewhere
            return f"the reference cannot be run on a call of `{call.instance}`: {' '.join(str(error).split())[:120]}"
        if not reached:
            return f"a call of `{call.instance}` runs the original: it has hooks, another patch or other arguments"
        match = same(output, call.output)
        if not match.acceptable:
            return f"the reference is {match.max_ulp:.3g} ulp away from the captured output of `{call.instance}`"
        largest = max(largest, match.max_absolute)
    return largest


def draw_inputs(
    norm: NormFamily,
    definition: Definition,
    semantics: dict[str, Any],
    axes: dict[str, int],
    generator: torch.Generator,
    distribution: Distribution,
) -> list[torch.Tensor]:
    """Inputs of a Definition: vectors from the norm of these semantics, activations by distribution.

    One ±inf or NaN is put into the last activation only.
    """
    sizes = {n: a.value for n, a in definition.axes.items() if a.value is not None} | axes
    activations = [name for name in definition.inputs if name not in ("weight", "bias")]
    result = []
    for name, spec in definition.inputs.items():
        shape = [sizes[a] for a in spec.shape or ()]
        if name in activations:
            plain = distribution in ("inf", "nan") and name != activations[-1]
            result.append(draw(shape, torch_dtype(spec.dtype), generator, "normal" if plain else distribution))
        else:
            result.append(norm.draw_vector(name, semantics, shape[-1], generator).to(torch_dtype(spec.dtype)))
    return result


@dataclass(frozen=True)
class _Probe:
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor


def _probe(
    module: nn.Module, x: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype], attributes: Sequence[str]
) -> _Probe | None:
    """Random rows and what a copy with random vectors makes of them; None if it does not take these dtypes."""
    copy = fresh_copy(module, dtypes[1], seed=11)
    rows = probe_rows(probe_shape(x)).to(dtypes[0])
    try:
        with _quiet():
            output = copy(rows.clone())
    except RuntimeError:
        return None
    return _Probe((rows, *(getattr(copy, a).detach() for a in attributes)), output)


def _function(source: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<variant>", "exec"), namespace)
    run: Callable[..., Any] = namespace["run"]
    return run


def _attempt(run: Callable[..., Any], probe: _Probe) -> Any:
    try:
        with _quiet():
            return run(*probe.inputs)
    except RuntimeError:  # a fused function that does not take these dtypes together
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without gradients, and without torch's warnings about mixed dtypes."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _judge(run: Callable[..., Any], probes: Sequence[_Probe]) -> Match:
    """The worst match over the probes, up to the first that is not acceptable."""
    matches: list[Match] = []
    for probe in probes:
        matches.append(same(_attempt(run, probe), probe.output))
        if not matches[-1].acceptable:
            break
    return worst(matches)


def _only_tensor(call: Call) -> torch.Tensor | None:
    values = [*call.args, *call.kwargs.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], torch.Tensor) else None
