"""Definitions as running code: write one, run its reference, and run it in float64 as the oracle."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from kernelgraft.families.points import holds
from kernelgraft.records import Axis, Definition, DefinitionMeta, Site, TensorSpec

_LOWER = (torch.float32, torch.bfloat16, torch.float16)


class Float64Mode(TorchDispatchMode):
    """Runs everything in float64: a cast to a smaller float, inside the code that runs, becomes a cast to float64.

    With it a reference that upcasts "to float32" for accuracy is computed in float64 throughout, so one piece of code
    is both the original's arithmetic and the oracle.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        return func(*tree_map(_widened, args, is_leaf=_is_dtype), **kwargs)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _widened(value: Any) -> Any:
    # Only dtypes are compared: comparing a tensor with one is slow.
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER else value


@functools.lru_cache(maxsize=1024)
def _compile(reference: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(compile(reference, "<reference>", "exec"), namespace)
    run: Callable[..., Any] = namespace["run"]
    return run


def body_function(body: str) -> Callable[..., Any]:
    """The `run` of a body as `define` takes it."""
    return _compile(f"import torch\n\n{body}")


def reference_function(definition: Definition) -> Callable[..., Any]:
    """The Definition's `run`: takes its inputs in order, returns its output, or a tuple of its outputs."""
    return _compile(definition.reference)


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    """One output or several as a tuple."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def run_reference(definition: Definition, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The reference in the inputs' own dtypes: what the original computes."""
    with torch.no_grad():
        return as_tuple(reference_function(definition)(*inputs))


def run_oracle(definition: Definition, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The reference in float64 throughout (see `Float64Mode`); integer and boolean inputs stay as they are."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    with torch.no_grad(), Float64Mode():
        return as_tuple(reference_function(definition)(*wide))


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` → `float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """`float32` → `torch.float32`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def define(
    *,
    name: str,
    op_type: str,
    family: str,
    semantics: dict[str, Any],
    axes: dict[str, int | None],
    inputs: dict[str, tuple[Sequence[str] | None, torch.dtype]],
    outputs: dict[str, tuple[Sequence[str] | None, torch.dtype]],
    body: str,
    site: Site,
    description: str,
    reference_error: float,
    constraints: Sequence[str] = (),
) -> Definition:
    """Build a Definition: `# Source:` lines first, then `import torch` and `body`, which defines a global `run`.

    `axes`: size of a const axis, None for a var one. `inputs`/`outputs`: shape as axis names, and dtype.
    """
    reference = "\n".join([site.source.comment(), "import torch", "", "", textwrap.dedent(body).strip(), ""])
    specs_in = {
        k: TensorSpec(shape=None if s is None else tuple(s), dtype=dtype_name(d)) for k, (s, d) in inputs.items()
    }
    specs_out = {
        k: TensorSpec(shape=None if s is None else tuple(s), dtype=dtype_name(d)) for k, (s, d) in outputs.items()
    }
    axis_records = {k: Axis(type="var") if v is None else Axis(type="const", value=v) for k, v in axes.items()}
    return Definition(
        name=name,
        op_type=op_type,
        axes=axis_records,
        inputs=specs_in,
        outputs=specs_out,
        reference=reference,
        tags=("status:verified",),
        description=description,
        constraints=tuple(constraints),
        meta=DefinitionMeta(
            family=family,
            semantics=semantics,
            fingerprint=fingerprint(reference, axis_records, specs_in, constraints),
            sources=(site.source,),
            reference_error=reference_error,
        ),
    )


_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)


def fingerprint(
    reference: str, axes: dict[str, Axis], inputs: dict[str, TensorSpec], constraints: Sequence[str] = ()
) -> str:
    """SHA-256 of the operator graph that the reference traces to, with dtypes and constants, free of names.

    The graph is traced on fake tensors; a var axis gets a prime that stands for nothing else, so that its uses in the
    graph are recognised and renamed by order. Axes that a constraint ties together share one.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    sizes = _traced_sizes(axes, constraints)
    names = {p: f"axis{i}" for i, p in enumerate(_PRIMES) if p in sizes.values()}
    with _fake() as mode, mode:
        tensors: list[Any] = [
            1.0 if spec.shape is None else torch.empty([sizes[a] for a in spec.shape], dtype=torch_dtype(spec.dtype))
            for spec in inputs.values()
        ]
        graph = make_fx(_compile(reference), tracing_mode="real")(*tensors).graph
    order: dict[Any, str] = {}
    lines = [str([(s.dtype, [names.get(sizes[a], sizes[a]) for a in s.shape or ()]) for s in inputs.values()])]

    def canonical(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return order[value]
        if isinstance(value, (tuple, list)):
            return "[" + ",".join(canonical(v) for v in value) + "]"
        return names.get(value, str(value)) if isinstance(value, int) and not isinstance(value, bool) else str(value)

    for node in graph.nodes:
        order[node] = f"%{len(order)}"
        keywords = ",".join(f"{k}={canonical(v)}" for k, v in sorted(node.kwargs.items()))
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{order[node]}={node.op}:{target}({','.join(map(canonical, node.args))};{keywords})")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _traced_sizes(axes: dict[str, Axis], constraints: Sequence[str]) -> dict[str, int]:
    """A prime per var axis; where the constraints forbid that, the size of an earlier axis, or 1."""
    fixed = {name: axis.value for name, axis in axes.items() if axis.value is not None}
    free = [name for name, axis in axes.items() if axis.value is None]
    chosen: dict[str, int] = {}

    def choose(index: int) -> bool:
        if index == len(free):
            return holds(constraints, {**fixed, **chosen})
        for size in (_PRIMES[index], *(chosen[name] for name in free[:index]), 1):
            chosen[free[index]] = size
            if choose(index + 1):
                return True
        return False

    if not choose(0):
        raise ValueError(f"no sizes satisfy {', '.join(constraints)}")
    return {name: fixed[name] if name in fixed else chosen[name] for name in axes}


@contextlib.contextmanager
def _fake() -> Iterator[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    yield FakeTensorMode(allow_non_fake_inputs=True)
