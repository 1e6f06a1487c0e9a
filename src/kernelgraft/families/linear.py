"""Products with a weight: x @ weight.T, plus a bias.

Served are modules of exactly torch's own Linear class: what derives from it or wraps it (quantised weights, adapters)
computes something else, and calls the module inside it if it has one. The weight is read from the module at each call.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from kernelgraft.families.base import Call, Distribution, Family, Recognition, Rejection, Seat
from kernelgraft.families.probe import DRAWN, EQUAL, Match, draw, normal, same, worst
from kernelgraft.families.reference import body_function, define, dtype_name, fingerprint, torch_dtype
from kernelgraft.records import Definition, Site

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 8, 16, 17)
"""Numbers of rows to judge on: both sides of where few rows end."""
LARGEST_ELEMENTS = 1 << 21


def linear_seat(original: Callable[..., Any], select: Callable[..., Any]) -> Callable[..., Any]:
    """Seat a kernel in a Linear's forward; the parameters are those that the module has at the time of the call."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            hidden_states = args[0]
        elif len(kwargs) == 1 and not args and "input" in kwargs:
            hidden_states = kwargs["input"]
        else:
            return original(self, *args, **kwargs)
        bias = self.bias
        inputs = (hidden_states, self.weight) if bias is None else (hidden_states, self.weight, bias)
        kernel = select(*inputs)
        return original(self, hidden_states) if kernel is None else kernel(*inputs)

    return forward


class Linear(Family):
    """Products of rows with the transposed weight of a module."""

    name: ClassVar[str] = "linear"
    kinds: ClassVar[frozenset[str]] = frozenset({"module"})

    def __init__(self) -> None:
        self._reduced: dict[str, str] = {}
        """Fingerprints of reduced Definitions, by those of the real ones."""

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """See `Family.recognise`; the class says what is computed, the captured calls confirm it."""
        if not calls or type(calls[0].module) is not nn.Linear:
            return None
        module: Any = calls[0].module
        first = _only_tensor(calls[0])
        if first is None:
            return Rejection(self.name, "is called with something else than one tensor")
        weight, bias = module.weight, module.bias
        dtypes = {first.dtype, weight.dtype, *(() if bias is None else (bias.dtype,))}
        if len(dtypes) > 1 or first.dtype not in FLOATS:
            return Rejection(self.name, f"dtypes {', '.join(sorted(map(dtype_name, dtypes)))} are not served")
        if weight.dim() != 2 or weight.numel() == 0 or first.dim() < 2:
            return Rejection(self.name, "its rows are not those of a matrix, or its parameters are kept elsewhere")
        if any(call.mutated for call in calls):
            return Rejection(self.name, "changes its input in place")
        try:
            match = _reproduced([c for c in calls if _alike(c, first)], bias is not None)
        except (RuntimeError, NotImplementedError) as error:  # e.g. weights that accelerate keeps elsewhere
            return Rejection(self.name, f"the product cannot be computed: {' '.join(str(error).split())[:120]}")
        if not match.acceptable:
            return Rejection(self.name, f"its output is {match.max_ulp:.3g} ulp away from that of the product")
        definition = _definition(site, module, first, bias is not None, match)
        return Recognition(self.name, definition.meta.semantics, (definition,))

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """See `Family.seat`."""
        return Seat(linear_seat)

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`: weights N(0, 1 / in), biases N(0, 1)."""
        sizes = {n: a.value for n, a in definition.axes.items() if a.value is not None} | axes
        made = []
        for name, spec in definition.inputs.items():
            shape = [sizes[a] for a in spec.shape or ()]
            dtype = torch_dtype(spec.dtype)
            if name == "hidden_states":
                made.append(draw(shape, dtype, generator, distribution))
            elif (drawn := DRAWN.get().get(name)) is not None and drawn.shape == torch.Size(shape):
                made.append(drawn)
            elif name == "weight":
                made.append((normal(shape, generator) / shape[1] ** 0.5).to(dtype))
            else:
                made.append(torch.randn(shape, generator=generator).to(dtype))
        return made

    def reduced(self, definition: Definition) -> Definition | None:
        """See `Family.reduced`: sizes that are divisible by what the real ones are."""
        axes = dict(definition.axes)
        for name, step in (("in_features", 256), ("out_features", 64)):
            size = axes[name].value or 0
            if size > 3 * step:
                axes[name] = axes[name].model_copy(update={"value": 2 * step + size % step})
        if axes == definition.axes:
            return None
        meta = definition.meta
        mark = self._reduced.get(meta.fingerprint)
        if mark is None:
            mark = fingerprint(definition.reference, axes, definition.inputs, definition.constraints)
            self._reduced[meta.fingerprint] = mark
        return definition.model_copy(
            update={
                "name": f"{definition.name}_reduced",
                "axes": axes,
                "meta": meta.model_copy(update={"fingerprint": mark}),
            }
        )

    def axis_points(self, definition: Definition, traced: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """See `Family.axis_points`: few sizes, as every one costs a pass over the weight."""
        base = dict(traced[0]) if traced else {n: 1 for n, a in definition.axes.items() if a.value is None}
        width = definition.axes["in_features"].value or 1
        points = [*(dict(t) for t in traced), *({**base, axis: size} for axis in base for size in ROWS)]
        points.append(dict.fromkeys(base, 3))
        unique = {tuple(sorted(p.items())): p for p in points}
        return [p for p in unique.values() if p in traced or math.prod(p.values()) * width <= LARGEST_ELEMENTS]


def _body(biased: bool) -> str:
    arguments = "hidden_states, weight" + (", bias" if biased else "")
    return f"def run({arguments}):\n    return torch.nn.functional.linear({arguments})"


def _reproduced(calls: Sequence[Call], biased: bool) -> Match:
    """The captured outputs against the reference, called through the seat."""
    run = body_function(_body(biased))
    reached: list[bool] = []

    def select(*inputs: Any) -> Callable[..., Any]:
        reached.append(True)
        return run

    matches = []
    for call in calls:
        reached.clear()
        with torch.no_grad():
            output = linear_seat(call.original, select)(call.module, *call.args, **call.kwargs)
        matches.append(same(output, call.output) if reached else EQUAL)
    return worst(matches)


def _definition(site: Site, module: Any, x: torch.Tensor, biased: bool, match: Match) -> Definition:
    rows = {2: ["num_rows"], 3: ["batch_size", "seq_len"]}.get(x.dim())
    rows = rows or ["batch_size", "seq_len", *(f"size_{i}" for i in range(2, x.dim() - 1))]
    outputs, width = module.weight.shape
    semantics = {"bias": biased}
    inputs: dict[str, tuple[Sequence[str] | None, torch.dtype]] = {
        "hidden_states": ([*rows, "in_features"], x.dtype),
        "weight": (["out_features", "in_features"], x.dtype),
    }
    if biased:
        inputs["bias"] = (["out_features"], x.dtype)
    axes = {**dict.fromkeys(rows), "in_features": width, "out_features": outputs}
    text = json.dumps([semantics, axes, str(x.dtype)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return define(
        name=f"linear_n{outputs}_k{width}_r{x.dim()}_{dtype_name(x.dtype)}_{digest}",
        op_type="gemm",
        family=Linear.name,
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs={"output": ([*rows, "out_features"], x.dtype)},
        body=_body(biased),
        site=site,
        description=f"rows of {width} times the transposed weight of {outputs} rows" + (", plus a bias" * biased),
        reference_error=match.max_absolute,
    )


def _alike(call: Call, first: torch.Tensor) -> bool:
    x = _only_tensor(call)
    return x is not None and (x.dtype, x.dim()) == (first.dtype, first.dim())


def _only_tensor(call: Call) -> torch.Tensor | None:
    """The call's single argument."""
    given = [*call.args, *call.kwargs.values()]
    known = not call.kwargs or list(call.kwargs) == ["input"]
    return given[0] if len(given) == 1 and known and isinstance(given[0], torch.Tensor) else None


FAMILY = Linear()
