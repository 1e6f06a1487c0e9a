"""Recognising gated feed-forward modules by what they compute, and seating kernels in them."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kernelgraft.families.base import Call, Recognition, Rejection
from kernelgraft.families.gated_mlp import ACTIVATIONS, FAMILY, INLINE, gated_mlp_seat
from kernelgraft.families.reference import run_oracle, run_reference
from kernelgraft.records import Site, SourceRef

HIDDEN, INTER = 16, 24
SITE = Site(
    kind="module",
    path="layers.*.mlp",
    instances=("layers.0.mlp", "layers.1.mlp"),
    class_name="package.module.MLP",
    source=SourceRef(file="package/module.py", first_line=1, last_line=9, sha256="0" * 64),
)


def build(name: str, cls: str, config: str, **settings: Any) -> nn.Module:
    """A feed-forward module of transformers with random weights and biases."""
    package = f"transformers.models.{name}"
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    settings = {"hidden_size": HIDDEN, "intermediate_size": INTER, **heads, **settings}
    made = getattr(pytest.importorskip(f"{package}.configuration_{name}"), config)(**settings)
    module: nn.Module = getattr(importlib.import_module(f"{package}.modeling_{name}"), cls)(made)
    return randomised(module)


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return module.eval()


def record(module: nn.Module, *args: Any, **kwargs: Any) -> Call:
    forward = type(module).forward
    with torch.no_grad():
        output = forward(module, *args, **kwargs)
    return Call(
        instance="layers.0.mlp",
        module=module,
        args=args,
        kwargs=kwargs,
        output=output,
        regime="prefill",
        original=forward,
    )


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def recognised(module: nn.Module, dtype: torch.dtype = torch.float32) -> Recognition:
    module = module.to(dtype)
    calls = [record(module, randn(1, length, HIDDEN, dtype=dtype)) for length in (5, 1)]
    found = FAMILY.recognise(SITE, calls)
    assert isinstance(found, Recognition), found
    return found


def seated(found: Recognition, module: nn.Module, select: Callable[..., Any]) -> Callable[..., Any]:
    seat = FAMILY.seat(found.semantics)
    return seat.factory(type(module).forward, select, **seat.constants)


def reference_of(found: Recognition, seen: list[Any] | None = None) -> Callable[..., Any]:
    def select(*inputs: Any) -> Callable[..., Any]:
        if seen is not None:
            seen.append(inputs)
        return lambda *values: run_reference(found.definitions[0], values)[0]

    return select


REAL = [
    ("qwen3", "Qwen3MLP", "Qwen3Config", {}, {"activation": "silu", "packed": None, "heads": ["gate_proj", "up_proj"]}),
    ("gemma", "GemmaMLP", "GemmaConfig", {}, {"activation": "gelu_tanh", "tail": ["down_proj"], "act": "act_fn"}),
    ("phi3", "Phi3MLP", "Phi3Config", {}, {"activation": "silu", "packed": "gate_first", "heads": ["gate_up_proj"]}),
    ("lfm2", "Lfm2MLP", "Lfm2Config", {"block_auto_adjust_ff_dim": False}, {"activation": "silu", "act": None}),
    ("bitnet", "BitNetMLP", "BitNetConfig", {}, {"activation": "relu2", "tail": ["ffn_sub_norm", "down_proj"]}),
    ("moonshine", "MoonshineDecoderMLP", "MoonshineConfig", {}, {"packed": "up_first"}),
    ("deepseek_v4", "DeepseekV4MLP", "DeepseekV4Config", {"swiglu_limit": 7.0}, {"clamp": "before", "limit": 7.0}),
    ("beam", "BeamMLP", "BeamConfig", {}, {"activation": "silu", "upcast": True}),
]


def real_module(name: str, cls: str, config: str, settings: dict[str, Any]) -> nn.Module:
    if name == "moonshine":
        package = "transformers.models.moonshine"
        made = importlib.import_module(f"{package}.configuration_moonshine").MoonshineConfig(
            hidden_size=HIDDEN, intermediate_size=INTER
        )
        return randomised(importlib.import_module(f"{package}.modeling_moonshine").MoonshineDecoderMLP(made, "silu"))
    return build(name, cls, config, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "cls", "config", "settings", "expected"), REAL, ids=[r[0] for r in REAL])
def test_real_modules(
    name: str, cls: str, config: str, settings: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype
) -> None:
    module = real_module(name, cls, config, settings)
    found = recognised(module, dtype)
    assert {key: found.semantics[key] for key in expected} == expected
    (definition,) = found.definitions
    assert definition.meta.reference_error == 0.0
    assert list(definition.inputs) == (["gate_up"] if found.semantics["packed"] else ["gate", "up"])
    seen: list[Any] = []
    for scale in (1.0, 40.0):  # beyond any limit on the values
        x = (randn(3, 7, HIDDEN) * scale).to(dtype)
        with torch.no_grad():
            usual = type(module).forward(module, x)
            assert torch.equal(seated(found, module, reference_of(found, seen))(module, x), usual)
            assert torch.equal(seated(found, module, lambda *_: None)(module, x), usual)
    width = 2 * INTER if found.semantics["packed"] else INTER
    assert len(seen) == 2 and seen[0][0].shape == (3, 7, width)


class Gated(nn.Module):
    """A feed-forward written for the tests; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INTER), nn.Linear(HIDDEN, INTER)
        self.down = nn.Linear(INTER, HIDDEN)
        self.factor = 1.5

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class OtherActivation(Gated):
    """Close to silu, and within its rounding in bfloat16 for usual values."""

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.01 * x)


class OtherActivationChild(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Softsign()

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


class Multiplied(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.factor


class MultipliedGate(Gated):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x * self.factor)


class HiddenLimit(Gated):
    """Differs from the plain one only for large values."""

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x.clamp(max=64.0))


class Conditioned(Gated):
    def forward(self, x: torch.Tensor, level: int = 0) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) + level


class Dropping(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.gate(x)) * self.up(x))
        return nn.functional.dropout(y, p=0.5, training=self.training)


class Plain(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Mixer(Gated):
    """Attention-like: what meets is not a product of two projections of the same row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.gate(x), self.up(x)
        return self.down(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ k)


class Interleaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(HIDDEN, 2 * INTER), nn.Linear(INTER, HIDDEN)
        self.act = nn.functional.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        return self.down(both[..., 0::2] * self.act(both[..., 1::2]))


class WithoutDown(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OtherActivation, "not activation\\(gate\\) \\* up"),
        (OtherActivationChild, "`child` \\(Softsign\\) is not one of the known"),
        (Multiplied, "not what its last child returns"),
        (MultipliedGate, "not activation\\(gate\\) \\* up"),
        (HiddenLimit, "not activation\\(gate\\) \\* up"),
        (Mixer, "not activation\\(gate\\) \\* up"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_twist_is_rejected_with_the_reason(cls: type[Gated], reason: str, dtype: torch.dtype) -> None:
    module = randomised(cls()).to(dtype)
    found = FAMILY.recognise(SITE, [record(module, randn(1, 5, HIDDEN, dtype=dtype))])
    assert isinstance(found, Rejection)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)


def test_other_modules_are_not_feed_forwards() -> None:
    assert FAMILY.recognise(SITE, [record(randomised(Plain()), randn(1, 5, HIDDEN))]) is None
    assert FAMILY.recognise(SITE, [record(nn.LayerNorm(HIDDEN), randn(1, 5, HIDDEN))]) is None
    stack = nn.Sequential(nn.Linear(HIDDEN, INTER), nn.Linear(INTER, HIDDEN))
    assert FAMILY.recognise(SITE, [record(stack, randn(1, 5, HIDDEN))]) is None
    assert FAMILY.recognise(SITE, []) is None


def test_interleaved_halves_and_a_function_as_attribute() -> None:
    found = recognised(randomised(Interleaved()))
    assert found.semantics["packed"] == "interleaved_up_first" and found.semantics["act"] == "act"
    assert found.semantics["activation"] == "gelu"


def test_a_module_that_returns_the_product() -> None:
    found = recognised(randomised(WithoutDown()))
    assert found.semantics["tail"] == [] and found.semantics["heads"] == ["gate", "up"]


def test_order_of_the_projections_is_decided_by_behaviour() -> None:
    class Swapped(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.gate(x) * self.act(self.up(x)))

    found = recognised(randomised(Swapped()))
    assert found.semantics["heads"] == ["up", "gate"]


def test_without_a_kernel_the_projections_run_once() -> None:
    module = build("qwen3", "Qwen3MLP", "Qwen3Config")
    found = recognised(module)
    counts: dict[str, int] = {}

    def watch(name: str) -> None:
        child = module.get_submodule(name)
        child.register_forward_hook(lambda *_: counts.update({name: counts.get(name, 0) + 1}))

    for name in ("gate_proj", "up_proj", "down_proj"):
        watch(name)
    x = randn(2, 3, HIDDEN)
    usual = type(module).forward(module, x)
    for select in (lambda *_: None, reference_of(found)):
        counts.clear()
        assert torch.equal(seated(found, module, select)(module, x), usual)
        assert counts == {"gate_proj": 1, "up_proj": 1, "down_proj": 1}
    watch("act_fn")  # whoever watches the activation's calls goes on seeing them
    seen: list[Any] = []
    counts.clear()
    assert torch.equal(seated(found, module, reference_of(found, seen))(module, x), usual)
    assert counts["act_fn"] == 1 and not seen


def test_children_replaced_later_are_called() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    module = build("qwen3", "Qwen3MLP", "Qwen3Config")
    replacement = None
    found = recognised(module)
    replacement = seated(found, module, reference_of(found))
    module.gate_proj = Doubled(module.gate_proj)
    x = randn(2, 3, HIDDEN)
    assert torch.equal(replacement(module, x), type(module).forward(module, x))


def test_further_arguments_run_the_original() -> None:
    module = randomised(Conditioned())
    found = recognised(module)
    seen: list[Any] = []
    replacement = seated(found, module, reference_of(found, seen))
    x = randn(1, 5, HIDDEN)
    assert torch.equal(replacement(module, x=x), module(x)) and len(seen) == 1
    assert torch.equal(replacement(module, x, level=2), module(x, level=2))
    assert torch.equal(replacement(module, x, 2), module(x, 2))
    with pytest.raises(TypeError):
        replacement(module, unknown=x)
    assert len(seen) == 1
    rejected = FAMILY.recognise(SITE, [record(module, x, 2)])
    assert isinstance(rejected, Rejection)


def test_dropout_runs_in_training() -> None:
    module = randomised(Dropping())
    found = recognised(module)
    assert found.semantics["eval_only"] and not recognised(randomised(Gated())).semantics["eval_only"]
    replacement = seated(found, module, reference_of(found))
    x = randn(1, 5, HIDDEN)
    torch.manual_seed(0)
    usual = module.train()(x)
    torch.manual_seed(0)
    assert torch.equal(replacement(module, x), usual) and bool((usual == 0).any())
    assert torch.equal(replacement(module.eval(), x), module(x))


def test_gradients_flow_through_the_seat() -> None:
    module = build("phi3", "Phi3MLP", "Phi3Config")
    found = recognised(module)
    x = randn(2, 3, HIDDEN).requires_grad_()
    definition_kernel = seated(found, module, lambda *_: lambda both: _product(both))
    (expected,) = torch.autograd.grad(type(module).forward(module, x).sum(), x)
    for replacement in (definition_kernel, seated(found, module, lambda *_: None)):
        (gradient,) = torch.autograd.grad(replacement(module, x).sum(), x)
        assert torch.allclose(gradient, expected)


def _product(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def test_the_module_is_left_alone() -> None:
    module = build("gemma", "GemmaMLP", "GemmaConfig")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    children = dict(module.named_modules())
    attributes = {name: set(vars(child)) for name, child in children.items()}
    recognised(module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert dict(module.named_modules()) == children and not module.training
    assert all(set(vars(child)) == attributes[name] for name, child in module.named_modules())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert isinstance(recognised(copy.deepcopy(module)), Recognition)


def test_fresh_inputs_and_oracle() -> None:
    (definition,) = recognised(build("qwen3", "Qwen3MLP", "Qwen3Config"), torch.bfloat16).definitions
    inputs = FAMILY.inputs(definition, {"batch_size": 2, "seq_len": 3}, torch.Generator().manual_seed(0), "normal")
    assert [x.shape for x in inputs] == [(2, 3, INTER)] * 2 and all(x.dtype == torch.bfloat16 for x in inputs)
    gate, up = (x.double() for x in inputs)
    assert torch.allclose(run_oracle(definition, inputs)[0], nn.functional.silu(gate) * up)
    assert FAMILY.work(inputs) == 6
    assert len(FAMILY.axis_points(definition, [{"batch_size": 1, "seq_len": 5}])) >= 8


def test_rows_without_a_sequence() -> None:
    module = build("qwen3", "Qwen3MLP", "Qwen3Config")
    found = FAMILY.recognise(SITE, [record(module, randn(6, HIDDEN))])
    assert isinstance(found, Recognition)
    assert found.definitions[0].inputs["gate"].shape == ("num_rows", "intermediate_size")
    seen: list[Any] = []
    replacement = seated(found, module, reference_of(found, seen))
    for x in (randn(3, HIDDEN), randn(1, 3, HIDDEN)):
        assert torch.equal(replacement(module, x), type(module).forward(module, x))
    assert len(seen) == 1  # rows with a sequence belong to another Definition


@pytest.mark.parametrize("name", INLINE)
def test_the_seat_knows_the_inline_activations(name: str) -> None:
    """They are written twice: in the seat, which stands alone, and in the table."""
    made = type("Made", (Gated,), {"act": lambda self, x: eval(ACTIVATIONS[name], {"torch": torch, "x": x})})
    module = randomised(made())
    found = recognised(module)
    assert found.semantics["activation"] == name and found.semantics["act"] is None
    x = randn(2, 3, HIDDEN)
    assert torch.equal(seated(found, module, lambda *_: None)(module, x), module(x))


def test_an_inline_activation_that_the_seat_lacks_is_rejected() -> None:
    made = type("Made", (Gated,), {"act": lambda self, x: torch.nn.functional.hardswish(x)})
    found = FAMILY.recognise(SITE, [record(randomised(made()), randn(1, 5, HIDDEN))])
    assert isinstance(found, Rejection) and "hardswish" in found.reason


def test_the_factory_stands_alone() -> None:
    """Its source is written into emitted files, which have `torch` and annotations only."""
    source = "from __future__ import annotations\n\nimport torch\n\n\n" + inspect.getsource(gated_mlp_seat)
    namespace: dict[str, Any] = {}
    exec(compile(source, "<emitted>", "exec"), namespace)
    module = randomised(Gated())
    found = recognised(module)
    constants = FAMILY.seat(found.semantics).constants
    x = randn(1, 5, HIDDEN)
    for select in (reference_of(found), lambda *_: None):
        assert torch.equal(namespace["gated_mlp_seat"](Gated.forward, select, **constants)(module, x), module(x))
