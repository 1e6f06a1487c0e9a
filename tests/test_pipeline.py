"""The stages in order: what they find, decide and write, and that the model is left as it was."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import hand_made
import pytest
import torch
from torch import nn

from kernelgraft import evaluate, machine, models, patch, pipeline
from kernelgraft.errors import MismatchError, NothingToPatch, UsageError
from kernelgraft.identity import model_card
from kernelgraft.pipeline import gate, measuring, planning, researching, seating
from kernelgraft.records import EndToEnd, Graft, Plan, Research, Status
from kernelgraft.store import Inventory

QUICK = evaluate.JudgeOptions.quick()


def attributes(model: nn.Module) -> dict[str, dict[str, int]]:
    """Identity of everything that instances hold."""
    return {name: {k: id(v) for k, v in vars(module).items()} for name, module in model.named_modules()}


@pytest.fixture(scope="module")
def tiny() -> models.Loaded:
    return models.load("tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny") / "graft"


@pytest.fixture(scope="module")
def integrated(tiny: models.Loaded, folder: Path) -> tuple[Graft, dict[str, Any]]:
    """The bundled model integrated with everything verified, and its attributes before and after."""
    before = attributes(tiny.model)
    graft = pipeline.integrate(tiny, out=folder, suppliers=["torch"], policy="verified", options=QUICK)
    return graft, {"before": before, "after": attributes(tiny.model)}


def test_the_bundled_model_gets_its_computes(integrated: tuple[Graft, dict[str, Any]]) -> None:
    graft, seen = integrated
    assert {p.family for p in graft.accepted} >= {"rms_norm", "rope", "gated_mlp", "attention", "residual_norm"}
    assert graft.end_to_end is not None
    assert graft.end_to_end.tokens_equal
    assert graft.end_to_end.grafted_error is not None
    assert graft.end_to_end.baseline_error is not None
    assert seen["before"] == seen["after"]


def test_seats_hold_the_times_that_decided_them(integrated: tuple[Graft, dict[str, Any]]) -> None:
    graft, _ = integrated
    for compute in graft.accepted:
        assert {s.regime for s in compute.seats} == {"prefill", "decode"}
        for seat in compute.seats:
            assert seat.seated
            assert seat.original_us is not None
            assert seat.original_us > 0
            assert seat.solution_us == seat.candidates_us[seat.solution or ""] == min(seat.candidates_us.values())
    passed = [e for e in graft.evaluations if e.status is Status.PASSED]
    assert passed
    assert all(e.performance for e in passed)


def test_records_on_disk_are_the_ones_returned(integrated: tuple[Graft, dict[str, Any]], folder: Path) -> None:
    graft, _ = integrated
    inventory = Inventory(folder)
    assert inventory.load_record("graft", Graft) == graft
    rows = inventory.load_record("research", Research).rows
    assert {d for r in rows for d in r.definitions} == set(inventory.definitions())
    plan = inventory.load_record("plan", Plan)
    assert all(row.verdict in ("exact", "adapter") for row in plan.rows)
    for definition in inventory.definitions().values():
        assert definition.reference.startswith("# Source: https://github.com/huggingface/transformers/blob/v")
        for workload, meta in inventory.workloads(definition.name):
            inputs, outputs = inventory.load_inputs(workload, meta), inventory.load_outputs(workload, meta)
            from kernelgraft.families.reference import run_reference

            for got, wanted in zip(run_reference(definition, inputs), outputs, strict=True):
                torch.testing.assert_close(got, wanted)


def test_a_done_job_is_said_and_not_done_again(
    integrated: tuple[Graft, dict[str, Any]], tiny: models.Loaded, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graft, _ = integrated
    inventory = Inventory(folder)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the job was done again")

    monkeypatch.setattr("kernelgraft.pipeline.integration.research", refuse)
    done = pipeline.run_integration(tiny, inventory, suppliers=["torch"])
    assert done.already is not None
    assert "on disk" in done.already
    assert done.graft == graft
    with patch.apply(graft, tiny.model):
        live = pipeline.run_integration(tiny, Inventory(folder.parent / "empty"), suppliers=["torch"])
        assert live.already is not None
        assert "already grafted" in live.already
    with pytest.raises(AssertionError, match="done again"):
        pipeline.run_integration(tiny, inventory, suppliers=["torch"], force=True)
    assert inventory.load_record("graft", Graft) == graft, "a failure took the old records away"


def test_another_machine_or_version_is_another_job(integrated: tuple[Graft, dict[str, Any]]) -> None:
    graft, _ = integrated
    here = machine.read()
    assert planning.same_job(graft, graft.model, here)
    assert not planning.same_job(graft, graft.model, here.model_copy(update={"gpu": "another"}))
    assert not planning.same_job(graft, graft.model, here.model_copy(update={"versions": {"torch": "0"}}))
    assert not planning.same_job(graft, graft.model.model_copy(update={"dtype": "bfloat16"}), here)


def test_the_stages_run_alone_on_records(folder: Path, integrated: tuple[Graft, dict[str, Any]]) -> None:
    inventory = Inventory(folder)
    record = inventory.load_record("research", Research)
    fresh = models.load("tiny")
    computes = pipeline.recapture(fresh, record, inventory.definitions())
    assert {d.name for c in computes for d in c.definitions} == set(inventory.definitions())
    assert all(c.bound for c in computes)
    found = pipeline.planned(inventory.load_record("plan", Plan), inventory)
    assert {s.name for g in found.solutions.values() for s in g} == set(inventory.solutions())
    with pytest.raises(MismatchError, match="not the model that was researched"):
        pipeline.recapture(models.load("tiny", dtype=torch.bfloat16), record, inventory.definitions())


class Plain(nn.Module):
    """A language model in which no family has a place."""


def plain_model() -> models.Loaded:
    from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class PlainConfig(PreTrainedConfig):
        model_type = "plain_for_tests"

    class PlainModel(PreTrainedModel, GenerationMixin):
        config_class = PlainConfig

        def __init__(self, config: PlainConfig) -> None:
            super().__init__(config)
            self.embedding = nn.Embedding(32, 8)
            self.head = nn.Linear(8, 32)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
            return CausalLMOutputWithPast(logits=self.head(self.embedding(input_ids).cumsum(1).tanh()))

    model = PlainModel(PlainConfig(vocab_size=32, num_hidden_layers=1, hidden_size=8, num_attention_heads=1)).eval()
    return models.wrap(model)


def test_a_model_with_nothing_to_patch_is_said(tmp_path: Path) -> None:
    with pytest.raises(NothingToPatch, match="no site"):
        pipeline.integrate(plain_model(), out=tmp_path / "plain", suppliers=["torch"])
    assert NothingToPatch.exit_code == 3


def test_a_method_that_others_patched_is_named() -> None:
    loaded = hand_made.load("llama")
    norm = loaded.model.model.norm

    def theirs(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        return type(self).forward(self, hidden_states)  # type: ignore[no-any-return, operator]

    theirs.__module__ = "other_kernels.ops"
    norm.forward = types.MethodType(theirs, norm)
    sites = {s.path: s for s in researching.discover(loaded.model)}
    assert researching.foreign_patch(loaded.model, sites["model.norm"]) == "other_kernels"
    assert researching.foreign_patch(loaded.model, sites["model.layers.*.mlp"]) is None


def test_an_unknown_supplier_is_refused_before_any_work(tiny: models.Loaded) -> None:
    with pytest.raises(UsageError, match="nonesuch"):
        pipeline.integrate(tiny, suppliers=["nonesuch"])


def wrong(graft: Graft, family: str, factor: str) -> Graft:
    """The graft with one family's Solutions off by a factor."""
    solutions = dict(graft.solutions)
    for name, solution in graft.solutions.items():
        if solution.meta.family == family:
            text = (
                solution.entry_source + f"\n_right = run\n\ndef run(*inputs):\n    return _right(*inputs) * {factor}\n"
            )
            source = solution.sources[0].model_copy(update={"content": text})
            solutions[name] = solution.model_copy(update={"sources": (source,)})
    return graft.model_copy(update={"solutions": solutions})


def test_the_gate_rejects_what_moves_the_model_and_keeps_the_rest() -> None:
    loaded = hand_made.load("llama")
    graft = hand_made.make_graft(loaded, only={"rms_norm", "gated_mlp"})
    kept = gate.filter_patches(graft, loaded)
    assert {p.family for p in kept.accepted} == {"rms_norm", "gated_mlp"}
    assert kept.end_to_end is not None
    assert kept.end_to_end.logits_rel_rmse < 1e-5
    filtered = gate.filter_patches(wrong(graft, "gated_mlp", "1.05"), loaded)
    assert {p.family for p in filtered.accepted} == {"rms_norm"}
    rejected = next(p for p in filtered.patches if p.family == "gated_mlp")
    assert "end to end" in (rejected.reason or "")
    assert not any(s.seated for s in rejected.seats)


def test_the_gate_measures_against_wider_arithmetic() -> None:
    def result(moved: float, before: float | None, after: float | None) -> EndToEnd:
        return EndToEnd(tokens_equal=True, logits_rel_rmse=moved, baseline_error=before, grafted_error=after)

    assert gate.passes(result(1e-3, 1e-3, 1.9e-3), torch.float32)
    assert not gate.passes(result(1e-3, 1e-3, 2.1e-3), torch.float32)
    assert gate.passes(result(1e-6, None, None), torch.float32)
    assert not gate.passes(result(1e-3, None, None), torch.float32)
    assert gate.rel_rmse(torch.ones(3), torch.tensor([1.0, float("inf"), 1.0])) == float("inf")


def test_a_fusion_that_its_parts_match_is_unseated(tiny: models.Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    graft = hand_made.make_graft(tiny, only={"rms_norm", "residual_norm"})
    norms = graft.model_copy(update={"patches": tuple(p for p in graft.patches if p.family == "rms_norm")})
    inventory = Inventory(Path(machine.cache_folder()) / "parts")
    _, computes = pipeline.research(tiny, inventory)
    compute = next(c for c in computes if c.family == "residual_norm")
    solutions = [s for s in graft.solutions.values() if s.definition == compute.definitions[0].name]
    table = seating.Table(compute, solutions, "fastest")
    samples = measuring.base_samples(compute)
    timed: list[list[str]] = []
    ran: list[int] = []

    def timings(factor: float) -> Any:
        def interleave(functions: dict[str, Any], **_: Any) -> dict[str, Any]:
            timed.append(list(functions))
            with_patches = patch.find_applied(tiny.model) is not None
            for function in functions.values():
                function()
            ran.append(with_patches)
            us = {name: 10.0 if name.startswith("original") else 10.0 * factor for name in functions}
            return {n: evaluate.Timing(median_us=t, mad_us=0.01, samples=(t,) * 9) for n, t in us.items()}

        return interleave

    monkeypatch.setattr(measuring, "interleave", timings(0.5))
    table.add(tiny.model, samples)
    assert [s.gain_us for s in table.seats()] == [5.0, 5.0]
    table.against_parts(tiny.model, samples, norms)
    assert all(s.seated for s in table.seats())
    monkeypatch.setattr(measuring, "interleave", timings(1.0))
    table.against_parts(tiny.model, samples, norms.model_copy(update={"patches": ()}))
    assert all(s.seated for s in table.seats())
    table.against_parts(tiny.model, samples, norms)
    assert [s.seated for s in table.seats()] == [False, False]
    assert [s.gain_us for s in table.seats()] == [0.0, 0.0], "over its parts"
    assert ran == [False, False, True, True, True, True]
    assert {len(names) for names in timed} == {3}


def test_the_card_knows_the_configuration_not_the_path() -> None:
    one, two = hand_made.load("llama"), hand_made.load("llama")
    assert model_card(one.model) == model_card(two.model)
    two.model.config.rms_norm_eps = 0.5
    assert model_card(one.model).config_sha256 != model_card(two.model).config_sha256


def test_a_graft_can_be_restricted_to_a_language() -> None:
    loaded = hand_made.load("llama")
    graft = hand_made.make_graft(loaded, only={"rms_norm", "gated_mlp"})
    name = next(n for n, s in graft.solutions.items() if s.meta.family == "rms_norm")
    tile = graft.solutions[name].model_copy(
        update={"spec": graft.solutions[name].spec.model_copy(update={"language": "cuda-tile"})}
    )
    graft = graft.model_copy(update={"solutions": {**graft.solutions, name: tile}})
    kept = pipeline.restricted(graft, language="cuda-tile")
    assert {n for p in kept.accepted for n in p.solutions} == {name}
    assert all(p.reason and "cuda-tile" in p.reason for p in kept.patches if p.status == "rejected")
    assert not pipeline.restricted(graft, language="triton").accepted


def test_another_language_takes_the_seat_where_it_is_faster_than_the_original() -> None:
    graft = hand_made.make_graft(hand_made.load("llama"), only={"gated_mlp"})
    (patch_,), (name, base) = graft.patches, next(iter(graft.solutions.items()))
    tile = base.model_copy(update={"name": "tile", "spec": base.spec.model_copy(update={"language": "cuda-tile"})})
    timed = {"original_us": 10.0, "solution_us": 4.0, "spread_us": 0.5}
    seats = [
        patch_.seats[0].model_copy(update=timed | {"candidates_us": {name: 4.0, "tile": us}, "seated": seated})
        for us, seated in ((6.0, True), (9.8, True), (12.0, True), (6.0, False))
    ]
    patch_ = patch_.model_copy(update={"seats": tuple(seats)})
    graft = graft.model_copy(
        update={"policy": "fastest", "patches": (patch_,), "solutions": {name: base, "tile": tile}}
    )
    found = pipeline.restricted(graft, language="cuda-tile").patches[0]
    assert [(s.solution, s.seated, s.solution_us) for s in found.seats[:3]] == [
        ("tile", True, 6.0),
        ("tile", False, 9.8),
        ("tile", False, 12.0),
    ]
    assert found.seats[3] == seats[3], "what was decided against is not taken up again"
    verified = pipeline.restricted(graft.model_copy(update={"policy": "verified"}), language="cuda-tile").patches[0]
    assert [s.seated for s in verified.seats] == [True, True, True, False]


def test_candidates_of_other_languages_are_left_out_with_the_reason(tiny: models.Loaded, tmp_path: Path) -> None:
    _, computes = pipeline.research(tiny, Inventory(tmp_path / "languages"))
    suppliers = planning.chosen(["torch"], machine.read())
    found = planning.candidates(computes, suppliers, machine.read(), languages=("cuda-tile",))
    assert not any(found.solutions.values())
    reasons = [line.reason or "" for row in found.rows for line in row.candidates]
    assert any("written in python, and only cuda-tile is asked for" in reason for reason in reasons)
    everything = planning.candidates(computes, suppliers, machine.read())
    again = planning.candidates(computes, suppliers, machine.read(), languages=("python",))
    assert again.solutions == everything.solutions
