"""Models on several devices and in several processes: two with gloo on the CPU, started once for all tests."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from hand_made import load
from parallel_samples import KINDS, Ranks
from torch import nn

from kernelgraft import machine, models
from kernelgraft.cutile import plans
from kernelgraft.errors import UsageError
from kernelgraft.sites import current, install
from kernelgraft.sites.install import wrapped

SAMPLES = Path(__file__).parent / "parallel_samples.py"
PATIENCE_S = 300


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    uneven = load("llama").model
    config = uneven.config.to_dict() | {"intermediate_size": 27}
    type(uneven)(type(uneven.config).from_dict(config)).save_pretrained(folder / "uneven")
    for name in KINDS:
        load(name).model.save_pretrained(folder / name)
    return Ranks(SAMPLES, folder).found(PATIENCE_S)


def of(found: list[dict[str, Any]], scenario: str) -> list[dict[str, Any]]:
    return [rank[scenario] for rank in found]


@pytest.mark.slow
def test_a_graft_of_the_whole_model_is_refused_by_a_part(found: list[dict[str, Any]]) -> None:
    for rank in of(found, "whole_graft"):
        assert rank["equal"]
        assert rank["applied"].startswith("MismatchError")
        assert "split over processes (tp=2)" in rank["applied"]


@pytest.mark.slow
def test_all_ranks_get_one_graft_of_their_own_sizes(found: list[dict[str, Any]]) -> None:
    first, second = of(found, "parts")
    assert first["hash"] == second["hash"]
    assert first["split"] == "tp=2"
    names = " ".join(first["definitions"])
    assert "attention_causal_h2_kv1_d32" in names  # of 4 and 2 heads
    assert "gated_mlp_silu_i128" in names  # of 256
    assert "rms_norm_h96" in names  # not split
    assert first["rejected"] == []
    assert first["parameters"] == 381_792  # of the whole model


@pytest.mark.slow
def test_the_graft_serves_every_rank_and_changes_no_token(found: list[dict[str, Any]]) -> None:
    wanted = of(found, "whole_graft")[0]["tokens"]
    for rank in of(found, "parts"):
        assert rank["tokens_equal"]
        assert rank["during"] == rank["after"] == wanted
        assert set(rank["served"]) == {"rms_norm", "rope", "gated_mlp", "attention", "residual_norm"}
        for family, (kernels, fallbacks, instances) in rank["served"].items():
            assert kernels >= 6 * instances, family
            assert not fallbacks, family
        # Under the function that transformers puts around them: a norm of queries and one of keys in each of 3 layers.
        assert rank["served"]["rms_norm"][2] == 3 + 3 + 4


@pytest.mark.slow
def test_the_model_is_left_as_it_was_on_every_rank(found: list[dict[str, Any]]) -> None:
    for rank in of(found, "parts"):
        assert rank["untouched"]
        assert rank["reverted"]
        assert rank["training"][1] is False


@pytest.mark.slow
def test_the_first_rank_writes(found: list[dict[str, Any]]) -> None:
    assert [rank["written"] for rank in of(found, "parts")] == [True, False]


@pytest.mark.slow
def test_an_error_of_the_first_rank_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    first, second = (rank["supplier"] for rank in of(found, "quarrels"))
    assert first == second
    assert first.startswith("UsageError")
    assert "nowhere" in first


@pytest.mark.slow
def test_a_rank_that_cannot_take_the_graft_is_named_and_nobody_waits(found: list[dict[str, Any]]) -> None:
    for rank in of(found, "quarrels"):
        assert all("rank 1" in reason and "already patched" in reason for reason in rank["reasons"])
        assert rank["reasons"]
        assert set(rank["again"]) == {"accepted"}
    assert of(found, "quarrels")[1]["kept"]


@pytest.mark.slow
def test_parts_of_other_sizes_fall_back_with_the_reason(found: list[dict[str, Any]]) -> None:
    first, second = of(found, "uneven")
    assert first["equal"]
    assert second["equal"]
    assert first["served"]["gated_mlp"][0] > 0
    assert not first["served"]["gated_mlp"][1]
    kernels, reasons, _ = second["served"]["gated_mlp"]
    assert kernels == 0
    assert any("intermediate_size=13 where it is 14" in reason for reason in reasons)
    assert second["served"]["residual_norm"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_kernels_serve_parts_of_many_kinds(name: str, found: list[dict[str, Any]]) -> None:
    for kinds in of(found, "kinds"):
        rank = kinds[name]
        assert rank["equal"]
        assert rank["untouched"]
        assert {"attention", "rope", "rms_norm", "residual_norm"} <= set(rank["served"])
        assert "gated_mlp" in rank["served"] or name in ("qwen3_moe", "gpt_oss")
        for family, (kernels, fallbacks, instances) in rank["served"].items():
            assert kernels >= 6 * instances, family
            assert not fallbacks, family


@pytest.mark.slow
def test_the_first_rank_alone_can_pass_caches_on(found: list[dict[str, Any]]) -> None:
    first, second = of(found, "caches")
    assert first == second
    steps = dict(first["steps"])
    assert steps["dynamic"] == steps["static"] == steps["at once"]


@pytest.mark.slow
def test_replicas_and_what_is_whole_while_it_runs_take_a_graft_of_the_whole(found: list[dict[str, Any]]) -> None:
    for rank in of(found, "replicas"):
        for how in ("ddp", "fsdp"):
            equal, served, *_ = rank[how]
            assert equal, how
            assert all(kernels > 0 and not fallbacks for kernels, fallbacks, _ in served.values()), how
        assert rank["fsdp"][2] == pytest.approx(rank["gradient"], rel=1e-4)
        assert rank["integrated"].startswith("UsageError")
        assert "FSDP" in rank["integrated"]


def around(module: nn.Module) -> None:
    """What transformers does to a module that takes part in tensor parallelism."""
    inner = module.forward

    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) + 1

    module.forward = outer  # type: ignore[method-assign]


def test_a_function_goes_under_what_is_put_around_a_module_and_out_again() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    around(module)
    before, outer = module(x), module.forward
    assert current(module) is nn.Linear.forward
    undo = install(module, "forward", lambda self, x: x * 0)
    assert module.forward is outer
    assert undo.active
    assert torch.equal(module(x), torch.ones(1, 2))
    undo()
    assert torch.equal(module(x), before)
    assert not undo.active
    cell = wrapped(module, outer)
    assert cell is not None
    assert cell.cell_contents == MethodType(nn.Linear.forward, module)


def test_a_function_that_keeps_another_modules_method_is_not_looked_into() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    around(first)
    second.forward = first.forward  # type: ignore[method-assign]
    assert wrapped(second, second.forward) is None


class OnSecondGpu:
    """What `fire` asks of a tensor."""

    is_cuda = True

    def get_device(self) -> int:
        return 1


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_goes_to_its_tensors_device_and_stream(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, launches = [current], []

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        before, now[0] = now[0], number
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(plans, "current", lambda: now[0])
    monkeypatch.setattr(plans, "_stream", lambda number: f"stream of {number}")
    monkeypatch.setattr(plans, "_launch", lambda stream, *_: launches.append((stream, now[0])))
    tensors: Any = (OnSecondGpu(),)
    plans.fire(plans.Plan(None, (1,), ()), tensors)
    assert launches == [("stream of 1", 1)]
    assert now == [current]


KERNELS = sorted((Path(plans.__file__).parents[1] / "kernels").glob("*.py"))


def on_its_device(tree: ast.AST) -> set[int]:
    """Lines where a tensor's device is the current one: made so, or asked for."""
    blocks: list[ast.With | ast.If] = [
        n
        for n in ast.walk(tree)
        if (isinstance(n, ast.With) and any("torch.cuda.device(" in ast.unparse(i.context_expr) for i in n.items))
        or (isinstance(n, ast.If) and "== current()" in ast.unparse(n.test))
    ]
    return {line for b in blocks for n in b.body for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.stem)
def test_kernels_launch_on_their_inputs_device_only(path: Path) -> None:
    """Through `fire`; Triton's `kernel[grid](…)` where the device is the current one, or in a function that is called
    only there; memory of the current device only where that was asked."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    safe = on_its_device(tree)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        own = [c.lineno for c in calls if ast.unparse(c.func) == function.name]
        guarded = bool(own) and all(line in safe for line in own)
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
            assert ast.unparse(call.func) not in ("ct.launch", "launch_kernel"), f"line {call.lineno}"
            if isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value).endswith("kernel"):
                assert guarded or call.lineno in safe, f"line {call.lineno} launches on the current device"
            if isinstance(call.func, ast.Subscript) and ast.unparse(call.func.value).endswith("makes"):
                assert "current()" in ast.unparse(function), f"line {call.lineno} allocates on the current device"


def test_child_processes_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert machine.processes() == (1, 2)
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & machine.child_environment().keys()
    assert os.environ["WORLD_SIZE"] == "2"


def test_random_weights_are_not_split() -> None:
    with pytest.raises(UsageError, match="save it to a folder"):
        models.load("config:llama", split=True)


def test_verbs_for_one_process_say_so_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kernelgraft import cli

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["kernelgraft", "bench", "tiny"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 2
    assert "`bench` is for one process" in capsys.readouterr().err
