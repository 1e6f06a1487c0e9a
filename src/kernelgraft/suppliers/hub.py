"""The supplier `hub`: kernel packages (two-class kernels of `kernels`) as Solutions.

Packages in the Hub's cache are listed; those named in `KERNELGRAFT_HUB` are judged: folders, or `owner/name@<commit>`
with the whole commit, several parted by `:`. Naming one is trusting it. Their code is read to list them, and run only
by the judge, which reads it first.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kernelgraft import machine as machine_module
from kernelgraft.records import BuildSpec, Definition, Guard, MachineCard, Solution, SolutionMeta
from kernelgraft.suppliers.base import Listing, Refusal, Supplier
from kernelgraft.suppliers.hub_slicing import ENTRY, Unsliceable, flag, kernel_classes, sliced
from kernelgraft.suppliers.wording import in_words

NAMED = "KERNELGRAFT_HUB"
FLOATS = ("float32", "bfloat16", "float16")
FAMILIES = {"rms_norm": re.compile(r"rms_?norm", re.I), "layer_norm": re.compile(r"layer_?norm", re.I)}
"""Families whose module is one kernel class, and how such classes are called."""
_FUSED = re.compile(r"mlp|add|attention|residual", re.I)
_VARIANTS = {"torch-cuda": ("cuda",), "torch-cpu": ("cpu",), "torch-universal": ("cpu", "cuda")}
"""Builds of Python only, the first that is there is taken; others hold compiled code, which cannot be read."""
_PINNED = re.compile(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")


@dataclass(frozen=True)
class Package:
    """One build of a package; `trusted` says why its code must not run, None if it may."""

    name: str
    folder: Path | None
    refused: str | None

    @property
    def build(self) -> tuple[Path, tuple[str, ...]] | None:
        """The folder with `layers.py`, and the types of device that it is for."""
        if self.folder is None:
            return None
        for base in (self.folder, self.folder / "build"):
            for variant, devices in _VARIANTS.items():
                if (base / variant / "layers.py").is_file():
                    return base / variant, devices
        own = _VARIANTS.get(self.folder.name, ("cpu", "cuda"))
        return (self.folder, own) if (self.folder / "layers.py").is_file() else None


class HubSupplier(Supplier):
    """Needs packages: in the Hub's cache, or named."""

    name: ClassVar[str] = "hub"

    def unavailable(self, machine: MachineCard) -> str | None:
        """See `Supplier.unavailable`."""
        named = [package for package in packages() if package.refused is None]
        return None if named else f"no kernel package is named: {NAMED}=FOLDER or {NAMED}=owner/name@<commit>"

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        """See `Supplier.catalogue`; a package that cannot be read is one line with the reason."""
        found = []
        for package in packages():
            build = package.build
            classes = _classes(build[0]) if build else "it has no build of Python only"
            devices = build[1] if build else ()
            if isinstance(classes, str):
                found.append(Listing(self.name, package.name, "any", "python", devices, "", package.refused or classes))
                continue
            licence = _metadata(build[0]).get("license") if build else None
            for name in classes:
                family = next((f for f in FAMILIES if _serves(f, name)), None)
                reason = package.refused or (None if family else "its family is not known by its name")
                text = f"licence {licence or 'unknown'}"
                label = f"{package.name}:{name}"
                found.append(Listing(self.name, label, family or "any", "python", devices, text, reason))
        return found

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        """See `Supplier.candidates`."""
        if (reason := self.unavailable(machine)) is not None:
            return Refusal(self.name, reason)
        family = definition.meta.family
        if family not in FAMILIES:
            return Refusal(self.name, f"of packages it takes norms, not the family `{family}`")
        solutions, reasons = [], []
        for package in packages():
            build = package.build
            if package.refused or build is None:
                continue
            classes = _classes(build[0])
            for name in classes if not isinstance(classes, str) else ():
                if not _serves(family, name):
                    continue
                try:
                    solutions.append(_solution(definition, package, name, build))
                except Unsliceable as error:
                    reasons.append(f"`{package.name}:{name}`: {error}")
        if not solutions:
            return Refusal(self.name, "; ".join(reasons) or f"no named package has a kernel for `{family}`")
        return solutions


def packages() -> list[Package]:
    """The named packages, then those that lie in the Hub's cache."""
    found: dict[str, Package] = {}
    for entry in filter(None, (machine_module.environment(NAMED) or "").split(":")):
        pinned = _PINNED.fullmatch(entry)
        if pinned is None:
            folder = Path(entry).expanduser()
            reason = None if folder.is_dir() else f"there is no folder `{entry}`, and it is not owner/name@<40 digits>"
            taken = any(package.name == folder.name for package in found.values())
            name = entry if taken or reason else folder.name
            found[entry] = Package(name, None if reason else folder, reason)
            continue
        places = [path for repo, path in _cached() if repo == pinned[1] and path.name == pinned[2]]
        reason = None if places else f"`{entry}` is not in the Hub's cache: fetch it once"
        found[entry] = Package(entry, places[0] if places else None, reason)
    for repo, path in _cached():
        label = f"{repo}@{path.name}"
        found.setdefault(label, Package(label, path, f"it is not trusted: read it, then set {NAMED}={label}"))
    return list(found.values())


def _cached() -> list[tuple[str, Path]]:
    """Repository and snapshot of each kernel package in the Hub's cache."""
    own = machine_module.environment("KERNELS_CACHE")
    if own is None:
        from huggingface_hub import constants

        own = constants.HF_HUB_CACHE
    snapshots = sorted(Path(own).glob("kernels--*/snapshots/*"))
    return [(path.parents[1].name.removeprefix("kernels--").replace("--", "/", 1), path) for path in snapshots]


def _classes(build: Path) -> dict[str, ast.ClassDef] | str:
    file = build / "layers.py"
    try:
        return _read(file, file.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError) as error:
        return f"`{file}` cannot be read: {error}"


@functools.lru_cache(maxsize=64)
def _read(file: Path, changed: int) -> dict[str, ast.ClassDef]:
    return kernel_classes(ast.parse(file.read_text(encoding="utf-8")))


def _serves(family: str, name: str) -> bool:
    return bool(FAMILIES[family].search(name)) and not _FUSED.search(name)


def _metadata(build: Path) -> dict[str, Any]:
    try:
        read = json.loads((build / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _solution(definition: Definition, package: Package, name: str, build: tuple[Path, tuple[str, ...]]) -> Solution:
    folder, devices = build
    inputs = list(definition.inputs)
    sources = sliced(folder, name, inputs, float(definition.meta.semantics["eps"]))
    classes = _classes(folder)
    assert not isinstance(classes, str)
    dtypes = tuple(dict.fromkeys(s.dtype for s in definition.inputs.values() if s.dtype in FLOATS))
    guard = Guard(devices=devices, dtypes=dtypes, autograd=flag(classes[name], "has_backward", True))
    text = "".join(source.content for source in sources)
    label = re.sub(r"\W+", "_", f"{package.name}_{name}")
    triton = "triton" in text
    return Solution(
        name=f"hub_{label}_{definition.name}",
        definition=definition.name,
        author="hub",
        spec=BuildSpec(
            language="triton" if triton else "python",
            target_hardware=devices,
            entry_point=f"{ENTRY}::kernel",
            dependencies=("torch", *_metadata(folder).get("python-depends", ())),
        ),
        sources=sources,
        description=f"`{name}` of the kernel package `{package.name}`",
        meta=SolutionMeta(
            supplier="hub",
            family=definition.meta.family,
            match="adapter",
            guard=guard.model_copy(update={"text": in_words(guard)}),
            fingerprint=definition.meta.fingerprint,
            uses_compiler=triton,
            licence=str(_metadata(folder).get("license") or "unknown"),
        ),
    )


SUPPLIER = HubSupplier()
