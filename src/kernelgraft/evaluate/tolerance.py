"""How far from exact a right Solution may be: the one table, and the comparison with float64 (check C8).

The yardstick is the original's own error against float64, so a Solution may always be as wrong as what it replaces, and
a more exact one is never refused. The floors below are for outputs where the original happens to be exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

RATIO = 2.0
"""relRMSE allowed, as a multiple of the original's. Rounding once more than the original costs a factor of √2."""
RATIO_SMALL = 3.0
"""The same for outputs of fewer than `SMALL` elements, whose error is a few draws and scatters."""
RATIO_WARNED = 1.5
"""The same where the sources mention a dtype below the declared ones; rounding an intermediate to it costs far more."""
SMALL = 1000
MAX_RATIO = 4.0
"""Largest absolute error allowed, as a multiple of the original's largest."""
MAX_ULP = {torch.float32: 16.0}
"""Added to it: ulps at the largest exact magnitude; the worst of many elements is about four times the floor below."""
MAX_ULP_NARROW = 2.0
"""The same for the narrower dtypes."""
FLOOR_EPS = {torch.float32: 4.0}
"""Added to the allowed relRMSE, in eps of the output's dtype. float32: the original is often the same float32 code, and
right code in another order is off by rounding: about 0.3 eps rms each for some six operations and a reduction is 1 eps;
approximate exp and rsqrt on a GPU (2 ulp each) bring it to 3–4. A tf32, fp16 or bf16 intermediate costs 1,000 eps."""
FLOOR_EPS_NARROW = 0.25
"""The same for the narrower dtypes, whose sums are accumulated in float32: rounding the output costs 0.2–0.3 eps rms,
which the original nearly always pays too; where it is exact by luck (ones and zeros), a Solution may pay it."""
DEGENERATE = 0.1
"""An original with a larger relRMSE than this has overflowed or cancelled: it is no yardstick. Then its own output is
the other right answer, and a Solution must be close to that one (with `DEGENERATE_SLACK` times the floors, since its
rounding error is unknown) or to the exact one."""
DEGENERATE_SLACK = 4.0
LOST = 0.75
"""A row of which more is off by half has overflowed on the way (what is left may be the bias)."""
GRADIENT_SLACK = 16.0
"""The floors are this much higher for gradients, whose intermediates are rounded too: torch's own fused backward passes
in bfloat16 are off by two eps where a written-out one in float32 is off by 0.2. A wrong formula is off by far more."""
TINY_DENOMINATOR = 1e-8
"""Added to the exact magnitude in the reported largest relative error, as FlashInfer-Bench does."""


@dataclass(frozen=True)
class Comparison:
    """One output against float64."""

    wrong: str | None
    """What is wrong, in words; None if it is within the tolerance."""
    ratio: float
    """Its rms error over the original's (or over the floor, where that is larger); inf if it cannot be compared."""
    max_absolute: float
    max_relative: float


def compare(
    actual: torch.Tensor,
    native: torch.Tensor,
    exact: torch.Tensor,
    *,
    warned: bool = False,
    gradient: bool = False,
    nan_may_vanish: bool = False,
    name: str = "output",
) -> Comparison:
    """Judge `actual` by the original's output `native` and the float64 output `exact` (same shapes; dtype of `native`).

    Integers and booleans must be equal. Infinities and NaNs must be where the original or the exact result has them;
    nothing is asked where the original overflowed and the exact result does not, nor, with `nan_may_vanish`, of finite
    values where both are NaN.
    """
    if not native.is_floating_point():
        different = int((actual != native).sum())
        wrong = f"{name} differs in {different} of {native.numel()} places" if different else None
        gap = float(different > 0)
        return Comparison(wrong, math.inf if different else 0.0, gap, gap)
    info = torch.finfo(native.dtype)
    a, n, e = actual.double(), native.double(), exact.double()
    if not (bool(a.isfinite().all()) and bool(n.isfinite().all()) and bool((e.abs() < info.max).all())):
        free = _unasked(a, n, e, info, nan_may_vanish)
        a, n = torch.where(free, e, a), torch.where(free, e, n)
        if (places := _class_differs(a, n, e, info)) > 0:
            return Comparison(
                f"{name} has NaN, inf or finite values in {places} of {a.numel()} places where neither the original "
                "nor float64 has them",
                math.inf,
                math.inf,
                math.inf,
            )
    ratio = RATIO_WARNED if warned else RATIO_SMALL if a.numel() < SMALL else RATIO
    first = _against(a, n, e, native.dtype, ratio, name, slack=GRADIENT_SLACK if gradient else 1.0)
    if first.wrong is not None and _relative(n, e) > DEGENERATE:
        second = _against(a, n, n, native.dtype, ratio, name, slack=DEGENERATE_SLACK)
        return second if second.wrong is None else first
    return first


def _against(
    a: torch.Tensor,
    n: torch.Tensor,
    e: torch.Tensor,
    dtype: torch.dtype,
    ratio: float,
    name: str,
    slack: float = 1.0,
) -> Comparison:
    info = torch.finfo(dtype)
    finite = e.isfinite() & a.isfinite()
    count = int(finite.sum())
    if count == 0:
        return Comparison(None, 0.0, 0.0, 0.0)
    error, own, magnitude = (a - e).abs(), (n - e).abs(), e.abs()
    if count < e.numel() or not bool(n.isfinite().all()):
        error, magnitude = torch.where(finite, error, 0.0), torch.where(finite, magnitude, 0.0)
        own = torch.where(e.isfinite() & n.isfinite(), own, 0.0)
    scale, peak = _rms(magnitude, count), float(magnitude.max())
    smallest = info.smallest_normal * info.eps
    # An original that is no yardstick must not lift the bound.
    own_rms = min(_rms(own, count), DEGENERATE * scale)
    floor = slack * FLOOR_EPS.get(dtype, FLOOR_EPS_NARROW) * info.eps * scale + smallest
    rms, allowed = _rms(error, count), ratio * own_rms + floor
    largest = float(error.max())
    own_largest = min(float(own.max()), DEGENERATE * peak)
    ulp = info.eps * 2.0 ** math.floor(math.log2(peak)) if peak > smallest else smallest
    allowed_largest = MAX_RATIO * own_largest + slack * MAX_ULP.get(dtype, MAX_ULP_NARROW) * ulp
    wrong = None
    if rms > allowed:
        unit = scale or 1.0
        wrong = (
            f"{name} is off by relRMSE {rms / unit:.2g} where the original is off by {own_rms / unit:.2g} "
            f"and {allowed / unit:.2g} is allowed"
        )
    elif largest > allowed_largest:
        wrong = (
            f"{name} is off by up to {largest:.2g} where the original is off by {own_largest:.2g} "
            f"and {allowed_largest:.2g} is allowed"
        )
    relative = float((error / (magnitude + TINY_DENOMINATOR)).max())
    return Comparison(wrong, rms / max(own_rms, floor), largest, relative)


def _unasked(
    a: torch.Tensor, n: torch.Tensor, e: torch.Tensor, info: torch.finfo, nan_may_vanish: bool
) -> torch.Tensor:
    """Places where the original overflowed on the way and the exact result does not: there it is no yardstick."""
    fits = e.abs() < info.max
    free = ~n.isfinite() & fits
    if _relative(n, e) > DEGENERATE:
        # It may also come out finite: one over an infinite variance is 0.
        far = (n - e).abs() > 0.5 * e.abs()
        free |= ~a.isfinite() & fits & (far | _lost(far))
    if nan_may_vanish:
        free |= n.isnan() & e.isnan() & a.isfinite()
    return free


def _class_differs(a: torch.Tensor, n: torch.Tensor, e: torch.Tensor, info: torch.finfo) -> int:
    """Places where `a` is NaN, +inf, -inf or finite and neither `n` nor the exact value in that dtype is the same."""
    edge = info.max * (1 + info.eps / 4)
    rounded = torch.where(e.abs() > edge, e.sign() * math.inf, e)
    wrong = (_kind(a) != _kind(n)) & (_kind(a) != _kind(rounded))
    # Within 2 ulps of the largest finite number either side of the edge is a right rounding.
    near = (e.abs() - info.max).abs() <= 2 * info.eps * info.max
    return int((wrong & ~(near & ~a.isnan() & (a.sign() == e.sign()))).sum())


def _kind(x: torch.Tensor) -> torch.Tensor:
    return x.isnan() * 3 + x.isinf() * (1 + (x > 0))


def _lost(far: torch.Tensor) -> torch.Tensor:
    """Rows (along the last axis) that are far off nearly everywhere: where such a row is near, it is by chance."""
    return far.double().mean(-1, keepdim=True) > LOST if far.dim() else far


def _rms(x: torch.Tensor, count: int) -> float:
    """Root of the mean square; float64 holds the squares of anything that a narrower dtype holds."""
    return float(torch.linalg.vector_norm(x)) / math.sqrt(max(count, 1))


def _relative(n: torch.Tensor, e: torch.Tensor) -> float:
    finite = e.isfinite() & n.isfinite()
    count = int(finite.sum())
    scale = _rms(torch.where(finite, e, 0.0).abs(), count)
    return _rms(torch.where(finite, n - e, 0.0).abs(), count) / scale if scale else 0.0
