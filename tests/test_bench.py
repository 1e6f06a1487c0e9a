"""The benchmark: statistics, the two processes and their order, timing, outputs, proof, coverage."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from kernelgraft import families, machine, models, pipeline, suppliers
from kernelgraft.bench import bench, figures, process, race, runner, stats, worker
from kernelgraft.bench.coverage import Range, Recorder, ranged, shares
from kernelgraft.bench.proof import attention_functions, differences, facts, prove
from kernelgraft.bench.result import BenchResult, Proof
from kernelgraft.errors import GraftError, KernelgraftError, MismatchError, UnreachedError, UsageError
from kernelgraft.records import Graft, Patch, Seat
from kernelgraft.store import Inventory

# --- statistics ---


def test_mean_and_std() -> None:
    assert stats.mean([1.0, 2.0, 6.0]) == pytest.approx(3.0)
    assert stats.std([1.0, 2.0, 6.0]) == pytest.approx(7.0**0.5)
    assert stats.std([5.0]) is None
    with pytest.raises(ValueError, match="no values"):
        stats.mean([])


def test_percentiles() -> None:
    assert stats.percentile([1.0, 2.0, 3.0, 4.0], 50) == pytest.approx(2.5)
    assert stats.percentile([], 50) is None


def test_interval_holds_the_ratio_and_is_seeded() -> None:
    noise = np.random.default_rng(1).normal(0, 1, 10)
    base, ours = list(100 + noise), list(110 + noise)
    low, high = stats.ratio_interval(base, ours) or (0.0, 0.0)
    assert low < 1.1 < high
    assert low > 1.0
    assert (low, high) == stats.ratio_interval(base, ours)
    assert (low, high) != stats.ratio_interval(base, ours, seed=1)


def test_interval_resamples_pairs() -> None:
    # The machine is twice as fast in the second half: unpaired resampling could not see a steady 5 %.
    base = [100.0] * 5 + [200.0] * 5
    low, high = stats.ratio_interval(base, [1.05 * b for b in base]) or (0.0, 0.0)
    assert low == pytest.approx(1.05)
    assert high == pytest.approx(1.05)


def test_interval_of_one_pair_is_unknown() -> None:
    assert stats.ratio_interval([1.0], [2.0]) is None
    with pytest.raises(ValueError, match="no pairs"):
        stats.ratio_interval([1.0, 2.0], [2.0])


def test_rel_rmse() -> None:
    wanted = np.array([3.0, 4.0], dtype=np.float32)
    assert stats.rel_rmse(wanted, wanted) == 0.0
    assert stats.rel_rmse(wanted * 1.01, wanted) == pytest.approx(0.01, rel=1e-4)
    masked = np.array([3.0, -np.inf], dtype=np.float32)
    assert stats.rel_rmse(masked, masked) == 0.0
    assert stats.rel_rmse(wanted, masked) is None
    assert stats.rel_rmse(masked, wanted) is None
    assert stats.rel_rmse(np.array([3.0, np.nan]), masked) is None
    assert stats.rel_rmse(np.zeros(2), np.zeros(2)) is None
    assert stats.rel_rmse(wanted, np.zeros(3)) is None


def test_first_divergence_is_the_earliest_position() -> None:
    a = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    b = np.array([[1, 2, 3, 9], [5, 0, 7, 8]])
    assert stats.first_divergence(a, b) == (1, 1)
    assert stats.first_divergence(a, a) is None


def test_margin() -> None:
    assert stats.margin(np.array([1.0, 4.0, 3.5])) == pytest.approx(0.5)


# --- figures from stamps ---


def test_figures_of_a_run() -> None:
    # First token after 100 ms, then one every 10 ms; two sequences; two calls.
    answer = {"stamps_s": [0.1, 0.11, 0.12, 0.13], "peak_memory_bytes": 7}
    run = figures.run_of([answer, answer | {"peak_memory_bytes": 9}], batch=2)
    assert run.ttft_ms == pytest.approx(100)
    assert run.decode_ms == pytest.approx([10] * 6)
    assert run.tokens_per_s == pytest.approx(2 * 4 / 0.13)
    assert run.decode_tokens_per_s == pytest.approx(2 * 3 / 0.03)
    assert run.peak_memory_bytes == 9


def test_a_single_token_has_no_decode_speed() -> None:
    run = figures.run_of([{"stamps_s": [0.1], "peak_memory_bytes": 1}], batch=1)
    assert run.decode_tokens_per_s is None
    side = figures.side([[{"stamps_s": [0.1], "peak_memory_bytes": 1}]], 1, 0.5, [{"stamps_s": [0.4]}])
    assert side.decode_tokens_per_s is None
    assert side.inter_token_ms_p50 is None
    assert side.tokens_per_s.std is None
    assert side.warmup_s == 0.4


def test_a_pair_repeats_short_runs() -> None:
    assert race.repeats_for(10.0) == 1
    assert race.repeats_for(0.2) == 3
    assert race.repeats_for(1e-4) == race.LARGEST_REPEATS


def test_comparison_says_how_much_faster() -> None:
    slow = [[{"stamps_s": [0.2, 0.4 + 0.01 * i], "peak_memory_bytes": 1}] for i in range(5)]
    fast = [[{"stamps_s": [0.1, 0.2 + 0.005 * i], "peak_memory_bytes": 1}] for i in range(5)]
    warm = [{"stamps_s": [1.0]}]
    found = figures.compare(figures.side(slow, 1, 0, warm), figures.side(fast, 1, 0, warm), seed=0)
    assert found.tokens_per_s_ratio == pytest.approx(2.0)
    assert found.tokens_per_s_interval is not None
    assert found.tokens_per_s_interval[0] > 1.9
    assert found.ttft_ratio == pytest.approx(2.0)
    assert found.decode_ratio == pytest.approx(2.0)


def test_outputs_explain_a_divergence_by_its_margin() -> None:
    tokens = np.array([[3, 1, 2]])
    logits = np.zeros((1, 3, 4), dtype=np.float32)
    logits[0, [0, 1, 2], tokens[0]] = 5.0
    logits[0, 1, 2] = 4.99
    other = logits.copy()
    other[0, 1, 2] = 5.02
    found = figures.compare_outputs(tokens, np.array([[3, 2, 2]]), logits, other)
    assert not found.tokens_equal
    assert found.divergence is not None
    assert (found.divergence.sequence, found.divergence.position) == (0, 1)
    assert (found.divergence.baseline_token, found.divergence.grafted_token) == (1, 2)
    assert found.divergence.baseline_margin == pytest.approx(0.01, abs=1e-5)
    assert found.divergence.grafted_difference == pytest.approx(0.03, abs=1e-5)
    assert found.logits_rel_rmse is not None
    assert 0 < found.logits_rel_rmse < 0.01


def test_a_divergence_beyond_the_kept_logits_has_no_margin() -> None:
    logits = np.ones((1, 1, 4), dtype=np.float32)
    found = figures.compare_outputs(np.array([[3, 1]]), np.array([[3, 2]]), logits, logits)
    assert found.divergence is not None
    assert found.divergence.baseline_margin is None
    assert found.logits_rel_rmse == 0.0


# --- the order of the runs, with a fake worker in its own process ---

FAKE = """
import json, os, sys, time
log = open(os.environ["FAKE_LOG"], "a", buffering=1)
mode, _, who = os.environ.get("FAKE_MODE", "").partition("@")
name, leg = "?", None
runs = 0
def shares(us):
    return {"regime": order["regime"], "tokens": 8, "wall_ms": 2.0, "busy_ms": 1.0, "kernels": 16, "kernel_us": us,
            "languages_percent": {"cutile": 100.0}}
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "start":
        name = order["contender"]
    now = mode if who in ("", name) else ""
    if now == "refused" and order["do"] == "start":
        said = {"error": "UsageError", "message": "it has no patch for `t`"}
    elif order["do"] == "start":
        said = {"model": json.loads(os.environ["FAKE_MODEL"]), "machine": json.loads(os.environ["FAKE_MACHINE"]),
                "threads": 1, "load_s": 0.1, "weights": "other" if now == "heavy" else "same"}
    elif order["do"] == "configure":
        said = {"prompt_tokens": order["prompt_tokens"] or 3}
        runs, leg = 0 if now == "slow" and order != leg else runs, order
    elif order["do"] == "generate":
        log.write(name + "\\n")
        runs += 1
        if now == "crash":
            sys.exit("the cable came off")
        if now == "hang":
            time.sleep(60)
        if now == "slow" and runs == 1 and leg["new_tokens"] > 1:
            time.sleep(float(os.environ["FAKE_SLEEP"]))
        if now == "wrong":
            said = {"error": "MismatchError", "message": "the graft is for another model"}
        elif now == "broken" or (now == "late" and runs == 3):
            said = {"error": "ValueError", "message": "it broke"}
        else:
            last = 1.2 if name == "eager" else 0.6
            said = {"stamps_s": [0.1, last], "tokens": [[5, 6], [7, 9 if now == "differs" else 8]],
                    "peak_memory_bytes": 1000}
    elif order["do"] == "proof":
        said = {"proof": {"patch_imported": now == "dirty"}, "evidence": [] if name == "eager" else ["norm: other"]}
    elif order["do"] == "counters":
        row = {"family": "f", "sites": ["s"], "calls": {"x": 0 if now == "idle" else 4}, "original_by_choice": 0,
               "fallbacks": {"dtype": 3} if now == "idle" else {}, "contained": 0}
        said = {"calls": [row], "unreached": ["f (s)"] if now == "idle" else []}
    elif order["do"] == "float32":
        said = {"made": now == "float32"}
        name = "precise"
    elif order["do"] == "logits":
        import numpy, safetensors.numpy
        logits = numpy.ones((1, 2, 4), dtype="float32") * (1.1 if name == "precise" else 1)
        safetensors.numpy.save_file({"logits": logits}, order["file"])
        said = {"rows": order["rows"][:1]}
    elif order["do"] == "work":
        if now == "uncounted":
            said = {"error": "KernelgraftError", "message": "it cannot be counted"}
        else:
            said = {"work": {"regime": order["regime"], "tokens": 2, "bytes_per_step": 4e9, "flops_per_step": 1e9},
                    "limits": {"bandwidth_gb_s": 4000.0, "tflops": 100.0}}
    elif order["do"] == "trace":
        said = {"trace": shares(3.0)} if now != "blind" else {"error": "UsageError", "message": "no kernels"}
    else:
        said = {"coverage": {"device": "cpu", "cpu_time_percent": 40.0, "sites_percent": {"s": 40.0}, "new_tokens": 2}}
    print(json.dumps(said), flush=True)
"""


class _Accepting:
    accepted = ("one",)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the runner start the fake worker; `fake.log()` is who generated, in order."""
    (tmp_path / "fake_worker.py").write_text(FAKE)
    log = tmp_path / "log"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FAKE_LOG", str(log))
    model = {
        "name": "m",
        "class_name": "M",
        "type": "t",
        "parameters": 1,
        "dtype": "float32",
        "device": "cpu",
        "transformers": "5",
        "config_sha256": "0",
    }
    monkeypatch.setenv("FAKE_MODEL", json.dumps(model))
    monkeypatch.setenv("FAKE_MACHINE", machine.read().model_dump_json())
    real = process.Worker
    patience = {"hang": 2.0}
    monkeypatch.setattr(
        race,
        "Worker",
        lambda name, timeout_s, environment: real(
            name,
            module="fake_worker",
            timeout_s=patience.get(os.environ["FAKE_MODE"].partition("@")[0], 60.0),
            environment=environment,
        ),
    )
    monkeypatch.setenv("FAKE_MODE", "")
    monkeypatch.setattr(runner, "_read", lambda folder: _Accepting())

    class Fake:
        def run(self, mode: str = "", **options: Any) -> BenchResult:
            monkeypatch.setenv("FAKE_MODE", mode)
            return bench("m", tmp_path, new_tokens=2, batch=2, **options)

        def log(self) -> list[str]:
            return log.read_text().split()

    return Fake()


def test_pairs_are_interleaved_and_swapped(fake: Any) -> None:
    seen: list[tuple[int, int | None]] = []
    result = fake.run(pairs=3, warmup_runs=1, progress=lambda stage, done, total, text: seen.append((done, total)))
    a, b = "eager", "kernelgraft"
    assert fake.log() == [a, b, a, b, b, a, a, b]
    assert [c.name for c in result.contenders] == [a, b]
    assert len(result.baseline.runs) == 3
    assert result.grafted is not None
    assert len(result.grafted.runs) == 3
    assert result.comparison is not None
    assert result.comparison.tokens_per_s_ratio == pytest.approx(2.0)
    assert result.outputs is not None
    assert result.outputs.tokens_equal
    assert result.coverage is not None
    assert result.coverage.cpu_time_percent == 40.0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {7}
    assert BenchResult.model_validate_json(result.model_dump_json()) == result


def test_short_runs_are_repeated_in_turns(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "TURN_S", 2.0)  # a baseline run takes 1.2 s
    result = fake.run(pairs=2, warmup_runs=1)
    a, b = "eager", "kernelgraft"
    assert fake.log() == [a, b, a, b, b, a, b, a, a, b]
    assert result.setting.repeats == 2
    assert len(result.baseline.runs) == 2
    assert len(result.baseline.runs[0].decode_ms) == 2


def test_without_a_graft_only_the_baseline_runs(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench("m", None, pairs=2, warmup_runs=1, new_tokens=2)
    assert fake.log() == ["eager"] * 3
    assert result.grafted is None
    assert result.comparison is None
    assert result.outputs is None
    assert result.coverage is None


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("wrong", MismatchError, "another model"),
        ("broken", KernelgraftError, "the eager process failed in `generate`: ValueError: it broke"),
        ("crash", KernelgraftError, "the eager process ended with code 1 during `generate`: the cable came off"),
        ("dirty", KernelgraftError, "does not run the model's own code"),
        ("idle", UnreachedError, r"`f \(s\)` \(fell back: dtype\)"),
        ("hang", KernelgraftError, "did not answer `generate` within 2 s"),
    ],
)
def test_a_failing_process_is_told_in_one_line(fake: Any, mode: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        fake.run(mode, pairs=1, warmup_runs=1)
    assert "\n" not in str(caught.value)


def test_every_contender_runs_in_its_turn(fake: Any) -> None:
    result = fake.run(compare=["liger", "kernelgraft", "static-compile"], pairs=2, warmup_runs=1)
    names = ["eager", "static-compile", "liger", "kernelgraft"]
    assert fake.log() == [*names, *names, *reversed(names)]
    assert [c.name for c in result.contenders] == names
    assert all(c.comparison and c.outputs and c.outputs.tokens_equal for c in result.contenders[1:])
    assert result.contenders[2].evidence == ("norm: other",)
    assert [bool(c.calls) for c in result.contenders] == [False, False, False, True]
    assert result.grafted == result.contenders[3].side


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("refused@liger", "it has no patch for `t`"),
        ("broken@liger", "the liger process failed in `generate`: ValueError: it broke"),
        ("late@liger", "the liger process failed in `generate`: ValueError: it broke"),
        ("crash@liger", "the liger process ended with code 1 during `generate`: the cable came off"),
        ("hang@liger", "the liger process did not answer `generate` within 2 s"),
        ("heavy@liger", "the liger process has other weights than the original's"),
    ],
)
def test_a_peer_that_fails_is_told_and_the_rest_goes_on(fake: Any, mode: str, words: str) -> None:
    result = fake.run(mode, compare=["liger", "kernelgraft"], pairs=2, warmup_runs=1)
    peer = result.contender("liger")
    assert peer is not None
    assert peer.side is None
    assert words in str(peer.failure)
    assert result.comparison is not None
    assert len(result.grafted.runs) == len(result.baseline.runs) == 2


def test_what_differs_is_found_in_its_own_row(fake: Any) -> None:
    result = fake.run("differs@kernelgraft", pairs=1, warmup_runs=1)
    assert result.outputs is not None
    assert result.outputs.divergence is not None
    assert (result.outputs.divergence.sequence, result.outputs.divergence.position) == (1, 1)
    assert result.outputs.divergence.baseline_margin == 0.0, "the logits handed over are those of sequence 1"


def test_on_a_gpu_there_are_traces_and_rooflines(fake: Any) -> None:
    result = fake.run("float32@eager", compare=["liger", "kernelgraft"], pairs=1, warmup_runs=1, device="cuda")
    assert result.coverage is None
    for contender in result.contenders:
        assert [t.regime for t in contender.traces] == ["decode", "prefill"]
        assert [r.regime for r in contender.rooflines] == ["decode", "prefill"]
        assert contender.float32_rel_rmse == pytest.approx(0.1 / 1.1, rel=1e-4)
    ours = result.contenders[2]
    # Two tokens in 0.5 s; the limit of a step is 1 ms.
    assert ours.rooflines[0].percent == pytest.approx(100 * 0.001 / 0.5)
    assert ours.rooflines[1].percent == pytest.approx(100 * 0.001 / 0.1)


def test_what_cannot_be_traced_or_counted_does_not_end_the_benchmark(fake: Any) -> None:
    result = fake.run("uncounted@eager", pairs=1, warmup_runs=1, device="cuda")
    assert result.contenders[0].rooflines == ()
    assert len(result.contenders[0].traces) == 2
    assert result.contenders[0].float32_rel_rmse is None
    result = fake.run("blind@kernelgraft", pairs=1, warmup_runs=1, device="cuda")
    assert "no trace of decode: no kernels" in result.contenders[1].evidence
    assert fake.run(pairs=1, warmup_runs=1, device="cuda", trace=False).contenders[1].traces == ()


def test_a_race_goes_on_with_those_that_failed_in_another_leg(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "late@liger")
    order = {"spec": "m", "device": "cpu"}
    leg = race.Leg(batch=1, prompt_tokens=None, new_tokens=2, cache="dynamic")
    with race.Race(["eager", "liger"], order, keep_failed=True) as own:
        own.start()
        lap = own.measure(leg, pairs=3, warmup_runs=1)
        assert list(lap.runs) == ["eager"]
        assert own.active == ["eager"]
        own.readmit()
        again = own.measure(leg, pairs=3, warmup_runs=1, deadline=machine.clock())
        assert list(again.runs) == ["eager", "liger"]
        assert len(again.runs["eager"]) == 1, "no round begins after the deadline"


DECODE = race.Leg(batch=1, prompt_tokens=None, new_tokens=2, cache="dynamic")
COMPILER = "static-compile"


@pytest.fixture
def compiling(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a race on a GPU in which the compiled contender's first run takes so many seconds."""
    monkeypatch.setattr(race, "PATIENCE_S", 0.0)

    def begin(seconds: float, limit_s: float = 60.0) -> race.Race:
        monkeypatch.setenv("FAKE_MODE", f"slow@{COMPILER}")
        monkeypatch.setenv("FAKE_SLEEP", str(seconds))
        own = race.Race(["eager", COMPILER, "liger"], {"spec": "m", "device": "cuda"}, keep_failed=True)
        own.start({COMPILER: DECODE}, warmup_runs=2, limit_s=limit_s)
        return own

    return begin


def test_one_that_warms_up_for_long_holds_nobody_up(fake: Any, compiling: Any) -> None:
    with compiling(3.0) as own:
        lap = own.measure(DECODE, pairs=2, warmup_runs=1)
        assert fake.log() == [COMPILER, "eager", "liger", "eager", "liger", "liger", "eager"]
        assert list(lap.runs) == ["eager", "liger"]
        assert own.active == ["eager", "liger"]
        assert "its warm-up (compilation) has taken" in own.away[COMPILER]
        own.wait_for(COMPILER, machine.clock() + 60)
        assert own.away == {}
        late = own.measure(DECODE, pairs=2, warmup_runs=1, names=["eager", COMPILER])
        assert list(late.runs) == ["eager", COMPILER]
        assert len(late.warm[COMPILER]) == 2, "it has warmed up by itself, and does not once more"
        assert fake.log()[7:] == [COMPILER, "eager", "eager", COMPILER, COMPILER, "eager"]
        assert own.compare(late)[COMPILER].tokens_equal


def test_one_that_is_ready_in_time_is_measured_with_the_others(fake: Any, compiling: Any) -> None:
    with compiling(0.0) as own:
        while not own._early[COMPILER].done.done():
            pass
        lap = own.measure(DECODE, pairs=1, warmup_runs=1)
        assert list(lap.runs) == ["eager", COMPILER, "liger"]
        assert fake.log().count(COMPILER) == 2 + 1
        assert own.side(lap, COMPILER).warmup_s == 0.6


def test_one_that_gets_ready_while_others_warm_up_is_measured_with_them(
    compiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling(0.5) as own:
        plain = own._warm

        def warm(*args: Any) -> Any:
            found = plain(*args)
            own._early[COMPILER].done.result()
            return found

        monkeypatch.setattr(own, "_warm", warm)
        lap = own.measure(DECODE, pairs=2, warmup_runs=1)
        assert set(lap.runs) == {"eager", COMPILER, "liger"}
        assert len(lap.runs[COMPILER]) == 2


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_one_that_is_away_is_halted_with_its_children_while_others_are_measured(
    compiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[set[str]] = []

    def state() -> set[str]:
        pids = process.family(worker_of_compiler._process.pid)
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    with compiling(5.0) as own:
        worker_of_compiler = own._workers[COMPILER]
        assert "T" not in state()
        rounds = own._rounds

        def looked(*args: Any) -> Any:
            states.append(state())
            time.sleep(0.5)
            return rounds(*args)

        monkeypatch.setattr(own, "_rounds", looked)
        own.measure(DECODE, pairs=1, warmup_runs=1)
        assert states == [{"T"}]
        assert "T" not in state()
        early = own._early[COMPILER]
        assert 0.5 <= early.stopped_s < machine.clock() - early.began
        assert "was halted for" in own.away[COMPILER]


def test_a_family_is_a_process_with_what_it_started() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        until = machine.clock() + 20
        while len(found := process.family(parent.pid)) < 2 and machine.clock() < until:
            time.sleep(0.05)
        assert found[0] == parent.pid
        assert len(found) == 2
        assert os.getpid() not in found
        assert parent.stdin is not None
        parent.stdin.write(b"\n")
    assert process.family(parent.pid) == [parent.pid]


def test_one_that_takes_too_long_has_failed_with_the_seconds(fake: Any, compiling: Any) -> None:
    with compiling(60.0, limit_s=0.5) as own:
        own.wait_for(COMPILER, machine.clock() + 30)
        assert "its warm-up (compilation) has taken" in own.failures[COMPILER]
        assert "the limit is 0 s" in own.failures[COMPILER]
        own.readmit()
        assert COMPILER in own.failures, "it is not tried again"
        assert list(own.measure(DECODE, pairs=1, warmup_runs=1).runs) == ["eager", "liger"]
    with compiling(60.0) as own:
        own.wait_for(COMPILER, machine.clock())
        assert "no time was left for more" in own.failures[COMPILER]
    began = machine.clock()
    with compiling(60.0) as own:
        pass
    assert machine.clock() - began < 30, "the race does not wait for it"


def test_one_that_fails_by_itself_is_told(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", f"broken@{COMPILER}")
    with race.Race(["eager", COMPILER], {"spec": "m", "device": "cuda"}, keep_failed=True) as own:
        own.start({COMPILER: DECODE})
        own.wait_for(COMPILER, machine.clock() + 30)
        assert "it broke (its warm-up (compilation) has taken 0 s)" in own.failures[COMPILER]


def test_a_peer_s_warm_up_has_a_limit(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "slow@liger")
    monkeypatch.setenv("FAKE_SLEEP", "60")
    with race.Race(["eager", "liger"], {"spec": "m", "device": "cpu"}, keep_failed=True) as own:
        own.start()
        lap = own.measure(DECODE, pairs=1, warmup_runs=1, warmup_limit_s=0.5)
        assert list(lap.runs) == ["eager"]
        assert "did not answer `generate`" in own.failures["liger"]
        assert own._workers["eager"].timeout_s > 1


def test_compilers_are_told_how_many_processes_they_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[str, str]] = {}

    class Silent:
        def __init__(self, name: str, *, timeout_s: float, environment: dict[str, str]) -> None:
            seen[name] = environment

        def close(self) -> None: ...

        def leave(self) -> None: ...

    monkeypatch.setattr(race, "Worker", Silent)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.delenv(race.COMPILERS, raising=False)
    with race.Race(["eager", COMPILER, f"{COMPILER}:2"], {"device": "cuda"}):
        assert seen == {"eager": {}, COMPILER: {race.COMPILERS: "5"}, f"{COMPILER}:2": {race.COMPILERS: "5"}}
    monkeypatch.setenv(race.COMPILERS, "2")
    with race.Race([COMPILER], {"device": "cuda"}):
        assert seen[COMPILER] == {}, "who has said it is heard"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pairs": 0}, "`pairs`"),
        ({"new_tokens": 0}, "`new_tokens`"),
        ({"batch": 0}, "`batch`"),
        ({"cache": "x"}, "`x`"),
        ({"prompt_tokens": 0}, "`prompt_tokens`"),
        ({"compare": ["vllm"]}, "`vllm` is no contender"),
        ({"compare": ["kernelgraft"]}, "needs a graft"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bench("tiny", None, **options)


def test_a_folder_without_a_graft(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no graft"):
        bench("tiny", tmp_path)


# --- the worker ---


def test_the_worker_answers_errors_and_goes_on() -> None:
    start = {"do": "start", **ORDER, "spec": "no such model"}
    answers = io.StringIO()
    worker.serve(io.StringIO(json.dumps(start) + "\n" + json.dumps({"do": "generate"}) + "\n"), answers)
    first, second = (json.loads(line) for line in answers.getvalue().splitlines())
    assert first["error"] == "UsageError"
    assert "`no such model`" in first["message"]
    assert second["error"] == "AssertionError"


ORDER = {
    "contender": "eager",
    "spec": "config:llama",
    "graft": None,
    "dtype": None,
    "device": "cpu",
    "seed": 0,
    "threads": 1,
    "trust_remote_code": False,
    "prompt": "The capital",
}


def session(
    cache: str = "dynamic",
    batch: int = 2,
    new_tokens: int = 4,
    prompt_tokens: int | None = None,
    **order: Any,
) -> worker.Session:
    made = worker.Session(ORDER | order)
    setting = {"batch": batch, "cache": cache, "new_tokens": new_tokens, "prompt_tokens": prompt_tokens}
    assert made.configure(setting)["prompt_tokens"] == made.ids.shape[1]
    return made


def test_a_run_stamps_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    own = session()
    monkeypatch.setattr(machine, "clock", lambda: float(next(ticks)))
    said = own.generate()
    # One reading before generate and one per token, none in between.
    assert said["stamps_s"] == [1.0, 2.0, 3.0, 4.0]
    assert np.asarray(said["tokens"]).shape == (2, 4)
    assert said["peak_memory_bytes"] > 1_000_000


def test_dynamic_and_static_cache_say_the_same() -> None:
    assert session("dynamic").generate()["tokens"] == session("static").generate()["tokens"]


def test_an_end_of_text_token_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def pad(loaded: Any) -> int:  # called once the prompt is made, for which any token could be an ordinary one
        loaded.model.generation_config.eos_token_id = list(range(loaded.model.config.vocab_size))
        return 0

    monkeypatch.setattr(worker, "pad_id", pad)
    assert np.asarray(session(new_tokens=6).generate()["tokens"]).shape == (2, 6)


def test_forced_logits_are_those_of_the_given_tokens(tmp_path: Path) -> None:
    own = session()
    tokens = torch.tensor(own.generate()["tokens"])
    tokens[:, 1] = (tokens[:, 1] + torch.tensor([1, 2])) % 50
    said = own.logits(
        {"tokens": tokens.tolist(), "rows": [1, 0], "needed": 0, "steps": None, "file": str(tmp_path / "logits")}
    )
    logits = torch.from_numpy(race.load_file(tmp_path / "logits")["logits"])
    assert list(logits.shape) == said["shape"]
    with torch.no_grad():
        whole = own.model(torch.cat([own.ids, tokens], dim=1)).logits[:, own.ids.shape[1] - 1 : -1]
    torch.testing.assert_close(logits, whole[[1, 0]], rtol=1e-4, atol=1e-4)


def test_a_long_prompt_ends_with_the_prompt() -> None:
    own = session(prompt_tokens=40)
    assert own.ids.shape == (2, 40)
    ending = models.prompt_ids(own.loaded, ORDER["prompt"])
    assert torch.equal(own.ids[:, -ending.shape[1] :], ending.repeat(2, 1))
    assert not torch.equal(own.ids[0], own.ids[1]), "rows differ"
    assert torch.equal(session(prompt_tokens=40).ids, own.ids)
    assert not torch.equal(session(prompt_tokens=40, seed=1).ids, own.ids)
    assert torch.equal(session(prompt_tokens=3).ids[0], ending[0, -3:])


def test_one_process_runs_several_settings() -> None:
    own = session(batch=1, new_tokens=3)
    first = own.generate()
    own.configure({"batch": 2, "cache": "static", "new_tokens": 5, "prompt_tokens": 30})
    assert np.asarray(own.generate()["tokens"]).shape == (2, 5)
    own.configure({"batch": 1, "cache": "dynamic", "new_tokens": 3, "prompt_tokens": None})
    assert own.generate()["tokens"] == first["tokens"]


def test_float32_is_made_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session().float32() == {"made": False}, "it is float32 as it is"
    own = session(dtype="bfloat16")
    monkeypatch.setattr(machine, "free_memory_bytes", lambda device: 1000)
    assert own.float32() == {"made": False}
    monkeypatch.undo()
    assert own.float32() == {"made": True}
    assert {p.dtype for p in own.model.parameters()} == {torch.float32}
    own.generate()


def test_transformers_own_compiler_says_the_same() -> None:
    compiled = session(contender="static-compile", new_tokens=5)
    assert compiled.cache == "static"
    tokens = compiled.generate()["tokens"]
    assert hasattr(compiled.model, "_compiled_call"), "generate did not compile"
    assert tokens == session(new_tokens=5).generate()["tokens"]


# --- peers, through their own functions ---


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a package `tilegym` with the given text on the path; what it changes in transformers is put back."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.llama import modeling_llama

    for home, name in ((modeling_llama, "LlamaRMSNorm"), (modeling_llama, "LlamaMLP"), (modeling_gemma3, "Gemma3MLP")):
        monkeypatch.setattr(home, name, getattr(home, name))

    def write(text: str) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "tilegym"]:
            monkeypatch.delitem(sys.modules, name)
        home = tmp_path / "tilegym" / "transformers"
        home.mkdir(parents=True)
        (tmp_path / "tilegym" / "__init__.py").touch()
        (home / "__init__.py").touch()
        (home / "monkey_patch.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for name in [n for n in sys.modules if n.partition(".")[0] == "tilegym"]:
        del sys.modules[name]


NORM = """
    import torch
    from torch import nn

    class OtherNorm(nn.Module):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight = nn.Parameter(torch.full((size,), 7.0))
            self.eps = eps

        def forward(self, x):
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
"""


def test_a_peer_is_applied_before_the_model_is_built(peer: Any) -> None:
    peer(
        NORM
        + """
    def into(use_cutile=False, rope=True):
        print("a lot of noise")
        from transformers.models.llama import modeling_llama
        assert use_cutile and rope
        modeling_llama.LlamaRMSNorm = OtherNorm

    MODEL_TYPE_TO_APPLY_TILEGYM_FN = {"llama": into}
    """
    )
    original = session()
    patched = session(contender="tilegym")
    assert original.start()["weights"] == patched.start()["weights"]
    evidence = patched.proof()["evidence"]
    other = "tilegym.transformers.monkey_patch.OtherNorm"
    assert evidence[0] == "called: tilegym.transformers.monkey_patch.into"
    layers = original.model.config.num_hidden_layers
    assert f"model.layers.*.input_layernorm: {other} ×{layers}" in evidence
    assert f"model.norm: {other}" in evidence
    assert f"transformers.models.llama.modeling_llama.LlamaRMSNorm: {other}" in evidence
    assert len(evidence) == 5
    assert patched.generate()["tokens"] == original.generate()["tokens"]
    assert original.proof()["evidence"] != [], "the original's process would notice a change of its own modules"


def test_a_text_model_takes_the_patch_of_the_composite_one(peer: Any) -> None:
    peer(
        """
    def into():
        from transformers.models.gemma3 import modeling_gemma3

        class OtherMLP(modeling_gemma3.Gemma3MLP):
            pass

        modeling_gemma3.Gemma3MLP = OtherMLP

    MODEL_TYPE_TO_APPLY_TILEGYM_FN = {"bert": None, "gemma3": into}
    """
    )
    lines = session(contender="tilegym", spec="config:gemma3_text").proof()["evidence"]
    assert any(line.startswith("model.layers.*.mlp: ") for line in lines)


def test_a_patch_is_also_found_by_the_name_of_its_function(peer: Any) -> None:
    peer(
        NORM
        + """
    def apply_tilegym_kernel_to_llama():
        from transformers.models.llama import modeling_llama
        modeling_llama.LlamaRMSNorm = OtherNorm
    """
    )
    assert "apply_tilegym_kernel_to_llama" in session(contender="tilegym").proof()["evidence"][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MODEL_TYPE_TO_APPLY_TILEGYM_FN = {}", "has no patch for `llama`"),
        ("MODEL_TYPE_TO_APPLY_TILEGYM_FN = {'llama': print}", "changes nothing in `LlamaForCausalLM`"),
        ("import no_such_package", r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_package'\)"),
        (
            "from torch import nn\n"
            "class Other(nn.Module):\n"
            "    def __init__(self, *a, **k):\n"
            "        super().__init__()\n"
            "        self.packed = nn.Linear(4, 4)\n"
            "def into():\n"
            "    from transformers.models.llama import modeling_llama\n"
            "    modeling_llama.LlamaMLP = Other\n"
            "MODEL_TYPE_TO_APPLY_TILEGYM_FN = {'llama': into}\n",
            "does not take the original's weights",
        ),
    ],
)
def test_what_a_peer_cannot_do_is_told(peer: Any, text: str, words: str) -> None:
    peer(text)
    with pytest.raises(UsageError, match=words):
        session(contender="tilegym")


def test_differences_name_what_stands_where(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    model = small()
    before = facts(model)
    assert differences(before, facts(model)) == []
    model.model.layers[0].mlp.forward = types.MethodType(type(model.model.layers[0].mlp).forward, model)
    model.model.layers[1].mlp.forward = types.MethodType(lambda self, x: x, model)
    model.lm_head.forward = types.MethodType(torch.nn.Linear.forward, model.lm_head)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", F.silu)
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", modeling_llama.LlamaMLP.forward)
    monkeypatch.setattr(F, "cross_entropy", F.silu)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", F.silu)
    assert sorted(differences(before, facts(model))) == [
        "attention function `sdpa`: torch.nn.functional.silu",
        "lm_head.forward: a copy of its class's own with other names in it",
        "model.layers.*.mlp.forward: a copy of its class's own with other names in it",
        f"model.layers.*.mlp.forward: {__name__}.test_differences_name_what_stands_where.<locals>.<lambda>",
        "torch.nn.functional.cross_entropy: torch.nn.functional.silu",
        "transformers.models.llama.modeling_llama.LlamaModel.forward: "
        "transformers.models.llama.modeling_llama.LlamaMLP.forward",
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb: torch.nn.functional.silu",
    ]


def test_busy_cores_are_counted() -> None:
    code = "import time; end = time.time() + 20\nwhile time.time() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        found = machine.busy_cores(1.0)
    finally:
        process.kill()
        process.wait()
    assert found is not None
    assert 0.3 < found <= (os.cpu_count() or 1) + 0.1


def test_a_busy_machine_is_waited_for(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([3.0, 2.0, 0.4])
    monkeypatch.setattr(machine, "busy_cores", lambda seconds: next(loads))
    assert fake.run(pairs=1, warmup_runs=1, device="cuda").setting.busy_cores == 0.4
    monkeypatch.setattr(machine, "busy_cores", lambda seconds: 3.0)
    assert fake.run(pairs=1, warmup_runs=1).setting.busy_cores == 3.0, "on a CPU it is only told"
    monkeypatch.setattr(race, "PATIENCE_S", 0.05)
    assert fake.run(pairs=1, warmup_runs=1, device="cuda").setting.busy_cores == 3.0


def test_peak_memory_is_the_process_own() -> None:
    ballast = bytearray(300 << 20)
    ballast[:: 1 << 12] = b"x" * len(ballast[:: 1 << 12])
    code = "from kernelgraft import machine; print(machine.peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 << 20 < int(done.stdout) < 250 << 20
    assert machine.peak_memory_bytes() > len(ballast)


# --- the proof ---


def small() -> Any:
    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    config.num_key_value_heads = 1
    return AutoModelForCausalLM.from_config(config).eval()


def test_an_untouched_model_is_clean() -> None:
    code = textwrap.dedent(
        """
        from kernelgraft.bench import worker, proof
        from kernelgraft.models import load
        before = proof.attention_functions()
        found = proof.prove(load("config:llama").model, before)
        print(found.clean, found.patch_imported)
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_replaced_forward_is_seen() -> None:
    model = small()
    norm = model.model.norm
    norm.forward = lambda x: x
    found = prove(model, attention_functions())
    assert found.replaced_methods == ("model.norm.forward",)
    assert not found.clean


def test_a_class_patched_by_another_package_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()

    def forward(self: Any, x: Any) -> Any:
        return x

    monkeypatch.setattr(type(model.model.norm), "forward", forward)
    assert "model.norm." in prove(model, attention_functions()).replaced_methods[-1]


def test_a_registered_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = attention_functions()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *a, **k: None)
    assert prove(small(), before).foreign_attention == ("sdpa",)


def test_proof_of_an_imported_patch_is_not_clean() -> None:
    assert Proof(patch_imported=False).clean
    assert not Proof(patch_imported=True).clean


# --- coverage ---


def test_shares_count_nested_sites_once() -> None:
    ranges = [
        Range("b", 0.15, 0.25),
        Range("a", 0.1, 0.3),
        Range("a", 0.4, 0.5),
        Range("b", 0.6, 0.65),
    ]
    total, sites = shares(ranges, 1.0)
    assert total == pytest.approx(35.0)
    assert sites == {"a": pytest.approx(30.0), "b": pytest.approx(15.0)}


def test_shares_take_the_readings_of_the_clock_off() -> None:
    # `a` holds two ranges, so five readings of 1 ms; the whole holds six.
    ranges = [Range("a", 0.1, 0.305), Range("b", 0.15, 0.161), Range("c", 0.17, 0.181)]
    total, sites = shares(ranges, 1.006, reading_s=0.001)
    assert total == pytest.approx(20.0)
    assert sites == {"a": pytest.approx(20.0), "b": pytest.approx(1.0), "c": pytest.approx(1.0)}


def test_shares_of_nothing() -> None:
    with pytest.raises(KernelgraftError, match="no CPU time"):
        shares([], 0.0)


# --- the real thing, with the bundled model and a graft whose Solutions were seated without measuring ---


@pytest.fixture(scope="module")
def graft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graft")
    inventory = Inventory(folder)
    research, computes = pipeline.research(models.load("tiny"), inventory)
    found = pipeline.candidates(computes, suppliers.select(["torch"]), machine.read())
    patches, solutions = [], {}
    for compute in computes:
        seats = []
        for bound in compute.bound:
            definition, regime = bound.definition.name, bound.call.regime
            best = next(iter(found.solutions[definition]), None)
            if best and (definition, regime) not in [(s.definition, s.regime) for s in seats]:
                solutions[best.name] = best
                work = families.get(compute.family).work(bound.inputs)
                seats.append(Seat(definition=definition, regime=regime, work=work, solution=best.name, seated=True))
        if seats:
            names = tuple(d.name for d in compute.definitions)
            patches.append(
                Patch(
                    family=compute.family,
                    sites=tuple(compute.sites),
                    semantics=compute.semantics,
                    definitions=names,
                    status="accepted",
                    seats=tuple(seats),
                )
            )
    graft = Graft(
        model=research.model,
        machine=machine.read(),
        policy="verified",
        patches=tuple(patches),
        definitions={d.name: d for c in computes for d in c.definitions},
        solutions=solutions,
        evaluations=(),
    )
    inventory.save_record("graft", graft)
    return folder


def test_the_bundled_model_before_and_after(graft_folder: Path) -> None:
    result = bench("tiny", graft_folder, pairs=2, new_tokens=8, threads=1)
    graft = Inventory(graft_folder).load_record("graft", Graft)
    assert result.contenders[0].proof is not None
    assert result.contenders[0].proof.clean
    assert result.outputs is not None
    assert result.outputs.tokens_equal
    assert result.outputs.logits_rel_rmse is not None
    assert result.outputs.logits_rel_rmse < 1e-5
    calls = result.contenders[1].calls
    assert {c.family for c in calls} == {p.family for p in graft.accepted}
    assert len(calls) >= 3
    assert all(any(c.calls.values()) for c in calls)
    assert result.coverage is not None
    assert 5 < result.coverage.cpu_time_percent < 95
    assert set(result.coverage.sites_percent) == {s.key for p in graft.accepted for s in p.sites}
    assert result.grafted is not None
    assert result.grafted.peak_memory_bytes > 50 << 20


def test_ranges_leave_the_model_as_it_was(graft_folder: Path) -> None:
    model = models.load("tiny").model
    before = {(path, name): value for path, m in model.named_modules() for name, value in vars(m).items()}
    graft = Inventory(graft_folder).load_record("graft", Graft)
    recorder = Recorder()
    ids = torch.tensor([[5, 6, 7]])

    def fail_inside() -> None:
        with ranged(model, graft, recorder), torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
            raise ZeroDivisionError

    with torch.no_grad():
        expected = model(ids).logits
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    after = {(path, name): value for path, m in model.named_modules() for name, value in vars(m).items()}
    assert recorder.ranges
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)


def test_a_graft_of_another_model_is_refused(graft_folder: Path) -> None:
    with pytest.raises(GraftError) as caught:
        bench("config:llama", graft_folder, pairs=1, new_tokens=2, threads=1)
    assert "\n" not in str(caught.value)


# --- benchmarks/end_to_end.py ---


@pytest.fixture(scope="module")
def script() -> Any:
    file = Path(__file__).parent.parent / "benchmarks" / "end_to_end.py"
    spec = importlib.util.spec_from_file_location("end_to_end", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["end_to_end"] = module  # for its dataclasses
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def test_the_smoke_of_all_models_and_settings(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "results" / "end_to_end.json"
    arguments = ["--models", "tiny", "--device", "cpu", "--dtype", "bfloat16", "--pairs", "1", "--warmup", "1"]
    code = script.main([*arguments, "--threads", "1", "--contenders", "liger", "--json", str(file)])
    answer = json.loads(file.read_text())
    assert code == 0
    keys = ["model", "regime", "batch", "prompt_tokens", "new_tokens", "contender"]
    keys += ["tokens_per_s", "ttft_ms", "roofline_percent", "tokens_equal"]
    assert all(set(keys) <= set(cell) for cell in answer["cells"])
    eager = [cell for cell in answer["cells"] if cell["contender"] == "eager"]
    assert [(c["regime"], c["batch"], c["prompt_tokens"], c["new_tokens"]) for c in eager] == [
        ("decode", 1, 8, 4),
        ("prefill", 1, 24, 1),
        ("decode", 2, 8, 4),
    ]
    for cell in eager:
        assert cell["tokens_equal"] is True
        assert cell["ttft_ms"] > 0
        assert cell["roofline_percent"] > 0
        assert cell["throughput"].startswith("Average throughput: ")
    assert eager[1]["tokens_per_s"] == pytest.approx(24e3 / eager[1]["ttft_ms"])
    assert answer["environment"]["cpu"]
    liger = [cell for cell in answer["cells"] if cell["contender"] == "liger"]
    assert len(liger) == 3
    assert all(cell["failure"] and cell["tokens_per_s"] is None for cell in liger)
    assert answer["models"]["tiny"]["float32_rel_rmse"]["eager"] < 0.1


def test_every_contender_of_a_gpu_is_in_every_cell(
    fake: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "all.json"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "graft.json").touch()
    monkeypatch.setenv("FAKE_MODE", "float32@eager")
    arguments = ["--models", "m,n", "--contenders", "static-compile,liger,kernelgraft", "--pairs", "2"]
    arguments += ["--warmup", "1", "--graft-dir", str(tmp_path), "--budget", "300", "--json", str(file)]
    code = script.main(arguments)
    answer = json.loads(file.read_text())
    cells = [c for c in answer["cells"] if c["model"] == "m"]
    settings = [("decode", 1, 32, 64), ("prefill", 1, 4096, 1), ("decode", 32, 128, 64)]
    names = ["eager", "static-compile", "liger", "kernelgraft"]
    assert [((c["regime"], c["batch"], c["prompt_tokens"], c["new_tokens"]), c["contender"]) for c in cells] == [
        (setting, name) for setting in settings for name in names
    ]
    assert all(c["tokens_equal"] and c["roofline_percent"] for c in cells)
    assert set(cells[3]["over"]) == {"eager", "static-compile", "liger"}
    # 1.1 s after the first token against 0.5 s; the first token comes at the same time.
    assert cells[3]["over"]["eager"]["ratio"] == pytest.approx(2.2)
    assert cells[7]["over"]["eager"]["ratio"] == pytest.approx(1.0)
    about = answer["models"]["m"]
    assert about["evidence"]["liger"] == ["norm: other"]
    assert about["calls"][0]["calls"] == {"x": 4}
    assert [(t["contender"], t["regime"]) for t in about["traces"]] == [
        ("eager", "decode"), ("kernelgraft", "decode"), ("eager", "prefill"), ("kernelgraft", "prefill"),
    ]  # fmt: skip
    assert about["float32_rel_rmse"]["kernelgraft"] == pytest.approx(0.1 / 1.1, rel=1e-4)
    # No graft of the second model can be made here, which has no such model.
    other = [c for c in answer["cells"] if c["model"] == "n" and c["contender"] == "kernelgraft"]
    assert len(other) == 3
    assert all("integrating ended with code 1" in c["failure"] for c in other)
    assert code == 0


def test_a_near_tie_is_told_from_a_fault(script: Any) -> None:
    at = {"baseline_margin": 0.125, "grafted_difference": 0.25}
    assert script.near_tie(at) is True
    assert script.near_tie(at | {"baseline_margin": 0.51}) is False
    assert script.near_tie(at | {"baseline_margin": None}) is None
    assert script.near_tie(None) is None


def test_what_there_was_no_time_for_is_listed(
    fake: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "short.json"
    arguments = ["--models", "m,n", "--contenders", "eager", "--pairs", "5", "--warmup", "1", "--budget", "0"]
    assert script.main([*arguments, "--json", str(file)]) == 1
    assert json.loads(file.read_text())["missing"] == ["m: no time was left", "n: no time was left"]
    monkeypatch.setenv("FAKE_MODE", "broken@eager")
    assert script.main(["--models", "m", "--contenders", "eager", "--json", str(file)]) == 1
    answer = json.loads(file.read_text())
    assert answer["cells"] == []
    assert len(answer["missing"]) >= 3
    assert all(": " in text for text in answer["missing"]), "each says why"
    assert "it broke" in answer["missing"][0]


SLOW = ["--models", "m", "--contenders", "static-compile,liger,kernelgraft", "--pairs", "2", "--warmup", "1"]


@pytest.fixture
def slow(fake: Any, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """All settings of a model whose compiled contender takes so many seconds for its first decode run."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "graft.json").touch()
    monkeypatch.setenv("FAKE_MODE", "slow@static-compile")
    monkeypatch.setattr(race, "PATIENCE_S", 0.0)

    def run(seconds: float, *more: str) -> dict[str, dict[str, Any]]:
        monkeypatch.setenv("FAKE_SLEEP", str(seconds))
        file = tmp_path / "slow.json"
        script.main([*SLOW, "--graft-dir", str(tmp_path), "--budget", "100", "--json", str(file), "--no-trace", *more])
        cells = json.loads(file.read_text())["cells"]
        assert len(cells) == 12
        return {f"{c['regime']} {c['batch']} {c['contender']}": c for c in cells}

    return run


def test_what_compiles_for_long_is_measured_after_the_others(slow: Any, fake: Any) -> None:
    cells = slow(6.0)
    assert fake.log().index("liger") < 4, "others do not wait"
    for cell in cells.values():
        assert "failure" not in cell
        assert cell["tokens_per_s"]
    compiled = cells["decode 1 static-compile"]
    assert set(compiled["measured_later_beside"]) == {"eager", "kernelgraft"}
    assert compiled["measured_later_beside"]["eager"]["tokens_per_s"] == pytest.approx(1 * 1 / 1.1 * 1)
    assert compiled["over"]["eager"]["ratio"] == pytest.approx(2.2)
    assert "measured_later_beside" not in cells["prefill 1 static-compile"], "there `generate` compiles nothing"
    assert cells["decode 1 kernelgraft"]["over"]["static-compile"]["ratio"] == pytest.approx(1.0)
    assert set(cells["decode 1 kernelgraft"]["over"]) == {"eager", "liger", "static-compile"}


def test_what_never_ends_compiling_has_failed_and_the_others_are_measured(slow: Any) -> None:
    cells = slow(90.0, "--compile-limit", "4")
    for name, cell in cells.items():
        if name in ("decode 1 static-compile", "decode 32 static-compile"):
            assert "the limit is 4 s" in cell["failure"]
            assert cell["tokens_per_s"] is None
        else:
            assert cell["tokens_per_s"], name
    assert cells["prefill 1 static-compile"]["over"]["eager"]["ratio"]


def test_models_that_another_run_measured_are_kept(fake: Any, script: Any, tmp_path: Path) -> None:
    def run(models: str, *more: str) -> dict[str, Any]:
        arguments = ["--models", models, "--contenders", "eager", "--pairs", "1", "--warmup", "1", "--no-trace"]
        script.main([*arguments, "--json", str(tmp_path / "all.json"), *more])
        found: dict[str, Any] = json.loads((tmp_path / "all.json").read_text())
        return found

    one, keep = run("a,b"), ("--merge", str(tmp_path / "all.json"))
    assert {c["model"] for c in one["cells"]} == {"a", "b"}
    two = run("b,c", *keep)
    assert [c["model"] for c in two["cells"]] == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert list(two["models"]) == ["a", "b", "c"]
    assert two["models"]["a"] == one["models"]["a"]
    assert two["models"]["b"]["environment"]["time"] >= two["environment"]["time"] >= one["environment"]["time"]
    assert two["models"]["a"]["options"] == one["options"]
    assert two["models"]["a"]["seconds"] > 0
    three = run("c", *keep, "--budget", "0")
    assert three["missing"] == ["c: no time was left"]
    assert set(three["models"]) == {"a", "b"}
    four = run("c", *keep)
    assert four["missing"] == [], "what was missing has been measured"
    assert set(run("c")["models"]) == {"c"}, "without --merge nothing is kept"


def test_files_of_several_machines_are_put_together(script: Any, tmp_path: Path) -> None:
    def file(name: str, *models: str, **more: Any) -> Path:
        content = {
            "environment": {"gpu": name},
            "options": {"pairs": 3},
            "cells": [{"model": m, "of": name} for m in models],
            "models": {m: {"calls": []} for m in models},
            "missing": [],
        }
        place = tmp_path / name
        place.write_text(json.dumps(content | more))
        return place

    one, two = file("one", "a", "b"), file("two", "b", missing=["c: no time was left"])
    target = tmp_path / "all.json"
    merge = ["--merge", str(one), "--merge", str(two), "--json", str(target)]
    assert script.main(["--models", "", *merge]) == 0
    answer = json.loads(target.read_text())
    assert [(c["model"], c["of"]) for c in answer["cells"]] == [("a", "one"), ("b", "two")]
    assert answer["environment"] == {"gpu": "one"}
    assert answer["models"]["b"] == {"environment": {"gpu": "two"}, "options": {"pairs": 3}, "calls": []}
    assert answer["missing"] == ["c: no time was left"]
    with pytest.raises(SystemExit):
        script.main(["--models", "", "--merge", str(tmp_path / "absent"), "--json", str(target)])
