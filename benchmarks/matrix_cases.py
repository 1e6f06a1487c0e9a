"""Attention, linear layers at decode, and what stands around them: ours, torch, TileGym and Liger."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from measuring import BF16, EPS, MODELS, Case, Model, Run, drawn
from memory_cases import rms_eager, rms_exact, rope_eager
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelgraft.kernels.argmax import argmax
from kernelgraft.kernels.attention_decode import attention_decode
from kernelgraft.kernels.attention_prefill import attention_prefill
from kernelgraft.kernels.cross_entropy import cross_entropy
from kernelgraft.kernels.linear_decode import gated_linear_decode, linear_decode
from kernelgraft.kernels.qk_norm_rope import qk_norm_rope
from kernelgraft.kernels.rms_norm import rms_norm
from kernelgraft.kernels.rope import rope
from kernelgraft.kernels.sampling import sample_top_k

BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CACHED = 4096
"""Keys at decode."""
VOCABULARY = 128256
LONG = ((1, 512), (1, 32768), (8, 512), (8, 4096), (8, 32768), (32, 4096), (32, 32768))
"""Batch sizes and keys of the decode cases with 32 heads of queries and 8 of keys, 128 channels each."""


def cases(name: str, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Iterator[Case]:
    """The cases of one model and regime."""
    model = MODELS[name]
    if model.head_norm:
        yield norm_rope_case(name, model, regime, batch, length, peers)
    yield attention_case(name, model, regime, batch, length, CACHED, peers)
    if regime == "decode":
        yield from linear_cases(name, model)
    if name == "llama-3.2-1b":
        if length == 1:
            yield argmax_case(name, regime, batch)
            yield sampling_case(name, regime, batch)
        else:
            yield cross_entropy_case(name, model, regime, length, peers)


def long_caches(peers: dict[str, Any]) -> Iterator[Case]:
    """Attention at decode over more and fewer keys."""
    for batch, keys in LONG:
        yield attention_case("llama-3.1-8b", MODELS["llama-3.1-8b"], f"decode {batch}x{keys}", batch, 1, keys, peers)


def attention_case(
    name: str, model: Model, regime: str, batch: int, length: int, cached: int, peers: dict[str, Any]
) -> Case:
    heads, kv_heads, width = model.heads, model.kv_heads, model.head_dim
    keys = length if length > 1 else cached
    causal, scaling = length > 1, width**-0.5

    def make() -> tuple[torch.Tensor, ...]:
        q = drawn(batch, length, heads, width).transpose(1, 2)
        return q, drawn(batch, kv_heads, keys, width), drawn(batch, kv_heads, keys, width)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            found = functional.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True
            )
        return found.transpose(1, 2)

    ours = attention_prefill if causal else attention_decode
    options: dict[str, Any] = {"scaling": scaling, "causal": True} if causal else {"scaling": scaling}
    contestants: dict[str, Run] = {"kernelgraft": lambda q, k, v: ours(q, k, v, **options)}
    for label, backend in BACKENDS.items():
        contestants[label] = lambda q, k, v, backend=backend: through(backend, q, k, v, causal)
    if tilegym := peers.get("tilegym"):
        if causal:
            contestants["tilegym"] = lambda q, k, v: tilegym.ops.fmha(
                q, k, v, scaling=scaling, is_causal=True
            ).transpose(1, 2)
        else:
            contestants["tilegym"] = lambda q, k, v: tilegym.ops.fmha_decode(q, k, v, scaling).transpose(1, 2)
    flops = 4.0 * batch * heads * length * keys * width / (2 if causal else 1)
    kernel = "attention_prefill" if causal else "attention_decode"
    written = 2 * batch * length * heads * width
    # Means over thousands of values are small beside the values that are rounded on the way.
    return Case(kernel, name, regime, make, exact, contestants, written, flops=flops, roundings=16)


def through(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Torch's attention by one of its implementations, in the layout that models take it in."""
    with sdpa_kernel(backend):
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return found.transpose(1, 2)


def linear_cases(name: str, model: Model) -> Iterator[Case]:
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    shapes = {
        "qkv": (model.hidden, heads),
        "gate_up": (model.hidden, 2 * model.intermediate),
        "down": (model.intermediate, model.hidden),
    }
    if name == "llama-3.2-1b":
        shapes["lm_head"] = (model.hidden, VOCABULARY)
    for label, (width, outputs) in shapes.items():
        for rows in (1, 4, 16) if name == "llama-3.1-8b" else (1,):
            yield linear_case(name, f"{label} {width}→{outputs}, {rows} rows", width, outputs, rows)
    yield fused_case(name, model)


def linear_case(name: str, regime: str, width: int, outputs: int, rows: int) -> Case:
    contestants: dict[str, Run] = {"kernelgraft": linear_decode, "torch": functional.linear}
    if importlib.util.find_spec("kernelgraft.kernels.linear_decode_triton"):
        from kernelgraft.kernels.linear_decode_triton import linear_decode as twin

        contestants["kernelgraft triton"] = twin
    return Case(
        "linear_decode",
        name,
        regime,
        lambda: (drawn(rows, width), drawn(outputs, width) * width**-0.5),
        lambda x, w: functional.linear(x.double(), w.double()),
        contestants,
        2 * rows * outputs,
    )


def fused_case(name: str, model: Model) -> Case:
    """A norm, two projections and their activation product in one launch, or one after the other."""
    act = model.activation
    from kernelgraft.kernels.act_and_mul import ACTIVATIONS, act_and_mul

    function = ACTIVATIONS[act]

    def apart(x: torch.Tensor, n: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = rms_norm(x, n, EPS)
        return act_and_mul(functional.linear(y, gate), functional.linear(y, up), act)

    def eager(x: torch.Tensor, n: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = rms_eager(x, n)
        return function(functional.linear(y, gate)) * functional.linear(y, up)

    def exact(x: torch.Tensor, n: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = rms_exact(x, n)
        return function(functional.linear(y, gate.double())) * functional.linear(y, up.double())

    return Case(
        "gated_linear",
        name,
        "decode, norm + gate and up",
        lambda: (
            drawn(1, 1, model.hidden),
            drawn(model.hidden),
            drawn(model.intermediate, model.hidden) * model.hidden**-0.5,
            drawn(model.intermediate, model.hidden) * model.hidden**-0.5,
        ),
        exact,
        {
            "kernelgraft": lambda x, n, gate, up: gated_linear_decode(x, gate, up, act, norm_weight=n, eps=EPS),
            "kernelgraft apart": apart,
            "torch": eager,
        },
        2 * model.intermediate,
        roundings=10,
    )


def norm_rope_case(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        angles = torch.rand(1, length, model.head_dim // 2, device="cuda") * 6.28
        angles = torch.cat((angles, angles), -1)
        q, k = (drawn(batch, length, heads, model.head_dim) for heads in (model.heads, model.kv_heads))
        return q, k, drawn(model.head_dim), drawn(model.head_dim), angles.cos().to(BF16), angles.sin().to(BF16)

    def exact(q: torch.Tensor, k: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *tables: torch.Tensor) -> Any:
        normed = (rms_exact(q, a).transpose(1, 2), rms_exact(k, b).transpose(1, 2))
        return rope_eager(*normed, *(t.double() for t in tables))

    def apart(norm: Run, turn: Run) -> Run:
        def run(q: torch.Tensor, k: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *tables: torch.Tensor) -> Any:
            return turn(norm(q, a).transpose(1, 2), norm(k, b).transpose(1, 2), *tables)

        return run

    contestants: dict[str, Run] = {
        "kernelgraft": lambda q, k, a, b, cos, sin: qk_norm_rope(q, k, a, b, cos, sin, EPS),
        "kernelgraft apart": apart(lambda x, w: rms_norm(x, w, EPS, cast="before_weight"), rope),
        "torch": apart(rms_eager, rope_eager),
    }
    if liger := peers.get("liger"):
        contestants["liger"] = apart(lambda x, w: liger["rms"](x, w, EPS, 0.0, "llama", False), liger["rope"])
    elements = batch * length * (model.heads + model.kv_heads) * model.head_dim
    return Case("qk_norm_rope", name, regime, make, exact, contestants, 2 * elements, roundings=10)


def argmax_case(name: str, regime: str, rows: int) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        logits = drawn(rows, VOCABULARY)
        places = torch.randint(0, VOCABULARY, (rows, 1), device="cuda")
        return (logits.scatter_add_(1, places, torch.full_like(places, 16, dtype=BF16)),)  # one maximum a row

    return Case(
        "argmax",
        name,
        regime,
        make,
        lambda x: x.argmax(-1),
        {"kernelgraft": argmax, "torch": lambda x: x.argmax(-1)},
        8 * rows,
    )


TOP_K, TEMPERATURE, TOP_P = 50, 0.7, 0.9


def sampling_case(name: str, regime: str, rows: int) -> Case:
    """A token of the nucleus of the largest logits: by given uniform numbers, or drawn by torch."""

    def shares(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, tokens = logits.topk(TOP_K, dim=-1)
        found = torch.softmax(scores / TEMPERATURE, -1)
        return torch.where(found.cumsum(-1) - found < TOP_P, found, 0.0), tokens

    def by_numbers(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        found, tokens = shares(logits)
        before = found.cumsum(-1) - found
        place = ((found > 0) & (before <= u.unsqueeze(-1) * found.sum(-1, keepdim=True))).sum(-1, keepdim=True) - 1
        return tokens.gather(-1, place).squeeze(-1)

    def drawn_by_torch(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        found, tokens = shares(logits)
        return tokens.gather(-1, torch.multinomial(found, 1)).squeeze(-1)

    return Case(
        "sampling",
        name,
        regime,
        lambda: (torch.randn(rows, VOCABULARY, device="cuda") * 2, torch.rand(rows, device="cuda")),
        lambda logits, u: by_numbers(logits.double(), u.double()),
        {
            "kernelgraft": lambda logits, u: sample_top_k(logits, u, k=TOP_K, temperature=TEMPERATURE, top_p=TOP_P),
            "torch": by_numbers,
            "torch multinomial": drawn_by_torch,
        },
        8 * rows,
        random=frozenset({"torch multinomial"}),
    )


def cross_entropy_case(name: str, model: Model, regime: str, tokens: int, peers: dict[str, Any]) -> Case:
    """Loss and gradients of hidden states and head."""

    def make() -> tuple[torch.Tensor, ...]:
        labels = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
        return drawn(tokens, model.hidden), drawn(VOCABULARY, model.hidden) * model.hidden**-0.5, labels

    def with_gradients(loss: Run) -> Run:
        def run(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
            with torch.enable_grad():
                h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
                value = loss(h, w, labels)
                return (value.detach(), *torch.autograd.grad(value, (h, w)))

        return run

    def plain(h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional.linear(h, w).float(), labels)

    contestants: dict[str, Run] = {"kernelgraft": with_gradients(cross_entropy), "torch": with_gradients(plain)}
    if liger := peers.get("liger"):
        contestants["liger"] = with_gradients(lambda h, w, labels: liger["cross_entropy"](h, w, labels)[0])
    flops = 8.0 * tokens * VOCABULARY * model.hidden
    return Case(
        "cross_entropy",
        name,
        regime,
        make,
        lambda h, w, labels: with_gradients(plain)(h.double(), w.double(), labels),
        contestants,
        2 * (tokens + VOCABULARY) * model.hidden,
        flops=flops,
        peak=True,
    )


def calls() -> dict[str, Run]:
    """Ops at decode size, for their host cost."""
    q, k = drawn(1, 1, 16, 128), drawn(1, 1, 8, 128)
    weight, cos, sin = drawn(128), drawn(1, 1, 128), drawn(1, 1, 128)
    x, square = drawn(1, 1, 2048), drawn(2048, 2048)
    query, key, value = drawn(1, 32, 1, 128), drawn(1, 8, 64, 128), drawn(1, 8, 64, 128)
    logits, u = drawn(1, VOCABULARY), torch.rand(1, device="cuda")
    return {
        "qk_norm_rope": lambda: qk_norm_rope(q, k, weight, weight, cos, sin, EPS),
        "linear_decode": lambda: linear_decode(x, square),
        "attention_decode": lambda: attention_decode(query, key, value, scaling=0.1),
        "argmax": lambda: argmax(logits),
        "sampling": lambda: sample_top_k(logits, u, k=TOP_K, temperature=TEMPERATURE, top_p=TOP_P),
    }
