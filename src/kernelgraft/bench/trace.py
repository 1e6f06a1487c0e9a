"""Where a contender's GPU time goes: runs without the profiler for their length, one with it for the kernels.

While it is profiled, every module, every replaced site and every kernel of a graft stands in a range of its own; the
model is left as it was. Compiled modules have no ranges, so that nothing compiles anew: their kernels have no path.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from kernelgraft import machine
from kernelgraft.bench.coverage import Recorder, ranged
from kernelgraft.bench.result import Trace
from kernelgraft.bench.trace_events import MODULE, SITE, SOLUTION, STEP, mark
from kernelgraft.bench.trace_kernels import triton_names
from kernelgraft.bench.trace_parsing import coverage_line, parse
from kernelgraft.errors import UsageError
from kernelgraft.patch.applying import Applied
from kernelgraft.records import Graft, Regime
from kernelgraft.sites.discover import path_patterns

__all__ = ["coverage_line", "measure", "parse", "profile"]

WALL_RUNS = 3
"""Runs without the profiler; the median length counts."""
PREPARE = "prepare_inputs_for_generation"
"""The method that `generate` calls before each forward, outside what it compiles."""


def measure(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    regime: Regime,
    tokens: int,
    graft: Graft | None = None,
    applied: Applied | None = None,
    profiler: Callable[[Callable[[], Any]], dict[str, Any]] | None = None,
) -> Trace:
    """Trace what `run` (a short, warmed call of `generate`) does in a regime: its decode steps, or all before them.

    `tokens`: of one sequence's prompt; for decode it is replaced by the number of steps. About eight decode steps are
    enough: a trace has some thousand events a step. `graft`: for the original's `replaced_percent`. `applied`: the
    graft that is on the model; `graft` is not looked at then. `profiler` runs and returns a trace in Chrome's format;
    for tests. `run` is called WALL_RUNS + 1 times. If it makes no step of `generate`, all of it is the window. Raises
    UsageError if no kernel was recorded.
    """
    if profiler is None and not torch.cuda.is_available():
        raise UsageError("a trace of kernels needs a CUDA device; leave traces out on this machine")
    wall_ms = statistics.median(_wall_ms(model, run, regime) for _ in range(WALL_RUNS))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_marked(model))
        if graft is not None and applied is None:
            stack.enter_context(ranged(model, serving(graft, regime), _Spans()))
        if applied is not None:
            stack.enter_context(applied.wrapped(_in_range))
        trace = (profiler or profile)(run)
    return parse(
        trace,
        regime=regime,
        tokens=tokens,
        triton=triton_names(),
        wall_ms=wall_ms,
        sites=graft is not None and applied is None,
    )


def serving(graft: Graft, regime: Regime) -> Graft:
    """The graft without the patches that leave every measured call of a regime to the original."""
    kept = []
    for p in graft.accepted:
        seats = [seat for seat in p.seats if seat.regime == regime]
        if not seats or any(seat.seated for seat in seats):
            kept.append(p)
    return graft.model_copy(update={"patches": tuple(kept)})


def profile(run: Callable[[], Any]) -> dict[str, Any]:
    """The trace of a call, in Chrome's format, with CUDA activity."""
    torch.cuda.synchronize()
    # `acc_events` changes nothing where there is one cycle, but torch's warning about more of them.
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found: dict[str, Any] = json.loads(file.read_bytes())
    return found


def _wall_ms(model: nn.Module, run: Callable[[], Any], regime: Regime) -> float:
    """How long the steps of a regime last, the device waited for at both ends; all of the run if there are none."""
    turns: list[tuple[float, str]] = []

    def turn(found: str) -> None:
        if not turns or turns[-1][1] != found:
            _synchronise()
            turns.append((machine.clock(), found))

    _synchronise()
    began = machine.clock()
    with _steps(model, turn):
        run()
    _synchronise()
    ended = machine.clock()
    if not turns:
        return 1e3 * (ended - began)
    if turns[0][1] == "prefill":
        turns[0] = began, "prefill"  # what `generate` does before its first step is waited for, too
    ends = [*(at for at, _ in turns[1:]), ended]
    return 1e3 * sum(end - at for (at, found), end in zip(turns, ends, strict=True) if found == regime)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _steps(model: Any, begun: Callable[[str], None]) -> Iterator[None]:
    """Calls `begun` with its regime before each step of `generate`."""
    method = getattr(model, PREPARE, None)
    if method is None:
        yield
        return

    @functools.wraps(method)
    def before(*args: Any, **kwargs: Any) -> Any:
        inputs = method(*args, **kwargs)
        begun("prefill" if kwargs.get("is_first_iteration", _length(inputs) > 1) else "decode")
        return inputs

    held = model.__dict__.get(PREPARE, before)
    model.__dict__[PREPARE] = before
    try:
        yield
    finally:
        if held is before:
            del model.__dict__[PREPARE]
        else:
            model.__dict__[PREPARE] = held


def _length(inputs: dict[str, Any]) -> int:
    """Positions of a step."""
    given = (inputs.get(name) for name in ("input_ids", "inputs_embeds", "decoder_input_ids"))
    return max((x.shape[1] for x in given if isinstance(x, torch.Tensor)), default=1)


@contextlib.contextmanager
def _marked(model: nn.Module) -> Iterator[None]:
    """While it lasts, steps and modules leave their marks in a trace."""
    # `generate` keeps here what it compiled; it decodes with it, the prefill is not compiled and has its ranges.
    decodes_compiled = model.__dict__.get("_compiled_call") is not None
    with contextlib.ExitStack() as modules:
        if not any(_is_compiled(m) for m in model.modules()):
            modules.enter_context(_module_ranges(model))

        def begun(regime: str) -> None:
            if decodes_compiled and regime == "decode":
                modules.close()
            with record_function(mark(STEP, regime)):
                pass

        with _steps(model, begun):
            yield


def _is_compiled(module: nn.Module) -> bool:
    """What torch.compile makes of a module, or a module on which `compile` was called."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


@contextlib.contextmanager
def _module_ranges(model: nn.Module) -> Iterator[None]:
    """A range around each call of each module, by its path with list indices as `*`.

    Hooks would be simpler, but a fused kernel leaves a module that has hooks to the original, so the trace would be of
    another model. The way in that all modules share is replaced meanwhile; calls of other modules pass through.
    """
    patterns = path_patterns(model)
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        product = "product" if any(p.dim() > 1 for p in module.parameters(recurse=False)) else ""
        names[id(module)] = mark(MODULE, patterns[path], type(module).__name__, product)
    plain = nn.Module.__call__

    @functools.wraps(plain)
    def through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None:
            return plain(self, *args, **kwargs)
        with record_function(name):
            return plain(self, *args, **kwargs)

    nn.Module.__call__ = through  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


class _Spans(Recorder):
    """A range around each call of a replaced site's original."""

    def wrap(self, function: Callable[..., Any], key: str) -> Callable[..., Any]:
        """`function` in a range."""
        return _ranged_call(function, mark(SITE, key))


def _in_range(kernel: Callable[..., Any], solution: str) -> Callable[..., Any]:
    return _ranged_call(kernel, mark(SOLUTION, solution))


def _ranged_call(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def through(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return through
