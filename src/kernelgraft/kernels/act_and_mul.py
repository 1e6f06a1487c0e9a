"""activation(gate) * up, of two tensors or of one that holds both.

Arithmetic is float32; the activation is rounded to the gate's dtype before the product unless `upcast`. Gradients are
computed by torch from the same formula in float32.
"""

# ruff: noqa: SIM108, SIM109
# mypy: disable-error-code="no-untyped-def"
# In a kernel a constant chooses a branch, which Python's shorter forms do not; tile functions take no annotations.

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch.nn import functional

from kernelgraft.cutile.plans import (
    LARGEST_AXIS,
    LARGEST_EXTENT,
    Maker,
    Plan,
    Tuning,
    contiguous,
    current,
    eager,
    extent,
    fire,
    like,
    makers,
    power_of_two,
    processors,
)
from kernelgraft.cutile.tuning import chosen
from kernelgraft.kernels.access import GATHER, LOAD, TMA, fitting, give, take
from kernelgraft.kernels.examples import Example, tensor
from kernelgraft.kernels.row_plans import as_rows, as_rows_shape, halves, viewable

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.square(torch.relu(x)),
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": functional.mish,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
}
"""What the kernel computes, by name; a name's place is its number in the kernel."""
ALIASES = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_python": "gelu", "silu_python": "silu"}
"""The same functions under names that say in which steps they are written."""

SEPARATE, GATE_FIRST, UP_FIRST, MIXED_GATE_FIRST, MIXED_UP_FIRST = 0, 1, 2, 3, 4
PACKED = {
    "gate_first": GATE_FIRST,
    "up_first": UP_FIRST,
    "interleaved_gate_first": MIXED_GATE_FIRST,
    "interleaved_up_first": MIXED_UP_FIRST,
}
"""How one tensor holds both."""
UNLIMITED, BEFORE, AFTER = 0, 1, 2
CLAMPS = {None: UNLIMITED, "before": BEFORE, "after": AFTER}
"""Whether the gate is limited, and where: before or after its activation; the other factor then is too."""

ZERO = ct.PaddingMode.ZERO

SMALL = Tuning(elements=1024, access=LOAD)
LARGE = Tuning(elements=2048, access=LOAD, worker_warps=8)
SMALL_ELEMENTS = 2**20
"""Up to that many elements of the result, `SMALL` holds, `LARGE` beyond."""

(IDENTITY, SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, RELU6, LEAKY_RELU, SIGMOID, TANH, MISH, ELU, SOFTPLUS,
 HARDSWISH) = range(len(ACTIVATIONS))  # fmt: skip


def logistic(x, FAST):
    """1 / (1 + exp(-x))."""
    if FAST:
        below = 1.0 + ct.exp2(x * -1.4426950408889634, flush_to_zero=True)
        return ct.truediv(1.0, below, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    return 1.0 / (1.0 + ct.exp(-x))


def doubled_normal(z):
    """1 + erf(z) in float32, without cancellation for negative z.

    Near zero erf(z) / z is a polynomial in z²; further out erfc(t) exp(t²) (1 + 0.4 t) is one in 1 / (1 + 0.4 t). Both
    are least-squares fits on Chebyshev points, good to 7e-10 and 4e-8.
    """
    s = ct.minimum(z * z, 0.9025)
    near = -8.10444180e-4 + s * 8.20979694e-5
    near = 5.19764237e-3 + s * near
    near = -2.68580317e-2 + s * near
    near = 1.12836711e-1 + s * near
    near = -3.76126319e-1 + s * near
    near = 1.12837923 + s * near
    t = ct.minimum(ct.abs(z), 11.0)  # there exp(-t * t) is zero; at 10 it is not, and times minus infinity infinite
    u = 1.0 / (1.0 + 0.4 * t)
    far = 2.44081765e-1 - u * 1.16441727e-1
    far = 7.75450235e-3 + u * far
    far = 2.13332012e-1 + u * far
    far = 1.98696822e-1 + u * far
    far = 2.26706132e-1 + u * far
    far = 2.25626141e-1 + u * far
    far = u * far * ct.exp(-t * t)
    far = ct.where(z < 0.0, far, 2.0 - far)
    return ct.where(ct.abs(z) < 0.95, 1.0 + z * near, far)


def logarithm_of_one_plus(e):
    """log(1 + e) for e >= 0, also where 1 + e rounds."""
    u = 1.0 + e
    step = u - 1.0
    return ct.where(step > 0.0, ct.log(u) * (e / ct.where(step > 0.0, step, 1.0)), e)


def exponential_minus_one(x):
    """exp(x) - 1 for x <= 0, also where exp(x) is close to one."""
    u = ct.exp(x)
    step = u - 1.0
    close = (u > 0.3) & (u < 1.0)
    return ct.where(close, step * x / ct.log(ct.where(close, u, 0.5)), ct.where(u < 1.0, step, x))


def activated(x, ACT, FAST):
    """The activation of a float32 tile."""
    if ACT == SILU:
        if FAST:
            x = x * logistic(x, FAST)
        else:
            x = x / (1.0 + ct.exp(-x))
    elif ACT == GELU:
        x = 0.5 * x * doubled_normal(x * 0.70710678118654752)
    elif ACT == GELU_TANH:
        if FAST:  # (1 + tanh(z)) / 2 is the logistic function of 2 z
            x = x * logistic(1.5957691216057308 * (x + 0.044715 * x * x * x), FAST)
        else:
            x = 0.5 * x * (1.0 + ct.tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)))
    elif ACT == QUICK_GELU:
        x = x * logistic(1.702 * x, FAST)
    elif ACT == RELU:
        x = ct.maximum(x, 0.0, propagate_nan=True)
    elif ACT == RELU2:
        x = ct.maximum(x, 0.0, propagate_nan=True)
        x = x * x
    elif ACT == RELU6:
        x = ct.minimum(ct.maximum(x, 0.0, propagate_nan=True), 6.0, propagate_nan=True)
    elif ACT == LEAKY_RELU:
        x = ct.where(x > 0.0, x, 0.01 * x)
    elif ACT == SIGMOID:
        x = logistic(x, FAST)
    elif ACT == TANH:
        x = ct.tanh(x)
    elif ACT == MISH:
        e = ct.exp(ct.minimum(x, 20.0, propagate_nan=True))
        n = e * (e + 2.0)
        x = ct.where(x > 20.0, x, x * (n / (n + 2.0)))
    elif ACT == ELU:
        x = ct.where(x > 0.0, x, exponential_minus_one(ct.minimum(x, 0.0, propagate_nan=True)))
    elif ACT == SOFTPLUS:
        x = ct.where(x > 20.0, x, logarithm_of_one_plus(ct.exp(ct.minimum(x, 20.0, propagate_nan=True))))
    elif ACT == HARDSWISH:
        x = x * ct.minimum(ct.maximum(x + 3.0, 0.0, propagate_nan=True), 6.0, propagate_nan=True) / 6.0
    return x


def product_tile(
    gate, up, y, limit, lead, row, p, pieces, FORM, ACT, CLAMP, ROUND, FAST, WIDTH, ROWS, TILE, ACCESS
):  # fmt: skip
    """One tile of the result."""
    if FORM == MIXED_GATE_FIRST or FORM == MIXED_UP_FIRST:
        both = take(gate, lead, row, p, ROWS, 2 * TILE, ACCESS)
        both = ct.reshape(both, (1, ROWS, TILE, 2))
        first = ct.reshape(ct.extract(both, (0, 0, 0, 0), (1, ROWS, TILE, 1)), (1, ROWS, TILE))
        second = ct.reshape(ct.extract(both, (0, 0, 0, 1), (1, ROWS, TILE, 1)), (1, ROWS, TILE))
    elif FORM == SEPARATE:
        first = take(gate, lead, row, p, ROWS, TILE, ACCESS)
        second = take(up, lead, row, p, ROWS, TILE, ACCESS)
    elif WIDTH == 0:
        first = take(gate, lead, row, p, ROWS, TILE, ACCESS)
        second = take(gate, lead, row, p + pieces, ROWS, TILE, ACCESS)
    else:
        head = gate.slice(2, 0, WIDTH)
        tail = gate.slice(2, WIDTH, 2 * WIDTH)
        first = take(head, lead, row, p, ROWS, TILE, ACCESS)
        second = take(tail, lead, row, p, ROWS, TILE, ACCESS)
    if FORM == UP_FIRST or FORM == MIXED_UP_FIRST:
        x, other = ct.astype(second, ct.float32), ct.astype(first, ct.float32)
    else:
        x, other = ct.astype(first, ct.float32), ct.astype(second, ct.float32)
    if CLAMP == BEFORE:
        x = ct.minimum(x, limit, propagate_nan=True)
    x = activated(x, ACT, FAST)
    if ROUND:
        x = ct.astype(ct.astype(x, gate.dtype), ct.float32)
    if CLAMP == AFTER:
        x = ct.minimum(x, limit, propagate_nan=True)
    if CLAMP != UNLIMITED:
        other = ct.minimum(ct.maximum(other, -limit, propagate_nan=True), limit, propagate_nan=True)
    give(y, ct.astype(x * other, y.dtype), lead, row, p, ROWS, TILE, ACCESS)


@ct.kernel
def act_and_mul_kernel(
    gate,
    up,
    y,
    limit,
    FORM: ct.Constant[int],
    ACT: ct.Constant[int],
    CLAMP: ct.Constant[int],
    ROUND: ct.Constant[bool],
    FAST: ct.Constant[bool],
    WIDTH: ct.Constant[int],
    ROWS: ct.Constant[int],
    TILE: ct.Constant[int],
    LOOP: ct.Constant[bool],
    ACCESS: ct.Constant[int],
):
    """gate, up, y: [lead, rows, width]; a packed `gate` is twice as wide. WIDTH: 0 unless halves are cut by it.

    FAST: the result is of a half type, whose rounding hides that of a quick exponential and quotient.
    """
    pieces = ct.cdiv(y.shape[2], TILE)
    if LOOP:
        across = ct.cdiv(y.shape[1], ROWS) * pieces
        for index in range(ct.bid(0), y.shape[0] * across, ct.num_blocks(0)):
            product_tile(
                gate, up, y, limit, index // across, (index % across) // pieces, index % pieces, pieces, FORM, ACT,
                CLAMP, ROUND, FAST, WIDTH, ROWS, TILE, ACCESS,
            )  # fmt: skip
    else:
        product_tile(
            gate, up, y, limit, ct.bid(2), ct.bid(1), ct.bid(0), pieces, FORM, ACT, CLAMP, ROUND, FAST, WIDTH, ROWS,
            TILE, ACCESS,
        )  # fmt: skip


def act_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str = "silu",
    *,
    upcast: bool = False,
    clamp: str | None = None,
    limit: float = 0.0,
) -> torch.Tensor:
    """activation(gate) * up.

    gate, up: [..., width] of one shape, any strides; float32, bfloat16 or float16. `activation`: a name of
    `ACTIVATIONS`. `upcast`: the activation is not rounded before the product, and the result has the gate's dtype.
    `clamp` (`before` or `after` the activation) keeps the gate below `limit` and `up` within ±`limit`.
    """
    run = _run if eager(gate, up) else _op
    return run(gate, up, activation, SEPARATE, upcast, CLAMPS[clamp], limit)


def packed_act_and_mul(
    gate_up: torch.Tensor,
    activation: str = "silu",
    *,
    packed: str = "gate_first",
    upcast: bool = False,
    clamp: str | None = None,
    limit: float = 0.0,
) -> torch.Tensor:
    """activation(gate) * up of one tensor [..., 2 * width]; `packed`: a name of `PACKED`; else as `act_and_mul`."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up have one width; {gate_up.shape[-1]} is odd")
    run = _run if eager(gate_up) else _op
    return run(gate_up, None, activation, PACKED[packed], upcast, CLAMPS[clamp], limit)


_NUMBER = {name: number for number, name in enumerate(ACTIVATIONS)}
_NUMBER |= {alias: _NUMBER[name] for alias, name in ALIASES.items()}


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call of known shapes and dtypes makes and launches."""

    shape: tuple[int, ...] | None
    """Of the result; None: as the gate's, with its strides."""
    strides: tuple[int, ...]
    dtype: torch.dtype
    makes: tuple[Maker, ...] | None
    """What makes the result, see `makers`."""
    plan: Plan | None
    """None: nothing to launch, more than one launch, or tensors that have to be brought to rows first."""
    views: tuple[tuple[int, int, int], tuple[int, int, int]] | None
    """The shapes of inputs and result as the kernel takes them; None: they have them."""


@functools.lru_cache(maxsize=4096)
def _call(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    up_strides: tuple[int, ...],
    device: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    activation: str,
    form: int,
    upcast: bool,
    clamp: int,
    limit: float,
) -> _Call:
    dtype = dtypes[0] if upcast else torch.promote_types(*dtypes)
    result = None if form == SEPARATE else (*shape[:-1], shape[-1] // 2)
    steps = contiguous(result or ())
    made = (shape, like(shape, strides), dtype) if result is None else (result, steps, dtype)
    makes = makers(device, made)
    views = None if len(shape) == 3 else (as_rows_shape(shape), as_rows_shape(result or shape))
    flat = views is None or len(shape) < 3 or (viewable(shape, strides) and viewable(shape, up_strides))
    if 0 in shape or not flat or max(extent(shape, strides), extent(shape, up_strides)) >= LARGEST_EXTENT:
        return _Call(result, steps, dtype, makes, None, None)
    half = dtype is not torch.float32
    seen = as_rows_shape(result or shape)
    plan = _plan(seen, device, half, activation, form, upcast, clamp, limit)
    return _Call(result, steps, dtype, makes, plan, views)


def _run(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    form: int,
    upcast: bool,
    clamp: int,
    limit: float,
) -> torch.Tensor:
    other = gate if up is None else up
    dtypes, device = (gate.dtype, other.dtype), gate.get_device()
    found = _call(
        gate.shape, gate.stride(), other.stride(), device, dtypes, activation, form, upcast, clamp, limit
    )  # fmt: skip
    makes = found.makes if device >= 0 and device == current() else None
    if makes is not None:
        y = makes[0]()
    elif found.shape is None:
        y = torch.empty_like(gate) if found.dtype is gate.dtype else torch.empty_like(gate, dtype=found.dtype)
    else:
        y = torch.empty_strided(found.shape, found.strides, dtype=found.dtype, device=gate.device)
    if found.plan is None:
        if y.numel():
            out, first, second = as_rows(y, gate, other)
            _split(out, first, second, activation, form, upcast, clamp, limit)
    elif found.views is None:
        fire(found.plan, (gate, other, y))
    else:
        (lead, rows, width), (_, _, half) = found.views  # torch takes sizes one by one faster than as a tuple
        fire(found.plan, (gate.view(lead, rows, width), other.view(lead, rows, width), y.view(lead, rows, half)))
    return y


def _split(
    y: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    form: int,
    upcast: bool,
    clamp: int,
    limit: float,
) -> None:
    """Launches on [lead, rows, width] tensors, as many as 32-bit offsets ask for."""
    if max(extent(t.shape, t.stride()) for t in (y, gate, up)) < LARGEST_EXTENT:
        half = y.dtype is not torch.float32
        fire(_plan(y.shape, gate.get_device(), half, activation, form, upcast, clamp, limit), (gate, up, y))
        return
    for part in halves((y, gate, up)):
        _split(part[0], part[1], part[2], activation, form, upcast, clamp, limit)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int, int],
    device: int,
    half: bool,
    activation: str,
    form: int,
    upcast: bool,
    clamp: int,
    limit: float,
) -> Plan:
    """The plan for a result [lead, rows, width]."""
    lead, count, width = shape
    tuning = choose(lead * count, width, 2 if half else 4, activation, form, device)
    divisor = width & -width
    most = tuning.elements
    tile = min(divisor if divisor >= 512 else power_of_two(width), most)
    pieces = -(-width // tile)
    together = max(1, min(most // tile, power_of_two(count)))
    while together > 1 and lead * -(-count // together) * pieces < 2 * processors(device):
        together //= 2
    cut = width if form in (GATE_FIRST, UP_FIRST) and width % tile else 0
    across = -(-count // together)
    loop = tuning.blocks is not None or max(lead, across) > LARGEST_AXIS
    constants = (
        limit,
        form,
        _NUMBER[activation],
        clamp,
        not upcast,
        half,
        cut,
        together,
        tile,
        loop,
        fitting(tuning.access, width % tile == 0 and count % together == 0, device),
    )
    grid = tuning.grid(lead * across * pieces, device) if loop else (pieces, across, lead)
    return Plan(tuning.hinted(act_and_mul_kernel), grid, constants)


def choose(rows: int, width: int, itemsize: int, activation: str, form: int, device: int) -> Tuning:
    """The free choices for a result of that many rows of values of that many bytes."""
    return chosen(default(rows, width), "act_and_mul", shape_class(rows, width, itemsize, activation, form), device)


def default(rows: int, width: int) -> Tuning:
    """The choices where nothing is tuned."""
    return SMALL if rows * width <= SMALL_ELEMENTS else LARGE


def shape_class(rows: int, width: int, itemsize: int, activation: str, form: int) -> str:
    """`silu packed 2^24 2B`: how inputs lie, how many values at most, their size; `odd` if rows end within a tile."""
    laid = ("apart", "packed", "packed", "mixed", "mixed")[form]
    places = ((rows * width - 1).bit_length() + 2) // 3 * 3  # 2^12, 2^15, …
    odd = "" if width % 512 == 0 else " odd"
    return f"{ALIASES.get(activation, activation)} {laid} 2^{min(max(places, 15), 27)}{odd} {itemsize}B"


def space(rows: int, width: int) -> list[Tuning]:
    """Configurations worth trying, the default first."""
    found = [default(rows, width)]
    if rows * width <= SMALL_ELEMENTS:
        found += [
            Tuning(elements=elements, access=LOAD, worker_warps=warps)
            for elements in (256, 512, 1024, 2048)
            for warps in (None, 8)
            if not (warps == 8 and elements < 1024)
        ]
        found += [Tuning(elements=elements, access=GATHER) for elements in (512, 1024)]
    else:
        found += [Tuning(elements=elements, access=LOAD) for elements in (512, 1024, 2048)]
        found += [Tuning(elements=elements, access=LOAD, worker_warps=8) for elements in (2048, 4096)]
        found += [Tuning(elements=elements, access=LOAD, occupancy=n) for elements, n in ((1024, 16), (2048, 8))]
        found += [Tuning(elements=2048, access=GATHER, occupancy=8), Tuning(elements=4096, access=TMA)]
    return list(dict.fromkeys(found))


_op = torch.library.custom_op("kernelgraft::act_and_mul", _run, mutates_args=())


@_op.register_fake
def _fake(
    gate: torch.Tensor, up: torch.Tensor | None, activation: str, form: int, upcast: bool, clamp: int, limit: float
) -> torch.Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return torch.empty_like(gate, dtype=gate.dtype if upcast else torch.promote_types(gate.dtype, up.dtype))


def reference(
    gate: torch.Tensor, up: torch.Tensor | None, activation: str, form: int, clamp: int, limit: float
) -> torch.Tensor:
    """The formula in torch, in the dtype of its inputs; `up` is None where `gate` holds both."""
    if form in (GATE_FIRST, UP_FIRST):
        gate, up = gate.chunk(2, dim=-1)
    elif form in (MIXED_GATE_FIRST, MIXED_UP_FIRST):
        gate, up = gate[..., 0::2], gate[..., 1::2]
    assert up is not None
    if form in (UP_FIRST, MIXED_UP_FIRST):
        gate, up = up, gate
    if clamp == BEFORE:
        gate = gate.clamp(max=limit)
    value = ACTIVATIONS[ALIASES.get(activation, activation)](gate)
    if clamp == AFTER:
        value = value.clamp(max=limit)
    return value * (up if clamp == UNLIMITED else up.clamp(min=-limit, max=limit))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, ctx.activation, ctx.form, _, ctx.clamp, ctx.limit = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [t.detach().float().requires_grad_() for t in (gate, up) if t is not None]
        other = inputs[1] if up is not None else None
        value = reference(inputs[0], other, ctx.activation, ctx.form, ctx.clamp, ctx.limit)
        found = torch.autograd.grad(value, inputs, grad.float())
    return found[0].to(gate.dtype), None if up is None else found[1].to(up.dtype), *[None] * 5


_op.register_autograd(_backward, setup_context=_setup)


def examples() -> list[Example]:
    """Decode, prefill and batches of 32; both factors in one tensor; every activation."""

    def of(*shape: int, dtype: torch.dtype = torch.bfloat16, act: str = "silu", **options: Any) -> Callable[[str], Any]:
        def run(device: str) -> torch.Tensor:
            if "packed" in options:
                return packed_act_and_mul(tensor(device, *shape[:-1], 2 * shape[-1], dtype=dtype), act, **options)
            gate, up = (tensor(device, *shape, dtype=dtype) for _ in range(2))
            return act_and_mul(gate, up, act, **options)

        return run

    single = torch.float32
    found = [
        Example("silu, decode 1 x 14336", of(1, 1, 14336)),
        Example("silu, decode 32 x 8192", of(32, 1, 8192)),
        Example("silu, prefill 4096 x 14336", of(1, 4096, 14336)),
        Example("silu, prefill 1024 x 3072 float16", of(1, 1024, 3072, dtype=torch.float16)),
        Example("gelu_tanh, prefill 1024 x 10240", of(1, 1024, 10240, act="gelu_tanh")),
        Example("silu, packed, prefill 1024 x 8192", of(1, 1024, 8192, packed="gate_first")),
        Example("silu, packed, 3 x 513", of(1, 3, 513, packed="gate_first"), tune=False),
        Example("silu, clamped, 3 x 513 float32", of(1, 3, 513, dtype=single, clamp="before", limit=7.0), tune=False),
        Example("sigmoid, clamped", of(1, 3, 2880, act="sigmoid", clamp="after", limit=7.0, upcast=True), tune=False),
    ]
    found += [
        Example(f"silu, {packed}, decode 8 x 2880", of(8, 1, 2880, packed=packed), tune=False) for packed in PACKED
    ]
    return found + [Example(f"{act}, decode 1 x 8192", of(1, 1, 8192, act=act), tune=False) for act in ACTIVATIONS]
