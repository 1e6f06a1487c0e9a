"""Drives two fresh processes, one with the original model and one with the graft, so that only one works at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from kernelgraft import errors, machine
from kernelgraft.bench import stats
from kernelgraft.bench.result import (
    BenchResult,
    Cache,
    Comparison,
    Contender,
    Coverage,
    Divergence,
    Figure,
    Outputs,
    PatchCalls,
    Proof,
    Run,
    Setting,
    Side,
)
from kernelgraft.errors import KernelgraftError, UnreachedError, UsageError
from kernelgraft.records import Graft, MachineCard, ModelCard
from kernelgraft.store import Inventory

ORIGINAL = "eager"
GRAFTED = "kernelgraft"
PROMPT = "The capital of France is"
WARMUP_RUNS = 2
TURN_S = 0.5
"""A pair repeats short runs, still in turns, until each model has run about this long, so that noise averages out."""
LARGEST_REPEATS = 20
COVERAGE_TOKENS = 16
"""The shares settle after a few steps."""
TIMEOUT_S = 1800.0
"""For one answer of a process; loading and the first run, with all compilation, are the longest."""
CLOSING_S = 20.0
"""For a process to end after its last answer."""

Progress = Callable[[str, int, int | None, str], None]
"""Called with stage, done, total and a text."""


def silent(stage: str, done: int, total: int | None, text: str) -> None:
    """No progress."""


class Worker:
    """A fresh process with one model; see `kernelgraft.bench.worker` for what it answers."""

    def __init__(self, name: str, *, module: str = "kernelgraft.bench.worker", timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._noise = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            text=True,
            encoding="utf-8",
            env=machine.child_environment(),
        )

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises the worker's own kernelgraft error, or KernelgraftError."""
        assert self._process.stdin and self._process.stdout
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._timeout_s, stop)
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
                f"the {self.name} process did not answer `{do}` within {self._timeout_s:.0f} s; try fewer new tokens"
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

    def close(self) -> None:
        """End the process."""
        process = self._process
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


def bench(
    spec: str,
    graft: Path | str | None = None,
    *,
    pairs: int = 5,
    prompt: str = PROMPT,
    new_tokens: int = 64,
    batch: int = 1,
    cache: Cache = "dynamic",
    device: str = "cpu",
    dtype: str | None = None,
    threads: int | None = None,
    warmup_runs: int = WARMUP_RUNS,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> BenchResult:
    """Generate greedily with the original model and with the graft of a folder, in fresh processes, in turns.

    The order is swapped from turn to turn. Without a graft, or with one that accepted nothing, only the
    baseline runs. Raises UsageError for a wrong argument, UnreachedError if no call went through an accepted patch, and
    KernelgraftError if a process fails or the baseline's is not clean.
    """
    _check(pairs, new_tokens, batch, cache, warmup_runs)
    folder = None if graft is None else Path(graft)
    record = None if folder is None else _read(folder)
    accepted = record is not None and bool(record.accepted)
    order = {
        "spec": spec,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "batch": batch,
        "cache": cache,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "seed": seed,
        "trust_remote_code": trust_remote_code,
    }
    total = (1 + accepted) * (1 + warmup_runs) + pairs
    done = itertools.count()

    def step(text: str) -> None:
        progress("bench", next(done), total, text)

    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        loaded: dict[str, dict[str, Any]] = {}
        for name in (ORIGINAL, GRAFTED) if accepted else (ORIGINAL,):
            workers[name] = _started(stack, name)
        for name in workers:
            step(f"loading the {name} model")
            own = str(folder) if name == GRAFTED else None
            loaded[name] = workers[name].ask("start", graft=own, **order)
        warm: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
        for name, worker in workers.items():
            for _ in range(warmup_runs):
                step(f"warming the {name} model up")
                warm[name].append(worker.ask("generate"))
        repeats = repeats_for(warm[ORIGINAL][-1]["stamps_s"][-1])
        runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in workers}
        for pair in range(pairs):
            step(f"pair {pair + 1} of {pairs}")
            said: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
            for repeat in range(repeats):
                for name in turns(list(workers), pair + repeat):
                    said[name].append(workers[name].ask("generate"))
            for name in workers:
                runs[name].append(said[name])
        proof = Proof.model_validate(workers[ORIGINAL].ask("proof"))
        if not proof.clean:
            raise KernelgraftError(f"the `eager` process does not run the model's own code: {proof!r}")
        sides = {name: side(runs[name], batch, loaded[name]["load_s"], warm[name]) for name in workers}
        calls: tuple[PatchCalls, ...] = ()
        outputs = coverage = None
        if accepted:
            counted = workers[GRAFTED].ask("counters")
            calls = tuple(PatchCalls.model_validate(c) for c in counted["calls"])
            if counted["unreached"]:
                raise UnreachedError(_unreached(counted["unreached"], calls))
            outputs = _outputs(workers, runs)
            if device == "cpu":
                progress("bench", total, total, "where the baseline's time goes")
                answer = workers[ORIGINAL].ask("coverage", graft=str(folder), new_tokens=COVERAGE_TOKENS)
                coverage = Coverage.model_validate(answer["coverage"])
    contenders = [Contender(name=ORIGINAL, side=sides[ORIGINAL], proof=proof)]
    if accepted:
        better = compare(sides[ORIGINAL], sides[GRAFTED], seed)
        contenders.append(Contender(name=GRAFTED, side=sides[GRAFTED], comparison=better, outputs=outputs, calls=calls))
    first = loaded[ORIGINAL]
    progress("bench", total, total, f"{pairs} pairs done")
    return BenchResult(
        model=ModelCard.model_validate(first["model"]),
        machine=MachineCard.model_validate(first["machine"]),
        setting=Setting(
            prompt=prompt,
            prompt_tokens=first["prompt_tokens"],
            new_tokens=new_tokens,
            batch=batch,
            cache=cache,
            device=device,
            dtype=first["model"]["dtype"],
            threads=first["threads"],
            pairs=pairs,
            repeats=repeats,
            warmup_runs=warmup_runs,
            seed=seed,
        ),
        contenders=tuple(contenders),
        coverage=coverage,
    )


def turns(names: Sequence[str], turn: int) -> list[str]:
    """Who runs first: A B, then B A, and so on, so that a drift of the machine favours neither."""
    return list(names) if turn % 2 == 0 else list(reversed(names))


def repeats_for(run_s: float) -> int:
    """How many runs of that length each model makes in one pair."""
    return min(max(math.ceil(TURN_S / run_s), 1), LARGEST_REPEATS)


def run_of(answers: Sequence[dict[str, Any]], batch: int) -> Run:
    """One model's part of a pair, from the seconds at which the tokens of each of its runs came."""
    stamps: list[list[float]] = [a["stamps_s"] for a in answers]
    tokens = batch * sum(map(len, stamps))
    decode_s = sum(s[-1] - s[0] for s in stamps)
    return Run(
        ttft_ms=stats.mean([s[0] for s in stamps]) * 1e3,
        decode_ms=tuple((b - a) * 1e3 for s in stamps for a, b in itertools.pairwise(s)),
        tokens_per_s=tokens / sum(s[-1] for s in stamps),
        decode_tokens_per_s=(tokens - batch * len(stamps)) / decode_s if decode_s > 0 else None,
        peak_memory_bytes=max(a["peak_memory_bytes"] for a in answers),
    )


def side(turns: Sequence[Sequence[dict[str, Any]]], batch: int, load_s: float, warm: Sequence[dict[str, Any]]) -> Side:
    """The figures of one model from its measured turns."""
    runs = tuple(run_of(answers, batch) for answers in turns)
    gaps = [gap for run in runs for gap in run.decode_ms]
    decode = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    return Side(
        runs=runs,
        tokens_per_s=_figure([r.tokens_per_s for r in runs]),
        ttft_ms=_figure([r.ttft_ms for r in runs]),
        decode_tokens_per_s=_figure(decode) if decode else None,
        inter_token_ms_p50=stats.percentile(gaps, 50),
        inter_token_ms_p90=stats.percentile(gaps, 90),
        peak_memory_bytes=max(r.peak_memory_bytes for r in runs),
        load_s=load_s,
        warmup_s=warm[0]["stamps_s"][-1],
    )


def compare(baseline: Side, grafted: Side, seed: int) -> Comparison:
    """Grafted over baseline, pair by pair."""
    base, ours = baseline.runs, grafted.runs
    decode_a = [r.decode_tokens_per_s for r in base if r.decode_tokens_per_s is not None]
    decode_b = [r.decode_tokens_per_s for r in ours if r.decode_tokens_per_s is not None]
    both = len(decode_a) == len(decode_b) == len(base)
    total_a, total_b = [r.tokens_per_s for r in base], [r.tokens_per_s for r in ours]
    first_a, first_b = [r.ttft_ms for r in base], [r.ttft_ms for r in ours]
    return Comparison(
        tokens_per_s_ratio=stats.mean(total_b) / stats.mean(total_a),
        tokens_per_s_interval=stats.ratio_interval(total_a, total_b, seed=seed),
        decode_ratio=stats.mean(decode_b) / stats.mean(decode_a) if both else None,
        decode_interval=stats.ratio_interval(decode_a, decode_b, seed=seed) if both else None,
        ttft_ratio=stats.mean(first_a) / stats.mean(first_b),
        ttft_interval=stats.ratio_interval(first_b, first_a, seed=seed),
    )


def compare_outputs(
    baseline_tokens: np.ndarray[Any, Any],
    grafted_tokens: np.ndarray[Any, Any],
    baseline_logits: np.ndarray[Any, Any],
    grafted_logits: np.ndarray[Any, Any],
) -> Outputs:
    """Tokens [batch, new tokens] of the free runs and logits [sequences, steps, vocab] of the forced ones."""
    divergence = None
    if at := stats.first_divergence(baseline_tokens, grafted_tokens):
        sequence, position = at
        margin = difference = None
        if sequence < baseline_logits.shape[0] and position < baseline_logits.shape[1]:
            row, other = baseline_logits[sequence, position], grafted_logits[sequence, position]
            margin, difference = stats.margin(row), stats.largest_difference(row, other)
        divergence = Divergence(
            sequence=sequence,
            position=position,
            baseline_token=int(baseline_tokens[at]),
            grafted_token=int(grafted_tokens[at]),
            baseline_margin=margin,
            grafted_difference=difference,
        )
    sequences, steps, vocabulary = baseline_logits.shape
    return Outputs(
        tokens_equal=divergence is None,
        divergence=divergence,
        logits_rel_rmse=stats.rel_rmse(grafted_logits, baseline_logits),
        logits_shape=(sequences, steps, vocabulary),
    )


def _check(pairs: int, new_tokens: int, batch: int, cache: str, warmup_runs: int) -> None:
    for name, value, least in (
        ("pairs", pairs, 1),
        ("new_tokens", new_tokens, 1),
        ("batch", batch, 1),
        ("warmup_runs", warmup_runs, 1),
    ):
        if value < least:
            raise UsageError(f"`{name}` is {value}; give at least {least}")
    if cache not in ("dynamic", "static"):
        raise UsageError(f"cache `{cache}` is not dynamic or static")


def _read(folder: Path) -> Graft:
    if not (folder / "graft.json").is_file():
        raise UsageError(f"folder `{folder}` holds no graft: run `kernelgraft run MODEL --out {folder}` first")
    return Inventory(folder).load_record("graft", Graft)


def _started(stack: contextlib.ExitStack, name: str) -> Worker:
    worker = Worker(name)
    stack.callback(worker.close)
    return worker


def _figure(values: Sequence[float]) -> Figure:
    return Figure(mean=stats.mean(values), std=stats.std(values))


def _unreached(labels: Sequence[str], calls: Sequence[PatchCalls]) -> str:
    reasons = dict.fromkeys(reason for c in calls if not any(c.calls.values()) for reason in c.fallbacks)
    why = f" (fell back: {', '.join(reasons)})" if reasons else ""
    return f"no call went through `{'`, `'.join(labels)}`{why}: run `kernelgraft integrate` again for this setting"


def _outputs(workers: dict[str, Worker], runs: dict[str, list[list[dict[str, Any]]]]) -> Outputs:
    tokens = {name: np.asarray(pairs[-1][-1]["tokens"]) for name, pairs in runs.items()}
    with tempfile.TemporaryDirectory(prefix="kernelgraft-bench-") as folder:
        logits = {}
        for name, worker in workers.items():
            file = str(Path(folder) / f"{name}.safetensors")
            worker.ask("logits", tokens=tokens[ORIGINAL].tolist(), file=file)
            logits[name] = load_file(file)["logits"]
    return compare_outputs(tokens[ORIGINAL], tokens[GRAFTED], logits[ORIGINAL], logits[GRAFTED])
