"""Tracing a model: windows, modules, sites and a graft's kernels on a fake GPU; the model is left as it was."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hand_made
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from trace_samples import adds_up, fake_gpu
from transformers import GenerationConfig

from kernelgraft import machine, patch
from kernelgraft.bench import trace as tracing
from kernelgraft.bench.result import Trace
from kernelgraft.bench.trace import measure
from kernelgraft.bench.trace_parsing import parse
from kernelgraft.errors import UsageError
from kernelgraft.records import Graft


@pytest.fixture(scope="module")
def loaded() -> Any:
    return hand_made.load("llama")


@pytest.fixture(scope="module")
def graft(loaded: Any) -> Graft:
    return hand_made.make_graft(loaded, only={"rms_norm", "gated_mlp"})


def held(model: nn.Module) -> dict[tuple[str, str], Any]:
    """All that the modules hold, dictionaries as they are now."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[path, name] = dict(value) if isinstance(value, dict) else value
    return found


def unchanged(before: dict[tuple[str, str], Any], model: nn.Module) -> bool:
    after = held(model)
    same = [
        a is b or a == b if isinstance(a, dict) else a is b for a, b in ((v, after.get(k)) for k, v in before.items())
    ]
    return before.keys() == after.keys() and all(same)


def generating(model: Any, new_tokens: int) -> Callable[[], Any]:
    ids = torch.arange(3, 10, device=next(model.parameters()).device)[None]
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, disable_compile=True)

    def run() -> Any:
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

    return run


def inside(trace: Trace, *ends: str) -> float:
    """Percent of the time in modules whose path ends so."""
    return sum(s.percent for s in trace.modules if s.path.endswith(ends))


def test_a_model_on_a_fake_gpu(loaded: Any) -> None:
    model = loaded.model
    before, run = held(model), generating(model, 5)
    expected = run()
    prefill = measure(model, run, regime="prefill", tokens=7, profiler=fake_gpu)
    decode = measure(model, run, regime="decode", tokens=99, profiler=fake_gpu)
    assert (prefill.tokens, decode.tokens) == (7, 4)
    assert decode.kernels == 4 * prefill.kernels
    calls = {(s.path, s.name): s.calls for s in decode.modules}
    assert calls["model.layers.*.mlp.down_proj", "Linear"] == 4 * model.config.num_hidden_layers
    assert calls["lm_head", "Linear"] == 4
    top = {(s.path, s.name) for s in decode.libraries}
    assert ("model.layers.*.self_attn", "aten::scaled_dot_product_attention") in top
    assert ("model.layers.*.mlp.down_proj", "aten::linear") in top
    assert decode.replaced_percent is None
    for trace in (prefill, decode):
        adds_up(trace, 3.0 * trace.kernels)
    assert torch.equal(run(), expected)
    assert unchanged(before, model)


def test_the_original_with_a_graft_at_hand(loaded: Any, graft: Graft) -> None:
    model = loaded.model
    before, run = held(model), generating(model, 3)
    trace = measure(model, run, regime="decode", tokens=2, graft=graft, profiler=fake_gpu)
    norms = inside(trace, "norm")
    assert norms > 5
    # Of the MLP, the activation and the product are the site; its products of matrices are left.
    assert trace.replaced_percent == pytest.approx(norms + inside(trace, "mlp", "act_fn"))
    assert not any(s.path.endswith("norm") for s in trace.uncovered)
    assert any(s.path.endswith("down_proj") for s in trace.uncovered)
    assert unchanged(before, model)


def test_a_site_that_a_regime_leaves_to_the_original_is_not_replaced(graft: Graft) -> None:
    seats = {"rms_norm": False, "gated_mlp": True}
    patches = tuple(
        p.model_copy(
            update={
                "seats": (*p.seats, p.seats[0].model_copy(update={"regime": "decode", "seated": seats[p.family]})),
            }
        )
        for p in graft.patches
    )
    mixed = graft.model_copy(update={"patches": patches})
    assert {p.family for p in tracing.serving(mixed, "decode").accepted} == {"gated_mlp"}
    assert {p.family for p in tracing.serving(mixed, "prefill").accepted} == {"gated_mlp", "rms_norm"}
    assert {p.family for p in tracing.serving(graft, "decode").accepted} == {"gated_mlp", "rms_norm"}


def test_a_grafted_model_s_own_kernels_are_covered(loaded: Any, graft: Graft) -> None:
    model = loaded.model
    plain = held(model)
    with patch.apply(graft, model) as applied:
        run = generating(model, 3)
        before, expected = held(model), run()
        trace = measure(model, run, regime="decode", tokens=2, graft=graft, applied=applied, profiler=fake_gpu)
        assert inside(trace, "norm") > 5
        assert not any(s.path.endswith("norm") for s in trace.uncovered)
        assert any(s.path.endswith("down_proj") for s in trace.uncovered)
        assert trace.replaced_percent is None
        adds_up(trace, 3.0 * trace.kernels)
        assert torch.equal(run(), expected)
        assert unchanged(before, model)
    assert unchanged(plain, model)


def test_a_trace_is_of_what_runs_without_it(loaded: Any) -> None:
    """Fusions leave modules that have hooks or another forward to the original: the trace must not make them do so."""
    graft = hand_made.make_graft(loaded)
    assert {p.family for p in graft.accepted} >= {"residual_norm", "gated_mlp", "rope"}
    with patch.apply(graft, loaded.model) as applied:
        run = generating(loaded.model, 3)
        run()
        one = [(row["calls"], row["fallbacks"]) for row in applied.report()]
        measure(loaded.model, run, regime="decode", tokens=2, graft=graft, applied=applied, profiler=fake_gpu)
        runs = 1 + tracing.WALL_RUNS + 1
        for (calls, fallbacks), row in zip(one, applied.report(), strict=True):
            assert row["calls"] == {name: runs * count for name, count in calls.items()}
            assert row["fallbacks"] == {reason: runs * count for reason, count in fallbacks.items()}


def test_the_wall_is_measured_without_the_profiler(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill lasts 4 s, each of two decode steps 1 s; a profiled run would last a hundred times as long."""
    model, now = loaded.model, [0.0]
    run = generating(model, 3)
    monkeypatch.setattr(tracing.machine, "clock", lambda: now[0])

    def slow(function: Callable[[], Any], factor: float) -> Any:
        def passing(module: nn.Module, arguments: Any, given: Any) -> None:
            now[0] += factor * (4 if given["input_ids"].shape[1] > 1 else 1)

        with model.register_forward_pre_hook(passing, with_kwargs=True):
            return function()

    found = {}
    for regime in ("prefill", "decode"):
        trace = measure(
            model, lambda: slow(run, 1), regime=regime, tokens=7, profiler=lambda _: fake_gpu(lambda: slow(run, 100))
        )
        found[regime] = trace.wall_ms
    assert found == {"prefill": pytest.approx(4000), "decode": pytest.approx(2000)}


def test_a_module_that_is_compiled_itself_gets_no_ranges() -> None:
    compiled = CompileCounter()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].compile(backend=compiled)
    inputs = torch.ones(1, 8)

    def run(whole: nn.Module) -> Any:
        with torch.no_grad():
            return whole(inputs)

    for whole in (model, nn.Sequential(torch.compile(nn.Linear(8, 8), backend=compiled))):
        run(whole)
        frames = compiled.frame_count
        trace = measure(whole, functools.partial(run, whole), regime="prefill", tokens=1, profiler=fake_gpu)
        assert {s.path for s in trace.modules} == {""}
        assert compiled.frame_count == frames


class Toy(nn.Module):
    """Steps as `generate` makes them; decode is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self._compiled_call: Any = None

    def prepare_inputs_for_generation(self, inputs: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"inputs_embeds": inputs}

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return inputs_embeds

    def generate(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self(**self.prepare_inputs_for_generation(inputs, is_first_iteration=True))
            for _ in range(2):
                out = self._compiled_call(**self.prepare_inputs_for_generation(out[:, -1:]))
        return out


@pytest.mark.parametrize("regime", ["prefill", "decode"])
def test_a_compiled_model_is_not_compiled_anew(regime: Any) -> None:
    compiled = CompileCounter()
    model = Toy()
    model._compiled_call = torch.compile(model.__call__, backend=compiled, fullgraph=True)
    inputs = torch.randn(1, 5, 8)
    expected = model.generate(inputs)
    frames = compiled.frame_count
    assert frames
    trace = measure(model, lambda: model.generate(inputs), regime=regime, tokens=5, profiler=fake_gpu)
    assert compiled.frame_count == frames
    assert torch.equal(model.generate(inputs), expected)
    assert compiled.frame_count == frames
    paths = {s.path for s in trace.modules}
    assert paths == ({"layers.*"} if regime == "prefill" else {""})
    assert trace.kernels == 2 * (1 if regime == "prefill" else 2)


def test_a_run_that_makes_no_steps_is_traced_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    trace = measure(model, lambda: model(torch.ones(1, 8)), regime="prefill", tokens=1, profiler=fake_gpu)
    assert [(s.path, s.name, s.calls) for s in trace.modules] == [("0", "Linear", 1)]


def test_an_error_in_the_run_leaves_the_model_as_it_was(loaded: Any, graft: Graft) -> None:
    model = loaded.model
    before = held(model)

    def fail() -> None:
        with torch.no_grad():
            model(torch.tensor([[1, 2]]), position_ids="wrong")

    with pytest.raises((TypeError, AttributeError)):
        measure(model, fail, regime="prefill", tokens=2, graft=graft, profiler=fake_gpu)
    assert unchanged(before, model)
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_trace() -> None:
    with pytest.raises(UsageError, match="needs a CUDA device"):
        measure(nn.Linear(2, 2), lambda: None, regime="prefill", tokens=1)


class RealGpu:
    """A profiler of the real GPU that also keeps its trace and what torch's profiler sums up."""

    total_us = 0.0
    last: dict[str, Any]

    def __call__(self, run: Callable[[], Any]) -> dict[str, Any]:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            run()
            torch.cuda.synchronize()
        device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        notes = [e for e in profile.events() if e.device_type == device and not e.is_user_annotation]
        self.total_us = sum(e.self_device_time_total for e in notes)
        self.summed = Counter[str]()
        for e in notes:
            self.summed[e.name] += e.self_device_time_total
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            self.last = json.loads(Path(folder, "trace.json").read_bytes())
        return self.last

    def __repr__(self) -> str:
        """Where a trace's own events and the profiler's sums differ, and the kinds of events: for a test that fails."""
        traced, kinds = Counter[str](), Counter[str]()
        for e in self.last["traceEvents"]:
            if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                traced[e["name"]] += e["dur"]
                kinds[e["cat"]] += e["dur"]
        names = set(traced) | set(self.summed)
        apart = {n[:60]: (traced[n], self.summed[n]) for n in names if abs(traced[n] - self.summed[n]) > 0.5}
        return f"traced {dict(kinds)}, apart {apart}"


@pytest.mark.gpu
def test_real_traces_add_up_to_the_profiler_s_total() -> None:
    from kernelgraft.kernels.rms_norm import rms_norm

    # No random numbers of the device: whatever other tests left there does not matter here.
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU()).bfloat16().cuda()
    x, weight = torch.randn(64, 256).bfloat16().cuda(), torch.rand(256).bfloat16().cuda()

    def run() -> None:
        with torch.no_grad():
            for _ in range(3):
                rms_norm(model(x), weight)

    run()
    profiler = RealGpu()
    trace = measure(model, run, regime="prefill", tokens=64, profiler=profiler)
    adds_up(trace, trace.kernel_us)
    assert trace.kernel_us == pytest.approx(profiler.total_us, rel=0.01)
    assert trace.kernels >= 9
    assert 0 < trace.cutile_percent < 100
    assert trace.languages_percent["cublas"] > 0
    assert {("0", "Linear", 3), ("1", "GELU", 3)} <= {(s.path, s.name, s.calls) for s in trace.modules}
    assert measure(model, run, regime="prefill", tokens=64).kernels == trace.kernels


def norms_of(loaded: Any, supplier: str) -> Graft:
    """A graft that seats a supplier's first Solution at every norm."""
    from kernelgraft import suppliers

    made, here = hand_made.make_graft(loaded, only={"rms_norm"}), machine.read()
    found: dict[str, Any] = {}
    for name, definition in made.definitions.items():
        answer = suppliers.select([supplier])[0].candidates(definition, here)
        assert isinstance(answer, list) and answer, answer
        found[name] = answer[0]
    patches = []
    for one in made.patches:
        seats = tuple(s.model_copy(update={"solution": found[s.definition].name}) for s in one.seats)
        patches.append(one.model_copy(update={"seats": seats}))
    return made.model_copy(update={"patches": tuple(patches), "solutions": {s.name: s for s in found.values()}})


def check_grafted_norms(loaded: Any, graft: Graft, profiler: Any, language: str | None) -> None:
    """The original with a graft of its norms at hand, then the grafted model, in a prefill and in decode steps."""
    model = loaded.model
    run = generating(model, 4)
    run()
    for regime in ("prefill", "decode"):
        before = measure(model, run, regime=regime, tokens=7, graft=graft, profiler=profiler)
        adds_up(before, before.kernel_us)
        whole = [parse(profiler.last, regime=r, tokens=7).kernel_us for r in ("prefill", "decode")]
        assert before.kernel_us == pytest.approx(whole[regime == "decode"])
        assert sum(whole) == pytest.approx(profiler.total_us, rel=0.01), (whole, profiler)
        assert before.replaced_percent == pytest.approx(inside(before, "norm"))
        assert before.replaced_percent is not None and 1 < before.replaced_percent < 100
        assert before.cutile_percent == 0
        assert " 0.00% <<<" in tracing.coverage_line(before)
        with patch.apply(graft, model) as applied:
            run()
            after = measure(model, run, regime=regime, tokens=7, applied=applied, profiler=profiler)
        adds_up(after, after.kernel_us)
        whole = [parse(profiler.last, regime=r, tokens=7).kernel_us for r in ("prefill", "decode")]
        assert sum(whole) == pytest.approx(profiler.total_us, rel=0.01), (whole, profiler)
        assert not any(s.path.endswith("norm") for s in after.uncovered), "they are served"
        if language is not None:
            share = after.languages_percent[language]
            assert 1 < share < 100
            assert after.cutile_percent == share == pytest.approx(inside(after, "norm"), abs=0.5)
            assert f"(GPU Time):{share:9.2f}% <<<" in tracing.coverage_line(after)
            assert after.kernels < before.kernels


def test_a_graft_s_kernels_stand_where_the_original_s_time_was(loaded: Any) -> None:
    check_grafted_norms(loaded, norms_of(loaded, "torch"), FakeTotal(), None)


class FakeTotal:
    """The fake GPU, with its total."""

    total_us = 0.0
    last: dict[str, Any]

    def __call__(self, run: Callable[[], Any]) -> dict[str, Any]:
        self.last = fake_gpu(run)
        self.total_us = sum(e["dur"] for e in self.last["traceEvents"] if e.get("cat") == "kernel")
        return self.last


@pytest.mark.gpu
def test_a_graft_s_cutile_kernels_are_its_coverage_and_sums_are_the_profiler_s() -> None:
    own = hand_made.load("llama", dtype=torch.bfloat16)
    own.model.cuda()
    graft = norms_of(own, "kernelgraft")
    profiler = RealGpu()
    check_grafted_norms(own, graft, profiler, "cutile")
    model, run = own.model, generating(own.model, 1)  # one token: all of the run is the prefill
    with patch.apply(graft, model) as applied:
        run()
        trace = measure(model, run, regime="prefill", tokens=7, applied=applied, profiler=profiler)
    adds_up(trace, trace.kernel_us)
    assert trace.kernel_us == pytest.approx(profiler.total_us, rel=0.01)
    assert trace.cutile_percent > 1
