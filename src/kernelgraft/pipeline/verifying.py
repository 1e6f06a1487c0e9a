"""Verify many Solutions at once: several judges, each with a thread and a process of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from kernelgraft import families, machine
from kernelgraft.evaluate import Captured, Judge, JudgeOptions
from kernelgraft.families.base import Family
from kernelgraft.pipeline import verdicts
from kernelgraft.pipeline.progress import Progress, silent
from kernelgraft.pipeline.threads import threads_at_most
from kernelgraft.records import Definition, Evaluation, Solution, Status

CORES_LEFT = 2
"""On a GPU: for this process, which computes what is expected while the judges' processes compile."""
HEAVY_BYTES = 1 << 28
"""Inputs of one call above this: the oracle's float64 copies take memory, so that few of those run at a time."""
HEAVY_PART = 4
"""One in so many judges may be at such a task."""


@dataclass(frozen=True)
class Task:
    """One Solution to be judged."""

    solution: Solution
    definition: Definition
    captured: tuple[Captured, ...]
    original: Callable[..., Any] | None
    """See `Judge.verify`."""

    @property
    def heavy(self) -> bool:
        """True if one call's inputs are large."""
        calls = ([x.nbytes for x in c.inputs if isinstance(x, torch.Tensor)] for c in self.captured)
        return max(map(sum, calls), default=0) > HEAVY_BYTES

    @property
    def rank(self) -> tuple[bool, bool]:
        """Those that take long come first: large inputs, then kernels that are compiled and interpreted."""
        compiled = self.solution.spec.language != "python" or self.solution.meta.uses_compiler
        return (not self.heavy, not compiled)


def default_jobs(device: str) -> int:
    """How many judges this machine has room for: its cores; beside a GPU two fewer."""
    cores = machine.read().cores
    return max(1, cores - CORES_LEFT if device.startswith("cuda") else cores)


class Judges:
    """Judges that verify in parallel; a context manager that owns their processes.

    `jobs`: how many (None: `default_jobs`). `fresh`: earlier verdicts are not used. `early` starts all processes now,
    so that they are ready when the first Solution comes; otherwise each is started when it is needed.
    """

    def __init__(
        self,
        options: JudgeOptions | None = None,
        *,
        device: str = "cpu",
        jobs: int | None = None,
        fresh: bool = False,
        early: bool = False,
        family: Callable[[str], Family] = families.get,
    ) -> None:
        self.options = options or JudgeOptions()
        self.jobs = jobs if jobs is not None else default_jobs(device)
        self.fresh = fresh
        self._family = family
        self._idle: queue.SimpleQueue[Judge] = queue.SimpleQueue()
        self._made: list[Judge] = []
        self._closed = False
        self._lock = threading.Lock()
        if early:
            for _ in range(self.jobs):
                self._idle.put(self._make())

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the child processes."""
        with self._lock:
            self._closed = True
            made, self._made = self._made, []
        for judge in made:
            judge.close()

    def verify(self, tasks: Sequence[Task], *, progress: Progress = silent) -> list[Evaluation]:
        """The verdicts, in the order of the tasks; progress tells of each Solution that is done."""
        names = [
            verdicts.key(t.solution, t.definition, t.captured, self.options, t.original is not None) for t in tasks
        ]
        found: dict[int, Evaluation] = {}
        if not self.fresh:
            found = {i: e for i, name in enumerate(names) if (e := verdicts.find(name)) is not None}
        left = sorted((i for i in range(len(tasks)) if i not in found), key=lambda i: tasks[i].rank)
        earlier = f", {len(found)} known from before" if found else ""
        progress("verify", len(found), len(tasks), f"{min(self.jobs, len(left))} at a time{earlier}")
        for definition in {tasks[i].definition.name: tasks[i].definition for i in left}.values():
            # Traces an operator graph, for which torch changes its own functions: not while other threads use them.
            self._family(definition.meta.family).reduced(definition)
        with threads_at_most(1), closing(self._started(tasks, left)) as results:
            for index, evaluation in results:
                found[index] = evaluation
                verdicts.keep(names[index], evaluation)
                progress("verify", len(found), len(tasks), said(evaluation))
        return [found[i] for i in range(len(tasks))]

    def _started(self, tasks: Sequence[Task], order: Sequence[int]) -> Generator[tuple[int, Evaluation]]:
        """Verdicts as they come, with the task's index."""
        ready: queue.SimpleQueue[tuple[int, Evaluation | BaseException]] = queue.SimpleQueue()
        waiting = _Waiting(tasks, list(order), heavy_at_most=max(1, self.jobs // HEAVY_PART))

        def work() -> None:
            while (index := waiting.take()) is not None:
                try:
                    ready.put((index, self._judged(tasks[index])))
                except BaseException as error:  # it is raised again in the thread that waits for the verdicts
                    ready.put((index, error))
                    return
                finally:
                    waiting.done(index)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.jobs, len(order)))]
        for thread in threads:
            thread.start()
        finished = 0
        try:
            while finished < len(order):
                index, given = ready.get()
                if isinstance(given, BaseException):
                    raise given
                finished += 1
                yield index, given
        finally:
            if finished < len(order):
                waiting.empty()
                self.close()  # ends what still runs, so that its thread ends too
            for thread in threads:
                thread.join()

    def _judged(self, task: Task) -> Evaluation:
        try:
            judge = self._idle.get_nowait()
        except queue.Empty:
            judge = self._make()
        try:
            return judge.verify(task.solution, task.definition, task.captured, original=task.original)
        finally:
            self._idle.put(judge)

    def _make(self) -> Judge:
        with self._lock:
            if self._closed:
                raise RuntimeError("the judges are closed")
            judge = Judge(self.options, family=self._family)
            self._made.append(judge)
            return judge


class _Waiting:
    """Tasks that nobody has begun; of heavy ones only so many run at once."""

    def __init__(self, tasks: Sequence[Task], order: list[int], *, heavy_at_most: int) -> None:
        self._order, self._room, self._lock = order, heavy_at_most, threading.Lock()
        self._heavy = {i for i in order if tasks[i].heavy}

    def take(self) -> int | None:
        """The next task; None if nothing is left that may begin (whoever ends a heavy task takes the next)."""
        with self._lock:
            for place, index in enumerate(self._order):
                if index not in self._heavy or self._room > 0:
                    self._room -= index in self._heavy
                    return self._order.pop(place)
            return None

    def done(self, index: int) -> None:
        """A task has ended."""
        with self._lock:
            self._room += index in self._heavy

    def empty(self) -> None:
        """Nothing more is to be begun."""
        with self._lock:
            self._order.clear()


def said(evaluation: Evaluation) -> str:
    """One line on a verdict."""
    seconds = "" if evaluation.seconds is None else f" ({evaluation.seconds:.1f} s)"
    verdict = "is right" if evaluation.status is Status.PASSED else evaluation.reason or evaluation.status.value
    return f"{evaluation.solution} {verdict}{seconds}"
