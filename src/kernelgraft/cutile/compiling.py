"""Compiling ahead of time: what calls would launch, compiled by `tileiras` for any architecture, without a GPU.

Child processes call and compile (`compile_worker`), a few at a time; each compilation has a time limit, and a crash is
a result like any other. cuTile's cache of compiled kernels is not used: every result is what the compiler did now.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernelgraft import machine
from kernelgraft.cutile.compile_pool import Child, Pool, Progress, silent
from kernelgraft.errors import MissingExtraError, UsageError
from kernelgraft.records import SCHEMA_VERSION, MachineCard, Record

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
LIMIT_S = 120.0
"""For one compilation, and for one call."""

Status = Literal["compiled", "refused", "failed", "crashed", "timeout"]


class Compilation(Record):
    """What became of one kernel with one signature for one architecture."""

    kernel: str
    """`package.module.function`."""
    symbol: str
    """The kernel's name in the compiled file; it spells the signature."""
    hints: dict[str, int | str]
    """What the kernel asks of the compiler."""
    grid: tuple[int, ...]
    """Of the first of the calls."""
    calls: tuple[str, ...]
    """Names of the calls that launch it."""
    architecture: str
    status: Status
    """`refused`: by cuTile's front end; `failed`, `crashed`, `timeout`: tileiras, or the process around it."""
    message: str | None = None
    seconds: float | None = None
    """Of the front end and tileiras together."""
    threads: int | None = None
    """Of a block."""
    registers: int | None = None
    """Of a thread."""
    local_bytes: int | None = None
    """Of a thread: registers spilled to memory, and arrays indexed at run time."""
    shared_bytes: int | None = None
    """Of a block."""
    cubin_bytes: int | None = None


class FailedCall(Record):
    """A call that launched nothing that could be compiled."""

    call: str
    message: str


class CompileCheck(Record):
    """All that calls launch, compiled for some architectures."""

    schema_version: int = SCHEMA_VERSION
    machine: MachineCard
    compiler: str
    """What tileiras says of its version."""
    architectures: tuple[str, ...]
    limit_s: float
    seconds: float
    """From the first call to the last compilation."""
    compilations: tuple[Compilation, ...]
    failed_calls: tuple[FailedCall, ...]

    @property
    def wrong(self) -> int:
        """How many compilations and calls did not succeed."""
        return sum(c.status != "compiled" for c in self.compilations) + len(self.failed_calls)


@dataclass(frozen=True)
class Call:
    """Something to call in a child process: `package.module:function` with JSON values."""

    name: str
    entry: str
    arguments: tuple[Any, ...] = ()
    architectures: tuple[str, ...] | None = None
    """Those that it is for; None: all."""

    def serves(self, architecture: str) -> bool:
        """Whether it is for an architecture."""
        return self.architectures is None or architecture in self.architectures


@dataclass(frozen=True)
class Compiler:
    """The compiler that cuTile would use."""

    path: str
    version: str
    architectures: tuple[str, ...]
    """Those that it lists; empty if it lists none."""


def compiler() -> Compiler:
    """Find tileiras as cuTile does: from the packages of the extra, on PATH, in CUDA_HOME.

    MissingExtraError if it or cuda-tile is not installed.
    """
    missing = "pip install 'kernelgraft[cutile]'; neither needs a GPU"
    try:
        from cuda.tile._compile import _find_compiler_bin
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"`cuda-tile` is not installed: {missing}") from error
    try:
        path = str(_find_compiler_bin().path)
    except FileNotFoundError as error:
        raise MissingExtraError(f"`tileiras`, cuTile's compiler, is not installed: {missing}") from error
    found = re.search(r"V[\d.]+", _said(path, "--version"))
    listed = re.findall(r"=(sm_\w+)", _said(path, "--help"))
    return Compiler(path, found[0].removeprefix("V") if found else "unknown", tuple(dict.fromkeys(listed)))


def _said(path: str, option: str) -> str:
    try:
        done = subprocess.run([path, option], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"`{path} {option}` does not work: {error}; install the compiler again") from error
    return done.stdout


def chosen_architectures(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names without repetition; UsageError if one is not known (by form only, where nothing is known)."""
    for name in names:
        if not re.fullmatch(r"sm_\d+[a-z]?", name) or (known and name not in known):
            listed = ", ".join(known or ARCHITECTURES)
            raise UsageError(f"architecture `{name}` is not one that tileiras knows: {listed}")
    if not names:
        raise UsageError(f"`--arch` names no architecture: try {','.join(ARCHITECTURES)}")
    return tuple(dict.fromkeys(names))


def check(
    calls: Sequence[Call],
    architectures: Sequence[str] = ARCHITECTURES,
    *,
    limit_s: float = LIMIT_S,
    processes: int | None = None,
    progress: Progress = silent,
) -> CompileCheck:
    """Find out what the calls launch and compile each kernel and signature once for each architecture.

    `processes` defaults to the number of cores. Results are in the order of the calls and architectures;
    calls for none of these are left out.
    """
    found, card = compiler(), machine.read()
    chosen = chosen_architectures(architectures, found.architectures)
    calls = [call for call in calls if any(call.serves(architecture) for architecture in chosen)]
    started = machine.clock()
    count = max(1, min(processes or card.cores, len(calls)))
    with (
        tempfile.TemporaryDirectory(prefix="kernelgraft-compile-") as folder,
        Pool(count, Path(folder), limit_s) as pool,
    ):
        answers = pool.map(_launches, calls, "calls", lambda call: call.name, progress)
        launches, failed = _distinct(calls, answers)
        jobs = [
            _Job(launch, architecture)
            for launch in launches
            for architecture in chosen
            if any(call.serves(architecture) for call in launch.callers)
        ]
        results = pool.map(_compiled, jobs, "compile", lambda job: job.name, progress)
    compilations = [
        Compilation(
            kernel=job.launch.kernel,
            symbol=job.launch.symbol,
            hints=job.launch.hints,
            grid=job.launch.grid,
            calls=job.launch.calls,
            architecture=job.architecture,
            **result,
        )
        for job, result in zip(jobs, results, strict=True)
    ]
    return CompileCheck(
        machine=card,
        compiler=found.version,
        architectures=chosen,
        limit_s=limit_s,
        seconds=machine.clock() - started,
        compilations=tuple(compilations),
        failed_calls=tuple(failed),
    )


@dataclass
class _Distinct:
    """A kernel and signature, and where it is launched first."""

    first: Call
    index: int
    key: str
    kernel: str
    symbol: str
    hints: dict[str, Any]
    grid: tuple[int, ...]
    callers: list[Call]

    @property
    def calls(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(call.name for call in self.callers))


@dataclass(frozen=True)
class _Job:
    launch: _Distinct
    architecture: str

    @property
    def name(self) -> str:
        return f"{self.launch.kernel.rpartition('.')[2]} {self.architecture}"


def _launches(child: Child, call: Call) -> dict[str, Any]:
    """`launches`, or `error` in words."""
    answer, ended = child.ask({"entry": call.entry, "arguments": call.arguments})
    return {"error": ended or "it did not end in time"} if answer is None else answer


def _compiled(child: Child, job: _Job) -> dict[str, Any]:
    """The fields of a Compilation that tell the result."""
    first, launch = job.launch.first, job.launch
    request = {"launch": launch.index, "key": launch.key, "architecture": job.architecture}
    answer, ended = child.ask({"entry": first.entry, "arguments": first.arguments, **request})
    if answer is None:
        return {"status": "crashed" if ended else "timeout", "message": ended or "the front end did not end in time"}
    return {"status": "failed", "message": answer["error"]} if "error" in answer else answer


def _distinct(calls: Sequence[Call], answers: Sequence[dict[str, Any]]) -> tuple[list[_Distinct], list[FailedCall]]:
    found: dict[str, _Distinct] = {}
    failed = []
    for call, answer in zip(calls, answers, strict=True):
        if "error" in answer or not answer["launches"]:
            failed.append(FailedCall(call=call.name, message=answer.get("error", "it launches nothing")))
            continue
        for index, launch in enumerate(answer["launches"]):
            known = found.get(launch["key"])
            if known is None:
                known = found[launch["key"]] = _Distinct(first=call, index=index, callers=[], **launch)
                known.grid = tuple(known.grid)
            known.callers.append(call)
    return list(found.values()), failed
