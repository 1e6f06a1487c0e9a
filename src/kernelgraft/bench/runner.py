"""The benchmark: contenders in fresh processes and turns, their outputs compared, their time traced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kernelgraft.bench import figures
from kernelgraft.bench.names import CONTENDERS, GRAFTED, ORIGINAL
from kernelgraft.bench.race import Lap, Leg, Race
from kernelgraft.bench.result import BenchResult, Cache, Contender, Coverage, Roofline, Setting, Trace
from kernelgraft.errors import KernelgraftError, UsageError
from kernelgraft.records import Graft, MachineCard, ModelCard
from kernelgraft.store import Inventory

PROMPT = "The capital of France is"
WARMUP_RUNS = 2
COVERAGE_TOKENS = 16
"""The shares settle after a few steps."""
REGIMES = ("decode", "prefill")

Progress = Callable[[str, int, int | None, str], None]
"""Called with stage, done, total and a text."""


def silent(stage: str, done: int, total: int | None, text: str) -> None:
    """No progress."""


def bench(
    spec: str,
    graft: Path | str | None = None,
    *,
    compare: Sequence[str] | None = None,
    pairs: int = 5,
    prompt: str = PROMPT,
    prompt_tokens: int | None = None,
    new_tokens: int = 64,
    batch: int = 1,
    cache: Cache = "dynamic",
    device: str = "cpu",
    dtype: str | None = None,
    threads: int | None = None,
    warmup_runs: int = WARMUP_RUNS,
    seed: int = 0,
    trust_remote_code: bool = False,
    trace: bool = True,
    progress: Progress = silent,
) -> BenchResult:
    """Generate greedily with every contender in `compare`, each in a fresh process, in turns.

    `eager`, the original, always takes part; without `compare` so does the graft of the folder, if it accepted
    anything. The order is swapped from turn to turn. `prompt_tokens` puts random ids before the prompt. A peer that
    fails is reported as such. Raises UsageError for a wrong argument, UnreachedError if no call went through an
    accepted patch, and KernelgraftError if the original's or the graft's process fails or the original's is not clean.
    """
    _check(pairs, new_tokens, batch, cache, warmup_runs, prompt_tokens)
    folder = None if graft is None else Path(graft)
    record = None if folder is None else _read(folder)
    names = _names(compare, record)
    grafted = GRAFTED in names
    order = {
        "spec": spec,
        "prompt": prompt,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "seed": seed,
        "trust_remote_code": trust_remote_code,
    }
    cuda = device.startswith("cuda")
    total = (1 if cuda else len(names)) + len(names) * warmup_runs + pairs
    done = itertools.count()

    def step(text: str) -> None:
        progress("bench", min(next(done), total), total, text)

    with Race(names, order, folder if grafted else None, essential=(ORIGINAL, GRAFTED), step=step) as race:
        race.start()
        lap = race.measure(Leg(batch, prompt_tokens, new_tokens, cache), pairs=pairs, warmup_runs=warmup_runs)
        found = _contenders(race, lap, seed)
        coverage = None
        if grafted and not cuda:
            progress("bench", total, total, "where the original's time goes")
            answer = race.ask(ORIGINAL, "coverage", graft=str(folder), new_tokens=COVERAGE_TOKENS)
            coverage = None if answer is None else Coverage.model_validate(answer["coverage"])
        if cuda:
            progress("bench", total, total, "limits of the machine")
            found = against_limits(race, lap, found)
            if trace:
                progress("bench", total, total, "where the GPU's time goes")
                found = traced(race, lap, found, folder if grafted else None)
        precise = race.float32(lap)
        found = [c.model_copy(update={"float32_rel_rmse": precise.get(c.name)}) for c in found]
        first = race.started[ORIGINAL]
    progress("bench", total, total, f"{pairs} pairs done")
    return BenchResult(
        model=ModelCard.model_validate(first["model"]),
        machine=MachineCard.model_validate(first["machine"]),
        setting=Setting(
            prompt=prompt,
            prompt_tokens=lap.prompt_tokens,
            new_tokens=new_tokens,
            batch=batch,
            cache=cache,
            device=device,
            dtype=first["model"]["dtype"],
            threads=first["threads"],
            pairs=pairs,
            repeats=lap.repeats,
            busy_cores=lap.busy_cores,
            warmup_runs=warmup_runs,
            seed=seed,
        ),
        contenders=tuple(found),
        coverage=coverage,
    )


def _contenders(race: Race, lap: Lap, seed: int) -> list[Contender]:
    """Figures, proofs, calls and outputs of a lap, for all that were to take part."""
    proofs = {name: race.proof(name) for name in race.active}
    calls = race.calls() if GRAFTED in race.active else ()
    return summary(race, lap, proofs, calls, seed)


def summary(race: Race, lap: Lap, proofs: dict[str, Any], calls: tuple[Any, ...], seed: int) -> list[Contender]:
    """The contenders of a lap; the processes must still be in its setting, for their logits."""
    outputs = race.compare(lap)
    original = race.side(lap, ORIGINAL)
    found = []
    for name in race.names:
        if name in race.failures or name not in lap.runs:
            found.append(Contender(name=name, failure=race.failures.get(name, "it did not take part")))
            continue
        side = original if name == ORIGINAL else race.side(lap, name)
        proof, evidence = proofs.get(name) or (None, ())
        other = name != ORIGINAL
        found.append(
            Contender(
                name=name,
                side=side,
                proof=proof,
                evidence=evidence,
                comparison=figures.compare(original, side, seed) if other else None,
                outputs=outputs.get(name) if other else None,
                calls=calls if name == GRAFTED else (),
            )
        )
    return found


def against_limits(race: Race, lap: Lap, found: Sequence[Contender]) -> list[Contender]:
    """The contenders with their share of what the machine allows; as they were where the work cannot be counted."""
    from kernelgraft.bench import roofline

    lines: dict[str, list[Roofline]] = {c.name: [] for c in found}
    for regime in REGIMES:
        try:
            said = race.ask(ORIGINAL, "work", regime=regime)
        except KernelgraftError:  # the one line says that it cannot be counted: there is no roofline then
            continue
        assert said is not None
        needed, limits = roofline.Work(**said["work"]), roofline.Limits(**said["limits"])
        for contender in found:
            if contender.side is not None and (line := roofline.against(needed, limits, contender.side)) is not None:
                lines[contender.name].append(line)
    return [c.model_copy(update={"rooflines": tuple(lines[c.name])}) for c in found]


def traced(
    race: Race, lap: Lap, found: Sequence[Contender], graft: Path | None, regimes: Sequence[str] = REGIMES
) -> list[Contender]:
    """The contenders with their traces, one process after the other; why there is none is among the evidence."""
    answers = []
    for contender in found:
        traces, why = [], []
        for regime in regimes if contender.failure is None else ():
            if regime == "decode" and lap.leg.new_tokens < 2:
                continue
            try:
                said = race.trace(contender.name, regime, graft)
            except KernelgraftError as error:
                why.append(f"no trace of {regime}: {error}")
            else:
                traces.append(Trace.model_validate(said["trace"]))
        evidence = (*contender.evidence, *why)
        answers.append(contender.model_copy(update={"traces": tuple(traces), "evidence": evidence}))
    return answers


def _names(compare: Sequence[str] | None, record: Graft | None) -> list[str]:
    accepted = record is not None and bool(record.accepted)
    if compare is None:
        return [ORIGINAL, GRAFTED] if accepted else [ORIGINAL]
    if unknown := [name for name in compare if name not in CONTENDERS]:
        raise UsageError(f"`{unknown[0]}` is no contender: choose among {', '.join(CONTENDERS)}")
    if GRAFTED in compare and record is None:
        raise UsageError(f"`{GRAFTED}` needs a graft: give its folder")
    wanted = {ORIGINAL, *compare}
    if record is not None and not accepted:
        wanted.discard(GRAFTED)
    return [name for name in CONTENDERS if name in wanted]


def _check(
    pairs: int, new_tokens: int, batch: int, cache: str, warmup_runs: int, prompt_tokens: int | None = None
) -> None:
    for name, value, least in (
        ("pairs", pairs, 1),
        ("new_tokens", new_tokens, 1),
        ("batch", batch, 1),
        ("warmup_runs", warmup_runs, 1),
        ("prompt_tokens", 1 if prompt_tokens is None else prompt_tokens, 1),
    ):
        if value < least:
            raise UsageError(f"`{name}` is {value}; give at least {least}")
    if cache not in ("dynamic", "static"):
        raise UsageError(f"cache `{cache}` is not dynamic or static")


def _read(folder: Path) -> Graft:
    if not (folder / "graft.json").is_file():
        raise UsageError(f"folder `{folder}` holds no graft: run `kernelgraft run MODEL --out {folder}` first")
    return Inventory(folder).load_record("graft", Graft)
