"""The model before and after: interleaved runs in fresh processes, outputs compared, the baseline's time by site."""

from __future__ import annotations

from kernelgraft.bench.result import BenchResult
from kernelgraft.bench.runner import bench

__all__ = ["BenchResult", "bench"]
