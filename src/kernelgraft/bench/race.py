"""Contenders of one model, each in a fresh process, of which only one works at a time while they are measured.

A contender that fails is left out from then on, with the reason; only those called essential end the race.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kernelgraft import machine
from kernelgraft.bench import figures, stats
from kernelgraft.bench.names import COMPILED, GRAFTED, ORIGINAL
from kernelgraft.bench.process import TIMEOUT_S, Worker
from kernelgraft.bench.result import Cache, Outputs, PatchCalls, Proof, Side
from kernelgraft.errors import KernelgraftError, UnreachedError

TURN_S = 0.5
"""A pair repeats short runs, still in turns, until each model has run about this long, so that noise averages out."""
LARGEST_REPEATS = 20
LOOK_S = 0.25
"""How long to look whether the machine is quiet before the first round."""
QUIET_CORES = 1.0
PATIENCE_S = 4.0
"""How long to wait on a GPU machine for other work to end: the host is what most decode steps wait for."""
COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
"""The variable by which torch's compiler is told how many processes to start."""
LOOK_AGAIN_S = 0.1

Answer = dict[str, Any]


@dataclass(frozen=True)
class Leg:
    """One setting in which contenders are measured."""

    batch: int
    prompt_tokens: int | None
    """Random ids before the prompt make it that long; None: the prompt alone."""
    new_tokens: int
    cache: Cache


@dataclass
class Lap:
    """What was measured in a leg."""

    leg: Leg
    prompt_tokens: int
    repeats: int
    warm: dict[str, list[Answer]]
    runs: dict[str, list[list[Answer]]]
    """Per contender and pair, the answers of its repeats."""
    busy_cores: float | None = None
    """By what runs beside the contenders just before the first round; None if it cannot be told."""
    rows: list[int] = field(default_factory=list)
    """Sequences whose logits were compared."""
    logits: dict[str, Path] = field(default_factory=dict)

    def tokens(self, name: str) -> figures.Array:
        """Of the last run, [batch, new tokens]."""
        return np.asarray(self.runs[name][-1][-1]["tokens"])


@dataclass
class Early:
    """A contender that warms up for a leg while others do what they have to."""

    leg: Leg
    done: Future[list[Answer]]
    began: float
    limit_s: float
    stopped_s: float = 0.0
    """How long it was halted, so that others could be measured."""
    why: str | None = None
    """Why it was ended."""

    @property
    def seconds(self) -> float:
        """For which it has been at work."""
        return machine.clock() - self.began - self.stopped_s

    def __str__(self) -> str:
        halted = f", and was halted for {self.stopped_s:.0f} s" if self.stopped_s else ""
        return f"its warm-up (compilation) has taken {self.seconds:.0f} s{halted}"


class Race:
    """The processes of all contenders; a context manager that ends them."""

    def __init__(
        self,
        names: Sequence[str],
        order: dict[str, Any],
        graft: Path | None = None,
        *,
        essential: Iterable[str] = (ORIGINAL,),
        keep_failed: bool = False,
        timeout_s: float = TIMEOUT_S,
        step: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.names = list(names)
        self.failures: dict[str, str] = {}
        self.started: dict[str, Answer] = {}
        self.order, self._graft = order, graft
        self._essential = set(essential)
        self._keep_failed = keep_failed
        self._together = str(order["device"]).startswith("cuda")
        self._step = step
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kernelgraft-bench-")))
        self._workers: dict[str, Worker] = {}
        self._timeout_s = timeout_s
        self._early: dict[str, Early] = {}
        self._warmed: dict[str, tuple[Leg, list[Answer]]] = {}
        self._lost: set[str] = set()
        """Contenders whose early warm-up failed: they are not tried again."""
        self._threads = self._stack.enter_context(ThreadPoolExecutor(max(len(self.names), 1)))
        # On a GPU all begin to import at once; on a CPU they would only take each other's time.
        for name in self.names if self._together else ():
            self._worker(name)

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self._early:  # a thread waits for its answer
            self._workers[name].kill()
        for worker in self._workers.values():  # all at once
            worker.leave()
        self._stack.close()

    def limit(self, timeout_s: float) -> None:
        """Wait at most that long for each answer from now on."""
        self._timeout_s = timeout_s
        for name, worker in self._workers.items():
            if name not in self._early:
                worker.timeout_s = timeout_s

    @property
    def active(self) -> list[str]:
        """Contenders that have not failed and are not away, the original first."""
        return [name for name in self.names if name not in self.failures and name not in self._early]

    @property
    def away(self) -> dict[str, str]:
        """Contenders that still warm up by themselves, with how long that has taken."""
        return {name: str(early) for name, early in self._early.items()}

    def ask(self, name: str, do: str, **order: Any) -> Answer | None:
        """One command; None if the contender failed, now or before. Raises KernelgraftError for an essential one."""
        if name in self.failures:
            return None
        try:
            return self._worker(name).ask(do, **order)
        except KernelgraftError as error:
            self.fail(name, error)
            return None

    def fail(self, name: str, error: KernelgraftError) -> None:
        """Leave a contender out from now on; raises the error if the race is nothing without it."""
        if name in self._essential:
            raise error
        self.failures[name] = str(error)
        if not self._keep_failed:
            self._workers[name].close()

    def readmit(self) -> None:
        """Let contenders that failed in the last leg, not in loading, take part again (with `keep_failed`)."""
        for name in [n for n in self.failures if n in self.started and self._workers[n].alive]:
            if name not in self._lost:
                del self.failures[name]

    def start(
        self, early: Mapping[str, Leg] | None = None, *, warmup_runs: int = 1, limit_s: float = TIMEOUT_S
    ) -> None:
        """Load every model: all at once on a GPU.

        Those named in `early` go on at once, in `warmup_runs` runs of a leg, and take part in nothing until that is
        over (`away`, `collect`), at most `limit_s` of work.
        """
        ahead = dict(early or {})

        def one(name: str) -> Answer | None:
            graft = str(self._graft) if name == GRAFTED and self._graft is not None else None
            said = self.ask(name, "start", contender=kind(name), graft=graft, **self.order)
            if said is not None and name in ahead:
                self._go_ahead(name, ahead[name], warmup_runs, limit_s)
            return said

        if self._together:
            self._step("loading all models")
        for name, said in self._each(one, self.names, "loading the {} model"):
            if said is not None:
                self.started[name] = said
        for name in list(self.started):
            if self.started[name]["weights"] != self.started[ORIGINAL]["weights"]:
                del self.started[name]
                if self._early.pop(name, None) is not None:
                    self._workers[name].kill()
                self.fail(name, KernelgraftError(f"the {name} process has other weights than the original's"))

    def configure(self, name: str, leg: Leg) -> Answer | None:
        """Put a contender into a setting; one that is in it already keeps what it has compiled."""
        return self.ask(name, "configure", **asdict(leg))

    def _go_ahead(self, name: str, leg: Leg, runs: int, limit_s: float) -> None:
        worker = self._worker(name)
        worker.timeout_s = TIMEOUT_S  # `collect` ends it: its time stands still while it is halted

        def warm() -> list[Answer]:
            worker.ask("configure", **asdict(leg))
            return [worker.ask("generate") for _ in range(runs)]

        self._early[name] = Early(leg, self._threads.submit(warm), machine.clock(), limit_s)

    def collect(self) -> None:
        """Let those take part again that have warmed up by now; those that take too long, or could not, have failed."""
        for name, early in list(self._early.items()):
            if not early.done.done() and early.seconds > early.limit_s:
                self._end(name, f"the limit is {early.limit_s:.0f} s")
            if not early.done.done():
                continue
            del self._early[name]
            self._workers[name].timeout_s = self._timeout_s
            try:
                self._warmed[name] = early.leg, early.done.result()
            except KernelgraftError as error:
                self._lost.add(name)
                self.fail(name, KernelgraftError(early.why or f"{error} ({early})"))

    def wait_for(self, name: str, until: float) -> None:
        """Wait for one that is away, until a moment of `machine.clock`; it has failed if that is not enough."""
        while name in self._early and machine.clock() < until:
            wait([self._early[name].done], LOOK_AGAIN_S)
            self.collect()
        if name in self._early:
            self._end(name, "no time was left for more")
            self.collect()

    def _end(self, name: str, reason: str) -> None:
        early = self._early[name]
        early.why = f"{early}: {reason}"
        self._workers[name].kill()
        wait([early.done])

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Halt those that are away meanwhile: nothing but what is measured is at work."""
        halted = {name: early for name, early in self._early.items() if not early.done.done()}
        began = machine.clock()
        for name in halted:
            self._workers[name].stop()
        try:
            yield
        finally:
            for name, early in halted.items():
                self._workers[name].go()
                early.stopped_s += machine.clock() - began

    def measure(
        self,
        leg: Leg,
        *,
        pairs: int,
        warmup_runs: int,
        deadline: float | None = None,
        names: Sequence[str] = (),
        warmup_limit_s: float | None = None,
    ) -> Lap:
        """Warm every contender up, then let all run in turns, `pairs` rounds; `names`: only these.

        One that is away takes part if it has warmed up for this leg before the rounds begin. After `deadline` (of
        `machine.clock`) no further round begins once there is one. A contender whose warm-up gives no answer within
        `warmup_limit_s` has failed.
        """
        self.collect()
        wanted = [name for name in self.active if not names or name in names]
        set_up = dict(self._each(lambda name: self.configure(name, leg), wanted))
        warm = self._warm([name for name in wanted if name in self.active], warmup_runs, leg, warmup_limit_s)
        self.collect()
        for name in self.active:
            if name not in wanted and (not names or name in names) and (found := self._warmed_for(name, leg)):
                warm[name] = found
        with self.undisturbed():
            busy = self._quiet()
            repeats = repeats_for(warm[ORIGINAL][-1]["stamps_s"][-1])
            runs = self._rounds([name for name in self.active if name in warm], pairs, repeats, deadline)
        first = set_up[ORIGINAL]
        assert first is not None
        return Lap(leg, first["prompt_tokens"], repeats, warm, runs, busy)

    def _rounds(
        self, names: Sequence[str], pairs: int, repeats: int, deadline: float | None
    ) -> dict[str, list[list[Answer]]]:
        runs: dict[str, list[list[Answer]]] = {name: [] for name in names}
        for pair in range(pairs):
            if pair and deadline is not None and machine.clock() > deadline:
                break
            self._step(f"pair {pair + 1} of {pairs}")
            said: dict[str, list[Answer]] = {name: [] for name in runs}
            for repeat in range(repeats):
                for name in turns(list(runs), pair + repeat):
                    answer = self.ask(name, "generate")
                    if answer is None:
                        runs.pop(name)
                    else:
                        said[name].append(answer)
            for name in runs:
                runs[name].append(said[name])
        return runs

    def _warmed_for(self, name: str, leg: Leg) -> list[Answer]:
        """The runs by which a contender has warmed up for a leg by itself, if it has; told once."""
        of, answers = self._warmed.pop(name, (leg, []))
        return answers if of == leg else []

    def _quiet(self) -> float | None:
        """How many cores are busy with other things; on a GPU machine after waiting a little for them to end."""
        until = machine.clock() + (PATIENCE_S if self._together else 0)
        while (busy := machine.busy_cores(LOOK_S)) is not None and busy > QUIET_CORES and machine.clock() < until:
            self._step(f"waiting: {busy:.1f} cores are busy with something else")
        return busy

    def _warm(self, names: Sequence[str], runs: int, leg: Leg, limit_s: float | None = None) -> dict[str, list[Answer]]:
        """Run each contender `runs` times, less those that it has made by itself: all compilation and tuning.

        The compiler's own contender compiles, on the CPU, while the others warm up; tuning is not disturbed by tuning.
        """
        warm = {name: self._warmed_for(name, leg) for name in names}

        def once(name: str) -> None:
            worker = self._workers[name]
            if limit_s is not None and name not in self._essential:
                worker.timeout_s = min(limit_s, self._timeout_s)
            answer = self.ask(name, "generate")
            worker.timeout_s = self._timeout_s
            if answer is None:
                warm.pop(name)
            else:
                warm[name].append(answer)

        due = {name: max(runs - len(warm[name]), 0) for name in names}
        compiling = [name for name in names if kind(name) == COMPILED and due[name]] if self._together else []
        with ThreadPoolExecutor(len(compiling) + 1) as pool:
            early: list[Future[None]] = [pool.submit(once, name) for name in compiling]
            for run in range(runs):
                for name in [n for n in names if n in self.active and run < due[n]]:
                    self._step(f"warming the {name} model up")
                    if run or name not in compiling:
                        once(name)
                for done in early:
                    done.result()
        return warm

    def trace(self, name: str, regime: str, graft: Path | None) -> Answer:
        """Trace a contender; a failure is raised and does not leave it out. `graft`: its sites are marked in the
        original."""
        marked = str(graft) if graft is not None and name == ORIGINAL else None
        return self._worker(name).ask("trace", regime=regime, graft=marked)

    def side(self, lap: Lap, name: str) -> Side:
        """The figures of a contender."""
        return figures.side(lap.runs[name], lap.leg.batch, self.started[name]["load_s"], lap.warm[name])

    def proof(self, name: str) -> tuple[Proof, tuple[str, ...]] | None:
        """What a process runs; None if it failed. Raises KernelgraftError if the original's is not the original."""
        said = self.ask(name, "proof")
        if said is None:
            return None
        proof = Proof.model_validate(said["proof"])
        if name == ORIGINAL and (not proof.clean or said["evidence"]):
            raise KernelgraftError(
                f"the {name} process does not run the model's own code: {proof!r} {said['evidence']}"
            )
        return proof, tuple(said["evidence"])

    def calls(self) -> tuple[PatchCalls, ...]:
        """Calls through the graft's patches; raises UnreachedError, or notes it, if one served none."""
        counted = self.ask(GRAFTED, "counters")
        if counted is None:
            return ()
        calls = tuple(PatchCalls.model_validate(c) for c in counted["calls"])
        if counted["unreached"]:
            self.fail(GRAFTED, UnreachedError(_unreached(counted["unreached"], calls)))
        return calls

    def compare(self, lap: Lap, steps: int | None = None) -> dict[str, Outputs]:
        """Each contender's tokens and, with the original's tokens forced, logits against the original's.

        The processes must still be in the lap's setting. `steps`: logits of so many at most.
        """
        names = [name for name in self.active if name in lap.runs]
        tokens = {name: lap.tokens(name) for name in names}
        lap.rows, needed = figures.telling_rows(tokens, ORIGINAL)
        for name in names:
            if (said := self._logits(lap, name, name, steps, needed)) is not None:
                lap.rows = said["rows"]
        base = self._read(lap, ORIGINAL)
        return {
            name: figures.compare_outputs(
                tokens[ORIGINAL], tokens[name], base, base if name == ORIGINAL else self._read(lap, name), lap.rows
            )
            for name in names
            if name in self.active
        }

    def float32(self, lap: Lap, steps: int | None = None) -> dict[str, float | None]:
        """Each contender's logits of `compare` against a float32 copy of the original, where there is room for one.

        The last thing that is asked in a race: the original's process runs another model then, and the others are
        ended to make room for it.
        """
        for name, worker in self._workers.items():
            if name != ORIGINAL:
                worker.leave()
        for name, worker in self._workers.items():
            if name != ORIGINAL:
                worker.close()
        made = self.ask(ORIGINAL, "float32")
        if made is None or not made["made"]:
            return {}
        self.configure(ORIGINAL, lap.leg)
        if self._logits(lap, ORIGINAL, "float32", steps, len(lap.rows)) is None:
            return {}
        wanted = self._read(lap, "float32")
        return {name: stats.rel_rmse(self._read(lap, name), wanted) for name in lap.logits if name != "float32"}

    def _logits(self, lap: Lap, name: str, label: str, steps: int | None, needed: int) -> Answer | None:
        file = self._folder / f"{id(lap)}-{label}.safetensors"
        tokens = lap.tokens(ORIGINAL).tolist()
        wanted = {"rows": lap.rows, "needed": needed, "steps": steps}
        said = self.ask(name, "logits", tokens=tokens, file=str(file), **wanted)
        if said is not None:
            lap.logits[label] = file
        return said

    def _read(self, lap: Lap, label: str) -> figures.Array:
        found: figures.Array = load_file(lap.logits[label])["logits"]
        return found

    def _worker(self, name: str) -> Worker:
        if name not in self._workers:
            worker = Worker(name, timeout_s=self._timeout_s, environment=self._environment(name))
            self._workers[name] = worker
            self._stack.callback(worker.close)
        return self._workers[name]

    def _environment(self, name: str) -> dict[str, str]:
        """Of a process: several compile at once, and others warm up beside them."""
        if kind(name) != COMPILED or not self._together or COMPILERS in os.environ:
            return {}
        return {COMPILERS: str(min(max((os.cpu_count() or 1) // 3, 1), 8))}

    def _each(
        self, one: Callable[[str], Answer | None], names: Sequence[str], text: str = ""
    ) -> list[tuple[str, Answer | None]]:
        if self._together:
            with ThreadPoolExecutor(max(len(names), 1)) as pool:
                return list(zip(names, pool.map(one, names), strict=True))
        answers = []
        for name in names:
            if text:
                self._step(text.format(name))
            answers.append((name, one(name)))
        return answers


def kind(name: str) -> str:
    """Which contender a name means: `static-compile:2` is a second process of `static-compile`."""
    return name.partition(":")[0]


def turns(names: Sequence[str], turn: int) -> list[str]:
    """Who runs first: A B, then B A, and so on, so that a drift of the machine favours neither."""
    return list(names) if turn % 2 == 0 else list(reversed(names))


def repeats_for(run_s: float) -> int:
    """How many runs of that length each model makes in one pair."""
    return min(max(math.ceil(TURN_S / run_s), 1), LARGEST_REPEATS)


def _unreached(labels: Sequence[str], calls: Sequence[PatchCalls]) -> str:
    reasons = dict.fromkeys(reason for c in calls if not any(c.calls.values()) for reason in c.fallbacks)
    why = f" (fell back: {', '.join(reasons)})" if reasons else ""
    return f"no call went through `{'`, `'.join(labels)}`{why}: run `kernelgraft integrate` again for this setting"
