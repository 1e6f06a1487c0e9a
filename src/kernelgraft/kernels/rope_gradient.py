"""The gradient of a rotation, by torch in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def untwist(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, setting: Sequence[int], backward: bool
) -> torch.Tensor:
    """The gradient of q from that of its output, in float32: each pair through the transposed rotation.

    `setting` as the custom op of `rope` takes it.
    """
    row_axis, turned, start, rest_start, pairs_in, pairs_out, table = setting
    length, up = turned // 2, grad.float()
    if table:  # no value for each channel
        cos, sin = cos[..., :length].repeat(1, 1, 2), sin[..., :length].repeat(1, 1, 2)
        (cos_a, cos_b), (sin_a, sin_b) = cos.float().chunk(2, -1), sin.float().chunk(2, -1)
    else:
        (cos_a, cos_b), (sin_a, sin_b) = _pairs(cos.float(), pairs_out), _pairs(sin.float(), pairs_out)
    cos_a, cos_b, sin_a, sin_b = (t.unsqueeze(3 - row_axis) for t in (cos_a, cos_b, sin_a, sin_b))
    if backward:
        sin_a, sin_b = -sin_a, -sin_b
    first, second = _pairs(up[..., start : start + turned], pairs_out)
    a, b = first * cos_a + second * sin_b, second * cos_b - first * sin_a
    both = torch.cat((a, b), -1) if pairs_in == 0 else torch.stack((a, b), -1).flatten(-2)
    rest = up[..., rest_start : rest_start + up.shape[-1] - turned]
    return torch.cat((rest, both) if rest_start < start else (both, rest), -1)


def _pairs(x: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    if pairs == 0:
        first, second = x.chunk(2, -1)
        return first, second
    return x[..., 0::2], x[..., 1::2]
