"""What the contenders of a benchmark are called."""

from __future__ import annotations

ORIGINAL = "eager"
"""The model as transformers runs it; what all others are compared with."""
COMPILED = "static-compile"
"""transformers' own fast path: a static cache, with which `generate` compiles the forward."""
GRAFTED = "kernelgraft"
CONTENDERS = (ORIGINAL, COMPILED, "tilegym", "liger", GRAFTED)
"""In the order of reports."""
