"""Guards say which calls a Solution serves; `load` makes a Solution callable."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch
from judging import HIDDEN, captured, definition, solution

from kernelgraft.errors import MissingExtraError, RecordError
from kernelgraft.records import Axis, BuildSpec, Guard, SourceFile
from kernelgraft.suppliers import load as loading
from kernelgraft.suppliers.guards import bind_axes, refuses
from kernelgraft.suppliers.load import load

RMS = definition("rms_norm")
X, W = torch.randn(2, 3, HIDDEN), torch.randn(HIDDEN)


def test_a_call_of_the_definition_is_served() -> None:
    assert refuses(Guard(), RMS, (X, W)) is None
    assert refuses(Guard(), RMS, (X.mT.contiguous().mT, torch.nn.Parameter(W))) is None
    assert bind_axes(RMS, (X, W)) == {"batch_size": 2, "seq_len": 3, "hidden_size": HIDDEN}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((X,), "1 inputs where there are 2"),
        ((X[0], W), "hidden_states has 2 dimensions where it has 3"),
        ((X, W[:32]), "weight has hidden_size=32 where it is 64"),
        ((torch.randn(2, 3, 32), torch.randn(32)), "hidden_states has hidden_size=32 where it is 64"),
        ((X.double(), W), "hidden_states has dtype float64 where it is float32"),
        ((X.to(torch.bfloat16), W), "hidden_states has dtype bfloat16 where it is float32"),
        ((X.to("meta"), W.to("meta")), "hidden_states is on meta, served are cpu and cuda"),
        ((1.0, W), "hidden_states is a float where a plain tensor is needed"),
        ((X.as_subclass(type("Odd", (torch.Tensor,), {})), W), "hidden_states is a Odd where a plain tensor is needed"),
    ],
)
def test_what_is_no_call_of_the_definition_is_refused(inputs: tuple[object, ...], words: str) -> None:
    assert refuses(Guard(), RMS, inputs) == words
    if "meta" not in words:
        with pytest.raises(ValueError, match="inputs of `rms_norm_float32`"):
            bind_axes(RMS, inputs)


def test_var_axes_agree_between_inputs() -> None:
    pair = definition("act_mul")
    assert refuses(Guard(), pair, (X, X)) is None
    assert refuses(Guard(), pair, (X, X[:, :2])) == "up has seq_len=2 where it is 3"


@pytest.mark.parametrize(
    ("guard", "inputs", "words"),
    [
        (Guard(devices=("cuda",)), (X, W), "hidden_states is on cpu, served are cuda"),
        (Guard(dtypes=("bfloat16",)), (X, W), "hidden_states has dtype float32, served are bfloat16"),
        (Guard(contiguous=("hidden_states",)), (X.transpose(0, 1), W), "hidden_states is not contiguous"),
        (Guard(contiguous=("weight",)), (X.transpose(0, 1), W), None),
        (Guard(last_dim_contiguous=("hidden_states",)), (X.transpose(0, 1), W), None),
        (
            Guard(last_dim_contiguous=("hidden_states",)),
            (torch.randn(2, 3, 2 * HIDDEN)[..., ::2], W),
            "hidden_states has stride 2 in its last dimension, served is 1",
        ),
        (Guard(max_axes={"seq_len": 2}), (X, W), "seq_len is larger than 2"),
        (Guard(max_axes={"seq_len": 3}), (X, W), None),
        (Guard(equal_axes=(("batch_size", "seq_len"),)), (X, W), "batch_size is neither 1 nor equal to seq_len"),
        (Guard(equal_axes=(("batch_size", "seq_len"),)), (X[:1], W), None),
        (Guard(equal_axes=(("batch_size", "seq_len"),)), (X[:, :2], W), None),
    ],
)
def test_the_guard_decides(guard: Guard, inputs: tuple[torch.Tensor, ...], words: str | None) -> None:
    assert refuses(guard, RMS, inputs) == words


def test_gradients_are_refused_only_where_they_are_needed() -> None:
    needs = X.clone().requires_grad_()
    cuts, flows = Guard(autograd=False), Guard()
    assert refuses(cuts, RMS, (needs, W)) == "hidden_states needs a gradient, which it does not compute"
    assert refuses(flows, RMS, (needs, W)) is None
    assert refuses(cuts, RMS, (X, W)) is None
    with torch.no_grad():
        assert refuses(cuts, RMS, (needs, W)) is None


def test_a_call_outside_the_constraints_is_refused() -> None:
    tied = RMS.model_copy(update={"constraints": ("batch_size == 1 or batch_size == seq_len",)})
    assert refuses(Guard(), tied, (X[:1], W)) is None
    assert refuses(Guard(), tied, (X[:, :2], W)) is None
    assert refuses(Guard(), tied, (X, W)) == "it breaks the constraint batch_size == 1 or batch_size == seq_len"


def test_numbers_are_inputs_too() -> None:
    scaled = RMS.model_copy(
        update={"inputs": {**RMS.inputs, "eps": RMS.inputs["weight"].model_copy(update={"shape": None})}}
    )
    assert refuses(Guard(), scaled, (X, W, 1e-6)) is None
    assert refuses(Guard(), scaled, (X, W, W)) == "eps is a tensor where a number is needed"


def test_a_loaded_solution_computes_and_shows_its_source() -> None:
    made = solution(RMS, "def run(hidden_states, weight): return F.rms_norm(hidden_states, (64,), weight, 1e-6)")
    function = load(made)
    assert torch.equal(function(X, W), torch.nn.functional.rms_norm(X, (HIDDEN,), W, 1e-6))
    assert inspect.getsource(function).startswith("def run(hidden_states, weight)")
    assert load(made.model_copy()) is function, "equal content is loaded once"
    other = solution(RMS, "def run(hidden_states, weight): return hidden_states")
    assert load(other) is not function
    assert Path(inspect.getfile(function)).parent.name == made.content_hash()


def test_sources_import_each_other_as_a_package() -> None:
    made = solution(RMS, "from .parts.scale import twice\ndef run(x, weight): return twice(x)")
    helper = SourceFile(path="parts/scale.py", content="def twice(x):\n    return 2 * x\n")
    function = load(made.model_copy(update={"sources": (*made.sources, helper)}))
    assert torch.equal(function(X, W), 2 * X)


def test_loading_says_what_is_wrong() -> None:
    with pytest.raises(MissingExtraError, match="imports `no_such_package`, which is not installed"):
        load(solution(RMS, "import no_such_package\ndef run(x, weight): return x"))
    with pytest.raises(RecordError, match="cannot be imported: ZeroDivisionError: division by zero"):
        load(solution(RMS, "1 / 0\ndef run(x, weight): return x"))
    with pytest.raises(RecordError, match=r"has no function `go` in `kernel\.py`"):
        load(solution(RMS, "def run(x, weight): return x", entry="go"))
    outside = solution(RMS, "def run(x, weight): return x").model_copy(
        update={
            "sources": (SourceFile(path="../kernel.py", content="x = 1"),),
            "spec": BuildSpec(language="python", target_hardware=("cpu",), entry_point="../kernel.py::run"),
        }
    )
    with pytest.raises(RecordError, match=r"source path `\.\./kernel\.py`, which leaves its folder"):
        load(outside)


def test_a_changed_file_in_the_cache_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELGRAFT_CACHE", str(tmp_path))
    made = solution(RMS, "def run(x, weight): return x + 17")
    folder = tmp_path / "solutions" / made.content_hash()
    folder.mkdir(parents=True)
    (folder / "kernel.py").write_text("def run(x, weight): return 'changed by hand'\n")
    assert torch.equal(load(made)(X, W), X + 17)
    assert [p.name for p in folder.iterdir() if p.is_file()] == ["kernel.py"], "no draft is left"


def test_without_a_writable_cache_a_temporary_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("KERNELGRAFT_CACHE", str(blocked))
    function = load(solution(RMS, "def run(x, weight): return x - 19"))
    assert torch.equal(function(X, W), X - 19)
    assert Path(inspect.getfile(function)).is_relative_to(loading._temporary())
    assert os.access(inspect.getfile(function), os.R_OK)


def test_captured_calls_of_the_tests_are_calls_of_their_definition() -> None:
    for which in ("rms_norm", "softmax", "act_mul", "clone", "add_norm"):
        subject = definition(which)
        sizes = ((7, 33),) if which == "softmax" else ((1, 7),)
        for call in captured(subject, *sizes):
            assert refuses(Guard(), subject, call.inputs) is None
            assert all(isinstance(a, Axis) for a in subject.axes.values())
