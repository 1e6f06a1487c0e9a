"""The judge: is a Solution right on everything that its guard lets through?

Seeds, references and verdict stay in this process; the Solution runs in another one that gets inputs only, and the
expected results are computed after its outputs have come back. A cuTile Solution for a GPU is run by the interpreter
first. Checks are named as in the documentation: C1 contract,
C2 sources, C4 process, C5 seeds, C6 sizes, C7 distributions, C8 numbers, C9 uninitialised memory, C10 inputs unchanged,
C11 memory layouts and aliasing.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from kernelgraft import families, machine
from kernelgraft.errors import UsageError
from kernelgraft.evaluate import expected, interpreting, jobs, static
from kernelgraft.evaluate.cases import Captured, Case, Cases, JudgeOptions, make
from kernelgraft.evaluate.tolerance import Comparison, compare
from kernelgraft.evaluate.zygote import Zygote
from kernelgraft.families.base import Family
from kernelgraft.records import Definition, Evaluation, Solution, Status
from kernelgraft.suppliers.guards import refuses

LANGUAGES = ("python", "triton", "cuda-tile")
"""Languages of Solutions that can be imported as they are."""
MANY = 1 << 18
"""Outputs with more values are compared where they were computed."""


@dataclass(frozen=True)
class Failure:
    """Why a Solution is not accepted."""

    status: Status
    check: str
    reason: str


@dataclass
class _Trial:
    """One Solution before the judge, with what has been found out so far."""

    solution: Solution
    definition: Definition
    original: Callable[..., Any] | None
    drawn: Cases = field(default_factory=lambda: Cases((), ()))
    cases: int = 0
    refused: int = 0
    strictness: dict[str, bool] = field(default_factory=dict)
    """Keyword arguments of `compare`."""
    warmup_seconds: float | None = None
    comparisons: list[Comparison] = field(default_factory=list)


class Judge:
    """Verifies Solutions; a context manager that owns the process from which each Solution gets a fresh child.

    `family` finds the Family of a Definition by name.
    """

    def __init__(self, options: JudgeOptions | None = None, *, family: Callable[[str], Family] = families.get) -> None:
        self.options = options or JudgeOptions()
        self._family = family
        self._zygote = Zygote(fork=self.options.fork)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the child processes."""
        self._zygote.end()

    def verify(
        self,
        solution: Solution,
        definition: Definition,
        captured: Sequence[Captured],
        *,
        original: Callable[..., Any] | None = None,
    ) -> Evaluation:
        """Judge one Solution on captured and generated inputs of its Definition; a failure is a result, not an error.

        `original` computes what the model computes from the Definition's inputs, in their own dtypes: the yardstick of
        the tolerance (None: the Definition's reference). Raises UsageError without captured calls.
        """
        if not captured:
            raise UsageError(f"definition `{definition.name}` has no captured call: run the research again")
        started = machine.clock()
        trial = _Trial(solution, definition, original)
        with torch.no_grad():  # weights among the captured inputs may ask for gradients, which is no reason to refuse
            failure = self._before(trial) or self._interpreted(trial, captured) or self._run(trial, captured)
        return _evaluation(trial, failure, machine.clock() - started)

    def _before(self, trial: _Trial) -> Failure | None:
        """What can be said without running anything."""
        if reason := contract(trial.solution, trial.definition):
            return Failure(Status.COMPILE_ERROR, "C1", reason)
        findings = static.inspect_sources(trial.solution, trial.definition)
        trial.strictness["warned"] = bool(findings.warnings)
        if self.options.static_gate and findings.denied:
            more = f" (and {len(findings.denied) - 1} more)" if len(findings.denied) > 1 else ""
            return Failure(Status.COMPILE_ERROR, "C2", findings.denied[0] + more)
        return None

    def _interpreted(self, trial: _Trial, captured: Sequence[Captured]) -> Failure | None:
        """What the interpreter finds in a cuTile Solution that is about to run on a GPU.

        That it takes too long or has not an operation says nothing about the Solution.
        """
        if not (self.options.interpret_first and interpreting.applies(trial.solution, captured)):
            return None
        family = self._family(trial.definition.meta.family)
        definition = family.reduced(trial.definition) or trial.definition
        twin = _Trial(interpreting.on_cpu(trial.solution, definition), definition, None)
        guard = twin.solution.meta.guard
        options, self.options = self.options, interpreting.quick(self.options)
        try:
            calls = interpreting.calls(
                definition, family, captured, lambda inputs: refuses(guard, definition, inputs) is None
            )
            failure = self._run(twin, calls) if calls else None
        finally:
            self.options = options
        if failure is None or failure.status is Status.TIMEOUT or interpreting.UNSUPPORTED in failure.reason:
            return None
        return replace(failure, reason=f"under the interpreter, before it ran on the GPU: {failure.reason}")

    def _run(self, trial: _Trial, captured: Sequence[Captured]) -> Failure | None:
        solution, definition, guard = trial.solution, trial.definition, trial.solution.meta.guard
        reasons = [refuses(guard, definition, c.inputs) for c in captured]
        if all(reasons):
            return Failure(Status.RUNTIME_ERROR, "C1", f"guard refuses the captured calls: {reasons[0]}")
        served = [c for c, reason in zip(captured, reasons, strict=True) if reason is None]
        family = self._family(definition.meta.family)
        trial.strictness["nan_may_vanish"] = family.nan_may_vanish
        options = replace(self.options, gradients=self.options.gradients and guard.autograd)
        trial.drawn = make(definition, family, served, options, static_shapes=guard.static_shapes)
        kept = {n: c for n, c in enumerate(trial.drawn.cases) if refuses(guard, definition, c.inputs) is None}
        trial.refused = len(captured) - len(served) + len(trial.drawn.cases) - len(kept)
        trial.cases = trial.refused + len(kept)
        job = _job(definition, family, kept)
        with tempfile.TemporaryDirectory(prefix="kernelgraft-judge-") as name:
            folder = Path(name)
            jobs.write(folder, solution, job, options)
            ended = self._zygote.run(folder, timeout_s=options.timeout_s, compiles=_preloads(solution, captured))
            answer = jobs.read(folder, job, ended)
            trial.warmup_seconds = (answer.facts or {}).get("warmup_seconds")
            if failure := _process(trial, job, answer, options.timeout_s):
                return failure
            for number in kept:
                if failure := _case(trial, job, number, answer):
                    return failure
        return None


def _preloads(solution: Solution, captured: Sequence[Captured]) -> bool:
    """Whether torch's compiler is loaded before the fork. It asks for GPUs; none can be used in a fork after that."""
    on_gpu = any(isinstance(x, torch.Tensor) and x.is_cuda for x in captured[0].inputs)
    # A kernel's CPU job may be the interpreter's, before it runs on a GPU from the same process.
    harmless = solution.spec.language == "python" or not torch.cuda.is_available()
    return solution.meta.uses_compiler and harmless and not on_gpu


def contract(solution: Solution, definition: Definition) -> str | None:
    """Why a Solution cannot be one of this Definition (C1); None if it can. Runs nothing of it."""
    if solution.definition != definition.name:
        return f"it is a solution of `{solution.definition}`, not of `{definition.name}`"
    if solution.meta.fingerprint != definition.meta.fingerprint:
        return f"it was made for another version of `{definition.name}`"
    if solution.spec.language not in LANGUAGES:
        return f"its language `{solution.spec.language}` is none of {', '.join(LANGUAGES)}"
    if solution.spec.destination_passing_style:
        return "it wants its outputs as arguments; it has to return them"
    guard = solution.meta.guard
    for name in (*guard.contiguous, *guard.last_dim_contiguous):
        if name not in definition.inputs:
            return f"its guard names the input `{name}`, which `{definition.name}` does not have"
    for axis in (*guard.max_axes, *(a for pair in guard.equal_axes for a in pair)):
        if axis not in definition.axes:
            return f"its guard names the axis `{axis}`, which `{definition.name}` does not have"
    return _signature(solution, len(definition.inputs))


def _signature(solution: Solution, count: int) -> str | None:
    try:
        tree = ast.parse(solution.entry_source)
    except SyntaxError as error:
        return f"syntax error in line {error.lineno}: {error.msg}"
    symbol = solution.entry_symbol
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == symbol:
            takes = node.args
            positional = [*takes.posonlyargs, *takes.args]
            needed = len(positional) - len(takes.defaults)
            required = [a.arg for a, d in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if d is None]
            if required or count < needed or (count > len(positional) and takes.vararg is None):
                return f"`{symbol}` takes {ast.unparse(takes) or 'nothing'}, the definition has {count} inputs"
            return None
        names = [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        if symbol in names or any((a.asname or a.name) == symbol for a in getattr(node, "names", ())):
            return None
    return f"`{symbol}` is not defined in the entry file"


def _job(definition: Definition, family: Family, cases: dict[int, Case]) -> jobs.Job:
    flows = {
        n: expected.cotangents(definition, c.inputs, c.seed or 0) for n, c in cases.items() if c.gradient and c.inputs
    }
    wanted = {n: _differentiable(definition, family, cases[n]) for n in flows}
    return jobs.Job(cases, flows, wanted)


def _differentiable(definition: Definition, family: Family, case: Case) -> list[int]:
    return [
        index
        for index, (name, value) in enumerate(zip(definition.inputs, case.inputs, strict=True))
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in family.without_gradient
    ]


def _process(trial: _Trial, job: jobs.Job, answer: jobs.Answer, timeout_s: float) -> Failure | None:
    """How the Solution's process did, before any number is looked at."""
    where = "while it was imported" if answer.at == "import" else f"at {answer.at}"
    if answer.ended.timed_out:
        return Failure(Status.TIMEOUT, "C4", f"took longer than {timeout_s:g} s, {where}")
    facts = answer.facts
    if facts is None:
        last = f": {answer.last_line}" if answer.last_line else ""
        return Failure(Status.RUNTIME_ERROR, "C4", f"{answer.ended.words()} {where}{last}")
    if facts["patched"]:
        return Failure(Status.RUNTIME_ERROR, "C2", f"replaces `{facts['patched'][0]}` for the whole process")
    if "error" in facts and answer.at == "import":
        return Failure(Status.COMPILE_ERROR, "C1", f"cannot be imported: {facts['error']}")
    if "error" in facts:
        return Failure(Status.RUNTIME_ERROR, "C4", f"ended its process {where}: {facts['error']}")
    if facts["threads"] > 1 and not trial.solution.meta.uses_compiler:
        return Failure(Status.RUNTIME_ERROR, "C2", f"leaves {facts['threads'] - 1} threads running")
    return None


def _case(trial: _Trial, job: jobs.Job, number: int, answer: jobs.Answer) -> Failure | None:
    case, facts = job.cases[number], (answer.facts or {})["cases"][str(number)]
    if "error" in facts and not case.gradient:
        return Failure(Status.RUNTIME_ERROR, case.check, f"raised at {case.label}: {facts['error']}")
    try:
        if case.gradient:
            want = expected.gradients(trial.definition, case.inputs, job.cotangents[number], job.wanted[number])
        else:
            want = expected.outputs(trial.definition, case.inputs, trial.original)
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        reason = f"the reference itself fails at {case.label}: {type(error).__name__}: {message}"
        return Failure(Status.RUNTIME_ERROR, case.check, reason)
    if case.gradient:
        return _gradients(trial, job, number, facts, answer, want) if want is not None else None
    assert want is not None
    return _outputs(trial, case, number, facts, answer, want)


def _outputs(
    trial: _Trial, case: Case, number: int, facts: dict[str, Any], answer: jobs.Answer, want: expected.Expected
) -> Failure | None:
    if failure := _form(case, facts, want):
        return failure
    names = list(want.native)
    compared = [
        _compared(trial, answer.outputs[f"{number}.{i}"], want.native[n], want.exact[n], name=n)
        for i, n in enumerate(names)
    ]
    trial.comparisons += compared
    inputs = list(trial.definition.inputs)
    changed = [inputs[i] for i in facts["mutated"] if inputs[i] not in trial.definition.meta.mutates]
    if changed:
        return _wrong("C10", f"changes its input {changed[0]} at {case.label}")
    if facts["aliased"]:
        return _wrong("C11", f"{facts['aliased'][0]} at {case.label}")
    if facts["overwritten"]:
        return _wrong("C11", f"a later call writes into what an earlier one returned, at {case.label}")
    if facts["differs"] and not trial.solution.meta.nondeterministic:
        return _wrong("C9", f"equal calls differ (it reads uninitialised memory, or its calls) at {case.label}")
    for repeat in facts["differs"]:
        again = [answer.outputs.get(f"{number}.{i}.{repeat}") for i in range(len(names))]
        compared += [
            _compared(trial, x, want.native[n], want.exact[n], name=n)
            for n, x in zip(names, again, strict=True)
            if x is not None
        ]
    wrong = next((c.wrong for c in compared if c.wrong), None)
    return _wrong(case.check, f"wrong at {case.label}: {wrong}") if wrong else None


def _form(case: Case, facts: dict[str, Any], want: expected.Expected) -> Failure | None:
    """Number, shape, dtype, device and contiguity of the outputs, exactly."""
    given = facts["outputs"]
    if len(given) != len(want.native):
        return Failure(Status.INCORRECT_SHAPE, "C1", f"returns {len(given)} outputs where there are {len(want.native)}")
    for (name, native), got in zip(want.native.items(), given, strict=True):
        if got["type"] != "Tensor":
            return Failure(Status.INCORRECT_SHAPE, "C1", f"{name} is a {got['type']} where a plain tensor is needed")
        if got["size"] != list(native.shape):
            reason = f"{name} has shape {got['size']} where it is {list(native.shape)} at {case.label}"
            return Failure(Status.INCORRECT_SHAPE, case.check, reason)
        dtype = str(native.dtype).removeprefix("torch.")
        if got["dtype"] != dtype:
            reason = f"{name} has dtype {got['dtype']} where it is {dtype} at {case.label}"
            return Failure(Status.INCORRECT_DTYPE, case.check, reason)
        if got["device"] != str(native.device):
            reason = f"{name} is on {got['device']} where it is on {native.device} at {case.label}"
            return Failure(Status.RUNTIME_ERROR, case.check, reason)
        if native.is_contiguous() and not got["contiguous"]:
            return Failure(Status.INCORRECT_SHAPE, case.check, f"{name} is not contiguous at {case.label}")
    if facts.get("outputs_changed"):
        return Failure(Status.INCORRECT_SHAPE, "C9", f"equal calls return different shapes at {case.label}")
    return None


def _gradients(
    trial: _Trial, job: jobs.Job, number: int, facts: dict[str, Any], answer: jobs.Answer, want: expected.Expected
) -> Failure | None:
    case = job.cases[number]
    claim = "its guard says that gradients flow"
    if "error" in facts:
        return Failure(Status.RUNTIME_ERROR, case.check, f"{claim}, but it raised at {case.label}: {facts['error']}")
    names = list(trial.definition.inputs)
    for index in job.wanted[number]:
        name = f"the gradient of {names[index]}"
        if name not in want.native:
            continue
        given = answer.outputs.get(f"{number}.grad.{index}")
        native = want.native[name]
        if given is None or given.shape != native.shape or given.dtype != native.dtype:
            return Failure(Status.RUNTIME_ERROR, case.check, f"{claim}, but {name} is missing at {case.label}")
        found = _compared(trial, given, native, want.exact[name], name=name, gradient=True)
        trial.comparisons.append(found)
        if found.wrong:
            return _wrong(case.check, f"wrong at {case.label}: {found.wrong}")
    return None


def _compared(
    trial: _Trial,
    actual: torch.Tensor,
    native: torch.Tensor,
    exact: torch.Tensor,
    *,
    name: str,
    gradient: bool = False,
) -> Comparison:
    """`compare` on the CPU; of many values where the original's lie: on a GPU that is a hundred times as fast."""
    place = native.device if native.numel() > MANY else torch.device("cpu")
    a, n, e = actual.to(place), native.to(place), exact.to(place)
    return compare(a, n, e, **trial.strictness, name=name, gradient=gradient)


def _wrong(check: str, reason: str) -> Failure:
    return Failure(Status.INCORRECT_NUMERICAL, check, reason)


def _evaluation(trial: _Trial, failure: Failure | None, seconds: float) -> Evaluation:
    compared = trial.comparisons
    return Evaluation(
        solution=trial.solution.name,
        definition=trial.definition.name,
        status=failure.status if failure else Status.PASSED,
        check=failure.check if failure else None,
        reason=f"{failure.check}: {failure.reason}" if failure else None,
        cases=trial.cases,
        refused=trial.refused,
        error_ratio=max((c.ratio for c in compared), default=None),
        max_absolute_error=max((c.max_absolute for c in compared), default=None),
        max_relative_error=max((c.max_relative for c in compared), default=None),
        seeds=trial.drawn.seeds,
        seconds=seconds,
        warmup_seconds=trial.warmup_seconds,
    )
