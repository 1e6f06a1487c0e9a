"""Which of cuTile's operations the interpreter covers: the table in the documentation is made from this."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
from cuda.tile import _stub as stub

from kernelgraft.cutile.operations import FUNCTIONS, METHODS, TABLE, seam
from kernelgraft.cutile.rewriting import stand_ins

BEGIN = "<!-- operations: made by `kernelgraft.cutile.coverage.table()` -->"
END = "<!-- end of operations -->"


def public_operations() -> dict[str, Any]:
    """Every function and method of the installed cuda-tile that a kernel may call, by name."""
    found = {name: getattr(ct, name) for name in ct.__all__ if _is_stub(getattr(ct, name))}
    for owner in METHODS:
        for name, method in vars(getattr(stub, owner)).items():
            if _is_stub(method):
                found[f"{owner}.{name}"] = method.__func__ if isinstance(method, staticmethod) else method
    return found


def _is_stub(value: Any) -> bool:
    function = value.__func__ if isinstance(value, staticmethod) else value
    return callable(function) and not isinstance(function, type) and hasattr(seam(function), "_cutile_python_stub")


def missing() -> list[str]:
    """Names of operations that the interpreter lacks; what cuTile also runs on the host runs here as it is."""
    return [
        name
        for name, value in public_operations().items()
        if getattr(value, "_cutile_function_wrapper", False) and seam(value) not in TABLE
    ]


def table() -> str:
    """The covered operations as a Markdown table: kind, names."""
    lines = ["| kind | operations |", "| --- | --- |"]
    for kind, functions in FUNCTIONS.items():
        lines.append(f"| {kind} | {', '.join(f'`{name}`' for name in functions)} |")
    for owner, methods in METHODS.items():
        names = ", ".join(f"`{name}`" for name in methods if name != "__init__") or "the constructor"
        lines.append(f"| methods of `{owner}` | {names} |")
    builtins = sorted(value.__name__ for value in stand_ins if isinstance(getattr(value, "__name__", None), str))
    names = ", ".join(f"`{name}`" for name in builtins if name not in ("DType", "cdiv"))
    lines.append(f"| Python's | operators, {names}, calls of a dtype |")
    return "\n".join(lines)
