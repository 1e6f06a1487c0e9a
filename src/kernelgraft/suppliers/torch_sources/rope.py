"""Rotary embeddings in plain torch: fewer operations a tensor, and q and k joined along their heads where that pays."""

from __future__ import annotations

from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.torch_sources import FLOATS, Draft, cast, promoted

CATALOGUE = {
    "joined": "q and k joined along their heads, turned by one product and one multiply-add, and split",
    "apart": "one product and one multiply-add (for a complex table one complex product) for each tensor",
    "halves": "one product, then multiply-adds into each half of it in place",
}


def drafts(definition: Definition) -> list[Draft] | str:
    """See the package."""
    semantics, inputs = definition.meta.semantics, definition.inputs
    q = inputs["q"]
    dtypes = {spec.dtype for spec in (*inputs.values(), *definition.outputs.values())}
    if q.shape is None or dtypes - set(FLOATS):
        return "tensors in float32, bfloat16 or float16 are served"
    writer = _Writer(definition)
    found = [Draft("apart", writer.apart(writer.turn()))]
    if writer.heads is not None:
        found.insert(0, Draft("joined", writer.joined(writer.turn())))
    if semantics["table"] == "full" and semantics["pairs_in"] == semantics["pairs_out"]:
        found.append(Draft("halves", writer.apart(writer.halves())))
    return found


def _heads(definition: Definition) -> int | None:
    """The axis along which q and k can be joined; None without k, or if they differ in more than one axis."""
    if "k" not in definition.inputs:
        return None
    q, k = (definition.inputs[n].shape or () for n in ("q", "k"))
    apart = [i for i, (a, b) in enumerate(zip(q, k, strict=True)) if a != b]
    return apart[0] if len(apart) == 1 else None


class _Writer:
    """Writes a function `turn(x, <tables>)` for one tensor, and the kernel that calls it."""

    def __init__(self, definition: Definition) -> None:
        self.semantics: dict[str, Any] = definition.meta.semantics
        self.arguments = list(definition.inputs)
        self.rank = len(definition.inputs["q"].shape or ())
        self.heads = _heads(definition)
        self.with_k = "k" in definition.inputs
        self.complex = self.semantics["table"] == "complex" and self._is(
            pairs_in="interleaved", pairs_out="interleaved"
        )
        self.tables = "freqs" if self.complex else "cos, sin"
        self.dtype, self.out = definition.inputs["q"].dtype, definition.outputs["q_out"].dtype
        table = definition.inputs["freqs" if self.semantics["table"] == "complex" else "cos"].dtype
        self.wide = promoted(self.dtype, table, *(["float32"] if self._is(compute="float32") else []))
        self.r: int = self.semantics["rotary_dim"]
        self.rest: int = self.semantics["head_dim"] - self.r
        self.forward = self._is(direction="forward")

    def _is(self, **wanted: str) -> bool:
        return all(self.semantics[name] == value for name, value in wanted.items())

    def joined(self, turn: list[str]) -> str:
        """q and k as one tensor; each comes back contiguous, which costs nothing for a batch of one."""
        axis = self.heads
        lines = [
            *self._prepared(),
            f"y = turn(torch.cat((q, k), {axis}), {self.tables})",
            f"q, k = y.split((q.shape[{axis}], k.shape[{axis}]), {axis})",
            "return q.contiguous(), k.contiguous()",
        ]
        return self._file(turn, lines)

    def apart(self, turn: list[str]) -> str:
        """One call a tensor. What comes back is contiguous, as the reference's is, however q and k lie."""
        calls = [f"turn({n}, {self.tables}).contiguous()" for n in ("q", "k") if n in self.arguments]
        return self._file(turn, [*self._prepared(), f"return {', '.join(calls)}"])

    def turn(self) -> list[str]:
        """The body of `turn` with the fewest operations for these semantics."""
        a, b = self._pairs("x")
        if self.complex:
            # A complex view needs pairs that begin at even places; only a new tensor is sure to have them there.
            turned = "freqs" if self.forward else "freqs.conj()"
            y = f"torch.view_as_complex(x.unflatten(-1, ({self.r // 2}, 2)).clone()) * {turned}"
            return self._turned([], f"torch.view_as_real({y}).flatten(-2)")
        if not self._is(table="full"):
            first, second = self._signs("b, sin", "a, sin")
            y = self._glue(f"(a * cos).addcmul_({first})", f"(b * cos).addcmul_({second})")
            return self._turned([f"a, b = {a}, {b}"], y)
        if self._is(pairs_in="half", pairs_out="half"):
            half = self.r // 2
            lines = [
                f"crossed = x.roll({half}, -1)",
                f"crossed.narrow(-1, {0 if self.forward else half}, {half}).neg_()",
            ]
            return self._turned(lines, "(x * cos).addcmul_(crossed, sin)")
        straight = "x" if self._is(pairs_out=self.semantics["pairs_in"]) else self._glue("a", "b")
        crossed = self._glue("b.neg()", "a") if self.forward else self._glue("b", "a.neg()")
        return self._turned([f"a, b = {a}, {b}"], f"({straight} * cos).addcmul_({crossed}, sin)")

    def halves(self) -> list[str]:
        """The body of `turn` without a crossed copy: two multiply-adds into views of the product."""
        (a, b), (sin_a, sin_b), (first, second) = (self._pairs(name) for name in ("x", "sin", "y"))
        into_first, into_second = self._signs(f"{b}, {sin_a}", f"{a}, {sin_b}")
        lines = ["y = x * cos", f"{first}.addcmul_({into_first})", f"{second}.addcmul_({into_second})"]
        return self._turned(lines, "y")

    def _signs(self, first: str, second: str) -> tuple[str, str]:
        """Arguments of the multiply-adds of both channels of a pair: one of them is subtracted."""
        minus = ", value=-1"
        return (first + minus, second) if self.forward else (first, second + minus)

    def _prepared(self) -> list[str]:
        """The tables with axes of size 1 where q has some and they have none."""
        leading = self.semantics["leading"]
        missing = [axis for axis in reversed(range(leading[0], self.rank - 1)) if axis not in leading]
        lines = []
        if self.complex:
            lines.append("freqs = torch.complex(*freqs.unbind(-1))")
        elif self._is(table="complex"):
            lines.append("cos, sin = freqs.unbind(-1)")
        elif self._is(table="first_half"):
            lines.append(f"cos, sin = cos.narrow(-1, 0, {self.r // 2}), sin.narrow(-1, 0, {self.r // 2})")
        if missing:
            calls = "".join(f".unsqueeze({axis - self.rank})" for axis in missing)
            lines.append(f"{self.tables} = {', '.join(n + calls for n in self.tables.split(', '))}")
        return lines

    def _turned(self, lines: list[str], y: str) -> list[str]:
        """A body around the turning itself: cut off what stays, widen, cast, and put back what stays."""
        head, y = [], cast(y, self.wide, self.out)
        if self.rest:
            first = self._is(placement="first")
            sizes, names = ((self.r, self.rest), "x, rest") if first else ((self.rest, self.r), "rest, x")
            head.append(f"{names} = x.split({sizes}, -1)")
            y = f"torch.cat(({y}, rest), -1)" if first else f"torch.cat((rest, {y}), -1)"
        if self.wide != self.dtype:
            head.append(f"x = x.to(torch.{self.wide})")
        return [*head, *lines, f"return {y}"]

    def _pairs(self, name: str) -> tuple[str, str]:
        """The first and the second channels of the pairs of x (or of a table or output of the same layout)."""
        half = self.r // 2
        if self._is(pairs_in="half"):
            return f"{name}.narrow(-1, 0, {half})", f"{name}.narrow(-1, {half}, {half})"
        return f"{name}[..., 0::2]", f"{name}[..., 1::2]"

    def _glue(self, a: str, b: str) -> str:
        """Channels of the pairs in the order of the output."""
        if self._is(pairs_out="half"):
            return f"torch.cat(({a}, {b}), -1)"
        return f"torch.stack(({a}, {b}), -1).flatten(-2)"

    def _file(self, turn: list[str], kernel: list[str]) -> str:
        functions = [(f"turn(x, {self.tables})", turn), (f"kernel({', '.join(self.arguments)})", kernel)]
        parts = ["import torch\n"]
        for head, lines in functions:
            parts.append(f"\ndef {head}:\n" + "".join(f"    {line}\n" for line in lines))
        return "\n".join(parts)
