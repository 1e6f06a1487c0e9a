"""The supplier of TileGym's operations: what it offers, and that it refuses what they compute wrongly or ignore."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import peer_definitions as p
import pytest
import torch
from peer_definitions import BF16, F16, F32

from kernelgraft import machine
from kernelgraft.evaluate.cases import JudgeOptions
from kernelgraft.evaluate.judge import Judge
from kernelgraft.evaluate.static import inspect_sources
from kernelgraft.families.reference import run_oracle
from kernelgraft.records import Definition, MachineCard, Solution
from kernelgraft.suppliers import select
from kernelgraft.suppliers.base import Refusal
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.load import load
from kernelgraft.suppliers.tilegym import TileGymSupplier
from kernelgraft.suppliers.tilegym.sources import WHERE

VERSIONS = {"torch": "2.11.0", "cuda-tile": "1.7.0", "tilegym": "1.5.1"}
CPU = MachineCard(platform="Linux", cpu="a cpu", cores=2, python="3.11.0", versions=VERSIONS)
GPU = CPU.model_copy(update={"gpu": "a gpu", "compute_capability": "sm_90"})
AFTER = {"cast": "after_weight", "offset": 1, "offset_dtype": "float32"}
INTERPRETED = TileGymSupplier(interpret=True)
ON_GPU = TileGymSupplier(interpret=False)

SERVED: dict[str, tuple[Definition, str]] = {
    "rms norm": (p.rms_norm(96, BF16), "rms_norm"),
    "rms norm, one plus weight": (p.rms_norm(64, BF16, **AFTER), "rms_norm"),
    "layer norm": (p.layer_norm(96, F32), "layer_norm layer_norm_shaped"),
    "layer norm, one plus weight": (
        p.layer_norm(64, F16, form="functional_plain", offset=1, offset_dtype="weight"),
        "layer_norm layer_norm_shaped",
    ),
    "sum and norm": (p.residual_norm(96, BF16), "add_rms_norm"),
    "sum and norm, one plus weight": (p.residual_norm(64, F16, **AFTER), "add_rms_norm"),
    "rope": (p.rope(64, BF16, tables=F32), "rope"),
    "rope, length first": (p.rope(32, F32, leading=(0, 1)), "rope"),
    "rope of a part": (p.rope(80, F16, rotary=32), "rope"),
    "rope, half 48": (p.rope(96, F32), "rope_padded"),
    "rope, half 40, length first": (p.rope(80, BF16, leading=(0, 1)), "rope_padded"),
    "rope, complex table, three axes": (p.rope(32, F32, rank=3, leading=(0,), table="complex"), "rope"),
    "silu": (p.gated("silu", 200, BF16), "swiglu"),
    "silu, packed": (p.gated("silu", 200, BF16, packed="gate_first", upcast=True), "silu_and_mul"),
    "gelu": (p.gated("gelu_tanh", 256, BF16), "geglu"),
    "gelu, packed": (p.gated("gelu_new", 256, F32, packed="up_first"), "geglu_packed"),
    "attention": (p.attention(32, BF16), "fmha fmha_decode"),
    "attention of all keys": (p.attention(32, F16, causal=False), "fmha fmha_decode"),
    "attention, head of 40": (p.attention(40, BF16, value_dim=24), "fmha"),
    "attention, capped": (p.attention(32, BF16, softcap=30.0), "softcap_attention"),
    "attention, sinks": (p.attention(32, BF16, sinks=True), "sink_attention"),
}


def offered(definition: Definition, supplier: TileGymSupplier = INTERPRETED, card: MachineCard = CPU) -> list[Solution]:
    found = supplier.candidates(definition, card)
    assert not isinstance(found, Refusal), found
    return found


def refusal(definition: Definition) -> str:
    found = INTERPRETED.candidates(definition, CPU)
    assert isinstance(found, Refusal), [s.name for s in found]
    return found.reason


def operations(definition: Definition) -> list[str]:
    ending = f"_{definition.name}"
    return [s.name.removeprefix("tilegym_").removesuffix(ending) for s in offered(definition)]


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(name: str) -> None:
    definition, expected = SERVED[name]
    assert operations(definition) == expected.split()
    for solution in offered(definition):
        assert solution.spec.language == "cuda-tile" and solution.meta.supplier == "tilegym"
        assert solution.meta.match == "adapter" and solution.meta.uses_compiler
        assert set(solution.spec.dependencies) >= {"torch", "tilegym", "cuda-tile"}
        findings = inspect_sources(solution, definition)
        assert not findings.denied and not findings.warnings, findings
        compile(solution.entry_source, solution.spec.entry_point, "exec")


def test_every_operation_is_offered_for_something() -> None:
    found = {name for definition, _ in SERVED.values() for name in operations(definition)}
    assert found == set(TileGymSupplier.operations) == set(WHERE)


def test_catalogue() -> None:
    (supplier,) = select(["tilegym"])
    rows = supplier.catalogue(GPU)
    assert [row.name for row in rows] == [f"tilegym_{name}" for name in TileGymSupplier.operations]
    assert {row.family for row in rows} == {
        *("rms_norm", "layer_norm", "residual_norm", "rope", "gated_mlp", "attention"),
    }
    assert {(row.language, row.hardware, row.unavailable) for row in rows} == {("cuda-tile", ("cuda",), None)}
    for row in rows:
        shaped = TileGymSupplier.operations[row.name.removeprefix("tilegym_")].static_shapes
        assert ("only the shapes that were measured" in row.guard) is shaped
        assert not shaped or "compiled in" in row.guard or "32 bits" in row.guard


# --- where it can be used ---


def test_where_it_can_be_used() -> None:
    def without(**changes: Any) -> MachineCard:
        versions = {n.replace("_", "-"): v for n, v in ({"cuda_tile": "1.7.0", "tilegym": "1.5.1"} | changes).items()}
        return GPU.model_copy(update={"versions": {n: v for n, v in versions.items() if v is not None}})

    assert "pip install --no-deps tilegym==1.5.1" in str(ON_GPU.unavailable(without(tilegym=None)))
    assert "1.4.0 is installed" in str(ON_GPU.unavailable(without(tilegym="1.4.0")))
    assert "cuda-tile is not installed" in str(ON_GPU.unavailable(without(cuda_tile=None)))
    assert "no CUDA device" in str(ON_GPU.unavailable(CPU))
    assert "sm_75" in str(ON_GPU.unavailable(GPU.model_copy(update={"compute_capability": "sm_75"})))
    assert ON_GPU.unavailable(GPU) is None and ON_GPU.unavailable(without(tilegym="1.6.0")) is None
    assert INTERPRETED.unavailable(CPU) is None
    definition, _ = SERVED["rms norm"]
    assert isinstance(ON_GPU.candidates(definition, CPU), Refusal)
    (newer,) = offered(definition, ON_GPU, without(tilegym="1.6.0"))
    assert "written for tilegym 1.5.1, this is 1.6.0" in str(newer.description)
    (solution,) = offered(definition, ON_GPU, GPU)
    assert solution.meta.guard.devices == solution.spec.target_hardware == ("cuda",)
    assert "written for" not in str(solution.description)


def test_listing_imports_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: Any) -> None:
        assert not name.startswith("tilegym"), name

    class Finder:
        find_spec = staticmethod(refuse)

    monkeypatch.setattr("sys.meta_path", [Finder(), *__import__("sys").meta_path])
    for definition, _ in SERVED.values():
        assert offered(definition)


# --- what it gets wrong or ignores ---


def test_rms_norm_needs_a_weight_and_gives_the_dtype_of_its_input() -> None:
    assert "needs a weight" in refusal(p.rms_norm(64, BF16, cast="after_weight", with_weight=False))
    reason = refusal(p.rms_norm(64, BF16, weight=F32))  # rounded, then times a float32 weight: float32
    assert "its output is bfloat16, the definition's float32" in reason
    assert "up to 65536" in refusal(p.rms_norm(65537, BF16))


def test_rms_norm_has_no_gradient_with_an_offset() -> None:
    plain, offset = (offered(SERVED[n][0], ON_GPU, GPU)[0] for n in ("rms norm", "rms norm, one plus weight"))
    assert plain.meta.guard.autograd and not offset.meta.guard.autograd


def test_layer_norms_need_both_vectors_and_rows_below_64_kb() -> None:
    for missing in ("with_weight", "with_bias"):
        assert "needs a weight and a bias" in refusal(p.layer_norm(64, F32, **{missing: False}))
    assert operations(p.layer_norm(16383, F32)) == ["layer_norm", "layer_norm_shaped"]
    assert operations(p.layer_norm(16384, F32)) == ["layer_norm_shaped"]
    assert operations(p.layer_norm(32767, BF16))[0] == "layer_norm"
    assert not any(s.meta.guard.autograd for s in offered(p.layer_norm(64, F32), ON_GPU, GPU))


def test_the_layer_norm_that_loses_transposed_inputs_gets_contiguous_ones() -> None:
    solution, other = offered(p.layer_norm(64, F32))
    assert "hidden_states.contiguous()" in solution.entry_source and not solution.meta.guard.static_shapes
    assert other.meta.guard.static_shapes


def test_the_layer_norm_that_stores_bfloat16_is_never_called() -> None:
    assert not any("persistent" in name for _, name in WHERE.values())


def test_residual_norms_are_rms_norms_before_which_is_added() -> None:
    assert "before the norm only" in refusal(p.residual_norm(64, BF16, order="post"))
    assert "RMS norm only" in refusal(p.residual_norm(64, BF16, family="layer_norm"))
    assert "rounds the sum to bfloat16" in refusal(p.residual_norm(64, BF16, residual=F32))
    assert "needs a weight" in refusal(p.residual_norm(64, BF16, cast="after_weight", with_weight=False))


def test_residual_norm_rounds_where_the_original_does() -> None:
    def mode(definition: Definition) -> str:
        return offered(definition)[0].entry_source.split("weight, ")[-1].split(")")[0]

    assert mode(p.residual_norm(64, BF16)) == "1e-05, 0.0, 0"
    assert mode(p.residual_norm(64, BF16, **AFTER)) == "1e-05, 1.0, 1"


def test_rope_turns_a_copy() -> None:
    for name in ("rope", "rope, half 48"):
        (solution,) = offered(SERVED[name][0])
        assert solution.entry_source.count(".clone(memory_format=torch.contiguous_format)") == 2


def test_rope_whose_half_is_no_power_of_two_goes_to_the_padded_operation() -> None:
    for size in (64, 128, 256):
        assert operations(p.rope(size, BF16)) == ["rope"]
    for size in (80, 92, 96):
        assert operations(p.rope(size, BF16)) == ["rope_padded"]
    assert "a part of twice a power of two, not 96" in refusal(p.rope(128, BF16, rotary=96))


def test_rope_variants_that_it_would_turn_wrongly() -> None:
    assert "not one alone" in refusal(p.rope(64, BF16, with_k=False))
    assert "not interleaved" in refusal(p.rope(64, BF16, pairs=("interleaved", "interleaved")))
    assert "not interleaved" in refusal(p.rope(64, BF16, pairs=("interleaved", "half")))
    assert "forwards only" in refusal(p.rope(64, BF16, direction="backward"))
    assert "not the last" in refusal(p.rope(64, BF16, rotary=32, placement="last"))
    assert "which these do not repeat" in refusal(p.rope(64, BF16, layout="free"))
    assert "which these do not repeat" in refusal(p.rope(64, BF16, layout="repeated"))
    assert "tables as wide as that part" in refusal(p.rope(64, BF16, rotary=32, table="half"))
    assert "the definition's float32" in refusal(p.rope(64, BF16, tables=F32, cast=False))


def test_rope_products_are_not_less_exact_than_the_originals() -> None:
    assert "the original's in float32" in refusal(p.rope(64, BF16, compute="float32"))
    assert operations(p.rope(64, BF16, tables=F32, compute="float32")) == ["rope"]
    assert operations(p.rope(96, BF16, compute="float32")) == ["rope_padded"]  # takes them in float32
    assert "does not multiply float16 by bfloat16" in refusal(p.rope(64, F16, tables=BF16))


def test_rope_part_whose_share_does_not_give_it_back() -> None:
    """TileGym takes the part as `int(size * share)`, which rounding can make one less."""
    sizes = [(s, r) for s in range(34, 300, 2) for r in (32, 64, 128) if r < s and int(s * (r / s)) != r]
    assert all("as wide as that part" in refusal(p.rope(s, BF16, rotary=r)) for s, r in sizes)
    assert operations(p.rope(100, BF16, rotary=32)) == ["rope"]


def test_gated_products_take_their_order_and_activation_only() -> None:
    for packed in ("up_first", "interleaved_gate_first", "interleaved_up_first"):
        assert f"this is {packed}" in refusal(p.gated("silu", 64, BF16, packed=packed))
    assert "this is gate_first" in refusal(p.gated("gelu_tanh", 64, F32, packed="gate_first"))
    for activation in ("gelu", "gelu_python"):
        assert "its exact GELU is the tanh approximation" in refusal(p.gated(activation, 64, BF16))
        assert "its exact GELU is the tanh approximation" in refusal(p.gated(activation, 64, BF16, packed="up_first"))
    assert "no activation `relu2`" in refusal(p.gated("relu2", 64, BF16))
    assert "no limit" in refusal(p.gated("silu", 64, BF16, clamp="before", limit=7.0))
    assert "cancels" in refusal(p.gated("gelu_tanh", 64, BF16, packed="up_first"))
    assert "up to 65536" in refusal(p.gated("silu", 65537, BF16))


def test_gated_products_that_round_in_between() -> None:
    assert "which the original does not" in refusal(p.gated("silu", 64, BF16, upcast=True))
    assert operations(p.gated("silu", 64, F32, upcast=True)) == ["swiglu"]
    assert operations(p.gated("silu_python", 64, BF16)) == ["swiglu"]


def test_gradients_of_gated_products() -> None:
    def autograd(definition: Definition) -> bool:
        (solution,) = offered(definition, ON_GPU, GPU)
        return solution.meta.guard.autograd

    assert autograd(p.gated("silu", 1024, BF16)) and not autograd(p.gated("silu", 1023, BF16))  # divides by zero
    assert autograd(p.gated("silu", 64, BF16, packed="gate_first"))
    assert not autograd(p.gated("gelu_tanh", 1024, BF16))  # its backward overwrites gate and up
    assert not autograd(p.gated("gelu_tanh", 1024, F32, packed="up_first"))
    assert "PassOn.apply(result)" in offered(p.gated("silu", 1024, BF16))[0].entry_source


def test_attention_ignores_masks_so_that_they_are_refused() -> None:
    for changes in ({}, {"mask": "float"}, {"sliding_window": 8}, {"sinks": True}, {"softcap": 30.0}):
        assert "ignores masks" in refusal(p.attention(64, BF16, masked=True, **changes))


def test_attention_of_float32_uses_no_tensor_cores() -> None:
    assert "no tensor cores" in refusal(p.attention(64, F32))


def test_attention_heads() -> None:
    assert operations(p.attention(64, BF16)) == ["fmha", "fmha_decode"]
    for size in (80, 96, 192):
        assert operations(p.attention(size, BF16)) == ["fmha", "fmha_decode"]
    assert operations(p.attention(64, BF16, value_dim=128)) == ["fmha"]
    assert "16 to 256" in refusal(p.attention(512, BF16))
    assert "16 to 256" in refusal(p.attention(8, BF16))
    assert "of a power of two channels, not 96" in refusal(p.attention(96, BF16, sinks=True))
    assert "one size" in refusal(p.attention(64, BF16, value_dim=128, softcap=30.0))


def test_attention_options_that_do_not_go_together() -> None:
    assert "no cap on scores beside sinks" in refusal(p.attention(64, BF16, sinks=True, softcap=30.0))
    assert "causal" in refusal(p.attention(64, BF16, sinks=True, causal=False))


def test_attention_passes_no_window_and_no_decode_kernel_with_sinks() -> None:
    for definition, _ in SERVED.values():
        assert "window" not in "".join(s.entry_source for s in offered(definition))
    assert not any(name == "attention_sink_decode" for _, name in WHERE.values())


def test_attention_decode_serves_one_query_and_the_grid_is_not_outgrown() -> None:
    definition = p.attention(32, BF16, num_heads=32, num_kv_heads=8)
    prefill, decode = offered(definition)
    assert prefill.meta.guard.max_axes == {"batch_size": 2047}
    assert decode.meta.guard.max_axes == {"batch_size": 2047, "q_len": 1} and decode.meta.guard.static_shapes
    inputs = p.captured(definition, [{"batch_size": 1, "q_len": 2, "kv_len": 2}])[0].inputs
    assert refuses(prefill.meta.guard, definition, inputs) is None
    assert "q_len" in str(refuses(decode.meta.guard, definition, inputs))


def test_other_dtypes_and_families_are_refused() -> None:
    definition, _ = SERVED["rms norm"]
    eight = {n: s.model_copy(update={"dtype": "float8_e4m3fn"}) for n, s in definition.inputs.items()}
    assert "float8_e4m3fn" in refusal(definition.model_copy(update={"inputs": eight}))
    meta = definition.meta.model_copy(update={"family": "moe"})
    assert "the family `moe`" in refusal(definition.model_copy(update={"meta": meta}))


def test_nothing_interprets_a_backward_pass_of_its_own() -> None:
    for name, (definition, _) in SERVED.items():
        for solution in offered(definition):
            assert solution.meta.guard.autograd is (definition.op_type == "rope"), name


# --- with the package: under the interpreter, and on a GPU ---


@pytest.fixture(scope="module")
def tilegym() -> Any:
    """The installed package; its import warns of what else it could use."""
    pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")
    if importlib.util.find_spec("tilegym") is None:
        pytest.skip("tilegym is not installed: pip install --no-deps tilegym==1.5.1")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("tilegym")


def test_operations_are_where_they_are_looked_for(tilegym: Any) -> None:
    for module, name in WHERE.values():
        assert callable(getattr(importlib.import_module(module), name)), f"{module}.{name}"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Few and small cases, of every distribution and layout: each call is interpreted."""
    layouts = ("strided", "offset", "transposed", "expanded")
    options = JudgeOptions(seeds=1, captured=2, seeded_shapes=1, points=1, held_out=0, layouts=layouts)
    with Judge(options) as made:
        yield made


@pytest.mark.parametrize("name", SERVED)
def test_the_judge_accepts_what_is_offered(name: str, tilegym: Any, judge: Judge) -> None:
    definition, _ = SERVED[name]
    sizes = [{"batch_size": 2, "seq_len": 3, "table_batch": 2, "q_len": 5, "kv_len": 5}]
    sizes += [{"batch_size": 1, "seq_len": 1, "table_batch": 1, "q_len": 1, "kv_len": 131}]
    for solution in offered(definition):
        verdict = judge.verify(solution, definition, p.captured(definition, sizes))
        assert verdict.reason is None, f"{solution.name}: {verdict.check} {verdict.reason}"
        assert verdict.cases > verdict.refused


def test_the_operation_that_is_passed_over_is_wrong(tilegym: Any) -> None:
    """What `rope` would give for a head of 80, which the supplier leaves to `rope_padded`."""
    definition = p.rope(80, F32)
    (right,) = offered(definition)
    source = right.entry_source.replace(WHERE["rope_padded"][0], WHERE["rope"][0])
    source = source.replace("import rope as operation", "import apply_rope_base as operation")
    assert source != right.entry_source
    wrong = right.model_copy(update={"sources": (right.sources[0].model_copy(update={"content": source}),)})
    inputs = p.captured(definition, [{"batch_size": 1, "seq_len": 3}])[0].inputs
    exact = run_oracle(definition, inputs)[0]
    errors = [float((load(s)(*inputs)[0] - exact).abs().max()) for s in (right, wrong)]
    assert errors[0] < 1e-5 < 0.1 < errors[1]


def test_outside_the_judge_it_runs_by_itself_and_leaves_the_environment(tilegym: Any) -> None:
    before = dict(os.environ)
    definition, _ = SERVED["rope"]
    (solution,) = offered(definition)
    inputs = [x.requires_grad_() for x in p.captured(definition, [{"batch_size": 1, "seq_len": 2}])[0].inputs[:2]]
    tables = p.captured(definition, [{"batch_size": 1, "seq_len": 2}])[0].inputs[2:]
    q, k = load(solution)(*inputs, *tables)
    given = torch.ones_like(q)
    found = torch.autograd.grad([q, k], inputs, [given, torch.ones_like(k)])
    assert bool((given == 1).all()), "the incoming gradient was changed"
    wide = [x.detach().double().requires_grad_() for x in inputs]
    from kernelgraft.families.reference import reference_function

    exact = torch.autograd.grad(sum(y.sum() for y in reference_function(definition)(*wide, *tables)), wide)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=2e-2)
    assert dict(os.environ) == before


def test_padding_that_cutile_leaves_undetermined_is_seen_by_the_interpreter(tilegym: Any) -> None:
    """Why the sources of attention say `zero_padding`: without it the interpreter calls that a fault."""
    from kernelgraft.errors import KernelFault

    definition, _ = SERVED["attention"]
    solution = offered(definition)[0]
    assert "zero_padding=True" in solution.entry_source
    source = solution.entry_source.replace(", zero_padding=True", "")
    strict = solution.model_copy(update={"sources": (solution.sources[0].model_copy(update={"content": source}),)})
    inputs = p.captured(definition, [{"batch_size": 1, "q_len": 3, "kv_len": 3}])[0].inputs
    with pytest.raises(KernelFault, match="padding of undetermined value"):
        load(strict)(*inputs)
    assert load(solution)(*inputs).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_it_is_right_on_a_gpu(name: str, tilegym: Any) -> None:
    """In this process, which is quicker than the judge's children."""
    definition, _ = SERVED[name]
    for solution in offered(definition, ON_GPU, machine.read()):
        served = 0
        for size in p.sizes_of(definition):
            for inputs in p.laid_out(definition, size, "cuda"):
                if refuses(solution.meta.guard, definition, inputs) is None:
                    served += 1
                    wrong = p.check(definition, load(solution), inputs)
                    assert wrong is None, f"{solution.name} {size}: {wrong}"
        assert served


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms norm", "rope, half 48", "silu, packed", "sum and norm"])
def test_gradients_on_a_gpu(name: str, tilegym: Any) -> None:
    from kernelgraft.families.reference import as_tuple, reference_function

    definition, _ = SERVED[name]
    (solution,) = offered(definition, ON_GPU, machine.read())
    assert solution.meta.guard.autograd
    inputs: list[Any] = list(p.captured(definition, p.sizes_of(definition), "cuda")[0].inputs)
    wide = [x.double() for x in inputs]

    def gradients(function: Any, given: list[Any]) -> tuple[torch.Tensor, ...]:
        wanted = [x.requires_grad_() for n, x in zip(definition.inputs, given, strict=True) if n not in ("cos", "sin")]
        outputs = as_tuple(function(*given))
        flows = [torch.cos(torch.arange(y.numel(), device="cuda")).view(y.shape).to(y.dtype) for y in outputs]
        kept = [x.clone() for x in flows]
        found = torch.autograd.grad(outputs, wanted, flows)
        assert all(torch.equal(a, b) for a, b in zip(flows, kept, strict=True)), "the incoming gradient was changed"
        return found

    exact = gradients(reference_function(definition), wide)
    for a, b in zip(gradients(load(solution), inputs), exact, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 0.02
