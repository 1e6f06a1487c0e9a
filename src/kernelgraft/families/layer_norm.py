"""Layer norm: each row minus its mean, over its standard deviation, times a weight, plus a bias.

Semantics, besides `eps`, `with_weight` and `with_bias`:
- `form`: torch's `functional`; `functional_plain`, that without its weight and bias, applied afterwards; or `explicit`.
- `upcast`: True if in float32 whatever the input is; `cast`: where that ends (`before_weight`, `after_weight`, `none`).
- `explicit` only: `inverse`: `rsqrt` or `division`; `variance`: `square` (mean of squares) or `var` (torch's).
- `offset`: 0 (weight) or 1 (one plus weight); `offset_dtype`: where one is added (`float32`, or the `weight`'s own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from kernelgraft.families.base import Seat
from kernelgraft.families.norm_parts import Parts
from kernelgraft.families.norms import NormFamily


def layer_norm_seat(
    original: Callable[..., Any],
    select: Callable[..., Any],
    *,
    weight: str | None,
    bias: str | None,
    argument: str,
    eps: float,
    eps_attribute: str | None,
) -> Callable[..., Any]:
    """Seat a kernel in a norm module's forward; other arguments, or another eps, run the original."""
    vectors = [name for name in (weight, bias) if name is not None]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            hidden_states = args[0]
        elif len(kwargs) == 1 and not args and argument in kwargs:
            hidden_states = kwargs[argument]
        else:
            return original(self, *args, **kwargs)
        if eps_attribute is not None and getattr(self, eps_attribute) != eps:
            return original(self, hidden_states)
        inputs = (hidden_states, *[getattr(self, name) for name in vectors])
        kernel = select(*inputs)
        return original(self, hidden_states) if kernel is None else kernel(*inputs)

    return forward


class LayerNorm(NormFamily):
    """Layer norms over the last axis."""

    name: ClassVar[str] = "layer_norm"
    centres: ClassVar[bool] = True

    def variants(self, parts: Parts) -> Iterator[dict[str, Any]]:
        """See `NormFamily.variants`."""
        vectors = parts.weight is not None or parts.bias is not None
        offsets: list[dict[str, Any]] = [{"offset": 0, "offset_dtype": None}]
        if parts.weight is not None:
            offsets += [{"offset": 1, "offset_dtype": d} for d in ("weight", "float32")]
        casts = [(False, "none"), (True, "after_weight"), *([(True, "before_weight")] if vectors else [])]
        for offset in offsets:
            rest = {**offset, "with_bias": parts.bias is not None}
            if "layer_norm" in parts.functions:
                yield {"form": "functional", "upcast": False, "cast": "none", **rest}
                yield {"form": "functional", "upcast": True, "cast": "after_weight", **rest}
                for upcast, cast in casts if vectors else []:
                    yield {"form": "functional_plain", "upcast": upcast, "cast": cast, **rest}
            for upcast, cast in casts:
                for inverse in ("rsqrt", "division"):
                    for variance in ("square", "var"):
                        arithmetic = {"inverse": inverse, "variance": variance}
                        yield {"form": "explicit", "upcast": upcast, "cast": cast, **arithmetic, **rest}

    def source(self, semantics: dict[str, Any], *, function: str = "run") -> str:
        """See `NormFamily.source`."""
        form, eps, upcast = semantics["form"], repr(semantics["eps"]), semantics["upcast"]
        weighted, biased = semantics["with_weight"], semantics["with_bias"]
        wide = ".to(torch.float32)" if upcast else ""
        scale = {None: "weight", "float32": "1.0 + weight.to(torch.float32)", "weight": "weight + 1.0"}
        weight = scale[semantics["offset_dtype"]] if weighted else "None"
        lines = [f"def {function}(hidden_states{', weight' if weighted else ''}{', bias' if biased else ''}):"]
        lines.append(f"    x = hidden_states{wide}")
        if form == "explicit":
            lines += [
                "    centred = x - x.mean(-1, keepdim=True)",
                "    variance = centred.pow(2).mean(-1, keepdim=True)"
                if semantics["variance"] == "square"
                else "    variance = x.var(-1, unbiased=False, keepdim=True)",
                f"    x = centred * torch.rsqrt(variance + {eps})"
                if semantics["inverse"] == "rsqrt"
                else f"    x = centred / torch.sqrt(variance + {eps})",
            ]
        else:
            whole = form == "functional"
            if whole and upcast and weighted:
                weight = f"({weight}){wide}" if semantics["offset"] else f"weight{wide}"
            vectors = f"{weight}, {f'bias{wide}' if biased else 'None'}" if whole else "None, None"
            lines.append(f"    x = torch.nn.functional.layer_norm(x, (x.shape[-1],), {vectors}, {eps})")
        if semantics["cast"] == "before_weight":
            lines.append("    x = x.to(hidden_states.dtype)")
        if form != "functional":
            if weighted:
                lines.append(f"    x = {f'({weight})' if semantics['offset'] else weight} * x")
            if biased:
                lines.append("    x = x + bias")
        lines.append(f"    return x{'.to(hidden_states.dtype)' if semantics['cast'] == 'after_weight' else ''}")
        return "\n".join(lines)

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """See `Family.seat`."""
        keys = ("weight", "bias", "argument", "eps", "eps_attribute")
        return Seat(layer_norm_seat, {key: semantics[key] for key in keys})


FAMILY = LayerNorm()
