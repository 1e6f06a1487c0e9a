"""A residual addition next to a norm, as statements of a layer's forward.

`pre`: sum = residual + hidden_states, and the norm of the sum; both are results. `post`: residual + norm(hidden).
Semantics: `order`; `norm`: the norm's own semantics with its `family`; `path`: the norm's attribute path from the
layer; `norm_class`: its class. What the norm computes is asked of the norm families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from kernelgraft import families
from kernelgraft.families.base import Call, Distribution, Family, Recognition, Rejection, Seat
from kernelgraft.families.norms import NormFamily, compute_only, draw_inputs, named, reproduce, row_axes, with_error
from kernelgraft.families.reference import as_tuple, define, dtype_name
from kernelgraft.records import Definition, Site

NORMS = ("rms_norm", "layer_norm")


def residual_norm_seat(
    original: Callable[..., Any],
    select: Callable[..., Any],
    *,
    path: str,
    norm_class: str,
    weight: str | None,
    bias: str | None,
    eps: float,
    eps_attribute: str | None,
) -> Callable[..., Any]:
    """Seat a kernel in the statements; a norm that is no longer plain (hooks, wrapper, other forward) is called."""
    steps = path.split(".")
    vectors = [name for name in (weight, bias) if name is not None]
    known: list[type] = []
    registry = torch.nn.modules.module

    def is_plain(norm: Any) -> bool:
        own = norm.__dict__
        if type(norm) not in known:
            if f"{type(norm).__module__}.{type(norm).__qualname__}" != norm_class:
                return False
            known.append(type(norm))
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return False
        if registry._global_forward_hooks or registry._global_forward_pre_hooks or "_hf_hook" in own:
            return False
        if "forward" in own and not hasattr(own["forward"], "__kernelgraft_sites__"):
            return False
        return eps_attribute is None or bool(getattr(norm, eps_attribute) == eps)

    def statements(self: Any, residual: Any, hidden_states: Any) -> Any:
        norm = self
        for step in steps:
            norm = getattr(norm, step)
        if not is_plain(norm):
            return original(self, residual, hidden_states)
        inputs = (residual, hidden_states, *[getattr(norm, name) for name in vectors])
        kernel = select(*inputs)
        return original(self, residual, hidden_states) if kernel is None else kernel(*inputs)

    return statements


class ResidualNorm(Family):
    """A residual addition followed by a norm (`pre`), or a norm followed by a residual addition (`post`)."""

    name: ClassVar[str] = "residual_norm"
    kinds: ClassVar[frozenset[str]] = frozenset({"statement"})

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """See `Family.recognise`."""
        order, path = site.detail.get("order"), site.symbol
        if not calls or order not in ("pre", "post") or path is None:
            return None
        first = calls[0]
        inputs = [*first.args, *first.kwargs.values()]
        if len(inputs) != 2 or not all(isinstance(t, torch.Tensor) and t.is_floating_point() for t in inputs):
            return None
        residual, hidden_states = inputs
        if residual.shape != hidden_states.shape or residual.ndim < 2:
            return Rejection(self.name, "adds tensors of different shapes")
        try:
            module = first.module.get_submodule(path)
        except AttributeError:
            return None
        norm = self._norm(module, as_tuple(first.output)[0] if order == "pre" else hidden_states)
        if norm is None or isinstance(norm, str):
            return None if norm is None else Rejection(self.name, f"its norm `{path}` {norm}")
        if any(call.mutated for call in calls):
            return Rejection(self.name, "changes an input in place")
        kind = type(module)
        semantics = {
            "order": order,
            "norm": norm,
            "path": path,
            "norm_class": f"{kind.__module__}.{kind.__qualname__}",
        }
        alike = [c for c in calls if [_kind(t) for t in c.args] == [_kind(t) for t in first.args]]
        definition = self._define(site, first, module, residual, hidden_states, semantics, alike)
        error = reproduce(definition, self, semantics, alike)
        if isinstance(error, str):
            return Rejection(self.name, error)
        return Recognition(self.name, semantics, (with_error(definition, error),))

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """See `Family.seat`."""
        norm = semantics["norm"]
        place = {key: semantics[key] for key in ("path", "norm_class")}
        return Seat(residual_norm_seat, place | {k: norm[k] for k in ("weight", "bias", "eps", "eps_attribute")})

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`: the residual is drawn like the hidden states, vectors as the norm's family does."""
        norm = definition.meta.semantics["norm"]
        return draw_inputs(_family(norm["family"]), definition, norm, axes, generator, distribution)

    def _norm(self, module: nn.Module, x: torch.Tensor) -> dict[str, Any] | str | None:
        """The semantics of the norm with its family, why it has none, or None if the module is no norm."""
        reason = None
        for name in NORMS:
            found = _family(name).recognise_module(module, x)
            if isinstance(found, dict):
                return {"family": name, **found}
            if isinstance(found, Rejection):
                reason = found.reason
        return reason

    def _define(
        self,
        site: Site,
        call: Call,
        module: nn.Module,
        residual: torch.Tensor,
        hidden_states: torch.Tensor,
        semantics: dict[str, Any],
        alike: Sequence[Call],
    ) -> Definition:
        order, norm = semantics["order"], semantics["norm"]
        family = _family(norm["family"])
        held = family.tensors(norm)
        axes = row_axes([tuple(c.args[0].shape) for c in alike] or [tuple(residual.shape)])
        rows = tuple(axes)
        outputs = dict(zip(("sum", "normed") if order == "pre" else ("sum",), as_tuple(call.output), strict=True))
        definition = define(
            name=self.name,
            op_type=self.name,
            family=self.name,
            semantics={"order": order, "norm": compute_only(norm)},
            axes=axes,
            inputs={
                "residual": (rows, residual.dtype),
                "hidden_states": (rows, hidden_states.dtype),
                **{role: (("hidden_size",), getattr(module, a).dtype) for role, a in held.items()},
            },
            outputs={name: (rows, tensor.dtype) for name, tensor in outputs.items()},
            body=_source(order, family, norm),
            site=site,
            description=f"residual addition {'before' if order == 'pre' else 'after'} a {norm['family']}",
            reference_error=0.0,
        )
        stem = f"{self.name}_{order}_h{residual.shape[-1]}_r{residual.ndim}_{dtype_name(hidden_states.dtype)}"
        return named(definition, stem, semantics)


def _family(name: str) -> NormFamily:
    family = families.get(name)
    assert isinstance(family, NormFamily)
    return family


def _kind(value: Any) -> tuple[Any, ...]:
    return (value.dtype, value.ndim) if isinstance(value, torch.Tensor) else (type(value),)


def _source(order: str, family: NormFamily, norm: dict[str, Any]) -> str:
    vectors = "".join(f", {role}" for role in family.tensors(norm))
    lines = [family.source(norm, function="norm"), "", "", f"def run(residual, hidden_states{vectors}):"]
    if order == "pre":
        lines += ["    total = residual + hidden_states", f"    return total, norm(total{vectors})"]
    else:
        lines.append(f"    return residual + norm(hidden_states{vectors})")
    return "\n".join(lines)


FAMILY = ResidualNorm()
