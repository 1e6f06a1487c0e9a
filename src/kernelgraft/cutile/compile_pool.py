"""Child processes that compile: each is asked one thing at a time, under a limit, and is replaced when it ends."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kernelgraft import machine
from kernelgraft.errors import KernelgraftError

GRACE_S = 10.0
"""How long after the limit a child may take to say that the compiler did not keep it."""
START_S = 180.0
"""How long a child may take to load torch."""

Progress = Callable[[str, int, int | None, str], None]
"""`progress(stage, done, total, text)`."""
T = TypeVar("T")


def silent(stage: str, done: int, total: int | None, text: str) -> None:
    """Say nothing."""


class Child:
    """One child process, started when it is first asked, and again after it ended."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._scratch = folder / "scratch"
        self._log = folder / "log"
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._scratch.mkdir(parents=True)

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
        """The answer; or None and how the process ended, None if it had to be ended because time was up."""
        process = self._process or self._start()
        assert process.stdin is not None
        line: bytes | None = b""
        with suppress(BrokenPipeError, ValueError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = _line(process, self._limit_s + GRACE_S)
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer, None
        ended = None if line is None else self._last_words(process)
        self._end()
        return None, ended

    def close(self) -> None:
        """End the process and all that it started; who waits for its answer gets none."""
        self._closed = True
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise KernelgraftError("the compilation was given up")
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kernelgraft.cutile.compile_worker", str(self._scratch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=machine.child_environment(
                    CUDA_TILE_CACHE_DIR="off",
                    CUDA_TILE_TEMP_DIR=str(self._scratch),
                    CUDA_TILE_COMPILER_TIMEOUT_SEC=str(self._limit_s),
                    OMP_NUM_THREADS="1",
                ),
                start_new_session=True,  # so that tileiras and what it starts can be ended with it
            )
        self._process = process
        if not _line(process, START_S):
            said = self._last_words(process)
            self._end()
            raise KernelgraftError(f"`kernelgraft.cutile.compile_worker` did not start: it {said}")
        return process

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        try:
            status = process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its output and went on"
        how = f"exited with status {status}"
        if status < 0:
            named = {int(s): s.name for s in signal.Signals}
            how = f"was ended by {named.get(-status, f'signal {-status}')}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{how}: {lines[-1][:300]}" if lines else how

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()


def _line(process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
    """The next line that a process writes: empty if it ended, None if it took too long."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if ready else None


class Pool:
    """Some children, and a thread for each that asks it; a context manager that leaves no process behind."""

    def __init__(self, count: int, folder: Path, limit_s: float) -> None:
        self._children = [Child(folder / str(number), limit_s) for number in range(count)]
        self._idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(count)

    def map(
        self,
        function: Callable[[Child, T], dict[str, Any]],
        jobs: Sequence[T],
        stage: str,
        name: Callable[[T], str],
        progress: Progress,
    ) -> list[dict[str, Any]]:
        """What the function gives for each job, in their order."""

        def run(job: T) -> dict[str, Any]:
            child = self._idle.get()
            try:
                return function(child, job)
            finally:
                self._idle.put(child)

        futures = {self._threads.submit(run, job): job for job in jobs}
        for done, future in enumerate(as_completed(futures), 1):
            progress(stage, done, len(jobs), name(futures[future]))
        return [future.result() for future in futures]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()
        self._threads.shutdown(wait=True)
