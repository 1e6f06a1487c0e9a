"""A cuTile Solution for a GPU runs under the interpreter first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.tile", reason="the interpreter needs cuTile: pip install 'kernelgraft[cutile]'")

from judging import FAMILY, captured, definition, solution

from kernelgraft.evaluate import Captured, Judge, JudgeOptions, interpreting, jobs
from kernelgraft.evaluate.cases import make
from kernelgraft.records import Guard, Solution, Status

DOUBLE = definition("clone")
FEW = replace(JudgeOptions.quick(), points=3, distributions=("normal",), layouts=())
SOURCE = """
import cuda.tile as ct

@ct.kernel
def copy_kernel(x, y, TILE: ct.Constant[int]):
    block = ct.bid(0)
    {body}

def run(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        flat = x.view(-1)
        grid = (-(-flat.numel() // 128), 1, 1)
        ct.launch(torch.cuda.current_stream(), grid, copy_kernel, (flat, y.view(-1), 128))
    return y
"""
RIGHT = "ct.store(y, (block,), ct.load(x, (block,), (TILE,), padding_mode=ct.PaddingMode.ZERO))"
WRONG = "ct.store(y, (block,), ct.load(x, (block,), (TILE,), padding_mode=ct.PaddingMode.ZERO) * 1.01)"
UNDEFINED = "ct.store(y, (0,), ct.full((TILE,), 0.0, x.dtype))"


def for_gpu(body: str) -> Solution:
    return solution(
        DOUBLE,
        SOURCE.format(body=body),
        guard=Guard(devices=("cuda",), autograd=False),
        language="cuda-tile",
        supplier="kernelgraft",
        uses_compiler=True,
    )


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(FEW, family=lambda name: FAMILY) as made:
        yield made


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for those on a GPU; after the interpreter the guard refuses them."""
    monkeypatch.setattr(interpreting, "applies", lambda found, calls: True)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("body", [WRONG, UNDEFINED], ids=["scaled", "one tile only"])
def test_a_wrong_kernel_goes_no_further(judge: Judge, body: str) -> None:
    found = judge.verify(for_gpu(body), DOUBLE, captured(DOUBLE))
    assert found.status is Status.INCORRECT_NUMERICAL
    assert "under the interpreter, before it ran on the GPU: wrong at" in str(found.reason)


@pytest.mark.usefixtures("pretended")
def test_a_right_kernel_goes_on(judge: Judge) -> None:
    found = judge.verify(for_gpu(RIGHT), DOUBLE, captured(DOUBLE))
    assert "guard refuses the captured calls: x is on cpu" in str(found.reason)


@pytest.mark.usefixtures("pretended")
def test_it_can_be_left_out() -> None:
    with Judge(replace(FEW, interpret_first=False), family=lambda name: FAMILY) as without:
        found = without.verify(for_gpu(WRONG), DOUBLE, captured(DOUBLE))
    assert "guard refuses the captured calls: x is on cpu" in str(found.reason)


@pytest.mark.usefixtures("pretended")
def test_an_operation_that_the_interpreter_lacks_is_no_verdict(judge: Judge) -> None:
    made = for_gpu(RIGHT)
    (file,) = made.sources
    content = file.content + "\n\ndef run(x):\n    raise NotImplementedError('no operation `new`')\n"
    lacking = made.model_copy(update={"sources": (file.model_copy(update={"content": content}),)})
    found = judge.verify(lacking, DOUBLE, captured(DOUBLE))
    assert "guard refuses the captured calls" in str(found.reason)


def test_it_is_for_cutile_on_a_gpu_only() -> None:
    calls = captured(DOUBLE)
    on_gpu = [Captured((_Elsewhere(c.inputs[0]),), c.regime, c.label, c.axes) for c in calls]
    assert not interpreting.applies(for_gpu(RIGHT), calls)
    assert interpreting.applies(for_gpu(RIGHT), on_gpu)
    assert not interpreting.applies(solution(DOUBLE, "def run(x): return x.clone()"), on_gpu)


class _Elsewhere(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> _Elsewhere:
        made: _Elsewhere = torch.Tensor._make_subclass(cls, x)
        return made

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_small_sizes_are_tried(judge: Judge) -> None:
    large = captured(DOUBLE, (4, 4096), (4, 1))
    found = interpreting.calls(DOUBLE, FAMILY, large, lambda inputs: inputs[0].shape[0] < 100)
    assert 1 <= len(found) <= interpreting.POINTS + 1
    assert all(c.inputs[0].device.type == "cpu" for c in found)
    assert all(c.inputs[0].numel() <= interpreting.LARGEST_VOLUME for c in found)
    assert large[1].axes in [c.axes for c in found], "a captured size that is small is tried as it is"
    assert not interpreting.calls(DOUBLE, FAMILY, large, lambda inputs: False)


def test_a_rehearsal_is_short(tmp_path: Path) -> None:
    """One call of each case, and layouts of all inputs at once; what follows on the GPU tries each input by itself."""
    two = definition("act_mul")
    options = replace(JudgeOptions(), layouts=("offset",))
    labels, repeats = {}, {}
    for name, wanted in (("rehearsal", interpreting.quick(options)), ("after", options)):
        drawn = make(two, FAMILY, captured(two), wanted, static_shapes=False)
        labels[name] = [case.label for case in drawn.cases if case.check == "C11"]
        folder = tmp_path / name
        folder.mkdir()
        jobs.write(folder, for_gpu(RIGHT), jobs.Job(dict(enumerate(drawn.cases)), {}, {}), wanted)
        repeats[name] = json.loads((folder / "request.json").read_text())["repeats"]
    assert repeats == {"rehearsal": 1, "after": 3}
    assert [label.partition("(")[2].partition(",")[0] for label in labels["after"]] == [
        *("gate offset", "up offset", "all inputs offset"),
    ]
    assert ["all inputs" in label for label in labels["rehearsal"]] == [True, True], "offset and transposed"


@pytest.mark.gpu
def test_on_a_gpu(judge: Judge) -> None:
    calls = [
        Captured(tuple(x.cuda() for x in c.inputs), c.regime, c.label, c.axes) for c in captured(DOUBLE, (2, 7), (2, 1))
    ]
    found = judge.verify(for_gpu(WRONG), DOUBLE, calls)
    assert "under the interpreter" in str(found.reason)
    assert judge.verify(for_gpu(RIGHT), DOUBLE, calls).status is Status.PASSED
