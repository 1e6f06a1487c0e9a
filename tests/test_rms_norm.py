"""RMS norms: real classes and made-up ones are recognised by behaviour, told apart, and served through their seat."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from kernelgraft.families import Call, Recognition, Rejection, get
from kernelgraft.families.reference import run_oracle, run_reference
from kernelgraft.records import Site, SourceRef

FAMILY = get("rms_norm")
SIZE = 48
DISTRIBUTIONS = ("normal", "uniform_2_4", "tiny", "huge", "zeros_rows", "ramp", "binary", "inf", "nan")


def build(model_type: str, name: str, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    return randomise(getattr(module, name)(*args, **kwargs), dtype)


def randomise(norm: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Every parameter away from zero and one."""
    generator = torch.Generator().manual_seed(3)
    for parameter in norm.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 0.2
    return norm.to(dtype).eval()


def site_of(norm: nn.Module) -> Site:
    return Site(
        kind="module",
        path="layers.*.norm",
        instances=("layers.0.norm",),
        class_name=type(norm).__qualname__,
        source=SourceRef(file="some.py", first_line=1, last_line=9, sha256="0" * 64),
    )


def call_of(norm: nn.Module, x: torch.Tensor, **changes: Any) -> Call:
    original = type(norm).forward
    with torch.no_grad():
        output = original(norm, x.clone())
    values: dict[str, Any] = {
        "instance": "layers.0.norm",
        "module": norm,
        "args": (x,),
        "kwargs": {},
        "output": output,
        "regime": "prefill",
        "original": original,
    }
    return Call(**(values | changes))


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def recognised(norm: nn.Module, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Recognition:
    calls = [call_of(norm, rows(*shape, dtype=dtype, seed=i)) for i, shape in enumerate(shapes or ((1, 5, SIZE),))]
    found = FAMILY.recognise(site_of(norm), calls)
    assert isinstance(found, Recognition), found
    return found


class Plain(nn.Module):
    """A norm to vary: each test overrides one thing."""

    def __init__(self, size: int = SIZE, some_number: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(size) + 0.5)
        self.some_number = some_number
        self.other_number = 0.75
        self.layer_index = 0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.some_number)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return (self.gain * self.scaled(h)).to(h.dtype)


REAL = [
    ("llama", "LlamaRMSNorm", (SIZE,), 0, "before_weight"),
    ("qwen3", "Qwen3RMSNorm", (SIZE, 1e-5), 0, "before_weight"),
    ("gemma", "GemmaRMSNorm", (SIZE,), 1, "after_weight"),
    ("gemma3", "Gemma3RMSNorm", (SIZE, 1e-4), 1, "after_weight"),
    ("gpt_oss", "GptOssRMSNorm", (SIZE,), 0, "after_weight"),
    ("t5", "T5LayerNorm", (SIZE,), 0, "weight_dtype"),
    ("olmo2", "Olmo2RMSNorm", (SIZE,), 0, "after_weight"),
    ("llama4", "Llama4TextRMSNorm", (SIZE,), 0, "before_weight"),
    ("llama4", "Llama4TextL2Norm", (1e-3,), 0, "after_weight"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("model_type", "name", "args", "offset", "cast"), REAL, ids=[c[1] for c in REAL])
def test_real_classes_are_recognised_bit_for_bit(
    model_type: str, name: str, args: tuple[Any, ...], offset: int, cast: str, dtype: torch.dtype
) -> None:
    norm = build(model_type, name, *args, dtype=dtype)
    found = recognised(norm, (1, 5, SIZE), (2, 1, SIZE), dtype=dtype)
    assert (found.semantics["offset"], found.semantics["cast"]) == (offset, cast)
    assert found.semantics["eps"] == (args[-1] if isinstance(args[-1], float) else found.semantics["eps"])
    (definition,) = found.definitions
    assert definition.meta.reference_error == 0.0
    x = rows(3, 7, SIZE, dtype=dtype, seed=9) * 0.01
    with torch.no_grad():
        expected = norm(x)
    actual = run_reference(definition, [x, *(p.detach() for p in norm.parameters())])[0]
    assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_the_live_values_of_the_weight_do_not_matter() -> None:
    """With a weight of one, `weight * x` and `(1 + weight) * x` of a zero weight look alike."""
    llama, gemma = build("llama", "LlamaRMSNorm", SIZE), build("gemma", "GemmaRMSNorm", SIZE)
    llama.weight.data.fill_(1.0)
    gemma.weight.data.fill_(0.0)
    assert torch.allclose(llama(rows(2, SIZE)), gemma(rows(2, SIZE)))
    first, second = recognised(llama), recognised(gemma)
    assert (first.semantics["offset"], second.semantics["offset"]) == (0, 1)
    assert first.definitions[0].meta.fingerprint != second.definitions[0].meta.fingerprint
    assert first.definitions[0].name != second.definitions[0].name


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 3e-5, 0.02])
def test_eps_is_found_under_any_name(eps: float) -> None:
    found = recognised(Plain(some_number=eps))
    assert found.semantics["eps"] == eps
    assert found.semantics["eps_attribute"] == "some_number"
    assert found.semantics["weight"] == "gain" and found.semantics["argument"] == "h"


def test_eps_that_is_no_attribute_is_solved() -> None:
    class Literal(Plain):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 3e-7)

    found = recognised(Literal())
    assert found.semantics["eps"] == 3e-7 and found.semantics["eps_attribute"] is None


def test_an_attribute_with_the_value_of_eps_that_is_not_read_is_not_taken_for_it() -> None:
    class Literal(Plain):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)

    assert recognised(Literal(some_number=1e-5)).semantics["eps_attribute"] is None


def test_where_one_is_added_to_the_weight_is_told() -> None:
    class OwnDtype(Plain):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return ((1.0 + self.gain) * self.scaled(h)).to(h.dtype)

    class Float32(Plain):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return ((1.0 + self.gain.float()) * self.scaled(h)).to(h.dtype)

    assert recognised(OwnDtype()).semantics["offset_dtype"] == "weight"
    assert recognised(Float32()).semantics["offset_dtype"] == "float32"


def test_arithmetic_is_told() -> None:
    class Division(Plain):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() / torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + self.some_number)

    class NoUpcast(Plain):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.some_number)

    class Factor(Plain):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.some_number)
            return x * factor.to(x.dtype)

    assert recognised(Division()).semantics["inverse"] == "division"
    assert recognised(NoUpcast()).semantics["cast"] == "none"
    assert recognised(Factor()).semantics["cast"] == "factor"
    torch_norm = recognised(randomise(nn.RMSNorm(SIZE, eps=1e-5)))
    assert torch_norm.semantics["form"] == "functional" and torch_norm.semantics["eps_attribute"] == "eps"
    unset = recognised(randomise(nn.RMSNorm(SIZE)))
    assert unset.semantics["eps"] == torch.finfo(torch.float32).eps


def test_without_a_weight() -> None:
    found = recognised(build("llama4", "Llama4TextL2Norm", 1e-5))
    assert not found.semantics["with_weight"] and found.semantics["weight"] is None
    assert list(found.definitions[0].inputs) == ["hidden_states"]


def test_a_weight_that_is_a_buffer() -> None:
    class Buffered(Plain):
        def __init__(self) -> None:
            super().__init__()
            del self.gain
            self.register_buffer("gain", torch.zeros(SIZE))

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return ((1.0 + self.gain) * self.scaled(h)).to(h.dtype)

    semantics = recognised(Buffered()).semantics
    assert semantics["weight"] == "gain"
    assert semantics["offset_dtype"] == "weight", "which zeros would not show"


def test_a_vector_that_is_not_read_is_no_weight() -> None:
    class Unread(Plain):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return self.scaled(h).to(h.dtype)

    class UnreadBuffer(Unread):
        def __init__(self) -> None:
            super().__init__()
            del self.gain
            self.register_buffer("dummy", torch.ones(3 * SIZE))

    assert not recognised(Unread()).semantics["with_weight"]
    assert not recognised(UnreadBuffer()).semantics["with_weight"]


def test_float32_weights_in_a_bfloat16_model() -> None:
    norm = build("llama", "LlamaRMSNorm", SIZE)
    found = recognised(norm, (1, 5, SIZE), dtype=torch.bfloat16)
    (definition,) = found.definitions
    dtypes = [spec.dtype for spec in (*definition.inputs.values(), *definition.outputs.values())]
    assert dtypes == ["bfloat16", "float32", "float32"]


class HalfRow(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        half = x[..., : x.shape[-1] // 2].float()
        return x.float() * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.some_number)


class Clamped(Plain):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h).clamp(-7, 7)  # only a row with an outlier gets there


class Sum(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.some_number)


class EpsOutside(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.some_number)


class Shifted(Plain):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h) + 1.0


class Grouped(Plain):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x.view(*x.shape[:-1], 4, -1)).flatten(-2)


@pytest.mark.parametrize("twisted", [HalfRow, Clamped, Sum, EpsOutside, Shifted, Grouped])
def test_a_norm_with_a_twist_is_rejected_with_a_reason(twisted: type[Plain]) -> None:
    norm = twisted()
    found = FAMILY.recognise(site_of(norm), [call_of(norm, rows(1, 5, SIZE))])
    assert isinstance(found, Rejection) and found.reason


@pytest.mark.parametrize("other", [nn.SiLU(), nn.Identity(), nn.Softmax(-1), nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)])
def test_what_is_no_rms_norm_gets_no_message(other: nn.Module) -> None:
    assert FAMILY.recognise(site_of(other), [call_of(other, rows(1, 5, SIZE))]) is None
    assert FAMILY.recognise(site_of(other), []) is None


def test_a_second_input_is_rejected() -> None:
    class Gated(Plain):
        def forward(self, h: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(h) if gate is None else super().forward(h * gate.sigmoid())

    norm, x = Gated(), rows(1, 5, SIZE)
    found = FAMILY.recognise(site_of(norm), [call_of(norm, x, args=(x, x), output=norm(x, x).detach())])
    assert isinstance(found, Rejection) and "gated" in found.reason


def test_a_call_whose_output_is_another_is_rejected() -> None:
    norm, x = Plain(), rows(1, 5, SIZE)
    call = call_of(norm, x)
    wrong = call_of(norm, x, output=call.output * 1.01)
    found = FAMILY.recognise(site_of(norm), [call, wrong])
    assert isinstance(found, Rejection) and "captured output of `layers.0.norm`" in found.reason


def test_weights_that_are_not_there_are_rejected() -> None:
    norm, x = Plain(), rows(1, 5, SIZE)
    call = call_of(norm, x)
    norm.to("meta")
    found = FAMILY.recognise(site_of(norm), [call])
    assert isinstance(found, Rejection) and "cannot be run" in found.reason


def test_the_live_module_is_neither_called_nor_changed() -> None:
    norm = build("llama", "LlamaRMSNorm", SIZE)
    called: list[Any] = []
    norm.register_forward_hook(lambda *_: called.append(1))
    before = {k: (id(v), v.clone()) for k, v in norm.state_dict(keep_vars=True).items()}
    attributes = dict(vars(norm))
    assert isinstance(FAMILY.recognise_module(norm, rows(1, 5, SIZE)), dict)
    assert not called
    after = norm.state_dict(keep_vars=True)
    assert all(id(after[k]) == i and torch.equal(after[k], v) for k, (i, v) in before.items())
    assert vars(norm) == attributes and all(p.requires_grad for p in norm.parameters())


def test_axes_name_the_heads_that_never_change() -> None:
    norm = build("qwen3", "Qwen3RMSNorm", 8)

    def axes(*shapes: tuple[int, ...]) -> dict[str, int | None]:
        return {name: a.value for name, a in recognised(norm, *shapes).definitions[0].axes.items()}

    assert axes((1, 5, 4, 8), (2, 1, 4, 8)) == {"batch_size": None, "seq_len": None, "num_heads": 4, "hidden_size": 8}
    swapped = axes((1, 4, 5, 8), (1, 4, 1, 8))
    assert swapped == {"batch_size": None, "num_heads": 4, "seq_len": None, "hidden_size": 8}
    assert list(swapped) == ["batch_size", "num_heads", "seq_len", "hidden_size"]
    assert axes((5, 8), (1, 8)) == {"num_rows": None, "hidden_size": 8}


def test_the_seat_maps_calls_and_falls_back() -> None:
    norm = build("llama", "LlamaRMSNorm", SIZE)
    x = rows(1, 5, SIZE)
    seat = FAMILY.seat(recognised(norm).semantics)
    originals: list[Any] = []
    asked: list[Any] = []

    def original(self: nn.Module, hidden_states: torch.Tensor, extra: int = 0) -> Any:
        originals.append(extra)
        return type(norm).forward(self, hidden_states)

    def select(*inputs: Any) -> Any:
        asked.append(inputs)
        return lambda h, w: h * 0 + w

    expected = norm(x)
    nothing = seat.factory(original, lambda *_: None, **seat.constants)
    assert torch.equal(nothing(norm, x), expected) and originals == [0]
    forward = seat.factory(original, select, **seat.constants)
    assert torch.equal(forward(norm, x), norm.weight.expand_as(x))
    assert torch.equal(forward(norm, hidden_states=x), norm.weight.expand_as(x))
    assert all(h is x and w is norm.weight for h, w in asked) and len(asked) == 2 and originals == [0]
    assert torch.equal(forward(norm, x, extra=3), expected) and originals == [0, 3]
    norm.variance_epsilon = 0.5
    assert not torch.equal(forward(norm, x), expected) and len(asked) == 2


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_inputs_fit_the_definition(distribution: Any) -> None:
    definition = recognised(build("gemma", "GemmaRMSNorm", SIZE)).definitions[0]
    generator = torch.Generator().manual_seed(0)
    x, weight = FAMILY.inputs(definition, {"batch_size": 2, "seq_len": 3}, generator, distribution)
    assert x.shape == (2, 3, SIZE) and weight.shape == (SIZE,) and x.dtype == weight.dtype == torch.float32
    assert -0.5 <= weight.min() < -0.2 and 0.2 < weight.max() <= 0.5, "one is added to it"
    output, oracle = run_reference(definition, [x, weight])[0], run_oracle(definition, [x, weight])[0]
    assert oracle.dtype == torch.float64
    if distribution not in ("inf", "nan", "huge"):
        assert torch.allclose(output.double(), oracle, rtol=1e-5, atol=1e-6)


def test_the_oracle_is_more_exact_than_the_reference() -> None:
    definition = recognised(
        build("llama", "LlamaRMSNorm", SIZE, dtype=torch.bfloat16), dtype=torch.bfloat16
    ).definitions[0]
    generator = torch.Generator().manual_seed(0)
    x, weight = FAMILY.inputs(definition, {"batch_size": 1, "seq_len": 64}, generator, "normal")
    assert weight.min() >= 0.5 and weight.max() <= 1.5
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.allclose(run_oracle(definition, [x, weight])[0], exact, rtol=1e-12, atol=0)
    assert (run_reference(definition, [x, weight])[0].double() - exact).abs().max() > 1e-4
