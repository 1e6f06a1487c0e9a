"""What any family needs to recognise a compute by its behaviour: bare copies, fresh values, and a comparison in ulps.

It does not know any family. Nothing here changes the module it is given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernelgraft.families.base import Distribution

PERIOD = 1_048_573
"""Values after which a large fresh tensor repeats itself."""

TOLERANCE_ULP = 2.0
"""A candidate that is not bit-equal may be off by this many ulps of the output's dtype at its largest value."""

DRAWN: ContextVar[Mapping[str, torch.Tensor]] = ContextVar("drawn", default={})  # noqa: B039 (nobody writes into it)
"""Large inputs by name that the judge has from an earlier case and takes instead of fresh ones: `Family.inputs` may
give them back, since drawing a weight again takes seconds."""

PROBE_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that a candidate is judged in: bfloat16 shows the order of casts, float32 shows the arithmetic."""


@dataclass(frozen=True)
class Match:
    """How close two outputs are; `max_ulp` is inf where shapes, dtypes or the places of NaN differ."""

    bit_equal: bool
    max_ulp: float
    """Largest difference, in ulps of the dtype at the largest finite magnitude of the expected output."""
    max_absolute: float

    @property
    def acceptable(self) -> bool:
        """True if bit-equal or within `TOLERANCE_ULP`."""
        return self.bit_equal or self.max_ulp <= TOLERANCE_ULP

    def __lt__(self, other: Match) -> bool:
        return (not self.bit_equal, self.max_ulp) < (not other.bit_equal, other.max_ulp)


DIFFERENT = Match(bit_equal=False, max_ulp=math.inf, max_absolute=math.inf)
EQUAL = Match(bit_equal=True, max_ulp=0.0, max_absolute=0.0)


def same(actual: Any, expected: Any) -> Match:
    """Compare two tensors, or two equally long tuples of tensors (the worst counts)."""
    if isinstance(expected, (tuple, list)):
        if not isinstance(actual, (tuple, list)) or len(actual) != len(expected):
            return DIFFERENT
        return worst(same(a, e) for a, e in zip(actual, expected, strict=True))
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return DIFFERENT
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return DIFFERENT
    if not expected.is_floating_point():
        return EQUAL if torch.equal(actual, expected) else DIFFERENT
    a, e = actual.detach().cpu(), expected.detach().cpu()
    if torch.equal(a, e):
        return EQUAL
    finite = e.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), e[~finite].nan_to_num()):
        return DIFFERENT
    wide_a, wide_e = a[finite].double(), e[finite].double()
    if torch.equal(wide_a, wide_e):
        return EQUAL
    absolute = float((wide_a - wide_e).abs().max())
    scale = float(wide_e.abs().max())
    info = torch.finfo(e.dtype)
    ulp = info.eps * 2.0 ** math.floor(math.log2(max(scale, info.tiny)))
    return Match(bit_equal=False, max_ulp=absolute / ulp, max_absolute=absolute)


def worst(matches: Iterable[Match]) -> Match:
    """The worst of several comparisons; EQUAL if there are none."""
    return max(matches, default=EQUAL)


def clone(module: nn.Module, *, dtype: torch.dtype | None, seed: int, device: str = "cpu") -> nn.Module:
    """A deep copy with every floating parameter drawn anew (see `fresh_parameter`).

    The copy is bare: without hooks of torch or accelerate, and without methods set on the instance, so that its
    class's own forward runs. `dtype` is that of floating parameters and buffers (None keeps theirs). The old values are
    never copied, so a large module on another device costs no more than its size on `device`.
    """
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        wanted = dtype or parameter.dtype
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(
                fresh_parameter(parameter.shape, generator).to(device, wanted), requires_grad=False
            )
        else:
            memo[id(parameter)] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
    for child in module.modules():
        for name, value in vars(child).items():
            bound = callable(value) and isinstance(getattr(value, "__self__", None), nn.Module)
            if bound or name in _ON_INSTANCE:  # either may lead to the whole model
                memo[id(value)] = _ABSENT
        for hooks in _hook_tables(child):
            memo[id(hooks)] = type(hooks)()
    result = copy.deepcopy(module, memo)
    for child in result.modules():
        for name in [n for n, value in vars(child).items() if value is _ABSENT]:
            del vars(child)[name]
    for buffer_owner in result.modules():
        for name, buffer in buffer_owner._buffers.items():
            if buffer is not None:
                wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                buffer_owner._buffers[name] = buffer.to(device, wanted)
    return result.eval()


_ON_INSTANCE = ("forward", "_hf_hook", "_old_forward")
_ABSENT = object()


def _hook_tables(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name.endswith(("_hooks", "_pre_hooks"))]


def fresh_parameter(shape: Iterable[int], generator: torch.Generator) -> torch.Tensor:
    """Float32 values for a parameter: vectors in U(0.5, 1.5) with every third sign flipped, matrices N(0, 1/fan_in)."""
    size = tuple(shape)
    if len(size) < 2:
        values = torch.rand(size, generator=generator) + 0.5
        if size:
            values[2::3] *= -1
        return values
    return normal(size, generator) / math.sqrt(size[-1])


def normal(size: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """N(0, 1) in float32. A large tensor repeats its values, since drawing them would take most of the time.

    The period is a prime, so that no two rows agree.
    """
    total = math.prod(size)
    block = torch.randn(min(total, PERIOD), generator=generator)
    return block.repeat(-(-total // max(1, block.numel())))[:total].view(*size)


def draw(
    shape: Iterable[int], dtype: torch.dtype, generator: torch.Generator, distribution: Distribution = "normal"
) -> torch.Tensor:
    """Fresh activations on the CPU, contiguous, at least 1-D (see `Distribution` for the choices)."""
    size = tuple(shape)
    x = torch.randn(size, generator=generator)
    if distribution == "uniform_2_4":
        x = torch.rand(size, generator=generator) * 2 + 2
    elif distribution == "tiny":
        x = x * 1e-4
    elif distribution == "huge":
        x = x.clamp(-4, 4) * (torch.finfo(dtype).max / 64)
    elif distribution == "zeros_rows":
        x.view(-1, size[-1])[::2] = 0
    elif distribution == "ramp":
        # Multiples of 1/16 below 8: exact in bfloat16, and no two neighbours or rows are alike.
        rows = torch.arange(max(1, x.numel() // size[-1])).unsqueeze(1)
        x = (((torch.arange(size[-1]) + 7 * rows) % 251 - 125) / 16).reshape(size)
    elif distribution == "binary":
        x = torch.randint(0, 2, size, generator=generator).float()
    elif distribution in ("inf", "nan"):
        place = int(torch.randint(0, x.numel(), (1,), generator=generator))
        x.view(-1)[place] = math.copysign(math.inf, float(x.view(-1)[place])) if distribution == "inf" else math.nan
    return x.to(dtype).contiguous()
