"""Builds of a kernel package: what their names say, and which of them is the best for a device of this machine."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernelgraft import machine

_NOARCH = re.compile(r"torch-(?P<backend>[a-z]+)")
_ARCH = re.compile(
    r"(?:torch-stable-abi(?P<stable>\d\d+)|torch(?P<torch>\d\d+)(?:-(?P<abi>cxx11|cxx98))?|tvm-ffi(?P<tvm>\d\d+))"
    r"-(?P<backend>[a-z]+)(?P<version>\d\d+)?-(?P<processor>[^-]+)-(?P<system>[^-]+)"
)
_BACKENDS = {"cu": "cuda"}
"""How a name says a backend, where that is not the backend's name."""


@dataclass(frozen=True)
class Host:
    """What a build must fit. Versions are (major, minor); `backend` is a name as packages use it ("cuda", "metal")."""

    backend: str
    backend_version: tuple[int, int] | None
    torch: tuple[int, int]
    new_abi: bool
    tvm_ffi: tuple[int, int] | None
    processor: str
    system: str


def host(device: str | None = None) -> Host:
    """This machine with a type of device; None: a GPU where torch can use one, else the CPU."""
    backend = backend_of(device)
    given = {"cuda": torch.version.cuda, "rocm": torch.version.hip, "xpu": getattr(torch.version, "xpu", None)}
    processor, system = platform.machine(), platform.system().lower()
    if system == "darwin" and processor == "arm64":
        processor = "aarch64"
    elif system == "windows" and processor == "AMD64":
        processor = "x86_64"
    return Host(
        backend=backend,
        backend_version=_release(given.get(backend)),
        torch=_release(torch.__version__) or (0, 0),
        new_abi=bool(torch.compiled_with_cxx11_abi()),
        tvm_ffi=_release(machine.version("apache-tvm-ffi")),
        processor=processor,
        system=system,
    )


def backend_of(device: str | None = None) -> str:
    """The name that packages use for a type of device of torch ("mps" is "metal", a ROCm build's "cuda" is "rocm")."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cuda" and torch.version.hip is not None:
        return "rocm"
    return {"mps": "metal", "npu": "cann"}.get(device, device)


def choose(names: Iterable[str], here: Host) -> tuple[str | None, dict[str, str]]:
    """The best build for a host (None: there is none), and why each of the others that are builds does not fit.

    Builds for an architecture come first (stable ABI, the newest first, then those of this torch, then tvm-ffi), then
    those for a backend, then `torch-universal`. Names that are no builds are left out.
    """
    refused: dict[str, str] = {}
    fitting: list[tuple[tuple[int, ...], str]] = []
    for name in sorted(names):
        judged = _judge(name, here)
        if isinstance(judged, str):
            refused[name] = judged
        elif judged is not None:
            fitting.append((judged, name))
    return (min(fitting)[1] if fitting else None), refused


def _judge(name: str, here: Host) -> tuple[int, ...] | str | None:
    """The rank of a build that fits (less is better), the reason why one does not, None for a name that is no build."""
    plain = _NOARCH.fullmatch(name)
    if plain:
        wanted = plain["backend"]
        if wanted == "universal":
            return (4,)
        own = "npu" if here.backend == "cann" else here.backend
        return (3,) if wanted == own else f"for {wanted}, not for {own}"
    match = _ARCH.fullmatch(name)
    if match is None:
        return None
    if match["processor"] != here.processor or match["system"] != here.system:
        return f"for {match['processor']} on {match['system']}, this is {here.processor} on {here.system}"
    wanted, version = _BACKENDS.get(match["backend"], match["backend"]), _digits(match["version"], backend=True)
    if wanted != here.backend:
        return f"for {wanted}, not for {here.backend}"
    if not _backend_fits(wanted, version, here.backend_version):
        return f"for {wanted} {_say(version)}, here it is {_say(here.backend_version)}"
    newest_backend = -version[1] if version else 0
    if match["stable"]:
        stable = _digits(match["stable"]) or (0, 0)
        if stable > here.torch:
            return f"for torch {_say(stable)} or newer, here it is {_say(here.torch)}"
        return (0, -stable[0], -stable[1], newest_backend)
    if match["torch"]:
        if _digits(match["torch"]) != here.torch:
            return f"for torch {_say(_digits(match['torch']))}, here it is {_say(here.torch)}"
        if match["abi"] and here.system == "linux" and (match["abi"] == "cxx11") != here.new_abi:
            return f"for the C++ ABI {match['abi']}, which this torch does not have"
        return (1, 1 if match["abi"] else 0, 0, newest_backend)
    if _digits(match["tvm"]) != here.tvm_ffi:
        return f"for tvm-ffi {_say(_digits(match['tvm']))}, here it is {_say(here.tvm_ffi)}"
    return (2, 0, 0, newest_backend)


def lacks_architecture(metadata: Mapping[str, Any], capability: tuple[int, int]) -> str | None:
    """Why a build that names its CUDA architectures cannot run at a compute capability; None if it can, or names none.

    `9.0` and `9.0f` run on that generation from that minor version on, `9.0a` on that one only, `9.0+PTX` on any newer.
    """
    backend = metadata.get("backend")
    archs = backend.get("archs") if isinstance(backend, Mapping) and backend.get("type") == "cuda" else None
    read = [match for arch in archs or () if (match := re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", str(arch)))]
    for match in read:
        wanted = int(match[1]), int(match[2])
        if match[3] == "a":
            fits = capability == wanted
        elif match[4] and not match[3]:
            fits = capability >= wanted
        else:
            fits = capability[0] == wanted[0] and capability >= wanted
        if fits:
            return None
    # Forms of a newer builder say nothing that could be judged.
    return f"it is built for {', '.join(map(str, archs or ()))}, this GPU is {_say(capability)}" if read else None


def _backend_fits(backend: str, wanted: tuple[int, int] | None, here: tuple[int, int] | None) -> bool:
    """A build for CUDA x.y runs with CUDA x.z, z ≥ y; any other backend must be of the same version."""
    if wanted is None:
        return True
    if here is None:
        return False
    return (wanted[0] == here[0] and wanted[1] <= here[1]) if backend == "cuda" else wanted == here


def _digits(text: str | None, backend: bool = False) -> tuple[int, int] | None:
    """`213` of a name as a version: torch 2.13 (one digit, then the rest), but CUDA 12.8 for `128` (the last apart)."""
    if not text:
        return None
    cut = len(text) - 1 if backend else 1
    return int(text[:cut]), int(text[cut:])


def _release(text: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def _say(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version)) if version else "missing"
