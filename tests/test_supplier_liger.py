"""The supplier of Liger-Kernel's operations: what it offers, and that it refuses what they compute wrongly."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

import peer_definitions as p
import pytest
import torch
from peer_definitions import BF16, F16, F32

from kernelgraft import machine
from kernelgraft.evaluate.static import inspect_sources
from kernelgraft.records import Definition, MachineCard, Solution
from kernelgraft.suppliers import select
from kernelgraft.suppliers.base import Refusal
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.liger import LigerSupplier
from kernelgraft.suppliers.load import load

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "liger-kernel": "0.8.5"}
CPU = MachineCard(platform="Linux", cpu="a cpu", cores=2, python="3.11.0", versions=VERSIONS)
GPU = CPU.model_copy(update={"gpu": "a gpu", "compute_capability": "sm_90"})
AFTER = {"cast": "after_weight", "offset": 1, "offset_dtype": "float32"}
LIGER = LigerSupplier()

SERVED: dict[str, tuple[Definition, str]] = {
    "rms norm": (p.rms_norm(96, BF16), "rms_norm"),
    "rms norm, one plus weight": (p.rms_norm(64, BF16, **AFTER), "rms_norm"),
    "rms norm, float32 weight": (p.rms_norm(64, BF16, cast="after_weight", weight=F32), "rms_norm"),
    "rms norm without a weight": (p.rms_norm(1000, F32, cast="after_weight", with_weight=False), "rms_norm"),
    "layer norm": (p.layer_norm(96, BF16), "layer_norm"),
    "sum and norm": (p.residual_norm(96, BF16), "add_rms_norm"),
    "sum and norm, one plus weight": (p.residual_norm(64, F16, **AFTER), "add_rms_norm"),
    "rope": (p.rope(64, BF16), "rope"),
    "rope, float32 tables": (p.rope(64, BF16, tables=F32, compute="float32"), "rope"),
    "rope, length first, head of 80": (p.rope(80, F32, leading=(0, 1)), "rope"),
    "rope of a part, half tables": (p.rope(80, F16, rotary=32, table="half"), "rope"),
    "rope, complex table, three axes": (p.rope(32, F32, rank=3, leading=(0,), table="complex"), "rope"),
    "silu": (p.gated("silu", 200, BF16), "swiglu"),
    "silu, packed": (p.gated("silu", 200, F32, packed="gate_first"), "swiglu_packed"),
    "gelu": (p.gated("gelu_tanh", 256, F32), "geglu"),
}


def offered(definition: Definition, card: MachineCard = GPU) -> Solution:
    found = LIGER.candidates(definition, card)
    assert not isinstance(found, Refusal), found
    (only,) = found
    return only


def operation(definition: Definition) -> str:
    return offered(definition).name.removeprefix("liger_").removesuffix(f"_{definition.name}")


def refusal(definition: Definition) -> str:
    found = LIGER.candidates(definition, GPU)
    assert isinstance(found, Refusal), [s.name for s in found]
    return found.reason


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(name: str) -> None:
    definition, expected = SERVED[name]
    assert operation(definition) == expected
    solution = offered(definition)
    assert solution.spec.language == "triton" and solution.meta.supplier == "liger"
    assert solution.spec.target_hardware == solution.meta.guard.devices == ("cuda",)
    assert solution.meta.match == "adapter" and solution.meta.uses_compiler and solution.meta.guard.autograd
    assert set(solution.spec.dependencies) == {"torch", "triton", "liger-kernel"}
    findings = inspect_sources(solution, definition)
    assert not findings.denied and not findings.warnings, findings
    compile(solution.entry_source, solution.spec.entry_point, "exec")
    inputs = p.captured(definition, p.sizes_of(definition))[0].inputs
    assert "is on cpu" in str(refuses(solution.meta.guard, definition, inputs))


def test_every_operation_is_offered_for_something() -> None:
    assert {operation(d) for d, _ in SERVED.values()} == set(LigerSupplier.operations)


def test_catalogue() -> None:
    (supplier,) = select(["liger"])
    rows = supplier.catalogue(GPU)
    assert [row.name for row in rows] == [f"liger_{name}" for name in LigerSupplier.operations]
    assert {(row.language, row.hardware, row.unavailable) for row in rows} == {("triton", ("cuda",), None)}
    assert {row.unavailable for row in supplier.catalogue(CPU)} == {"no CUDA device"}


def test_where_it_can_be_used() -> None:
    def card(**versions: str) -> MachineCard:
        return GPU.model_copy(update={"versions": {n.replace("_", "-"): v for n, v in versions.items()}})

    assert "pip install liger-kernel==0.8.5" in str(LIGER.unavailable(card(triton="3.6.0")))
    assert "0.8.4 is installed" in str(LIGER.unavailable(card(triton="3.6.0", liger_kernel="0.8.4")))
    assert "triton is not installed" in str(LIGER.unavailable(card(liger_kernel="0.8.5")))
    assert "no CUDA device" in str(LIGER.unavailable(CPU))
    assert LIGER.unavailable(GPU) is None
    definition, _ = SERVED["rms norm"]
    assert isinstance(LIGER.candidates(definition, CPU), Refusal)
    newer = offered(definition, card(triton="3.6.0", liger_kernel="0.9.0"))
    assert "written for liger-kernel 0.8.5, this is 0.9.0" in str(newer.description)


def test_the_environment_cannot_choose_other_implementations() -> None:
    """`liger_kernel.ops` holds what LIGER_KERNEL_IMPL says, the modules below it the Triton operations."""
    for definition, _ in SERVED.values():
        imported = re.findall(r"from (liger_kernel[\w.]*) import", offered(definition).entry_source)
        assert imported and all(name.count(".") == 2 for name in imported)


# --- what it gets wrong or ignores ---


def last_arguments(definition: Definition) -> list[str]:
    """eps, offset, casting mode and in_place, as they are passed to a norm."""
    source = offered(definition).entry_source
    return source[: source.rindex(")")].rsplit("(", 1)[-1].split(", ")[-4:]


def test_norms_never_write_their_gradient_into_the_incoming_one() -> None:
    for name in ("rms norm", "rms norm, one plus weight", "rms norm without a weight"):
        assert last_arguments(SERVED[name][0])[-1] == "False"
    for name in ("sum and norm", "sum and norm, one plus weight"):
        assert ", False)\n" in offered(SERVED[name][0]).entry_source


def test_norms_round_where_the_original_does_and_never_sum_in_a_half_type() -> None:
    for definition, expected in (
        (p.rms_norm(64, BF16), ["1e-05", "0.0", "0"]),
        (p.rms_norm(64, BF16, cast="weight_dtype"), ["1e-05", "0.0", "0"]),
        (p.rms_norm(64, BF16, cast="after_weight"), ["1e-05", "0.0", "1"]),
        (p.rms_norm(64, BF16, cast="none"), ["1e-05", "0.0", "1"]),
        (p.rms_norm(64, BF16, cast="factor"), ["1e-05", "0.0", "1"]),
        (p.rms_norm(64, BF16, eps=0.0, **AFTER), ["0.0", "1.0", "1"]),
    ):
        assert last_arguments(definition)[:3] == expected, definition.meta.semantics


def test_norms_give_the_dtype_of_their_input() -> None:
    assert "its output is bfloat16, the definition's float32" in refusal(p.rms_norm(64, BF16, weight=F32))
    assert "rounds the sum to bfloat16" in refusal(p.residual_norm(64, BF16, residual=F32))


def test_norms_of_rows_wider_than_a_block() -> None:
    for make in (p.rms_norm, p.layer_norm, p.residual_norm):
        assert offered(make(65536, BF16)) and "up to 65536" in refusal(make(65537, BF16))
    assert "up to 65536" in refusal(p.gated("silu", 65537, BF16))


def test_layer_norm_needs_both_vectors_and_has_no_offset() -> None:
    for missing in ("with_weight", "with_bias"):
        assert "needs a weight and a bias" in refusal(p.layer_norm(64, F32, **{missing: False}))
    shifted = p.layer_norm(64, F32, form="functional_plain", offset=1, offset_dtype="weight")
    assert "not by one plus it" in refusal(shifted)


def test_residual_norms_are_rms_norms_before_which_is_added() -> None:
    assert "before the norm only" in refusal(p.residual_norm(64, BF16, order="post"))
    assert "RMS norm only" in refusal(p.residual_norm(64, BF16, family="layer_norm"))
    assert "needs a weight" in refusal(p.residual_norm(64, BF16, cast="after_weight", with_weight=False))


def test_rope_turns_a_copy_and_its_gradient_another() -> None:
    for name in (n for n in SERVED if n.startswith("rope")):
        source = offered(SERVED[name][0]).entry_source
        assert source.count(".clone(memory_format=torch.contiguous_format)") == 2
        assert "return (*turn(dq, dk, cos, -sin), None, None)" in source and "rope_backward" not in source


def test_rope_says_how_many_channels_turn() -> None:
    assert "rotary_dim=32" in offered(p.rope(80, F16, rotary=32, table="half")).entry_source
    assert "rotary_dim=64" in offered(p.rope(64, F16, table="half")).entry_source


def test_rope_variants_that_it_would_turn_wrongly() -> None:
    assert "not one alone" in refusal(p.rope(64, BF16, with_k=False))
    assert "not interleaved" in refusal(p.rope(64, BF16, pairs=("interleaved", "interleaved")))
    assert "forwards only" in refusal(p.rope(64, BF16, direction="backward"))
    assert "not the last" in refusal(p.rope(64, BF16, rotary=32, placement="last"))
    assert "which these do not repeat" in refusal(p.rope(64, BF16, layout="free"))
    assert "the dtype of the tables, and q is float32" in refusal(p.rope(64, F32, tables=BF16))
    assert "the original's in float32" in refusal(p.rope(64, BF16, compute="float32"))
    assert "the definition's float32" in refusal(p.rope(64, BF16, tables=F32, cast=False))


def test_gated_products_take_their_order_and_activation_only() -> None:
    for packed in ("up_first", "interleaved_gate_first", "interleaved_up_first"):
        assert f"this is {packed}" in refusal(p.gated("silu", 64, BF16, packed=packed))
    assert "this is gate_first and gelu_tanh" in refusal(p.gated("gelu_tanh", 64, F32, packed="gate_first"))
    assert "of the GELUs it has the tanh approximation" in refusal(p.gated("gelu", 64, BF16))
    assert "no activation `relu`" in refusal(p.gated("relu", 64, BF16))
    assert "no limit" in refusal(p.gated("silu", 64, BF16, clamp="after", limit=7.0))
    assert "which the original does not" in refusal(p.gated("silu", 64, BF16, upcast=True))
    assert operation(p.gated("silu", 64, F32, upcast=True)) == "swiglu"


def test_gated_products_have_a_gradient_that_overwrites_nothing() -> None:
    for name, function in (("silu", "swiglu"), ("gelu", "geglu")):
        source = offered(SERVED[name][0]).entry_source
        assert f"return {function}_backward(gate.clone(), up.clone(), gradient.contiguous())" in source
    packed = offered(SERVED["silu, packed"][0]).entry_source
    assert "gate_up.flatten(0, -2), False)" in packed  # two axes, and not in place


def test_it_has_no_attention() -> None:
    assert "the family `attention`" in refusal(p.attention(64, BF16))


# --- with the package, on a GPU ---


@pytest.fixture(scope="module")
def liger() -> None:
    """Its operations are Triton's."""
    pytest.importorskip("triton", reason="Liger-Kernel is written in Triton, which is not installed")
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed: pip install liger-kernel==0.8.5")


def test_operations_are_where_they_are_looked_for(liger: None) -> None:
    for definition, _ in SERVED.values():
        for module, names in re.findall(r"from (liger_kernel\S*) import (.*)", offered(definition).entry_source):
            loaded = importlib.import_module(module)
            assert all(hasattr(loaded, name) for name in names.split(", ")), module


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_it_is_right_on_a_gpu(name: str, liger: None) -> None:
    """In this process, which is quicker than the judge's children."""
    definition, _ = SERVED[name]
    solution = offered(definition, machine.read())
    for size in p.sizes_of(definition):
        for inputs in p.laid_out(definition, size, "cuda"):
            assert refuses(solution.meta.guard, definition, inputs) is None
            wrong = p.check(definition, load(solution), inputs)
            assert wrong is None, f"{solution.name} {size}: {wrong}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rope", "silu", "gelu", "silu, packed", "rms norm"])
def test_gradients_leave_what_they_were_given(name: str, liger: None) -> None:
    definition, _ = SERVED[name]
    inputs: list[Any] = [x.cuda() for x in p.captured(definition, p.sizes_of(definition))[0].inputs]
    wanted = [x.requires_grad_() for x in inputs[:2]]
    before = [x.detach().clone() for x in inputs]
    found = load(offered(definition, machine.read()))(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    given = [torch.ones_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, wanted, given, retain_graph=True)
    again = torch.autograd.grad(outputs, wanted, given)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "a second backward pass differs"
    assert all(bool((g == 1).all()) for g in given), "the incoming gradient was changed"
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "an input was changed"
