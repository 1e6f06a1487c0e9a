"""The only reader of the outside: hardware, versions, environment variables and the clock.

It does not decide anything: decisions take a `MachineCard` as a plain value, so that they can be tested for machines
that are not here.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kernelgraft.records import MachineCard

if TYPE_CHECKING:
    import torch

_TORCHRUN = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})

DISTRIBUTIONS = (
    "torch",
    "transformers",
    "triton",
    "cuda-tile",
    "tilegym",
    "liger-kernel",
    "kernels",
    "flashinfer-python",
    "accelerate",
    "peft",
    "kernelgraft",
)

clock = time.perf_counter
"""The package's one clock, in seconds."""

thread_cpu_clock = time.thread_time
"""CPU time of the calling thread in seconds: what others do on the machine meanwhile is not in it."""


def timestamp() -> str:
    """The time of day in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def version(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(name: str) -> str | None:
    """An environment variable, or None."""
    return os.environ.get(name)


def processes() -> tuple[int, int]:
    """Number of this process among those that torchrun started, and how many there are: (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child process, with changes; the child finds the modules that this one finds.

    It takes no part in what torchrun started.
    """
    path = os.pathsep.join(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))
    own = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    return {**own, "PYTHONPATH": path, **changes}


def cxx_compiler() -> str | None:
    """Path of the C++ compiler that torch.compile would use on a CPU, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def cache_folder() -> Path:
    """Where kernelgraft keeps what it may always rebuild: `KERNELGRAFT_CACHE`, else the user's cache folder."""
    if chosen := os.environ.get("KERNELGRAFT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kernelgraft"


def peak_memory_bytes() -> int:
    """Largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # rusage would also count the parent's memory at the time of the fork
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def busy_cores(seconds: float) -> float | None:
    """How many cores the processes that are seen here kept busy on average over the next `seconds`; None if unknown.

    In a container those are its own: what the rest of the host does is not in it.
    """
    if not Path("/proc/self/stat").exists():
        return None

    def spent() -> dict[str, int]:
        ticks = {}
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    words = (process / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # it has ended
                    continue
                ticks[process.name] = int(words[11]) + int(words[12])  # in user code and in the kernel
        return ticks

    before, began = spent(), clock()
    time.sleep(seconds)
    after, ended = spent(), clock()
    ticks = sum(value - before.get(name, 0) for name, value in after.items())
    return max(ticks, 0) / os.sysconf("SC_CLK_TCK") / (ended - began)


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory that is free on a GPU or in this machine, in bytes; None if it cannot be told."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def read() -> MachineCard:
    """This machine, read once per process."""
    import torch

    gpu = driver = capability = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
        driver = _driver()
    return MachineCard(
        platform=platform.platform(terse=True),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=gpu,
        gpu_driver=driver,
        compute_capability=capability,
        python=platform.python_version(),
        versions={name: found for name in DISTRIBUTIONS if (found := version(name))},
    )


def _driver() -> str | None:
    text = Path("/proc/driver/nvidia/version")
    if not text.exists():
        return None
    words = text.read_text().split()
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), None)
