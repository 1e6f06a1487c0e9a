"""How results of `benchmarks/kernels.py` are put together, and what of it runs first."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("merging")
    sys.modules.pop("merging", None)


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


def test_the_committed_result_lacks_what_it_says(merging: Any) -> None:
    kept = json.loads((BENCHMARKS / "results" / "h200" / "kernels.json").read_text())
    assert not merging.settled(kept) & {tuple(one) for one in kept["skipped"]}
