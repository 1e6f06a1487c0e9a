"""A guard in words."""

from __future__ import annotations

from collections.abc import Sequence

from kernelgraft.records import Guard


def in_words(guard: Guard) -> str:
    """One line that says which calls a guard lets through, e.g. `float32 on cpu; no gradients; kv_len up to 4096`."""
    parts = [f"{_or(guard.dtypes)} on {_or(guard.devices)}"]
    if not guard.autograd:
        parts.append("no gradients")
    if guard.contiguous:
        parts.append(f"{_and(guard.contiguous)} contiguous")
    if guard.last_dim_contiguous:
        parts.append(f"{_and(guard.last_dim_contiguous)} contiguous along the last axis")
    parts += [f"{axis} up to {size}" for axis, size in guard.max_axes.items()]
    parts += [f"{a} equal to {b}, or 1" for a, b in guard.equal_axes]
    if guard.static_shapes:
        parts.append("only the shapes that were measured")
    return "; ".join(parts)


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "nothing"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
