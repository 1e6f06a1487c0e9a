"""Selection at points of use: what is recorded and timed there, and which seats follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hand_made
import pytest
import torch

from kernelgraft import evaluate, pipeline
from kernelgraft.errors import UsageError
from kernelgraft.families.base import Recognition
from kernelgraft.pipeline import graphs, measuring, planning, points, seating
from kernelgraft.pipeline.points import BASE, Point, Use
from kernelgraft.pipeline.researching import Compute
from kernelgraft.records import Evaluation, Guard, Solution, SourceFile, Status

QUICK = replace(evaluate.JudgeOptions.quick(), points=2, distributions=("normal",), layouts=())


@pytest.fixture(scope="module")
def loaded() -> Any:
    return hand_made.load("llama")


@pytest.fixture(scope="module")
def computes(loaded: Any) -> dict[str, Compute]:
    """By family; the calls of research are left out."""
    found: dict[str, Compute] = {}
    for site, recognition in hand_made.recognise(loaded.model, loaded):
        made = found.setdefault(
            recognition.family, Compute(recognition.family, recognition.semantics, recognition.definitions)
        )
        made.sites.append(site)
    return found


def variant(compute: Compute, name: str, tail: str = "", guard: Guard | None = None) -> Solution:
    """The reference of the compute's Definition with something after it."""
    made = hand_made.reference_solution(compute.definitions[0], guard)
    content = made.sources[0].content + f"\n_right = run\n{tail}\n"
    return made.model_copy(update={"name": name, "sources": (SourceFile(path="main.py", content=content),)})


def fixed(us: dict[str, float]) -> Any:
    """An `interleave` that runs everything once and gives these times, 10 µs to what is not named."""

    def interleave(functions: dict[str, Any], **_: Any) -> dict[str, evaluate.Timing]:
        for function in functions.values():
            function()
        return {n: evaluate.Timing(us.get(n, 10.0), 0.01, (us.get(n, 10.0),) * 9) for n in functions}

    return interleave


def test_the_points_are_those_asked_for_and_the_short_one_is_always_there() -> None:
    assert Use().points("cpu") == (BASE, Point(1, 128))
    assert Use().points("cuda:0") == (BASE, Point(32, None), Point(1, 512), Point(1, 4096))
    assert Use(batches=(4, 1), prefills=()).points("cuda") == (BASE, Point(4, None))
    with pytest.raises(UsageError, match="positive"):
        Use(batches=(0,))
    with pytest.raises(UsageError, match="quick"):
        Use(mode="quick")  # type: ignore[arg-type]


def test_a_prompt_longer_than_the_model_is_left_out(loaded: Any) -> None:
    most = loaded.model.config.max_position_embeddings
    long = Point(1, most)
    assert set(points.too_long(loaded, [BASE, Point(1, most - 2), long])) == {long}


def test_each_point_gives_a_prefill_and_a_decode_step(loaded: Any, computes: dict[str, Compute]) -> None:
    norm, attention = computes["rms_norm"], computes["attention"]
    for point, rows, tokens in ((Point(1, 9), 1, 9), (Point(3, None), 3, None)):
        found = measuring.samples(loaded, [norm, attention], point)
        axes = {s.regime: s.axes for s in found[0]}
        assert set(axes) == {"prefill", "decode"}
        assert axes["decode"] == {"batch_size": rows, "seq_len": 1}
        assert axes["prefill"]["batch_size"] == rows
        assert tokens is None or axes["prefill"]["seq_len"] == tokens
        decode = next(s.axes for s in found[1] if s.regime == "decode")
        assert decode["kv_len"] == axes["prefill"]["seq_len"] + 1
    assert not any(vars(m).get("forward") for m in loaded.model.modules())


def test_the_inputs_are_those_that_research_sees(loaded: Any, computes: dict[str, Compute]) -> None:
    from kernelgraft.pipeline.researching import bind

    compute = computes["gated_mlp"]
    (found,) = measuring.samples(loaded, [compute], Point(2, 5))
    recognition = Recognition(compute.family, compute.semantics, compute.definitions)
    for sample in found:
        bound = bind(sample.site, sample.call, recognition)
        assert bound is not None
        for mine, theirs in zip(sample.inputs, bound.inputs, strict=True):
            assert torch.equal(mine, theirs)


def test_a_call_is_timed_on_the_instances_in_turn(loaded: Any, computes: dict[str, Compute]) -> None:
    (found,) = measuring.samples(loaded, [computes["gated_mlp"]], Point(1, 5))
    sample, seen = found[0], []
    run = measuring.through(loaded.model, sample, lambda module, *args, **kwargs: seen.append(module))
    for _ in range(4):
        run()
    one, two = (loaded.model.get_submodule(path) for path in sample.site.instances[:2])
    assert one is not two
    assert seen == [one, two, one, two]


def test_only_what_serves_and_is_right_is_timed(
    loaded: Any, computes: dict[str, Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = computes["rms_norm"]
    solutions = [
        variant(compute, "right"),
        variant(compute, "refused", guard=Guard(max_axes={"seq_len": 4})),
        variant(compute, "wrong", "def run(*a):\n    return _right(*a) * (1.1 if a[0].shape[-2] > 8 else 1)"),
        variant(compute, "raises", "def run(*a):\n    assert a[0].shape[-2] < 9\n    return _right(*a)"),
        variant(compute, "static", guard=Guard(static_shapes=True)),
    ]
    monkeypatch.setattr(measuring, "interleave", fixed({"wrong": 1.0, "raises": 2.0, "right": 3.0, "refused": 4.0}))
    table = seating.Table(compute, solutions, "fastest")
    for point in (Point(1, 4), Point(1, 20)):
        table.add(loaded.model, measuring.samples(loaded, [compute], point)[0])
    short, decode, long = table.rows[:3]
    assert (short.regime, decode.regime, long.regime, len(table.rows)) == ("prefill", "decode", "prefill", 3)
    assert set(short.timings) == {"original", "original again", "right", "refused", "wrong", "raises"}
    assert set(long.timings) == {"original", "original again", "right"}
    assert set(table.wrong) == {"wrong", "raises"}
    seats = table.seats()
    assert [s.solution for s in seats] == ["right"] * 3, "what is wrong at one size is seated at none"
    assert all(s.seated for s in seats)
    assert set(seats[0].candidates_us) == {"right", "refused"}
    assert (seats[2].batch, seats[2].prompt_tokens, seats[2].axes) == (1, 20, {"batch_size": 1, "seq_len": 20})

    def passed(name: str) -> Evaluation:
        return Evaluation(solution=name, definition=compute.definitions[0].name, status=Status.PASSED, error_ratio=1.0)

    wrong, raises = table.updated(passed("wrong")), table.updated(passed("raises"))
    assert (wrong.status, raises.status) == (Status.INCORRECT_NUMERICAL, Status.RUNTIME_ERROR)
    assert "wrong in a prefill of 1×20: 1.0e-01 relative RMSE" in (wrong.reason or "")
    assert "AssertionError" in (raises.reason or "")
    assert set(table.updated(passed("right")).performance) == {"prefill 1×4", "decode 1×4", "prefill 1×20"}
    assert table.updated(passed("another")).performance == {}


def test_what_the_original_gives_beside_its_result_may_be_missing() -> None:
    one, other = torch.ones(4), torch.zeros(4)
    sample: Any = type("Any", (), {"regime": "decode", "point": Point(1, 20)})

    def wrong(given: Any, wanted: Any) -> str | None:
        return measuring._wrong(lambda: given, wanted, sample)

    assert wrong((one, None), (one, other)) is None
    assert wrong((one, one), (one, other)) is not None
    assert "inf relative" in (wrong((None, other), (one, other)) or "")
    assert "inf relative" in (wrong(torch.ones(5), one) or "")
    assert wrong(one, one) is None
    sample.point = BASE
    assert wrong(other, one) is None, "the judge has seen it"


def test_a_size_that_nobody_serves_is_the_originals(loaded: Any, computes: dict[str, Compute]) -> None:
    compute = computes["rms_norm"]
    table = seating.Table(compute, [variant(compute, "small", guard=Guard(max_axes={"seq_len": 1}))], "verified")
    table.add(loaded.model, measuring.samples(loaded, [compute], Point(1, 5))[0])
    by_regime = {s.regime: s for s in table.seats()}
    assert by_regime["decode"].seated
    assert not by_regime["prefill"].seated
    assert by_regime["prefill"].candidates_us == {}


def test_not_enough_memory_is_no_fault(
    loaded: Any, computes: dict[str, Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = computes["rms_norm"]
    greedy = variant(compute, "greedy", "def run(*a):\n    raise torch.OutOfMemoryError('no room')")
    table = seating.Table(compute, [greedy, variant(compute, "modest")], "fastest")
    monkeypatch.setattr(measuring, "interleave", fixed({}))
    table.add(loaded.model, measuring.samples(loaded, [compute], Point(1, 5))[0])
    assert table.wrong == {}
    assert all("greedy" not in row.timings and "modest" in row.timings for row in table.rows)


def test_in_a_graph_times_are_per_call_and_what_cannot_be_captured_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = {name: lambda: None for name in ("original", "original again", "good", "reads")}
    monkeypatch.setattr(measuring, "interleave", fixed({"good": 8.0}))
    captured = {n: f for n, f in contenders.items() if n != "reads"}
    monkeypatch.setattr(measuring, "captured_graphs", lambda functions: (captured, 4))
    found = measuring.time_all(contenders, mode="graph")
    assert {n: t.median_us for n, t in found.items()} == {"original": 2.5, "original again": 2.5, "good": 2.0}
    monkeypatch.setattr(measuring, "captured_graphs", lambda functions: ({}, 4))
    assert measuring.time_all(contenders, mode="graph")["original"].median_us == 10.0
    assert measuring.time_all(contenders)["original"].median_us == 10.0


@pytest.mark.gpu
def test_a_graph_holds_the_calls() -> None:
    x, count = torch.zeros(1, device="cuda"), graphs.CALLS
    stream = torch.cuda.current_stream()

    def reads() -> None:
        (torch.ones(1 << 24, device="cuda") + x).sum().item()

    def raises() -> None:
        x.add(1)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not in a graph")

    def captured() -> None:
        found, calls = graphs.captured_graphs({"add": lambda: x.add_(1), "reads": reads, "raises": raises})
        assert (set(found), calls) == ({"add"}, count)
        before = float(x)
        found["add"]()
        assert float(x) == before + count

    captured()
    # A capture that failed leaves nothing behind: neither the device's random numbers, nor the allocator, nor the
    # stream are in it, what it allocated can be given back, and the next capture works.
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(3)
    first, second = torch.randn(4, device="cuda"), torch.randn(4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    torch.manual_seed(3)
    torch.randn(4, device="cuda")
    captured()
    assert torch.equal(torch.randn(4, device="cuda"), second), "the numbers go on where they were"
    assert not torch.equal(first, second)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved


@pytest.mark.parametrize(
    ("recording", "calls"),
    [(True, ["end", "release", "state"]), (False, ["end", "state"])],
    ids=["torch goes on recording", "torch has ended it"],
)
def test_a_failed_capture_is_ended_once(recording: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Generator:
        def clone_state(self) -> str:
            return "fresh"

        def graphsafe_set_state(self, state: str) -> None:
            assert state == "fresh"
            seen.append("state")

    def end(device: int, pool: Any) -> None:
        seen.append("end")
        assert (device, pool) == (0, (0, 7))
        if not recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: seen.append("release"), raising=False)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    assert graphs._end_capture(0, (0, 7)) == recording
    assert seen == calls
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *_: (_ for _ in ()).throw(RuntimeError("other")))
    with pytest.raises(RuntimeError, match="other"):
        graphs._end_capture(0, (0, 7))


def test_integrate_seats_every_point(loaded: Any) -> None:
    heard: list[str] = []
    graft = pipeline.integrate(
        loaded,
        suppliers=["torch"],
        policy="verified",
        use=Use(batches=(1, 2), prefills=(16, 1 << 20)),
        options=QUICK,
        progress=lambda stage, done, total, text: heard.append(f"{stage} {text}"),
    )
    assert graft.mode == "eager"
    norm = next(p for p in graft.accepted if p.family == "rms_norm")
    assert {(s.regime, s.batch, s.prompt_tokens) for s in norm.seats} == {
        ("prefill", 1, None),
        ("decode", 1, None),
        ("prefill", 2, None),
        ("decode", 2, None),
        ("prefill", 1, 16),
    }
    attention = next(p for p in graft.accepted if p.family == "attention")
    assert ("decode", 1, 16) in {(s.regime, s.batch, s.prompt_tokens) for s in attention.seats}
    assert any(f"1×{1 << 20} is left out" in line for line in heard)
    assert graft.end_to_end is not None and graft.end_to_end.tokens_equal

    def done(use: Use) -> bool:
        return planning.measured_for(graft, use, "cpu")

    assert done(Use()) and done(Use(batches=(2,), prefills=(16,)))
    assert not done(Use(batches=(4,))) and not done(Use(prefills=(64,))) and not done(Use(mode="graph"))
