"""What launchers allocate on a GPU past torch's dispatcher is what torch's own functions would give."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

from kernelgraft.cutile import plans
from kernelgraft.cutile.recording import recording
from kernelgraft.cutile.tuning import forget_plans
from kernelgraft.kernels.examples import MODULES, examples
from kernelgraft.kernels.rms_norm import rms_norm

SHARED = ("row_plans",)
"""Launch for other modules."""


def modules() -> dict[str, Any]:
    """Kernel modules by name."""
    return {name: importlib.import_module(f"kernelgraft.kernels.{name}") for name in (*MODULES, *SHARED)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """As on a GPU, with tensors on `meta` for those on it: what has been allocated."""
    listed: list[tuple[Any, ...]] = []

    def allocate(*layout: Any) -> torch.Tensor:
        listed.append(layout)
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def makers(device: int, *layouts: Any) -> Any:
        assert device == 0
        return tuple(functools.partial(allocate, *layout) for layout in layouts)

    for module in modules().values():
        for name, stand_in in (("makers", makers), ("current", lambda: 0)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    forget_plans(*modules().values())
    yield listed
    forget_plans(*modules().values())


def results(module: str) -> list[Any]:
    """Layouts of the results of a module's examples, and of all that they launch with."""
    found = []
    for example in examples()[module]:
        with recording() as launches:
            given = example.run("meta")
        tensors = [given] if isinstance(given, torch.Tensor) else list(given or ())
        arguments = [a for launch in launches for a in launch.args if isinstance(a, torch.Tensor)]
        found.append([(tuple(t.shape), t.stride(), t.dtype) for t in (*tensors, *arguments)])
    return found


USERS = (
    *("rms_norm", "add_rms_norm", "layer_norm", "act_and_mul", "rope", "qk_norm_rope", "linear_decode", "argmax"),
    "sampling",
)


@pytest.mark.parametrize("module", [*USERS, "attention_decode"])
def test_results_lie_as_torch_lays_them_out(module: str, request: pytest.FixtureRequest) -> None:
    forget_plans(*modules().values())
    torch.manual_seed(0)
    before = results(module)
    made = request.getfixturevalue("made")
    assert results(module) == before
    assert len(made) >= len(before), "nothing was allocated this way"


def test_a_dense_input_in_another_order_gives_its_order(made: list[tuple[Any, ...]]) -> None:
    x = torch.empty(2, 8, 16, device="meta").transpose(0, 1)
    with recording():
        y = rms_norm(x, torch.empty(16, device="meta"))
    assert y.stride() == x.stride() == torch.empty_like(x).stride() and len(made) == 1


def test_a_call_without_a_gpu_does_not_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking opens the driver, which a judge's child with limited memory cannot, nor one that is to have no GPU."""

    def asked() -> int:
        raise AssertionError("asked for the current device")

    for module in (plans, *modules().values()):
        if hasattr(module, "current"):
            monkeypatch.setattr(module, "current", asked)
    for name in MODULES:
        results(name)


def test_only_on_the_current_device(made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USERS:
        if hasattr(modules()[name], "current"):
            monkeypatch.setattr(modules()[name], "current", lambda: 1)
    for name in USERS:
        results(name)
    assert not made


def test_where_torch_has_no_such_function_its_own_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ((2, 3), (3, 1), torch.float32)
    assert plans.makers(-1, layout) is None
    monkeypatch.setattr(plans, "_allocate", lambda *layout: layout)
    (make,) = plans.makers(0, layout) or ()
    assert make() == layout
    monkeypatch.setattr(plans, "_allocate", None)
    assert plans.makers(0, layout) is None


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    (make,) = plans.makers(torch.cuda.current_device(), ((2, 3), (1, 2), torch.bfloat16)) or ()
    x = make()
    assert x.is_cuda and x.stride() == (1, 2) and x.dtype is torch.bfloat16 and not x.requires_grad
