"""How long work tells where it is: one callable, so that the pipeline knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None, str], None]
"""`progress(stage, done, total, text)`; total is None where it is not known."""


def silent(stage: str, done: int, total: int | None, text: str) -> None:
    """Say nothing."""
