"""What a kernel's forward takes, against what it stands in for; functions as classes of kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def signature_drift(kernel: type[nn.Module], replaced: type[nn.Module]) -> str | None:
    """Why calls that are meant for one class do not mean the same to a kernel's forward; None if they do.

    Compared by name, order and kind: what is renamed would silently be lost in `**kwargs`. The first input may have
    another name, since it is given by position.
    """
    ours, theirs = parameters(kernel.forward), parameters(replaced.forward)
    if theirs and ours and theirs[0].kind == ours[0].kind and ours[0].kind in _BY_POSITION:
        theirs[0] = theirs[0].replace(name=ours[0].name)
    return drift(ours, theirs, f"{kernel.__name__}.forward", replaced.__name__)


def drift(
    ours: Sequence[inspect.Parameter], theirs: Sequence[inspect.Parameter], kernel: str, replaced: str
) -> str | None:
    """How the parameters of a kernel differ from those of what it replaces, by name, order and kind; None if not."""
    wanted = [p for p in theirs if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    given = [p for p in ours if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names, others = [p.name for p in given], [p.name for p in wanted]
    missing = [name for name in others if name not in names]
    added = [name for name in names if name not in others]
    if missing or added:
        said = [f"lacks {', '.join(f'`{n}`' for n in missing)}"] if missing else []
        said += [f"has {', '.join(f'`{n}`' for n in added)}, which `{replaced}` has not"] if added else []
        lost = "; its **kwargs would swallow it" if missing and len(given) < len(ours) else ""
        return f"`{kernel}` {' and '.join(said)}{lost}"
    if names != others:
        return f"`{kernel}` takes {', '.join(names)}, `{replaced}` {', '.join(others)}"
    kinds = {p.name: p.kind for p in wanted}
    moved = [p.name for p in given if p.kind != kinds[p.name]]
    if moved:
        how = {p.name: p.kind.description for p in given}[moved[0]]
        return f"`{kernel}` takes `{moved[0]}` as {how}, `{replaced}` as {kinds[moved[0]].description}"
    variable = {p.kind for p in theirs} - {p.kind for p in ours}
    if any(kind in variable for kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)):
        return f"`{kernel}` has no **kwargs or *args, `{replaced}` has"
    return None


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def parameters(forward: Any) -> list[inspect.Parameter]:
    """The parameters of a forward less self."""
    return list(inspect.signature(forward).parameters.values())[1:]


def as_class(function: Callable[..., Any], name: str) -> type[nn.Module]:
    """A kernel class whose forward calls a function of a package, with its signature and flags."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own = inspect.signature(function)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    flags = {flag: getattr(function, flag) for flag in ("can_torch_compile", "has_backward") if hasattr(function, flag)}
    return type(name, (nn.Module,), {"forward": forward, "__module__": function.__module__, **flags})
