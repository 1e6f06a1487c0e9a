"""The dispatcher: which implementation serves a call, and what is counted."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernelgraft.families.base import Family, Recognition, Seat
from kernelgraft.families.reference import define
from kernelgraft.patch import dispatch
from kernelgraft.patch.dispatch import AUTOCAST, BYPASSED, Dispatcher
from kernelgraft.records import (
    BuildSpec,
    Definition,
    Guard,
    Patch,
    Site,
    Solution,
    SolutionMeta,
    SourceFile,
    SourceRef,
)
from kernelgraft.records import Seat as SeatRecord

SITE = Site(
    kind="module",
    path="layers.*.scale",
    instances=("layers.0.scale",),
    class_name="tests.Scale",
    source=SourceRef(file="tests.py", first_line=1, last_line=2, sha256="0" * 64),
)


class Scale(Family):
    """x * w, as a family of its own."""

    name = "scale"
    kinds = frozenset({"module"})

    def recognise(self, site: Site, calls: Sequence[Any]) -> Recognition | None:
        return None

    def seat(self, semantics: dict[str, Any]) -> Seat:
        raise NotImplementedError

    def inputs(self, *args: Any) -> list[torch.Tensor]:
        raise NotImplementedError


def scale_definition(
    dtype: torch.dtype = torch.float32, *, bias: bool = False, constraints: Sequence[str] = ()
) -> Definition:
    vectors = {"w": (("h",), dtype)} | ({"b": (("h",), dtype)} if bias else {})
    names = ", ".join(["x", *vectors])
    return define(
        name=f"scale{len(vectors)}_{str(dtype).removeprefix('torch.')}",
        op_type="scale",
        family="scale",
        semantics={},
        axes={"rows": None, "cols": None, "h": 8},
        inputs={"x": (("rows", "cols", "h"), dtype), **vectors},
        outputs={"y": (("rows", "cols", "h"), dtype)},
        body=f"def run({names}):\n    return x * w{' + b' if bias else ''}\n",
        site=SITE,
        description="x * w",
        reference_error=0.0,
        constraints=constraints,
    )


def solution(definition: Definition, name: str, guard: Guard | None = None, body: str | None = None) -> Solution:
    return Solution(
        name=name,
        definition=definition.name,
        author="tests",
        spec=BuildSpec(language="python", target_hardware=("cpu",), entry_point="main.py::run"),
        sources=(SourceFile(path="main.py", content=body or f"# {name}\n{definition.reference}"),),
        meta=SolutionMeta(
            supplier="tests", family="scale", guard=guard or Guard(), fingerprint=definition.meta.fingerprint
        ),
    )


def seat(definition: Definition, work: int, name: str | None, **fields: Any) -> SeatRecord:
    return SeatRecord(
        definition=definition.name, regime="prefill", work=work, solution=name, seated=name is not None, **fields
    )


def dispatcher(
    definitions: Sequence[Definition], solutions: Sequence[Solution], seats: Sequence[SeatRecord]
) -> Dispatcher:
    patch = Patch(
        family="scale",
        sites=(SITE,),
        definitions=tuple(d.name for d in definitions),
        status="accepted",
        seats=tuple(seats),
    )
    return Dispatcher(patch, {d.name: d for d in definitions}, {s.name: s for s in solutions}, Scale())


def simple(guard: Guard | None = None, **fields: Any) -> tuple[Dispatcher, Solution]:
    definition = scale_definition()
    only = solution(definition, "only", guard)
    return dispatcher([definition], [only], [seat(definition, 6, "only", **fields)]), only


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape, 8, dtype=dtype), torch.randn(8, dtype=dtype)


def test_a_call_inside_the_guard_gets_the_kernel_and_is_counted() -> None:
    d, _ = simple()
    x, w = tensors(2, 3)
    for _ in range(3):
        kernel = d(x, w)
        assert kernel is not None
        assert torch.equal(kernel(x, w), x * w)
    assert d.served == {"only": 3}
    assert (d.calls, d.by_choice, d.fallbacks) == (3, 0, {})


def test_kernels_run_wrapped_for_a_while() -> None:
    d, s = simple()
    x, scale = tensors(2, 3)
    before = d(x, scale)
    seen: list[str] = []

    def wrap(kernel: Any, name: str) -> Any:
        def through(*inputs: Any) -> Any:
            seen.append(name)
            return kernel(*inputs)

        return through

    with d.wrapped(wrap):
        for rows in (2, 5):  # a shape known before, and a new one
            inputs = tensors(rows, 3)
            kernel = d(*inputs)
            assert kernel is not None
            torch.testing.assert_close(kernel(*inputs), inputs[0] * inputs[1])
    assert seen == [s.name, s.name]
    assert d(x, scale) is before
    assert d(*tensors(5, 3)) is before
    assert d.served == {s.name: 5}


def test_a_shape_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    d, _ = simple()
    asked: list[tuple[Any, ...]] = []
    decide = d._decide
    monkeypatch.setattr(d, "_decide", lambda inputs: asked.append(tuple(inputs)) or decide(inputs))
    for shape in ((2, 3), (2, 3), (1, 5), (2, 3), (1, 5)):
        d(*tensors(*shape))
    assert len(asked) == 2


def test_the_nearest_measured_work_decides_in_log_space() -> None:
    definition = scale_definition()
    names = ["small", "large"]
    solutions = [solution(definition, n) for n in names]
    d = dispatcher([definition], solutions, [seat(definition, 100, "large"), seat(definition, 1, "small")])
    for rows in (1, 5, 10, 11, 60, 5000):  # 10 is the middle of 1 and 100
        d(*tensors(1, rows))
    assert d.served == {"large": 3, "small": 3}


def test_a_seat_measured_at_the_very_sizes_comes_before_the_nearest() -> None:
    definition = scale_definition()
    solutions = [solution(definition, n) for n in ("batch", "length")]
    seats = [
        seat(definition, 32, "batch", axes={"rows": 32, "cols": 1}),
        seat(definition, 32, "length", axes={"rows": 1, "cols": 32}),
    ]
    d = dispatcher([definition], solutions, seats)
    d(*tensors(32, 1))
    d(*tensors(1, 32))
    d(*tensors(1, 32))
    assert d.served == {"batch": 1, "length": 2}


def test_an_unseated_regime_is_the_originals_by_choice_and_no_fallback() -> None:
    definition = scale_definition()
    original = SeatRecord(definition=definition.name, regime="decode", work=1, solution="only", seated=False)
    d = dispatcher([definition], [solution(definition, "only")], [original, seat(definition, 100, "only")])
    assert d(*tensors(1, 1)) is None
    assert d(*tensors(1, 100)) is not None
    assert (d.by_choice, d.served, d.fallbacks) == (1, {"only": 1}, {})


def test_the_definition_is_told_by_the_number_of_inputs() -> None:
    two, three = scale_definition(), scale_definition(bias=True)
    solutions = [solution(two, "two"), solution(three, "three")]
    d = dispatcher([two, three], solutions, [seat(two, 6, "two"), seat(three, 6, "three")])
    x, w = tensors(2, 3)
    kernel = d(x, w, w)
    assert kernel is not None
    assert torch.equal(kernel(x, w, w), x * w + w)
    assert d(x, w) is not None
    assert d(x) is None
    assert d.served == {"two": 1, "three": 1}
    assert list(d.fallbacks) == ["1 inputs, which no definition has"]


def test_two_definitions_with_as_many_inputs_are_told_by_dtype() -> None:
    single, half = scale_definition(), scale_definition(torch.bfloat16)
    solutions = [solution(single, "single"), solution(half, "half")]
    d = dispatcher([single, half], solutions, [seat(single, 6, "single"), seat(half, 6, "half")])
    d(*tensors(2, 3, dtype=torch.bfloat16))
    d(*tensors(2, 3))
    d(*tensors(2, 3))
    assert d.served == {"single": 2, "half": 1}


def test_what_the_definition_does_not_describe_falls_back_with_a_reason() -> None:
    d, _ = simple()
    x, w = tensors(2, 3)
    calls = {
        "x has dtype float64": (x.double(), w.double()),
        "x has 2 dimensions": (x[0], w),
        "x has h=4": (x[..., :4], w[:4]),
        "w is a float": (x, 1.0),
        "without elements": (x[:0], w),
    }
    for reason, inputs in calls.items():
        before = sum(d.fallbacks.values())
        assert d(*inputs) is None
        assert sum(d.fallbacks.values()) == before + 1
        assert any(reason in r for r in d.fallbacks), (reason, d.fallbacks)
    assert d.served == {"only": 0}


def test_a_tensor_subclass_falls_back() -> None:
    class Marked(torch.Tensor):
        pass

    d, _ = simple()
    x, w = tensors(2, 3)
    assert d(x, w) is not None
    assert d(x.as_subclass(Marked), w) is None
    assert d(x, torch.nn.Parameter(w)) is not None
    assert "Marked" in next(iter(d.fallbacks))


def test_a_call_that_needs_a_gradient_falls_back_unless_the_guard_says_autograd() -> None:
    refusing, _ = simple(Guard(autograd=False))
    allowing, _ = simple(Guard(autograd=True))
    x, w = tensors(2, 3)
    parameter = torch.nn.Parameter(w)
    assert refusing(x, parameter) is None
    assert allowing(x, parameter) is not None
    with torch.no_grad():
        assert refusing(x, parameter) is not None
    assert refusing(x, w) is not None
    assert refusing(x.clone().requires_grad_(), w) is None
    assert refusing(x, parameter) is None


def test_strides_are_asked_only_where_a_guard_asks() -> None:
    asking, _ = simple(Guard(contiguous=("x",)))
    easy, _ = simple()
    x, w = tensors(3, 2)
    turned = x.transpose(0, 1)
    flat = turned.contiguous()
    assert asking(flat, w) is not None
    assert asking(turned, w) is None  # the same shape was accepted just before
    assert asking(flat, w) is not None
    assert easy(flat, w) is not None
    assert easy(turned, w) is not None


def test_a_compiled_solution_serves_only_what_was_measured() -> None:
    definition = scale_definition()
    only = solution(definition, "only", Guard(static_shapes=True))
    by_work = dispatcher([definition], [only], [seat(definition, 6, "only")])
    assert by_work(*tensors(2, 3)) is not None
    assert by_work(*tensors(1, 7)) is None
    by_axes = dispatcher([definition], [only], [seat(definition, 6, "only", axes={"rows": 2, "cols": 3})])
    assert by_axes(*tensors(2, 3)) is not None
    assert by_axes(*tensors(1, 6)) is None  # as much work, but another shape
    assert any("measured shapes only" in reason for reason in by_axes.fallbacks)


def test_of_seats_of_equal_work_the_nearest_in_its_sizes_decides() -> None:
    definition = scale_definition()
    near, far = solution(definition, "near"), solution(definition, "far")
    seats = [
        seat(definition, 12, "near", axes={"rows": 4, "cols": 3}),
        seat(definition, 12, "far", axes={"rows": 1, "cols": 12}),
        seat(definition, 4096, None, axes={"rows": 1, "cols": 4096}),
    ]
    d = dispatcher([definition], [near, far], seats)
    for rows, cols in ((4, 2), (3, 3), (5, 4)):
        assert d(*tensors(rows, cols)) is not None
    assert d.served == {"near": 3, "far": 0}
    assert d(*tensors(1, 10)) is not None
    assert d(*tensors(1, 20)) is not None
    assert d.served == {"near": 3, "far": 2}
    assert d(*tensors(1, 4000)) is None
    assert d.by_choice == 1


def test_under_autocast_the_original_runs() -> None:
    d, _ = simple()
    x, w = tensors(2, 3)
    assert d(x, w) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert d(x, w) is None
    assert d(x, w) is not None
    assert d.fallbacks == {AUTOCAST: 1}


def test_a_call_that_the_seat_leaves_to_the_original_unasked_is_counted() -> None:
    d, _ = simple()
    original = d.counted(lambda x, w, extra=None: x * w)
    x, w = tensors(2, 3)

    def site(x: torch.Tensor, w: torch.Tensor, extra: Any = None) -> torch.Tensor:
        if extra is not None:
            return original(x, w, extra)
        kernel = d.select(x, w)
        result: torch.Tensor = original(x, w) if kernel is None else kernel(x, w)
        return result

    site(x, w)
    site(x, w, extra=1)
    site(x[0], w)
    assert d.fallbacks[BYPASSED] == 1
    assert sum(d.fallbacks.values()) == 2
    assert d.calls == 3


def test_the_table_and_the_reasons_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LARGEST_TABLE", 8)
    monkeypatch.setattr(dispatch, "MOST_REASONS", 4)
    definition = scale_definition()
    only = solution(definition, "only", Guard(max_axes={"cols": 10}))
    d = dispatcher([definition], [only], [seat(definition, 6, "only")])
    for cols in range(1, 40):
        d(*tensors(1, cols))
    assert len(d._table) <= 8
    assert len(d.fallbacks) <= 5
    assert d.served["only"] == 10
    assert sum(d.fallbacks.values()) == 29


def test_torch_compile_traces_the_decision_without_a_break_and_counts_nothing() -> None:
    three = scale_definition(bias=True)
    two = scale_definition(constraints=["rows == 2 or max(rows, cols) < 4"])
    doubled = textwrap.dedent("""
        def run(x, w):
            return x * w * 2
    """)
    solutions = [solution(two, "doubled", Guard(max_axes={"cols": 64}), doubled), solution(three, "three")]
    d = dispatcher([two, three], solutions, [seat(two, 6, "doubled"), seat(three, 6, "three")])

    def site(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kernel = d.select(x, w)
        result: torch.Tensor = x * w if kernel is None else kernel(x, w)
        return result

    compiled = torch.compile(site, backend="eager", fullgraph=True, dynamic=True)
    for rows, cols, factor in (
        (2, 3, 2),
        (2, 5, 2),
        (2, 64, 2),
        (2, 65, 1),
        (2, 70, 1),
        (3, 3, 2),
        (4, 3, 1),
        (5, 3, 1),
    ):
        x, w = tensors(rows, cols)
        torch.testing.assert_close(compiled(x, w), x * w * factor)
    assert d.calls == 0
    site(*tensors(2, 3))
    assert d.calls == 1
    torch._dynamo.reset()
