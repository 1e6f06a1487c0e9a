"""cuDNN's attention through torch's operator, without the choice among backends that goes before it.

`torch.nn.attention.sdpa_kernel` around torch's function chooses it too, but takes the host longer than a short call.
"""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes. torch looks at layouts before it chooses cuDNN, not in the operator."""


def cudnn_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float, causal: bool
) -> torch.Tensor:
    """Attention of [batch, heads, queries, channels] over [batch, key heads, keys, channels] by cuDNN.

    bfloat16 or float16, on a CUDA device; gives [batch, queries, heads, channels], contiguous. Channels: a multiple of
    8, at most 128; heads: a multiple of key heads. `causal`: for as many keys as queries. No gradients.
    """
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    tensors = aligned(query), aligned(key), aligned(value)
    found: torch.Tensor = operator(*tensors, None, False, 0.0, causal, False, scale=scaling)[0]
    return found.transpose(1, 2).contiguous()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its rows are not contiguous or begin elsewhere than every 16 bytes."""
    steps = x.itemsize * (x.stride(0) | x.stride(1) | x.stride(2))
    if x.stride(3) == 1 and not (x.data_ptr() | steps) % ALIGNMENT:
        return x
    return x.clone(memory_format=torch.contiguous_format)
