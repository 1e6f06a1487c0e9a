"""A process that runs one model for the benchmark, seen from the one that drives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from kernelgraft import errors, machine
from kernelgraft.errors import KernelgraftError

TIMEOUT_S = 1800.0
"""For one answer of a process; loading and the first run, with all compilation, are the longest."""
CLOSING_S = 20.0
"""For a process to end after its last answer."""


class Worker:
    """A fresh process with one model; see `kernelgraft.bench.worker` for what it answers."""

    def __init__(
        self,
        name: str,
        *,
        module: str = "kernelgraft.bench.worker",
        timeout_s: float = TIMEOUT_S,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._stopped: list[int] = []
        self._noise = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            text=True,
            encoding="utf-8",
            env=machine.child_environment(**(environment or {})),
        )

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises the worker's own kernelgraft error, or KernelgraftError."""
        assert self._process.stdin and self._process.stdout
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self.timeout_s, stop)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise KernelgraftError(
                f"the {self.name} process did not answer `{do}` within {self.timeout_s:.0f} s; try fewer new tokens"
            )
        if not line:
            code = self._process.wait()
            raise KernelgraftError(
                f"the {self.name} process ended with code {code} during `{do}`: {self._last_words()}"
            )
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise self._error(said["error"], said["message"], do)
        return said

    def _error(self, name: str, message: str, do: str) -> KernelgraftError:
        known = getattr(errors, name, None)
        if isinstance(known, type) and issubclass(known, KernelgraftError):
            return known(message)
        return KernelgraftError(f"the {self.name} process failed in `{do}`: {name}: {message}")

    def _last_words(self) -> str:
        self._noise.seek(0)
        lines = [line.strip() for line in self._noise.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    def stop(self) -> None:
        """Halt the process and all that it has started (a compiler's processes) until `go`."""
        if not hasattr(signal, "SIGSTOP"):
            return
        while new := [pid for pid in family(self._process.pid) if pid not in self._stopped]:
            for pid in new:
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGSTOP)
            self._stopped += new

    def go(self) -> None:
        """Let go on what `stop` halted."""
        for pid in self._stopped:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def kill(self) -> None:
        """End the process and what it has started at once: a thread that waits for its answer gets an error."""
        for pid in family(self._process.pid) if self.alive else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._stopped.clear()

    def leave(self) -> None:
        """Let the process end by itself; `close` still waits for it."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """End the process; once is enough."""
        process = self._process
        if self._noise.closed:
            return
        self.go()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._noise.close()


def family(pid: int) -> list[int]:
    """A process and its descendants, where the system tells of them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self/stat").exists() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
