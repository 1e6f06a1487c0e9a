"""A stand-in for the object through which models look up their attention function.

The object is replaced only in the copied globals of one method of one instance. Registering a new attention name
instead would mean writing it into the configuration, which two models can share, and would need a mask function of
its own; with the stand-in the name, and so the mask, stay those of the original, and the process-wide registry is
never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import AttentionInterface

Wrap = Callable[[Callable[..., Any], "str | None"], Callable[..., Any]]
"""Given the attention function that the real object returns, and its name, gives the function to return instead."""


class InterfaceProxy(AttentionInterface):
    """Looks up in `real` and returns `wrap(found, name)`; one wrapper per (name, found), so that identity is stable.

    It is itself an `AttentionInterface`, so code that asks for the type, or calls a method added later, still works.
    Writes go to `real`, as the model's own code meant them.
    """

    def __init__(self, real: AttentionInterface, wrap: Wrap) -> None:
        self._real = real
        self._wrap = wrap
        self._wrapped: dict[tuple[str | None, Callable[..., Any]], Callable[..., Any]] = {}

    def _through(self, name: str | None, found: Any) -> Any:
        if not callable(found):
            return found
        key = (name, found)
        if key not in self._wrapped:
            self._wrapped[key] = self._wrap(found, name)
        return self._wrapped[key]

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The wrapped attention function of that name; `default`, wrapped, for the eager one."""
        found: Callable[..., Any] = self._through(
            attn_implementation, self._real.get_interface(attn_implementation, default)
        )
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """As `dict.get`, wrapped."""
        return self._through(key, self._real.get(key, default))

    def __getitem__(self, key: str) -> Any:
        return self._through(key, self._real[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self._real[key] = value

    def __delitem__(self, key: str) -> None:
        del self._real[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._real)

    def __len__(self) -> int:
        return len(self._real)

    def __getattr__(self, name: str) -> Any:
        if name in ("_real", "_wrap", "_wrapped"):  # not there yet while a copy is being rebuilt
            raise AttributeError(name)
        return getattr(self._real, name)
