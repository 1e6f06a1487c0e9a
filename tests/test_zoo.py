"""The whole job on tiny random models of types that share no code: built, recognised, verified, patched, equal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kernelgraft import models

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "gpt2": {"layer_norm", "attention"},
    "gemma2": {"rms_norm", "rope", "gated_mlp", "attention", "residual_norm"},
    "olmo2": {"rms_norm", "rope", "gated_mlp", "attention", "residual_norm"},
    "phi3": {"rms_norm", "rope", "gated_mlp", "attention", "residual_norm"},
    "glm": {"rms_norm", "rope", "gated_mlp", "attention"},
    "gpt_oss": {"rms_norm", "rope", "attention", "residual_norm"},
    "qwen3_moe": {"rms_norm", "rope", "attention", "residual_norm"},
    "mamba": {"rms_norm"},
}


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo", ROOT / "scripts" / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXPECTED)
def test_a_type_gets_its_kernels(zoo: ModuleType, model_type: str) -> None:
    if model_type not in models.causal_types():
        pytest.skip(f"the installed transformers has no causal type `{model_type}`")
    row = zoo.one(model_type, ["torch"])
    assert row["status"] == "applied", row
    assert set(row["applied"]) >= EXPECTED[model_type], row
    assert row["logits_rel_rmse"] < 1e-5, row


def test_the_table_says_what_happened(zoo: ModuleType) -> None:
    rows = [
        {"type": "a", "status": "applied", "recognised": ["rope"], "verified": ["rope"], "applied": ["rope"],
         "tokens_equal": True},
        {"type": "b", "status": "none accepted", "recognised": ["rope"], "verified": [], "applied": []},
    ]  # fmt: skip
    table = zoo.table(rows)
    assert "| a |  |  | A |  |  |  | yes | applied |" in table
    assert "| b |  |  | r |  |  |  |  | none accepted |" in table


def test_a_crash_is_a_row(zoo: ModuleType) -> None:
    row = zoo.child("nonesuch", "torch", 120.0)
    assert row["status"] == "UsageError"
    assert "nonesuch" in row["detail"]
