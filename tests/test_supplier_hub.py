"""The supplier `hub`: which packages it lists, which it offers to the judge, and what of them runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import captured
from test_suppliers import norm_definition

from kernelgraft import families, machine
from kernelgraft.evaluate import Judge, JudgeOptions
from kernelgraft.records import Definition, Solution, Status
from kernelgraft.suppliers import hub, select
from kernelgraft.suppliers.base import Refusal
from kernelgraft.suppliers.load import load

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SEMANTICS = {
    "eps": 1e-6,
    "form": "explicit",
    "inverse": "rsqrt",
    "cast": "before_weight",
    "offset": 0,
    "offset_dtype": None,
    "with_weight": True,
}
RMS = norm_definition("rms_norm", SEMANTICS, torch.float32, torch.float32)
MACHINE = machine.read()


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty Hub cache, and nothing named."""
    monkeypatch.delenv(hub.NAMED, raising=False)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge(replace(JudgeOptions.quick(), points=3, distributions=("normal",), layouts=("offset",))) as made:
        yield made


def cached(cache: Path, commit: str = COMMIT) -> Path:
    """The example's package as the Hub's cache holds it."""
    snapshot = cache / "kernels--owner--my-rms-norm" / "snapshots" / commit
    shutil.copytree(EXAMPLES / "my-rms-norm" / "build", snapshot / "build")
    return snapshot


def written(folder: Path, layers: str, **files: str) -> Path:
    build = folder / "build" / "torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("from . import layers\n")
    (build / "metadata.json").write_text(json.dumps({"license": "mit"}))
    (build / "layers.py").write_text(layers)
    for name, text in files.items():
        (build / f"{name}.py").write_text(text)
    return folder


def offered(definition: Definition = RMS) -> list[Solution]:
    found = hub.SUPPLIER.candidates(definition, MACHINE)
    assert not isinstance(found, Refusal), found.reason
    return found


def refused(definition: Definition = RMS) -> str:
    found = hub.SUPPLIER.candidates(definition, MACHINE)
    assert isinstance(found, Refusal)
    return found.reason


def test_without_a_package_it_says_how_to_name_one() -> None:
    (supplier,) = select(["hub"])
    assert "KERNELGRAFT_HUB=FOLDER" in str(supplier.unavailable(MACHINE))
    assert supplier.catalogue(MACHINE) == []
    assert "KERNELGRAFT_HUB" in refused()


def test_what_lies_in_the_cache_is_listed_and_not_judged(no_cache: Path) -> None:
    cached(no_cache)
    (line,) = hub.SUPPLIER.catalogue(MACHINE)
    assert line.name == f"owner/my-rms-norm@{COMMIT}:CustomRMSNorm"
    assert (line.family, line.hardware) == ("rms_norm", ("cpu", "cuda"))
    assert f"KERNELGRAFT_HUB=owner/my-rms-norm@{COMMIT}" in str(line.unavailable)
    assert "no kernel package is named" in refused()


@pytest.mark.parametrize("pin", ["", "@v1", "@main", "@0123456"])
def test_only_a_whole_commit_is_a_pin(no_cache: Path, monkeypatch: pytest.MonkeyPatch, pin: str) -> None:
    cached(no_cache)
    monkeypatch.setenv(hub.NAMED, f"owner/my-rms-norm{pin}")
    assert "no kernel package is named" in refused()
    assert any("40 digits" in str(line.unavailable) for line in hub.SUPPLIER.catalogue(MACHINE))


def test_a_pinned_package_is_judged(no_cache: Path, monkeypatch: pytest.MonkeyPatch, judge: Judge) -> None:
    cached(no_cache)
    other = "f" * 40
    cached(no_cache, other)
    monkeypatch.setenv(hub.NAMED, f"owner/my-rms-norm@{COMMIT}")
    (solution,) = offered()
    assert COMMIT in solution.name and other not in solution.name
    verdict = judge.verify(solution, RMS, captured(RMS))
    assert (verdict.status, verdict.reason) == (Status.PASSED, None)
    lines = {line.name: line.unavailable for line in hub.SUPPLIER.catalogue(MACHINE)}
    assert lines[f"owner/my-rms-norm@{COMMIT}:CustomRMSNorm"] is None
    assert "not trusted" in str(lines[f"owner/my-rms-norm@{other}:CustomRMSNorm"])


def test_a_package_that_computes_something_else_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Judge
) -> None:
    layers = (EXAMPLES / "my-rms-norm" / "build" / "torch-universal" / "layers.py").read_text()
    wrong = layers.replace(".mean(-1", ".sum(-1")
    assert wrong != layers
    monkeypatch.setenv(hub.NAMED, str(written(tmp_path / "wrong", wrong)))
    (solution,) = offered()
    assert judge.verify(solution, RMS, captured(RMS)).status is Status.INCORRECT_NUMERICAL


HELPED = """
try:
    from transformers.conversion_mapping import WeightRenaming
except ImportError:
    WeightRenaming = None
import torch
import torch.nn as nn
from .inner import scaled

FACTOR = 1.0

def unused():
    raise RuntimeError

def run(self, x):
    y = x.float()
    return scaled(self.scale, (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)) * FACTOR

class HelpedRMSNormLayout(nn.Module):
    conversion_mapping = [WeightRenaming("weight", "scale")] if WeightRenaming else []
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

class HelpedRMSNorm(nn.Module):
    has_backward = False
    def forward(self, x):
        return run(self, x)

class PlainRMSNorm(nn.Module):
    def forward(self, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, (24,), self.weight, self.variance_epsilon)

class OddRMSNorm(nn.Module):
    def forward(self, hidden_states):
        return hidden_states * self.weight * self.secret

class AddRMSNorm(nn.Module):
    def forward(self, hidden_states):
        return hidden_states

class Rotary(nn.Module):
    def forward(self, q, k, cos, sin):
        return q, k
"""


def test_a_forward_with_all_that_it_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Judge) -> None:
    root = written(tmp_path / "helped", HELPED, inner="def scaled(weight, x):\n    return weight * x\n")
    monkeypatch.setenv(hub.NAMED, str(root))
    solutions = {s.name.removesuffix(f"_{RMS.name}"): s for s in offered()}
    assert set(solutions) == {"hub_helped_HelpedRMSNorm", "hub_helped_PlainRMSNorm"}
    helped, plain = solutions["hub_helped_HelpedRMSNorm"], solutions["hub_helped_PlainRMSNorm"]
    assert (helped.meta.guard.autograd, plain.meta.guard.autograd) == (False, True)
    assert helped.meta.licence == "mit"
    assert [source.path for source in helped.sources] == ["hub_kernel.py", "inner.py"]
    assert "unused" not in helped.entry_source and "nn.Module" not in helped.entry_source
    for solution in solutions.values():
        verdict = judge.verify(solution, RMS, captured(RMS))
        assert (verdict.status, verdict.reason) == (Status.PASSED, None)
    x, weight = torch.randn(1, 3, 24), torch.randn(24)
    namespace: dict[str, Any] = {"torch": torch}
    exec(families.get("rms_norm").source(SEMANTICS), namespace)  # type: ignore[attr-defined]
    torch.testing.assert_close(load(helped)(x, weight), namespace["run"](x, weight))
    reasons = {line.name: line.unavailable for line in hub.SUPPLIER.catalogue(MACHINE)}
    assert "family is not known" in str(reasons["helped:Rotary"])


def test_what_cannot_be_taken_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_odd = HELPED[: HELPED.index("class HelpedRMSNormLayout")] + HELPED[HELPED.index("class OddRMSNorm") :]
    monkeypatch.setenv(hub.NAMED, str(written(tmp_path / "odd", only_odd, inner="")))
    assert "`self.secret` is not known" in refused()
    broken = written(tmp_path / "broken", "class (")
    compiled = tmp_path / "compiled"
    (compiled / "build" / "torch213-cxx11-cpu-x86_64-linux").mkdir(parents=True)
    monkeypatch.setenv(hub.NAMED, f"{broken}:{compiled}:{tmp_path / 'nowhere'}")
    reasons = " | ".join(str(line.unavailable) for line in hub.SUPPLIER.catalogue(MACHINE))
    for said in ("cannot be read", "no build of Python only", "there is no folder"):
        assert said in reasons


def test_two_folders_of_one_name_are_two_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (EXAMPLES / "my-rms-norm" / "build" / "torch-universal" / "layers.py").read_text()
    roots = [written(tmp_path / side / "norm", layers) for side in "ab"]
    monkeypatch.setenv(hub.NAMED, ":".join(map(str, roots)))
    assert len({solution.name for solution in offered()}) == 2


def test_listing_runs_nothing_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = "raise RuntimeError('imported')\n" + HELPED.strip()
    monkeypatch.setenv(hub.NAMED, str(written(tmp_path / "trap", layers, inner="raise RuntimeError\n")))
    assert len(hub.SUPPLIER.catalogue(MACHINE)) == 5
    assert offered()


def test_inventory_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hub.NAMED, str(EXAMPLES / "my-rms-norm"))
    command = [sys.executable, "-m", "kernelgraft", "inventory", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=machine.child_environment())
    lines = [line for line in json.loads(done.stdout)["catalogue"] if line["supplier"] == "hub"]
    assert [(line["name"], line["unavailable"]) for line in lines] == [("my-rms-norm:CustomRMSNorm", None)]
