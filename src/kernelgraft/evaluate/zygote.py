"""A process that has torch loaded and forks one fresh child per job, so that a job costs milliseconds, not seconds.

It is started as `python -m kernelgraft.evaluate.zygote`, apart from the user's process, runs no tensor operation and
does not touch a GPU: only its children do. Where the system cannot fork, each job is a new process instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kernelgraft import machine
from kernelgraft.errors import KernelgraftError

GRACE_S = 120.0
"""How long after a job's timeout the zygote may take to answer, loading modules included, before it is given up."""
MODULES = ("torch.fx.experimental.symbolic_shapes",)
"""Loaded beforehand: the first backward pass of a process imports it, half a second."""
PR_SET_PDEATHSIG = 1
"""Linux: a job does not outlive the zygote, however that ends."""
COMPILER_MODULES = ("torch._dynamo", "torch._inductor.compile_fx")
"""Loaded before the fork for Solutions that compile: seconds that each child would otherwise spend again."""
ENVIRONMENT = {
    # Forking is safe only while there is one thread.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Torch's compiler asks for a GPU at its import: through the driver, forked children could not use it any more.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


@dataclass(frozen=True)
class Exit:
    """How a job's process ended."""

    status: int
    """Exit status; the negative number of the signal that ended it."""
    timed_out: bool

    def words(self) -> str:
        """`exited with status 3`, `was ended by SIGSEGV`."""
        if self.status >= 0:
            return f"exited with status {self.status}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"was ended by signal {-self.status}"


class Zygote:
    """Runs jobs (folders, see `worker.main`) in child processes; a context manager.

    `fork=False` starts one new process per job.
    """

    def __init__(self, *, fork: bool | None = None) -> None:
        self.fork = hasattr(os, "fork") if fork is None else fork
        self.process: subprocess.Popen[bytes] | None = None
        self._ended = False
        if self.fork:
            self._start()

    def run(self, folder: Path, *, timeout_s: float, compiles: bool = False) -> Exit:
        """Run the job in `folder`; its output goes to `folder/log`. Raises KernelgraftError if the zygote is lost."""
        if not self.fork:
            return self._spawn(folder, timeout_s)
        for attempt in (1, 2):
            if self._ended:
                raise KernelgraftError("the judge was closed while it was at work")
            if self.process is None or self.process.poll() is not None:
                self._start()
            request = {"folder": str(folder), "timeout_s": timeout_s, "load": COMPILER_MODULES if compiles else ()}
            answer = self._ask(request, timeout_s + GRACE_S)
            if answer is not None:
                return Exit(answer["status"], answer["timed_out"])
            self.close()
            if attempt == 1:
                (folder / "log").unlink(missing_ok=True)
        raise KernelgraftError("the judge's process ended twice without an answer: see its messages on stderr")

    def end(self) -> None:
        """Close for good: a job that another thread waits for is not begun again."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """End the zygote and any job that still runs."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self.close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernelgraft.evaluate.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=machine.child_environment(**ENVIRONMENT),
            start_new_session=True,  # an interrupt at the keyboard is for the user's process
        )

    def _ask(self, request: dict[str, Any], patience_s: float) -> dict[str, Any] | None:
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([process.stdout], [], [], patience_s)
        line = process.stdout.readline() if ready else b""
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def _spawn(self, folder: Path, timeout_s: float) -> Exit:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kernelgraft.evaluate.worker", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=machine.child_environment(**ENVIRONMENT),
                start_new_session=True,
            )
            try:
                return Exit(process.wait(timeout_s), timed_out=False)
            except subprocess.TimeoutExpired:
                return Exit(-int(getattr(signal, "SIGKILL", signal.SIGTERM)), timed_out=True)
            finally:
                if hasattr(os, "killpg"):
                    _kill_group(process.pid)
                process.kill()
                process.wait()


# In the zygote


def serve() -> None:
    """Answer requests on stdin until it closes."""
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    import torch

    from kernelgraft.evaluate import worker

    for name in MODULES:
        importlib.import_module(name)
    child = 0

    def stop(*_: object) -> None:
        if child:
            _kill_group(child)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    gc.disable()
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        for name in request["load"]:
            importlib.import_module(name)
        assert not torch.cuda.is_initialized()
        # A collection in the child would touch, and so copy, every page of Python objects: half a second.
        gc.collect()
        gc.freeze()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            requests.close()
            answers.close()
            _job(worker.main, Path(request["folder"]))
        status, timed_out = _wait(child, request["timeout_s"])
        child = 0
        answers.write(json.dumps({"status": status, "timed_out": timed_out}).encode() + b"\n")


def _job(main: Any, folder: Path) -> None:
    """In the child: its own session, no way back to the judge, and never a return to the zygote's code."""
    status = 70
    try:
        os.setsid()
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(log)
        status = main(folder)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(child: int, timeout_s: float) -> tuple[int, bool]:
    started, pause_s = machine.clock(), 0.0005
    timed_out = False
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            _kill_group(child)  # what the job may have left running
            return os.waitstatus_to_exitcode(status), timed_out
        if machine.clock() - started > timeout_s and not timed_out:
            timed_out = True
            _kill_group(child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.01)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


__all__ = ["Exit", "Zygote", "serve"]

if __name__ == "__main__":
    serve()
