"""Write a graft down for others: as plain Python that patches transformers, as a trace set, as a kernel package."""

from __future__ import annotations

import keyword
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kernelgraft.errors import UsageError
from kernelgraft.records import Graft
from kernelgraft.store import Inventory

FORMATS = ("monkey-patch", "flashinfer-trace", "hub")
_RESERVED = ("kernelgraft", "torch", "transformers")

__all__ = ["FORMATS", "export"]


def export(
    graft: Graft,
    *,
    format: str,
    dest: Path | str,
    package: str = "kernelgraft_kernels",
    submodule: str | None = None,
    inventory: Inventory | None = None,
    config: Any = None,
    overwrite: bool = False,
    repo: str | None = None,
) -> list[Path]:
    """Write a graft in one of `FORMATS` below the folder `dest`; returns the files.

    `monkey-patch`: the package `<dest>/<package>`, whose module for this model is called `submodule` (None: the model
    type); `config` is the model's configuration, if neither the inventory nor the model's name leads to it.
    `flashinfer-trace`: `dest` becomes the root of a trace set. `hub`: `dest` becomes the root of the kernel repository
    `repo` (`owner/name`), with two-class kernels for transformers' KernelConfig and ours; it needs the configuration
    too. All files appear at once, or none: they are written beside and moved. What is there is kept unless
    `overwrite`, and then only files of an export are replaced.
    Raises UsageError for an unknown format, a bad name, a place that is taken or cannot be written, a graft without
    anything to export.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown format `{format}`; known: {', '.join(FORMATS)}")
    if repo is not None and format != "hub":
        raise UsageError("`--repo` names the repository of a kernel package: give --format hub with it")
    root = Path(dest)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".export-") as scratch:
            stage = Path(scratch) / "stage"
            stage.mkdir()
            if format == "monkey-patch":
                return _monkey_patch(graft, root, stage, package, submodule, inventory, config, overwrite)
            if format == "hub":
                return _hub(graft, root, stage, repo, inventory, config, overwrite)
            return _trace_set(graft, root, stage, inventory, overwrite)
    except OSError as error:
        raise UsageError(
            f"cannot write `{error.filename or root}`: {error.strerror or error}; choose another"
        ) from error


def _monkey_patch(
    graft: Graft,
    root: Path,
    stage: Path,
    package: str,
    submodule: str | None,
    inventory: Inventory | None,
    config: Any,
    overwrite: bool,
) -> list[Path]:
    from kernelgraft.emit import monkey_patch

    name = submodule or monkey_patch.module_name(graft.model.type)
    for what, given in (("package", package), ("submodule", name)):
        if not given.isidentifier() or keyword.iskeyword(given) or given in _RESERVED:
            raise UsageError(f"{what} `{given}` cannot be the name of a Python package of its own; give another")
    home = root / package
    if home.exists() and any(home.iterdir()):
        if not overwrite:
            raise UsageError(f"`{home}` exists and is not empty; give another package or destination, or overwrite it")
        _refuse_foreign(home / "transformers", name)
    monkey_patch.write(graft, stage, package=package, submodule=name, inventory=inventory, config=config)
    return _move_in(stage, home, name, package)


def _refuse_foreign(folder: Path, submodule: str) -> None:
    """UsageError if a file that would be replaced was not written by an export."""
    from kernelgraft.emit.monkey_patch import HEADER

    for path in (folder / "monkey_patch.py", folder / submodule / "__init__.py"):
        if path.exists() and HEADER not in path.read_text(encoding="utf-8", errors="replace"):
            raise UsageError(f"`{path}` was not written by an export and is kept; give another package or destination")


def _move_in(stage: Path, home: Path, submodule: str, package: str) -> list[Path]:
    """Take over a staged package; other modules of an existing one stay, and its apply functions cover them too."""
    from kernelgraft.emit.monkey_patch import write_apply

    inside = stage / "transformers"
    if not home.exists() or not any(home.iterdir()):
        write_apply(inside, package)
        files = _listed(stage, home)
        os.replace(stage, home)
        return files
    old = home / "transformers"
    for init in old.glob("*/__init__.py"):
        if init.parent.name != submodule:
            (inside / init.parent.name).mkdir()
            shutil.copy(init, inside / init.parent.name / "__init__.py")
    write_apply(inside, package)
    for path in inside.iterdir():
        if path.is_dir() and path.name != submodule:
            shutil.rmtree(path)
    files = _listed(stage, home)
    old.mkdir(exist_ok=True)
    if (old / submodule).exists():
        os.replace(old / submodule, stage.parent / "replaced")
    os.replace(inside / submodule, old / submodule)
    for path in [p for p in stage.rglob("*") if p.is_file()]:
        target = home / path.relative_to(stage)
        if target.name != "__init__.py" or not target.exists():
            os.replace(path, target)
    return files


def _trace_set(graft: Graft, root: Path, stage: Path, inventory: Inventory | None, overwrite: bool) -> list[Path]:
    from kernelgraft.emit import trace_set

    if inventory is not None and inventory.root.resolve() == root.resolve():
        raise UsageError(f"`{root}` is the inventory itself, which is a trace set already; give another destination")
    there = [name for name in trace_set.TRACE_SET if (root / name).exists()]
    if not overwrite and any(p for p in root.iterdir() if not p.name.startswith(".export-")):
        raise UsageError(f"`{root}` exists and is not empty; give another destination, or overwrite it")
    trace_set.write(graft, stage, inventory)
    files = _listed(stage, root)
    for name in there:
        os.replace(root / name, stage.parent / f"replaced-{name}")
    for path in stage.iterdir():
        os.replace(path, root / path.name)
    return files


def _hub(
    graft: Graft,
    root: Path,
    stage: Path,
    repo: str | None,
    inventory: Inventory | None,
    config: Any,
    overwrite: bool,
) -> list[Path]:
    from kernelgraft.emit import hub_package

    name = hub_package.check_repo(repo)
    there = [p for p in root.iterdir() if not p.name.startswith(".export-")]
    if there and not overwrite:
        raise UsageError(f"`{root}` exists and is not empty; give another destination, or overwrite it")
    variants = [root / "build" / variant for variant in hub_package.VARIANTS]
    for path in (*(variant / "layers.py" for variant in variants), root / "README.md"):
        if path.exists() and hub_package.HEADER not in path.read_text(encoding="utf-8", errors="replace"):
            raise UsageError(f"`{path}` was not written by an export and is kept; give another destination")
    hub_package.write(graft, stage, repo=name, inventory=inventory, config=config)
    files = _listed(stage, root)
    (root / "build").mkdir(exist_ok=True)
    for variant in variants:
        if variant.exists():
            os.replace(variant, stage.parent / f"replaced-{variant.name}")
        if (stage / "build" / variant.name).exists():
            os.replace(stage / "build" / variant.name, variant)
    for path in [p for p in stage.iterdir() if p.is_file()]:
        os.replace(path, root / path.name)
    return files


def _listed(stage: Path, home: Path) -> list[Path]:
    return [home / p.relative_to(stage) for p in sorted(stage.rglob("*")) if p.is_file()]
