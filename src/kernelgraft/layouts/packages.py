"""Load kernels from their packages: our own importer, which needs no `kernels`, and the rules that kernels keep."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from kernelgraft.errors import MissingExtraError, UsageError
from kernelgraft.layouts.kernel_set import KernelSet
from kernelgraft.layouts.locating import Location, locate
from kernelgraft.layouts.records import FUSIONS, Entry, LoadedKernel
from kernelgraft.layouts.signatures import as_class, parameters
from kernelgraft.layouts.signatures import signature_drift as signature_drift
from kernelgraft.layouts.variants import lacks_architecture

FLAGS = ("can_torch_compile", "has_backward")
"""What a kernel class may have beside its forward."""
_IMPORT_NAMES = {"nvidia-cutlass-dsl": "cutlass", "cuda-tile": "cuda.tile"}
"""Distributions of `python-depends` whose module has another name than theirs with `_` for `-`."""
_lock = threading.RLock()
_modules: dict[str, ModuleType] = {}


def load(entry: Entry, *, device: str | None = None, pinned: bool = False) -> LoadedKernel:
    """The classes of an entry: the kernel, its Layout (None if the package has none) and the Layout's rules.

    `device` is the type of device of the model (None: a GPU where there is one, else the CPU): it chooses the build.
    With `pinned`, code of the Hub must be trusted explicitly and its revision be a whole commit. A package is imported
    once for its content, under a name of ours: two packages with one name, or two versions, stand side by side, and an
    edited file is imported anew. Raises UsageError, MissingExtraError.
    """
    if entry.source.repository is not None:
        if pinned:
            raise UsageError(f"{entry} does not say which commit its code is of: give owner/repo:Class with a revision")
        kernel = entry.source.repository.load()
        location = Location(Path(inspect.getfile(sys.modules[kernel.__module__])).parent)
    else:
        location = locate(entry.source, device=device, pinned=pinned)
        _check_needs(location, entry, device)
        kernel = _find_kernel(_import(location.folder, entry), entry)
    _check_kernel(kernel, entry)
    layout = _find_layout(kernel, entry)
    return LoadedKernel(
        entry=entry,
        kernel=kernel,
        layout=layout,
        rules=_rules(layout),
        location=location.folder,
        commit=location.commit,
        licence=location.licence,
    )


def load_all(kernels: Any, *, device: str | None = None, pinned: bool = False) -> tuple[LoadedKernel, ...]:
    """Every kernel of a set (whatever KernelSet.of takes) that is meant for a type of device, in order.

    Raises UsageError if there is none.
    """
    chosen = KernelSet.of(kernels)
    entries = chosen.entries if device is None else chosen.for_device(device)
    if not entries:
        given = sorted({entry.device for entry in chosen if entry.device})
        raise UsageError(
            f"none of the kernels is for the device `{device}`: they are for {', '.join(given)}"
            if given
            else "the set of kernels is empty: give at least one, as {'RMSNorm': 'owner/repo:Class'}"
        )
    return tuple(load(entry, device=device, pinned=pinned) for entry in entries)


# --- importing ---


class _SourceLoader(SourceFileLoader):
    """Compiles what the file says now and keeps no byte code: a stale one may be from other content at this path."""

    def path_stats(self, path: Any) -> Any:
        raise OSError(f"`{path}` is always compiled")


def _import(folder: Path, entry: Entry) -> ModuleType:
    """The package in a folder, imported once for its content; what fails leaves nothing in sys.modules."""
    name = f"kernelgraft_kernel_{content_hash(folder)[:16]}"
    with _lock:
        if name in _modules:
            return _modules[name]
        file = _init_file(folder, entry)
        loader = _SourceLoader(name, str(file))
        spec = importlib.util.spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=[str(file.parent)]
        )
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        folders = [str(path) for path in (file.parent, *file.parent.rglob("*")) if path.is_dir()]
        before = {path: sys.path_importer_cache.get(path) for path in folders}
        sources, binaries = (_SourceLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES)
        try:
            sys.path_importer_cache.update({path: FileFinder(path, binaries, sources) for path in folders})
            loader.exec_module(module)
        except BaseException as error:
            for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
                del sys.modules[loaded]
            if isinstance(error, Exception):
                raise _import_error(error, entry) from error
            raise
        finally:
            for path, finder in before.items():
                if finder is None:
                    sys.path_importer_cache.pop(path, None)
                else:
                    sys.path_importer_cache[path] = finder
        _modules[name] = module
        return module


def _init_file(folder: Path, entry: Entry) -> Path:
    """`__init__.py` of a build, or of the one package in it (the form of older builds)."""
    file = folder / "__init__.py"
    if file.is_file():
        return file
    inner = sorted(folder.glob("*/__init__.py"))
    if len(inner) == 1:
        return inner[0]
    raise UsageError(f"the package of {entry} has no `{file}`: write it as `from . import layers`")


def _import_error(error: Exception, entry: Entry) -> UsageError:
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("kernelgraft_kernel_"):
        return MissingExtraError(f"the package of {entry} imports `{error.name}`, which is not installed: install it")
    said = " ".join(str(error).split())[:200]
    return UsageError(f"the package of {entry} cannot be imported ({type(error).__name__}: {said}): mend it")


def content_hash(folder: Path) -> str:
    """sha256 over the names and bytes of a build's files, byte code left out."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _check_needs(location: Location, entry: Entry, device: str | None) -> None:
    """What metadata.json says that a build needs."""
    if device in (None, "cuda") and torch.version.cuda is not None and torch.cuda.is_available():
        lacks = lacks_architecture(location.metadata, torch.cuda.get_device_capability())
        if lacks:
            raise UsageError(f"the package of {entry} cannot run here ({lacks}): take a build for this GPU")
    needed = location.metadata.get("python-depends") or []
    for name in needed:
        module = _IMPORT_NAMES.get(name, name.replace("-", "_"))
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise MissingExtraError(f"the package of {entry} needs `{name}`, which is not installed: install it")
    if location.metadata.get("kernel-depends"):
        raise UsageError(
            f"the package of {entry} is built on other kernels (kernel-depends), which are not resolved here: "
            "take one that stands alone"
        )


# --- classes ---


def _find_kernel(module: ModuleType, entry: Entry) -> Any:
    """A class of `layers`, or a function there or of the package itself, made a class."""
    layers, name = getattr(module, "layers", None), entry.kernel_name
    for home in (layers, module):
        found = getattr(home, name, None)
        if isinstance(found, FunctionType):
            return as_class(found, name)
        if found is not None and home is layers:
            return found
    if layers is None:
        raise UsageError(
            f"the package of {entry} does not expose `layers`: write `from . import layers` in __init__.py"
        )
    classes = [name for name, value in vars(layers).items() if isinstance(value, type) and not name.startswith("_")]
    kernels = [name for name in classes if issubclass(getattr(layers, name), nn.Module) and not name.endswith("Layout")]
    near = difflib.get_close_matches(name, kernels, 1) or kernels
    raise UsageError(
        f"`layers` of {entry} has no class `{name}`: "
        f"{'it has ' + ', '.join(f'`{other}`' for other in near) if near else 'it has no kernel at all'}"
    )


def _find_layout(kernel: type[nn.Module], entry: Entry) -> type[nn.Module] | None:
    """The class of the same module whose name is the kernel's with `Layout`."""
    name = f"{kernel.__name__}Layout"
    layout = getattr(sys.modules.get(kernel.__module__), name, None)
    if layout is None:
        if entry.is_fusion:
            raise UsageError(f"{entry} is a fusion without a Layout: define `{name}` beside `{kernel.__name__}`")
        return None
    if not isinstance(layout, type) or not issubclass(layout, nn.Module):
        raise UsageError(f"`{name}` of {entry} is no nn.Module: a Layout holds the parameters of a module")
    fusion = getattr(layout, "fusion", "chain")
    if fusion not in FUSIONS:
        raise UsageError(f"`{name}.fusion` is `{fusion}`: write one of {', '.join(FUSIONS)}")
    rules = getattr(layout, "conversion_mapping", [])
    if not isinstance(rules, list | tuple):
        raise UsageError(f"`{name}.conversion_mapping` is a {type(rules).__name__}: write a list of rules")
    if "forward" in vars(layout):
        ours, theirs = ([p.name for p in parameters(one.forward)] for one in (layout, kernel))
        if ours != theirs:
            raise UsageError(
                f"`{name}.forward` takes {', '.join(ours) or 'nothing'} and `{kernel.__name__}.forward` "
                f"{', '.join(theirs) or 'nothing'}: give both the same parameters, since one stands in for the other"
            )
    return layout


def _rules(layout: type[nn.Module] | None) -> tuple[Any, ...]:
    return tuple(getattr(layout, "conversion_mapping", ()))


def _check_kernel(kernel: Any, entry: Entry) -> None:
    """A kernel only has a forward and two flags: it is laid over modules that it did not make."""
    name = entry.kernel_name
    if not isinstance(kernel, type) or not issubclass(kernel, nn.Module):
        raise UsageError(f"`{name}` of {entry} is no class of nn.Module: derive it from torch.nn.Module")
    if name.endswith("Layout") and kernel.__init__ is not nn.Module.__init__:
        raise UsageError(
            f"{entry} names a Layout: name the kernel, `{name.removesuffix('Layout')}`; its Layout is found"
        )
    if kernel.__init__ is not nn.Module.__init__:
        raise UsageError(f"`{name}` of {entry} has an __init__: a kernel has no state, so move it to `{name}Layout`")
    if kernel.forward is nn.Module.forward:
        raise UsageError(f"`{name}` of {entry} has no forward: define it")
    for member in _own_members(kernel):
        if member != "forward" and member not in FLAGS:
            raise UsageError(
                f"`{name}` of {entry} has the member `{member}`: a kernel only has forward, {' and '.join(FLAGS)}; "
                "make it a function or constant of the module"
            )
    for flag in FLAGS:
        if not isinstance(getattr(kernel, flag, True), bool):
            raise UsageError(f"`{name}.{flag}` of {entry} is no bool: write True or False")


def _own_members(kernel: type[nn.Module]) -> Iterable[str]:
    """What a class and its bases below nn.Module define, less what Python itself writes into a class."""
    for base in kernel.__mro__:
        if base is nn.Module:
            return
        yield from (member for member in vars(base) if member not in vars(_Bare))


class _Bare(nn.Module):
    """A class of nothing but an annotation: all that is in it, Python wrote."""

    attribute: float
