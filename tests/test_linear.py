"""Linear modules: which are recognised, what their Definition says, and that a seat follows the live parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hand_made
import pytest
import torch
from torch import nn
from torch.nn import functional

from kernelgraft import pipeline
from kernelgraft.evaluate import Judge, cases, interpreting
from kernelgraft.families import Call, Recognition, Rejection, get, linear, probe
from kernelgraft.families.reference import run_oracle, run_reference
from kernelgraft.patch import apply
from kernelgraft.pipeline import researching
from kernelgraft.records import (
    BuildSpec,
    Definition,
    Guard,
    Site,
    Solution,
    SolutionMeta,
    SourceFile,
    SourceRef,
    Status,
)
from kernelgraft.sites import discover
from kernelgraft.suppliers.guards import refuses
from kernelgraft.suppliers.load import load
from kernelgraft.suppliers.ours import OwnSupplier

FAMILY = get("linear")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def made(out: int = 24, width: int = 40, *, bias: bool = True, dtype: torch.dtype = F32, kind: Any = nn.Linear) -> Any:
    torch.manual_seed(5)
    module = kind(width, out, bias=bias)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape)
    return module.to(dtype).eval()


def site_of(module: nn.Module) -> Site:
    return Site(
        kind="module",
        path="layers.*.proj",
        instances=("layers.0.proj",),
        class_name=type(module).__qualname__,
        source=SourceRef(file="some.py", first_line=1, last_line=9, sha256="0" * 64),
    )


def call_of(module: Any, x: torch.Tensor, **changes: Any) -> Call:
    original = type(module).forward
    with torch.no_grad():
        output = original(module, x.clone())
    return replace(Call("layers.0.proj", module, (x,), {}, output, "decode", original), **changes)


def recognised(module: Any, *shapes: tuple[int, ...]) -> Recognition:
    dtype = module.weight.dtype
    calls = [call_of(module, torch.randn(shape).to(dtype)) for shape in shapes or ((1, 5, 40), (1, 1, 40))]
    found = FAMILY.recognise(site_of(module), calls)
    assert isinstance(found, Recognition), found
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_the_definition_is_the_product(dtype: torch.dtype, bias: bool) -> None:
    module = made(bias=bias, dtype=dtype)
    found = recognised(module)
    (definition,) = found.definitions
    assert definition.op_type == "gemm" and definition.meta.family == "linear"
    assert list(definition.inputs) == ["hidden_states", "weight", *(["bias"] if bias else [])]
    assert definition.outputs["output"].shape == ("batch_size", "seq_len", "out_features")
    sizes = {name: axis.value for name, axis in definition.axes.items()}
    assert sizes == {"batch_size": None, "seq_len": None, "in_features": 40, "out_features": 24}
    assert definition.meta.reference_error == 0.0
    inputs = FAMILY.inputs(definition, {"batch_size": 2, "seq_len": 3}, torch.Generator().manual_seed(0), "normal")
    expected = functional.linear(*(x.double() for x in inputs))
    torch.testing.assert_close(run_oracle(definition, inputs)[0], expected)
    assert torch.equal(run_reference(definition, inputs)[0], functional.linear(*inputs))


def test_equal_shapes_share_a_definition_and_others_do_not() -> None:
    first = recognised(made()).definitions[0]
    assert recognised(made()).definitions[0].name == first.name
    others = [
        recognised(made(bias=False)).definitions[0],
        recognised(made(out=25)).definitions[0],
        recognised(made(dtype=BF16)).definitions[0],
        recognised(made(), (4, 40)).definitions[0],
    ]
    assert len({first.name, *(d.name for d in others)}) == 5
    assert len({first.meta.fingerprint, *(d.meta.fingerprint for d in others)}) == 5


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_is_not_plain_is_left_alone() -> None:
    scaled = made(kind=Scaled)
    assert FAMILY.recognise(site_of(scaled), [call_of(scaled, torch.randn(1, 40))]) is None
    norm = nn.LayerNorm(40)
    assert FAMILY.recognise(site_of(norm), [call_of(norm, torch.randn(2, 40))]) is None
    assert FAMILY.recognise(site_of(made()), []) is None
    parametrised = nn.utils.parametrizations.weight_norm(made())
    assert FAMILY.recognise(site_of(parametrised), [call_of(parametrised, torch.randn(2, 40))]) is None


def test_rejections_say_why() -> None:
    module = made()
    x = torch.randn(2, 40)
    call = call_of(module, x)

    def reason(*calls: Call) -> str:
        found = FAMILY.recognise(site_of(module), calls)
        assert isinstance(found, Rejection)
        return found.reason

    assert "one tensor" in reason(replace(call, args=(x, x)))
    assert "float64" in reason(replace(call, args=(x.double(),)))
    assert "in place" in reason(replace(call, mutated=("args[0]",)))
    assert "ulp away" in reason(replace(call, output=call.output + 1))
    assert "matrix" in reason(replace(call, args=(x[0],)))
    module.bias = nn.Parameter(module.bias.to(BF16))
    assert "bfloat16, float32" in reason(call)


def test_the_seat_reads_the_parameters_at_each_call() -> None:
    module = made()
    seen: list[tuple[Any, ...]] = []

    def select(*inputs: Any) -> Any:
        seen.append(inputs)
        return functional.linear if inputs[0].shape[0] == 1 else None

    seat = FAMILY.seat({})
    forward = seat.factory(nn.Linear.forward, select, **seat.constants)
    x = torch.randn(1, 40)
    with torch.no_grad():
        assert torch.equal(forward(module, x), functional.linear(x, module.weight, module.bias))
        assert torch.equal(forward(module, input=x), forward(module, x))
        assert torch.equal(forward(module, torch.ones(2, 40)), module(torch.ones(2, 40)))
        module.weight = nn.Parameter(torch.ones(24, 40))
        module.bias = None
        assert torch.equal(forward(module, x), functional.linear(x, torch.ones(24, 40)))
    assert [len(inputs) for inputs in seen] == [3, 3, 3, 3, 2]
    assert seen[-1][1] is module.weight
    with pytest.raises(TypeError):
        forward(module, x, x)


def test_fresh_weights_are_large_and_no_two_rows_agree() -> None:
    module = made(out=3000, width=1024, bias=False, dtype=BF16)
    definition = recognised(module, (1, 1, 1024)).definitions[0]
    generator = torch.Generator().manual_seed(0)
    weight = FAMILY.inputs(definition, {"batch_size": 1, "seq_len": 1}, generator, "normal")[1]
    assert weight.shape == (3000, 1024) and weight.is_contiguous()
    assert weight.unique(dim=0).shape[0] == 3000
    assert 0.9 < float(weight.float().std() * 32) < 1.1
    points = FAMILY.axis_points(definition, [{"batch_size": 1, "seq_len": 1}])
    assert {p["batch_size"] for p in points} >= {1, 16, 17} and len(points) < 20


def test_a_large_weight_is_drawn_once_for_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LARGE", 500)
    definition = recognised(made()).definitions[0]
    axes = {"batch_size": 1, "seq_len": 1}
    inputs = tuple(FAMILY.inputs(definition, axes, torch.Generator().manual_seed(0), "normal"))
    captured = cases.Captured(inputs, "decode", "a call", axes)
    fresh: list[Any] = []
    monkeypatch.setattr(linear, "normal", lambda size, generator: fresh.append(size) or probe.normal(size, generator))
    drawn = cases.make(definition, FAMILY, [captured], cases.JudgeOptions(), static_shapes=False).cases
    weights = {id(c.inputs[1]) for c in drawn if c.label.startswith("batch") or c.check != "C8"}
    assert len(weights - {id(inputs[1])}) == 1
    assert len(fresh) == 1, "drawing it again and throwing it away takes as long"
    assert len({id(c.inputs[2]) for c in drawn}) > 5, "small inputs are fresh"
    assert len(drawn) < 40


def test_a_large_weight_that_is_remembered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LARGE", 500)
    definition = recognised(made()).definitions[0]
    axes = {"batch_size": 1, "seq_len": 1}
    inputs = tuple(FAMILY.inputs(definition, axes, torch.Generator().manual_seed(0), "normal"))
    captured = [cases.Captured(inputs, "decode", "a call", axes)]
    remembered = "kept.setdefault(tuple(weight.shape), weight.clone())"
    with Judge(replace(cases.JudgeOptions.quick(), static_gate=False)) as judge:
        for weight, status in (("weight", Status.PASSED), (remembered, Status.INCORRECT_NUMERICAL)):
            product = f"torch.nn.functional.linear(hidden_states, {weight}, bias)"
            source = f"import torch\nkept = {{}}\n\ndef kernel(hidden_states, weight, bias):\n    return {product}\n"
            found = judge.verify(plain(definition, source), definition, captured)
            assert found.status is status, found.reason


def plain(definition: Definition, source: str) -> Solution:
    """A Solution in torch from its source."""
    return Solution(
        name="plain",
        definition=definition.name,
        author="test",
        spec=BuildSpec(language="python", target_hardware=("cpu",), entry_point="kernel.py::kernel"),
        sources=(SourceFile(path="kernel.py", content=source),),
        meta=SolutionMeta(
            supplier="torch", family="linear", guard=Guard(autograd=False), fingerprint=definition.meta.fingerprint
        ),
    )


def test_a_smaller_definition_for_slow_machines() -> None:
    small = recognised(made()).definitions[0]
    assert FAMILY.reduced(small) is None
    definition = recognised(made(out=1000, width=2080), (1, 1, 2080)).definitions[0]
    reduced = FAMILY.reduced(definition)
    assert reduced is not None
    assert (reduced.axes["in_features"].value, reduced.axes["out_features"].value) == (544, 168)
    assert reduced.meta.fingerprint != definition.meta.fingerprint and reduced.name != definition.name
    inputs = FAMILY.inputs(reduced, {"batch_size": 1, "seq_len": 1}, torch.Generator().manual_seed(0), "normal")
    assert run_reference(reduced, inputs)[0].shape == (1, 1, 168)


# In a model


@pytest.fixture(scope="module")
def loaded() -> Any:
    return hand_made.load("llama")


def test_discovery_lists_products_only_if_asked(loaded: Any) -> None:
    plain = discover(loaded.model)
    with_products = discover(loaded.model, products=True)
    more = [site for site in with_products if site.class_name == "torch.nn.modules.linear.Linear"]
    assert [s for s in with_products if s not in more] == plain
    paths = {site.path for site in more}
    assert {"model.layers.*.self_attn.q_proj", "model.layers.*.mlp.down_proj", "lm_head"} <= paths
    layers = loaded.model.config.num_hidden_layers
    assert all(len(site.instances) == (1 if site.path == "lm_head" else layers) for site in more)


def test_research_asks_for_products_where_somebody_has_them(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELGRAFT_INTERPRET", raising=False)
    assert not researching._products(loaded.model)
    monkeypatch.setenv("KERNELGRAFT_INTERPRET", "1")
    assert researching._products(loaded.model)


def graft_of(loaded: Any) -> Any:
    """The reference seated at every Linear."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand_made, "discover", lambda model: discover(model, products=True))
        return hand_made.make_graft(loaded, only={"linear"})


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_seats_survive_what_is_done_to_a_model(loaded: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = hand_made.load("llama").model
    ids = hand_made.prompt(loaded)
    graft = graft_of(loaded)
    assert len(graft.patches) >= 3 and len(graft.patches) < len([s for p in graft.patches for s in p.sites])
    expected = hand_made.logits(model, ids)
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[0]))
    applied = apply(graft, model)
    assert torch.equal(hand_made.logits(model, ids), expected) and seen
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(hand_made.logits(model, ids), 2 * expected)
    wider = hand_made.logits(model.to(torch.float64), ids)  # the guard sends other dtypes to the original
    assert wider.dtype is torch.float64
    model.to(torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    with_adapter = hand_made.logits(adapted, ids)
    assert not applied.unreached()
    applied.revert()
    torch.testing.assert_close(hand_made.logits(adapted, ids), with_adapter)
    assert not torch.allclose(with_adapter, 2 * expected)


# The supplier


def test_the_guard_lets_few_rows_through() -> None:
    pytest.importorskip("cuda.tile")
    from test_ours import TILE

    for shapes, rows in (((), 3), (((4, 40),), 2)):
        definition = recognised(made(), *shapes).definitions[0]
        solutions = OwnSupplier(interpret=True).candidates(definition, TILE)
        assert isinstance(solutions, list)
        (ours,) = solutions
        axes = dict.fromkeys([n for n, a in definition.axes.items() if a.value is None], 1)
        first = next(iter(axes))

        def refused(changes: dict[str, int]) -> str | None:
            inputs = FAMILY.inputs(definition, axes | changes, torch.Generator().manual_seed(0), "normal")  # noqa: B023
            reason = refuses(ours.meta.guard, definition, inputs)  # noqa: B023
            if reason is None:
                found = load(ours)(*inputs)  # noqa: B023
                torch.testing.assert_close(found, functional.linear(*inputs), rtol=1e-5, atol=1e-4)
            return reason

        assert refused({}) is None and refused({first: 16}) is None
        assert "larger than 16" in str(refused({first: 17}))
        if rows == 3:
            assert "seq_len is larger than 1" in str(refused({"seq_len": 2}))
        weight = torch.randn(40, 24).t()
        inputs = [torch.zeros(*[1] * (rows - 1), 40), weight, torch.zeros(24)]
        assert "stride" in str(refuses(ours.meta.guard, definition, inputs))
        training = [x.requires_grad_() for x in FAMILY.inputs(definition, axes, torch.Generator(), "normal")]
        assert "gradient" in str(refuses(ours.meta.guard, definition, training))


def test_the_whole_job_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.tile")
    monkeypatch.setenv("KERNELGRAFT_INTERPRET", "1")
    loaded = hand_made.load("llama")
    only = [site for site in discover(loaded.model, products=True) if site.path.endswith("down_proj")]
    monkeypatch.setattr(researching, "discover", lambda model, products: only)
    options = replace(cases.JudgeOptions.quick(), seeds=1, points=3, distributions=("normal", "huge"))
    graft = pipeline.integrate(
        loaded, suppliers=[OwnSupplier(interpret=True)], policy="verified", options=options, force=True
    )
    (patch,) = graft.accepted
    assert patch.family == "linear" and graft.end_to_end is not None and graft.end_to_end.tokens_equal
    assert {s.regime for s in patch.seats if s.seated} == {"decode"}, "the prompt has more rows than it serves"
    assert {s.regime for s in patch.seats} == {"decode", "prefill"}


def test_a_large_weight_is_interpreted_in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.tile")
    from test_ours import H200

    monkeypatch.setattr(interpreting, "applies", lambda solution, calls: True)
    definition = recognised(made(out=4096, width=2080, bias=False), (1, 1, 2080)).definitions[0]
    answer = OwnSupplier(interpret=False).candidates(definition, H200)
    assert isinstance(answer, list)
    (right,) = answer
    axes = {"batch_size": 1, "seq_len": 1}
    inputs = tuple(FAMILY.inputs(definition, axes, torch.Generator().manual_seed(0), "normal"))
    call = cases.Captured(inputs, "decode", "a call", axes)
    source = right.sources[0].content.replace(
        "linear_decode(hidden_states, weight)", "linear_decode(hidden_states, 1.01 * weight)"
    )
    wrong = right.model_copy(update={"sources": (right.sources[0].model_copy(update={"content": source}),)})
    options = replace(cases.JudgeOptions.quick(), distributions=("normal",))
    with Judge(options) as judge:
        found = judge.verify(wrong, definition, [call])
        assert "under the interpreter, before it ran on the GPU: wrong at" in str(found.reason), found
        found = judge.verify(right, definition, [call])
        assert "guard refuses the captured calls: hidden_states is on cpu" in str(found.reason), found
