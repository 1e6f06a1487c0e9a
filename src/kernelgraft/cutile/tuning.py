"""Tuned configurations of kernels: what a tuner must know of a kernel, and the look-up of what it found.

Tables are JSON files, one for each kind of GPU: those that the package ships (`kernelgraft/tuned/`), and the user's own
in the cache folder (`tuned/`), which `kernelgraft inventory --tune` writes and which come first. An entry holds for one
class of shapes of one kernel, and is used only if the kernel's code (`fingerprint`), the GPU with its compute
capability, and the versions of cuTile and of its compiler are those it was found with: a configuration that one
compiler translates rightly, another may not. Without an entry a kernel's default is used; nothing is ever tuned during
a call. `KERNELGRAFT_TUNED=off` leaves all entries unused. CPU tensors always get the defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from kernelgraft import machine
from kernelgraft.cutile.fingerprint import fingerprint

SCHEMA_VERSION = 1
PACKAGED = Path(__file__).resolve().parent.parent / "tuned"
SWITCH = "KERNELGRAFT_TUNED"
COMPILER = ("cuda-tile", "nvidia-cuda-tileiras")
"""Distributions whose versions an entry must have; unknown (a compiler that no package manager installed) is None."""

Config = TypeVar("Config")


@dataclass(frozen=True)
class Tunable:
    """A kernel at one class of shapes, as a tuner needs it.

    `space` holds the configurations, frozen dataclasses of plain values; the first is the default, and a later one must
    be faster to be chosen. `make(device, seed)` draws inputs, `run(configuration, *inputs)` is one call with that
    configuration, `expected(*inputs)` what must come out: a tensor or a tuple of tensors, in float64 where the kernel
    rounds. A result may be `roundings` roundings of its dtype away from it.
    """

    kernel: str
    shape_class: str
    space: Sequence[Any]
    make: Callable[[str, int], tuple[Any, ...]]
    run: Callable[..., Any]
    expected: Callable[..., Any]
    roundings: float = 4.0
    module: str = ""
    """Where the kernel stands; empty: the module of this package's kernels with the kernel's name."""

    @property
    def source(self) -> str:
        """The module whose hash an entry carries."""
        return self.module or f"kernelgraft.kernels.{self.kernel}"

    @property
    def name(self) -> str:
        """`<kernel>/<shape class>`."""
        return f"{self.kernel}/{self.shape_class}"


@dataclass(frozen=True)
class Gpu:
    """What of a GPU an entry must fit."""

    name: str
    compute_capability: str

    @property
    def slug(self) -> str:
        """The name as a file's: `nvidia-h200`."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@functools.cache
def gpu(device: int) -> Gpu:
    """A CUDA device by number."""
    return Gpu(torch.cuda.get_device_name(device), "sm_{}{}".format(*torch.cuda.get_device_capability(device)))


@functools.cache
def compiler_versions() -> dict[str, str | None]:
    """The versions of `COMPILER` that are installed here."""
    return {name: machine.version(name) for name in COMPILER}


def tuned(kernel: str, shape_class: str, device: int) -> dict[str, Any] | None:
    """The fields of the tuned configuration for a class of shapes on a CUDA device (-1: the CPU), or None.

    For whoever builds a launch plan: it reads files on its first call only, and never uses the GPU.
    """
    if _laid_over is not None:
        _asked_for.add((kernel, shape_class))
        return _laid_over.get((kernel, shape_class))
    if device < 0 or machine.environment(SWITCH) == "off":
        return None
    return _found(kernel, shape_class, gpu(device))


def chosen(default: Config, kernel: str, shape_class: str, device: int) -> Config:
    """A configuration (a dataclass) with what is tuned laid over it."""
    found = tuned(kernel, shape_class, device)
    return default if found is None else dataclasses.replace(default, **found)  # type: ignore[type-var]


@contextlib.contextmanager
def using(entries: Mapping[tuple[str, str], dict[str, Any]], *modules: ModuleType) -> Iterator[set[tuple[str, str]]]:
    """Inside, these (kernel, shape class) entries hold, on CPU tensors too, and no others.

    Gives the set of entries that have been looked up. Launch plans are made anew, inside and after, where `modules`
    keep them.
    """
    global _laid_over, _asked_for
    before = _laid_over, _asked_for
    _laid_over, _asked_for = entries, set()
    forget_plans(*modules)
    try:
        yield _asked_for
    finally:
        _laid_over, _asked_for = before
        forget_plans(*modules)


_laid_over: Mapping[tuple[str, str], dict[str, Any]] | None = None
_asked_for: set[tuple[str, str]] = set()


def run_with(config: Any, key: tuple[str, str], modules: Sequence[ModuleType], call: Callable[[], Any]) -> Any:
    """One call of a kernel with a configuration for a (kernel, shape class). LookupError if the call asks for another.

    `modules` are those that keep its launch plans.
    """
    with using({key: dataclasses.asdict(config)}, *modules) as asked_for:
        result = call()
    if key not in asked_for:
        raise LookupError(f"the call asks for {sorted(asked_for)}, not for {key}")
    return result


def forget_plans(*modules: ModuleType) -> None:
    """Empty the caches of the functions that modules define.

    Not of those that they import: the kernels with their hints are kept (`plans.hinted`), as a kernel made anew is
    loaded anew, and what is loaded or let go while a CUDA graph is captured ends the process.
    """
    for module in modules:
        for value in list(vars(module).values()):
            if callable(clear := getattr(value, "cache_clear", None)) and value.__module__ == module.__name__:
                clear()


def user_table(device: Gpu) -> Path:
    """The user's own table for a GPU."""
    return machine.cache_folder() / "tuned" / f"{device.slug}.json"


def packaged_table(device: Gpu) -> Path:
    """The table that the package ships for a GPU; it need not exist."""
    return PACKAGED / f"{device.slug}.json"


def forget() -> None:
    """Read the tables anew at the next look-up. Launch plans made before keep their configurations."""
    _read.cache_clear()
    _found.cache_clear()


@functools.cache
def _found(kernel: str, shape_class: str, device: Gpu) -> dict[str, Any] | None:
    for file in (user_table(device), packaged_table(device)):
        entry = _read(file).get("kernels", {}).get(kernel)
        if entry is not None and shape_class in entry["classes"] and refusal(entry, device) is None:
            config: dict[str, Any] = entry["classes"][shape_class]["config"]
            return config
    return None


def shipped() -> dict[Gpu, dict[tuple[str, str], dict[str, Any]]]:
    """What the package's tables say for each GPU, as `using` takes it: entries that hold with what is installed."""
    found: dict[Gpu, dict[tuple[str, str], dict[str, Any]]] = {}
    for file in sorted(PACKAGED.glob("*.json")):
        for kernel, entry in _read(file).get("kernels", {}).items():
            device = Gpu(entry["gpu"], entry["compute_capability"])
            if refusal(entry, device) is None:
                configs = {(kernel, name): tuned["config"] for name, tuned in entry["classes"].items()}
                found.setdefault(device, {}).update(configs)
    return found


def refusal(entry: dict[str, Any], device: Gpu) -> str | None:
    """Why a kernel's entry of a table does not hold on a GPU with what is installed here, in words; None if it does."""
    if entry["gpu"] != device.name or entry["compute_capability"] != device.compute_capability:
        return f"tuned on `{entry['gpu']}`, {entry['compute_capability']}"
    for name, version in compiler_versions().items():
        if entry["versions"].get(name) != version:
            return f"tuned with {name} {entry['versions'].get(name)}, here is {version}"
    if entry["hash"] != fingerprint(entry["module"]):
        return "its code has changed since"
    return None


@functools.cache
def _read(file: Path) -> dict[str, Any]:
    """A table; an empty one, with a warning if there is a file that is none."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if table["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {table['schema_version']}")
        for entry in table["kernels"].values():
            _check(entry)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"tuned configurations in `{file}` cannot be read ({error!r}) and are not used; delete the file"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return {}
    return dict(table)


def _check(entry: dict[str, Any]) -> None:
    for field, kind in (("module", str), ("hash", str), ("gpu", str), ("compute_capability", str), ("versions", dict)):
        if not isinstance(entry[field], kind):
            raise TypeError(f"{field} is no {kind.__name__}")
    for found in entry["classes"].values():
        if not isinstance(found["config"], dict):
            raise TypeError("a configuration is no mapping")


def read_table(file: Path) -> dict[str, Any]:
    """A table as it is on disk; an empty one of the present schema if it is missing or cannot be read."""
    return _read.__wrapped__(file) or {"schema_version": SCHEMA_VERSION, "kernels": {}}


def put_entry(table: dict[str, Any], device: Gpu, tunable: Tunable, config: Any, facts: dict[str, Any]) -> None:
    """Enter a configuration; what the table knew of the kernel under another hash, GPU or compiler goes."""
    head = {
        "module": tunable.source,
        "hash": fingerprint(tunable.source),
        "gpu": device.name,
        "compute_capability": device.compute_capability,
        "versions": compiler_versions(),
    }
    entry = table["kernels"].get(tunable.kernel)
    if entry is None or {name: entry[name] for name in head} != head:
        entry = table["kernels"][tunable.kernel] = {**head, "classes": {}}
    entry["classes"][tunable.shape_class] = {"config": dataclasses.asdict(config), **facts}
    table["kernels"] = dict(sorted(table["kernels"].items()))
    entry["classes"] = dict(sorted(entry["classes"].items()))
