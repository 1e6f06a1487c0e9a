"""Apply a graft to one model object: claims, conflict and mismatch checks, dispatch with guards and counters, undo."""

from __future__ import annotations

from kernelgraft.patch.applying import Applied, apply, find_applied, patch_label
from kernelgraft.patch.dispatch import Dispatcher

__all__ = ["Applied", "Dispatcher", "apply", "find_applied", "patch_label"]
