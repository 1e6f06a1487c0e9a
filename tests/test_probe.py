"""The probing helpers: comparisons in ulps, bare copies, fresh values."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from kernelgraft.families.probe import clone, draw, same, worst


def test_same_counts_in_ulps_of_the_largest_value() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = torch.tensor([0.25, 3.0], dtype=dtype)
        eps = torch.finfo(dtype).eps
        off = expected + torch.tensor([0.0, 4 * eps], dtype=dtype)  # an ulp at 3 is 2 eps
        match = same(off, expected)
        assert (match.bit_equal, match.max_ulp, match.acceptable) == (False, 2.0, True)
        assert not same(expected + torch.tensor([0.0, 6 * eps], dtype=dtype), expected).acceptable
        assert same(expected.clone(), expected).bit_equal


def test_same_knows_what_cannot_be_compared() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")])
    assert same(x.clone(), x).bit_equal
    assert not same(torch.tensor([float("nan"), 1.0, float("inf")]), x).acceptable
    assert not same(torch.tensor([1.0, float("nan"), -float("inf")]), x).acceptable
    assert not same(torch.tensor([1.0, float("inf"), float("nan")]), x).acceptable
    assert not same(x.double(), x).acceptable and not same(x[:1], x).acceptable and not same(None, x).acceptable
    assert not same((x,), (x, x)).acceptable and same((x, x), (x, x)).bit_equal
    assert same(torch.tensor([1, 2]), torch.tensor([1, 2])).bit_equal
    assert not same(torch.tensor([1, 3]), torch.tensor([1, 2])).acceptable


def test_the_worst_of_several() -> None:
    x = torch.ones(3)
    near, far = same(x + 1e-7, x), same(x + 1, x)
    assert worst([near, far, same(x, x)]) == far and worst([]).bit_equal and near < far


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0))
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_copy_is_bare_and_fresh() -> None:
    pair = Pair()
    whole = nn.ModuleList([pair, nn.Linear(8, 8)])
    pair.first.forward = types.MethodType(lambda self, x: x * 0, pair.first)
    pair.called_from_outside = whole.forward  # a bound method of what contains it
    pair.register_forward_hook(lambda *_: pytest.fail("a copy has no hooks"))
    values = {k: v.clone() for k, v in pair.state_dict().items()}
    copy: Any = clone(pair, dtype=torch.bfloat16, seed=1)
    assert copy.first.weight.dtype == copy.table.dtype == torch.bfloat16 and copy.second.weight is copy.first.weight
    assert not torch.equal(copy.first.weight.float(), pair.first.weight)
    assert torch.equal(copy.table.float(), pair.table)
    assert "forward" not in vars(copy.first) and "called_from_outside" not in vars(copy)
    assert copy(torch.ones(1, 4, dtype=torch.bfloat16)).abs().max() > 0
    assert all(torch.equal(v, values[k]) for k, v in pair.state_dict().items()) and "forward" in vars(pair.first)
    again: Any = clone(pair, dtype=torch.bfloat16, seed=1)
    assert torch.equal(again.first.weight, copy.first.weight)


def test_a_copy_of_a_module_without_memory() -> None:
    copy = clone(nn.Linear(4, 4, device="meta"), dtype=None, seed=0)
    assert copy(torch.ones(1, 4)).isfinite().all()


def test_a_copy_has_no_accelerate_hook() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    linear = nn.Linear(4, 4)
    hooks.add_hook_to_module(linear, hooks.ModelHook())
    copy = clone(linear, dtype=None, seed=0)
    assert not {"_hf_hook", "_old_forward", "forward"} & set(vars(copy)) and "_hf_hook" in vars(linear)


DRAWN: dict[str, Any] = {
    "normal": lambda x: x.std() > 0.5,
    "uniform_2_4": lambda x: x.min() >= 2 and x.max() <= 4,
    "tiny": lambda x: 0 < x.abs().max() < 1e-2,
    "huge": lambda x: x.isfinite().all() and x.abs().max() > torch.finfo(x.dtype).max / 256,
    "zeros_rows": lambda x: (x == 0).all(-1).any() and not (x == 0).all(),
    "ramp": lambda x: (x[..., 1:] != x[..., :-1]).all() and not torch.equal(x[0, 0], x[0, 1]),
    "binary": lambda x: set(x.unique().tolist()) == {0.0, 1.0},
    "inf": lambda x: x.isinf().sum() == 1,
    "nan": lambda x: x.isnan().sum() == 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distribution", DRAWN)
def test_fresh_values(distribution: Any, dtype: torch.dtype) -> None:
    x = draw((2, 3, 16), dtype, torch.Generator().manual_seed(0), distribution)
    assert x.shape == (2, 3, 16) and x.dtype == dtype and x.is_contiguous()
    assert DRAWN[distribution](x)
    assert torch.equal(
        x.nan_to_num(), draw((2, 3, 16), dtype, torch.Generator().manual_seed(0), distribution).nan_to_num()
    )
