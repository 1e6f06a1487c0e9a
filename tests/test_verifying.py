"""Many Solutions verified at once: order, how many, earlier verdicts, and that nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import FAMILY, captured, definition, solution

from kernelgraft import machine
from kernelgraft.evaluate import Captured, JudgeOptions
from kernelgraft.pipeline import planning, verdicts, verifying
from kernelgraft.pipeline.verifying import Judges, Task
from kernelgraft.records import Evaluation, Status

RMS = definition("rms_norm")
HONEST = "def run(hidden_states, weight): return F.rms_norm(hidden_states, (64,), weight, 1e-6)"
FEW = replace(JudgeOptions.quick(), points=2, distributions=("normal",), layouts=())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNELGRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def task(name: str, source: str = HONEST, **changes: Any) -> Task:
    made = solution(RMS, source).model_copy(update={"name": name})
    return replace(Task(made, RMS, tuple(captured(RMS)), None), **changes)


class FakeJudge:
    """Says that every Solution is right, after `during` was called."""

    made: list[FakeJudge]

    def __init__(self, options: JudgeOptions, *, family: Any) -> None:
        self.closed = False
        type(self).made.append(self)

    def verify(self, given: Any, of: Any, calls: Any, *, original: Any = None) -> Evaluation:
        type(self).during(given.name)  # type: ignore[attr-defined]
        return Evaluation(solution=given.name, definition=of.name, status=Status.PASSED, error_ratio=1.0, seconds=0.0)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeJudge]]:
    class Fake(FakeJudge):
        made: list[FakeJudge] = []  # noqa: RUF012

        @staticmethod
        def during(name: str) -> None: ...

    monkeypatch.setattr(verifying, "Judge", Fake)
    yield Fake
    assert all(judge.closed for judge in Fake.made)


def test_verdicts_come_in_the_order_of_the_tasks_and_are_known_the_next_time() -> None:
    tasks = [task("right"), task("wrong", HONEST + " * 1.01"), task("right_too")]
    heard: list[tuple[int, int | None, str]] = []
    with Judges(FEW, jobs=2, family=lambda name: FAMILY) as judges:
        first = judges.verify(tasks, progress=lambda stage, done, total, text: heard.append((done, total, text)))
    assert [e.solution for e in first] == ["right", "wrong", "right_too"]
    assert [e.status for e in first] == [Status.PASSED, Status.INCORRECT_NUMERICAL, Status.PASSED]
    assert not any(e.earlier for e in first)
    assert [(done, total) for done, total, _ in heard] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert any(text.startswith("wrong C8: wrong at") for _, _, text in heard)
    with Judges(FEW, jobs=2, family=lambda name: FAMILY) as judges:
        again = judges.verify(tasks)
        assert judges._made == [], "a judge was started although every verdict is known"
    assert [e.model_copy(update={"earlier": False}) for e in again] == first
    assert all(e.earlier for e in again)


def test_two_are_judged_at_a_time(fake: Any) -> None:
    both = threading.Barrier(2, timeout=20)
    fake.during = lambda name: both.wait()
    with Judges(FEW, jobs=2, family=lambda name: FAMILY) as judges:
        assert len(judges.verify([task(f"s{i}") for i in range(4)])) == 4
    assert len(fake.made) == 2


def test_one_job_is_one_judge(fake: Any) -> None:
    with Judges(FEW, jobs=1, family=lambda name: FAMILY) as judges:
        judges.verify([task(f"s{i}") for i in range(3)])
    assert len(fake.made) == 1


def test_processes_can_be_started_before_there_is_work(fake: Any) -> None:
    with Judges(FEW, jobs=3, early=True):
        assert len(fake.made) == 3


def test_few_of_the_large_ones_run_at_once_and_the_small_ones_do_not_wait(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Captured((torch.zeros(1 << 16),), "decode", "large", {})
    monkeypatch.setattr(verifying, "HEAVY_BYTES", 1 << 17)
    at_once, most, lock, light_done = [0], [0], threading.Lock(), threading.Event()

    def during(name: str) -> None:
        if name.startswith("light"):
            light_done.set()
            return
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        assert light_done.wait(20), "a small one waited for the large ones"
        with lock:
            at_once[0] -= 1

    fake.during = during
    tasks = [task(f"heavy{i}", captured=(large,)) for i in range(5)] + [task("light")]
    with Judges(FEW, jobs=4, family=lambda name: FAMILY) as judges:
        found = judges.verify(tasks)
    assert [e.solution for e in found] == [t.solution.name for t in tasks]
    assert most[0] == 1


def test_an_error_ends_all_that_runs(fake: Any) -> None:
    begun: list[str] = []

    def during(name: str) -> None:
        begun.append(name)
        raise ValueError("of the judge itself")

    fake.during = during
    before = threading.active_count()
    with (
        Judges(FEW, jobs=2, family=lambda name: FAMILY) as judges,
        pytest.raises(ValueError, match="of the judge itself"),
    ):
        judges.verify([task(f"s{i}") for i in range(20)])
    assert threading.active_count() == before
    assert len(begun) <= 2


def test_a_process_that_is_closed_is_not_begun_again() -> None:
    """Another thread that closes the judges must not wait for the Solution that runs."""
    slow = "import time\ndef run(hidden_states, weight):\n    time.sleep(60)\n    return hidden_states"
    options = replace(FEW, static_gate=False)
    with Judges(options, jobs=1, family=lambda name: FAMILY) as judges:
        begun = machine.clock()
        threading.Timer(4.0, judges.close).start()
        with pytest.raises(Exception, match="closed while it was at work"):
            judges.verify([task("slow", slow)])
        assert machine.clock() - begun < 30


def test_torch_has_its_threads_back(fake: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen: list[int] = []
        fake.during = lambda name: seen.append(torch.get_num_threads())
        with Judges(FEW, jobs=1, family=lambda name: FAMILY) as judges:
            judges.verify([task("one")])
        assert seen == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# Earlier verdicts


def key(given: Task, options: JudgeOptions = FEW) -> str:
    return verdicts.key(given.solution, given.definition, given.captured, options, given.original is not None)


def test_a_key_holds_all_that_bears_on_a_verdict(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = task("s")
    assert key(base) == key(task("s"))
    others = {
        "source": key(task("s", HONEST + " * 1")),
        "definition": key(replace(base, definition=RMS.model_copy(update={"description": "another"}))),
        "sizes": key(replace(base, captured=tuple(captured(RMS, (1, 9))))),
        "options": key(base, replace(FEW, seeds=3)),
        "yardstick": key(replace(base, original=lambda x, w: x)),
    }
    doubled = (replace(c, inputs=(c.inputs[0].repeat(1, 1, 2)[..., ::2], c.inputs[1])) for c in base.captured)
    others["layout"] = key(replace(base, captured=tuple(doubled)))
    card = machine.read()
    for field, value in {"gpu": "another", "versions": {"torch": "0"}}.items():
        with monkeypatch.context() as patched:
            patched.setattr(machine, "read", lambda f=field, v=value: card.model_copy(update={f: v}))
            others[field] = key(base)
    with monkeypatch.context() as patched:
        patched.setenv("KERNELGRAFT_TUNED", "off")
        others["switch"] = key(base)
    with monkeypatch.context() as patched:
        patched.setattr(verdicts, "_sources", lambda: "other sources")
        others["package"] = key(base)
    (cache / "tuned").mkdir(parents=True)
    (cache / "tuned" / "some-gpu.json").write_text("{}")
    others["tuned"] = key(base)
    assert len({key_ for key_ in others.values()}) == len(others)
    (cache / "tuned" / "some-gpu.json").unlink()
    assert key(base) not in others.values()


@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.RUNTIME_ERROR, Status.COMPILE_ERROR])
def test_what_the_content_did_not_decide_is_not_kept(status: Status) -> None:
    verdicts.keep("ab", Evaluation(solution="s", definition="d", status=status, reason="it took too long"))
    assert verdicts.find("ab") is None
    verdicts.keep("ab", Evaluation(solution="s", definition="d", status=Status.PASSED, error_ratio=1.0))
    assert verdicts.find("ab") is not None


def test_a_verdict_that_cannot_be_read_is_none(cache: Path) -> None:
    verdicts.keep("ab", Evaluation(solution="s", definition="d", status=Status.PASSED, error_ratio=1.0))
    file = cache / "verdicts" / "ab" / "ab.json"
    file.write_text(file.read_text()[:-5])
    assert verdicts.find("ab") is None


def test_fresh_judges_again_and_keeps_what_it_finds(fake: Any) -> None:
    seen: list[str] = []
    fake.during = seen.append
    for fresh in (False, True, False):
        with Judges(FEW, jobs=1, fresh=fresh, family=lambda name: FAMILY) as judges:
            found = judges.verify([task("s")])
    assert seen == ["s", "s"]
    assert found[0].earlier


def test_a_cache_that_cannot_be_written_is_no_error(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELGRAFT_CACHE", str(tmp_path / "file"))
    with Judges(FEW, jobs=1, family=lambda name: FAMILY) as judges:
        assert judges.verify([task("s")])[0].status is Status.PASSED


# Who is asked


def test_a_slow_supplier_is_asked_on_a_gpu_only_by_name() -> None:
    card = machine.read().model_copy(update={"gpu": "some GPU", "versions": {"triton": "3"}})
    unasked = {s.name: s for s in planning.chosen(None, card)}
    assert "name it (`--suppliers inductor" in (unasked["inductor"].unavailable(card) or "")
    named = planning.chosen(["inductor"], card)
    assert named[0].unavailable(card) is None
    here = {s.name: type(s).__name__ for s in planning.chosen(None, machine.read().model_copy(update={"gpu": None}))}
    assert here["inductor"] == "InductorSupplier"


def test_what_traces_graphs_is_done_before_threads_start(fake: type[FakeJudge]) -> None:
    """Tracing changes functions of torch for a while: a judge's thread may find the reduced Definition, not make it."""
    where: list[str] = []

    class Reduces(type(FAMILY)):  # type: ignore[misc]
        def reduced(self, of: Any) -> Any:
            where.append(threading.current_thread().name)

    family = Reduces()
    with Judges(FEW, jobs=2, family=lambda name: family) as judges:
        judges.verify([task("right"), task("right_too")])
    assert where == [threading.main_thread().name]


def test_a_reduced_linear_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelgraft.families import linear

    traced = []
    monkeypatch.setattr(linear, "fingerprint", lambda *given: traced.append(given) or "mark")
    wide = definition("rms_norm")
    axes = {n: wide.axes["hidden_size"].model_copy(update={"value": 4096}) for n in ("in_features", "out_features")}
    family = linear.Linear()
    found = [family.reduced(wide.model_copy(update={"axes": axes})) for _ in range(2)]
    assert len(traced) == 1 and found[0] == found[1] and found[0] is not None
