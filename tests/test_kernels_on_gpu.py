"""Every launch of our kernels' examples on a GPU against the same launch under the interpreter."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
import cuda.tile as ct

from kernelgraft.cutile import interpreted
from kernelgraft.cutile.interpreter import Options, launch, standing_in
from kernelgraft.kernels.examples import MODULES, examples

BLOCKS, ELEMENTS = 192, 1 << 23
"""Larger launches are interpreted only where a kernel has no smaller one."""
TOO_LARGE = 1 << 27
"""Elements from which a launch of many blocks takes the interpreter minutes: a product with a whole vocabulary."""
ROOM = {"rope": 4.0, "qk_norm_rope": 4.0}
"""Roundings allowed where they are not of the result: products are rounded before they are added, unless the compiler
makes one instruction of both, and with random tables they are larger than their sum."""
ON_GPU = (ct.launch,)
"""Out of reach of whoever replaces it."""

Launch = tuple[Any, tuple[int, ...], list[Any], list[Any]]
"""A kernel, its grid, its arguments on the CPU as they were before, and what the GPU left of them."""


def on_cpu(args: Sequence[Any], seen: dict[Any, torch.Tensor]) -> list[Any]:
    """Copies with the same strides; arguments that are one tensor stay one."""
    copies: list[Any] = []
    for value in args:
        if isinstance(value, tuple | list):
            copies.append(type(value)(on_cpu(value, seen)))
            continue
        if not isinstance(value, torch.Tensor):
            copies.append(value)
            continue
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
        key = value.data_ptr(), extent, value.dtype
        if key not in seen:
            seen[key] = value.detach().as_strided((extent,), (1,)).to("cpu", copy=True)
        copies.append(seen[key].as_strided(value.shape, value.stride()))
    return copies


def recorded(run: Callable[[str], Any], device: str, on_device: Callable[..., Any]) -> list[Launch]:
    """The launches of an example, all of them done on the device."""
    found: list[Launch] = []

    def instead(grid: Sequence[int], kernel: Any, args: Sequence[Any]) -> None:
        before = on_cpu(args, {})
        on_device(grid, kernel, args)
        found.append((kernel, tuple(grid), before, on_cpu(args, {})))

    with standing_in(Options(instead=instead), None):
        run(device)
    return found


def tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """Those among the arguments and in their tuples."""
    found: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors(value)
    return found


def size(item: Launch) -> tuple[int, int]:
    return math.prod(item[1]), sum(x.numel() for x in tensors(item[2]))


def distance(actual: torch.Tensor, wanted: torch.Tensor, rounding: float) -> float:
    """Of what is allowed: a rounding of the value and of the tensor's root mean square; of integers, how many."""
    if not actual.dtype.is_floating_point:
        return float((actual != wanted).sum())
    if not actual.numel():
        return 0.0
    x, y = actual.double(), wanted.double()
    finite = y[y.isfinite()]
    typical = finite.pow(2).mean().sqrt() if finite.numel() else torch.zeros(())
    same = (x == y) | (x.isnan() & y.isnan())
    ratios = torch.where(same, 0.0, (x - y).abs() / (rounding * (y.abs() + typical)))
    return float(ratios.nan_to_num(math.inf, math.inf).max())


def compare(module: str, device: str, on_device: Callable[..., Any]) -> dict[str, int]:
    """Kernels of a module with the number of their launches that were compared."""
    launches = [item for example in examples()[module] for item in recorded(example.run, device, on_device)]
    launches.sort(key=size)
    compared: dict[str, int] = {}
    for item in launches:
        kernel, grid, args, after = item
        name = kernel._pyfunc.__name__
        blocks, elements = size(item)
        if name in compared and (blocks > BLOCKS or elements > ELEMENTS):
            continue
        if blocks > BLOCKS // 2 and elements > TOO_LARGE:
            continue
        floats = [x.dtype for x in tensors(args) if x.dtype.is_floating_point]
        # Half types are also what parts of a float32 result are rounded to on the way.
        rounding = ROOM.get(module, 1.0) * max([2.0**-16, *(torch.finfo(t).eps for t in floats)])
        with interpreted(check=False):
            launch(grid, kernel, args)
        for number, (mine, theirs) in enumerate(zip(tensors(args), tensors(after), strict=True)):
            ratio = distance(theirs, mine, rounding)
            assert ratio <= 1, f"`{name}` on {grid}: tensor {number}: {ratio:.3g} times the allowed distance away"
        compared[name] = compared.get(name, 0) + 1
    return compared


@pytest.mark.gpu
@pytest.mark.parametrize("module", MODULES)
def test_launches_give_what_the_interpreter_gives(module: str) -> None:
    def on_device(grid: Sequence[int], kernel: Any, args: Sequence[Any]) -> None:
        ON_GPU[0](torch.cuda.current_stream(), tuple(grid), kernel, tuple(args))
        torch.cuda.synchronize()

    compared = compare(module, "cuda", on_device)
    print(module, compared)
    assert compared


@pytest.mark.parametrize("wrong_by", [0.0, 0.02])
def test_the_comparison_finds_what_is_further_away_than_a_rounding(wrong_by: float) -> None:
    def on_device(grid: Sequence[int], kernel: Any, args: Sequence[Any]) -> None:
        with interpreted(check=False, shuffle=3):
            launch(grid, kernel, args)
        result = next(x for x in reversed(args) if isinstance(x, torch.Tensor))
        result.flatten()[-1] *= 1 + wrong_by

    def run(device: str) -> None:
        from kernelgraft.kernels.rms_norm import rms_norm

        rms_norm(torch.randn(4, 96, dtype=torch.bfloat16), torch.rand(96).bfloat16())

    module = types.SimpleNamespace(name="rms_norm", run=run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.examples", lambda: {"rms_norm": [module]})
        if wrong_by:
            with pytest.raises(AssertionError, match="times the allowed distance away"):
                compare("rms_norm", "cpu", on_device)
        else:
            assert compare("rms_norm", "cpu", on_device) == {"rms_norm_kernel": 1}
