"""Norms, activation products and rotary embeddings: ours, torch, TileGym and Liger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measuring import BF16, EPS, MODELS, Case, Model, Run, drawn
from torch.nn import functional

from kernelgraft.kernels import act_and_mul as act_module
from kernelgraft.kernels import rope_triton, rows_triton
from kernelgraft.kernels.act_and_mul import act_and_mul, packed_act_and_mul
from kernelgraft.kernels.add_rms_norm import add_rms_norm
from kernelgraft.kernels.layer_norm import layer_norm
from kernelgraft.kernels.rms_norm import rms_norm
from kernelgraft.kernels.rope import rope

BIG = ("llama-3.1-8b", "4x4096", (4, 4096))
"""Every tensor of at least 64 MB."""


def rms_eager(x: torch.Tensor, weight: torch.Tensor, offset: bool = False) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + weight.float())).to(x.dtype) if offset else weight * normed.to(x.dtype)


def rms_exact(x: torch.Tensor, weight: torch.Tensor, offset: bool = False) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (weight.double() + float(offset))


def rope_eager(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return (q * cos) + (turned(q) * sin), (k * cos) + (turned(k) * sin)


def norm_cases(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Iterator[Case]:
    tilegym, liger = peers.get("tilegym"), peers.get("liger")
    offset, cast = model.offset, "after_weight" if model.offset else "before_weight"
    shapes = {"rms_norm": (batch, length, model.hidden)}
    if model.head_norm:
        shapes["rms_norm heads"] = (batch, length, model.heads, model.head_dim)
    for label, shape in shapes.items():
        width = shape[-1]
        contestants: dict[str, Run] = {
            "kernelgraft": lambda x, w: rms_norm(x, w, EPS, offset=offset, cast=cast),
            "kernelgraft triton": lambda x, w: rows_triton.rms_norm(x, w, EPS, offset=offset, cast=cast),
            "torch": lambda x, w: rms_eager(x, w, offset),
        }
        if not offset:
            contestants["torch fused"] = lambda x, w, width=width: functional.rms_norm(x, (width,), w, EPS)
        if tilegym:
            contestants["tilegym"] = lambda x, w, width=width: tilegym.ops.rms_norm(
                x, (width,), w, EPS, offset=float(offset)
            )
        if liger:
            mode = "gemma" if offset else "llama"
            contestants["liger"] = lambda x, w, mode=mode: liger["rms"](x, w, EPS, float(offset), mode, False)
        yield Case(
            label,
            name,
            regime,
            lambda shape=shape: (drawn(*shape), drawn(shape[-1])),
            lambda x, w: rms_exact(x, w, offset),
            contestants,
            2 * math.prod(shape),
        )
    shape = shapes["rms_norm"]
    contestants = {
        "kernelgraft": lambda r, x, w: add_rms_norm(r, x, w, EPS, offset=offset, cast=cast),
        "kernelgraft triton": lambda r, x, w: rows_triton.add_rms_norm(r, x, w, EPS, offset=offset, cast=cast),
        "torch": lambda r, x, w: ((total := r + x), rms_eager(total, w, offset)),
    }
    if not offset:
        contestants["torch fused"] = lambda r, x, w: (
            (total := r + x),
            functional.rms_norm(total, (total.shape[-1],), w, EPS),
        )
    mode = "gemma" if offset else "llama"
    if tilegym:
        contestants["tilegym"] = lambda r, x, w: reversed_pair(
            tilegym.suites.liger.ops.fused_add_rms_norm(x, r, w, EPS, float(offset), mode)
        )
    if liger:
        contestants["liger"] = lambda r, x, w: reversed_pair(liger["add"](x, r, w, EPS, float(offset), mode, False))
    yield Case(
        "add_rms_norm",
        name,
        regime,
        lambda: (drawn(*shape), drawn(*shape), drawn(shape[-1])),
        lambda r, x, w: (r + x, rms_exact(r + x, w, offset)),
        contestants,
        4 * math.prod(shape),
    )


def reversed_pair(pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[1], pair[0]


def layer_case(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Case:
    shape = (batch, length, model.hidden)
    contestants: dict[str, Run] = {
        "kernelgraft": lambda x, w, b: layer_norm(x, w, b, EPS),
        "kernelgraft triton": lambda x, w, b: rows_triton.layer_norm(x, w, b, EPS),
        "torch fused": lambda x, w, b: functional.layer_norm(x, (x.shape[-1],), w, b, EPS),
    }
    if tilegym := peers.get("tilegym"):
        contestants["tilegym"] = lambda x, w, b: tilegym.ops.layer_norm_legacy(x, (x.shape[-1],), w, b, EPS)
    if liger := peers.get("liger"):
        contestants["liger"] = lambda x, w, b: liger["layer"](x, w, b, EPS)
    return Case(
        "layer_norm",
        name,
        regime,
        lambda: (drawn(*shape), drawn(shape[-1]), drawn(shape[-1])),
        lambda x, w, b: functional.layer_norm(x.double(), (x.shape[-1],), w.double(), b.double(), EPS),
        contestants,
        2 * math.prod(shape),
    )


def act_case(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Case:
    act, width = model.activation, model.intermediate
    function = act_module.ACTIVATIONS[act]
    tilegym, liger = peers.get("tilegym"), peers.get("liger")
    if model.packed:
        contestants: dict[str, Run] = {
            "kernelgraft": lambda x: packed_act_and_mul(x, act),
            "torch": lambda x: function(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        }
        if tilegym and act == "silu":
            contestants["tilegym"] = lambda x: tilegym.ops.silu_and_mul(x)
        if liger:
            contestants["liger"] = lambda x: liger[act](*(t.contiguous() for t in x.chunk(2, -1)))

        def exact(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.double().chunk(2, -1)
            return function(gate) * up

        make: Callable[[], tuple[torch.Tensor, ...]] = lambda: (drawn(batch, length, 2 * width),)  # noqa: E731
    else:
        contestants = {
            "kernelgraft": lambda g, u: act_and_mul(g, u, act),
            "torch": lambda g, u: function(g) * u,
        }
        if tilegym and act == "silu":
            swiglu = tilegym.ops.get_swiglu()
            contestants["tilegym"] = lambda g, u: swiglu(g, u)
        if liger:
            contestants["liger"] = lambda g, u: liger[act](g, u)

        def exact(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return function(g.double()) * u.double()

        make = lambda: (drawn(batch, length, width), drawn(batch, length, width))  # noqa: E731
    return Case("act_and_mul", name, regime, make, exact, contestants, 2 * batch * length * width)


def rope_case(name: str, model: Model, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Case:
    def make() -> tuple[torch.Tensor, ...]:
        q = drawn(batch, length, model.heads, model.head_dim).transpose(1, 2)
        k = drawn(batch, length, model.kv_heads, model.head_dim).transpose(1, 2)
        angles = torch.rand(1, length, model.head_dim // 2, device="cuda") * 6.28
        angles = torch.cat((angles, angles), -1)
        return q, k, angles.cos().to(BF16), angles.sin().to(BF16)

    contestants: dict[str, Run] = {
        "kernelgraft": rope,
        "kernelgraft triton": rope_triton.rope,
        "kernelgraft float32": lambda q, k, cos, sin: rope(q, k, cos, sin, compute="float32"),
        "torch": rope_eager,
    }
    if tilegym := peers.get("tilegym"):
        contestants["tilegym"] = lambda q, k, cos, sin: tilegym.ops.apply_rope_base(q, k, cos, sin)
    if liger := peers.get("liger"):
        contestants["liger"] = liger["rope"]
    elements = batch * length * (model.heads + model.kv_heads) * model.head_dim
    return Case(
        "rope",
        name,
        regime,
        make,
        lambda *inputs: rope_eager(*(t.double() for t in inputs)),
        contestants,
        2 * elements,
        frozenset({"tilegym", "liger"}),
    )


def cases(name: str, regime: str, batch: int, length: int, peers: dict[str, Any]) -> Iterator[Case]:
    """The memory-bound cases of one model and regime."""
    model = MODELS[name]
    yield from norm_cases(name, model, regime, batch, length, peers)
    yield act_case(name, model, regime, batch, length, peers)
    yield rope_case(name, model, regime, batch, length, peers)
    if name in ("llama-3.2-1b", "llama-3.1-8b"):
        yield layer_case(name, model, regime, batch, length, peers)
