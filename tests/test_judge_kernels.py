"""scripts/judge_kernels.py: what it would judge, what it says and how it ends; a few kernels before the judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from kernelgraft import families
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.ours import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "judge_kernels.py"
FEW = (
    "rms_norm: one plus the weight, rounded, bf16",
    "layer_norm: one plus the weight, f16",
    "add_rms_norm: width 97, f32",
    "add_layer_norm: after the norm, bf16",
    "act_and_mul: gelu, up_first, width 128, f16",
    "attention_decode: window, softcap, float mask, f16",
    "linear_decode: 131 to 75, bias, f16",
)
"""Kernels that no other test has the judge see, or not with these options."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import judge_kernels
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return judge_kernels


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, as it forks; `code`: run before its `main`."""
    start = [str(SCRIPT)] if code is None else ["-c", f"{code}\nimport sys\nsys.exit(judge_kernels.main())"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", SCRIPT.parent)))}
    command = [sys.executable, *start, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.parametrize("small", [True, False])
def test_every_kernel_in_every_dtype_is_first(script: ModuleType, small: bool) -> None:
    found = script.subjects(small=small)
    wanted = {(kernel, dtype) for kernel in CATALOGUE for dtype in script.DTYPES}
    assert {(s.kernel, s.dtype) for s in found[: len(wanted)]} == wanted
    assert len({s.label for s in found}) == len(found) > 100


@pytest.mark.parametrize("small", [True, False])
def test_definitions_and_their_calls_fit_kernels_and_guards(script: ModuleType, small: bool) -> None:
    """Real sizes too, which a run on a CPU does not see."""
    card: Any = script.machine.read()
    for subject in script.subjects(small=small)[:: 1 if small else 3]:
        if CATALOGUE[subject.kernel].language == "triton":
            continue
        definition = subject.make()
        name = f"kernelgraft_{subject.kernel}_{definition.name}"
        (ours,) = [s for s in script.OwnSupplier(interpret=True).candidates(definition, card) if s.name == name]
        if small:
            calls = script.made.captured(definition, subject.sizes)
            assert any(refuses(ours.meta.guard, definition, c.inputs) is None for c in calls), subject.label
        # A weight of more elements than a generated input may have would leave the judge without sizes.
        points = families.get(definition.meta.family).axis_points(definition, subject.sizes)
        assert len(points) > 3, subject.label


def lines_of(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return {f"{line['kernel']}: {line['definition']}, {line['dtype']}": line for line in found["lines"]}


def test_kernels_pass_the_judge(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    done = run("--jobs", "1", "--only", *FEW, "linear_decode_triton: 131 to 75, bias, f16", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(path)
    triton = lines.pop("linear_decode_triton: 131 to 75, bias, f16")
    assert triton["verdict"] == "refused" and "not interpreted" in triton["reason"]
    assert set(lines) == set(FEW)
    assert {line["verdict"] for line in lines.values()} == {"right"}
    assert all(line["cases"] > 15 and line["seconds"] > 0 for line in lines.values())
    found = json.loads(path.read_text())
    assert found["counts"] == {"right": len(FEW), "REJECTED": 0, "refused": 1, "left": 0}
    assert found["machine"]["versions"]["torch"] and found["options"]["seeds"] == 1


STAGED = """
import os, judge_kernels
from kernelgraft.suppliers.ours import sampling
source, judged = sampling.source_of, judge_kernels.judged
sampling.source_of = lambda *a: source(*a).replace("argmax(logits)", "argmax(-logits)")
judge_kernels.judged = lambda subject, *a: os._exit(7) if subject.dtype == "f16" else judged(subject, *a)
"""


def test_a_wrong_kernel_and_a_judge_that_ends_are_told() -> None:
    done = run("--jobs", "2", "--only", "argmax: 1257 words, bf16", "argmax: 1257 words, f16", code=STAGED)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = {line.split(", ")[1][:4].strip(): line for line in done.stdout.splitlines() if line.startswith("REJECTED")}
    assert "token differs" in lines["bf16"]
    assert "the judge's own process ended with 7" in lines["f16"]


def test_what_the_budget_leaves_over_is_listed(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--only", "argmax: 1257", "--budget", "0"]) == 2
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("left ") for line in said) == 3
    assert "0 right, 0 REJECTED, 0 refused, 3 left" in said[-1]
