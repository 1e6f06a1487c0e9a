"""Which implementation serves a call: one dictionary look-up on the call's shapes, with counters.

The first call of a shape is decided by the guard and the seats; every later one finds the decision in a table. Under
torch.compile the decision is made while tracing and nothing is counted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kernelgraft.families.base import Family, Kernel, Select
from kernelgraft.records import Definition, Patch, Seat, Solution
from kernelgraft.suppliers.guards import bind_axes, constraint_check, refuses
from kernelgraft.suppliers.load import load

LARGEST_TABLE = 4096
"""Shapes remembered. A cache that grows by one token a step makes a new shape each time, so a full table is emptied."""
MOST_REASONS = 64
"""Distinct reasons counted apart; they can name sizes."""

BYPASSED = "a form of the call that the seat does not know"
OTHER = "other reasons"
AUTOCAST = "autocast is on, and the solutions were judged without it"

_tracing = torch.compiler.is_dynamo_compiling
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # the public function asks for one device type


class Outcome:
    """What is done with the calls of some shapes, and how many there were."""

    __slots__ = ("calls", "kernel", "reason", "solution")

    def __init__(self, kernel: Kernel | None = None, solution: str | None = None, reason: str | None = None) -> None:
        self.kernel = kernel
        self.solution = solution
        """The Solution that serves; None if the original does."""
        self.reason = reason
        """Why the original had to; None if a Solution serves or the seat says that the original is the better one."""
        self.calls = 0


class Dispatcher:
    """Chooses the kernel of each call at one site: `select(*inputs)` with a Definition's inputs gives it, or None.

    The Definition is told by the number of inputs. Of its seats the one measured at the same sizes decides, else that
    nearest in log(work), and of several of equal work that nearest in its sizes. None means that the original serves:
    because the seat says so, or because the call is outside the guard (`fallbacks` counts these by reason). It holds no
    module, so that it can be shared by copies of a model.
    """

    def __init__(
        self, patch: Patch, definitions: Mapping[str, Definition], solutions: Mapping[str, Solution], family: Family
    ) -> None:
        self._family = family
        self._solutions = {name: solutions[name] for name in patch.solutions}
        self._kernels = {name: load(solution) for name, solution in self._solutions.items()}
        self._seats: dict[str, tuple[Seat, ...]] = {}
        self._by_inputs: dict[int, list[Definition]] = {}
        for name in patch.definitions:
            seats = sorted((s for s in patch.seats if s.definition == name), key=lambda s: s.work)
            self._seats[name] = tuple(seats)
            self._by_inputs.setdefault(len(definitions[name].inputs), []).append(definitions[name])
            for constraint in definitions[name].constraints:
                constraint_check(constraint)  # compiled now, since torch.compile cannot trace it
        self._table: dict[Any, Outcome] = {}
        self._outcomes: dict[tuple[str | None, str | None], Outcome] = {}
        self._left = 0
        self._bypassed: dict[str, int] = {}
        self.select: Select = self._build()

    def __call__(self, *inputs: Any) -> Kernel | None:
        """The same as `select`, which is a little faster."""
        return self.select(*inputs)

    @property
    def served(self) -> dict[str, int]:
        """Calls that each seated Solution served; those that served none are in it with 0."""
        return {
            name: self._outcomes[name, None].calls if (name, None) in self._outcomes else 0 for name in self._kernels
        }

    @property
    def by_choice(self) -> int:
        """Calls that ran the original because the seat says so."""
        chosen = self._outcomes.get((None, None))
        return chosen.calls if chosen else 0

    @property
    def fallbacks(self) -> dict[str, int]:
        """Calls that ran the original because they had to, by reason."""
        found = {o.reason: o.calls for o in self._outcomes.values() if o.reason is not None and o.calls}
        return found | self._bypassed

    @property
    def calls(self) -> int:
        """All calls of the site."""
        return sum(self.served.values()) + self.by_choice + sum(self.fallbacks.values())

    @contextlib.contextmanager
    def wrapped(self, wrap: Callable[[Kernel, str], Kernel]) -> Iterator[None]:
        """While it lasts, every kernel runs as `wrap(kernel, name of its Solution)`; calls that torch.compile traced
        before do not."""
        plain = dict(self._kernels)
        for name, kernel in plain.items():
            self._kernels[name] = wrap(kernel, name)
        self._seat_again()
        try:
            yield
        finally:
            self._kernels.update(plain)
            self._seat_again()

    def _seat_again(self) -> None:
        for outcome in self._outcomes.values():
            outcome.kernel = None if outcome.solution is None else self._kernels[outcome.solution]

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, so that a call which the seat leaves to it without asking `select` is counted too."""

        @functools.wraps(original)
        def through(*args: Any, **kwargs: Any) -> Any:
            if not _tracing():
                self._note_original()
            return original(*args, **kwargs)

        return through

    def bypass(self, original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        """`original` where no seat is: each call counts as a fallback for `reason`."""

        @functools.wraps(original)
        def through(*args: Any, **kwargs: Any) -> Any:
            if not _tracing():
                self._bypassed[reason] = self._bypassed.get(reason, 0) + 1
            return original(*args, **kwargs)

        return through

    def _note_original(self) -> None:
        left = sum(o.calls for o in self._outcomes.values() if o.kernel is None)
        if left == self._left:  # `select` has not said so since the last time
            self._bypassed[BYPASSED] = self._bypassed.get(BYPASSED, 0) + 1
        self._left = left

    def _decide(self, inputs: Sequence[Any]) -> tuple[str | None, str | None]:
        """The Solution's name, or the reason why the original must serve; neither if it serves by choice."""
        definitions = self._by_inputs.get(len(inputs))
        if definitions is None:
            return None, f"{len(inputs)} inputs, which no definition has"
        if any(isinstance(x, torch.Tensor) and torch.is_autocast_enabled(x.device.type) for x in inputs):
            return None, AUTOCAST
        if any(isinstance(x, torch.Tensor) and x.numel() == 0 for x in inputs):
            return None, "an input without elements"
        reason = None
        for definition in definitions:
            try:
                axes = bind_axes(definition, inputs)
            except ValueError as error:
                reason = reason or str(error)
            else:
                return self._seated(definition, axes, inputs)
        return None, reason

    def _seated(
        self, definition: Definition, axes: dict[str, int], inputs: Sequence[Any]
    ) -> tuple[str | None, str | None]:
        seats = self._seats[definition.name]
        if not seats:
            return None, f"no solution of `{definition.name}` was measured"
        work = self._family.work(inputs)
        seat, measured = _nearest(seats, work, axes)
        if not seat.seated or seat.solution is None:
            return None, None
        guard = self._solutions[seat.solution].meta.guard
        if guard.static_shapes and not measured:
            return None, f"`{seat.solution}` is compiled for the measured shapes only, and this is another"
        reason = refuses(guard, definition, inputs)
        return (None, reason) if reason else (seat.solution, None)

    def _plain(self, inputs: Sequence[Any]) -> Kernel | None:
        """The decision without table and counters."""
        solution, _ = self._decide(inputs)
        return None if solution is None else self._kernels[solution]

    def _outcome(self, inputs: Sequence[Any]) -> Outcome:
        solution, reason = self._decide(inputs)
        if (solution, reason) not in self._outcomes:
            if reason is not None and len(self._outcomes) >= MOST_REASONS:
                reason = OTHER
            kernel = None if solution is None else self._kernels[solution]
            self._outcomes.setdefault((solution, reason), Outcome(kernel, solution, reason))
        return self._outcomes[solution, reason]

    def _first(self, key: Any, inputs: Sequence[Any]) -> Outcome:
        if len(self._table) >= LARGEST_TABLE:
            self._table.clear()
        outcome = self._table[key] = self._outcome(inputs)
        return outcome

    def _build(self) -> Select:
        """The look-up, written out for each number of inputs: a loop over the inputs would cost 0.4 µs a call more."""
        counts = sorted(self._by_inputs)
        branches = [line for n in counts for line in self._branch("if" if n == counts[0] else "elif", n)]
        source = _SELECT.replace("        BRANCHES\n", "".join(f"        {line}\n" for line in branches))
        namespace: dict[str, Any] = {
            "tracing": _tracing,
            "plain": self._plain,
            "table": self._table,
            "first": self._first,
            "outcome_of": self._outcome,
            "grad": torch.is_grad_enabled,
            "autocast": _any_autocast,
        }
        exec(compile(source, "<kernelgraft dispatcher>", "exec"), namespace)
        select: Select = namespace["select"]
        return select

    def _branch(self, word: str, count: int) -> list[str]:
        """Source lines that unpack `count` inputs and build the key, of all that a guard can ask of a call."""
        base: list[str] = []
        grads: list[str] = []
        for definition in self._by_inputs[count]:
            guards = [s.meta.guard for s in self._solutions.values() if s.definition == definition.name]
            strided = {name for g in guards for name in (*g.contiguous, *g.last_dim_contiguous)}
            for i, (name, spec) in enumerate(definition.inputs.items()):
                base.append(f"x{i}.__class__")
                if spec.shape is not None:
                    base += [f"x{i}.shape", f"x{i}.dtype", f"x{i}.device"]
                    base += [f"x{i}.stride()"] if name in strided else []
                    grads.append(f"x{i}.requires_grad")
        features, more = ", ".join(dict.fromkeys(base)), ", ".join(dict.fromkeys(grads))
        return [
            f"{word} count == {count}:",
            f"    {', '.join(f'x{i}' for i in range(count))}, = inputs",
            "    if grad():",
            f"        key = (autocast(), {features}, {more},)",
            "    else:",
            f"        key = (autocast(), {features},)",
        ]


_SELECT = """
def select(*inputs):
    if tracing():
        return plain(inputs)
    count = len(inputs)
    try:
        BRANCHES
        else:
            key = count
        outcome = table.get(key)
    except (AttributeError, TypeError):  # an input that is no tensor, or has a symbolic size
        outcome = outcome_of(inputs)
    if outcome is None:
        outcome = first(key, inputs)
    outcome.calls += 1
    return outcome.kernel
"""


def _nearest(seats: Sequence[Seat], work: int, axes: Mapping[str, int]) -> tuple[Seat, bool]:
    """The seat that decides, and whether it was measured at this very call's sizes."""
    for seat in seats:
        if seat.axes is not None and all(axes[name] == size for name, size in seat.axes.items()):
            return seat, True
    chosen = seats[0]
    for low, high in itertools.pairwise(seats):
        if work * work > low.work * high.work:  # beyond the middle between them, in log(work)
            chosen = high
    alike = [seat for seat in seats if seat.work == chosen.work]
    if len(alike) > 1:  # decode steps of one batch are of equal work, whatever is in the cache
        distances = [_apart(seat.axes, axes) for seat in alike]
        chosen = alike[distances.index(min(distances))]
    return chosen, chosen.axes is None and chosen.work == work


def _apart(measured: Mapping[str, int] | None, axes: Mapping[str, int]) -> float:
    """How far sizes are from those measured: the product over the axes of the larger size over the smaller."""
    product = 1.0
    for name, size in (measured or {}).items():
        product *= axes[name] / size if axes[name] > size else size / axes[name]
    return product
