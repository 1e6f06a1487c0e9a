"""The tuner (on kernels by hand, some of which crash, hang or are wrong), its tables, and the look-up."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="tuned configurations are those of cuTile kernels: needs cuda-tile")

from kernelgraft.cutile import fingerprint as fingerprint_module
from kernelgraft.cutile import tuner, tuner_worker, tuning
from kernelgraft.cutile.fingerprint import fingerprint
from kernelgraft.cutile.tuner_worker import difference
from kernelgraft.cutile.tuning import Gpu, Tunable
from kernelgraft.errors import UsageError

GPU = Gpu("NVIDIA Test 9", "sm_90")
MODULE = "kernelgraft.kernels.rms_norm"


@dataclass(frozen=True)
class Choice:
    size: int = 1
    wide: bool = False


def entered(file: Path, config: Choice, shape_class: str = "small") -> None:
    table = tuning.read_table(file)
    tunable = Tunable("rms_norm", shape_class, [config], lambda *_: (), lambda *_: None, lambda *_: None)
    tuning.put_entry(table, GPU, tunable, config, {"us": 1.0})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(table))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The user's and the packaged table of a made-up GPU."""
    monkeypatch.setenv("KERNELGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setattr(tuning, "gpu", lambda device: GPU)
    tuning.forget()
    yield tuning.user_table(GPU), tuning.packaged_table(GPU)
    tuning.forget()


# --- look-up ---


def test_without_an_entry_the_default_holds(places: tuple[Path, Path]) -> None:
    assert tuning.tuned("rms_norm", "small", 0) is None
    default = Choice(3)
    assert tuning.chosen(default, "rms_norm", "small", 0) is default


def test_the_users_entry_beats_the_packaged(places: tuple[Path, Path]) -> None:
    user, packaged = places
    entered(packaged, Choice(1))
    entered(packaged, Choice(2), "large")
    assert tuning.chosen(Choice(), "rms_norm", "small", 0) == Choice(1)
    entered(user, Choice(5, wide=True))
    tuning.forget()
    assert tuning.chosen(Choice(), "rms_norm", "small", 0) == Choice(5, wide=True)
    assert tuning.tuned("rms_norm", "large", 0) == {"size": 2, "wide": False}


def test_the_cpu_and_the_switch_leave_entries_unused(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered(places[1], Choice(4))
    assert tuning.tuned("rms_norm", "small", 0) is not None
    assert tuning.tuned("rms_norm", "small", -1) is None
    monkeypatch.setenv("KERNELGRAFT_TUNED", "off")
    assert tuning.tuned("rms_norm", "small", 0) is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("gpu", "NVIDIA Other", "NVIDIA Other"),
        ("compute_capability", "sm_100", "sm_100"),
        ("hash", "sha256:0", "its code has changed"),
        ("versions", {"cuda-tile": "0.1", "nvidia-cuda-tileiras": None}, "cuda-tile 0.1"),
    ],
)
def test_an_entry_of_something_else_is_not_used(places: tuple[Path, Path], field: str, value: Any, said: str) -> None:
    user, packaged = places
    entered(packaged, Choice(1))
    entered(user, Choice(2))
    table = json.loads(user.read_text())
    table["kernels"]["rms_norm"][field] = value
    user.write_text(json.dumps(table))
    reason = tuning.refusal(table["kernels"]["rms_norm"], GPU)
    assert reason is not None
    assert said in reason
    assert tuning.tuned("rms_norm", "small", 0) == asdict(Choice(1)), "the packaged one holds"


@pytest.mark.parametrize("text", ["{not json", "[]", '{"schema_version": 99, "kernels": {}}', '{"schema_version": 1}'])
def test_an_unreadable_table_is_said_and_left(places: tuple[Path, Path], text: str) -> None:
    places[0].parent.mkdir(parents=True)
    places[0].write_text(text)
    entered(places[1], Choice(6))
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert tuning.tuned("rms_norm", "small", 0) == asdict(Choice(6))


def test_a_table_is_read_once(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    entered(places[1], Choice(7))
    assert tuning.tuned("rms_norm", "small", 0) is not None
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read again"))
    assert tuning.tuned("rms_norm", "small", 0) is not None
    assert tuning.tuned("rms_norm", "other", 0) is None


def test_entries_of_a_test_hold_on_the_cpu_and_no_others(places: tuple[Path, Path]) -> None:
    entered(places[1], Choice(8))
    with tuning.using({("rms_norm", "small"): {"size": 9}}):
        assert tuning.chosen(Choice(wide=True), "rms_norm", "small", -1) == Choice(9, wide=True)
        assert tuning.tuned("rms_norm", "large", 0) is None
    assert tuning.tuned("rms_norm", "small", -1) is None


def test_an_entry_under_another_hash_makes_room_for_the_new(places: tuple[Path, Path]) -> None:
    file = places[0]
    entered(file, Choice(1), "small")
    entered(file, Choice(1), "large")
    table = json.loads(file.read_text())
    assert set(table["kernels"]["rms_norm"]["classes"]) == {"small", "large"}
    table["kernels"]["rms_norm"]["hash"] = "sha256:old"
    file.write_text(json.dumps(table))
    entered(file, Choice(2), "middle")
    assert set(tuning.read_table(file)["kernels"]["rms_norm"]["classes"]) == {"middle"}


def test_packaged_tables_hold_for_the_kernels_as_they_are() -> None:
    """If this fails, tune anew: the entries named are not used any more."""
    for file in sorted(tuning.PACKAGED.glob("*.json")):
        table = tuning.read_table(file)
        assert table["kernels"], f"`{file.name}` is empty or cannot be read"
        stale = [name for name, entry in table["kernels"].items() if entry["hash"] != fingerprint(entry["module"])]
        assert not stale, f"`{file.name}`: {stale} changed since they were tuned"
        for name, entry in table["kernels"].items():
            assert Gpu(entry["gpu"], "").slug == file.stem, name


# --- the hash of a kernel ---

SHARED = "def part(x):\n    return x\n\n\ndef other(x):\n    return x\n"
KERNEL = '''"""A module."""
import cuda.tile as ct
from kernelgraft.kernels import shared_parts

SIZE = 4
LIMIT = 9


@ct.kernel
def kernel(x):
    """What it does."""
    shared_parts.part(x)
    return helper(x)


def helper(x):
    return x + SIZE


def default(rows):
    return 7


def choose(rows):
    return rows or default(rows)


def plan(rows):
    # A comment.
    return choose(rows) + LIMIT


def backward(grad):
    return grad
'''


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("x + SIZE", "x - SIZE", True),
        ("SIZE = 4", "SIZE = 5", True),
        ("LIMIT = 9", "LIMIT = 8", True),
        ("return rows or", "return 1 + rows or", True),
        ("return 7", "return 8", False),
        ("return grad", "return 2 * grad", False),
        ('"""What it does."""', '"""What it\n    really does."""', False),
        ("# A comment.", "# Another.", False),
        ("return helper(x)", "return helper(x)  # so it is", False),
        ('"""A module."""', '"""The module."""', False),
    ],
)
def test_the_hash_is_of_what_a_launch_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, counts: bool
) -> None:
    hashed = _hashes(tmp_path, monkeypatch)
    assert old in KERNEL
    assert (hashed(KERNEL, SHARED) != hashed(KERNEL.replace(old, new), SHARED)) == counts


def test_the_hash_follows_other_kernel_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = _hashes(tmp_path, monkeypatch)
    before = hashed(KERNEL, SHARED)
    assert hashed(KERNEL, SHARED.replace("part(x):\n    return x", "part(x):\n    return 2 * x")) != before
    assert hashed(KERNEL, SHARED.replace("other(x):\n    return x", "other(x):\n    return 2 * x")) == before


def test_without_a_choice_of_its_own_the_hash_takes_that_of_what_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = _hashes(tmp_path, monkeypatch)
    alone = KERNEL.replace("def choose(", "def pick(").replace("return choose(", "return pick(")
    shared = SHARED + "\n\ndef choose(rows):\n    return 1\n\n\ndef plan(rows):\n    return choose(rows)\n"
    assert hashed(alone, shared) != hashed(alone, shared.replace("return 1", "return 2"))
    assert hashed(KERNEL, shared) == hashed(KERNEL, shared.replace("return 1", "return 2"))


def _hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    files = {"kernelgraft.kernels.made_up": tmp_path / "a.py", "kernelgraft.kernels.shared_parts": tmp_path / "b.py"}
    monkeypatch.setattr(fingerprint_module, "_file", files.get)

    def hashed(*texts: str) -> str:
        for file, text in zip(files.values(), texts, strict=True):
            file.write_text(text)
        return fingerprint.__wrapped__("kernelgraft.kernels.made_up")

    return hashed


def test_kernels_of_the_package_have_a_hash() -> None:
    assert fingerprint(MODULE).startswith("sha256:")
    assert fingerprint(MODULE) != fingerprint("kernelgraft.kernels.rope")
    assert fingerprint("kernelgraft.kernels.no_such_kernel") == ""


# --- comparing ---


def test_differences_are_counted_in_roundings() -> None:
    exact = torch.linspace(1, 2, 64, dtype=torch.float64)
    assert difference([exact.bfloat16()], [exact], 1.0) is None
    off = exact.bfloat16()
    off[5] *= 1.03
    assert difference([off], [exact], 1.0) is not None
    assert "1 of 64" in (difference([off], [exact], 2.0) or "")
    assert difference([off], [exact], 8.0) is None
    off[5] = float("nan")
    assert difference([off], [exact], 1e9) is not None


def test_differences_in_kind() -> None:
    exact = torch.arange(4)
    assert difference([exact], [exact.double()], 1.0) is None
    assert "differ" in (difference([exact + 1], [exact], 9.0) or "")
    assert "shape" in (difference([exact[:2].float()], [exact.double()], 9.0) or "")
    assert "results" in (difference([exact], [exact, exact], 9.0) or "")


# --- the tuner ---


@pytest.fixture(scope="module")
def tuned_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuner.Run, list[str]]:
    """One run over the sample kernels."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    said: list[str] = []
    try:
        run = tuner.tune(
            ["tuning_samples"],
            device="cpu",
            gpu=GPU,
            table=tmp_path_factory.mktemp("tuned") / "table.json",
            limit_s=8.0,
            rounds=5,
            progress=lambda stage, done, total, text: said.append(f"{stage} {done}/{total} {text}"),
        )
    finally:
        sys.path.remove(folder)
    return run, said


def of(run: tuner.Run, shape_class: str) -> tuner.Result:
    return next(result for result in run.results if result.shape_class == shape_class)


def test_the_fastest_right_configuration_wins(tuned_run: tuple[tuner.Run, list[str]]) -> None:
    run, said = tuned_run
    result = of(run, "fast last")
    assert result.chosen == 2
    assert result.gain is not None
    assert result.gain > 2
    assert of(run, "default best").chosen == 0
    entry = tuning.read_table(run.table)["kernels"]["good"]
    assert entry["classes"]["fast last"]["config"] == {"does": "right", "ms": 0.5}
    assert len(said) == len(run.results)
    assert any("good/fast last: 3" in line for line in said)


def test_what_is_wrong_crashes_or_raises_is_recorded(tuned_run: tuple[tuner.Run, list[str]]) -> None:
    result = of(tuned_run[0], "all sorts")
    found = {outcome.config["does"]: outcome for outcome in result.outcomes[1:-1]}
    assert {name: outcome.status for name, outcome in found.items()} == {
        "wrong": "wrong",
        "lazy": "wrong",
        "overwrite": "wrong",
        "raise": "error",
        "segfault": "crash",
        "exit": "crash",
        "exit in time": "crash",
    }
    reasons = {name: outcome.reason or "" for name, outcome in found.items()}
    assert "1 of 1000" in reasons["wrong"]
    assert "SIGSEGV" in reasons["segfault"]
    assert "status 7: the last words" in reasons["exit"]
    assert reasons["raise"] == "ValueError: refused"
    assert reasons["exit in time"].startswith("time: ")
    assert all(outcome.us is None for outcome in found.values())
    assert result.chosen == len(result.outcomes) - 1, "those after the crash were tried"
    assert result.counts() == {"crash": 3, "error": 1, "ok": 2, "wrong": 3}


def test_results_are_checked_in_memory_full_of_nan() -> None:
    seen: list[torch.Tensor] = []

    def run(config: Choice, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.empty_like(x))
        return 2 * x

    tunable = Tunable("made_up", "small", [Choice()], lambda *_: (torch.ones(64),), run, lambda x: 2 * x.double())
    ours, theirs = multiprocessing.Pipe()
    tuner_worker._Bench(theirs, tunable, "cpu", 1).check([0])
    assert ours.recv()[0] == "begin"
    assert ours.recv() == ("done", "check", 0, None)
    assert len(seen) == 2 * tuner_worker.REPEATS
    assert all(bool(y.isnan().all()) for y in seen)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_hangs_is_ended(tuned_run: tuple[tuner.Run, list[str]]) -> None:
    result = of(tuned_run[0], "one hangs")
    assert [outcome.status for outcome in result.outcomes] == ["ok", "timeout", "ok"]
    assert result.chosen == 2


def test_without_a_right_configuration_nothing_is_entered(tuned_run: tuple[tuner.Run, list[str]]) -> None:
    run = tuned_run[0]
    assert of(run, "nothing right").chosen is None
    unmade = of(run, "no inputs")
    assert unmade.chosen is None
    assert all("no inputs to be had" in (outcome.reason or "") for outcome in unmade.outcomes)
    assert "hopeless" not in tuning.read_table(run.table)["kernels"]
    record = json.loads(json.dumps(run.record()))
    assert {r["shape_class"] for r in record["results"]} >= {"nothing right", "fast last"}


def test_a_spent_budget_leaves_the_rest_and_unknown_entries_come_first(
    tuned_run: tuple[tuner.Run, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    table = tuned_run[0].table
    before = table.read_text()
    run = tuner.tune(["tuning_samples"], device="cpu", gpu=GPU, table=table, budget_s=0.0)
    assert run.results == []
    assert len(run.left) == 6
    assert [name.partition("/")[0] for name in run.left[:2]] == ["hopeless", "hopeless"], "without an entry"
    assert table.read_text() == before


def test_bad_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(UsageError, match=r"`nonesuch`.*bad, good"):
        tuner.tune(["tuning_samples"], kernels=["nonesuch"], device="cpu", gpu=GPU, table=tmp_path / "t.json")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="CUDA device"):
            tuner.tune(["tuning_samples"])


def test_an_earlier_configuration_wins_a_tie() -> None:
    def outcomes(*times: float | None) -> list[tuner.Outcome]:
        return [tuner.Outcome({}, "ok" if us else "wrong", us=us) for us in times]

    assert tuner.choose(outcomes(10.0, 9.95, 9.8)) == 2
    assert tuner.choose(outcomes(10.0, 9.95)) == 0
    assert tuner.choose(outcomes(None, 9.0, 20.0)) == 1
    assert tuner.choose(outcomes(None, None)) is None


# --- the kernels ---


def test_kernels_take_a_configuration_and_stay_right() -> None:
    """The last configurations of some tunables, small: what a tuned entry changes is the launch, not the result."""
    from kernelgraft.kernels import row_tunables

    offered = {tunable.name: tunable for tunable in row_tunables.tunables()}
    assert len(offered) == len(row_tunables.tunables()), "two tunables have one name"
    for name in (
        "rms_norm/1024x1 r1 2B",
        "layer_norm/2048x1 r1 2B",
        "act_and_mul/silu packed 2^15 2B",
        "rope/32+8x64 r1",
    ):
        tunable = offered[name]
        inputs = tunable.make("cpu", 0)
        expected = tunable.expected(*inputs)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        for config in (tunable.space[0], *tunable.space[-2:]):
            found = tunable.run(config, *inputs)
            assert difference(found if isinstance(found, tuple) else (found,), wanted, tunable.roundings) is None, (
                config
            )


def test_a_configuration_for_another_class_is_refused() -> None:
    from kernelgraft.kernels import rms_norm, row_plans

    x = torch.randn(2, 64, dtype=torch.bfloat16)
    key = "rms_norm", row_plans.shape_class(2, 4096, 2)
    with pytest.raises(LookupError, match="asks for"):
        tuning.run_with(row_plans.SMALL, key, (rms_norm, row_plans), lambda: rms_norm.rms_norm(x))


def test_plans_are_made_anew_and_kernels_are_kept() -> None:
    """A kernel made anew inside the capture of a CUDA graph is loaded there, which ends the process."""
    from kernelgraft.cutile import plans
    from kernelgraft.kernels import attention_decode, linear_decode, linear_tiles

    kernel = plans.hinted(attention_decode.attention_decode_kernel, 2, None)
    query, key, value = (torch.randn(1, heads, n, 64).bfloat16() for heads, n in ((4, 1), (2, 32), (2, 32)))
    attention_decode.attention_decode(query, key, value, scaling=0.125)
    linear_decode.linear_decode(torch.randn(1, 64).bfloat16(), torch.randn(32, 64).bfloat16())
    made = linear_tiles.kernel_of.cache_info().currsize
    assert attention_decode._plan.cache_info().currsize and linear_decode._call.cache_info().currsize and made
    tuning.forget_plans(attention_decode, linear_decode)
    assert not attention_decode._plan.cache_info().currsize and not linear_decode._call.cache_info().currsize
    assert plans.hinted(attention_decode.attention_decode_kernel, 2, None) is kernel
    assert linear_tiles.kernel_of.cache_info().currsize == made


def test_compiling_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.tile as ct

    from kernelgraft.cutile import plans

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    before = ct.launch, plans._launch
    with tuner_worker._compiling():
        assert before[0] is not ct.launch and before[1] is not plans._launch
    assert (ct.launch, plans._launch) == before


def test_an_abort_is_told_by_what_it_says_not_by_its_stack(tmp_path: Path) -> None:
    from kernelgraft.cutile.tuner import _last_words

    log = tmp_path / "child.log"
    log.write_text("terminate called\n  what():  captures_underway.empty()\nFatal Python error: Aborted\n\nlast\n")
    assert _last_words(log) == "what():  captures_underway.empty()"
    log.write_text("one\ntwo\n\n")
    assert _last_words(log) == "two"
    assert _last_words(tmp_path / "none") == ""


def test_spaces_of_all_kernels_hold_few_configurations_that_json_can_hold() -> None:
    from kernelgraft.kernels.examples import tuned_modules

    offered = [t for module in tuned_modules() for t in getattr(import_module(module), "tunables", list)()]
    assert {"rms_norm", "rope", "act_and_mul"} <= {tunable.kernel for tunable in offered}
    assert len({tunable.name for tunable in offered}) == len(offered), "two tunables have one name"
    for tunable in offered:
        assert 1 < len(tunable.space) <= 40, tunable.name
        assert len(set(tunable.space)) == len(tunable.space), tunable.name
        assert fingerprint(tunable.source), f"`{tunable.source}` is no module"
        for config in tunable.space:
            assert type(config) is type(tunable.space[0]), tunable.name
            assert dataclasses.replace(config, **json.loads(json.dumps(asdict(config)))) == config, tunable.name


def test_on_an_h200_the_kernels_choose_what_the_package_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kernelgraft.kernels import act_and_mul, rope, row_plans

    monkeypatch.setenv("KERNELGRAFT_CACHE", str(tmp_path))
    table = tuning.read_table(tuning.PACKAGED / "nvidia-h200.json")["kernels"]
    monkeypatch.setattr(tuning, "gpu", lambda device: Gpu("NVIDIA H200", "sm_90"))
    monkeypatch.setattr(tuning, "compiler_versions", lambda: table["rope"]["versions"])
    tuning.forget()
    try:
        given = {
            ("rms_norm", "128x1 r32 2B"): row_plans.choose("rms_norm", 16, 128, 2, 0),
            ("layer_norm", "4096x1 r1 2B"): row_plans.choose("layer_norm", 1, 4096, 2, 0),
            ("rope", "32+8x64 r4096"): rope.choose(4096, 32, 8, 64, True, 0),
            ("act_and_mul", "silu apart 2^15 2B"): act_and_mul.choose(1, 8192, 2, "silu", act_and_mul.SEPARATE, 0),
        }
        for (kernel, shape_class), choice in given.items():
            assert asdict(choice) == table[kernel]["classes"][shape_class]["config"]
        assert rope.choose(4096, 32, 8, 64, False, 0) == rope.LARGE, "only plain rotations were tuned"
        assert row_plans.choose("rms_norm", 16, 128, 4, 0) == row_plans.default("rms_norm", 16, 128), "float32"
    finally:
        tuning.forget()
