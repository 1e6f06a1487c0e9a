"""Whole models on a GPU: transformers, transformers' compiler, TileGym, Liger and a graft, in the same run.

    PYTHONPATH=src python benchmarks/end_to_end.py --json benchmarks/results/h200/end_to_end.json

Presets have published dimensions and random weights, the same in every process. One process per contender and model
loads once and is measured in all settings, in turns with the others: decode with 1 and 32 sequences, prefill of 4096
tokens. A compiled contender has a process for each setting. They compile from the start on, while others are loaded and
warm up, and are halted while others are measured; what is not ready then is measured afterwards, in turns with the
original and the graft once more.
`tokens_per_s` of a decode cell: tokens of the batch after the first, over the time after the first; of a prefill cell:
tokens of the prompts over the time to the first new token. `--budget` is divided among the models; what there was no
time for is listed under `missing`. What was measured is written after every setting.

`--merge FILE` keeps what a file holds of other models, so that models can be measured in several runs, or each on a GPU
of its own; without models of its own (`--models ""`) a run only puts files together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from end_to_end_file import Report

from kernelgraft import machine
from kernelgraft.bench import figures
from kernelgraft.bench.names import COMPILED, CONTENDERS, GRAFTED, ORIGINAL
from kernelgraft.bench.race import Lap, Leg, Race, kind
from kernelgraft.bench.result import Trace
from kernelgraft.bench.roofline import Limits, Work, against
from kernelgraft.bench.runner import PROMPT
from kernelgraft.bench.trace import coverage_line
from kernelgraft.errors import KernelgraftError

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "gemma-3-1b")
COMPILING = (COMPILED, f"{COMPILED}:2", f"{COMPILED}:3")
"""The compiled contender's processes: of the first decode setting, of the second one, and of prefill, where `generate`
compiles nothing."""
TRACE_S = 12.0
"""Kept free for each trace."""
LEAST_S = 20.0
"""That any answer is waited for, also when a model's time is over."""
SAME = ("model", "regime", "batch", "prompt_tokens", "new_tokens", "contender")
"""What tells cells apart."""


@dataclass(frozen=True)
class Setting:
    """One cell of the table for every contender."""

    regime: str
    leg: Leg


def settings(device: str, new_tokens: int) -> list[Setting]:
    """In the order of importance; small ones on a CPU, where only the script is tried."""
    if device == "cpu":
        return [
            Setting("decode", Leg(1, 8, 4, "dynamic")),
            Setting("prefill", Leg(1, 24, 1, "dynamic")),
            Setting("decode", Leg(2, 8, 4, "dynamic")),
        ]
    return [
        Setting("decode", Leg(1, 32, new_tokens, "dynamic")),
        Setting("prefill", Leg(1, 4096, 1, "dynamic")),
        Setting("decode", Leg(32, 128, new_tokens, "dynamic")),
    ]


@dataclass
class Late:
    """A cell of a contender that had not warmed up in time."""

    setting: Setting
    name: str
    row: dict[str, Any]
    limit: tuple[Work, Limits] | None


def cell(
    model: str,
    setting: Setting,
    name: str,
    race: Race,
    lap: Lap,
    outputs: dict[str, Any],
    limit: tuple[Work, Limits] | None,
) -> dict[str, Any]:
    """One contender in one setting."""
    leg, regime = setting.leg, setting.regime
    answer: dict[str, Any] = {
        "model": model,
        "regime": regime,
        "batch": leg.batch,
        "prompt_tokens": lap.prompt_tokens,
        "new_tokens": leg.new_tokens,
        "contender": kind(name),
        "tokens_per_s": None,
        "ttft_ms": None,
        "roofline_percent": None,
        "tokens_equal": None,
    }
    if name not in lap.runs:
        return answer | {"failure": race.failures.get(name, "it did not take part")}
    side = race.side(lap, name)
    line = None if limit is None else against(*limit, side)
    rate = side.decode_tokens_per_s
    speed = 1e3 * leg.batch * lap.prompt_tokens / side.ttft_ms.mean if regime == "prefill" else rate and rate.mean
    said = outputs.get(name)
    answer |= {
        "tokens_per_s": speed,
        "ttft_ms": side.ttft_ms.mean,
        "roofline_percent": None if line is None else line.percent,
        "tokens_equal": True if name == ORIGINAL else None if said is None else said.tokens_equal,
        "throughput": f"Average throughput: {side.tokens_per_s.mean:.2f} ± {side.tokens_per_s.std or 0:.2f} tokens/sec",
        "cache": "static" if kind(name) == COMPILED else leg.cache,
        "inter_token_ms_p50": side.inter_token_ms_p50,
        "inter_token_ms_p90": side.inter_token_ms_p90,
        "ttft_ms_std": side.ttft_ms.std,
        "peak_memory_bytes": side.peak_memory_bytes,
        "rounds": [
            {"ttft_ms": r.ttft_ms, "decode_tokens_per_s": r.decode_tokens_per_s, "tokens_per_s": r.tokens_per_s}
            for r in side.runs
        ],
        "pairs": len(side.runs),
        "repeats": lap.repeats,
        "busy_cores": lap.busy_cores,
        "host_share": host_share(lap, name),
        "load_s": side.load_s,
        "warmup_s": side.warmup_s,
    }
    if line is not None:
        answer["limit_ms"] = line.limit_ms
    if name != ORIGINAL and said is not None:
        answer["logits_rel_rmse"] = said.logits_rel_rmse
        answer["divergence"] = None if said.divergence is None else said.divergence.model_dump(mode="json")
        answer["near_tie"] = near_tie(answer["divergence"])
    answer["over"] = {
        kind(other): ratios(regime, race, lap, other, name)
        for other in lap.runs
        if other != name and (other == ORIGINAL or name == GRAFTED)
    }
    return answer


def near_tie(divergence: dict[str, Any] | None) -> bool | None:
    """Whether the original's lead, where the tokens differ first, is within twice what its logits differ by there.

    Then either token is as right; None if the tokens are equal, or the logits there were not kept.
    """
    if divergence is None or divergence["baseline_margin"] is None or divergence["grafted_difference"] is None:
        return None
    return bool(divergence["baseline_margin"] <= 2 * divergence["grafted_difference"])


def host_share(lap: Lap, name: str) -> float | None:
    """CPU time of the thread that generates over the time of generating: near 1 where the GPU is never waited for."""
    answers = [a for pair in lap.runs[name] for a in pair if "host_s" in a]
    whole = sum(a["stamps_s"][-1] for a in answers)
    return sum(a["host_s"] for a in answers) / whole if whole else None


def ratios(regime: str, race: Race, lap: Lap, other: str, name: str) -> dict[str, Any]:
    """How many times as fast as another contender, with the 95 % interval over pairs."""
    found = figures.compare(race.side(lap, other), race.side(lap, name), seed=0)
    if regime == "prefill":
        return {"ratio": found.ttft_ratio, "interval": found.ttft_interval}
    return {"ratio": found.decode_ratio, "interval": found.decode_interval}


def integrated(model: str, folder: Path, device: str, dtype: str, timeout_s: float) -> str | None:
    """Make a graft in a process of its own; None, or why there is none."""
    process = multiprocessing.get_context("spawn").Process(target=_integrate, args=(model, str(folder), device, dtype))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        return f"integrating took more than {timeout_s:.0f} s"
    return None if (folder / "graft.json").is_file() else f"integrating ended with code {process.exitcode}"


def _integrate(model: str, folder: str, device: str, dtype: str) -> None:
    import torch

    from kernelgraft import models, pipeline
    from kernelgraft.evaluate import JudgeOptions

    loaded = models.load(model, dtype=getattr(torch, dtype), device=device)
    pipeline.integrate(loaded, out=folder, options=JudgeOptions.quick())


class Program:
    """All models, one after the other."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.began = machine.clock()
        self.end = self.began + options.budget
        self.scratch = scratch
        self.cuda = options.device.startswith("cuda")
        self.settings = settings("cuda" if self.cuda else "cpu", options.new_tokens)
        self.report = Report(
            options.json,
            machine.read().model_dump(mode="json") | {"time": machine.timestamp()},
            own=options.models,
            merge=options.merge,
            options={
                "dtype": options.dtype,
                "device": options.device,
                "pairs": options.pairs,
                "warmup_runs": options.warmup,
                "contenders": options.contenders,
                "weights": "random, seed 0",
                "settings": [asdict(s) for s in self.settings],
            },
        )
        self.ahead: dict[str, Race] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - machine.clock()

    def run(self) -> None:
        """Everything there is time for."""
        names = self.options.models
        for index, model in enumerate(names):
            if self.left < 5:
                self.report.missing.append(f"{model}: no time was left")
                continue
            until = machine.clock() + self.left / (len(names) - index)
            following = names[index + 1] if index + 1 < len(names) else None
            try:
                self.model(model, until, following)
            except Exception as error:  # the other models and what was measured are to be written
                traceback.print_exc()
                self.report.missing.append(f"{model}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            finally:
                if (race := self.ahead.pop(model, None)) is not None:
                    race.__exit__(None, None, None)
        for race in self.ahead.values():
            race.__exit__(None, None, None)
        self.report.write(machine.clock() - self.began)

    def folder(self, model: str) -> Path:
        """Where the model's graft is, or is to be."""
        given = self.options.graft_dir
        return self.scratch / model if given is None else given / model

    def race(self, model: str) -> Race:
        """Processes that begin to import on a GPU machine."""
        if model not in self.ahead:
            names = [name for name in CONTENDERS if name in self.options.contenders]
            if self.cuda and COMPILED in names:
                at = names.index(COMPILED)
                names[at : at + 1] = COMPILING
            order = {
                "spec": model,
                "prompt": PROMPT,
                "device": self.options.device,
                "dtype": self.options.dtype,
                "threads": self.options.threads,
                "seed": 0,
                "trust_remote_code": False,
            }
            self.ahead[model] = Race(
                names, order, self.folder(model), keep_failed=True, step=lambda text: say(f"  {text}", self.began)
            )
        return self.ahead[model]

    def model(self, model: str, until: float, following: str | None) -> None:
        """One model in all settings."""
        say(f"{model}: {until - machine.clock():.0f} s", self.began)
        began = machine.clock()
        about: dict[str, Any] = {
            "environment": self.report.environment | {"time": machine.timestamp()},
            "options": self.report.options,
        }
        self.report.models[model] = about
        folder, why = self.folder(model), None
        if GRAFTED in self.options.contenders and not (folder / "graft.json").is_file():
            say("  integrating", self.began)
            why = integrated(
                model, folder, self.options.device, self.options.dtype, max(until - machine.clock(), 5) * 0.8
            )
        race = self.race(model)
        race.limit(max(until - machine.clock(), LEAST_S))
        if why is not None:
            race.failures[GRAFTED] = why
        early = {
            name: setting.leg
            for index, setting in enumerate(self.settings)
            if self.cuda and setting.regime == "decode" and (name := self.compiled(index)) in race.names
        }
        race.start(early, warmup_runs=self.options.warmup, limit_s=self.options.compile_limit)
        about["started"] = {
            name: {"load_s": said["load_s"], "parameters": said["model"]["parameters"]}
            for name, said in race.started.items()
        }
        if following is not None and self.cuda:
            self.race(following)
        laps, late = self.laps(model, race, until)
        self.late(race, late, until)
        self.evidence(race, about)
        if self.options.trace and self.cuda:
            self.traces(race, about, until)
        if laps and self.options.float32 and machine.clock() < until:
            race.configure(ORIGINAL, laps[0].leg)
            about["float32_rel_rmse"] = {"batch": laps[0].leg.batch} | race.float32(laps[0])
        about["seconds"] = round(machine.clock() - began, 1)

    def compiled(self, index: int) -> str:
        """The compiled contender's process for a setting."""
        if not self.cuda:
            return COMPILED
        return COMPILING[2] if self.settings[index].regime == "prefill" else COMPILING[0 if index == 0 else 1]

    def laps(self, model: str, race: Race, until: float) -> tuple[list[Lap], list[Late]]:
        """Measure every setting there is time for, and say what is late; the cells are written at once."""
        laps: list[Lap] = []
        late: list[Late] = []
        for index, setting in enumerate(self.settings):
            what = f"{model}: {setting.regime}, batch {setting.leg.batch}"
            race.readmit()
            race.limit(max(until - machine.clock(), LEAST_S))
            if laps and machine.clock() > until:
                self.report.missing.append(f"{what}: no time was left")
                continue
            own = self.compiled(index)
            names = [name for name in race.names if kind(name) != COMPILED or name == own]
            try:
                lap = self.lap(race, setting, names, until)
                outputs = race.compare(lap)
                with race.undisturbed():
                    limit = self.limit(race, setting)
            except KernelgraftError as error:
                self.report.missing.append(f"{what}: {error}")
                continue
            laps.append(lap)
            for name in names:
                row = cell(model, setting, name, race, lap, outputs, limit)
                if name in race.away:
                    row["failure"] = race.away[name]
                    late.append(Late(setting, name, row, limit))
                self.report.cells.append(row)
                say(line(row), self.began)
            self.report.write(machine.clock() - self.began)
        return laps, late

    def lap(self, race: Race, setting: Setting, names: Sequence[str], until: float, warmup: int | None = None) -> Lap:
        """One setting."""
        return race.measure(
            setting.leg,
            pairs=self.options.pairs,
            warmup_runs=warmup or self.options.warmup,
            deadline=until,
            names=names,
            warmup_limit_s=self.options.warmup_limit,
        )

    def late(self, race: Race, late: Sequence[Late], until: float) -> None:
        """Contenders that had not warmed up when the others were measured: wait, then measure them in turns with the
        original and the graft, which are measured again for it. Their cells take the place of those that said so."""
        for one in late:
            race.readmit()
            race.wait_for(one.name, until)
            model, setting = race_model(race), one.setting
            row = one.row
            if one.name in race.failures:
                row["failure"] = race.failures[one.name]
            else:
                race.limit(max(until - machine.clock(), LEAST_S))
                names = [name for name in (ORIGINAL, one.name, GRAFTED) if name in race.active]
                try:
                    lap = self.lap(race, setting, names, until, warmup=1)
                    outputs = race.compare(lap)
                except KernelgraftError as error:
                    self.report.missing.append(f"{model}: {one.name} in {setting.regime}: {error}")
                    continue
                row.clear()
                row |= cell(model, setting, one.name, race, lap, outputs, one.limit)
                self.again(race, setting, lap, outputs, row)
            say(line(row), self.began)
            self.report.write(machine.clock() - self.began)

    def again(self, race: Race, setting: Setting, lap: Lap, outputs: dict[str, Any], row: dict[str, Any]) -> None:
        """Note with what a late contender was measured, and the graft's ratio to it."""
        model = race_model(race)
        for name in [n for n in lap.runs if kind(n) != COMPILED]:
            found = cell(model, setting, name, race, lap, outputs, None)
            row.setdefault("measured_later_beside", {})[name] = {k: found[k] for k in ("tokens_per_s", "ttft_ms")}
            for first in self.report.cells:
                if name == GRAFTED and all(first[k] == found[k] for k in SAME) and "over" in first:
                    first["over"][COMPILED] = found["over"][COMPILED]

    def limit(self, race: Race, setting: Setting) -> tuple[Work, Limits] | None:
        """What one step needs and what the device reaches; None where the work cannot be counted."""
        try:
            said = race.ask(ORIGINAL, "work", regime=setting.regime)
        except KernelgraftError as error:
            say(f"  no roofline: {error}", self.began)
            return None
        assert said is not None
        return Work(**said["work"]), Limits(**said["limits"])

    def evidence(self, race: Race, about: dict[str, Any]) -> None:
        """Whose code each process ran, and what went through the graft."""
        race.readmit()
        proofs: dict[str, Any] = {}
        for name in race.active:
            if proofs.get(kind(name)) is None:
                proofs[kind(name)] = race.proof(name)
        about["evidence"] = {name: list(found[1]) for name, found in proofs.items() if found is not None}
        about["proof"] = {name: found[0].model_dump(mode="json") for name, found in proofs.items() if found is not None}
        if GRAFTED in race.active:
            about["calls"] = [calls.model_dump(mode="json") for calls in race.calls()]
        about["failures"] = dict(race.failures)

    def traces(self, race: Race, about: dict[str, Any], until: float) -> None:
        """Where the GPU's time goes: the first decode setting and prefill, without the compiled contenders."""
        about["traces"] = []
        graft = self.folder(race_model(race)) if GRAFTED in race.active else None
        for setting in self.settings[:2]:
            for name in [n for n in race.active if n in self.options.trace_of]:
                if machine.clock() + TRACE_S > until:
                    self.report.missing.append(
                        f"{race_model(race)}: trace of {name}, {setting.regime}: no time was left"
                    )
                    continue
                try:
                    race.configure(name, setting.leg)
                    said = race.trace(name, setting.regime, graft)["trace"]
                except KernelgraftError as error:
                    self.report.missing.append(f"{race_model(race)}: trace of {name}, {setting.regime}: {error}")
                    continue
                words = coverage_line(Trace.model_validate(said))
                say(f"  {name}, {setting.regime}: {words}", self.began)
                about["traces"].append({"contender": name, "batch": setting.leg.batch, "coverage": words, **said})


def race_model(race: Race) -> str:
    """The spec that a race is about."""
    return str(race.order["spec"])


def line(row: dict[str, Any]) -> str:
    """A cell, for people."""
    head = f"  {row['model']} {row['regime']} b{row['batch']} {row['contender']:<15}"
    if "failure" in row:
        return f"{head} {row['failure'][:120]}"
    over = row["over"].get(ORIGINAL)
    times = "" if over is None or over["ratio"] is None else f" {over['ratio']:.3f}x"
    equal = {True: "equal", False: "NOT EQUAL", None: "?"}[row["tokens_equal"]]
    if row.get("near_tie"):
        equal = "equal up to a near tie"
    share = "" if row["roofline_percent"] is None else f" {row['roofline_percent']:.1f} %"
    return f"{head} {row['tokens_per_s'] or 0:.1f} tok/s, first {row['ttft_ms']:.2f} ms{share}{times} {equal}"


def say(text: str, began: float) -> None:
    """A line on stdout with the time."""
    print(f"{machine.clock() - began:7.1f} s {text}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = lambda text: [part.strip() for part in text.split(",") if part.strip()]  # noqa: E731
    parser.add_argument("--models", type=names, default=list(MODELS), help="specs, in the order of importance")
    parser.add_argument("--contenders", type=names, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/h200/end_to_end.json"))
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        help="keep what this file holds of other models; may be given several times, and be the file of --json",
    )
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--graft-dir", type=Path, help="folder with a folder of a graft for each model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64, help="of the decode settings, on a GPU")
    parser.add_argument("--warmup", type=int, default=2, help="runs of each contender before its first pair")
    parser.add_argument(
        "--warmup-limit", type=float, default=60.0, help="seconds for one warm-up run, after which a peer has failed"
    )
    parser.add_argument(
        "--compile-limit",
        type=float,
        default=300.0,
        help="seconds for all warm-up runs of the compiled contender, which take place beside the others'",
    )
    parser.add_argument("--trace-of", type=names, default=[ORIGINAL, GRAFTED], help="contenders to trace")
    parser.add_argument("--no-trace", dest="trace", action="store_false")
    parser.add_argument("--no-float32", dest="float32", action="store_false")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.contenders) - set(CONTENDERS)):
        parser.error(f"no such contender: {unknown[0]}; choose among {', '.join(CONTENDERS)}")
    if absent := [file for file in options.merge if file != options.json and not file.is_file()]:
        parser.error(f"there is no file {absent[0]} to merge")
    options.contenders = [name for name in CONTENDERS if name in {ORIGINAL, *options.contenders}]
    return options


def main(arguments: list[str] | None = None) -> int:
    """0 if every cell was measured or its contender has nothing for the model."""
    with tempfile.TemporaryDirectory(prefix="kernelgraft-") as scratch:
        program = Program(parse(arguments), Path(scratch))
        program.run()
    for text in program.report.missing:
        print(f"missing: {text}")
    print(f"{len(program.report.cells)} cells in {program.report.file}")
    return 1 if program.report.missing else 0


if __name__ == "__main__":
    sys.exit(main())
