"""Statistics of benchmark runs: pure functions over numbers, no clock and no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; ValueError if there is no value."""
    if not values:
        raise ValueError("no values")
    return float(np.mean(values))


def std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear-interpolated percentile; None if there is no value."""
    return float(np.percentile(values, percent)) if values else None


def ratio_interval(
    baseline: Sequence[float], grafted: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> tuple[float, float] | None:
    """Bootstrap interval of mean(grafted) / mean(baseline), resampling whole pairs; None for fewer than two pairs.

    Pairs ran next to each other, so what disturbed the machine then disturbed both; resampling pairs keeps that.
    """
    if len(baseline) != len(grafted):
        raise ValueError(f"{len(baseline)} baseline runs and {len(grafted)} grafted runs are no pairs")
    if len(baseline) < 2:
        return None
    picks = np.random.default_rng(seed).integers(len(baseline), size=(RESAMPLES, len(baseline)))
    ratios = np.asarray(grafted)[picks].mean(axis=1) / np.asarray(baseline)[picks].mean(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def rel_rmse(got: npt.NDArray[np.floating], wanted: npt.NDArray[np.floating]) -> float | None:
    """Root mean square of the difference over that of `wanted`, in float64.

    None if it has no number: shapes differ, non-finite values stand in different places, or `wanted` is all zero.
    """
    if got.shape != wanted.shape:
        return None
    wide_got, wide_wanted = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wide_wanted)
    if not np.array_equal(wide_got[~finite], wide_wanted[~finite], equal_nan=True):
        return None
    if not np.isfinite(wide_got[finite]).all():
        return None
    scale = float(np.sqrt(np.mean(wide_wanted[finite] ** 2))) if finite.any() else 0.0
    if scale == 0.0:
        return None
    return float(np.sqrt(np.mean((wide_got[finite] - wide_wanted[finite]) ** 2))) / scale


def first_divergence(baseline: npt.NDArray[np.integer], grafted: npt.NDArray[np.integer]) -> tuple[int, int] | None:
    """(sequence, position) of the earliest token that differs, [sequences, tokens] each; None if all are equal."""
    different = np.argwhere(baseline != grafted)
    if not len(different):
        return None
    sequence, position = min(different.tolist(), key=lambda at: (at[1], at[0]))
    return int(sequence), int(position)


def margin(logits: npt.NDArray[np.floating]) -> float:
    """Top-1 logit minus top-2 logit of one row [vocab]: how near the choice was."""
    second, first = np.sort(logits.astype(np.float64))[-2:]
    return float(first - second)


def largest_difference(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float | None:
    """Largest absolute difference of the finite elements; None if there is none."""
    gaps = np.abs(a.astype(np.float64) - b.astype(np.float64))
    finite = gaps[np.isfinite(gaps)]
    return float(finite.max()) if finite.size else None
