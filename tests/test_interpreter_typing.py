"""The interpreter's typing against the compiler's own front end, which runs here without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is an optional extra")

from kernelgraft.cutile.launching import interpret  # noqa: E402
from kernelgraft.cutile.typecheck import front_end  # noqa: E402

torch.set_num_threads(1)

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NUMBERS = [torch.bool, *INTEGERS, *FLOATS]

seen: list[Any] = []


def note(*values: Any) -> int:
    """Called by kernels at compile time: what they get there is what the compiler infers."""
    for value in values:
        seen.append(_type(value))
    return 0


def _type(value: Any) -> Any:
    if isinstance(value, ct.Tile):
        return (str(value.dtype), tuple(value.shape))
    if isinstance(value, tuple):
        return tuple(_type(item) for item in value)
    # A constant: its value up to rounding, and its Python type.
    return (type(value).__name__, round(float(value), 5) if isinstance(value, int | float) else str(value))


def inferred(run: Any) -> list[Any] | str:
    """What `run` notes; or, where it is refused, that it was (the message's first line may name a variable)."""
    seen.clear()
    try:
        run()
    except ct.TileError as error:
        return type(error).__name__
    return list(seen)


def both(kernel: Any, *args: Any) -> tuple[Any, Any]:
    compiled = inferred(lambda: front_end(kernel, args))
    ours = inferred(lambda: interpret((1,), kernel, args, check=False))
    return compiled, ours


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32).to(dtype)


# --- promotion of two tiles ---


@ct.kernel
def arithmetic(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a + b
    r1 = a - b
    r2 = a * b
    r3 = max(a, b)
    r4 = min(a, b)
    ct.static_eval(note(r0, r1, r2, r3, r4))


@ct.kernel
def division(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a / b
    r1 = ct.truediv(a, b)
    ct.static_eval(note(r0, r1))


@ct.kernel
def floor_division(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a // b
    ct.static_eval(note(r0))


@ct.kernel
def remainder(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a % b
    ct.static_eval(note(r0))


@ct.kernel
def comparison(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a < b
    r1 = a == b
    ct.static_eval(note(r0, r1))


@ct.kernel
def choice(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = ct.where(a > b, a, b)
    ct.static_eval(note(r0))


@ct.kernel
def bits(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a & b
    r1 = a | b
    r2 = a ^ b
    ct.static_eval(note(r0, r1, r2))


@ct.kernel
def shifts(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a << b
    r1 = a >> b
    ct.static_eval(note(r0, r1))


@ct.kernel
def powers(x, y):
    a = ct.load(x, (0,), (4,))
    b = ct.load(y, (0,), (4,))
    r0 = a**b
    ct.static_eval(note(r0))


@ct.kernel
def products(x, y):
    a = ct.load(x, (0,), (4,)).reshape((2, 2))
    b = ct.load(y, (0,), (4,)).reshape((2, 2))
    r = a @ b
    ct.static_eval(note(r))


@ct.kernel
def stored(x, y):
    ct.store(y, (0,), ct.load(x, (0,), (4,)))
    ct.static_eval(note(1))


PAIRS = [
    *(arithmetic, division, floor_division, remainder, comparison),
    *(choice, bits, shifts, powers, products, stored),
]


@pytest.mark.parametrize("kernel", PAIRS, ids=lambda k: k._pyfunc.__name__)
def test_two_tiles_meet_as_the_compiler_says(kernel: Any) -> None:
    differing = []
    accepted = 0
    for i, one in enumerate(NUMBERS):
        for other in NUMBERS[0 if kernel is stored else i :]:
            if kernel is powers and not one.is_floating_point:
                # The compiler's front end lets integer powers pass; its next stage refuses them.
                continue
            compiled, ours = both(kernel, tensor(one, 4), tensor(other, 4))
            accepted += isinstance(compiled, list)
            if compiled != ours:
                differing.append((one, other, compiled, ours))
    assert not differing
    assert accepted


# --- one tile ---


@ct.kernel
def functions(x):
    a = ct.load(x, (0,), (4,))
    r0 = ct.exp(a)
    r1 = ct.rsqrt(a)
    r2 = ct.tanh(a)
    ct.static_eval(note(r0, r1, r2))


@ct.kernel
def strict_functions(x):
    r = ct.floor(ct.load(x, (0,), (4,)))
    ct.static_eval(note(r))


@ct.kernel
def signs(x):
    a = ct.load(x, (0,), (4,))
    r0 = ct.abs(a)
    r1 = ct.negative(a)
    r2 = +a
    ct.static_eval(note(r0, r1, r2))


@ct.kernel
def inverted(x):
    r = ct.bitwise_not(ct.load(x, (0,), (4,)))
    ct.static_eval(note(r))


@ct.kernel
def reductions(x):
    a = ct.load(x, (0,), (4,)).reshape((2, 2))
    r0 = ct.sum(a, 0)
    r1 = ct.prod(a, 1, keepdims=True)
    r2 = ct.argmax(a, 1)
    r3 = ct.cumsum(a, 1)
    r4 = ct.sum(a)
    ct.static_eval(note(r0, r1, r2, r3, r4))


@ct.kernel
def extremes(x):
    a = ct.load(x, (0,), (4,)).reshape((2, 2))
    r0 = ct.max(a, 0)
    r1 = ct.min(a, (0, 1))
    ct.static_eval(note(r0, r1))


@ct.kernel
def moved(x):
    a = ct.load(x, (0,), (4,))
    b = a.reshape((2, -1))
    r0 = ct.transpose(b)
    r1 = ct.cat((b, b), -1)
    r2 = b[:, None, :]
    r3 = ct.broadcast_to(a, (2, 2, 4))
    r4 = ct.extract(b, (0, 1), (2, 1))
    r5 = a.extract((1,), ()).item()
    ct.static_eval(note(b, r0, r1, r2, r3, r4, r5))


@ct.kernel
def cast(x):
    a = ct.load(x, (0,), (4,))
    r0 = a.astype(ct.float16)
    r1 = ct.astype(a, torch.int64)
    r2 = ct.full((2,), 1, a.dtype)
    r3 = ct.arange(4, dtype=a.dtype)
    ct.static_eval(note(r0, r1, r2, r3))


@ct.kernel
def rounded(x):
    r = ct.truediv(ct.load(x, (0,), (4,)), 3.0, rounding_mode=ct.RoundingMode.APPROX)
    ct.static_eval(note(r))


SINGLE = [functions, strict_functions, signs, inverted, reductions, extremes, moved, cast, rounded]


@pytest.mark.parametrize("kernel", SINGLE, ids=lambda k: k._pyfunc.__name__)
def test_one_tile_gives_what_the_compiler_says(kernel: Any) -> None:
    differing = []
    for dtype in [*NUMBERS, torch.float8_e4m3fn]:
        compiled, ours = both(kernel, tensor(dtype, 4))
        if compiled != ours:
            differing.append((dtype, compiled, ours))
    assert not differing


# --- loosely typed numbers ---


@ct.kernel
def loose(x, n: int, f: float):
    a = ct.load(x, (0,), (4,))
    ct.static_eval(note(a, n, f))
    b = a + 1
    c = a * 2.5
    d = 3 - a
    e = a / 2
    g = a * n
    h = a * f
    i = a * (n * 2)
    j = ct.where(a > 0, a, 1)
    k = ct.where(a > 0, 1, 2.0)
    ct.static_eval(note(b, c, d, e, g, h, i, j, k))
    l0 = n + 1
    l1 = n / 2
    l2 = n // 2
    l3 = f * 2
    l4 = n * f
    l5 = max(n, 3)
    l6 = ct.cdiv(n, 4)
    ct.static_eval(note(l0, l1, l2, l3, l4, l5, l6))


@ct.kernel
def too_large(x):
    a = ct.load(x, (0,), (4,))
    b = a + 300
    ct.static_eval(note(b))


@ct.kernel
def carried(x, n: int):
    a = ct.load(x, (0,), (4,))
    factor = 2
    scale = 0.5
    flag = True
    for i in range(n):
        b = a * i
        c = a * factor
        factor = factor + 1
        scale = scale * 2
        ct.static_eval(note(b, c, factor, scale, flag, i))
    d = a * factor
    e = a * scale
    ct.static_eval(note(factor, scale, d, e))


@ct.kernel
def branched(x, n: int):
    a = ct.load(x, (0,), (4,))
    scale = 2.0
    if n > 2:
        scale = 0.5
    chosen = 1 if n > 1 else 4
    b = a * scale
    c = a * chosen
    d = not n > 2
    ct.static_eval(note(scale, b, chosen, c, d))
    constant = 1 if 2 > 1 else 4
    e = a * constant
    f = not True
    ct.static_eval(note(constant, e, f))


@ct.kernel
def waited(x, n: int):
    a = ct.load(x, (0,), (4,))
    left = 3
    while left > n:
        left = left - 1
    b = a * left
    ct.static_eval(note(left, b))


@ct.kernel
def constructed(x):
    a = ct.load(x, (0,), (4,))
    b = a * ct.float32(2)
    c = a + ct.int64(1)
    ct.static_eval(note(b, c))


@pytest.mark.parametrize(
    "kernel", [loose, too_large, carried, branched, waited, constructed], ids=lambda k: k._pyfunc.__name__
)
def test_numbers_take_the_types_that_the_compiler_gives_them(kernel: Any) -> None:
    differing = []
    rest = {"loose": (5, 2.5), "carried": (3,), "branched": (3,), "waited": (1,)}.get(kernel._pyfunc.__name__, ())
    for dtype in NUMBERS:
        compiled, ours = both(kernel, tensor(dtype, 4), *rest)
        if kernel is carried and isinstance(ours, list):
            # The compiler sees the loop's body once, the interpreter runs it three times: each must be the same.
            turns = [ours[i * 6 : i * 6 + 6] for i in range(3)]
            ours = ours[12:]
            assert all(turn[0] == turns[0][0] and turn[1:4] == turns[0][1:4] for turn in turns)
        if compiled != ours:
            differing.append((dtype, compiled, ours))
    assert not differing
