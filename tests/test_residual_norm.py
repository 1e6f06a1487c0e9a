"""Residual additions next to a norm, in layers made by hand, in both orders."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernelgraft.families import Call, Recognition, Rejection, get
from kernelgraft.families.reference import run_oracle, run_reference
from kernelgraft.records import Site, SourceRef

FAMILY = get("residual_norm")
SIZE = 48
DTYPES = [torch.float32, torch.bfloat16]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.norm = norm


class HalfRow(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states[..., : SIZE // 2].repeat_interleave(2, -1))


def pre(module: Any, residual: torch.Tensor, hidden_states: torch.Tensor) -> Any:
    total = residual + hidden_states
    return total, module.part.norm(total)


def post(module: Any, residual: torch.Tensor, hidden_states: torch.Tensor) -> Any:
    return residual + module.part.norm(hidden_states)


ORIGINALS: dict[str, Any] = {"pre": pre, "post": post}


def block_of(norm: nn.Module, dtype: torch.dtype = torch.float32) -> Block:
    generator = torch.Generator().manual_seed(3)
    for parameter in norm.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) + 0.2
    return Block(norm).to(dtype).eval()


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ask(block: Block, order: str, dtype: torch.dtype = torch.float32, original: Any = None, **shape: Any) -> Any:
    original = original or ORIGINALS[order]
    site = Site(
        kind="statement",
        path="layers.*",
        instances=("layers.0",),
        class_name="Block",
        symbol="part.norm",
        detail={"order": order, "index": 3},
        source=SourceRef(file="some.py", first_line=1, last_line=9, sha256="0" * 64),
    )
    calls = []
    for seed, length in enumerate((5, 1)):
        pair = (rows(1, length, SIZE, dtype=dtype, seed=seed), rows(1, length, SIZE, dtype=dtype, seed=seed + 10))
        with torch.no_grad():
            output = original(block, *pair)
        calls.append(Call("layers.0", block, pair, {}, output, "prefill", original))
    return FAMILY.recognise(site, calls)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize(
    ("make", "family", "offset"),
    [
        (lambda: LlamaRMSNorm(SIZE, eps=1e-3), "rms_norm", 0),
        (lambda: GemmaRMSNorm(SIZE), "rms_norm", 1),
        (lambda: nn.LayerNorm(SIZE), "layer_norm", 0),
    ],
    ids=["cast before the weight", "one plus weight", "layer norm"],
)
def test_both_orders_are_recognised_bit_for_bit(
    make: Any, family: str, offset: int, order: str, dtype: torch.dtype
) -> None:
    block = block_of(make(), dtype)
    found = ask(block, order, dtype)
    assert isinstance(found, Recognition), found
    assert found.semantics["order"] == order and found.semantics["path"] == "part.norm"
    assert (found.semantics["norm"]["family"], found.semantics["norm"]["offset"]) == (family, offset)
    (definition,) = found.definitions
    assert definition.meta.reference_error == 0.0
    assert list(definition.outputs) == (["sum", "normed"] if order == "pre" else ["sum"])
    residual, hidden = rows(2, 7, SIZE, dtype=dtype, seed=20) * 0.01, rows(2, 7, SIZE, dtype=dtype, seed=21) * 0.01
    with torch.no_grad():
        expected = ORIGINALS[order](block, residual, hidden)
    vectors = [p.detach() for p in block.parameters()]
    actual = run_reference(definition, [residual, hidden, *vectors])
    expected = expected if order == "pre" else (expected,)
    assert len(actual) == len(expected) and all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_orders_and_norms_have_definitions_of_their_own() -> None:
    blocks = [block_of(LlamaRMSNorm(SIZE)), block_of(GemmaRMSNorm(SIZE))]
    names = {ask(block, order).definitions[0].name for block in blocks for order in ("pre", "post")}
    assert len(names) == 4


def test_a_norm_that_no_family_serves_is_rejected_by_name() -> None:
    found = ask(block_of(HalfRow(SIZE)), "pre")
    assert isinstance(found, Rejection) and "`part.norm`" in found.reason


def test_a_call_that_is_no_norm_gets_no_message() -> None:
    assert ask(block_of(nn.SiLU()), "pre") is None


def test_statements_that_compute_something_else_are_rejected() -> None:
    def scaled(module: Any, residual: torch.Tensor, hidden_states: torch.Tensor) -> Any:
        total = residual + 0.5 * hidden_states
        return total, module.part.norm(total)

    found = ask(block_of(LlamaRMSNorm(SIZE)), "pre", original=scaled)
    assert isinstance(found, Rejection) and "captured output" in found.reason


def seated(block: Block, order: str) -> tuple[Any, list[Any]]:
    """The seat with a kernel that says it was there, and the inputs that it got."""
    seat = FAMILY.seat(ask(block, order).semantics)
    asked: list[Any] = []

    def select(*inputs: Any) -> Any:
        asked.append(inputs)
        return lambda *_: "kernel"

    return seat.factory(ORIGINALS[order], select, **seat.constants), asked


@pytest.mark.parametrize("order", ["pre", "post"])
def test_the_seat_reads_the_norm_at_each_call(order: str) -> None:
    block = block_of(LlamaRMSNorm(SIZE))
    statements, asked = seated(block, order)
    residual, hidden = rows(1, 5, SIZE), rows(1, 5, SIZE, seed=1)
    assert statements(block, residual, hidden) == "kernel"
    block.part.norm.weight = nn.Parameter(torch.ones(SIZE))
    assert statements(block, residual, hidden) == "kernel"
    assert all(r is residual and h is hidden for r, h, _ in asked) and asked[1][2] is block.part.norm.weight
    seat = FAMILY.seat(ask(block, order).semantics)
    nothing = seat.factory(ORIGINALS[order], lambda *_: None, **seat.constants)
    with torch.no_grad():
        actual, expected = nothing(block, residual, hidden), ORIGINALS[order](block, residual, hidden)
    if order == "post":
        actual, expected = (actual,), (expected,)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def add_hook(block: Block) -> None:
    block.part.norm.register_forward_hook(lambda *_: None)


def add_pre_hook(block: Block) -> None:
    block.part.norm.register_forward_pre_hook(lambda *_: None)


def add_backward_hook(block: Block) -> None:
    block.part.norm.register_full_backward_hook(lambda *_: None)


def add_accelerate(block: Block) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(block.part.norm, hooks.ModelHook())


def add_foreign_forward(block: Block) -> None:
    block.part.norm.forward = types.MethodType(lambda self, x: x, block.part.norm)


def add_wrapper(block: Block) -> None:
    block.part.norm = Wrapper(block.part.norm)


def change_eps(block: Block) -> None:
    block.part.norm.variance_epsilon = 0.5


CHANGES = [
    add_hook, add_pre_hook, add_backward_hook, add_accelerate, add_foreign_forward, add_wrapper, change_eps
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_that_is_not_plain_any_more_runs_as_it_is(change: Any) -> None:
    block = block_of(LlamaRMSNorm(SIZE))
    statements, asked = seated(block, "pre")
    change(block)
    residual, hidden = rows(1, 5, SIZE), rows(1, 5, SIZE, seed=1)
    actual, expected = statements(block, residual, hidden), pre(block, residual, hidden)
    assert not asked and all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_a_global_hook_sees_the_norm() -> None:
    block = block_of(LlamaRMSNorm(SIZE))
    statements, asked = seated(block, "pre")
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    try:
        statements(block, rows(1, 5, SIZE), rows(1, 5, SIZE))
    finally:
        handle.remove()
    assert seen == ["LlamaRMSNorm"] and not asked


def test_a_forward_that_is_our_own_patch_is_no_obstacle() -> None:
    block = block_of(LlamaRMSNorm(SIZE))
    statements, asked = seated(block, "pre")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__kernelgraft_sites__ = ("layers.*.norm",)  # type: ignore[attr-defined]
    block.part.norm.forward = types.MethodType(forward, block.part.norm)
    assert statements(block, rows(1, 5, SIZE), rows(1, 5, SIZE)) == "kernel" and len(asked) == 1


def test_an_accelerate_hook_over_our_own_patch_is_seen() -> None:
    """Accelerate's wrapper copies the attributes of the function under it, our mark among them."""
    hooks = pytest.importorskip("accelerate.hooks")
    block = block_of(LlamaRMSNorm(SIZE))
    statements, asked = seated(block, "post")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__kernelgraft_sites__ = ("layers.*.norm",)  # type: ignore[attr-defined]
    block.part.norm.forward = types.MethodType(forward, block.part.norm)
    hooks.add_hook_to_module(block.part.norm, hooks.ModelHook())
    residual, hidden = rows(1, 5, SIZE), rows(1, 5, SIZE, seed=1)
    assert torch.equal(statements(block, residual, hidden), residual + hidden) and not asked


@pytest.mark.parametrize("distribution", ["normal", "zeros_rows", "huge", "inf", "nan"])
def test_inputs_fit_the_definition(distribution: Any) -> None:
    definition = ask(block_of(GemmaRMSNorm(SIZE)), "pre").definitions[0]
    generator = torch.Generator().manual_seed(0)
    residual, hidden, weight = FAMILY.inputs(definition, {"batch_size": 2, "seq_len": 3}, generator, distribution)
    assert residual.shape == hidden.shape == (2, 3, SIZE) and not torch.equal(residual, hidden)
    assert weight.abs().max() <= 0.5, "one is added to it"
    if distribution in ("inf", "nan"):
        assert residual.isfinite().all() and (~hidden.isfinite()).sum() == 1
    if distribution == "zeros_rows":
        total, normed = run_reference(definition, [residual, hidden, weight])
        assert (total == 0).all(-1).any() and normed.isfinite().all()


def test_the_oracle_is_in_float64() -> None:
    definition = ask(block_of(LlamaRMSNorm(SIZE), torch.bfloat16), "pre", torch.bfloat16).definitions[0]
    generator = torch.Generator().manual_seed(0)
    residual, hidden, weight = FAMILY.inputs(definition, {"batch_size": 1, "seq_len": 9}, generator, "normal")
    total = residual.double() + hidden.double()
    normed = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    oracle = run_oracle(definition, [residual, hidden, weight])
    assert torch.equal(oracle[0], total) and torch.allclose(oracle[1], normed, rtol=1e-12, atol=0)
