"""Tuning: every configuration of every tunable compiled, checked and timed, in child processes with a time limit.

A tunable has one child at a time. Children compile side by side; on the GPU either some check results or one times. A
configuration that is wrong, raises, crashes its child or hangs is a recorded outcome, and a new child goes on with the
others. The winner is entered in a table at once, so that a run that is interrupted loses only what it had under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch

from kernelgraft import machine
from kernelgraft.cutile import tuner_worker, tuning
from kernelgraft.cutile.tuning import Gpu, Tunable
from kernelgraft.errors import MissingExtraError, UsageError
from kernelgraft.store import write_atomic

Status = Literal["ok", "wrong", "error", "crash", "timeout", "untimed"]
Progress = Callable[[str, int, int | None, str], None]

LIMIT_S = 90.0
"""How long a child may take for one configuration: above what the compiler itself is given."""
START_S = 120.0
"""How long a new child may take beyond that until it begins: it loads modules and draws inputs."""
ROUNDS = 15
GAIN = 0.01
"""A configuration takes an earlier one's place only if it is that much faster."""
MOST_JOBS = 16


@dataclass
class Outcome:
    """What became of one configuration."""

    config: dict[str, Any]
    status: Status = "untimed"
    reason: str | None = None
    us: float | None = None
    """Median time of a call."""
    spread_us: float | None = None
    """Median absolute deviation of the samples."""


@dataclass
class Result:
    """What became of one tunable."""

    kernel: str
    shape_class: str
    outcomes: list[Outcome]
    chosen: int | None = None
    """Index of the winner; None if not even the default could be timed."""

    @property
    def gain(self) -> float | None:
        """The default's time over the winner's; None without both."""
        first = self.outcomes[0].us
        if self.chosen is None or first is None:
            return None
        return first / (self.outcomes[self.chosen].us or first)

    def counts(self) -> dict[str, int]:
        """How many configurations ended in which way."""
        return dict(sorted(Counter(outcome.status for outcome in self.outcomes).items()))


@dataclass
class Run:
    """A whole run of the tuner."""

    gpu: Gpu
    table: Path
    results: list[Result]
    left: list[str]
    """Tunables that the budget did not reach."""
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """All of it for JSON, with the machine."""
        return {
            "machine": machine.read().model_dump(mode="json"),
            "time": machine.timestamp(),
            "gpu": dataclasses.asdict(self.gpu),
            "table": str(self.table),
            "seconds": self.seconds,
            "results": [dataclasses.asdict(result) | {"gain": result.gain} for result in self.results],
            "left": self.left,
        }


def choose(outcomes: Sequence[Outcome]) -> int | None:
    """The fastest of those that are right, except that an earlier one wins where it is as fast within `GAIN`."""
    best: int | None = None
    for index, outcome in enumerate(outcomes):
        if outcome.us is not None and (best is None or outcome.us < (outcomes[best].us or 0.0) * (1 - GAIN)):
            best = index
    return best


def tune(
    modules: Iterable[str],
    *,
    kernels: Collection[str] | None = None,
    device: str = "cuda",
    gpu: Gpu | None = None,
    table: Path | None = None,
    budget_s: float | None = None,
    limit_s: float = LIMIT_S,
    rounds: int = ROUNDS,
    jobs: int | None = None,
    progress: Progress | None = None,
    report: Callable[[Result], None] | None = None,
) -> Run:
    """Tune what the modules' `tunables()` offer and enter the winners in a table (default: the user's).

    First those that the table has no entry for that holds, then the others. After `budget_s` seconds no tunable is
    begun and those that are being compiled are given up; what is on the GPU is finished within its limits. `report`
    gets each result at once. UsageError without a GPU or for an unknown kernel.
    """
    begin = machine.clock()
    if gpu is None:
        if not torch.cuda.is_available():
            raise UsageError("tuning needs a CUDA device, and torch sees none: kernels use their defaults")
        gpu = tuning.gpu(torch.cuda.current_device())
    file = table or tuning.user_table(gpu)
    known = tuning.read_table(file)
    wanted = _ordered(_tunables(modules, kernels), known, gpu)
    done: list[Result] = []

    def finished(child: _Child) -> None:
        result = child.result()
        done.append(result)
        if result.chosen is not None:
            winner = result.outcomes[result.chosen]
            facts = {"us": winner.us, "default_us": result.outcomes[0].us, "outcomes": result.counts()}
            config = child.tunable.space[result.chosen]
            tuning.put_entry(known, gpu, child.tunable, config, {**facts, "time": machine.timestamp()})
            write_atomic(file, json.dumps(known, indent=1) + "\n")
        if report is not None:
            report(result)
        if progress is not None:
            progress("tune", len(done), len(wanted), summary(result))

    with tempfile.TemporaryDirectory(prefix="kernelgraft-tuning-") as folder:
        crew = _Crew(device, Path(folder), limit_s, rounds, jobs or max(1, min(MOST_JOBS, (os.cpu_count() or 2) - 1)))
        until = None if budget_s is None else begin + budget_s
        left = crew.work(wanted, finished, until)
    tuning.forget()
    order = {tunable.name: number for number, (_, tunable) in enumerate(wanted)}
    done.sort(key=lambda result: order[f"{result.kernel}/{result.shape_class}"])
    return Run(gpu, file, done, [tunable.name for _, tunable in left], machine.clock() - begin)


def summary(result: Result) -> str:
    """One result in one line."""
    parts = [f"{result.kernel}/{result.shape_class}:"]
    if result.chosen is None:
        parts.append("nothing right")
    else:
        first, best = result.outcomes[0], result.outcomes[result.chosen]
        parts.append(f"{first.us:.2f} → {best.us:.2f} µs" if first.us else f"{best.us:.2f} µs, the default fails")
    bad = [f"{count} {status}" for status, count in result.counts().items() if status not in ("ok", "untimed")]
    return " ".join([*parts, *([f"({', '.join(bad)})"] if bad else [])])


def _tunables(modules: Iterable[str], kernels: Collection[str] | None) -> list[tuple[str, Tunable]]:
    try:
        found = [(m, t) for m in modules for t in getattr(importlib.import_module(m), "tunables", list)()]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cuda":
            raise
        raise MissingExtraError("tuning needs cuda-tile: pip install 'kernelgraft[cutile]'") from error
    names = {tunable.kernel for _, tunable in found}
    for name in kernels or ():
        if name not in names:
            raise UsageError(f"kernel `{name}` has nothing to tune: choose from {', '.join(sorted(names))}")
    return [(m, t) for m, t in found if not kernels or t.kernel in kernels]


def _ordered(found: list[tuple[str, Tunable]], known: dict[str, Any], gpu: Gpu) -> list[tuple[str, Tunable]]:
    """Those without an entry that holds first, then the others, the oldest first."""

    def age(item: tuple[str, Tunable]) -> str:
        entry = known["kernels"].get(item[1].kernel)
        if entry is None or tuning.refusal(entry, gpu) is not None:
            return ""
        return str(entry["classes"].get(item[1].shape_class, {}).get("time", ""))

    return sorted(found, key=age)


STAGES = ("compile", "check", "time")


@dataclass
class _Child:
    """A tunable on its way through the stages, and the process that works on it."""

    module: str
    tunable: Tunable
    log: Path
    stage: int = 0
    working: bool = False
    pipe: Any = None
    process: Any = None
    current: int | None = None
    patience_s: float = 0.0
    """When, by the clock, it has been silent too long."""
    waiting: list[int] = field(default_factory=list)
    """Configurations that the stage has not answered yet."""
    at_start: int = 0
    """How many waited when the process was started."""
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outcomes = [Outcome(dataclasses.asdict(config)) for config in self.tunable.space]
        self.waiting = list(range(len(self.outcomes)))

    def result(self) -> Result:
        return Result(self.tunable.kernel, self.tunable.shape_class, self.outcomes, choose(self.outcomes))

    @property
    def over(self) -> bool:
        return self.stage == len(STAGES)

    def settle(self, index: int, status: Status, reason: str | None = None) -> None:
        """A configuration's end: it takes no further part."""
        self.outcomes[index].status, self.outcomes[index].reason = status, reason
        if index in self.waiting:
            self.waiting.remove(index)

    def next_stage(self) -> None:
        """On to the next stage with the configurations that are still in."""
        self.stage, self.working, self.current = self.stage + 1, False, None
        self.waiting = [i for i, outcome in enumerate(self.outcomes) if outcome.status == "untimed"]
        if not self.waiting:
            self.stage = len(STAGES)


class _Crew:
    """Starts children, gives them work in turn, listens, and ends those that are done or lost."""

    def __init__(self, device: str, folder: Path, limit_s: float, rounds: int, jobs: int) -> None:
        self.device, self.folder, self.limit_s, self.rounds, self.jobs = device, folder, limit_s, rounds, jobs
        methods = multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:  # torch is loaded once, and forked
            self.context.set_forkserver_preload([tuner_worker.__name__])
        self.children: list[_Child] = []

    def work(
        self, wanted: list[tuple[str, Tunable]], finished: Callable[[_Child], None], until: float | None
    ) -> list[tuple[str, Tunable]]:
        """All of it; gives back what was not begun."""
        left = list(wanted)
        try:
            while left or self.children:
                if until is not None and machine.clock() > until:
                    left = self._give_up() + left
                    if not self.children:
                        break
                while left and self._has_room() and (until is None or machine.clock() <= until):
                    module, tunable = left.pop(0)
                    log = self.folder / f"{len(left)}.log"
                    self.children.append(_Child(module, tunable, log))
                self._assign()
                self._listen()
                for child in [c for c in self.children if c.over]:
                    self._end(child)
                    self.children.remove(child)
                    finished(child)
        finally:
            for child in self.children:
                self._end(child)
        return left

    def _give_up(self) -> list[tuple[str, Tunable]]:
        """End the children that have not been on the GPU."""
        early = [child for child in self.children if child.stage == 0]
        for child in early:
            self._end(child)
            self.children.remove(child)
        return [(child.module, child.tunable) for child in early]

    def _has_room(self) -> bool:
        compiling = sum(child.stage == 0 for child in self.children)
        return compiling < self.jobs and len(self.children) < 2 * self.jobs

    def _assign(self) -> None:
        """Compiling needs no GPU; beside it some check, or one times."""
        idle = [child for child in self.children if not child.working and not child.over]
        on_gpu = {STAGES[child.stage] for child in self.children if child.working and not child.over}
        for child in idle:
            stage = STAGES[child.stage]
            checked = any(STAGES[c.stage] == "time" for c in idle)
            if (
                stage == "compile"
                or (stage == "time" and not on_gpu & {"check", "time"})
                or (stage == "check" and "time" not in on_gpu and not checked)
            ):
                self._request(child)
                on_gpu.add(stage)

    def _request(self, child: _Child) -> None:
        child.patience_s = machine.clock() + self.limit_s
        if child.process is None:
            self._start(child)
            child.patience_s += START_S
        assert child.pipe is not None
        child.working = True
        with contextlib.suppress(OSError):  # a child that has gone is noticed by `_listen`
            child.pipe.send((STAGES[child.stage], child.waiting))

    def _start(self, child: _Child) -> None:
        ours, theirs = self.context.Pipe()
        tunable = child.tunable
        job = tuner_worker.Job(
            child.module, tunable.kernel, tunable.shape_class, self.device, str(child.log), self.rounds
        )
        child.process = self.context.Process(target=tuner_worker.main, args=(theirs, job), daemon=True)
        child.process.start()
        theirs.close()
        child.pipe, child.at_start = ours, len(child.waiting)

    def _listen(self) -> None:
        """Take in what has been said, and notice who has gone or has been silent too long."""
        pipes: dict[Any, _Child] = {child.pipe: child for child in self.children if child.working}
        if not pipes:
            return
        nearest = min(child.patience_s for child in pipes.values()) - machine.clock()
        for pipe in wait(list(pipes), max(0.0, min(nearest, 1.0))):
            child = pipes[pipe]
            try:
                while child.working and child.pipe is not None and child.pipe.poll():
                    self._hear(child, child.pipe.recv())
            except (EOFError, OSError):
                self._lost(child, "crash", None)
        for child in pipes.values():
            if child.working and machine.clock() > child.patience_s:
                self._lost(child, "timeout", f"no answer for {self.limit_s:g} s")

    def _hear(self, child: _Child, message: tuple[str, str, int, Any]) -> None:
        word, stage, index, value = message
        child.patience_s = machine.clock() + self.limit_s
        if word == "begin":
            child.current = index
            return
        child.current = None
        if word == "end":
            child.next_stage()
        elif word == "failed":
            child.settle(index, "error", value)
        elif stage == "check" and value is not None:
            child.settle(index, "wrong", value)
        elif stage == "time":
            median = statistics.median(value)
            outcome = child.outcomes[index]
            outcome.us, outcome.spread_us = median, statistics.median(abs(v - median) for v in value)
            child.settle(index, "ok")
        else:
            child.waiting.remove(index)

    def _lost(self, child: _Child, status: Status, reason: str | None) -> None:
        """A child that died or hangs: what it had under way gets the outcome, a new child goes on with the rest."""
        culprit, stage = child.current, STAGES[child.stage]
        exit_code = self._end(child, patience_s=2.0 if reason is None else 0.0)
        said = _last_words(child.log)
        why = f"{stage}: {reason or _in_words(exit_code)}" + (f": {said}" if said else "")
        if culprit is not None:
            child.settle(culprit, status, why)
        elif len(child.waiting) == child.at_start:  # it cannot even begin, and a new one could not either
            for index in list(child.waiting):
                child.settle(index, status, why)
        child.working, child.current = False, None
        if not child.waiting:
            child.next_stage()

    def _end(self, child: _Child, patience_s: float = 0.0) -> int | None:
        """The child's process and all that it started; its exit code."""
        process, child.process = child.process, None
        if process is None:
            return None
        if child.pipe is not None:
            child.pipe.close()
            child.pipe = None
        process.join(patience_s)
        code: int | None = process.exitcode
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(10)
        return code


def _in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended without an answer"
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"


def _last_words(log: Path) -> str:
    """The last thing that a child printed; what it died of, if an abort says that above the stack."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        for mark in ("what():", "INTERNAL ASSERT", "Assertion", "Fatal Python error"):
            for line in lines:
                if mark in line:
                    return line[:200]
        return lines[-1][:200] if lines else ""
    return ""
