"""The inventory on disk: what is stored comes back, FlashInfer-Bench reads it, and a broken file is named."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from kernelgraft.errors import RecordError, UsageError
from kernelgraft.records import (
    Axis,
    BuildSpec,
    Definition,
    DefinitionMeta,
    Evaluation,
    Guard,
    MachineCard,
    ModelCard,
    Performance,
    Plan,
    Solution,
    SolutionMeta,
    SourceFile,
    SourceRef,
    Status,
    TensorSpec,
    Workload,
    WorkloadMeta,
)
from kernelgraft.store import DSL_TAG, Inventory

MACHINE = MachineCard(platform="Linux", cpu="a cpu", cores=2, python="3.11.0", versions={"torch": "2.13.0"})
MODEL = ModelCard(
    name="tiny",
    class_name="m.Model",
    type="tiny",
    parameters=1,
    dtype="float32",
    device="cpu",
    transformers="5.24.0",
    config_sha256="0" * 64,
)


def definition(name: str = "scale_h4") -> Definition:
    source = SourceRef(file="somewhere/modeling.py", first_line=1, last_line=2, sha256="a" * 64, symbol="Scale.forward")
    body = "def run(x, mask, factor):\n    return torch.where(mask, x * factor, 0)\n"
    reference = f"{source.comment()}\nimport torch\n\n\n{body}"
    return Definition(
        name=name,
        op_type="scale",
        axes={"n": Axis(type="var"), "h": Axis(type="const", value=4, description="width")},
        inputs={
            "x": TensorSpec(shape=("n", "h"), dtype="bfloat16"),
            "mask": TensorSpec(shape=("n", "h"), dtype="bool"),
            "factor": TensorSpec(shape=None, dtype="float32"),
        },
        outputs={"y": TensorSpec(shape=("n", "h"), dtype="bfloat16")},
        reference=reference,
        tags=("status:verified",),
        description="x times a factor, where the mask is set",
        constraints=("n > 0",),
        meta=DefinitionMeta(
            family="scale", semantics={"factor": 2.0, "list": [1, None]}, fingerprint="f" * 64, sources=(source,)
        ),
    )


def solution(name: str = "scale_plain", language: str = "python") -> Solution:
    return Solution(
        name=name,
        definition="scale_h4",
        author="torch",
        spec=BuildSpec(language=language, target_hardware=("cpu",), entry_point="scale.py::scale"),
        sources=(SourceFile(path="scale.py", content="def scale(x, mask, factor):\n    return x\n"),),
        description="plain",
        meta=SolutionMeta(
            supplier="torch",
            family="scale",
            guard=Guard(devices=("cpu",), max_axes={"n": 3}, text="n up to 3"),
            fingerprint="f" * 64,
        ),
    )


def call(n: int = 3) -> tuple[list[object], list[torch.Tensor]]:
    """Inputs whose strides a plain copy would lose: a transposed one, an expanded one, and a scalar."""
    x = torch.arange(4.0 * n).reshape(4, n).to(torch.bfloat16).t()
    mask = torch.tensor([[True], [False], [True]])[:n].expand(n, 4)
    return [x, mask, 2.0], [torch.where(mask, x * 2, 0)]


def filled(root: Path) -> tuple[Inventory, Workload]:
    inventory = Inventory(root)
    inventory.save_definition(definition())
    stored = None
    for regime, n in (("prefill", 3), ("decode", 1)):
        meta = WorkloadMeta(regime=regime, site="layers.*.scale", instance="layers.0.scale")
        inputs, outputs = call(n)
        workload = inventory.save_workload(definition(), meta, inputs, outputs)
        stored = stored or workload
    inventory.save_solution(solution())
    assert stored is not None
    return inventory, stored


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    inventory, _ = filled(tmp_path)
    again = Inventory(tmp_path)
    assert again.definitions() == {"scale_h4": definition()}
    assert again.solutions() == {"scale_plain": solution()}
    (workload, meta), (second, _) = again.workloads("scale_h4")
    assert (workload.axes, second.axes) == ({"n": 3}, {"n": 1})
    assert (meta.regime, meta.site, meta.padded) == ("prefill", "layers.*.scale", False)
    assert inventory.definitions()["scale_h4"].content_hash() == definition().content_hash()


def test_inputs_keep_their_strides_and_values(tmp_path: Path) -> None:
    inventory, workload = filled(tmp_path)
    meta = inventory.workloads("scale_h4")[0][1]
    (x, mask, factor), (y,) = call()
    loaded = inventory.load_inputs(workload, meta)
    assert torch.equal(loaded[0], x) and loaded[0].stride() == x.stride() == (1, 3)
    assert torch.equal(loaded[1], mask) and loaded[1].stride() == mask.stride() == (1, 0)
    assert loaded[0].dtype is torch.bfloat16 and loaded[1].dtype is torch.bool and loaded[2] == factor
    assert torch.equal(inventory.load_outputs(workload, meta)[0], y)


def test_the_same_call_stored_twice_is_one_workload(tmp_path: Path) -> None:
    inventory, workload = filled(tmp_path)
    meta = WorkloadMeta(regime="prefill", site="layers.*.scale", instance="layers.0.scale")
    inputs, outputs = call()
    assert inventory.save_workload(definition(), meta, inputs, outputs).uuid == workload.uuid
    assert len(inventory.workloads("scale_h4")) == 2
    changed = [inputs[0], inputs[1], 3.0]
    assert inventory.save_workload(definition(), meta, changed, outputs).uuid != workload.uuid
    assert len(inventory.workloads("scale_h4")) == 3


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    meta = WorkloadMeta(regime="prefill", site="s", instance="i")
    (x, mask, factor), outputs = call()
    with pytest.raises(UsageError, match=r"`mask`.*axis `n` is 2, not 3"):
        Inventory(tmp_path).save_workload(definition(), meta, [x, mask[:2], factor], outputs)
    assert not list(tmp_path.iterdir())


def evaluations() -> list[Evaluation]:
    common = {"solution": "scale_plain", "definition": "scale_h4"}
    errors = {"error_ratio": 0.5, "max_absolute_error": 1e-3, "max_relative_error": float("inf")}
    times = {
        "prefill": Performance(original_us=20.0, solution_us=10.0, spread_us=1.0),
        "decode": Performance(original_us=4.0, solution_us=8.0, spread_us=1.0),
    }
    return [
        Evaluation(status=Status.PASSED, cases=9, performance=times, **errors, **common),
        Evaluation(status=Status.PASSED, cases=9, **errors, **common),
        Evaluation(status=Status.INCORRECT_NUMERICAL, check="C6", reason="too far off", **errors, **common),
        Evaluation(status=Status.TIMEOUT, check="C1", reason="no answer in 10 s", **common),
        Evaluation(
            status=Status.TIMEOUT, reason="of a solution that is not stored", solution="x", definition="scale_h4"
        ),
    ]


def test_flashinfer_bench_reads_the_folder(tmp_path: Path) -> None:
    from flashinfer_bench.data import TraceSet

    inventory, workload = filled(tmp_path)
    inventory.append_evaluations(evaluations(), MACHINE)
    theirs = TraceSet.from_path(str(tmp_path))

    ours = definition()
    read = theirs.definitions["scale_h4"]
    assert read.const_axes == {"h": 4} and read.var_axes == ["n"]
    for field in ("name", "op_type", "reference", "description"):
        assert getattr(read, field) == getattr(ours, field)
    assert (tuple(read.tags), tuple(read.constraints)) == (ours.tags, ours.constraints)
    for group in ("inputs", "outputs"):
        assert list(getattr(read, group)) == list(getattr(ours, group))
        for name, spec in getattr(ours, group).items():
            theirs_spec = getattr(read, group)[name]
            assert theirs_spec.dtype.value == spec.dtype
            assert (None if theirs_spec.shape is None else tuple(theirs_spec.shape)) == spec.shape

    (read_solution,) = theirs.solutions["scale_h4"]
    dumped = read_solution.model_dump(mode="json")
    assert dumped == solution().model_dump(mode="json", exclude={"meta"})
    assert dumped["spec"]["destination_passing_style"] is False

    stored = [w for w, _ in inventory.workloads("scale_h4")]
    assert len(stored) == len(theirs.workloads["scale_h4"]) == 2
    for trace, own in zip(theirs.workloads["scale_h4"], stored, strict=True):
        assert trace.workload.model_dump(mode="json") == own.model_dump(mode="json", exclude_none=True)
        for spec in trace.workload.inputs.values():
            assert spec.type == "scalar" or (tmp_path / spec.path).is_file()

    traces = theirs.traces["scale_h4"]
    assert [t.evaluation.status.value for t in traces] == ["PASSED", "PASSED", "INCORRECT_NUMERICAL", "TIMEOUT"]
    assert [t.workload.axes["n"] for t in traces] == [3, 1, 3, 3]
    assert (traces[0].evaluation.performance.speedup_factor, traces[1].evaluation.performance.latency_ms) == (
        2.0,
        0.008,
    )
    assert traces[0].evaluation.correctness.max_relative_error == float("inf")
    assert traces[0].evaluation.correctness.extra["cases"] == 9
    assert traces[3].evaluation.log == "no answer in 10 s" and traces[0].workload.uuid == workload.uuid
    assert traces[0].evaluation.environment.hardware == "a cpu"


def test_all_evaluations_come_back_and_add_up(tmp_path: Path) -> None:
    inventory, _ = filled(tmp_path)
    inventory.append_evaluations(evaluations(), MACHINE)
    assert inventory.evaluations() == evaluations()
    inventory.append_evaluations(evaluations()[:1], MACHINE)
    assert inventory.evaluations() == [*evaluations(), evaluations()[0]]


def test_a_language_of_ours_is_python_for_others(tmp_path: Path) -> None:
    from flashinfer_bench.data import TraceSet

    inventory, _ = filled(tmp_path)
    ours = solution("scale_tile", language="cuda-tile")
    inventory.save_solution(ours)
    (read,) = (s for s in TraceSet.from_path(str(tmp_path)).solutions["scale_h4"] if s.name == "scale_tile")
    assert read.spec.language.value == "python" and read.description == f"plain [{DSL_TAG}]"
    assert inventory.solutions()["scale_tile"] == ours


def test_stage_records(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path)
    plan = Plan(model=MODEL, rows=())
    inventory.save_record("plan", plan)
    inventory.save_record("bench", {"tokens_per_s": 1.0, "worst": float("nan")})
    assert inventory.load_record("plan", Plan) == plan
    assert inventory.load_record("bench", dict) == {"tokens_per_s": 1.0, "worst": "NaN"}
    assert inventory.has_record("plan") and not inventory.has_record("graft")
    with pytest.raises(RecordError, match=r"research\.json"):
        inventory.load_record("research", Plan)
    with pytest.raises(UsageError, match="unknown record `plans`"):
        inventory.save_record("plans", plan)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("plan.json", "{", "cannot read"),
        ("plan.json", "[]", "JSON object"),
        ("plan.json", '{"schema_version": 99}', "schema version 99"),
        ("plan.json", '{"schema_version": 1, "rows": []}', "model"),
        ("definitions/scale/scale_h4.json", "{}", "not a valid Definition"),
        ("meta/definitions/scale/scale_h4.json", '{"schema_version": 2, "meta": {}}', "schema version 2"),
        ("workloads/scale/scale_h4.jsonl", "{}\nnot json\n", "cannot read"),
        ("meta/workloads/scale/scale_h4.jsonl", "", "no line for workload"),
        ("solutions/torch/scale/scale_h4/scale_plain.json", '{"name": 1}', "not a valid Solution"),
        ("evaluations.jsonl", '{"evaluation": {"status": "FINE"}}', "not a valid Evaluation"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    inventory, _ = filled(tmp_path)
    inventory.append_evaluations(evaluations(), MACHINE)
    inventory.save_record("plan", Plan(model=MODEL, rows=()))
    (tmp_path / name).write_text(text)

    def read_all() -> None:
        inventory.definitions(), inventory.solutions(), inventory.workloads("scale_h4"), inventory.evaluations()
        inventory.load_record("plan", Plan)

    with pytest.raises(RecordError, match=words) as caught:
        read_all()
    assert Path(name).name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_blob_is_named(tmp_path: Path) -> None:
    inventory, workload = filled(tmp_path)
    path = tmp_path / str(workload.inputs["x"].path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RecordError, match=r"safetensors"):
        inventory.load_inputs(*inventory.workloads("scale_h4")[0])
    path.unlink()
    with pytest.raises(RecordError, match=path.name):
        inventory.load_inputs(*inventory.workloads("scale_h4")[0])


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("here")
    with pytest.raises(UsageError, match=r"cannot write `.*file"):
        Inventory(occupied).save_definition(definition())
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if not os.access(closed, os.W_OK):  # root may write anywhere
        with pytest.raises(UsageError, match="cannot write"):
            Inventory(closed).prepare()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory, _ = filled(tmp_path)
    path = tmp_path / "definitions" / "scale" / "scale_h4.json"
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        inventory.save_definition(definition())
    monkeypatch.undo()
    assert path.read_text() == before
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".part")]


def test_names_stay_inside_the_folder(tmp_path: Path) -> None:
    outside = definition().model_copy(update={"op_type": "../up"})
    with pytest.raises(UsageError, match="cannot be a file name"):
        Inventory(tmp_path / "in").save_definition(outside)
    assert not (tmp_path / "up").exists()


def test_clear_removes_only_its_own(tmp_path: Path) -> None:
    inventory, _ = filled(tmp_path)
    inventory.save_record("plan", Plan(model=MODEL, rows=()))
    (tmp_path / "notes.txt").write_text("mine")
    inventory.clear()
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "definitions").mkdir()
    inventory.clear()
    assert (tmp_path / "definitions").exists()


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    root = tmp_path / "later"
    inventory = Inventory(root)
    assert inventory.definitions() == {} and inventory.evaluations() == [] and inventory.workloads("x") == []
    assert not root.exists()
    inventory.prepare()
    assert json.loads((root / "inventory.json").read_text())["schema_version"] == 1
