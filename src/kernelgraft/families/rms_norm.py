"""RMS norm: each row over the root of its mean square, times a weight.

Semantics, besides `eps` and `with_weight`:
- `form`: `explicit` arithmetic, or torch's `functional`; `inverse`: `rsqrt` or `division`.
- `cast`: where float32 ends: `before_weight`; `after_weight`; `weight_dtype` (before the weight, if that is a half
  type); `factor` (only the mean square is float32, the factor 1/rms is cast); `none` (all in the input's dtype).
- `offset`: 0 (weight) or 1 (one plus weight); `offset_dtype`: where one is added (`float32`, or the `weight`'s own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from kernelgraft.families.base import Seat
from kernelgraft.families.norm_parts import Parts
from kernelgraft.families.norms import NormFamily


def rms_norm_seat(
    original: Callable[..., Any],
    select: Callable[..., Any],
    *,
    weight: str | None,
    argument: str,
    eps: float,
    eps_attribute: str | None,
) -> Callable[..., Any]:
    """Seat a kernel in a norm module's forward; other arguments, or another eps, run the original."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            hidden_states = args[0]
        elif len(kwargs) == 1 and not args and argument in kwargs:
            hidden_states = kwargs[argument]
        else:
            return original(self, *args, **kwargs)
        if eps_attribute is not None and getattr(self, eps_attribute) != eps:
            return original(self, hidden_states)
        inputs = (hidden_states,) if weight is None else (hidden_states, getattr(self, weight))
        kernel = select(*inputs)
        return original(self, hidden_states) if kernel is None else kernel(*inputs)

    return forward


class RmsNorm(NormFamily):
    """Root-mean-square norms over the last axis."""

    name: ClassVar[str] = "rms_norm"
    centres: ClassVar[bool] = False

    def variants(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """See `NormFamily.variants`; without a weight the place of the cast is one and the same."""
        if parts.bias is not None:
            return
        plain: dict[str, Any] = {"offset": 0, "offset_dtype": None}
        if "rms_norm" in parts.functions:
            yield {"form": "functional", "inverse": "rsqrt", "cast": "after_weight", **plain}
        weighted = parts.weight is not None
        offsets = [plain, *({"offset": 1, "offset_dtype": d} for d in ("float32", "weight") if weighted)]
        casts = ["before_weight", "after_weight", "weight_dtype", "factor", "none"]
        for offset in offsets:
            for cast in casts if weighted else ["after_weight", "factor", "none"]:
                for inverse in ("rsqrt", "division"):
                    if cast != "factor" or inverse == "rsqrt":
                        yield {"form": "explicit", "inverse": inverse, "cast": cast, **offset}

    def source(self, semantics: dict[str, Any], *, function: str = "run") -> str:
        """See `NormFamily.source`."""
        cast, eps = semantics["cast"], repr(semantics["eps"])
        weighted = semantics["with_weight"]
        lines = [f"def {function}(hidden_states{', weight' if weighted else ''}):"]
        if semantics["form"] == "functional":
            rest = f"(hidden_states.shape[-1],), {'weight' if weighted else 'None'}, {eps}"
            return "\n".join([*lines, f"    return torch.nn.functional.rms_norm(hidden_states, {rest})"])
        if cast == "factor":
            lines += [
                f"    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True) + {eps}",
                "    x = hidden_states * torch.rsqrt(variance).to(hidden_states.dtype)",
            ]
        else:
            lines += [
                f"    x = hidden_states{'' if cast == 'none' else '.to(torch.float32)'}",
                f"    variance = x.pow(2).mean(-1, keepdim=True) + {eps}",
                f"    x = {'x * torch.rsqrt' if semantics['inverse'] == 'rsqrt' else 'x / torch.sqrt'}(variance)",
            ]
        scale = {None: "weight", "float32": "(1.0 + weight.to(torch.float32))", "weight": "(1.0 + weight)"}
        product = f"{scale[semantics['offset_dtype']]} * x"
        if not weighted:
            lines.append("    return x.to(hidden_states.dtype)" if cast == "after_weight" else "    return x")
        elif cast == "before_weight":
            lines += ["    x = x.to(hidden_states.dtype)", f"    return {product}"]
        elif cast == "after_weight":
            lines.append(f"    return ({product}).to(hidden_states.dtype)")
        elif cast == "weight_dtype":
            lines += [
                "    if weight.dtype in (torch.float16, torch.bfloat16):",
                "        x = x.to(weight.dtype)",
                f"    return {product}",
            ]
        else:
            lines.append(f"    return {product}")
        return "\n".join(lines)

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """See `Family.seat`."""
        keys = ("weight", "argument", "eps", "eps_attribute")
        return Seat(rms_norm_seat, {key: semantics[key] for key in keys})


FAMILY = RmsNorm()
