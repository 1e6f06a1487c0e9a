"""How `benchmarks/kernels.py` measures, what of it runs first, and how its results are put together and shown."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("merging", "measuring", "table")
    yield lambda name: importlib.import_module(name)
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def merging(module: Any) -> Any:
    return module("merging")


def line(kernel: str, who: str = "kernelgraft", us: float | None = 1.0, regime: str = "decode") -> dict[str, Any]:
    return {"kernel": kernel, "model": "m", "regime": regime, "who": who, "device_us": us}


def result(*cases: dict[str, Any], skipped: list[list[str]] | None = None, time: str = "first") -> dict[str, Any]:
    return {"machine": {}, "time": time, "copy_gbps": 1.0, "cases": list(cases), "skipped": skipped or [], "launch": []}


def test_a_case_is_replaced_as_a_whole_and_others_stay(merging: Any) -> None:
    old = result(
        line("rope"), line("rope", "torch"), line("argmax"), skipped=[["argmax", "m", "x"], ["rope", "m", "y"]]
    )
    new = result(line("rope", us=3.0), line("argmax", regime="x"), time="second")
    found = merging.merged(old, new)
    assert [(c["kernel"], c["who"], c["regime"], c["run"]) for c in found["cases"]] == [
        ("rope", "kernelgraft", "decode", 1),
        ("argmax", "kernelgraft", "decode", 0),
        ("argmax", "kernelgraft", "x", 1),
    ]
    assert found["skipped"] == [["rope", "m", "y"]], "what has a result now was not skipped"
    assert [run["time"] for run in found["runs"]] == ["first", "second"] and found["time"] == "second"
    again = merging.merged(found, result(line("rope"), time="third"))
    assert [(c["kernel"], c["run"]) for c in again["cases"]] == [("rope", 2), ("argmax", 0), ("argmax", 1)]
    assert [run["time"] for run in again["runs"]] == ["first", "second", "third"]


def test_what_has_no_result_of_ours_comes_first(merging: Any) -> None:
    old = result(line("attention_prefill", us=None), line("rope"), line("linear_decode"), line("act_and_mul", "torch"))
    known = merging.settled(old)
    wanted = [(k, "m", "decode") for k in ("rope", "linear_decode", "act_and_mul", "attention_prefill")]
    order = [k for k, *_ in sorted(wanted, key=lambda case: merging.rank(case, known))]
    assert order == ["attention_prefill", "act_and_mul", "linear_decode", "rope"]


def test_kernels_to_be_measured_again_come_first(merging: Any) -> None:
    known = merging.settled(result(line("rope"), line("argmax"), line("linear_decode")))
    wanted = [(k, "m", "decode") for k in ("rope", "linear_decode", "rms_norm", "argmax")]
    order = [k for k, *_ in sorted(wanted, key=lambda case: merging.rank(case, known, ["argmax", "linear_decode"]))]
    assert order == ["argmax", "linear_decode", "rms_norm", "rope"]


def test_tables_set_ours_beside_a_copy_of_the_same_size(module: Any) -> None:
    table = module("table")
    sizes = {"bytes": 64e6, "of_copy": 0.8}
    old = [line("rope") | sizes, line("rope", "torch", us=2.0) | sizes]
    new = [line("rope", regime="x") | sizes | {"of_same_copy": 0.93}]
    small = [line("rope", regime="y") | {"bytes": 1e6, "of_copy": 0.1, "of_same_copy": 0.5}]
    head, _, *rows = table.rows([*old, *new, *small], "rope")
    assert head.endswith("| against the best other | share of a copy's bandwidth | share of a copy of the same size |")
    assert [row.split(" | ")[-3:] for row in rows] == [
        ["2.00x", "80%", "– |"],
        ["–", "80%", "93% |"],
        ["–", "–", "– |"],
    ]


class Fake:
    """In the place of a CUDA graph: a call takes as long as the contestant says."""

    def __init__(self, run: Any, sets: Any, calls: int) -> None:
        self.us = run.us

    def time(self) -> float:
        return float(self.us)


class Contestant:
    def __init__(self, us: float, factor: float) -> None:
        self.us, self.factor = us, factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_what_is_measured(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = module("measuring")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measuring, "Replay", Fake)
    monkeypatch.setattr(measuring, "host_time", lambda *_: 5.0)
    sizes: list[int] = []

    def copies(moved: int, calls: int) -> list[Any]:
        sizes.append(moved)
        return [Fake(SimpleNamespace(us=us), (), calls) for us in (7.0, 6.0)]

    monkeypatch.setattr(measuring, "copies_of", copies)
    monkeypatch.setattr(measuring, "COPIED", 4000)
    contestants = {"kernelgraft": Contestant(8.0, 2.0), "wrong": Contestant(1.0, 3.0), "drawn": Contestant(2.0, 5.0)}

    def measured(elements: int, flops: float) -> dict[str, dict[str, Any]]:
        case = measuring.Case(
            "k", "m", "r", lambda: (torch.ones(elements),), lambda x: 2 * x, contestants, 4 * elements, flops=flops,
            random=frozenset({"drawn"}),
        )  # fmt: skip
        return {found["who"]: found for found in measuring.measure(case, 3, False, 1000.0)}

    found = measured(1000, 0.0)
    assert sizes == [8000] and found["kernelgraft"]["bytes"] == 8000
    assert found["kernelgraft"]["copy_us"] == 6.0 and found["kernelgraft"]["of_same_copy"] == 0.75
    assert found["kernelgraft"]["of_copy"] == 8000 / 8.0 / 1e3 / 1000.0
    assert "allowed error" in found["wrong"]["wrong"] and "device_us" not in found["wrong"]
    assert found["drawn"]["wrong"] is None and found["drawn"]["device_us"] == 2.0
    # Neither beside what is small nor beside what is bound by arithmetic.
    assert measured(400, 0.0)["kernelgraft"]["of_same_copy"] is None
    assert measured(1000, 8000 * 1e3)["kernelgraft"]["copy_us"] is None and len(sizes) == 1


def test_the_committed_result_lacks_what_it_says(merging: Any) -> None:
    kept = json.loads((BENCHMARKS / "results" / "h200" / "kernels.json").read_text())
    assert not merging.settled(kept) & {tuple(one) for one in kept["skipped"]}
