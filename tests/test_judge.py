"""The judge's parts: contract, static gate, cases, tolerance, child processes, and what an evaluation says."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judging import FAMILY, HIDDEN, captured, definition, solution

from kernelgraft import machine
from kernelgraft.errors import UsageError
from kernelgraft.evaluate import Captured, Judge, JudgeOptions
from kernelgraft.evaluate.cases import DISTRIBUTIONS, LAYOUTS, Cases, make, spread
from kernelgraft.evaluate.free_memory import RESERVE, SMALL, FreeMemory, requests
from kernelgraft.evaluate.judge import contract
from kernelgraft.evaluate.static import inspect_sources
from kernelgraft.evaluate.tolerance import compare
from kernelgraft.evaluate.zygote import Exit, Zygote
from kernelgraft.records import Definition, Guard, Status

RMS = definition("rms_norm")
HONEST = "def run(hidden_states, weight): return F.rms_norm(hidden_states, (64,), weight, 1e-6)"
FEW = replace(JudgeOptions.quick(), points=4, distributions=("normal", "tiny"), layouts=("offset",))


@pytest.fixture(scope="module")
def shared() -> Iterator[Judge]:
    with Judge(FEW, family=lambda name: FAMILY) as made:
        yield made


@pytest.fixture
def judge(shared: Judge) -> Judge:
    shared.options = FEW
    return shared


# What an evaluation says


def test_a_passed_evaluation_carries_its_evidence(judge: Judge) -> None:
    found = judge.verify(solution(RMS, HONEST), RMS, captured(RMS))
    assert found.status is Status.PASSED and found.reason is None and found.check is None
    assert (found.solution, found.definition) == ("torch_rms_norm_float32", "rms_norm_float32")
    assert found.cases > 10 and found.refused == 0
    assert found.error_ratio is not None and 0 < found.error_ratio <= 1.5
    assert found.max_absolute_error is not None and 0 < found.max_absolute_error < 1e-4
    assert found.max_relative_error is not None and 0 < found.max_relative_error < 1e-2
    assert found.seconds is not None and found.warmup_seconds is not None
    assert 0 < found.warmup_seconds < found.seconds


def test_seeds_are_drawn_anew_for_every_trial(judge: Judge) -> None:
    first, second = (judge.verify(solution(RMS, HONEST), RMS, captured(RMS)).seeds for _ in range(2))
    assert len(first) == FEW.seeds and len(set(first) | set(second)) == 2 * FEW.seeds
    assert JudgeOptions().seeds >= 5


def test_a_failed_evaluation_has_figures_where_numbers_were_compared(judge: Judge) -> None:
    found = judge.verify(solution(RMS, HONEST + " * 1.001"), RMS, captured(RMS))
    assert found.status is Status.INCORRECT_NUMERICAL and found.check == "C8"
    assert found.reason is not None
    assert found.reason.startswith("C8: wrong at the captured call number 0: output is off by relRMSE 0.001")
    assert found.max_absolute_error is not None and 1e-4 < found.max_absolute_error < 0.1
    assert found.error_ratio is not None and found.error_ratio > 100


def test_without_captured_calls_there_is_nothing_to_judge(judge: Judge) -> None:
    with pytest.raises(UsageError, match="`rms_norm_float32` has no captured call"):
        judge.verify(solution(RMS, HONEST), RMS, [])


def test_a_guard_that_refuses_every_captured_call_fails(judge: Judge) -> None:
    found = judge.verify(solution(RMS, HONEST, guard=Guard(max_axes={"batch_size": 0})), RMS, captured(RMS))
    assert found.status is Status.RUNTIME_ERROR
    assert found.reason == "C1: guard refuses the captured calls: batch_size is larger than 0"


def test_what_the_guard_refuses_is_counted_and_not_run(judge: Judge) -> None:
    source = """
    def run(hidden_states, weight):
        if hidden_states.size(1) > 7:
            raise RuntimeError("too long")
        return F.rms_norm(hidden_states, (64,), weight, 1e-6)
    """
    judge.options = replace(FEW, points=20)
    open_ended = judge.verify(solution(RMS, source), RMS, captured(RMS))
    assert open_ended.check == "C6" and "RuntimeError: too long" in (open_ended.reason or "")
    guarded = judge.verify(solution(RMS, source, guard=Guard(max_axes={"seq_len": 7})), RMS, captured(RMS))
    assert guarded.status is Status.PASSED, guarded.reason
    assert 3 <= guarded.refused < guarded.cases


def test_a_refused_captured_call_is_counted(judge: Judge) -> None:
    calls = captured(RMS, (1, 7), (1, 1), (1, 50))
    found = judge.verify(solution(RMS, HONEST, guard=Guard(max_axes={"seq_len": 40})), RMS, calls)
    assert found.status is Status.PASSED and found.refused >= 1


def test_weights_that_ask_for_gradients_are_served_all_the_same(judge: Judge) -> None:
    calls = [replace(c, inputs=(c.inputs[0], torch.nn.Parameter(c.inputs[1]))) for c in captured(RMS)]
    found = judge.verify(solution(RMS, HONEST, guard=Guard(autograd=False)), RMS, calls)
    assert found.status is Status.PASSED, found.reason


def test_the_original_is_the_yardstick(judge: Judge) -> None:
    """Code that is as coarse as what it replaces is accepted; beside an exact original it is not."""

    def coarse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.bfloat16(), (HIDDEN,), weight.bfloat16(), 1e-6).float()

    made = solution(
        RMS,
        "def run(x, w): return F.rms_norm(x.bfloat16(), (64,), w.bfloat16(), 1e-6).float()",
        guard=Guard(autograd=False),
    )
    assert judge.verify(made, RMS, captured(RMS), original=coarse).status is Status.PASSED
    assert judge.verify(made, RMS, captured(RMS)).status is Status.INCORRECT_NUMERICAL


def test_a_reference_that_fails_is_told_from_a_solution_that_fails(judge: Judge) -> None:
    def fails(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise ValueError("of its own")

    found = judge.verify(solution(RMS, HONEST), RMS, captured(RMS), original=fails)
    assert found.status is Status.RUNTIME_ERROR
    assert found.reason == "C8: the reference itself fails at the captured call number 0: ValueError: of its own"


def test_two_outputs_are_both_compared(judge: Judge) -> None:
    pair = definition("add_norm")
    source = "def run(r, x): return r + x, F.rms_norm(r + x, (64,), None, 1e-6) * {}"
    assert judge.verify(solution(pair, source.format(1)), pair, captured(pair)).status is Status.PASSED
    wrong = judge.verify(solution(pair, source.format(1.01)), pair, captured(pair))
    assert wrong.reason is not None and ": output is off by relRMSE 0.01" in wrong.reason


def test_the_family_is_found_by_the_definitions_name() -> None:
    asked: list[str] = []

    def find(name: str) -> Any:
        asked.append(name)
        return FAMILY

    with Judge(FEW, family=find) as judge:
        judge.verify(solution(RMS, HONEST), RMS, captured(RMS))
    assert asked == ["fake"]


# C1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"definition": "other"}, "it is a solution of `other`, not of `rms_norm_float32`"),
        ({"meta": {"fingerprint": "0" * 64}}, "it was made for another version of `rms_norm_float32`"),
        ({"spec": {"language": "cpp"}}, "its language `cpp` is none of python, triton, cuda-tile"),
        ({"spec": {"destination_passing_style": True}}, "it wants its outputs as arguments"),
        ({"meta": {"guard": Guard(contiguous=("gate",))}}, "its guard names the input `gate`"),
        ({"meta": {"guard": Guard(max_axes={"heads": 3})}}, "its guard names the axis `heads`"),
        ({"meta": {"guard": Guard(equal_axes=(("seq_len", "kv_len"),))}}, "its guard names the axis `kv_len`"),
    ],
)
def test_the_contract_is_checked_before_anything_runs(changes: dict[str, Any], words: str) -> None:
    made = solution(RMS, HONEST)
    update = {
        key: getattr(made, key).model_copy(update=value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    reason = contract(made.model_copy(update=update), RMS)
    assert reason is not None and reason.startswith(words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def run(x): return x", "`run` takes x, the definition has 2 inputs"),
        ("def run(x, w, y): return x", "`run` takes x, w, y, the definition has 2 inputs"),
        ("def run(x, w, *, eps): return x", "`run` takes x, w, *, eps, the definition has 2 inputs"),
        ("def go(x, w): return x", "`run` is not defined in the entry file"),
        ("def run(x, w:\n    return x", "syntax error in line 3"),
        ("def run(x, w, eps=1e-6): return x", None),
        ("def run(*inputs): return inputs[0]", None),
        ("def go(x, w): return x\nrun = torch.compile(go)", None),
    ],
)
def test_the_entry_takes_the_definitions_inputs(source: str, words: str | None) -> None:
    reason = contract(solution(RMS, source), RMS)
    assert reason is None if words is None else reason is not None and reason.startswith(words)


# C2


def findings(source: str, subject: Definition = RMS, **more: Any) -> tuple[str, ...]:
    return inspect_sources(solution(subject, source, **more), subject).denied


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os", "imports `os`"),
        ("from torch.utils.cpp_extension import load", "imports `torch.utils.cpp_extension.load`"),
        ("from torch import sys", "reaches `sys` through `torch.sys`"),
        ("from torch import *", "imports `torch.*`"),
        ("def run(x, w): import gc; return gc", "imports `gc`"),
        ("def run(x, w): return torch.os.environ", "reaches `os` through `torch.os`"),
        ("def run(x, w): return torch.load('file')", "uses `torch.load`"),
        ("def run(x, w): return torch.cuda.Stream()", "uses `torch.cuda.Stream`"),
        ("def run(x, w): return torch.cuda.graph(x)", "uses `torch.cuda.graph`"),
        ("def run(x, w): torch.set_default_dtype(torch.half)", "uses `torch.set_default_dtype`"),
        ("def run(x, w): return torch.randn(3)", "uses `torch.randn`"),
        ("def run(x, w): return torch.nn.functional._dropout", "reads the private attribute `_dropout`"),
        ("def run(x, w): return x.__class__", "reads the private attribute `__class__`"),
        ("def run(x, w): return x.item()", "uses `.item`"),
        ("def run(x, w): return x.data_ptr()", "uses `.data_ptr`"),
        ("def run(x, w): return eval('x')", "uses `eval`"),
        ("def run(x, w): return open('/etc/passwd')", "uses `open`"),
        ("def run(x, w): return id(x)", "uses `id`"),
        ("def run(x, w): return __builtins__", "uses `__builtins__`"),
        ("def run(x, w): return getattr(x, 'da' + 'ta')", "uses `getattr` with a name that is computed"),
        ("def run(x, w): return getattr(x, '_base')", "reads the attribute `_base`"),
        ("def run(x, w): return type('T', (torch.Tensor,), {})", "makes a class with `type`"),
        ("SEEN = []\ndef run(x, w): return x", "keeps something that can change at module level"),
        ("SEEN = torch.empty(3)\ndef run(x, w): return x", "keeps something that can change at module level"),
        ("SEEN = (1, [2])\ndef run(x, w): return x", "keeps something that can change at module level"),
        ("for i in range(3): pass", "runs code at module level (for)"),
        ("torch.relu = None", "sets an attribute or an item at module level"),
        ("def run(x, w): torch.relu = None", "sets the attribute `torch.relu`, which outlives the call"),
        ("def run(x, w): x.seen = 1", "sets the attribute `x.seen`, which outlives the call"),
        ("def run(x, w): run.n = 1", "sets the attribute `run.n`, which outlives the call"),
        ("K = 1\ndef run(x, w): K[0] = 1", "writes into `K`, which outlives the call"),
        ("N = 0\ndef run(x, w):\n    global N\n    N = 1", "`global N`"),
        ("def run(x, w):\n    n = 0\n    def f():\n        nonlocal n\n    return x", "`nonlocal n`"),
        ("def run(x, w, seen=[]): return x", "`run` has a default that can change between calls"),
        ("def run(x, w, seen=dict()): return x", "`run` has a default that can change between calls"),
        ("import functools\n@functools.cache\ndef f(x): return x", "caches `f` on arguments"),
        ("import functools\n@functools.cache\ndef f(n: int): return [n]", "caches something that can change in `f`"),
        ("def deco(f): return f\n@deco\ndef run(x, w): return x", "decorates `run` with `deco`"),
        ("class T(torch.Tensor): pass", "derives `T` from `torch.Tensor`"),
        ("class T(metaclass=type): pass", "`T` has a metaclass or a decorator"),
        ("class T:\n    n = []", "keeps something that can change at module level"),
        ("class T:\n    def __torch_function__(self): pass", "defines `__torch_function__`"),
        ("class T:\n    def f(self): self.n = 1", "sets the attribute `self.n`, which outlives the call"),
        ("async def run(x, w): return x", "defines the coroutine `run`"),
        ("def f(x):\n    try: return x\n    finally: pass\ndef run(x, w): return f(x)", "`try` in `f`"),
        ("try:\n    import triton\nexcept ImportError:\n    triton = None", "`try` at module level"),
        ("def run(x, w: return", "syntax error"),
    ],
)
def test_the_static_gate_denies(source: str, words: str) -> None:
    denied = findings(source)
    assert any(words in d for d in denied), denied
    assert all(d.startswith("kernel.py:") for d in denied)


TRITON = """
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def kernel(x, w, y, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < n
    v = tl.load(x + row * n + at, mask=mask, other=0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / n + eps)
    tl.store(y + row * n + at, v * tl.load(w + at, mask=mask), mask=mask)

def run(hidden_states, weight):
    out = torch.empty_like(hidden_states)
    rows = hidden_states.numel() // hidden_states.shape[-1]
    kernel[(rows,)](hidden_states.contiguous(), weight.view(-1), out, hidden_states.shape[-1], 1e-6)
    return out
"""
CUTILE = """
import functools
import cuda.tile as ct

ConstInt = ct.Constant[int]

@ct.kernel(occupancy=2)
def kernel(x, y, N: ConstInt):
    row = ct.bid(0)
    tile = ct.load(x, index=(row, 0), shape=(1, N))
    ct.store(y, index=(row, 0), tile=tile * ct.rsqrt(ct.sum(tile * tile, axis=1, keepdims=True) / N))

@functools.lru_cache(maxsize=None)
def grid(rows: int):
    return (rows, 1, 1)

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.eps = 1e-6
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ct.launch(torch.cuda.current_stream(), grid(x.shape[0]), kernel, (x, y, 64))
        return y

def run(hidden_states, weight):
    return Norm.apply(hidden_states, weight)
"""


def test_kernels_as_they_are_written_pass_the_static_gate() -> None:
    assert findings(TRITON, language="triton", supplier="other") == ()
    assert findings(CUTILE, language="cuda-tile", supplier="other") == ()
    assert findings("EPS = 1e-6\nLIMITS = (1, 2)\n__all__ = ['run']\n" + HONEST) == ()
    assert findings("def run(input, id):\n    '''Names of builtins as parameters.'''\n    return input + id") == ()
    assert findings("def unused():\n    try: pass\n    finally: pass\n" + HONEST) == ()


@pytest.mark.parametrize(
    "line", ["return torch.softmax(out, -1)", "return F.silu(out)", "return out.sum(-1)", "return out @ out.mT"]
)
def test_a_kernel_language_computes_in_kernels(line: str) -> None:
    source = TRITON.replace("return out", line)
    assert any("outside a kernel" in d for d in findings(source, language="triton", supplier="other"))
    assert findings(source, language="triton", supplier="torch") == ()


def test_narrower_dtypes_are_a_warning_that_tightens_the_tolerance(judge: Judge) -> None:
    half = "def run(x, w): return F.rms_norm(x.half(), (64,), w, 1e-6)"
    found = inspect_sources(solution(RMS, half), RMS)
    assert found.denied == () and "mentions half" in found.warnings[0]
    wide = definition("rms_norm", torch.bfloat16)
    assert inspect_sources(solution(wide, half), wide).warnings == ()
    exact = torch.randn(50, 50, dtype=torch.float64)
    native = (exact * (1 + 2e-3 * torch.randn(50, 50))).bfloat16()
    actual = (exact * (1 + 1.8 * 2e-3 * torch.randn(50, 50, dtype=torch.float64))).bfloat16()
    assert compare(actual, native, exact).wrong is None
    worse = (exact + 1.75 * (native.double() - exact)).float()
    assert compare(worse, native.float(), exact).wrong is None
    assert compare(worse, native.float(), exact, warned=True).wrong is not None


# Cases


def drawn(options: JudgeOptions, *sizes: tuple[int, ...], static_shapes: bool = False) -> Cases:
    return make(RMS, FAMILY, captured(RMS, *sizes), options, static_shapes=static_shapes)


def test_all_kinds_of_cases_are_drawn() -> None:
    made = drawn(JudgeOptions())
    by_check = {check: [c for c in made.cases if c.check == check] for check in ("C5", "C6", "C7", "C8", "C11")}
    assert len([c for c in made.cases if c.label.startswith("the captured call")]) == 2
    assert len(made.seeds) == 5 and all(0 <= s < 2**48 for s in made.seeds)
    assert len(by_check["C5"]) == 2 * 5 + 2 + 1, "seeds on two shapes, one input swapped, one element changed"
    sizes = {c.inputs[0].shape[:2] for c in by_check["C6"]}
    assert len(sizes) >= 10 and {(1, 2), (1, 127), (1, 6), (1, 8), (1, 14), (3, 3)} <= sizes
    assert {d for d in DISTRIBUTIONS if any(f"({d}," in c.label for c in by_check["C7"])} == set(DISTRIBUTIONS)
    assert {name for name in LAYOUTS if any(name in c.label for c in by_check["C11"])} == set(LAYOUTS)
    assert [c.gradient for c in made.cases].count(True) == 1
    quick = drawn(JudgeOptions.quick())
    assert 15 < len(quick.cases) < 0.7 * len(made.cases)


def test_sizes_that_nobody_knows_beforehand_are_among_the_cases() -> None:
    options = replace(JudgeOptions.quick(), held_out=3)
    known = {tuple(p.values()) for p in FAMILY.axis_points(RMS, [c.axes for c in captured(RMS)])}
    for _ in range(3):
        sizes = [tuple(c.inputs[0].shape[:2]) for c in drawn(options).cases if c.check == "C6"]
        assert len(set(sizes) - known) >= 1


def test_a_solution_that_is_compiled_per_shape_sees_only_captured_shapes() -> None:
    made = drawn(JudgeOptions(), (1, 7), (1, 1), static_shapes=True)
    assert {c.inputs[0].shape[:2] for c in made.cases} == {(1, 7), (1, 1)}
    assert {c.check for c in made.cases} == {"C5", "C7", "C8"}
    many = drawn(JudgeOptions(), *((1, n) for n in range(1, 21)), static_shapes=True)
    assert len({c.inputs[0].shape for c in many.cases}) == 6


def test_fresh_values_of_a_captured_shape_have_its_strides() -> None:
    x, w = captured(RMS, (3, 7))[0].inputs
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    call = Captured((turned, w), "prefill", "turned", {"batch_size": 3, "seq_len": 7})
    made = make(RMS, FAMILY, [call], JudgeOptions(), static_shapes=True)
    assert {c.inputs[0].stride() for c in made.cases} == {(64, 192, 1)}
    shown = Captured((x[:1].expand(3, 7, HIDDEN), w), "prefill", "shown", {"batch_size": 3, "seq_len": 7})
    made = make(RMS, FAMILY, [shown], JudgeOptions(), static_shapes=True)
    assert {c.inputs[0].stride()[0] for c in made.cases} == {0}
    seeded = next(c for c in made.cases if c.check == "C5")
    plain = FAMILY.inputs(RMS, shown.axes, torch.Generator().manual_seed(seeded.seed or 0), "normal")
    assert torch.equal(seeded.inputs[0], plain[0][:1].expand(3, 7, HIDDEN))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_keep_the_values(name: str) -> None:
    x = torch.randn(3, 4, 5)
    laid = LAYOUTS[name](x)
    assert laid is not None and laid.shape == x.shape
    assert torch.equal(laid, x if name != "expanded" else x[:1].expand(3, 4, 5))
    assert laid.storage_offset() == 1 if name == "offset" else not laid.is_contiguous()
    if name == "transposed":
        assert laid.stride(-1) == 1, "the last dimension stays where it is"
        assert LAYOUTS[name](torch.randn(1, 1, 5)) is None


def test_few_of_many_are_spread() -> None:
    assert spread(range(10), 4) == [0, 3, 6, 9]
    assert spread(range(3), 5) == [0, 1, 2] and spread(range(10), 1) == [0]


# C8


def test_a_more_exact_result_than_the_originals_is_right() -> None:
    exact = torch.randn(64, 64, dtype=torch.float64)
    native = (exact * (1 + 0.01 * torch.randn(64, 64))).bfloat16()
    found = compare(exact.bfloat16(), native, exact)
    assert found.wrong is None and found.ratio < 0.5


def test_three_times_the_originals_error_is_too_much() -> None:
    exact = torch.randn(64, 64, dtype=torch.float64)
    native = (exact + 0.001 * torch.randn(64, 64)).float()
    for times, right in ((1.8, True), (3.0, False)):
        found = compare((exact + times * (native.double() - exact)).float(), native, exact)
        assert (found.wrong is None) is right and found.ratio == pytest.approx(times, rel=0.01)
    few = compare((exact + 2.8 * (native.double() - exact)).float()[:2], native[:2], exact[:2])
    assert few.wrong is None, "a small output's error scatters more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_exact_original_leaves_room_for_rounding_only(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    native = torch.randn(64, 64).to(dtype)
    exact = native.double()
    sign = torch.randint(0, 2, (64, 64)) * 2 - 1
    assert compare(native, native, exact).wrong is None
    off = (exact * (1 + (2.0 if dtype is torch.float32 else 0.2) * eps * sign)).to(dtype)
    assert compare(off, native, exact).wrong is None
    for wrong in (exact * (1 + 10 * eps * sign), exact * 0, exact + 0.1):
        assert compare(wrong.to(dtype), native, exact).wrong is not None


def test_one_wrong_element_among_many_is_found() -> None:
    exact = torch.randn(512, 512, dtype=torch.float64)
    native = exact.bfloat16()
    actual = native.clone()
    actual[300, 17] += 1
    found = compare(actual, native, exact)
    assert found.wrong is not None and "is off by up to 1 where" in found.wrong
    assert found.max_absolute == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_infinities_and_nans_are_where_they_belong(bad: float) -> None:
    native = torch.randn(8, 8)
    actual = native.clone()
    actual[2, 3] = bad
    assert "in 1 of 64 places" in (compare(actual, native, native.double()).wrong or "")
    assert "in 1 of 64 places" in (compare(native, actual, actual.double()).wrong or "")
    assert compare(actual, actual, actual.double()).wrong is None
    flipped = torch.where(actual.isinf(), -actual, actual)
    assert compare(flipped, actual, actual.double()).wrong is None if bad != bad else "in 1 of 64"


def test_nan_of_the_original_may_vanish_only_where_a_family_says_so() -> None:
    native, exact = torch.randn(8, 8), torch.randn(8, 8).double()
    exact = native.double()
    actual = native.clone()
    native[1], exact[1] = float("nan"), float("nan")
    assert compare(actual, native, exact).wrong is not None
    assert compare(actual, native, exact, nan_may_vanish=True).wrong is None
    assert compare(native, actual, actual.double(), nan_may_vanish=True).wrong is not None, "never the other way"


def test_overflow_may_be_right_or_as_the_original_has_it() -> None:
    exact = torch.tensor([1e10, 1.0], dtype=torch.float64)
    half = torch.tensor([float("inf"), 1.0], dtype=torch.float16)
    assert compare(half, half, exact).wrong is None
    assert compare(torch.tensor([65504.0, 1.0]).half(), half, exact).wrong is not None
    edge = torch.tensor([65510.0], dtype=torch.float64)
    for value in (65504.0, float("inf")):
        assert compare(torch.tensor([value]).half(), torch.tensor([65504.0]).half(), edge).wrong is None
    # The original overflowed on the way, float64 did not: nothing is asked there, everything elsewhere.
    overflowed = torch.tensor([float("nan"), 1.0])
    small = torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert compare(torch.tensor([7.0, 1.0]), overflowed, small).wrong is None
    assert compare(torch.tensor([7.0, 1.1]), overflowed, small).wrong is not None
    # It may come out finite, as one over an infinite variance: then a NaN is no worse, but elsewhere it is.
    nan, vanished = float("nan"), torch.tensor([0.0, 1.0])
    assert compare(torch.tensor([nan, 1.0]), vanished, small).wrong is None
    assert compare(torch.tensor([0.0, nan]), vanished, small).wrong is not None
    assert compare(torch.tensor([nan, 1.0]), torch.tensor([3.0, 1.0]), small).wrong is not None


def test_a_row_that_the_original_lost_asks_nothing_where_it_comes_near_by_chance() -> None:
    # A layer norm whose variance overflowed gives its bias, which is near the exact result in some places.
    exact = torch.stack((torch.linspace(-2, 2, 101), torch.linspace(1, 2, 101))).double()
    native = torch.stack((torch.full((101,), 0.5), torch.linspace(1, 2, 101)))
    lost = native.clone()
    lost[0] = float("nan")
    assert compare(lost, native, exact).wrong is None
    right = native.clone()
    right[1, 4] = float("nan")
    assert "in 1 of 202 places" in (compare(right, native, exact).wrong or "")


def test_an_original_that_is_no_yardstick_lifts_no_bound() -> None:
    exact = torch.randn(64, 64, dtype=torch.float64)
    native = torch.zeros(64, 64)
    assert compare(torch.zeros(64, 64), native, exact).wrong is None, "as the original"
    assert compare(exact.float(), native, exact).wrong is None, "right"
    assert compare(0.5 * exact.float(), native, exact).wrong is not None, "neither"
    signs = exact.sign()
    assert "relRMSE 0.3 where" in (compare(0.7 * signs.float(), native, signs).wrong or "")


def test_integers_and_booleans_are_equal() -> None:
    numbers = torch.arange(10)
    assert compare(numbers, numbers.clone(), numbers.double()).wrong is None
    assert compare(numbers + (numbers == 3), numbers, numbers).wrong == "output differs in 1 of 10 places"
    flags = numbers > 4
    assert compare(~flags, flags, flags, name="mask").wrong == "mask differs in 10 of 10 places"


def test_empty_and_zero_outputs_can_be_compared() -> None:
    nothing, zeros = torch.empty(0, 4), torch.zeros(4, 4)
    assert compare(nothing, nothing, nothing.double()).wrong is None
    assert compare(zeros, zeros, zeros.double()).wrong is None
    assert compare(zeros + 1e-30, zeros, zeros.double()).wrong is not None


# Child processes


class Watched:
    """Stands between a judge and its zygote: keeps what was sent, and when the answer came."""

    def __init__(self, real: Zygote) -> None:
        self.real, self.requests, self.answered = real, list[dict[str, Any]](), False
        self.sent = b""

    def run(self, folder: Path, **more: Any) -> Exit:
        self.requests.append(json.loads((folder / "request.json").read_text()))
        self.sent = b"".join(p.read_bytes() for p in sorted(folder.iterdir()))
        self.answered = False
        ended = self.real.run(folder, **more)
        self.answered = True
        return ended


@pytest.fixture
def watched(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched(judge._zygote)
    monkeypatch.setattr(judge, "_zygote", made)
    return made


def test_nothing_expected_leaves_the_judge(judge: Judge, watched: Watched) -> None:
    when: list[bool] = []

    def original(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        when.append(watched.answered)
        return torch.nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-6)

    found = judge.verify(solution(RMS, HONEST), RMS, captured(RMS), original=original)
    assert found.status is Status.PASSED and when and all(when), "the original ran before the outputs came back"
    assert b"keepdim=True" in RMS.reference.encode() and b"keepdim=True" not in watched.sent
    assert set(watched.requests[0]) == {
        *("solution", "device", "cases", "interpret", "wrap_allocations", "repeats", "timeout_s", "memory_bytes"),
    }
    assert not any(str(seed).encode() in watched.sent for seed in found.seeds)


def test_the_order_of_the_cases_is_drawn_anew(judge: Judge, watched: Watched) -> None:
    for _ in range(2):
        judge.verify(solution(RMS, HONEST), RMS, captured(RMS))
    first, second = ([c["id"] for c in r["cases"]] for r in watched.requests)
    assert sorted(first) == sorted(second) == list(range(len(first)))
    assert first != second


def test_one_solution_leaves_nothing_for_the_next(judge: Judge) -> None:
    judge.options = replace(FEW, static_gate=False)
    patches = "torch.rms_norm = lambda *a: None\ntorch.nn.functional.rms_norm = lambda *a: None\n"
    assert judge.verify(solution(RMS, patches + HONEST), RMS, captured(RMS)).check == "C2"
    assert judge.verify(solution(RMS, HONEST), RMS, captured(RMS)).status is Status.PASSED


def test_what_a_solution_started_is_ended(judge: Judge, tmp_path: Path) -> None:
    judge.options = replace(FEW, static_gate=False)
    note = tmp_path / "pid"
    source = f"""
    import subprocess
    STARTED = subprocess.Popen(["sleep", "600"])
    open({str(note)!r}, "w").write(str(STARTED.pid))
    """
    judge.verify(solution(RMS, textwrap.dedent(source) + HONEST), RMS, captured(RMS))
    deadline = time.monotonic() + 10
    while _running(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running(int(note.read_text()))


def _running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


POISONED = """
import torch
from kernelgraft.evaluate.worker import _Poison
early = torch.empty_like
poison = _Poison(torch.device("cpu"), wrap=True)
poison.mallopt = None  # as on a GPU, or without glibc
like = torch.zeros(3)
for byte in (0xFF, 0xA5, 0x7B):
    with poison.filling(byte):
        made = [
            torch.empty(3),
            torch.empty_like(like),
            torch.empty_strided((3,), (1,)),
            torch.empty_permuted((2, 3), (1, 0)),
            torch.empty((2, 2), dtype=torch.bfloat16),
            like.new_empty(3),
            like.new_empty_strided((3,), (1,)),
        ]
        assert all((x.untyped_storage().tolist() == [byte] * x.untyped_storage().nbytes()) for x in made), made
        assert torch.empty(2, dtype=torch.bool).tolist() == [True, True]
        assert torch.empty(3, device="meta").shape == (3,) and torch.empty(0).numel() == 0
    assert made[0].isnan().all() == (byte == 0xFF)
assert torch.zeros(3).tolist() == [0, 0, 0] and early is not torch.empty_like
"""


def test_allocating_functions_hand_out_garbage() -> None:
    subprocess.run([sys.executable, "-c", POISONED], env=machine.child_environment(), check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system call is Linux's")
def test_a_job_does_not_outlive_a_killed_zygote(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    source = f"""
    import os
    with open({str(note)!r}, "a") as file:
        file.write(str(os.getpid()) + chr(10))
    while True: pass
    """
    with Judge(replace(FEW, static_gate=False, timeout_s=3.0), family=lambda name: FAMILY) as judge:
        process = judge._zygote.process
        assert process is not None

        def kill() -> None:
            while not note.exists() or not note.read_text().endswith("\n"):
                time.sleep(0.01)
            process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        found = judge.verify(solution(RMS, textwrap.dedent(source) + HONEST), RMS, captured(RMS))
        killer.join()
    assert found.status is Status.TIMEOUT, "it was tried again by a new zygote"
    pids = [int(line) for line in note.read_text().split()]
    assert len(pids) == 2 and not any(map(_running, pids))


def test_a_lost_zygote_is_replaced(judge: Judge) -> None:
    assert judge._zygote.process is not None
    os.kill(judge._zygote.process.pid, signal.SIGKILL)
    judge._zygote.process.wait()
    assert judge.verify(solution(RMS, HONEST), RMS, captured(RMS)).status is Status.PASSED


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_zygote_has_one_thread_and_ends_with_the_judge() -> None:
    with Judge(FEW, family=lambda name: FAMILY) as judge:
        judge.verify(solution(RMS, HONEST), RMS, captured(RMS))
        assert judge._zygote.process is not None
        pid = judge._zygote.process.pid
        assert "Threads:\t1\n" in Path(f"/proc/{pid}/status").read_text(), "forking with threads is not safe"
        judge.verify(solution(RMS, HONEST, uses_compiler=True), RMS, captured(RMS))
        assert "Threads:\t1\n" in Path(f"/proc/{pid}/status").read_text(), "nor after the compiler was loaded"
    assert not _running(pid)


def test_the_users_script_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\n"
        "from judging import *\n"
        "from kernelgraft.evaluate import Judge, JudgeOptions\n"
        "subject = definition('rms_norm')\n"
        f"made = solution(subject, {HONEST!r})\n"
        "options = JudgeOptions(points=2, distributions=('normal',), layouts=(), seeds=1)\n"
        "with Judge(options, family=lambda name: FAMILY) as judge:\n"
        "    print(judge.verify(made, subject, captured(subject)).status.value)\n"
    )
    environment = machine.child_environment(PYTHONDONTWRITEBYTECODE="1")
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["once", "PASSED"]


def test_where_the_system_cannot_fork_every_job_is_a_process() -> None:
    options = replace(FEW, fork=False)
    with Judge(options, family=lambda name: FAMILY) as judge:
        assert judge._zygote.process is None
        assert judge.verify(solution(RMS, HONEST), RMS, captured(RMS)).status is Status.PASSED
        judge.options = replace(options, timeout_s=6.0)
        hangs = judge.verify(solution(RMS, "def run(x, w):\n    while True: pass"), RMS, captured(RMS))
        assert hangs.status is Status.TIMEOUT and hangs.reason is not None
        assert hangs.reason.startswith("C4: took longer than 6 s")


def test_how_a_process_ended_in_words() -> None:
    assert Exit(3, timed_out=False).words() == "exited with status 3"
    assert Exit(-int(signal.SIGSEGV), timed_out=False).words() == "was ended by SIGSEGV"
    assert Exit(-200, timed_out=False).words() == "was ended by signal 200"


def test_the_package_is_light_until_a_name_is_used() -> None:
    code = "import sys, kernelgraft.evaluate as e; assert 'torch' not in sys.modules; print(*dir(e))"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=machine.child_environment(), capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["Captured", "Choice", "Judge", "JudgeOptions", "Timing", "decide", "interleave"]


# Free memory of a GPU


class Pool:
    """One pool of torch's allocator: best fit; what a request leaves of a block stays free."""

    def __init__(self, free: list[int], *, small: bool) -> None:
        self.free, self.small = sorted(free), small

    def take(self, size: int) -> None:
        rounded = -(-size // 512) * 512
        block = next((x for x in self.free if x >= rounded), None)
        assert block is not None, f"{size} bytes come from the driver"
        self.free.remove(block)
        rest = block - rounded
        if rest >= (512 if self.small else SMALL + 1):
            self.free = sorted([*self.free, rest])


def segment(kind: str, sizes: list[int], **fields: Any) -> dict[str, Any]:
    blocks = [{"size": size, "state": "inactive"} for size in sizes]
    return {"stream": 0, "segment_type": kind, "segment_pool_id": (0, 0), "blocks": blocks, **fields}


@pytest.mark.parametrize("seed", range(20))
def test_the_requests_take_every_free_block(seed: int) -> None:
    draw = random.Random(seed).randint
    small = [512 * draw(1, 4096) for _ in range(draw(0, 30))] + [2 * SMALL] * draw(0, 3)
    large = [SMALL + 512 * draw(1, 100000) for _ in range(draw(0, 20))]
    pools = {True: Pool(small, small=True), False: Pool(large, small=False)}
    cut = draw(0, len(small))
    made = [segment("small", small[:cut]), segment("small", small[cut:]), segment("large", large)]
    made[0]["blocks"].append({"size": 512, "state": "active_allocated"})
    others = [segment("small", [1024], stream=7), segment("large", [2 * SMALL], segment_pool_id=(0, 3))]
    for size in requests([*made, *others], 0):
        pools[size <= SMALL].take(size)
    assert pools[True].free == pools[False].free == []


def test_the_reserve_and_all_free_blocks_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: what is asked for. What the allocator does with it is tested on a GPU."""
    segments = [segment("small", [1024], device=0), segment("large", [3 << 20], device=1)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    made: list[torch.Tensor] = []
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, **k: made.append(full(*a, **k)) or made[-1])
    free = FreeMemory(torch.device("cpu"))
    free.returned = [777]
    free.fill(0x7B)
    assert [x.numel() for x in made] == [*RESERVE, 777, 1024]
    assert all(bool((x[::511] == 0x7B).all()) for x in made)


def _from_the_allocator() -> Any:
    return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_free_blocks_of_every_size_hold_the_byte() -> None:
    old = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (100, 5000, 70_000, 3 << 20, 30 << 20) * 3]
    kept = old[1::2]
    del old
    free = FreeMemory(torch.device("cuda"))
    allocate = _from_the_allocator()
    sizes = (1, 600, 5000, 5000, 70_000, SMALL - 1, SMALL, SMALL + 1, 3 << 20, 11 << 20, 100)
    for byte in (0xFF, 0x7B):
        free.fill(byte)
        found = [allocate((n,), (1,), torch.uint8) for n in sizes]
        assert all(bool((x == byte).all()) for x in found)
        del found
    free.expect([torch.empty(200 << 20, dtype=torch.uint8, device="cuda")])
    free.fill(0xA5)
    assert bool((allocate((200 << 20,), (1,), torch.uint8) == 0xA5).all())
    assert all(not bool(x.any()) for x in kept), "memory in use was written"


UNWRITTEN = """
allocate = torch._C._dynamo.guards._empty_strided_cuda

def run(gate, up):
    y = allocate(tuple(gate.shape), torch.empty(gate.shape, device="meta").stride(), gate.dtype)
    right = F.silu(gate) * up
    y.view(-1)[:{end}].copy_(right.reshape(-1)[:{end}])
    return y
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("end", "status"), [("None", Status.PASSED), ("-1", Status.INCORRECT_NUMERICAL)])
def test_an_element_left_unwritten_on_a_gpu_is_seen(end: str, status: Status) -> None:
    subject = definition("act_mul")
    calls = [
        replace(call, inputs=tuple(x.cuda() for x in call.inputs)) for call in captured(subject, (1, 7), (2, 1), (1, 1))
    ]
    made = solution(subject, UNWRITTEN.format(end=end), uses_compiler=True, guard=Guard(autograd=False))
    with Judge(replace(FEW, static_gate=False), family=lambda name: FAMILY) as judge:
        found = judge.verify(made, subject, calls)
    assert found.status is status, found
