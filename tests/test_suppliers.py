"""Suppliers: each Solution computes its Definition, what cannot be served is refused, the catalogue is complete."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernelgraft import families, machine, suppliers
from kernelgraft.errors import UsageError
from kernelgraft.evaluate.static import inspect_sources
from kernelgraft.evaluate.tolerance import compare
from kernelgraft.families import attention, gated_mlp
from kernelgraft.families.reference import as_tuple, define, run_oracle, run_reference
from kernelgraft.families.rope_variants import Variant
from kernelgraft.records import Definition, MachineCard, Site, Solution, SourceRef
from kernelgraft.suppliers import torch_sources
from kernelgraft.suppliers.base import Listing, Refusal, Supplier
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.load import load
from kernelgraft.suppliers.wording import in_words

MACHINE = MachineCard(platform="Linux", cpu="a cpu", cores=2, python="3.11.0", versions={"torch": "2.13.0"})
SOURCE = SourceRef(file="somewhere/modeling.py", first_line=1, last_line=2, sha256="a" * 64)
SITE = Site(kind="module", path="layers.*.x", instances=("layers.0.x",), class_name="m.X", source=SOURCE)
F32, BF16 = torch.float32, torch.bfloat16


def rms_semantics() -> Iterator[dict[str, Any]]:
    base = {"eps": 1e-5, "form": "explicit", "inverse": "rsqrt", "offset": 0, "offset_dtype": None, "with_weight": True}
    for cast in ("before_weight", "after_weight", "factor", "none"):
        yield {**base, "cast": cast}
    yield {**base, "cast": "none", "form": "functional", "inverse": "division"}
    yield {**base, "cast": "after_weight", "with_weight": False}
    for offset_dtype in ("float32", "weight"):
        yield {**base, "cast": "after_weight", "offset": 1, "offset_dtype": offset_dtype}


def layer_semantics() -> Iterator[dict[str, Any]]:
    base = {
        "eps": 1e-5,
        "form": "functional",
        "upcast": False,
        "cast": "none",
        "inverse": "rsqrt",
        "variance": "square",
    }
    plain = {**base, "offset": 0, "offset_dtype": None, "with_weight": True, "with_bias": True}
    yield plain
    yield {**plain, "with_bias": False}
    yield {**plain, "with_weight": False, "with_bias": False}
    yield {**plain, "form": "explicit", "upcast": True, "cast": "after_weight"}
    yield {**plain, "form": "functional_plain", "offset": 1, "offset_dtype": "weight"}


def norm_definition(family: str, semantics: dict[str, Any], dtype: torch.dtype, weight: torch.dtype) -> Definition:
    rows = ("batch_size", "seq_len", "hidden_size")
    vectors = [r for r in ("weight", "bias") if semantics.get(f"with_{r}")]
    body = families.get(family).source(semantics)  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {"torch": torch}
    exec(body, namespace)
    out = namespace["run"](torch.ones(1, 1, 24, dtype=dtype), *(torch.ones(24, dtype=weight) for _ in vectors)).dtype
    return define(
        name=f"{family}_d",
        op_type=family,
        family=family,
        semantics=semantics,
        axes={"batch_size": None, "seq_len": None, "hidden_size": 24},
        inputs={"hidden_states": (rows, dtype), **{r: (("hidden_size",), weight) for r in vectors}},
        outputs={"output": (rows, out)},
        body=body,
        site=SITE,
        description="a norm",
        reference_error=0.0,
    )


def residual_definition(order: str, family: str, norm: dict[str, Any], dtype: torch.dtype) -> Definition:
    rows = ("batch_size", "seq_len", "hidden_size")
    vectors = [r for r in ("weight", "bias") if norm.get(f"with_{r}")]
    passed = "".join(f", {r}" for r in vectors)
    body = families.get(family).source(norm, function="norm")  # type: ignore[attr-defined]
    body += f"\n\n\ndef run(residual, hidden_states{passed}):\n"
    if order == "pre":
        body += f"    total = residual + hidden_states\n    return total, norm(total{passed})"
    else:
        body += f"    return residual + norm(hidden_states{passed})"
    return define(
        name="residual_norm_d",
        op_type="residual_norm",
        family="residual_norm",
        semantics={"order": order, "norm": {"family": family, **norm}},
        axes={"batch_size": None, "seq_len": None, "hidden_size": 24},
        inputs={"residual": (rows, dtype), "hidden_states": (rows, dtype), **{r: (rows[-1:], dtype) for r in vectors}},
        outputs={n: (rows, dtype) for n in (("sum", "normed") if order == "pre" else ("sum",))},
        body=body,
        site=SITE,
        description="a residual norm",
        reference_error=0.0,
    )


def rope_definition(variant: Variant, dtype: torch.dtype, table: torch.dtype, *, with_k: bool = True) -> Definition:
    semantics = {
        name: getattr(variant, name)
        for name in (
            "pairs_in",
            "pairs_out",
            "rotary_dim",
            "head_dim",
            "placement",
            "direction",
            "table",
            "compute",
            "cast",
        )
    }
    heads_first = variant.leading != (1,) and variant.rank == 4
    names = ["batch_size", "num_heads", "seq_len"] if heads_first else ["batch_size", "seq_len", "num_heads"]
    shape = [n for n in names if variant.rank == 4 or n != "batch_size"]
    axes: dict[str, int | None] = {n: {"num_heads": 4}.get(n) for n in shape} | {"head_dim": variant.head_dim}
    if with_k:
        axes["num_kv_heads"] = 2
    labels = {n: n for n in shape}
    leading = [labels[shape[axis]] for axis in variant.leading]
    if variant.table == "complex":
        axes |= {"pairs": variant.rotary_dim // 2, "parts": 2}
        tables: dict[str, Any] = {"freqs": ([*leading, "pairs", "parts"], F32)}
    else:
        axes["table_width"] = variant.rotary_dim // (2 if variant.table == "half" else 1)
        tables = {t: ([*leading, "table_width"], table) for t in ("cos", "sin")}
    wide = torch.promote_types(dtype, F32 if variant.compute == "float32" or variant.table == "complex" else table)
    inputs = {"q": ([*shape, "head_dim"], dtype)}
    if with_k:
        inputs["k"] = (["num_kv_heads" if n == "num_heads" else n for n in [*shape, "head_dim"]], dtype)
    return define(
        name="rope_d",
        op_type="rope",
        family="rope",
        semantics={**semantics, "table_layout": "free", "leading": list(variant.leading)},
        axes=axes,
        inputs={**inputs, **tables},
        outputs={f"{n}_out": (s, dtype if variant.cast else wide) for n, (s, _) in inputs.items()},
        body=variant.body(with_k=with_k),
        site=SITE,
        description="a rotation",
        reference_error=0.0,
    )


def rope_variants() -> Iterator[Variant]:
    plain = Variant("half", "half", "full", "first", 24, 24, 4, (0, 2), swapped=False)
    for pairs in ("half", "interleaved"):
        for table in ("full", "first_half", "half", "complex"):
            yield Variant(pairs, pairs, table, "first", 24, 24, 4, (0, 2), swapped=False)
    yield Variant("interleaved", "half", "full", "first", 24, 24, 4, (0, 2), swapped=False)
    yield Variant("half", "interleaved", "half", "first", 24, 24, 4, (0, 2), swapped=False)
    for pairs, place in itertools.product(("half", "interleaved"), ("first", "last")):
        yield Variant(pairs, pairs, "full", place, 8, 24, 4, (0, 2), swapped=False)
    yield Variant("interleaved", "interleaved", "complex", "last", 8, 24, 4, (1,), swapped=False)
    yield Variant("half", "half", "full", "first", 24, 24, 4, (1,), swapped=False, compute="float32")
    yield Variant("half", "half", "full", "first", 8, 24, 4, (0, 2), swapped=False, compute="float32", cast=False)
    yield Variant("half", "half", "full", "first", 24, 24, 3, (0,), swapped=False)
    yield plain
    for pairs, table in itertools.product(("half", "interleaved"), ("full", "half", "complex")):
        yield Variant(pairs, pairs, table, "first", 24, 24, 4, (0, 2), swapped=False, direction="backward")


def gated_definition(variant: gated_mlp.Variant, dtype: torch.dtype) -> Definition:
    semantics = {name: getattr(variant, name) for name in ("activation", "packed", "upcast", "clamp", "limit")}
    rows, size = ["batch_size", "seq_len"], 48 if variant.packed is None else 96
    names = ("gate", "up") if variant.packed is None else ("gate_up",)
    return define(
        name="gated_mlp_d",
        op_type="gated_mlp",
        family="gated_mlp",
        semantics=semantics,
        axes={"batch_size": None, "seq_len": None, "input_size": size, "intermediate_size": 48},
        inputs={n: ([*rows, "input_size"], dtype) for n in names},
        outputs={"output": ([*rows, "intermediate_size"], dtype)},
        body=variant.body(),
        site=SITE,
        description="a gated product",
        reference_error=0.0,
    )


def gated_variants() -> Iterator[gated_mlp.Variant]:
    for activation in gated_mlp.ACTIVATIONS:
        yield gated_mlp.Variant(activation)
    for packed in ("gate_first", "up_first", "interleaved_gate_first", "interleaved_up_first"):
        yield gated_mlp.Variant("silu", packed=packed)
    for activation, clamp in itertools.product(("silu", "identity", "gelu_new"), ("before", "after")):
        yield gated_mlp.Variant(activation, upcast=True, clamp=clamp, limit=0.7)
    yield gated_mlp.Variant("gelu_python", upcast=True)
    yield gated_mlp.Variant("quick_gelu", clamp="before", limit=0.5)


def attention_definition(dtype: torch.dtype, *, masked: bool, **changes: Any) -> Definition:
    semantics = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "value_dim": 16,
        "scaling": 0.3,
        "softcap": None,
        "sinks": False,
        "causal": True,
        "decode_only": False,
        "mask": "bool" if masked else None,
        "mask_heads": 1,
        "sliding_window": None,
        **changes,
    }
    heads, kv_heads = semantics["num_heads"], semantics["num_kv_heads"]
    axes: dict[str, int | None] = {"batch_size": None, "num_heads": heads, "num_kv_heads": kv_heads}
    axes |= {"q_len": None, "kv_len": None, "head_dim": 16, "value_dim": semantics["value_dim"]}
    inputs: dict[str, Any] = {
        "query": (["batch_size", "num_heads", "q_len", "head_dim"], dtype),
        "key": (["batch_size", "num_kv_heads", "kv_len", "head_dim"], dtype),
        "value": (["batch_size", "num_kv_heads", "kv_len", "value_dim"], dtype),
    }
    if masked:
        axes |= {"mask_batch": None, "mask_heads": semantics["mask_heads"]}
        kind = torch.bool if semantics["mask"] == "bool" else dtype
        inputs["attention_mask"] = (["mask_batch", "mask_heads", "q_len", "kv_len"], kind)
    if semantics["sinks"]:
        inputs["sinks"] = (["num_heads"], dtype)
    constraint = "q_len == 1" if semantics["decode_only"] else "q_len == 1 or q_len == kv_len"
    if masked:
        constraint = "mask_batch == 1 or mask_batch == batch_size"
    return define(
        name="attention_d",
        op_type="attention",
        family="attention",
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs={"output": (["batch_size", "q_len", "num_heads", "value_dim"], dtype)},
        body=attention.body(semantics, masked=masked),
        site=SITE,
        description="attention",
        reference_error=0.0,
        constraints=[constraint] if masked or semantics["causal"] else [],
    )


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {"masked": False},
    "full": {"masked": False, "causal": False},
    "one query": {"masked": False, "decode_only": True},
    "no groups": {"masked": False, "num_kv_heads": 4},
    "bool mask": {"masked": True},
    "float mask": {"masked": True, "mask": "float", "value_dim": 8},
    "mask per head": {"masked": True, "mask_heads": 4},
    "softcap": {"masked": False, "softcap": 2.0},
    "softcap, full": {"masked": False, "softcap": 2.0, "causal": False},
    "softcap, mask": {"masked": True, "softcap": 2.0},
    "softcap, float mask": {"masked": True, "softcap": 2.0, "mask": "float"},
    "sinks": {"masked": False, "sinks": True},
    "sinks, mask": {"masked": True, "sinks": True, "value_dim": 8},
}


def sizes_of(definition: Definition) -> list[dict[str, int]]:
    if definition.op_type != "attention":
        return [{"batch_size": 1, "seq_len": 1}, {"batch_size": 2, "seq_len": 6}]
    lengths = [(1, 1, 1), (2, 1, 7)]
    if not definition.meta.semantics["decode_only"]:
        lengths += [(2, 6, 6)]
    if "attention_mask" in definition.inputs or not definition.meta.semantics["causal"]:
        lengths += [(2, 3, 8)]
    return [{"batch_size": b, "q_len": q, "kv_len": k, "mask_batch": b} for b, q, k in lengths]


def definitions() -> Iterator[tuple[str, Definition]]:
    dtypes = ((F32, F32), (BF16, BF16), (BF16, F32))
    for family, all_semantics in (("rms_norm", rms_semantics), ("layer_norm", layer_semantics)):
        for n, semantics in enumerate(all_semantics()):
            for dtype, weight in dtypes:
                if semantics["form"].startswith("functional") and dtype != weight:
                    continue  # torch's own call does not mix dtypes
                yield f"{family}-{n}-{dtype}-{weight}", norm_definition(family, semantics, dtype, weight)
            for order, dtype in (("pre", BF16), ("post", F32)) if n % 2 else (("pre", F32), ("post", BF16)):
                yield f"{order}-{family}-{n}-{dtype}", residual_definition(order, family, semantics, dtype)
    for n, variant in enumerate(rope_variants()):
        for dtype, table, with_k in ((F32, F32, True), (BF16, BF16, n % 2 == 0), (BF16, F32, n % 2 == 1)):
            yield f"rope-{n}-{dtype}-{table}-{with_k}", rope_definition(variant, dtype, table, with_k=with_k)
    for dtype in (F32, BF16):
        for n, gated in enumerate(gated_variants()):
            if (n % 3 == 0) is not (dtype is F32):
                continue
            name = f"gated-{gated.activation}-{gated.packed}-{gated.upcast}-{gated.clamp}-{dtype}"
            yield name, gated_definition(gated, dtype)
        for name, changes in ATTENTION.items():
            yield f"attention-{name}-{dtype}", attention_definition(dtype, **changes)


ALL = dict(definitions())


def fresh_inputs(definition: Definition, seed: int = 0, **axes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return families.get(definition.op_type).inputs(definition, axes or sizes_of(definition)[-1], generator, "normal")


OWN = {s.name: s for s in suppliers.select(["torch", "inductor"])}


def candidates(definition: Definition, supplier: str = "torch") -> list[Solution]:
    solutions = OWN[supplier].candidates(definition, machine.read())
    assert not isinstance(solutions, Refusal), solutions
    assert solutions
    return solutions


def check(definition: Definition, function: Callable[..., Any], inputs: list[torch.Tensor], label: str) -> None:
    before = [x.clone() for x in inputs]
    with torch.no_grad():
        actual = as_tuple(function(*inputs))
    native, exact = run_reference(definition, before), run_oracle(definition, before)
    assert len(actual) == len(definition.outputs)
    for (name, spec), a, n, e in zip(definition.outputs.items(), actual, native, exact, strict=True):
        assert a.shape == n.shape and str(a.dtype) == f"torch.{spec.dtype}", f"{label}: {name}: {a.dtype} {a.shape}"
        assert a.is_contiguous() or not n.is_contiguous(), f"{label}: {name} is not contiguous"
        assert (wrong := compare(a, n, e, name=name).wrong) is None, f"{label}: {wrong}"
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x, y), f"{label} changed an input"


@pytest.mark.parametrize("name", ALL)
def test_torch_solutions_compute_their_definition(name: str) -> None:
    definition = ALL[name]
    for solution in candidates(definition):
        function = load(solution)
        served = 0
        for seed, sizes in enumerate(sizes_of(definition)):
            inputs = fresh_inputs(definition, seed, **sizes)
            if refuses(solution.meta.guard, definition, inputs) is not None:
                continue
            served += 1
            check(definition, function, inputs, f"{name} {solution.name} {sizes}")
            strided = [x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 2 else x for x in inputs]
            check(definition, function, strided, f"{name} {solution.name} {sizes} strided")
        assert served >= (1 if solution.meta.guard.max_axes else len(sizes_of(definition)))
        findings = inspect_sources(solution, definition)
        assert not findings.denied and not findings.warnings, findings


@pytest.mark.parametrize("name", [n for n, d in ALL.items() if "bfloat16" not in n])
def test_gradients_flow_through_those_that_say_so(name: str) -> None:
    definition = ALL[name]
    for solution in candidates(definition):
        if not solution.meta.guard.autograd:
            continue

        def gradients(function: Callable[..., Any], solution: Solution = solution) -> list[torch.Tensor]:
            limit = solution.meta.guard.max_axes.get("q_len", 9)
            sizes = next(z for z in reversed(sizes_of(definition)) if z.get("q_len", 1) <= limit)
            inputs = [x.requires_grad_(x.is_floating_point()) for x in fresh_inputs(definition, 3, **sizes)]
            outputs = as_tuple(function(*inputs))
            weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(4)) for o in outputs]
            total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
            return list(torch.autograd.grad(total, [x for x in inputs if x.requires_grad]))

        expected = gradients(families.reference.reference_function(definition))
        for ours, theirs in zip(gradients(load(solution)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_every_variant_is_offered_for_something() -> None:
    with_gpu = MACHINE.model_copy(update={"gpu": "some GPU"})
    found = [(d, OWN["torch"].candidates(d, with_gpu)) for d in ALL.values()]
    offered = {s.name.removesuffix(f"_{d.name}") for d, each in found if not isinstance(each, Refusal) for s in each}
    listed = {row.name.replace(f"_{row.family}_", "_") for row in suppliers.select(["torch"])[0].catalogue(MACHINE)}
    assert offered == listed


def cudnn(definition: Definition) -> Solution | None:
    found = OWN["torch"].candidates(definition, MACHINE.model_copy(update={"gpu": "some GPU"}))
    assert not isinstance(found, Refusal)
    return next((s for s in found if s.name.startswith("torch_cudnn_")), None)


CUDNN = {n: d for n, d in ALL.items() if n.startswith("attention-") and cudnn(d) is not None}


def test_cudnn_is_offered_for_half_types_where_there_is_a_gpu() -> None:
    assert set(CUDNN) == {f"attention-{n}-{BF16}" for n in ("plain", "full", "one query", "no groups")}
    assert not [s for d in CUDNN.values() for s in candidates(d) if s.name.startswith("torch_cudnn_")]
    wide = attention_definition(BF16, masked=False, head_dim=136, value_dim=136)
    odd = attention_definition(BF16, masked=False, head_dim=36, value_dim=36)
    assert cudnn(wide) is None and cudnn(odd) is None
    supplier, without = OWN["torch"], MACHINE.model_copy(update={"gpu": None})
    assert [r.unavailable for r in supplier.catalogue(without) if r.name.endswith("_cudnn")] == ["no CUDA device"]
    with_gpu = without.model_copy(update={"gpu": "some GPU"})
    assert not [r.name for r in supplier.catalogue(with_gpu) if r.unavailable is not None]


@pytest.mark.parametrize("name", CUDNN)
def test_cudnn_gets_aligned_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU another function stands in for the operator, which looks at what it is given."""
    definition, solution = CUDNN[name], cudnn(CUDNN[name])
    assert solution is not None and solution.meta.guard.devices == ("cuda",)
    assert solution.spec.target_hardware == ("cuda",) and solution.spec.dependencies == ("torch", "kernelgraft")
    findings = inspect_sources(solution, definition)
    assert not findings.denied and not findings.warnings, findings
    function, copies = load(solution), []

    def operator(q: Any, k: Any, v: Any, *rest: Any, scale: float) -> Any:
        mask, sums, p, causal, debug = rest
        assert (mask, sums, p, debug) == (None, False, 0.0, False)
        for x, given in zip((q, k, v), inputs, strict=True):
            assert x.data_ptr() % 16 == 0 and x.stride(3) == 1 and not any(s * 2 % 16 for s in x.stride()[:3])
            copies.append(x is not given)
        grouped = q.shape[1] != k.shape[1]
        attend = torch.nn.functional.scaled_dot_product_attention
        return (attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped),)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", operator)
    for sizes in sizes_of(definition):
        inputs = fresh_inputs(definition, **sizes)
        check(definition, function, inputs, f"{name} {sizes}")
        assert not any(copies)
        for change in (_shifted, _interleaved, lambda x: x.mT.contiguous().mT):
            inputs = [change(x) for x in fresh_inputs(definition, **sizes)]
            copies.clear()
            check(definition, function, inputs, f"{name} {sizes} {change}")
            assert any(copies) or sizes["kv_len"] == 1
        copies.clear()


FUSED = [n for n, d in ALL.items() if n.startswith("attention-") and "grouped" in str([s.name for s in candidates(d)])]


@pytest.mark.parametrize("name", FUSED)
def test_fused_attention_gets_aligned_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = ALL[name]
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        mask = options.get("attn_mask")
        floats = [*tensors, *([] if mask is None or mask.dtype is torch.bool else [mask])]
        assert not any(x.data_ptr() % 16 for x in floats)
        seen.extend(tensors)
        return attend(*tensors, **options)

    for solution in candidates(definition):
        if "cudnn" in solution.name:
            continue
        function = load(solution)
        for sizes in sizes_of(definition):
            inputs = fresh_inputs(definition, **sizes)
            if refuses(solution.meta.guard, definition, inputs) is None:
                with monkeypatch.context() as patched:
                    patched.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
                    function(*inputs)
                    assert seen[-1].data_ptr() == inputs[2].data_ptr(), "nothing is copied without need"
                    check(definition, function, [_shifted(x) for x in inputs], f"{name} {sizes}")
    assert seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in FUSED if str(F32) not in n])
def test_fused_attention_of_tensors_that_begin_in_between_on_a_gpu(name: str) -> None:
    definition = ALL[name]
    for solution in candidates(definition):
        for sizes in sizes_of(definition):
            inputs = [x.cuda() for x in fresh_inputs(definition, **sizes)]
            if refuses(solution.meta.guard, definition, inputs) is None:
                for index in range(len(inputs)):
                    moved = [_shifted(x) if i == index else x for i, x in enumerate(inputs)]
                    check(definition, load(solution), moved, f"{solution.name} {sizes} {index}")


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Not on an address of 16 bytes."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def _interleaved(x: torch.Tensor) -> torch.Tensor:
    """Rows that are not a multiple of 16 bytes apart."""
    return torch.nn.functional.pad(x, (0, 3))[..., :-3]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDNN)
def test_cudnn_on_a_gpu(name: str) -> None:
    definition, solution = CUDNN[name], cudnn(CUDNN[name])
    assert solution is not None
    function = load(solution)
    for sizes in (*sizes_of(definition), {"batch_size": 2, "q_len": 1, "kv_len": 77}):
        for change in (lambda x: x, _shifted, _interleaved, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
            inputs = [change(x.cuda()) for x in fresh_inputs(definition, **sizes)]
            check(definition, function, inputs, f"{name} {sizes}")


def test_solutions_say_what_they_are() -> None:
    definition = ALL["rms_norm-1-torch.float32-torch.float32"]
    native, in_place, _ = candidates(definition)
    assert native.definition == definition.name and native.meta.fingerprint == definition.meta.fingerprint
    assert (native.spec.language, native.spec.target_hardware, native.meta.supplier) == (
        "python",
        ("cpu", "cuda"),
        "torch",
    )
    assert (native.meta.match, native.meta.guard.autograd, in_place.meta.guard.autograd) == ("exact", True, False)
    assert in_place.meta.guard.text == "float32 on cpu or cuda; no gradients"
    needs_grad = fresh_inputs(definition, batch_size=1, seq_len=1)
    needs_grad[0].requires_grad_()
    assert "gradient" in str(refuses(in_place.meta.guard, definition, needs_grad))
    offset = ALL["rms_norm-6-torch.float32-torch.float32"]
    assert {s.meta.match for s in candidates(offset)} == {"adapter"}


needs_compiler = pytest.mark.skipif(
    machine.cxx_compiler() is None, reason="torch.compile needs a C++ compiler on a CPU"
)


@needs_compiler
def test_names_are_unique_across_definitions() -> None:
    shapes = [norm_definition("rms_norm", next(rms_semantics()), d, d) for d in (F32, BF16)]
    first, second = (d.model_copy(update={"name": f"rms_{n}"}) for n, d in enumerate(shapes))
    names = [s.name for d in (first, second) for s in (*candidates(d), *candidates(d, "inductor"))]
    assert len(names) == len(set(names))


def test_refusals_say_why() -> None:
    (torch_supplier,) = suppliers.select(["torch"])
    definition = ALL["rms_norm-1-torch.float32-torch.float32"]
    other = definition.model_copy(update={"meta": definition.meta.model_copy(update={"family": "moe"})})
    assert torch_supplier.candidates(other, MACHINE) == Refusal("torch", "it has nothing for the family `moe`")
    eight = {n: s.model_copy(update={"dtype": "float8_e4m3fn"}) for n, s in definition.inputs.items()}
    refused = torch_supplier.candidates(definition.model_copy(update={"inputs": eight}), MACHINE)
    assert isinstance(refused, Refusal) and "float32, bfloat16 or float16" in refused.reason
    without = MACHINE.model_copy(update={"versions": {}})
    assert torch_supplier.candidates(definition, without) == Refusal("torch", "torch is not installed")
    (inductor,) = suppliers.select(["inductor"])
    refused = inductor.candidates(definition.model_copy(update={"inputs": eight}), MACHINE)
    assert isinstance(refused, Refusal) and "float8_e4m3fn" in refused.reason


@needs_compiler
def test_inductor_compiles_the_reference() -> None:
    definition = ALL["rms_norm-1-torch.float32-torch.float32"]
    (solution,) = candidates(definition, "inductor")
    guard = solution.meta.guard
    assert guard.static_shapes and not guard.autograd and solution.meta.uses_compiler
    assert "only the shapes that were measured" in guard.text
    assert not inspect_sources(solution, definition).denied
    function = load(solution)
    with torch.no_grad():
        check(definition, function, fresh_inputs(definition, batch_size=1, seq_len=6), "inductor")


def test_inductor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    (inductor,) = suppliers.select(["inductor"])
    monkeypatch.setattr(machine, "cxx_compiler", lambda: None)
    assert "C++ compiler" in str(inductor.unavailable(MACHINE))
    assert all("C++ compiler" in str(row.unavailable) for row in inductor.catalogue(MACHINE))
    refused = inductor.candidates(ALL["rms_norm-1-torch.float32-torch.float32"], MACHINE)
    assert isinstance(refused, Refusal) and "C++ compiler" in refused.reason
    gpu = MACHINE.model_copy(update={"gpu": "a gpu"})
    assert "triton" in str(inductor.unavailable(gpu))
    with_triton = gpu.model_copy(update={"versions": {"triton": "3.7.0"}})
    assert inductor.unavailable(with_triton) is None
    assert {row.hardware for row in inductor.catalogue(with_triton)} == {("cuda",)}


def test_the_catalogue_lists_every_family_of_every_supplier() -> None:
    rows = [row for s in suppliers.all_suppliers() for row in s.catalogue(MACHINE)]
    for name in ("torch", "inductor"):
        assert {row.family for row in rows if row.supplier == name} == set(families.NAMES) - {"linear"}
    assert len({(row.supplier, row.name) for row in rows}) == len(rows)
    for row in rows:
        assert row.guard and row.hardware
        assert (row.language == "python") is (row.supplier in ("torch", "inductor", "hub"))


def test_unknown_suppliers_are_an_error() -> None:
    assert [s.name for s in suppliers.select(["inductor", "torch", "inductor"])] == ["inductor", "torch"]
    assert [s.name for s in suppliers.select(None)][:2] == ["torch", "inductor"]
    with pytest.raises(UsageError, match=r"unknown supplier `tril`; known: torch, inductor"):
        suppliers.select(["torch", "tril"])


class Extra(Supplier):
    name = "extra"

    def unavailable(self, machine: MachineCard) -> str | None:
        return None

    def catalogue(self, machine: MachineCard) -> list[Listing]:
        return [Listing("extra", "extra_norm", "rms_norm", "triton", ("cuda",), "any", None)]

    def candidates(self, definition: Definition, machine: MachineCard) -> list[Solution] | Refusal:
        return Refusal("extra", "nothing")


NOT_A_SUPPLIER = dict


def test_entry_points_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(name: str, value: str) -> importlib.metadata.EntryPoint:
        return importlib.metadata.EntryPoint(name, value, suppliers.base.ENTRY_POINT_GROUP)

    points = importlib.metadata.EntryPoints(
        [
            point("extra", f"{__name__}:Extra"),
            point("gone", "no_such_module:SUPPLIER"),
            point("odd", f"{__name__}:NOT_A_SUPPLIER"),
            point("other", f"{__name__}:Extra"),
            point("torch", f"{__name__}:Extra"),
        ]
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points.select(group=group))
    found = {s.name: s for s in suppliers.all_suppliers()}
    assert list(found)[: len(suppliers.OWN) + 1] == [*suppliers.OWN, "extra"] and isinstance(found["extra"], Extra)
    for name, words in {
        "gone": "ModuleNotFoundError",
        "odd": "not a Supplier",
        "other": "calls itself `extra`",
        f"torch ({__name__}:Extra)": "name `torch` is taken",
    }.items():
        assert words in str(found[name].unavailable(MACHINE))
        (row,) = found[name].catalogue(MACHINE)
        assert words in str(row.unavailable)
        refused = found[name].candidates(ALL["rms_norm-1-torch.float32-torch.float32"], MACHINE)
        assert isinstance(refused, Refusal) and words in refused.reason


def test_guards_in_words() -> None:
    guard = suppliers.torch_ops.Guard(
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        contiguous=("q", "k"),
        last_dim_contiguous=("v",),
        max_axes={"kv_len": 8},
        equal_axes=(("q_len", "kv_len"),),
    )
    assert in_words(guard) == (
        "float32, bfloat16 or float16 on cuda; q and k contiguous; v contiguous along the last axis; "
        "kv_len up to 8; q_len equal to kv_len, or 1"
    )


def test_torch_sources_cover_the_families() -> None:
    assert set(torch_sources.FAMILIES) == set(families.NAMES) - {"linear"}, "a product is torch's own already"
