"""What a product of few rows with a weight can be, and whether tensors fit together for it; no kernel."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

MOST_ROWS = 16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASTS = ("before_weight", "after_weight")
"""Where the original of the norm before the product leaves float32."""

Shape = tuple[int, ...]
Laid = tuple[Shape, tuple[int, ...]]
"""Shape and strides."""


@dataclass(frozen=True, slots=True)
class Form:
    """What is computed, and its sizes."""

    count: int
    """Rows of x."""
    outputs: int
    width: int
    dtype: torch.dtype
    bias: bool
    residual: bool
    norm: tuple[float, bool, str] | None
    """eps, whether one is added to the weight, and the cast."""
    activation: str | None
    packed: bool
    """Whether one weight holds the gate's rows and then those of the other factor."""

    @property
    def bare(self) -> bool:
        """True for the product alone."""
        return not self.bias and not self.residual and self.norm is None and self.activation is None


@functools.lru_cache(maxsize=4096)
def form_of(
    x: Shape,
    weight: Laid,
    up: Laid | None,
    others: tuple[Shape | None, Shape | None, Shape | None],
    dtypes: tuple[torch.dtype | None, ...],
    eps: float,
    offset: bool,
    cast: str,
    activation: str | None,
) -> Form:
    """The form of a call. `others`: shapes of bias, residual and norm's weight; `dtypes`: of all, in their order.

    Raises ValueError where tensors do not fit together or there are too many rows.
    """
    shape, strides = weight
    packed = activation is not None and up is None
    if len(shape) != 2 or x[-1:] != shape[1:] or not shape[1] or (packed and shape[0] % 2):
        raise ValueError(f"rows {list(x)} do not fit a weight {list(shape)}")
    outputs = shape[0] // 2 if packed else shape[0]
    wanted = (shape, (outputs,), (*x[:-1], outputs), x[-1:])
    for found, expected in zip((None if up is None else up[0], *others), wanted, strict=True):
        if found is not None and tuple(found) != tuple(expected):
            raise ValueError(f"a tensor has shape {list(found)} where {list(expected)} is needed")
    dtype, *rest, vector = dtypes
    if dtype not in FLOATS or any(d not in (None, dtype) for d in rest) or vector not in (None, *FLOATS):
        raise ValueError(
            f"dtypes {', '.join(str(d) for d in dtypes if d)}: one of float32, bfloat16, float16 is needed"
        )
    for steps in (strides, *(() if up is None else (up[1],))):
        if steps[1] != 1 and shape[1] > 1:
            raise ValueError(f"a weight has stride {steps[1]} in its last axis where 1 is needed")
    if cast not in CASTS:
        raise ValueError(f"cast `{cast}`; known: {', '.join(CASTS)}")
    count = math.prod(x[:-1])
    if count > MOST_ROWS:
        raise ValueError(f"{count} rows; at most {MOST_ROWS} are served")
    norm = None if others[2] is None else (eps, offset, cast)
    assert dtype is not None
    return Form(count, outputs, shape[1], dtype, others[0] is not None, others[1] is not None, norm, activation, packed)


def laid(x: torch.Tensor | None) -> Laid | None:
    """Shape and strides."""
    return None if x is None else (x.shape, x.stride())


def shape_of(x: torch.Tensor | None) -> Shape | None:
    """The shape, if there is a tensor."""
    return None if x is None else x.shape


def dtype_of(x: torch.Tensor | None) -> torch.dtype | None:
    """The dtype, if there is a tensor."""
    return None if x is None else x.dtype
