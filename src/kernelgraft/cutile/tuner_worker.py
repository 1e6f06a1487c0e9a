"""What a tuner's child process does for one tunable: compile configurations, check their results, time them.

It answers each request through its pipe and says before every configuration which one it begins, so that the parent
knows whom to blame for a crash or a hang. After an error that may have spoilt the GPU's context it ends itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import io
import itertools
import math
import os
import random
import signal
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kernelgraft import machine
from kernelgraft.cutile.tuning import Tunable

PR_SET_PDEATHSIG = 1
COLD_BYTES = 256e6
"""Input sets are drawn until together they are that large, beyond any cache."""
SETS = (2, 16)
"""Fewest and most of them; those of small inputs stay in the cache, as a model's do."""
QUICK_ROUNDS = 3
TIMED_US = 20_000.0
"""Rounds go on until each configuration has been timed that long altogether: short calls need more of them."""
MOST_ROUNDS = 100
CLOSE = 1.25
"""Configurations that were that many times slower than the best in the quick rounds are not timed further."""
REPEATS = 3
"""How often a configuration's result is checked on each of the first two input sets: a race may show only once."""
REPLAY_US = 1500.0
"""About how long one sample takes."""
COMPILER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """Which tunable a child works on, and how."""

    module: str
    kernel: str
    shape_class: str
    device: str
    log: str
    rounds: int


def find(module: str, kernel: str, shape_class: str) -> Tunable:
    """A module's tunable by name."""
    for tunable in importlib.import_module(module).tunables():
        if (tunable.kernel, tunable.shape_class) == (kernel, shape_class):
            return tunable
    raise LookupError(f"`{module}` has no tunable `{kernel}/{shape_class}`")


def main(pipe: Connection, job: Job) -> None:
    """Serve requests (stage, indices) until the parent closes the pipe or says None."""
    _apart(job.log)
    bench = _Bench(pipe, find(job.module, job.kernel, job.shape_class), job.device, job.rounds)
    stages: dict[str, Callable[[list[int]], None]] = {
        "compile": bench.compile,
        "check": bench.check,
        "time": bench.time,
    }
    with contextlib.suppress(EOFError), torch.no_grad(), _compiler_timeout():
        while (request := pipe.recv()) is not None:
            stage, indices = request
            stages[stage](indices)
            pipe.send(("end", stage, None, None))


def _apart(log: str) -> None:
    """A process group of its own, which ends with its parent, and what libraries print in a file."""
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target in (1, 2):
        os.dup2(handle, target)
    os.close(handle)
    os.environ["CUDA_TILE_TEMP_DIR"] = os.path.dirname(log)  # which is removed, however this process ends


@contextlib.contextmanager
def _compiler_timeout() -> Iterator[None]:
    """cuTile's compiler, if there is one, is ended after a while: with its own message, and without this process."""
    try:
        import cuda.tile as ct
    except ModuleNotFoundError:
        yield
        return
    with ct.compiler_timeout(COMPILER_TIMEOUT_S):
        yield


class _Bench:
    """The stages; each tells (`begin`, stage, index, None) and (`done`, stage, index, result)."""

    def __init__(self, pipe: Connection, tunable: Tunable, device: str, rounds: int) -> None:
        self.pipe, self.tunable, self.device, self.rounds = pipe, tunable, device, rounds
        self.sets: list[tuple[Any, ...]] = []

    def inputs(self, count: int) -> list[tuple[Any, ...]]:
        """At least `count` input sets."""
        while len(self.sets) < count:
            self.sets.append(tuple(self.tunable.make(self.device, len(self.sets))))
        return self.sets

    def compile(self, indices: list[int]) -> None:
        """Fill the compiler's cache on disk; nothing is launched. What cannot be compiled fails here."""
        if self.device == "cpu":
            return
        inputs = self.inputs(1)[0]
        with _compiling():
            for index in indices:
                self._each("compile", index, functools.partial(self._compiled, index, inputs))

    def _compiled(self, index: int, inputs: Any) -> None:
        self._call(index, *inputs)

    def check(self, indices: list[int]) -> None:
        """Compare with what is expected; the result is why it is wrong, or None."""
        sets = self.inputs(2)[:2]
        expected = [_as_tuple(self.tunable.expected(*inputs)) for inputs in sets]
        before = [tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs) for inputs in sets]
        for index in indices:
            self._each("check", index, functools.partial(self._checked, index, sets, before, expected))

    def _checked(self, index: int, sets: Any, before: Any, expected: Any) -> str | None:
        for inputs, kept, wanted in zip(sets, before, expected, strict=True):
            for _ in range(REPEATS):
                with _poisoned():
                    found = _as_tuple(self._call(index, *inputs))
                    self._synchronize()
                if (reason := difference(found, wanted, self.tunable.roundings)) is not None:
                    return reason
            for x, y in zip(inputs, kept, strict=True):
                if isinstance(x, torch.Tensor) and not torch.equal(x, y):
                    return "changes its inputs"
        return None

    def time(self, indices: list[int]) -> None:
        """Samples in µs for each configuration, in rounds that take all in turn."""
        size = sum(x.numel() * x.element_size() for x in self.inputs(1)[0] if isinstance(x, torch.Tensor))
        count = max(SETS[0], min(SETS[1], math.ceil(COLD_BYTES / max(size, 1))))
        sets = self.inputs(count)
        timers: dict[int, Callable[[], float]] = {}
        for index in indices:
            self._say("begin", "time", index)
            try:
                timers[index] = _timer(self.device, functools.partial(self._call, index), sets)
            except Exception as error:  # what a configuration raises is its result
                self._failed("time", index, error)
        samples: dict[int, list[float]] = {index: [] for index in timers}
        left = self._rounds(QUICK_ROUNDS, timers, samples, 0.0)
        medians = {index: statistics.median(samples[index]) for index in left}
        best = min(medians.values(), default=0.0)
        close = {index: timers[index] for index in left if medians[index] <= CLOSE * best or index == indices[0]}
        kept = self._rounds(self.rounds, close, samples, TIMED_US * len(close))
        for index in left:
            if index in kept or index not in close:
                self.pipe.send(("done", "time", index, samples[index]))

    def _rounds(
        self, count: int, timers: dict[int, Callable[[], float]], samples: dict[int, list[float]], at_least_us: float
    ) -> list[int]:
        """At least `count` rounds and that much time; gives the configurations."""
        order = list(timers)
        shuffle = random.Random(0).shuffle
        started = machine.clock()
        for done in range(max(count, MOST_ROUNDS)):
            if done >= count and (machine.clock() - started) * 1e6 >= at_least_us:
                break
            shuffle(order)
            for index in list(order):
                self._say("begin", "time", index)
                try:
                    samples[index].append(timers[index]())
                except Exception as error:  # what a configuration raises is its result
                    order.remove(index)
                    self._failed("time", index, error)
        return sorted(order)

    def _each(self, stage: str, index: int, work: Callable[[], str | None]) -> None:
        self._say("begin", stage, index)
        try:
            reason = work()
        except Exception as error:  # what a configuration raises is its result
            self._failed(stage, index, error)
        else:
            self.pipe.send(("done", stage, index, reason))

    def _failed(self, stage: str, index: int, error: Exception) -> None:
        """Tell what was raised; if the device answers no more, end: the parent goes on with a new child."""
        self.pipe.send(("failed", stage, index, one_line(error)))
        try:
            self._synchronize()
        except Exception as spoilt:
            print(one_line(spoilt), file=sys.stderr, flush=True)
            os._exit(3)

    def _say(self, word: str, stage: str, index: int) -> None:
        self.pipe.send((word, stage, index, None))

    def _call(self, index: int, *inputs: Any) -> Any:
        return self.tunable.run(self.tunable.space[index], *inputs)

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def _as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], roundings: float) -> str | None:
    """Why results are not those expected; None if they are.

    Floats may be `roundings` roundings of their own dtype away, of their size or of the tensor's root mean square,
    whichever adds up to more; everything else is equal.
    """
    if len(found) != len(expected):
        return f"gives {len(found)} results instead of {len(expected)}"
    for number, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        where = f"result {number}: " if len(expected) > 1 else ""
        if actual.shape != wanted.shape:
            return f"{where}shape {tuple(actual.shape)} instead of {tuple(wanted.shape)}"
        if not actual.dtype.is_floating_point:
            if not torch.equal(actual, wanted.to(actual.dtype)):
                return f"{where}{int((actual != wanted).sum())} of {actual.numel()} differ"
            continue
        if not actual.numel():
            continue
        wide, goal = actual.double(), wanted.double()
        rounding = torch.finfo(actual.dtype).eps / 2
        allowed = (
            roundings * rounding * (goal.abs() + goal.pow(2).mean().sqrt()).clamp_min(torch.finfo(actual.dtype).tiny)
        )
        ratio = torch.where(wide == goal, 0.0, (wide - goal).abs() / allowed).nan_to_num(math.inf, math.inf)
        if float(ratio.max()) > 1:
            return (
                f"{where}{float(ratio.max()):.3g} times the allowed error, {int((ratio > 1).sum())} of {ratio.numel()}"
            )
    return None


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """Inside, new tensors are full of NaN (integers: their largest value): what a kernel does not write shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Inside, a launch compiles its kernel into cuTile's cache on disk and does nothing else."""
    import cuda.tile as ct
    from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

    from kernelgraft.cutile import plans

    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())

    def launch(stream: Any, grid: Any, kernel: Any, args: tuple[Any, ...], /, **_: Any) -> None:
        signature = KernelSignature.from_kernel_args(kernel, args, CallingConvention.cutile_python_v2())
        export_kernel(kernel, [signature], io.BytesIO(), gpu_code=capability, output_format="cubin")

    # Launch plans keep a `ct.launch` of their own.
    originals, ct.launch, plans._launch = (ct.launch, plans._launch), launch, launch
    try:
        yield
    finally:
        ct.launch, plans._launch = originals


# Not `cuda.tile.tune.exhaustive_search`: it takes one kernel, one grid and its arguments, where a launcher of ours may
# launch twice or pad its inputs; it does not look at results; it compiles and times in the caller's process (only the
# first launch of a configuration may go to a child), so that a fault ends the search; and it times single launches
# between two events, whose resolution of half a microsecond is a quarter of what a norm of one row takes. Its flushing
# of the cache has another form here: inputs and outputs rotate, so that large ones are cold and small ones warm, as in
# a model.


def _timer(device: str, run: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Callable[[], float]:
    """A function that takes one sample, µs a call."""
    return (_replayed if device != "cpu" else _called)(run, sets)


def _called(run: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Callable[[], float]:
    for inputs in sets[:2]:
        run(*inputs)

    def sample() -> float:
        started = machine.clock()
        for inputs in sets:
            run(*inputs)
        return (machine.clock() - started) * 1e6 / len(sets)

    return sample


@functools.cache
def _pool() -> Any:
    """The memory of all graphs: nobody reads their results, and they replay one after the other."""
    return torch.cuda.graph_pool_handle()


def _replayed(run: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Callable[[], float]:
    """Replays of a CUDA graph of calls on rotated inputs; as many results are kept, so that they rotate too."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        for inputs in sets[:2]:
            run(*inputs)
        start.record()
        for inputs in sets[:2]:
            run(*inputs)
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    once_us = start.elapsed_time(end) * 1e3 / 2  # the host's time where that is longer: then there are fewer calls
    calls = max(len(sets), min(64, math.ceil(REPLAY_US / max(once_us, 1.0))))
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, pool=_pool()):
        for _, inputs in zip(range(calls), itertools.cycle(sets), strict=False):
            kept.append(run(*inputs))
            if len(kept) > len(sets):
                del kept[0]
    graph.replay()
    torch.cuda.synchronize()

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    return sample
