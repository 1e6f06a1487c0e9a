"""Every operation of the interpreter against torch, NumPy or Python, in kernels that the front end accepts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is an optional extra")

from kernelgraft.cutile import launch  # noqa: E402

torch.set_num_threads(1)

ROWS, COLUMNS = 4, 8
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def one(operation: Callable[..., Any], x: torch.Tensor, result: torch.dtype | None = None) -> torch.Tensor:
    """`operation` of a 4×8 tile, stored."""

    @ct.kernel
    def kernel(x, y):
        ct.store(y, (0, 0), operation(ct.load(x, (0, 0), (ROWS, COLUMNS))))

    y = torch.zeros(ROWS, COLUMNS, dtype=result or x.dtype)
    launch((1,), kernel, (x, y))
    return y


def two(
    operation: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, result: torch.dtype | None = None
) -> torch.Tensor:
    """`operation` of two 4×8 tiles, stored."""

    @ct.kernel
    def kernel(x, y, z):
        a = ct.load(x, (0, 0), (ROWS, COLUMNS))
        b = ct.load(y, (0, 0), (ROWS, COLUMNS))
        ct.store(z, (0, 0), operation(a, b))

    z = torch.zeros(ROWS, COLUMNS, dtype=result or x.dtype)
    launch((1,), kernel, (x, y, z))
    return z


def floats(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64).to(dtype)


def integers(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """All bit patterns are likely, the extremes among them."""
    generator = np.random.default_rng(seed)
    name = str(dtype).removeprefix("torch.")
    info = np.iinfo(name)
    values = generator.integers(info.min, info.max, (ROWS, COLUMNS), dtype=name, endpoint=True)
    values[0, :3] = info.min, info.max, 1
    return torch.from_numpy(values)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


# --- arithmetic ---


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_arithmetic_rounds_once(dtype: torch.dtype) -> None:
    x, y = floats(dtype), floats(dtype, 1)
    a, b = x.double(), y.double()
    exact = {ct.add: a + b, ct.sub: a - b, ct.mul: a * b, ct.truediv: a / b}
    for operation, wanted in exact.items():
        # float64 holds sums and products of narrow floats exactly, quotients well enough.
        same(two(operation, x, y), wanted.to(dtype))
    same(two(ct.maximum, x, y), torch.maximum(x, y))
    same(two(ct.minimum, x, y), torch.minimum(x, y))
    same(two(ct.floordiv, x, y), torch.floor(x / y))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    same(two(ct.mod, x, y), torch.from_numpy(np.mod(x.to(wide).numpy(), y.to(wide).numpy())).to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_arithmetic_wraps_and_floors(dtype: torch.dtype) -> None:
    x, y = integers(dtype), integers(dtype, 1)
    a, b = x.numpy(), y.numpy()
    with np.errstate(over="ignore", divide="ignore"):
        exact = {
            ct.add: a + b,
            ct.sub: a - b,
            ct.mul: a * b,
            ct.maximum: np.maximum(a, b),
            ct.minimum: np.minimum(a, b),
        }
    for operation, wanted in exact.items():
        same(two(operation, x, y), torch.from_numpy(wanted))
    divisor = np.where(b == 0, 1, b).astype(b.dtype)
    divisor[divisor == -1] = 3
    same(two(ct.floordiv, x, torch.from_numpy(divisor)), torch.from_numpy(a // divisor))
    same(two(ct.mod, x, torch.from_numpy(divisor)), torch.from_numpy(a % divisor))
    up = [-(-int(p) // int(q)) for p, q in zip(a.flat, divisor.flat, strict=True)]
    same(two(ceiling, x, torch.from_numpy(divisor)), torch.tensor(np.array(up, dtype=a.dtype).reshape(a.shape)))
    same(one(ct.negative, x), torch.from_numpy(-a))
    same(one(ct.abs, x), torch.from_numpy(np.abs(a)))


def ceiling(a, b):
    return ct.cdiv(a, b)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_bits_and_shifts(dtype: torch.dtype) -> None:
    x, y = integers(dtype), integers(dtype, 1)
    a, b = x.numpy(), y.numpy()
    exact = {ct.bitwise_and: a & b, ct.bitwise_or: a | b, ct.bitwise_xor: a ^ b}
    for operation, wanted in exact.items():
        same(two(operation, x, y), torch.from_numpy(wanted))
    same(one(ct.bitwise_not, x), torch.from_numpy(~a))
    counts = (np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % (8 * a.itemsize)).astype(a.dtype)
    same(two(ct.bitwise_lshift, x, torch.from_numpy(counts)), torch.from_numpy(a << counts))
    same(two(ct.bitwise_rshift, x, torch.from_numpy(counts)), torch.from_numpy(a >> counts))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_comparisons_and_choice(dtype: torch.dtype) -> None:
    make = floats if dtype.is_floating_point else integers
    x, y = make(dtype), make(dtype, 1)
    y[0] = x[0]
    a, b = (t.double().numpy() if dtype.is_floating_point else t.numpy() for t in (x, y))
    exact = {
        ct.equal: a == b,
        ct.not_equal: a != b,
        ct.less: a < b,
        ct.less_equal: a <= b,
        ct.greater: a > b,
        ct.greater_equal: a >= b,
    }
    for operation, wanted in exact.items():
        same(two(operation, x, y, torch.bool), torch.from_numpy(wanted))
    same(two(larger, x, y), torch.from_numpy(np.where(a > b, a, b)).to(dtype))


def larger(a, b):
    return ct.where(a > b, a, b)


FUNCTIONS = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "floor": torch.floor,
    "ceil": torch.ceil,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_torch(name: str) -> None:
    for dtype in FLOATS:
        x = floats(dtype).abs() + 0.1
        wanted = FUNCTIONS[name](x.double())
        found = one(getattr(ct, name), x)
        assert found.dtype == dtype
        unit = torch.finfo(dtype).eps
        assert ((found.double() - wanted).abs() <= 2 * unit * wanted.abs() + unit * 1e-3).all()


def test_integers_become_float32_in_functions() -> None:
    x = torch.arange(32, dtype=torch.int32).reshape(ROWS, COLUMNS) + 1
    torch.testing.assert_close(one(ct.log, x, torch.float32), torch.log(x.float()))
    same(one(ct.abs, x.bool(), torch.bool), x.bool())
    same(one(ct.negative, x.bool(), torch.int32), torch.full((ROWS, COLUMNS), -1, dtype=torch.int32))


def test_powers_and_arcs() -> None:
    x, y = floats(torch.float32).abs() + 0.5, floats(torch.float32, 1)
    torch.testing.assert_close(two(ct.pow, x, y), x**y)
    torch.testing.assert_close(two(ct.atan2, x, y), torch.atan2(x, y))
    torch.testing.assert_close(one(squared, floats(torch.bfloat16)), floats(torch.bfloat16) ** 2)


def squared(a):
    return a**2


def test_extremes_ignore_nan_unless_told() -> None:
    x, y = floats(torch.float32), floats(torch.float32, 1)
    x[0, 0] = y[1, 1] = math.nan
    same(two(ct.maximum, x, y), torch.fmax(x, y))
    same(two(ct.minimum, x, y), torch.fmin(x, y))
    same(two(strict_maximum, x, y), torch.maximum(x, y))
    same(one(ct.isnan, x, torch.bool), x.isnan())


def strict_maximum(a, b):
    return ct.maximum(a, b, propagate_nan=True)


# --- rounding and dtypes ---


def directed(mode: Any) -> Callable[..., Any]:
    def divide(a, b):
        return ct.truediv(a, b, rounding_mode=mode)

    return divide


def test_directed_rounding_brackets_the_exact_quotient() -> None:
    x, y = floats(torch.float32), floats(torch.float32, 1)
    exact = x.double() / y.double()
    down = two(directed(ct.RoundingMode.RM), x, y).double()
    up = two(directed(ct.RoundingMode.RP), x, y).double()
    zero = two(directed(ct.RoundingMode.RZ), x, y).double()
    assert (down < exact).all() and (up > exact).all()
    same(zero, torch.where(exact > 0, down, up))
    same(torch.nextafter(down.float(), torch.tensor(math.inf)), up.float())


def test_flush_to_zero() -> None:
    x = torch.full((ROWS, COLUMNS), 2.0**-130)
    x[0, 0] = -(2.0**-130)
    x[1] = 1.0
    same(two(flushed, x, torch.ones_like(x)), torch.where(x == 1.0, 1.0, x * 0.0))
    assert two(ct.mul, x, torch.ones_like(x))[2, 0] == 2.0**-130


def flushed(a, b):
    return ct.mul(a, b, flush_to_zero=True)


def cast(dtype: Any, mode: Any = None) -> Callable[..., Any]:
    def convert(a):
        return ct.astype(a, dtype, rounding_mode=mode)

    return convert


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_floats_round_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    x = floats(source) * 3
    wanted = torch.from_numpy(x.double().numpy()).to(target)
    if source == torch.float64 and target in (torch.float16, torch.bfloat16):
        # A value that two roundings (over float32) would round the wrong way.
        step = torch.finfo(target).eps
        x[0, 0] = 1 + step / 2 + 2.0**-40
        x[0, 1] = 1 + step * 1.5 - 2.0**-40
        wanted[0, :2] = torch.tensor([1 + step, 1 + step]).to(target)
    same(one(cast(target), x, target), wanted)


def test_integers_keep_their_low_bits_and_floats_saturate() -> None:
    x = integers(torch.int32)
    for target in INTEGERS:
        name = str(target).removeprefix("torch.")
        same(one(cast(target), x, target), torch.from_numpy(x.numpy().astype(name)))
    y = floats(torch.float32) * 1e3
    y[0, :4] = torch.tensor([1e30, -1e30, math.nan, -0.75])
    found = one(cast(torch.int32), y, torch.int32)
    assert found[0, :4].tolist() == [2**31 - 1, -(2**31), 0, 0]
    same(found[1:], y[1:].trunc().to(torch.int32))
    big = torch.full((ROWS, COLUMNS), 2**62 + 1, dtype=torch.int64)
    assert one(cast(torch.bfloat16), big, torch.bfloat16)[0, 0] == 2.0**62
    halfway = torch.full((ROWS, COLUMNS), 2**24 + 2**16 + 1, dtype=torch.int32)
    assert one(cast(torch.bfloat16), halfway, torch.bfloat16)[0, 0] == 2**24 + 2**17
    most = torch.full((ROWS, COLUMNS), 2**64 - 1, dtype=torch.uint64)
    assert one(cast(torch.float32), most, torch.float32)[0, 0] == 2.0**64


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_eight_bit_integers_are_the_low_bits_of_sixteen(source: torch.dtype) -> None:
    """Measured on an H200: the instruction saturates to sixteen bits, the store takes eight of them."""
    x = torch.zeros(ROWS, COLUMNS, dtype=source)
    odd = torch.tensor([-1.9, 127, 128, 200, 256, 384, -129, -256, 65024, 1e38, -1e38, math.nan]).to(source)
    x.view(-1)[:12] = odd
    found = one(cast(torch.int8), x, torch.int8).view(-1)[:12].tolist()
    assert found == [-1, 127, -128, -56, 0, -128, 127, 0, -1, -1, 0, 0]
    found = one(cast(torch.uint8), x, torch.uint8).view(-1)[:12].tolist()
    assert found == [0, 127, 128, 200, 0, 128, 0, 0, 0, 255, 0, 0]


def test_nan_as_an_integer() -> None:
    for source in (torch.float32, torch.float64):
        x = torch.full((ROWS, COLUMNS), math.nan, dtype=source)
        double = source == torch.float64
        for target in (torch.int16, torch.int32, torch.int64):
            lowest = torch.iinfo(target).min if double or target == torch.int64 else 0
            assert one(cast(target), x, target)[0, 0] == lowest


def test_eight_bit_floats_round_and_saturate() -> None:
    x = floats(torch.float32) * 100
    x[0, :3] = torch.tensor([1e6, -1e6, 17.0])
    for target, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        found = one(cast(target), x, target).float()
        same(found, x.clamp(-largest, largest).to(target).float())
        assert found[0, 0] == largest and found[0, 1] == -largest
    # And back, exactly.
    y = x.to(torch.float8_e4m3fn)
    same(one(cast(torch.float32), y, torch.float32), y.float())


def rounded_to_tf32(a):
    return a.astype(ct.tfloat32).astype(ct.float32)


def rounded_to_fp4(a):
    return ct.astype(a, ct.float4_e2m1fn).astype(ct.float32)


def test_tf32_and_fp4_round_to_nearest_even() -> None:
    x = floats(torch.float32)
    x[0, :2] = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11])
    found = one(rounded_to_tf32, x)
    assert found[0, :2].tolist() == [1.0, 1 + 2.0**-9]
    assert ((found - x).abs() <= x.abs() * 2.0**-11).all()
    y = torch.tensor([0.2, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * ROWS).reshape(ROWS, COLUMNS)
    y[1] = -y[1]
    y[2, 0] = 100.0
    wanted = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    found = one(rounded_to_fp4, y)
    assert found[0].tolist() == wanted and found[1].tolist() == [-v for v in wanted] and found[2, 0] == 6.0


def bits(dtype: Any) -> Callable[..., Any]:
    def reread(a):
        return ct.bitcast(a, dtype)

    return reread


def test_bitcasts() -> None:
    x = floats(torch.float32)
    same(one(bits(torch.int32), x, torch.int32), x.view(torch.int32))
    same(one(bits(torch.uint32), x, torch.uint32), x.view(torch.uint32))
    y = floats(torch.bfloat16)
    same(one(bits(torch.int16), y, torch.int16), y.view(torch.int16))
    same(one(bits(torch.float16), y.view(torch.uint16), torch.float16), y.view(torch.float16))
    z = floats(torch.float32).to(torch.float8_e4m3fn)
    same(one(bits(torch.uint8), z, torch.uint8), z.view(torch.uint8))


def through_bytes(a):
    flat = ct.unpack_from_bytes(ct.pack_to_bytes(a), ct.float32)
    return flat.reshape((ROWS, COLUMNS))


def through_nibbles(a):
    packed = ct.pack_to_bytes(a.astype(ct.float4_e2m1fn))
    return ct.unpack_from_bytes(packed, ct.float4_e2m1fn).astype(ct.float32).reshape((ROWS, COLUMNS))


def first_bytes(a):
    return ct.extract(ct.pack_to_bytes(a), (0,), (32,)).reshape((ROWS, COLUMNS))


def test_bytes() -> None:
    x = floats(torch.float32)
    same(one(through_bytes, x), x)
    same(one(first_bytes, x, torch.uint8), x.view(torch.uint8).reshape(-1)[:32].reshape(ROWS, COLUMNS))
    same(one(through_nibbles, x), one(rounded_to_fp4, x))


# --- making, shape ---


@ct.kernel
def made(y, start: int, f: float):
    ct.store(y, (0, 0), ct.arange(8, dtype=ct.float32).reshape((1, 8)))
    ct.store(y, (1, 0), ct.arange(8, dtype=ct.float32, start=start, step=-2).reshape((1, 8)))
    ct.store(y, (2, 0), ct.full((1, 8), f, ct.float32))
    ct.store(y, (3, 0), ct.ones((1, 8), ct.float32) + ct.zeros((1, 8), ct.float32))
    ct.store(y, (4, 0), ct.astile(((1, 2, 3, 4, 5, 6, 7, 8),), dtype=ct.float32))
    ct.store(y, (5, 0), ct.full((), 7, ct.float32) * ct.ones((1, 8), ct.float32))


def test_tiles_are_made() -> None:
    y = torch.zeros(6, 8)
    launch((1,), made, (y, 3, 2.5))
    count = torch.arange(8.0)
    same(y, torch.stack([count, 3 - 2 * count, count * 0 + 2.5, count * 0 + 1, count + 1, count * 0 + 7]))


@ct.kernel
def shaped(x, y, i: int):
    a = ct.load(x, (0, 0), (4, 8))
    ct.store(y, (0, 0), ct.transpose(a).reshape((4, 8)))
    ct.store(y, (1, 0), a.reshape((2, 2, 8)).permute((1, 0, 2)).reshape((4, -1)))
    low = ct.extract(a, (i, 0), (2, 8))
    high = a.extract((0, 0), (2, 8))
    ct.store(y, (2, 0), ct.cat((low, high), 0))
    row = ct.broadcast_to(ct.extract(a, (0, 0), (1, 8)), (4, 8))
    ct.store(y, (3, 0), row)
    ct.store(y, (4, 0), ct.insert(a, (i, 1), ct.zeros((2, 4), ct.float32)))
    column = ct.sum(a, 1)
    ct.store(y, (5, 0), column[:, None] + ct.expand_dims(ct.arange(8, dtype=ct.float32), 0))
    ct.store(y, (6, 0), ct.full((4, 8), a.extract((3, 7), (1, 1)).item(), ct.float32))


def test_shapes_change() -> None:
    x, y = floats(torch.float32), torch.zeros(28, 8)
    launch((1,), shaped, (x, y, 1))
    found = y.reshape(7, 4, 8)
    same(found[0], x.T.reshape(4, 8))
    same(found[1], x.reshape(2, 2, 8).permute(1, 0, 2).reshape(4, 8))
    same(found[2], torch.cat([x[2:], x[:2]]))
    same(found[3], x[:1].expand(4, 8))
    inserted = x.clone()
    inserted[2:, 4:] = 0
    same(found[4], inserted)
    torch.testing.assert_close(found[5], x.sum(1)[:, None] + torch.arange(8.0))
    same(found[6], x[3, 7].expand(4, 8))


# --- reductions, scans, products ---


def reduced(operation: Callable[..., Any], axis: Any, keepdims: bool, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    shape = tuple(y.shape)
    first = (0,) * len(shape)

    @ct.kernel
    def kernel(x, y):
        a = ct.load(x, (0, 0, 0), (2, 4, 8))
        r = operation(a, axis, keepdims=keepdims)
        ct.store(y, first, r.reshape(shape))

    launch((1,), kernel, (x, y))
    return y


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (1, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(axis: Any, keepdims: bool) -> None:
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    axes = tuple(range(3)) if axis is None else axis
    for operation, reference in ((ct.sum, torch.sum), (ct.max, torch.amax), (ct.min, torch.amin)):
        wanted = reference(x, axes, keepdim=keepdims)
        torch.testing.assert_close(reduced(operation, axis, keepdims, x, torch.zeros_like(wanted)), wanted)
    if not isinstance(axis, tuple):
        for operation, best in ((ct.argmax, torch.argmax), (ct.argmin, torch.argmin)):
            index = best(x, axis, keepdim=keepdims)
            found = reduced(operation, axis, keepdims, x, torch.zeros(index.shape, dtype=torch.int32))
            same(found.long(), index)
        product = x if axis is None else x.prod(axis, keepdim=keepdims)
        product = x.prod().reshape((1, 1, 1) if keepdims else ()) if axis is None else product
        found = reduced(ct.prod, axis, keepdims, x, torch.zeros_like(product))
        torch.testing.assert_close(found, product)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_reductions_wrap(dtype: torch.dtype) -> None:
    x = torch.cat([integers(dtype), integers(dtype, 1)]).reshape(2, 4, 8)
    a = x.numpy()
    with np.errstate(over="ignore"):
        exact = {ct.sum: a.sum(2, dtype=a.dtype), ct.prod: a.prod(2, dtype=a.dtype), ct.max: a.max(2), ct.min: a.min(2)}
    for operation, wanted in exact.items():
        same(reduced(operation, 2, False, x, torch.from_numpy(np.zeros_like(wanted))), torch.from_numpy(wanted))


def test_half_sums_round_at_every_step() -> None:
    x = torch.zeros(2, 4, 8, dtype=torch.float16)
    # 2048 + 1 is no float16: a sum kept in float32 would be 2048 + 4 = 2052.
    x[0, 0] = torch.tensor([2048, 1, 0, 1, 0, 1, 0, 1])
    found = reduced(ct.sum, 2, False, x, torch.zeros(2, 4, dtype=torch.float16))
    assert found[0, 0] == 2050


def test_arguments_of_ties_and_nan() -> None:
    x = torch.zeros(2, 4, 8)
    x[0, 0, 3] = x[0, 0, 5] = 2.0
    x[0, 1, 2] = math.nan
    x[0, 2] = math.nan
    x[0, 3] = -math.inf
    x[0, 3, 0] = math.nan
    index = torch.zeros(2, 4, dtype=torch.int32)
    assert reduced(ct.argmax, 2, False, x, index.clone())[0].tolist() == [3, 0, 0, 1]
    assert reduced(ct.argmin, 2, False, x, index.clone())[0].tolist() == [0, 0, 0, 1]
    assert reduced(strict_argmax, 2, False, x, index.clone())[0].tolist() == [3, 2, 0, 0]
    wanted = torch.tensor([2.0, 0.0])
    same(reduced(ct.max, 2, False, x, torch.zeros(2, 4))[0, :2], wanted)


def strict_argmax(a, axis, keepdims):
    return ct.argmax(a, axis, keepdims=keepdims, propagate_nan=True)


@ct.kernel
def custom(x, total, best, place, count):
    a = ct.load(x, (0, 0), (4, 8))
    ct.store(total, (0,), ct.reduce(a, 1, lambda p, q: p + q, 0))

    def better(v, i, w, j):
        keep = (v > w) | ((v == w) & (i < j))
        return ct.where(keep, v, w), ct.where(keep, i, j)

    where = ct.broadcast_to(ct.arange(8, dtype=ct.int32)[None, :], (4, 8))
    value, index = ct.reduce((a, where), 1, better, (-math.inf, 0))
    ct.store(best, (0,), value)
    ct.store(place, (0,), index)
    ct.store(count, (0, 0), ct.scan(a, 1, lambda p, q: max(p, q), -math.inf, reverse=True))


def test_custom_reductions_and_scans() -> None:
    x = floats(torch.float32)
    total, best = torch.zeros(4), torch.zeros(4)
    place, highest = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 8)
    launch((1,), custom, (x, total, best, place, highest))
    torch.testing.assert_close(total, x.sum(1))
    same(best, x.amax(1))
    same(place.long(), x.argmax(1))
    same(highest, x.flip(1).cummax(1).values.flip(1))


def running(operation: Callable[..., Any], axis: int, reverse: bool) -> Callable[..., Any]:
    def prefixes(a):
        return operation(a, axis, reverse=reverse)

    return prefixes


def test_scans() -> None:
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        x = (floats(torch.float32) * 2).to(dtype)
        for axis in (0, 1):
            found = one(running(ct.cumsum, axis, False), x)
            torch.testing.assert_close(found, x.cumsum(axis, dtype=dtype), rtol=2e-2, atol=3e-2)
            found = one(running(ct.cumsum, axis, True), x)
            torch.testing.assert_close(found, x.flip(axis).cumsum(axis, dtype=dtype).flip(axis), rtol=2e-2, atol=3e-2)
    x = floats(torch.float32)
    torch.testing.assert_close(one(running(ct.cumprod, 1, False), x), x.cumprod(1))


def product(x: torch.Tensor, y: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    left, right = tuple(x.shape), tuple(y.shape)

    @ct.kernel
    def kernel(x, y, acc):
        a = ct.load(x, (0, 0), left)
        b = ct.load(y, (0, 0), right)
        ct.store(acc, (0, 0), ct.mma(a, b, ct.load(acc, (0, 0), (left[0], right[1]))))

    found = acc.clone()
    launch((1,), kernel, (x, y, found))
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_products_are_summed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((16, 64), (64, 8)))
    acc = torch.randn(16, 8, generator=generator)
    wanted = x.double() @ y.double() + acc.double()
    torch.testing.assert_close(product(x, y, acc).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_half_accumulator_rounds_between_instructions() -> None:
    x, y = torch.zeros(16, 64, dtype=torch.float16), torch.ones(64, 8, dtype=torch.float16)
    # One more than 2048 in each of the last three steps of 16 columns: lost one by one, 3 together would not be.
    x[:, 0] = 2048
    x[:, 16::16] = 1
    x[1] = 1
    acc = torch.zeros(16, 8, dtype=torch.float16)
    assert product(x, y, acc)[:2, 0].tolist() == [2048, 64]
    assert product(x, y, acc.float())[0, 0] == 2051


def test_integer_and_double_products() -> None:
    x, y = integers(torch.int8).reshape(4, 8), integers(torch.uint8, 1).reshape(8, 4)
    acc = torch.full((4, 4), 5, dtype=torch.int32)
    same(product(x, y, acc), (x.long() @ y.long() + 5).int())
    a, b = floats(torch.float64), floats(torch.float64, 1).reshape(8, 4)
    torch.testing.assert_close(product(a, b, torch.zeros(4, 4, dtype=torch.float64)), a @ b)


@ct.kernel
def several_products(x, y, z, dots, both):
    a = ct.load(x, (0, 0, 0), (2, 4, 8))
    b = ct.load(y, (0, 0), (8, 4))
    ct.store(z, (0, 0, 0), a @ b)
    v = ct.load(y, (0, 0), (8, 1)).reshape((8,))
    ct.store(dots, (0, 0), ct.matmul(a, v))
    ct.store(both, (0,), ct.matmul(v, v))
    c = ct.mma(a, b, ct.zeros((2, 4, 4), ct.float32))
    ct.store(z, (0, 0, 1), c)


def test_batched_products_and_vectors() -> None:
    x, y = torch.randn(2, 4, 8), torch.randn(8, 4)
    z, dots, both = torch.zeros(2, 4, 8), torch.zeros(2, 4), torch.zeros(1)
    launch((1,), several_products, (x, y, z, dots, both))
    torch.testing.assert_close(z, torch.cat([x @ y, x @ y], -1))
    torch.testing.assert_close(dots, x @ y[:, 0])
    torch.testing.assert_close(both[0], y[:, 0] @ y[:, 0])


@ct.kernel
def scaled(x, sx, y, sy, z):
    a = ct.load(x, (0, 0), (4, 64))
    b = ct.load(y, (0, 0), (64, 8))
    p = ct.load(sx, (0, 0), (4, 2))
    q = ct.load(sy, (0, 0), (2, 8))
    ct.store(z, (0, 0), ct.mma_scaled(a, p, b, q, ct.zeros((4, 8), ct.float32)))


def test_block_scaled_products() -> None:
    x, y = torch.randn(4, 64).to(torch.float8_e4m3fn), torch.randn(64, 8).to(torch.float8_e4m3fn)
    sx, sy = (torch.tensor([0.5, 1.0, 2.0, 4.0])[torch.randint(4, s)] for s in ((4, 2), (2, 8)))
    z = torch.zeros(4, 8)
    launch((1,), scaled, (x, sx.to(torch.float8_e8m0fnu), y, sy.to(torch.float8_e8m0fnu), z))
    wanted = (x.float() * sx.repeat_interleave(32, 1)) @ (y.float() * sy.repeat_interleave(32, 0))
    torch.testing.assert_close(z, wanted, rtol=1e-4, atol=1e-4)


@ct.kernel
def quotients(x, y, z):
    a = ct.load(x, (0, 0), (4, 8))
    b = ct.load(y, (0, 0), (4, 8))
    q, r = divmod(a, b)
    ct.store(z, (0, 0), q * b + r)


def test_divmod() -> None:
    x = integers(torch.int32)
    y = torch.where(integers(torch.int32, 1) % 2 == 0, -7, 9).int()
    z = torch.zeros_like(x)
    launch((1,), quotients, (x, y, z))
    same(z, x)
