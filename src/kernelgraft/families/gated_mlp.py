"""Gated feed-forward: `down(activation(gate(x)) * up(x))`; the Definition is only `activation(gate) * up`.

Found at modules. The projections stay modules and are called by their attribute path, so adapters, quantised weights
and hooks on them go on working. Semantics of a recognised site:

- `activation`: a name of `ACTIVATIONS`;
- `packed`: None if gate and up come from two children, else how one child's output holds them: `gate_first` or
  `up_first` halves, or the same with `interleaved_` before it;
- `upcast`: the product is taken in float32 and rounded once;
- `clamp`, `limit`: None, or gate is held below `limit` (`before` or `after` the activation) and up within ± `limit`;
- `heads`, `tail`, `act`, `parameter`, `eval_only`, `rank`: what the seat needs.

Not covered: scalar multipliers, sparsity, adapters that depend on the call, experts held in one tensor.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from kernelgraft.families.base import Call, Distribution, Family, Recognition, Rejection, Seat
from kernelgraft.families.gated_mlp_trace import Trace, find, parameter_name, trace
from kernelgraft.families.probe import DIFFERENT, PROBE_DTYPES, TOLERANCE_ULP, Match, clone, draw, same, worst
from kernelgraft.families.reference import body_function, define, dtype_name, torch_dtype
from kernelgraft.records import Definition, Site

ACTIVATIONS = {
    "silu": "torch.nn.functional.silu(x)",
    "gelu": "torch.nn.functional.gelu(x)",
    "gelu_tanh": 'torch.nn.functional.gelu(x, approximate="tanh")',
    # The same functions in single steps: in bfloat16 each step rounds.
    "gelu_new": "0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))",
    "gelu_fast": "0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))",
    "gelu_python": "x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))",
    "silu_python": "x * torch.sigmoid(x)",
    "quick_gelu": "x * torch.sigmoid(1.702 * x)",
    "relu": "torch.relu(x)",
    "relu2": "torch.square(torch.relu(x))",
    "relu6": "torch.nn.functional.relu6(x)",
    "leaky_relu": "torch.nn.functional.leaky_relu(x)",
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
    "mish": "torch.nn.functional.mish(x)",
    "elu": "torch.nn.functional.elu(x)",
    "softplus": "torch.nn.functional.softplus(x)",
    "hardswish": "torch.nn.functional.hardswish(x)",
    "identity": "x",
}
"""Name to expression in `x`."""

INLINE = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "identity")
"""Activations that the seat knows when the forward writes them itself."""

SCALES = (1.0, 30.0, 1000.0)
"""Factors on the fresh inputs: a limit on the values shows only with large ones."""


def gated_mlp_seat(
    original: Callable[..., Any],
    select: Callable[..., Any],
    *,
    heads: list[str],
    tail: list[str],
    act: str | None,
    activation: str,
    packed: str | None,
    upcast: bool,
    clamp: str | None,
    limit: float | None,
    parameter: str,
    eval_only: bool,
    rank: int,
) -> Callable[..., Any]:
    """Replace a module's forward: call its projections, let `select` serve the product, call what follows it.

    `heads` are the paths of gate and up, or of the child whose output holds both; `tail` those of what follows the
    product; `act` is the attribute that holds the activation (None: the forward writes it); `parameter` names the
    forward's argument; `eval_only`: in training the forward does something else, so the original runs; `rank` is the
    number of axes of gate and up that the Definition has.
    """
    functional = torch.nn.functional
    inline: dict[str, Callable[..., Any]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "identity": torch.positive,
    }

    def fetch(module: Any, path: str) -> Any:
        for name in path.split("."):
            module = getattr(module, name)
        return module

    def watched(activation: Any) -> bool:
        """True for a module whose own call something wants to see: a kernel would not make it."""
        own = getattr(activation, "__dict__", {})
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
        return any(own.get(kind) for kind in kinds)

    def product(module: Any, gate: Any, up: Any) -> Any:
        function = inline[activation] if act is None else fetch(module, act)
        dtype = gate.dtype
        if upcast:
            gate, up = gate.float(), up.float()
        if clamp == "before":
            gate = gate.clamp(max=limit)
        gate = function(gate)
        if clamp == "after":
            gate = gate.clamp(max=limit)
        if limit is not None:
            up = up.clamp(min=-limit, max=limit)
        return (gate * up).to(dtype)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x = args[0]
        elif not args and len(kwargs) == 1 and parameter in kwargs:
            x = kwargs[parameter]
        else:
            return original(self, *args, **kwargs)
        if (eval_only and self.training) or (act is not None and watched(fetch(self, act))):
            return original(self, x)
        inputs = [fetch(self, path)(x) for path in heads]
        kernel = select(*inputs) if inputs[0].ndim == rank else None
        if kernel is not None:
            y = kernel(*inputs)
        elif packed is None:
            y = product(self, *inputs)
        else:
            both = inputs[0]
            if packed.startswith("interleaved"):
                first, second = both[..., 0::2], both[..., 1::2]
            else:
                first, second = both.chunk(2, dim=-1)
            y = product(self, first, second) if packed.endswith("gate_first") else product(self, second, first)
        for path in tail:
            y = fetch(self, path)(y)
        return y

    return forward


@dataclass(frozen=True)
class Variant:
    """How the product is taken; see the module's docstring for the fields."""

    activation: str
    swapped: bool = False
    """True if the head that is called first is up (not with `packed`)."""
    packed: str | None = None
    upcast: bool = False
    clamp: str | None = None
    limit: float | None = None

    def body(self) -> str:
        """Source of `run(gate, up)`, or of `run(gate_up)`."""
        whole = "gate" if self.packed is None else "gate_up"
        lines = ["def run(gate, up):" if self.packed is None else "def run(gate_up):"]
        if self.packed is not None:
            names = "gate, up" if self.packed.endswith("gate_first") else "up, gate"
            inter = self.packed.startswith("interleaved")
            values = "gate_up[..., 0::2], gate_up[..., 1::2]" if inter else "gate_up.chunk(2, dim=-1)"
            lines.append(f"    {names} = {values}")
        lines.append("    x, up = gate.float(), up.float()" if self.upcast else "    x = gate")
        if self.clamp == "before":
            lines.append(f"    x = x.clamp(max={self.limit})")
        if self.activation != "identity":
            lines.append(f"    x = {ACTIVATIONS[self.activation]}")
        if self.clamp == "after":
            lines.append(f"    x = x.clamp(max={self.limit})")
        if self.clamp is not None:
            lines.append(f"    up = up.clamp(min=-{self.limit}, max={self.limit})")
        lines.append(f"    return (x * up).to({whole}.dtype)" if self.upcast else "    return x * up")
        return "\n".join(lines)

    def arranged(self, heads: Sequence[Any]) -> list[Any]:
        """Gate and up from the heads in the order of their calls."""
        return list(reversed(heads)) if self.swapped else list(heads)

    def gate_of(self, heads: Sequence[torch.Tensor]) -> torch.Tensor:
        """What goes into the activation, from what the heads returned."""
        gate = self.arranged(heads)[0]
        if self.packed is not None:
            inter = self.packed.startswith("interleaved")
            halves = (gate[..., 0::2], gate[..., 1::2]) if inter else gate.chunk(2, dim=-1)
            gate = halves[0 if self.packed.endswith("gate_first") else 1]
        gate = gate.float() if self.upcast else gate
        return gate.clamp(max=self.limit) if self.clamp == "before" else gate


class GatedMLP(Family):
    """Gated feed-forward modules."""

    name: ClassVar[str] = "gated_mlp"
    kinds: ClassVar[frozenset[str]] = frozenset({"module"})

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """See `Family.recognise`."""
        found = find(calls[0]) if calls else None
        if found is None or isinstance(found, str):
            return None if found is None else Rejection(self.name, found)
        call = calls[0]
        copies = [clone(call.module, dtype=dtype, seed=7) for dtype in PROBE_DTYPES]
        cases = [(copy, x) for copy in copies for x in _fresh(call, copy)]
        probes = [trace(call.original, copy, x) for copy, x in cases]
        traces = [p for p in probes if isinstance(p, Trace) and p.form == found.form]
        if len(traces) < len(probes):
            return Rejection(self.name, "with random parameters it has another form than with its own")
        variant, match = _choose(call.module, traces)
        if not match.acceptable:
            return self._unexplained(call.module, found, match)
        act = _activation_path(copies[0], traces[0], variant)
        if act is None and variant.activation not in INLINE:
            return Rejection(self.name, f"its forward writes the activation `{variant.activation}` itself")
        if act is not None and not (on_grid := _on_grid(copies, act, variant.activation)).acceptable:
            what = f"activation `{act}` is {on_grid.max_ulp:.1f} ulp away from `{variant.activation}`"
            return Rejection(self.name, f"{what}, the closest that is known")
        semantics = {
            "activation": variant.activation,
            "packed": variant.packed,
            "upcast": variant.upcast,
            "clamp": variant.clamp,
            "limit": variant.limit,
            "heads": variant.arranged(found.heads),
            "tail": list(found.tail),
            "act": act,
            "parameter": parameter_name(call),
            "rank": found.projected[0].ndim,
            "eval_only": not all(_same_in_training(call.original, copy, x) for copy, x in cases[:1]),
        }
        run = body_function(variant.body())
        for copy, x in cases:
            with torch.no_grad():
                expected = call.original(copy, x)
            if not (match := self._seated(semantics, call.original, run, copy, x, expected)).acceptable:
                return Rejection(self.name, f"a copy with random parameters differs by {match.max_ulp:.1f} ulp")
        matches = [
            self._seated(semantics, c.original, run, c.module, *c.args, c.output, **c.kwargs)
            for c in calls
            if len(c.args) + len(c.kwargs) == 1
        ]
        if not matches:
            return Rejection(self.name, "its forward is called with further arguments")
        if not (match := worst(matches)).acceptable:
            return Rejection(self.name, f"the reference is {match.max_ulp:.1f} ulp away from a captured call")
        definition = _definition(site, found, variant, semantics, match)
        return Recognition(self.name, semantics, (definition,))

    def _seated(
        self,
        semantics: dict[str, Any],
        original: Callable[..., Any],
        run: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Match:
        """Compare the seat with the reference in it with the last of `args`, the expected output."""
        *inputs, expected = args
        seat = self.seat(semantics)
        with torch.no_grad():
            return same(seat.factory(original, lambda *_: run, **seat.constants)(*inputs, **kwargs), expected)

    def _unexplained(self, module: nn.Module, found: Trace, match: Match) -> Rejection | None:
        """Why the form does not make a gated product; None if the module has parts that such a module has not."""
        owners = {*found.heads, *found.tail, *(s.path for s in found.inner)}
        parts = [n for n, _ in module.named_parameters() if not any(n.startswith(f"{path}.") for path in owners)]
        if found.others or parts or not found.tail:
            return None
        halves = found.projected if len(found.heads) == 2 else found.projected[0].chunk(2, dim=-1)
        for step in found.inner:
            for gate, up in (halves, halves[::-1]):
                if torch.equal(step.x, gate) and same(step.y * up, found.product).acceptable:
                    name = type(module.get_submodule(step.path)).__name__
                    return Rejection(self.name, f"activation `{step.path}` ({name}) is not one of the known")
        far = f"the closest is {match.max_ulp:.3g} ulp away, at most {TOLERANCE_ULP:g}"
        return Rejection(self.name, f"what its last part is given is not activation(gate) * up ({far})")

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """See `Family.seat`."""
        return Seat(gated_mlp_seat, dict(semantics))

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`."""
        sizes = {name: axes[name] if axis.value is None else axis.value for name, axis in definition.axes.items()}
        return [
            draw([sizes[axis] for axis in spec.shape or ()], torch_dtype(spec.dtype), generator, distribution)
            for spec in definition.inputs.values()
        ]


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return body_function(f"def run(x):\n    return {ACTIVATIONS[name]}")


def _fresh(call: Call, copy: nn.Module) -> Iterator[torch.Tensor]:
    """Random inputs of the captured rank, in the copy's dtype, small and large; few rows, as a copy may be wide."""
    x = next(v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.Tensor))
    dtype = next((p.dtype for p in copy.parameters() if p.is_floating_point()), x.dtype)
    generator = torch.Generator().manual_seed(3)
    shape = [*(min(size, 5) for size in x.shape[:-1]), x.shape[-1]]
    for scale in SCALES:
        yield (torch.randn(shape, generator=generator) * scale).to(dtype)


def _variants(module: nn.Module, found: Trace) -> Iterator[list[Variant]]:
    """Variants in groups; a later group is tried only if no variant of those before fits."""
    layouts: list[dict[str, Any]] = [{"swapped": False}, {"swapped": True}]
    if len(found.heads) == 1:
        orders = ("gate_first", "up_first", "interleaved_gate_first", "interleaved_up_first")
        layouts = [{"packed": order} for order in orders]
    plain = [
        Variant(name, upcast=upcast, **layout)
        for name, upcast, layout in itertools.product(ACTIVATIONS, (False, True), layouts)
    ]
    yield plain
    widths = {size for p in module.parameters() for size in p.shape}
    limits = {float(v) for v in vars(module).values() if type(v) in (int, float) and v > 0 and v not in widths}
    for limit, clamp in itertools.product(sorted(limits), ("before", "after")):
        yield [
            Variant(name, upcast=upcast, clamp=clamp, limit=limit, **layout)
            for name, upcast, layout in itertools.product(ACTIVATIONS, (False, True), layouts)
        ]


def _choose(module: nn.Module, traces: Sequence[Trace]) -> tuple[Variant, Match]:
    """The variant whose product is closest to the module's, over all probes."""
    best: tuple[Variant, Match] = (Variant("identity"), DIFFERENT)
    for group in _variants(module, traces[0]):
        for variant in group:
            match = Match(bit_equal=True, max_ulp=0.0, max_absolute=0.0)
            for probe in traces:
                match = max(match, _product(variant, probe))
                if not match < best[1]:
                    break
            if match < best[1]:
                best = variant, match
        if best[1].acceptable:
            break
    return best


def _product(variant: Variant, probe: Trace) -> Match:
    with torch.no_grad():
        return same(body_function(variant.body())(*variant.arranged(probe.projected)), probe.product)


def _activation_path(copy: nn.Module, probe: Trace, variant: Variant) -> str | None:
    """The attribute of the module that holds the activation: a child that was given the gate, or a function."""
    gate = variant.gate_of(probe.projected)
    for step in probe.inner:
        if torch.equal(step.x.to(gate.dtype), gate):
            return step.path
    with torch.no_grad():
        expected = _activation(variant.activation)(gate)
        for name, value in vars(copy).items():
            if callable(value) and not name.startswith("_") and same(_attempt(value, gate), expected).acceptable:
                return name
    return None


def _attempt(function: Callable[..., Any], x: torch.Tensor) -> Any:
    try:
        return function(x)
    except (TypeError, RuntimeError, ValueError, AttributeError):  # an attribute that is no function of one tensor
        return None


def _on_grid(copies: Sequence[nn.Module], act: str, name: str) -> Match:
    """Compare the module's activation with the named one on dense grids of small, usual and very large values."""
    matches = []
    for copy, dtype in zip(copies, PROBE_DTYPES, strict=True):
        function: Any = copy
        for part in act.split("."):
            function = getattr(function, part)
        for bound, points in ((1.0, 2001), (12.0, 4801), (1e4, 4001)):
            x = torch.linspace(-bound, bound, points).to(dtype)
            with torch.no_grad():
                matches.append(same(function(x), _activation(name)(x)))
    return worst(matches)


def _same_in_training(original: Callable[..., Any], copy: nn.Module, x: torch.Tensor) -> bool:
    """True if training changes nothing (no dropout)."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trained = original(copy.train(), x)
        return torch.equal(trained, original(copy.eval(), x))


def _definition(site: Site, found: Trace, variant: Variant, semantics: dict[str, Any], match: Match) -> Definition:
    first = found.projected[0]
    rows = {2: ["num_rows"], 3: ["batch_size", "seq_len"]}.get(first.ndim)
    rows = rows or ["batch_size", "seq_len", *(f"size_{i}" for i in range(2, first.ndim - 1))]
    axes: dict[str, int | None] = dict.fromkeys(rows)
    width = found.product.shape[-1]
    inputs: dict[str, tuple[Sequence[str] | None, torch.dtype]]
    if variant.packed is None:
        inputs = {name: ([*rows, "intermediate_size"], first.dtype) for name in ("gate", "up")}
    else:
        axes["packed_size"] = 2 * width
        inputs = {"gate_up": ([*rows, "packed_size"], first.dtype)}
    axes["intermediate_size"] = width
    text = json.dumps([semantics, axes, str(first.dtype)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    kind = "gated_mlp" if variant.packed is None else "gated_mlp_packed"
    return define(
        name=f"{kind}_{variant.activation}_i{width}_r{first.ndim}_{dtype_name(first.dtype)}_{digest}",
        op_type="gated_mlp",
        family=GatedMLP.name,
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs={"output": ([*rows, "intermediate_size"], found.product.dtype)},
        body=variant.body(),
        site=site,
        description=f"{variant.activation}(gate) * up between the projections of a gated feed-forward.",
        reference_error=match.max_absolute,
    )


FAMILY = GatedMLP()
