"""The supplier of our own kernels: what it offers, on which machines, and that it computes the Definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from test_suppliers import ALL, MACHINE, check, fresh_inputs, sizes_of

from kernelgraft import machine
from kernelgraft.evaluate.static import inspect_sources
from kernelgraft.records import Definition, Solution
from kernelgraft.suppliers import select
from kernelgraft.suppliers.base import Refusal
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.load import load
from kernelgraft.suppliers.ours import CATALOGUE, OwnSupplier

TILE = MACHINE.model_copy(update={"versions": {"cuda-tile": "1.7.0", "torch": "2.11.0"}})
H200 = TILE.model_copy(update={"gpu": "a gpu", "compute_capability": "sm_90"})
SERVED = {name: d for name, d in ALL.items() if d.op_type != "attention"}
INTERPRETED = OwnSupplier(interpret=True)


def solution(definition: Definition, supplier: OwnSupplier = INTERPRETED, card: Any = TILE) -> Solution:
    found = supplier.candidates(definition, card)
    assert not isinstance(found, Refusal), found
    (only,) = found
    return only


@pytest.mark.parametrize("name", list(SERVED)[::9])
def test_solutions_compute_their_definition(name: str) -> None:
    definition = SERVED[name]
    ours = solution(definition)
    findings = inspect_sources(ours, definition)
    assert not findings.denied and not findings.warnings, findings
    for seed, sizes in enumerate(sizes_of(definition)):
        inputs = fresh_inputs(definition, seed, **sizes)
        assert refuses(ours.meta.guard, definition, inputs) is None
        check(definition, load(ours), inputs, f"{name} {sizes}")
        strided = [x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x for x in inputs]
        check(definition, load(ours), strided, f"{name} {sizes} strided")


@pytest.mark.parametrize("name", SERVED)
def test_every_variant_is_served_by_a_source_that_passes_the_gate(name: str) -> None:
    definition = SERVED[name]
    ours = solution(definition)
    assert ours.spec.language == "cuda-tile" and ours.meta.supplier == "kernelgraft"
    findings = inspect_sources(ours, definition)
    assert not findings.denied and not findings.warnings, findings
    assert ours.spec.target_hardware == ours.meta.guard.devices == ("cpu",)


@pytest.mark.parametrize("name", [n for n in SERVED if "bfloat16" not in n][::11])
def test_gradients_flow_where_the_guard_says_so(name: str) -> None:
    from kernelgraft.families.reference import as_tuple, reference_function

    definition = SERVED[name]
    ours = solution(definition)
    inputs = fresh_inputs(definition, 3, **sizes_of(definition)[-1])
    tables = ("cos", "sin", "freqs")
    wanted = [x.requires_grad_() for n, x in zip(definition.inputs, inputs, strict=True) if n not in tables]
    if not ours.meta.guard.autograd:
        assert "gradient" in str(refuses(ours.meta.guard, definition, inputs))
        return

    def gradients(function: Any) -> Any:
        outputs = as_tuple(function(*inputs))
        weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(4)) for o in outputs]
        return torch.autograd.grad(sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)), wanted)

    for found, expected in zip(gradients(load(ours)), gradients(reference_function(definition)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_where_they_run() -> None:
    plain = OwnSupplier(interpret=False)
    assert "not installed" in str(plain.unavailable(MACHINE.model_copy(update={"versions": {}})))
    assert "no CUDA device" in str(plain.unavailable(TILE))
    assert "sm_75" in str(plain.unavailable(H200.model_copy(update={"compute_capability": "sm_75"})))
    assert plain.unavailable(H200) is None
    assert plain.unavailable(H200.model_copy(update={"compute_capability": "sm_120"})) is None
    assert INTERPRETED.unavailable(TILE) is None
    definition = next(iter(SERVED.values()))
    assert isinstance(plain.candidates(definition, TILE), Refusal)
    on_gpu = solution(definition, plain, H200)
    assert on_gpu.meta.guard.devices == ("cuda",)
    assert "cpu" in str(refuses(on_gpu.meta.guard, definition, fresh_inputs(definition, batch_size=1, seq_len=2)))


def test_the_environment_asks_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    (supplier,) = select(["kernelgraft"])
    monkeypatch.delenv("KERNELGRAFT_INTERPRET", raising=False)
    assert "KERNELGRAFT_INTERPRET=1" in str(supplier.unavailable(TILE))
    assert {row.hardware for row in supplier.catalogue(TILE)} == {("cuda",)}
    monkeypatch.setenv("KERNELGRAFT_INTERPRET", "1")
    assert supplier.unavailable(TILE) is None
    assert {row.hardware for row in supplier.catalogue(TILE)} == {("cpu",)}
    assert {row.name for row in supplier.catalogue(TILE)} == {f"kernelgraft_{kernel}" for kernel in CATALOGUE}


def test_refusals_say_why() -> None:
    definition = SERVED[next(n for n in SERVED if n.startswith("rope"))]
    q = definition.inputs["q"]
    eight = {**definition.inputs, "q": q.model_copy(update={"dtype": "float8_e4m3fn"})}
    refused = INTERPRETED.candidates(definition.model_copy(update={"inputs": eight}), TILE)
    assert isinstance(refused, Refusal) and "float8_e4m3fn" in refused.reason
    five = {**definition.inputs, "q": q.model_copy(update={"shape": (*(q.shape or ()), "one")})}
    refused = INTERPRETED.candidates(definition.model_copy(update={"inputs": five}), TILE)
    assert isinstance(refused, Refusal) and "batch, heads and length" in refused.reason
    norm = SERVED[next(n for n in SERVED if n.startswith("rms_norm") and "bfloat16-torch.bfloat16" in n)]
    other = {"output": norm.outputs["output"].model_copy(update={"dtype": "float32"})}
    refused = INTERPRETED.candidates(norm.model_copy(update={"outputs": other}), TILE)
    assert isinstance(refused, Refusal) and "its result is bfloat16, the definition's float32" in refused.reason
    foreign = norm.model_copy(update={"meta": norm.meta.model_copy(update={"family": "rwkv"})})
    refused = INTERPRETED.candidates(foreign, TILE)
    assert isinstance(refused, Refusal) and "`rwkv`" in refused.reason


def test_names_are_told_apart() -> None:
    names = [solution(d.model_copy(update={"name": f"d{n}"})).name for n, d in enumerate(list(SERVED.values())[:20])]
    assert len(set(names)) == 20
    assert machine.version("cuda-tile") is not None
