"""Run TileGym's own cuTile ops on a CPU, under the interpreter, and compare them with torch.

TileGym's launchers are used as they are. Needs `pip install --no-deps tilegym==1.5.1` beside cuda-tile (into any
folder on PYTHONPATH). Prints one line for each case; `--json FILE` writes them too. Exit code 1 if a verdict is not
the expected one: among the cases is a fault of TileGym's that the interpreter has to find (`wrong` is expected there).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TILEGYM_DISABLE_AUTOTUNE", "1")
os.environ.setdefault("TILEGYM_LOG_LEVEL", "ERROR")

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelgraft.cutile import interpreted
from kernelgraft.errors import KernelFault

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 8e-2}
"""Allowed error relative to the largest value of the reference."""
TF32 = 2e-3
"""The same for float32 operands that a kernel rounds to tf32."""

Outputs = list[tuple[Tensor, Tensor]]


@dataclass
class Case:
    """One op at one shape: `run` gives pairs of what TileGym gave and what torch gives."""

    op: str
    shape: str
    dtype: torch.dtype
    run: Callable[[], Outputs]
    expected: str = "ok"
    tolerance: float | None = None


@dataclass
class Line:
    """What came out of one case."""

    op: str
    shape: str
    dtype: str
    error: float | None
    verdict: str
    expected: str
    seconds: float
    note: str = ""


CASES: list[Case] = []


def case(
    op: str,
    shapes: list[Any],
    dtypes: list[torch.dtype] | None = None,
    expected: str = "ok",
    tolerance: float | None = None,
) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
    """Register a function of (shape, dtype) as cases of `op`."""

    def register(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        for dtype in dtypes or [torch.float16, torch.bfloat16, torch.float32]:
            for shape in shapes:
                text = "×".join(map(str, shape))

                def run(shape: Any = shape, dtype: torch.dtype = dtype) -> Outputs:
                    return function(shape, dtype)

                CASES.append(Case(op, text, dtype, run, expected, tolerance))
        return function

    return register


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def ops() -> Any:
    import tilegym.ops

    return tilegym.ops


# --- norms ---


def rms(x: Tensor, w: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (w.float() + offset)


for _mode in ("static_persistent", "multi_wave_reload", "multi_wave_cached", None):

    @case(f"rms_norm ({_mode or 'default'})", [(4, 64), (3, 100), (2, 1027)])
    def _rms_norm(shape: Any, dtype: torch.dtype, mode: Any = _mode) -> Outputs:
        x, w = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
        options = {} if mode is None else {"mode": mode}
        return [(ops().rms_norm(x, (shape[-1],), w, 1e-6, **options), rms(x, w, 1e-6))]


@case("rms_norm (offset 1)", [(4, 64)])
def _rms_norm_offset(shape: Any, dtype: torch.dtype) -> Outputs:
    x, w = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    return [(ops().rms_norm(x, (shape[-1],), w, 1e-6, offset=1.0), rms(x, w, 1e-6, 1.0))]


@case("rms_norm (backward)", [(8, 64)], [torch.float32, torch.bfloat16])
def _rms_norm_backward(shape: Any, dtype: torch.dtype) -> Outputs:
    x, w = rand(*shape, dtype=dtype).requires_grad_(), rand(shape[-1], dtype=dtype).requires_grad_()
    y = ops().rms_norm(x, (shape[-1],), w, 1e-6)
    gradient = rand(*shape, dtype=dtype)
    y.backward(gradient)
    xx, ww = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
    rms(xx, ww, 1e-6).backward(gradient.float())
    return [(x.grad, xx.grad), (w.grad, ww.grad)]


@case("layer_norm", [(4, 64), (3, 96)])
def _layer_norm(shape: Any, dtype: torch.dtype) -> Outputs:
    x, w, b = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype), rand(shape[-1], dtype=dtype)
    found = ops().layer_norm(x, 1, 2, w, b, 1e-5)
    return [(found, F.layer_norm(x.float(), (shape[-1],), w.float(), b.float(), 1e-5))]


@case("layer_norm_legacy", [(4, 64), (3, 96)])
def _layer_norm_legacy(shape: Any, dtype: torch.dtype) -> Outputs:
    x, w, b = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype), rand(shape[-1], dtype=dtype)
    found = ops().layer_norm_legacy(x, (shape[-1],), w, b, 1e-5)
    return [(found, F.layer_norm(x.float(), (shape[-1],), w.float(), b.float(), 1e-5))]


@case("persistent_layer_norm", [(8, 64)], [torch.bfloat16])
def _persistent_layer_norm(shape: Any, dtype: torch.dtype) -> Outputs:
    x, w, b = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype), rand(shape[-1], dtype=dtype)
    found = ops().persistent_layer_norm(x, (shape[-1],), w, b, 1e-5)
    found = found[0] if isinstance(found, tuple) else found
    return [(found, F.layer_norm(x.float(), (shape[-1],), w.float(), b.float(), 1e-5))]


# --- rope ---


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x.float() * cos.float() + turned.float() * sin.float()


def rope_inputs(shape: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, length, size = shape
    angle = torch.outer(torch.arange(length).float(), 1.0 / 10000 ** (torch.arange(0, size, 2) / size))
    both = torch.cat([angle, angle], -1)[None].expand(batch, -1, -1)
    q, k = rand(batch, heads, length, size, dtype=dtype), rand(batch, kv_heads, length, size, dtype=dtype)
    return q, k, both.cos().to(dtype).contiguous(), both.sin().to(dtype).contiguous()


def _rope(shape: Any, dtype: torch.dtype) -> Outputs:
    q, k, cos, sin = rope_inputs(shape, dtype)
    wanted = [rotate(x, cos[:, None], sin[:, None]) for x in (q, k)]
    found = ops().apply_rope_base(q.clone(), k.clone(), cos, sin)
    return list(zip(found, wanted, strict=True))


case("rope", [(1, 4, 2, 5, 64), (2, 4, 4, 3, 128)])(_rope)
case("rope (half is no power of two)", [(1, 4, 2, 5, 80), (1, 4, 2, 5, 96)], [torch.float32], expected="wrong")(_rope)


# --- activations ---


@case("silu_and_mul", [(5, 128), (2, 3, 200)])
def _silu_and_mul(shape: Any, dtype: torch.dtype) -> Outputs:
    x = rand(*shape, dtype=dtype)
    gate, up = x.float().chunk(2, -1)
    return [(ops().silu_and_mul(x), F.silu(gate) * up)]


@case("swiglu", [(5, 128), (3, 100)])
def _swiglu(shape: Any, dtype: torch.dtype) -> Outputs:
    a, b = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
    return [(ops().get_swiglu()(a, b), F.silu(a.float()) * b.float())]


for _approximate in ("none", "tanh"):
    # TileGym's erf is an approximation: that is its error in float32.
    @case(f"geglu ({_approximate})", [(4, 512), (3, 96)], tolerance=5e-4 if _approximate == "none" else None)
    def _geglu(shape: Any, dtype: torch.dtype, approximate: str = _approximate) -> Outputs:
        x = rand(*shape, dtype=dtype)
        left, right = x.float().chunk(2, -1)
        return [(ops().activation.geglu(x, -1, approximate), left * F.gelu(right, approximate=approximate))]

    @case(f"gelu ({_approximate})", [(4, 300)], tolerance=5e-4 if _approximate == "none" else None)
    def _gelu(shape: Any, dtype: torch.dtype, approximate: str = _approximate) -> Outputs:
        x = rand(*shape, dtype=dtype)
        return [(ops().activation.gelu(x, approximate), F.gelu(x.float(), approximate=approximate))]


@case("relu", [(4, 300)])
def _relu(shape: Any, dtype: torch.dtype) -> Outputs:
    x = rand(*shape, dtype=dtype)
    return [(ops().activation.relu(x), F.relu(x.float()))]


@case("linear_gluact_linear", [(64, 96, 128)], [torch.float16, torch.bfloat16])
def _linear_gluact_linear(shape: Any, dtype: torch.dtype) -> Outputs:
    rows, inner, outer = shape
    x = rand(rows, outer, dtype=dtype)
    gate, up = rand(inner, outer, dtype=dtype) / 8, rand(inner, outer, dtype=dtype) / 8
    down = rand(outer, inner, dtype=dtype) / 8
    hidden = F.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)
    return [(ops().linear_gluact_linear(x, gate, up, down, "silu"), hidden.to(dtype).float() @ down.float().T)]


@case("softmax", [(4, 100), (3, 1024)])
def _softmax(shape: Any, dtype: torch.dtype) -> Outputs:
    x = rand(*shape, dtype=dtype)
    return [(ops().softmax(x), x.float().softmax(-1))]


@case("softmax (chunked)", [(3, 1500)], [torch.float32])
def _softmax_chunked(shape: Any, dtype: torch.dtype) -> Outputs:
    x = rand(*shape, dtype=dtype)
    return [(ops().softmax(x, use_chunked=True), x.float().softmax(-1))]


# --- attention ---


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, keep: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """[B, H, S, D] in float32; `keep` is boolean, broadcast to the scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = q.float() @ k.transpose(-1, -2) * scale
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def causal(queries: int, keys: int) -> Tensor:
    return torch.arange(keys)[None] <= torch.arange(queries)[:, None] + keys - queries


HALVES = [torch.float16, torch.bfloat16]


@case("fmha (causal)", [(1, 4, 2, 100, 100, 64), (1, 2, 2, 40, 100, 128)], HALVES)
def _fmha(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, kv, sq, sk, d = shape
    q, k, v = rand(b, h, sq, d, dtype=dtype), rand(b, kv, sk, d, dtype=dtype), rand(b, kv, sk, d, dtype=dtype)
    wanted = attend(q, k, v, 1 / math.sqrt(d), causal(sq, sk))
    return [(ops().fmha(q, k, v, is_causal=True), wanted)]


@case("fmha (all)", [(1, 4, 2, 70, 130, 64)], HALVES)
def _fmha_all(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, kv, sq, sk, d = shape
    q, k, v = rand(b, h, sq, d, dtype=dtype), rand(b, kv, sk, d, dtype=dtype), rand(b, kv, sk, d, dtype=dtype)
    return [(ops().fmha(q, k, v, is_causal=False), attend(q, k, v, 1 / math.sqrt(d)))]


@case("fmha_varlen", [(2, 4, 2, 64, 64)], HALVES)
def _fmha_varlen(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, kv, s, d = shape
    q, k, v = rand(b, h, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype)
    lengths = torch.tensor([s, s - 23], dtype=torch.int32)
    found = ops().fmha_varlen(q, k, v, is_causal=True, q_lens=lengths, kv_lens=lengths)
    pairs = []
    for i, n in enumerate(lengths.tolist()):
        part = slice(i, i + 1)
        wanted = attend(q[part, :, :n], k[part, :, :n], v[part, :, :n], 1 / math.sqrt(d), causal(n, n))
        pairs.append((found[part, :, :n], wanted))
    return pairs


@case("fmha_variant (window)", [(1, 4, 2, 70, 96, 17)], HALVES)
def _fmha_variant(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, kv, s, d, window = shape
    q, k, v = rand(b, h, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype)
    near = torch.arange(s)[:, None] - torch.arange(s)[None] <= window
    wanted = attend(q, k, v, 1 / math.sqrt(d), causal(s, s) & near)
    return [(ops().fmha_variant(q, k, v, is_causal=True, window_size=window), wanted)]


@case("fmha_decode", [(2, 8, 2, 300, 64), (1, 4, 4, 129, 128)], HALVES)
def _fmha_decode(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, kv, s, d = shape
    q, k, v = rand(b, h, 1, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype)
    return [(ops().fmha_decode(q, k, v, 1 / math.sqrt(d)), attend(q, k, v, 1 / math.sqrt(d)))]


@case("swa_attention", [(1, 2, 2, 128, 64, 32)], [torch.float16])
def _swa(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, kv, s, d, window = shape
    q, k, v = rand(b, h, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype)
    near = torch.arange(s)[:, None] - torch.arange(s)[None] < window
    wanted = attend(q, k, v, 1 / math.sqrt(d), causal(s, s) & near)
    return [(ops().swa_attention(q, k, v, window), wanted)]


def _gemma(shape: Any, dtype: torch.dtype, extra: int) -> Outputs:
    b, h, kv, s, d, window = shape
    q, k, v = rand(b, h, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype)
    keep = causal(s, s)
    if window:
        keep = keep & (torch.arange(s)[:, None] - torch.arange(s)[None] < window + extra)
    group = h // kv
    scores = q.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(d)
    scores = (torch.tanh(scores / 30.0) * 30.0).masked_fill(~keep, -math.inf)
    wanted = scores.softmax(-1) @ v.float().repeat_interleave(group, 1)
    return [(ops().gemma_attention(q, k, v, window_size=window, soft_cap=30.0), wanted)]


@case("gemma_attention (softcap)", [(1, 4, 2, 80, 64, 0)], HALVES)
def _gemma_plain(shape: Any, dtype: torch.dtype) -> Outputs:
    return _gemma(shape, dtype, 0)


@case("gemma_attention (window as in transformers)", [(1, 4, 2, 80, 64, 16)], HALVES, expected="wrong")
def _gemma_window(shape: Any, dtype: torch.dtype) -> Outputs:
    return _gemma(shape, dtype, 0)


@case("gemma_attention (window one wider)", [(1, 4, 2, 80, 64, 16)], HALVES)
def _gemma_window_wider(shape: Any, dtype: torch.dtype) -> Outputs:
    return _gemma(shape, dtype, 1)


@case("gemma_attention_decode", [(2, 4, 2, 150, 64)], HALVES)
def _gemma_decode(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, kv, s, d = shape
    q, k, v = rand(b, h, 1, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype), rand(b, kv, s, d, dtype=dtype)
    return [(ops().gemma_attention_decode(q, k, v), attend(q, k, v, 1 / math.sqrt(d)))]


@case("attention_sink", [(1, 2, 4, 64, 64)], [torch.bfloat16])
def _attention_sink(shape: Any, dtype: torch.dtype) -> Outputs:
    b, kv, group, s, d = shape
    q, k, v = rand(b, s, kv, group, d, dtype=dtype), rand(b, s, kv, d, dtype=dtype), rand(b, s, kv, d, dtype=dtype)
    sinks = rand(kv * group, dtype=dtype)
    start = torch.zeros(1, dtype=torch.int64)
    found = ops().attention_sink(q, k, v, sinks, 1 / math.sqrt(d), None, start)
    flat = [x.reshape(b, s, -1, d).transpose(1, 2) for x in (q, k, v)]
    wanted = attend(*flat, 1 / math.sqrt(d), causal(s, s), sinks)
    return [(found.reshape(b, s, -1, d).transpose(1, 2), wanted)]


@case("attention_sink_decode", [(2, 2, 4, 130, 64)], [torch.bfloat16])
def _attention_sink_decode(shape: Any, dtype: torch.dtype) -> Outputs:
    b, kv, group, s, d = shape
    q, k, v = rand(b, 1, kv, group, d, dtype=dtype), rand(b, s, kv, d, dtype=dtype), rand(b, s, kv, d, dtype=dtype)
    sinks = rand(kv * group, dtype=dtype)
    start = torch.tensor([s - 1])
    found = ops().attention_sink_decode(q, k, v, sinks, 1 / math.sqrt(d), None, start)
    flat = [x.reshape(b, x.shape[1], -1, d).transpose(1, 2) for x in (q, k, v)]
    wanted = attend(*flat, 1 / math.sqrt(d), None, sinks)
    return [(found.reshape(b, 1, -1, d).transpose(1, 2), wanted)]


@case("mla", [(1, 2, 96, 128, 64)], HALVES)
def _mla(shape: Any, dtype: torch.dtype) -> Outputs:
    b, h, s, d, pe = shape
    q, k, v = (rand(b, h, s, d, dtype=dtype) for _ in range(3))
    qpe, kpe = rand(b, h, s, pe, dtype=dtype), rand(b, 1, s, pe, dtype=dtype)
    scale = 1 / math.sqrt(d + pe)
    wide_q, wide_k = torch.cat([q, qpe], -1), torch.cat([k, kpe.expand(b, h, s, pe)], -1)
    found = ops().mla(q, k, v, qpe, kpe, True, scale)
    return [(found, attend(wide_q, wide_k, v, scale, causal(s, s)))]


def _mla_decode(shape: Any, dtype: torch.dtype, name: str) -> Outputs:
    b, h, s, d, pe = shape
    q, qpe = rand(b, h, d, dtype=dtype), rand(b, h, pe, dtype=dtype)
    kv, kpe = rand(b, s, d, dtype=dtype), rand(b, s, pe, dtype=dtype)
    scale = 1 / math.sqrt(d + pe)
    scores = torch.cat([q, qpe], -1).float() @ torch.cat([kv, kpe], -1).float().transpose(-1, -2) * scale
    found = getattr(ops(), name)(q, qpe, kv, kpe, scale)
    return [(found[0] if isinstance(found, tuple) else found, scores.softmax(-1) @ kv.float())]


@case("mla_decoding", [(1, 16, 130, 128, 64)], HALVES)
def _mla_decoding(shape: Any, dtype: torch.dtype) -> Outputs:
    return _mla_decode(shape, dtype, "mla_decoding")


@case("mla_decoding_split_kv", [(1, 16, 300, 128, 64)], HALVES)
def _mla_decoding_split(shape: Any, dtype: torch.dtype) -> Outputs:
    return _mla_decode(shape, dtype, "mla_decoding_split_kv")


# --- matrix products ---


@case("matmul", [(70, 90, 130)], HALVES)
@case("matmul (tf32)", [(70, 90, 130)], [torch.float32], tolerance=TF32)
def _matmul(shape: Any, dtype: torch.dtype) -> Outputs:
    m, n, k = shape
    a, b = rand(m, k, dtype=dtype), rand(k, n, dtype=dtype)
    return [(ops().matmul(a, b), a.float() @ b.float())]


@case("matmul (not persistent)", [(70, 90, 130)], HALVES)
def _matmul_plain(shape: Any, dtype: torch.dtype) -> Outputs:
    m, n, k = shape
    a, b = rand(m, k, dtype=dtype), rand(k, n, dtype=dtype)
    return [(ops().matmul(a, b, static_persistent=False), a.float() @ b.float())]


@case("bmm", [(2, 70, 64, 96)], HALVES)
def _bmm(shape: Any, dtype: torch.dtype) -> Outputs:
    batch, m, n, k = shape
    a, b = rand(batch, m, k, dtype=dtype), rand(batch, k, n, dtype=dtype)
    return [(ops().bmm(a, b), a.float() @ b.float())]


@case("group_gemm", [(64, 96, 64)], HALVES)
def _group_gemm(shape: Any, dtype: torch.dtype) -> Outputs:
    m, n, k = shape
    a = [rand(m, k, dtype=dtype), rand(m + 30, k, dtype=dtype)]
    b = [rand(k, n, dtype=dtype), rand(k, n, dtype=dtype)]
    return list(zip(ops().group_gemm(a, b), [x.float() @ y.float() for x, y in zip(a, b, strict=True)], strict=True))


@case("transpose", [(70, 90)], HALVES)
def _transpose(shape: Any, dtype: torch.dtype) -> Outputs:
    x = rand(*shape, dtype=dtype)
    return [(ops().transpose(x), x.float().T)]


@case("w8a8_block_fp8_matmul", [(64, 128, 256)], [torch.bfloat16])
def _fp8_matmul(shape: Any, dtype: torch.dtype) -> Outputs:
    m, n, k = shape
    a, b = rand(m, k).to(torch.float8_e4m3fn), rand(n, k).to(torch.float8_e4m3fn)
    a_scale, b_scale = torch.rand(m, k // 128), torch.rand(n // 128, k // 128)
    wanted = (a.float() * a_scale.repeat_interleave(128, 1)) @ (
        b.float() * b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).T
    return [(ops().w8a8_block_fp8_matmul(a, b, a_scale, b_scale, [128, 128], output_dtype=dtype), wanted)]


@case("fused_moe", [(24, 4, 2, 64, 128)], HALVES)
def _fused_moe(shape: Any, dtype: torch.dtype) -> Outputs:
    tokens, experts, top, inner, hidden = shape
    x = rand(tokens, hidden, dtype=dtype)
    w1, w2 = rand(experts, 2 * inner, hidden, dtype=dtype) / 8, rand(experts, hidden, inner, dtype=dtype) / 8
    weights, ids = torch.rand(tokens, experts).softmax(-1).topk(top)
    found = ops().fused_moe(x, w1, w2, weights, ids.int())
    wanted = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for weight, expert in zip(weights[t], ids[t], strict=True):
            gate, up = (x[t].float() @ w1[expert].float().T).to(dtype).float().chunk(2)
            wanted[t] += weight * ((F.silu(gate) * up).to(dtype).float() @ w2[expert].float().T)
    return [(found, wanted)]


@case("fused_linear_cross_entropy", [(40, 64, 200)], HALVES)
def _fused_linear_cross_entropy(shape: Any, dtype: torch.dtype) -> Outputs:
    tokens, hidden, vocabulary = shape
    x, w = rand(tokens, hidden, dtype=dtype), rand(vocabulary, hidden, dtype=dtype)
    target = torch.randint(vocabulary, (tokens,))
    logits = (x @ w.T).float()
    return [(ops().fused_linear_cross_entropy(x, w, target), F.cross_entropy(logits, target))]


# --- linear attention, convolutions, model-local kernels ---


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence, in float32: [B, T, H, D]."""
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    state = torch.zeros(*q.shape[::2][:1], q.shape[2], k.shape[-1], v.shape[-1])
    found = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        memory = (state * k[:, t][..., None]).sum(-2)
        delta = (v[:, t] - memory) * beta[:, t][..., None]
        state = state + k[:, t][..., None] * delta[..., None, :]
        found.append((state * (q[:, t] / math.sqrt(q.shape[-1]))[..., None]).sum(-2))
    return torch.stack(found, 1)


def _delta(shape: Any, dtype: torch.dtype, name: str) -> Outputs:
    b, t, h, d = shape
    q, k = (F.normalize(rand(b, t, h, d), dim=-1).to(dtype) for _ in range(2))
    v = rand(b, t, h, d, dtype=dtype)
    g, beta = -torch.rand(b, t, h), torch.rand(b, t, h)
    found = getattr(ops(), name)(q, k, v, g, beta.to(dtype))
    return [(found[0] if isinstance(found, tuple) else found, delta_rule(q, k, v, g, beta.to(dtype)))]


@case("chunk_gated_delta_rule", [(1, 96, 2, 64)], [torch.bfloat16])
def _chunk_delta(shape: Any, dtype: torch.dtype) -> Outputs:
    return _delta(shape, dtype, "chunk_gated_delta_rule")


@case("recurrent_gated_delta_rule", [(1, 12, 2, 64)], [torch.bfloat16])
def _recurrent_delta(shape: Any, dtype: torch.dtype) -> Outputs:
    return _delta(shape, dtype, "recurrent_gated_delta_rule")


@case("residual_add_rms_norm", [(5, 64), (3, 96)], [torch.bfloat16])
def _residual_add(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.olmoe.kernels import residual_add_rms_norm as module

    x, r, w = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    found = module.residual_add_rms_norm_olmoe_cutile(x, r, w, 1e-6)
    total = x.float() + r.float()
    wanted = [total, rms(total, w, 1e-6)]
    order = found if (found[0].float() - total).abs().max() < 0.1 else found[::-1]
    return list(zip(order, wanted, strict=True))


@case("rms_norm_residual_add", [(5, 64)], [torch.bfloat16])
def _norm_residual_add(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.olmo3.kernels import rms_norm_residual_add as module

    x, r, w = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    return [(module.rms_norm_residual_add_cutile(x, r, w, 1e-6), rms(x, w, 1e-6) + r.float())]


@case("dual_rms_norm", [(5, 64)], [torch.bfloat16])
def _dual_rms_norm(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.olmo3.kernels import dual_rms_norm as module

    q, k = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
    wq, wk = rand(shape[-1], dtype=dtype), rand(shape[-1], dtype=dtype)
    found = module.dual_rms_norm_cutile(q.clone(), k.clone(), wq, wk, 1e-6)
    return list(zip(found, [rms(q, wq, 1e-6), rms(k, wk, 1e-6)], strict=True))


@case("rms_norm_gated", [(5, 64)], [torch.bfloat16])
def _rms_norm_gated(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.qwen3_5.kernels import rms_norm_gated as module

    x, gate, w = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    return [(module.rms_norm_gated_cutile(x, gate, w, 1e-6), rms(x, w, 1e-6) * F.silu(gate.float()))]


@case("sigmoid_mul", [(5, 100)], [torch.bfloat16])
def _sigmoid_mul(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.qwen3_5.kernels import sigmoid_mul as module

    x, gate = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
    return [(module.sigmoid_mul_cutile(x, gate), x.float() * gate.float().sigmoid())]


@case("silu_and_mul_separate", [(5, 100)], [torch.bfloat16])
def _silu_separate(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.qwen3_5.kernels import silu_and_mul_separate as module

    gate, up = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
    return [(module.silu_and_mul_separate_cutile(gate, up), F.silu(gate.float()) * up.float())]


@case("causal_conv1d_prefill_silu", [(1, 64, 9, 4)], [torch.bfloat16])
def _conv_prefill(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.qwen3_5.kernels import causal_conv1d_prefill_silu as module

    b, channels, length, taps = shape
    x, w = F.pad(rand(b, channels, length, dtype=dtype), (taps - 1, 0)), rand(channels, taps, dtype=dtype)
    found = module.causal_conv1d_prefill_silu_cutile(x, w, length)
    return [(found, F.silu(F.conv1d(x.float(), w.float()[:, None], groups=channels)))]


@case("causal_conv1d_update_silu", [(1, 70, 4)], [torch.bfloat16])
def _conv_update(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.qwen3_5.kernels import causal_conv1d_update_silu as module

    b, channels, taps = shape
    x, w, state = (
        rand(b, channels, 1, dtype=dtype),
        rand(channels, taps, dtype=dtype),
        rand(b, channels, taps, dtype=dtype),
    )
    moved = torch.cat([state[..., 1:], x], -1)
    wanted = F.silu((moved.float() * w.float()).sum(-1, keepdim=True))
    return [(module.causal_conv1d_update_silu_cutile(x, state, w), wanted), (state, moved)]


@case("lfm2 causal_conv1d", [(1, 70, 9, 3)], [torch.bfloat16])
def _lfm2_prefill(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.lfm2_moe.kernels import causal_conv1d_prefill as module

    b, channels, length, taps = shape
    x, w = rand(b, channels, length, dtype=dtype), rand(channels, taps, dtype=dtype)
    wanted = F.conv1d(F.pad(x.float(), (taps - 1, 0)), w.float()[:, None], groups=channels)
    return [(module.lfm2_causal_conv1d_fn_cutile(x, w), wanted)]


@case("lfm2 causal_conv1d_update", [(1, 70, 3)], [torch.bfloat16])
def _lfm2_update(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.lfm2_moe.kernels import causal_conv1d_update as module

    b, channels, taps = shape
    x, w, state = (
        rand(b, channels, 1, dtype=dtype),
        rand(channels, taps, dtype=dtype),
        rand(b, channels, taps, dtype=dtype),
    )
    moved = torch.cat([state[..., 1:], x], -1)
    wanted = (moved.float() * w.float()).sum(-1, keepdim=True)
    return [(module.lfm2_causal_conv1d_update_cutile(x, state, w), wanted), (state, moved)]


@case("gdr_preprocess", [(5, 24)], [torch.bfloat16])
def _gdr_preprocess(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.transformers.qwen3_5.kernels import gdr_preprocess as module

    b, a = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype)
    log, bias = rand(shape[-1]), rand(shape[-1])
    found = module.gdr_preprocess_cutile(b, a, log, bias)
    wanted = [b.float().sigmoid(), -log.exp() * F.softplus(a.float() + bias)]
    return list(zip(found, wanted, strict=True))


# --- suites ---


@case("mamba2_chunk_forward", [(1, 128, 4, 64, 64)], [torch.bfloat16], tolerance=3e-2)
def _mamba2(shape: Any, dtype: torch.dtype) -> Outputs:
    batch, tokens, heads, size, states = shape
    x, b, c = rand(batch, tokens, heads, size), rand(batch, tokens, 1, states) / 8, rand(batch, tokens, 1, states) / 8
    x, b, c = x.to(dtype), b.to(dtype), c.to(dtype)
    a, d, dt = -torch.rand(heads), rand(heads), torch.rand(batch, tokens, heads)
    state = torch.zeros(batch, heads, size, states)
    wanted = []
    found, final = ops().mamba2_chunk_forward(x, a, b, c, d, dt, state.clone(), 64)
    for t in range(tokens):
        step = dt[:, t, :, None, None]
        state = (
            state * (a[None, :, None, None] * step).exp()
            + step * x[:, t].float()[..., None] * b[:, t].float()[:, :, None]
        )
        wanted.append((state * c[:, t].float()[:, :, None]).sum(-1) + d[None, :, None] * x[:, t].float())
    return [(found, torch.stack(wanted, 1)), (final, state)]


@case("dropout", [(5, 1000)], [torch.float32])
def _dropout(shape: Any, dtype: torch.dtype) -> Outputs:
    x = rand(*shape, dtype=dtype)
    found = ops().dropout(x, seed=7, p=0.25)
    kept = found != 0
    share = kept.float().mean()
    return [(found[kept], x[kept] / 0.75), ((share - 0.75).abs().round(decimals=1), torch.zeros(()))]


@case("nvfp4_quantize", [(128, 128)], [torch.bfloat16], tolerance=0.3)
def _nvfp4(shape: Any, dtype: torch.dtype) -> Outputs:
    rows, columns = shape
    x = rand(*shape, dtype=dtype)
    packed, scales = tuple(ops().nvfp4_quantize(x))[:2]
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(rows, columns)
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[(codes & 7).long()]
    values = torch.where(codes >= 8, -sizes, sizes)
    row, group = torch.arange(rows)[:, None], torch.arange(columns // 16)[None]
    place = (group // 4) * 512 + (row % 32) * 16 + (row // 32) * 4 + group % 4
    scale = scales.view(torch.float8_e4m3fn).float()[place]
    return [(values * scale.repeat_interleave(16, 1), x.float())]


@case("swiglu (backward)", [(5, 100)], [torch.float32])
def _swiglu_backward(shape: Any, dtype: torch.dtype) -> Outputs:
    a, b = rand(*shape).requires_grad_(), rand(*shape).requires_grad_()
    aa, bb = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    gradient = rand(*shape)
    ops().get_swiglu()(a, b).backward(gradient)
    (F.silu(aa) * bb).backward(gradient)
    return [(a.grad, aa.grad), (b.grad, bb.grad)]


def liger() -> Any:
    from tilegym.suites import liger as suite

    return suite


@case("liger.fused_add_rms_norm", [(5, 64), (3, 96)], [torch.bfloat16])
def _liger_add(shape: Any, dtype: torch.dtype) -> Outputs:
    x, r, w = rand(*shape, dtype=dtype), rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype)
    found, total = liger().fused_add_rms_norm(x, r, w)
    return [(found, rms((x + r), w, 1e-6)), (total, x.float() + r.float())]


@case("liger.rope", [(1, 4, 2, 5, 64), (1, 4, 2, 5, 80), (1, 4, 2, 5, 96)], [torch.bfloat16])
def _liger_rope(shape: Any, dtype: torch.dtype) -> Outputs:
    q, k, cos, sin = rope_inputs(shape, dtype)
    wanted = [rotate(x, cos[:, None], sin[:, None]) for x in (q, k)]
    return list(zip(liger().rope(q.clone(), k.clone(), cos, sin), wanted, strict=True))


@case("liger.layer_norm", [(5, 64), (3, 96)], [torch.bfloat16])
def _liger_layer_norm(shape: Any, dtype: torch.dtype) -> Outputs:
    x, w, b = rand(*shape, dtype=dtype), rand(shape[-1], dtype=dtype), rand(shape[-1], dtype=dtype)
    return [(liger().layer_norm(x, w, b, 1e-5), F.layer_norm(x.float(), (shape[-1],), w.float(), b.float(), 1e-5))]


@case("liger.cross_entropy", [(6, 300)], [torch.float32, torch.bfloat16])
def _liger_cross_entropy(shape: Any, dtype: torch.dtype) -> Outputs:
    x = rand(*shape, dtype=dtype).requires_grad_()
    copy = x.detach().float().clone().requires_grad_()
    target = torch.randint(shape[1], (shape[0],))
    loss, wanted = liger().cross_entropy(x, target), F.cross_entropy(copy, target)
    loss.backward()
    wanted.backward()
    return [(loss, wanted), (x.grad, copy.grad)]


@case("unsloth.rope_embedding", [(1, 5, 4, 64), (1, 5, 4, 96)], [torch.bfloat16])
def _unsloth_rope(shape: Any, dtype: torch.dtype) -> Outputs:
    from tilegym.suites import unsloth

    batch, length, heads, size = shape
    q, _, cos, sin = rope_inputs((batch, heads, heads, length, size), dtype)
    wanted = rotate(q, cos[:, None], sin[:, None]).transpose(1, 2)
    half = size // 2
    found = unsloth.rope_embedding(q.transpose(1, 2).contiguous(), cos[0, :, :half], sin[0, :, :half])
    return [(found, wanted)]


# --- running ---


def error_of(found: Tensor, wanted: Tensor) -> float:
    """The largest error relative to the reference's largest value; infinite for NaN or another shape."""
    if found.shape != wanted.shape:
        return math.inf
    difference = (found.detach().float() - wanted.detach().float()).abs().max()
    scale = wanted.detach().float().abs().max().clamp(min=1e-6)
    value = float(difference / scale)
    return math.inf if math.isnan(value) else value


def judge(one: Case, shuffle: int | None) -> Line:
    """Run a case checked; where it uses padding that cuTile leaves undetermined, once more with that padding zero."""
    began = time.perf_counter()
    error, verdict, note = attempt(one, shuffle, check=True)
    if verdict == "fault" and "padding of undetermined value" in note:
        cause = note
        error, verdict, note = attempt(one, shuffle, check=False)
        verdict = "ok*" if verdict == "ok" else verdict
        note = f"{note} {cause}".strip()
    dtype = str(one.dtype).removeprefix("torch.")
    return Line(one.op, one.shape, dtype, error, verdict, one.expected, round(time.perf_counter() - began, 2), note)


def attempt(one: Case, shuffle: int | None, *, check: bool) -> tuple[float | None, str, str]:
    """Error, verdict and what is to be said about it."""
    torch.manual_seed(0)
    try:
        with interpreted(shuffle=shuffle, check=check):
            pairs = one.run()
    except KernelFault as problem:
        return None, "fault", str(problem)
    except Exception as problem:  # every failure of a foreign op is a result here
        if os.environ.get("TRACE"):
            traceback.print_exc()
        return None, "does not run", f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
    error = max(error_of(found, wanted) for found, wanted in pairs)
    return error, "ok" if error <= max(one.tolerance or 0.0, TOLERANCE[one.dtype]) else "wrong", ""


def lines(cases: list[Case], shuffle: int | None) -> Iterator[Line]:
    for one in cases:
        yield judge(one, shuffle)


def usage() -> tuple[set[str], set[str]]:
    """cuTile's operations that TileGym's `ops/cutile` and `transformers/*/kernels` call: covered, and lacking."""
    import ast
    from importlib.util import find_spec

    from kernelgraft.cutile.coverage import missing, public_operations

    root = Path(find_spec("tilegym").submodule_search_locations[0])
    files = [*root.glob("ops/cutile/**/*.py"), *root.glob("transformers/*/kernels/*.py")]
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ct":
                names.add(node.attr)
    known, lacking = set(public_operations()), set(missing())
    return (names & known) - lacking, names & lacking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="ops whose name contains one of these words")
    parser.add_argument("--shuffle", type=int, help="seed of a random order of blocks")
    parser.add_argument("--json", help="file to write the results to")
    parser.add_argument("--usage", action="store_true", help="only say which operations TileGym calls")
    options = parser.parse_args()
    if options.usage:
        covered, lacking = usage()
        for what, names in (("covered", covered), ("lacking", lacking)):
            print(f"{len(names)} {what}: {', '.join(sorted(names))}")
        return bool(lacking)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [one for one in CASES if not options.only or any(word in one.op for word in options.only)]
    found = []
    print(f"{'op':<44}{'shape':<20}{'dtype':<10}{'error':>10}  verdict")
    for line in lines(chosen, options.shuffle):
        found.append(line)
        shown = "" if line.error is None else f"{line.error:.1e}"
        mark = "" if line.verdict.rstrip("*") == line.expected else f"  (expected {line.expected})"
        print(
            f"{line.op:<44}{line.shape:<20}{line.dtype:<10}{shown:>10}  {line.verdict}{mark} {line.note}"[:240],
            flush=True,
        )
    unexpected = [line for line in found if line.verdict.rstrip("*") != line.expected]
    total = sum(line.seconds for line in found)
    if any(line.verdict == "ok*" for line in found):
        print("* right only because padding that cuTile leaves undetermined is zero; where, is said in the note")
    print(f"{len(found)} cases, {len({line.op for line in found})} ops, {len(unexpected)} unexpected, {total:.0f} s")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(line) for line in found], file, indent=1)
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())
