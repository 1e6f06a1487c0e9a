"""The ways in which a function can rotate, and which of them reproduces a captured one.

Used by the `rope` family only. A `Variant` writes its own reference; `identify` calls the captured function again with
fresh q, k and tables (tables without any structure, so that the use of each value shows) and keeps the variant that
gives the same numbers.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kernelgraft.families.base import Call
from kernelgraft.families.probe import DIFFERENT, PROBE_DTYPES, Match, draw, same, worst
from kernelgraft.families.reference import as_tuple, body_function

PROBES = ((2, 5), (3, 7), (1, 1))
"""Batch size and length of the fresh calls."""

Pairs = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Variant:
    """One way to rotate."""

    pairs_in: Pairs
    pairs_out: Pairs
    table: Literal["full", "first_half", "half", "complex"]
    placement: Literal["first", "last"]
    rotary_dim: int
    head_dim: int
    rank: int
    """Number of axes of q."""
    leading: tuple[int, ...]
    """For each leading axis of the tables, the axis of q that it goes with."""
    swapped: bool
    """True if the first of the two tables, in the function's order, is sin."""
    direction: Literal["forward", "backward"] = "forward"
    compute: Literal["input", "float32"] = "input"
    cast: bool = True

    def arranged(self, tables: Sequence[Any]) -> list[Any]:
        """The tables in the Definition's order."""
        return list(reversed(tables)) if self.swapped else list(tables)

    def body(self, *, with_k: bool) -> str:
        """Source of `run(q[, k], cos, sin)`, or of `run(q[, k], freqs)` for a complex table."""
        tables = ["freqs"] if self.table == "complex" else ["cos", "sin"]
        lines = [f"def run({', '.join(['q', *(['k'] if with_k else []), *tables])}):"]
        if self.table == "complex":
            lines.append("    cos, sin = freqs[..., 0], freqs[..., 1]")
        elif self.table == "first_half":
            lines.append(f"    cos, sin = cos[..., : {self.rotary_dim // 2}], sin[..., : {self.rotary_dim // 2}]")
        for axis in reversed(range(self.leading[0], self.rank - 1)):
            if axis not in self.leading:
                lines.append(f"    cos, sin = cos.unsqueeze({axis - self.rank}), sin.unsqueeze({axis - self.rank})")
        if self.table == "full":
            lines.append(f"    cos_a, cos_b = {_halves('cos', self.pairs_out)}")
            lines.append(f"    sin_a, sin_b = {_halves('sin', self.pairs_out)}")
        else:
            lines += ["    cos_a = cos_b = cos", "    sin_a = sin_b = sin"]
        lines += ["", "    def rotate(x):", *("        " + line for line in self._rotate()), ""]
        lines.append("    return rotate(q), rotate(k)" if with_k else "    return rotate(q)")
        return "\n".join(lines)

    def _rotate(self) -> list[str]:
        lines = []
        partial, size, turned = self.rotary_dim < self.head_dim, self.rotary_dim, "x"
        if partial:
            turned = "turned"
            first, second = (f"x[..., :{size}]", f"x[..., {size}:]")
            if self.placement == "last":
                first, second = (f"x[..., -{size}:]", f"x[..., :-{size}]")
            lines.append(f"turned, rest = {first}, {second}")
        lines.append(f"a, b = {_halves(turned, self.pairs_in)}")
        if self.compute == "float32":
            lines.append("a, b = a.float(), b.float()")
        minus, plus = ("-", "+") if self.direction == "forward" else ("+", "-")
        lines += [f"first = a * cos_a {minus} b * sin_a", f"second = b * cos_b {plus} a * sin_b"]
        if self.pairs_out == "half":
            lines.append("y = torch.cat((first, second), dim=-1)")
        else:
            lines.append("y = torch.stack((first, second), dim=-1).flatten(-2)")
        result = "y.to(x.dtype)" if self.cast else "y"
        if partial:
            result = f"torch.cat(({', '.join([result, 'rest'][:: 1 if self.placement == 'first' else -1])}), dim=-1)"
        return [*lines, f"return {result}"]


def _halves(name: str, pairs: Pairs) -> str:
    return f"{name}.chunk(2, dim=-1)" if pairs == "half" else f"{name}[..., 0::2], {name}[..., 1::2]"


@dataclass(frozen=True)
class Bound:
    """A captured call with the roles of its arguments."""

    call: Call
    arguments: inspect.BoundArguments
    q: str
    k: str | None
    tables: tuple[str, ...]
    """Names of the tables, in the function's order; one if it is complex."""

    def value(self, name: str) -> torch.Tensor:
        """The tensor that the call gave for a parameter."""
        found: torch.Tensor = self.arguments.arguments[name]
        return found

    @property
    def rotated(self) -> list[str]:
        """Names of q and, if there is one, k."""
        return [self.q] if self.k is None else [self.q, self.k]

    @property
    def fixed(self) -> dict[str, Any]:
        """The other parameters and the values that they had."""
        return {n: v for n, v in self.arguments.arguments.items() if n not in (*self.rotated, *self.tables)}

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What came back for q and k."""
        return outputs_of(self.call.output)

    def again(self, fresh: dict[str, torch.Tensor]) -> Any:
        """Call the original with other tensors; None where it raises for their shapes."""
        arguments = inspect.BoundArguments(
            self.arguments.signature, type(self.arguments.arguments)({**self.arguments.arguments, **fresh})
        )
        try:
            with torch.no_grad():
                return self.call.original(*arguments.args, **arguments.kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None


def outputs_of(output: Any) -> tuple[Any, ...]:
    """The tensors of a function's output, without the None that stands for an absent k."""
    return tuple(x for x in as_tuple(output) if x is not None)


def bind(call: Call) -> Bound | str | None:
    """Find q, k and the tables of a call; None if it is no rotation, a reason if it is one that is not covered."""
    try:
        arguments = inspect.signature(call.original).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):  # not a function with a signature that this call fits
        return None
    arguments.apply_defaults()
    for name, parameter in arguments.signature.parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if variadic and arguments.arguments.pop(name, None):
            return None
    outputs = outputs_of(call.output)
    left = {n: v for n, v in arguments.arguments.items() if isinstance(v, torch.Tensor)}
    if not 1 <= len(outputs) <= 2 or len(left) < 2:
        return None
    rotated = []
    for output in outputs:
        found = next((n for n, v in left.items() if _alike(v, output)), None)
        if found is None:
            return None
        rotated.append(found)
        del left[found]
    head_dims = {arguments.arguments[n].shape[-1] for n in rotated}
    tables = _tables(left, min(head_dims))
    if tables is None:
        return None
    if len(head_dims) > 1:
        return "q and k have different head sizes"
    bound = Bound(call, arguments, rotated[0], rotated[1] if len(rotated) == 2 else None, tables)
    for name, value in bound.fixed.items():
        if not _plain(value):
            return f"its parameter `{name}` is a {type(value).__name__}, which no variant takes"
    return bound


def _alike(value: torch.Tensor, output: Any) -> bool:
    return isinstance(output, torch.Tensor) and value.is_floating_point() and value.shape == output.shape


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _tables(tensors: dict[str, torch.Tensor], head_dim: int) -> tuple[str, ...] | None:
    """Names of the two tables, or of the complex one: cos² + sin² is the same for every angle."""
    for name, value in tensors.items():
        if value.is_complex() and 1 < value.ndim <= 4 and 2 * value.shape[-1] <= head_dim and _constant(value.abs()):
            return (name,)
    for (a, x), (b, y) in itertools.combinations(tensors.items(), 2):
        alike = x.shape == y.shape and x.is_floating_point() and y.is_floating_point()
        sized = 1 < x.ndim <= 4 and x.shape[-1] <= head_dim
        if alike and sized and _constant(x.double() ** 2 + y.double() ** 2):
            return (a, b)
    return None


def _constant(radius: torch.Tensor) -> bool:
    low, high = float(radius.min()), float(radius.max())
    return 0 < high < math.inf and high - low <= 0.03 * high


@dataclass(frozen=True)
class Geometry:
    """Where the tables' leading axes lie in q, and which axes of q are the sequence and the batch."""

    leading: tuple[int, ...]
    sequence: int
    batch: int | None

    def shapes(self, bound: Bound, batch: int, length: int) -> dict[str, list[int]]:
        """Shapes of q, k and the tables for another batch size and length."""
        sizes = {self.sequence: length, self.batch: batch}
        result = {
            name: [sizes.get(axis, size) for axis, size in enumerate(bound.value(name).shape)] for name in bound.rotated
        }
        width = bound.value(bound.tables[0]).shape[-1]
        return result | {name: [*(sizes.get(axis, 1) for axis in self.leading), width] for name in bound.tables}


def _geometries(bound: Bound) -> Iterator[Geometry]:
    q, table = bound.value(bound.q).shape, bound.value(bound.tables[0]).shape
    for leading in itertools.combinations(range(len(q) - 1), len(table) - 1):
        pairs = list(zip(leading, table[:-1], strict=True))
        if any(size not in (1, q[axis]) for axis, size in pairs):
            continue
        sequence = max([axis for axis, size in pairs if size > 1], default=leading[-1])
        batch = 0 if sequence != 0 else None
        if all(size == 1 or axis in (sequence, batch) for axis, size in pairs):
            yield Geometry(leading, sequence, batch)


def _variants(bound: Bound, geometry: Geometry) -> Iterator[Variant]:
    q, width = bound.value(bound.q), bound.value(bound.tables[0]).shape[-1]
    head_dim, cast = q.shape[-1], bound.outputs[0].dtype == q.dtype
    layouts: tuple[Pairs, Pairs] = ("half", "interleaved")
    kinds: list[tuple[Any, int]] = [("full", width), ("first_half", width), ("half", 2 * width)]
    orders: tuple[bool, ...] = (False, True)
    if len(bound.tables) == 1:
        kinds, orders = [("complex", 2 * width)], (False,)
    for kind, rotary_dim in kinds:
        if rotary_dim > head_dim or rotary_dim % 2:
            continue
        places: tuple[Any, ...] = ("first",) if rotary_dim == head_dim else ("first", "last")
        directions: tuple[Any, ...] = ("forward", "backward")
        for choice in itertools.product(directions, places, layouts, layouts, orders):
            direction, place, pairs_in, pairs_out, swapped = choice
            yield Variant(
                pairs_in=pairs_in,
                pairs_out=pairs_out,
                table=kind,
                placement=place,
                rotary_dim=rotary_dim,
                head_dim=head_dim,
                rank=q.ndim,
                leading=geometry.leading,
                swapped=swapped,
                direction=direction,
                cast=cast,
            )


def _fresh(bound: Bound, shapes: dict[str, list[int]], q: torch.dtype, table: torch.dtype, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in shapes.items():
        if name in bound.rotated:
            result[name] = draw(shape, q, generator)
        elif table.is_complex:
            result[name] = torch.view_as_complex(draw([*shape, 2], torch.float32, generator)).to(table)
        else:
            result[name] = draw(shape, table, generator)
    return result


def _compare(variant: Variant, bound: Bound, values: dict[str, Any], expected: Any) -> Match:
    tables = variant.arranged([values[n] for n in bound.tables])
    if variant.table == "complex":
        tables = [torch.view_as_real(tables[0])]
    run = body_function(variant.body(with_k=bound.k is not None))
    try:
        with torch.no_grad():
            actual = run(*(values[n] for n in bound.rotated), *tables)
    except RuntimeError:  # shapes that this variant cannot take
        return DIFFERENT
    return same(outputs_of(actual), outputs_of(expected))


def identify(bound: Bound) -> tuple[Variant, Geometry] | str:
    """The variant that reproduces fresh calls of the original, judged in float32, bfloat16 and the captured dtypes.

    Else a reason.
    """
    q, table = bound.value(bound.q).dtype, bound.value(bound.tables[0]).dtype
    pairs = dict.fromkeys([*((d, table if table.is_complex else d) for d in PROBE_DTYPES), (q, table)])
    closest: tuple[Match, Variant, Geometry] | None = None
    for geometry in _geometries(bound):
        cases = []
        for dtypes in pairs:
            for seed, (batch, length) in enumerate(PROBES):
                values = _fresh(bound, geometry.shapes(bound, batch, length), *dtypes, seed)
                cases.append((values, bound.again(values)))
        if any(output is None for _, output in cases):
            continue
        for variant in _variants(bound, geometry):
            if not _compare(variant, bound, *cases[0]).acceptable:
                continue
            for candidate in (variant, replace(variant, compute="float32")):
                match = worst(_compare(candidate, bound, *case) for case in cases)
                if closest is None or match < closest[0]:
                    closest = (match, candidate, geometry)
            # Another one that is bit-equal too, on inputs without any structure, would be the same compute.
            if closest is not None and closest[0].bit_equal:
                return closest[1:]
    if closest is None:
        return "no rotation of half-split or interleaved pairs gives its output"
    match, variant, geometry = closest
    if not match.acceptable:
        return f"the closest variant is {match.max_ulp:.1f} ulp away from a fresh call"
    return variant, geometry
