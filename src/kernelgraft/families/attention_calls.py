"""Captured calls of an attention function: their roles, which keywords matter, and calls made anew.

Used by the `attention` family only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kernelgraft.families.base import Call
from kernelgraft.families.probe import draw, fresh_parameter
from kernelgraft.families.reference import as_tuple

ROLES = ("module", "query", "key", "value", "attention_mask")
SINKS = "s_aux"
"""Keyword of one logit per head that joins the softmax and is then dropped."""
CONSTANTS = ("scaling", "softcap", "is_causal")
"""Keywords whose value is part of the compute."""


@dataclass(frozen=True)
class Bound:
    """A captured call with the roles of its arguments."""

    call: Call
    module: Any
    query: torch.Tensor
    """[batch, heads, q_len, head_dim]."""
    key: torch.Tensor
    """[batch, kv_heads, kv_len, head_dim]."""
    value: torch.Tensor
    """[batch, kv_heads, kv_len, value_dim]."""
    mask: torch.Tensor | None
    """Bool (True: seen) or additive float, [batch or 1, heads or 1, q_len, kv_len]."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """All other arguments by name."""

    @property
    def output(self) -> torch.Tensor:
        """[batch, q_len, heads, value_dim]."""
        found: torch.Tensor = as_tuple(self.call.output)[0]
        return found

    def again(self, keywords: dict[str, Any]) -> torch.Tensor | None:
        """The output for the same tensors and other keywords; None where the original raises."""
        return run(self.call, self.module, self.query, self.key, self.value, self.mask, keywords)


def run(call: Call, module: Any, query: Any, key: Any, value: Any, mask: Any, keywords: dict[str, Any]) -> Any:
    """First output of the original for these arguments; None where it raises."""
    try:
        with torch.no_grad():
            return as_tuple(call.original(module, query, key, value, mask, **keywords))[0]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None


def bind(call: Call) -> Bound | str:
    """Find the roles of a call's arguments, or say why the call is not the usual attention."""
    try:
        names = list(inspect.signature(call.original).parameters)
    except (TypeError, ValueError):
        names = []
    values = dict(zip([*ROLES, *names[len(ROLES) :]], call.args, strict=False)) | call.kwargs
    module, query, key, value, mask = (values.pop(role, None) for role in ROLES)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
            return f"its {name} is not a tensor [batch, heads, length, size]"
    if mask is not None and not isinstance(mask, torch.Tensor):
        return f"its mask is a {type(mask).__name__}"
    if mask is not None and (mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point())):
        return f"its mask is {mask.ndim}-D {mask.dtype}"
    heads, kv_heads = query.shape[1], key.shape[1]
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        return f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not belong together"
    if heads % kv_heads:
        return f"{heads} query heads do not divide into {kv_heads} key heads"
    output = as_tuple(call.output)[0]
    expected = (query.shape[0], query.shape[2], heads, value.shape[-1])
    if not isinstance(output, torch.Tensor) or output.shape != expected:
        return f"its output is not {list(expected)}"
    return Bound(call, module, query, key, value, mask, values)


@dataclass(frozen=True)
class Keywords:
    """What a site's keywords mean."""

    expected: dict[str, Any]
    """Keywords that must have this value."""
    neutral: tuple[str, ...]
    """Keywords that change nothing."""
    sliding_window: int | None
    """The window that the masks carry."""


def classify(bounds: Sequence[Bound]) -> Keywords | str:
    """Sort the keywords of all calls by what they do, or name one that no variant covers."""
    seen: dict[str, list[Any]] = {}
    for bound in bounds:
        for name, value in bound.keywords.items():
            seen.setdefault(name, []).append(value)
    if any(v is not None for v in seen.get("position_bias", ())):
        return "it adds a position bias"
    if any(v for v in seen.get("dropout", ())):
        return "it was captured with dropout"
    if any(v for v in seen.get("output_attentions", ())):
        return "it was captured with output_attentions"
    expected: dict[str, Any] = {"position_bias": None, "output_attentions": False}
    neutral = []
    for name in CONSTANTS:
        given = [b.keywords.get(name) for b in bounds]
        if any(isinstance(v, torch.Tensor) for v in given):
            return f"its `{name}` is a tensor"
        if len(set(given)) > 1:
            return f"its `{name}` differs between calls: {', '.join(map(str, dict.fromkeys(given)))}"
        if name in seen:
            expected[name] = given[0]
    for name, values in seen.items():
        if name in (*CONSTANTS, SINKS, *expected):
            continue
        if name == "dropout":
            expected[name] = 0.0
        elif all(v is None for v in values):
            expected[name] = None
        elif _matters(name, bounds):
            return f"it depends on its keyword `{name}`"
        else:
            neutral.append(name)
    windows = {w for w in seen.get("sliding_window", ()) if isinstance(w, int)}
    return Keywords(expected, tuple(sorted(neutral)), windows.pop() if len(windows) == 1 else None)


def _matters(name: str, bounds: Sequence[Bound]) -> bool:
    """True if the first call that has the keyword gives something else without it, or with another value."""
    bound = next(b for b in bounds if b.keywords.get(name) is not None)
    value = bound.keywords[name]
    others: list[dict[str, Any]] = [{k: v for k, v in bound.keywords.items() if k != name}]
    if isinstance(value, torch.Tensor):
        changed = ~value if value.dtype == torch.bool else torch.zeros_like(value)
        others += [{**bound.keywords, name: changed}, {**bound.keywords, name: value.flip(-1) if value.ndim else value}]
    elif isinstance(value, bool):
        others.append({**bound.keywords, name: not value})
    elif isinstance(value, (int, float)):
        others.append({**bound.keywords, name: type(value)(1)})
    usual = bound.again(bound.keywords)
    results = [bound.again(keywords) for keywords in others]
    return usual is None or any(r is None or not torch.equal(r, usual) for r in results)


@dataclass(frozen=True)
class Probe:
    """Fresh arguments and what the original made of them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    sinks: torch.Tensor | None
    output: torch.Tensor


def probe(
    bound: Bound,
    keywords: Keywords,
    sizes: tuple[int, int, int],
    mask: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    sinks: bool,
    seed: int = 0,
    scale: float = 1.0,
) -> Probe | None:
    """Call the original with random tensors of other sizes (batch, q_len, kv_len); None where it raises.

    `scale` is a factor on the query, so on the scores.
    The module is a stand-in whose own parameters are random, so that what the function reads from it shows.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, q_len, kv_len = sizes
    query = draw((batch, bound.query.shape[1], q_len, bound.query.shape[-1]), dtype, generator) * scale
    key = draw((batch, bound.key.shape[1], kv_len, bound.key.shape[-1]), dtype, generator)
    value = draw((batch, bound.value.shape[1], kv_len, bound.value.shape[-1]), dtype, generator)
    given = {k: v for k, v in bound.keywords.items() if k in keywords.expected}
    module, column = bound.module, None
    if isinstance(module, nn.Module):
        module = _stand_in(module, dtype, generator)
    if sinks:
        column = _sinks_of(bound, module, dtype, generator)
        given[SINKS] = column
    output = run(bound.call, module, query, key, value, mask, given)
    if not isinstance(output, torch.Tensor):
        return None
    return Probe(query, key, value, mask, column, output)


def _stand_in(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """The module with its own parameters drawn anew on the CPU; the children are shared and not called."""
    result = copy.copy(module)
    result.__dict__["_parameters"] = {
        name: p if p is None else nn.Parameter(fresh_parameter(p.shape, generator).to(dtype), requires_grad=False)
        for name, p in module._parameters.items()
    }
    return result


def _sinks_of(bound: Bound, module: Any, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """The parameter of the stand-in that was passed as sinks, else fresh values of its shape."""
    given = bound.keywords[SINKS]
    for name, p in getattr(bound.module, "_parameters", {}).items():
        if p is not None and p.shape == given.shape and torch.equal(p, given):
            found: torch.Tensor = module._parameters[name]
            return found
    return fresh_parameter(given.shape, generator).to(dtype)
