"""Layer norms: real classes and made-up ones are recognised by behaviour and served through their seat."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernelgraft.families import Call, Recognition, Rejection, get
from kernelgraft.families.reference import run_oracle, run_reference
from kernelgraft.records import Site, SourceRef

FAMILY = get("layer_norm")
SIZE = 48


def build(model_type: str, name: str, *args: Any, **kwargs: Any) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    return getattr(module, name)(*args, **kwargs)


def randomise(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in norm.named_parameters():
        values = torch.rand(parameter.shape, generator=generator)
        parameter.data = values - 0.6 if "bias" in name else values + 0.2
    return norm.to(dtype).eval()


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) + 0.5


def ask(norm: nn.Module, *, dtype: torch.dtype = torch.float32) -> Any:
    site = Site(
        kind="module",
        path="layers.*.norm",
        instances=("layers.0.norm",),
        class_name=type(norm).__qualname__,
        source=SourceRef(file="some.py", first_line=1, last_line=9, sha256="0" * 64),
    )
    calls = []
    for seed, shape in enumerate(((1, 5, SIZE), (1, 1, SIZE))):
        x, original = rows(*shape, dtype=dtype, seed=seed), type(norm).forward
        with torch.no_grad():
            output = original(norm, x)
        calls.append(Call("layers.0.norm", norm, (x,), {}, output, "prefill", original))
    return FAMILY.recognise(site, calls)


REAL = [
    (lambda: nn.LayerNorm(SIZE), {"form": "functional", "offset": 0, "with_bias": True, "eps_attribute": "eps"}),
    (lambda: nn.LayerNorm(SIZE, bias=False, eps=1e-3), {"form": "functional", "with_bias": False, "eps": 1e-3}),
    (lambda: nn.LayerNorm(SIZE, elementwise_affine=False), {"with_weight": False, "with_bias": False}),
    (lambda: build("nemotron", "NemotronLayerNorm1P", SIZE), {"offset": 1, "offset_dtype": "weight"}),
    (
        lambda: build("cohere", "CohereLayerNorm", SIZE),
        {"form": "explicit", "cast": "after_weight", "with_bias": False},
    ),
    (lambda: build("olmo", "OlmoLayerNorm", SIZE), {"with_weight": False, "eps": 1e-5, "eps_attribute": None}),
    (
        lambda: build("deberta", "DebertaLayerNorm", SIZE),
        {"form": "explicit", "inverse": "division", "cast": "before_weight", "eps": 1e-12},
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("make", "expected"), REAL)
def test_real_classes_are_recognised_bit_for_bit(make: Any, expected: dict[str, Any], dtype: torch.dtype) -> None:
    norm = randomise(make(), dtype)
    found = ask(norm, dtype=dtype)
    assert isinstance(found, Recognition), found
    assert {k: found.semantics[k] for k in expected} == expected
    (definition,) = found.definitions
    assert definition.meta.reference_error == 0.0
    x = rows(3, 7, SIZE, dtype=dtype, seed=9) * 0.01
    with torch.no_grad():
        output = norm(x)
    assert torch.equal(run_reference(definition, [x, *(p.detach() for p in norm.parameters())])[0], output)


class Plain(nn.Module):
    """A norm to vary."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.rand(SIZE) - 0.5)  # before the weight: names and order do not say which is which
        self.alpha = nn.Parameter(torch.rand(SIZE) + 0.5)
        self.tiny = 2e-5

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        wide = h.float()
        spread = wide.var(-1, unbiased=False, keepdim=True)
        return ((wide - wide.mean(-1, keepdim=True)) * torch.rsqrt(spread + self.tiny) * self.alpha + self.beta).to(
            h.dtype
        )


class Afterwards(Plain):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(h, (SIZE,), None, None, self.tiny) * self.alpha + self.beta


def test_weight_and_bias_are_told_apart_by_what_they_do() -> None:
    found = ask(Plain())
    assert isinstance(found, Recognition), found
    assert (found.semantics["weight"], found.semantics["bias"]) == ("alpha", "beta")
    assert found.semantics["variance"] == "var" and found.semantics["eps_attribute"] == "tiny"
    assert list(found.definitions[0].inputs) == ["hidden_states", "weight", "bias"]


def test_vectors_applied_after_the_fused_function() -> None:
    assert ask(Afterwards()).semantics["form"] == "functional_plain"


class Unbiased(Plain):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        centred = h - h.mean(-1, keepdim=True)
        return centred * torch.rsqrt(h.var(-1, keepdim=True) + self.tiny) * self.alpha + self.beta


class Clamped(Plain):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h).clamp(-5, 5)


class HalfMean(Plain):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        centred = h - h[..., ::2].mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.tiny) * self.alpha


@pytest.mark.parametrize("twisted", [Unbiased, Clamped, HalfMean])
def test_a_norm_with_a_twist_is_rejected_with_a_reason(twisted: type[Plain]) -> None:
    found = ask(twisted())
    assert isinstance(found, Rejection) and found.reason


@pytest.mark.parametrize("other", [nn.Tanh(), nn.RMSNorm(SIZE), nn.GroupNorm(1, 5)])
def test_what_is_no_layer_norm_gets_no_message(other: nn.Module) -> None:
    x = rows(1, 5, SIZE)
    assert FAMILY.recognise_module(other, x) is None


def test_the_seat_gives_the_vectors_in_order_and_falls_back() -> None:
    norm = randomise(nn.LayerNorm(SIZE), torch.float32)
    x = rows(1, 5, SIZE)
    seat = FAMILY.seat(ask(norm).semantics)
    asked: list[Any] = []

    def select(*inputs: Any) -> Any:
        asked.append(inputs)
        return lambda h, w, b: h + w * b

    forward = seat.factory(nn.LayerNorm.forward, select, **seat.constants)
    wanted = x + norm.weight * norm.bias
    assert torch.equal(forward(norm, x), wanted) and torch.equal(forward(norm, input=x), wanted)
    assert all(w is norm.weight and b is norm.bias for _, w, b in asked) and len(asked) == 2
    nothing = seat.factory(nn.LayerNorm.forward, lambda *_: None, **seat.constants)
    assert torch.equal(nothing(norm, x), norm(x))
    norm.eps = 0.5
    assert torch.equal(forward(norm, x), norm(x)) and len(asked) == 2


def test_inputs_and_oracle() -> None:
    definition = ask(
        randomise(build("nemotron", "NemotronLayerNorm1P", SIZE), torch.bfloat16), dtype=torch.bfloat16
    ).definitions[0]
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = FAMILY.inputs(definition, {"batch_size": 1, "seq_len": 64}, generator, "normal")
    assert weight.abs().max() <= 0.5 and bias.abs().max() <= 0.5 and x.dtype == bias.dtype == torch.bfloat16
    wide = x.double() - x.double().mean(-1, keepdim=True)
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight.double()) + bias.double()
    assert torch.allclose(run_oracle(definition, [x, weight, bias])[0], exact, rtol=1e-9, atol=1e-9)
