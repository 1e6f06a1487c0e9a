"""Import a Solution's sources from files, so that its functions can be called and their source shown."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelgraft import machine
from kernelgraft.errors import MissingExtraError, RecordError
from kernelgraft.records import Solution


def load(solution: Solution) -> Callable[..., Any]:
    """The Solution's entry function: takes the Definition's inputs in order, returns its output or a tuple of outputs.

    The sources are written to `<cache>/solutions/<content hash>/` (a temporary folder where that is not writable) and
    imported as one package, so that `from .other import x` between them works. Equal Solutions give the same function.
    Raises MissingExtraError if a package that they import is not installed, RecordError if they cannot be imported or
    do not define the entry symbol.
    """
    digest = solution.content_hash()
    if digest not in _loaded:
        _loaded[digest] = _import(digest, solution)
    return _loaded[digest]


_loaded: dict[str, Callable[..., Any]] = {}


def _import(digest: str, solution: Solution) -> Callable[..., Any]:
    folder = _written(digest, solution)
    package = f"kernelgraft_solution_{digest[:16]}"
    module = types.ModuleType(package, f"Sources of the solution `{solution.name}`.")
    module.__path__ = [str(folder)]
    sys.modules[package] = module
    file = solution.spec.entry_point.partition("::")[0]
    name = ".".join([package, *Path(file).with_suffix("").parts])
    importlib.invalidate_caches()
    try:
        entry = getattr(importlib.import_module(name), solution.entry_symbol, None)
    except ModuleNotFoundError as error:
        if error.name and not error.name.startswith(package):
            raise MissingExtraError(
                f"solution `{solution.name}` imports `{error.name}`, which is not installed: install it, or leave the "
                f"supplier `{solution.meta.supplier}` out"
            ) from error
        raise RecordError(f"solution `{solution.name}` cannot be imported: {error}; verify it again") from error
    except Exception as error:
        raise RecordError(
            f"solution `{solution.name}` cannot be imported: {type(error).__name__}: {error}; verify it again"
        ) from error
    if not callable(entry):
        raise RecordError(
            f"solution `{solution.name}` has no function `{solution.entry_symbol}` in `{file}`: verify it"
        )
    function: Callable[..., Any] = entry
    return function


def _written(digest: str, solution: Solution) -> Path:
    try:
        return _write(machine.cache_folder() / "solutions" / digest, solution)
    except OSError:
        return _write(_temporary() / digest, solution)


@functools.cache
def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="kernelgraft-solutions-"))


def _write(folder: Path, solution: Solution) -> Path:
    """Each file by rename, so that another process sees all of it or nothing; what is there and equal stays."""
    for source in solution.sources:
        target = folder / source.path
        if folder.resolve() not in target.resolve().parents:
            raise RecordError(
                f"solution `{solution.name}` has the source path `{source.path}`, which leaves its folder"
            )
        content = source.content.encode()
        if target.is_file() and target.read_bytes() == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=target.parent, prefix=".draft-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(draft, target)
    return folder
