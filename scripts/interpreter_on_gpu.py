"""Compare the CPU interpreter with a GPU: the same cuTile kernels, the same inputs, element by element.

Needs a GPU, cuda-tile and its compiler. Prints for each case how many results are equal bit for bit and the largest
distance in units in the last place; `--json FILE` writes them. Exit code 1 if a case differs by more than it may:
nothing for arithmetic, conversions and memory; a few units for functions and for sums, whose order a GPU chooses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import cuda.tile as ct
import torch

from kernelgraft.cutile import launch

R, C = 16, 64
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
INTEGERS = [torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint32]


@dataclass
class Case:
    """One kernel on one set of inputs; results may differ by `ulps`, or (sums) by `relative` to the largest."""

    name: str
    kernel: Any
    args: tuple[Any, ...]
    grid: tuple[int, ...] = (1,)
    ulps: int = 0
    relative: float = 0.0


@dataclass
class Line:
    """What came out of a case."""

    name: str
    elements: int
    equal: int
    ulps: int
    relative: float
    verdict: str
    note: str = ""


def values(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    """Random values, for floats with the special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    size = shape or (R, C)
    if dtype.is_floating_point:
        x = torch.randn(size, generator=generator) * 4
        return x.to(dtype)
    x = torch.randint(-(2**62), 2**62, size, generator=generator)
    narrow = {torch.uint32: torch.int32}.get(dtype, dtype)
    return x.to(narrow).view(dtype)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Like `values`, with zeros, infinities, NaN, huge and tiny numbers in the first row."""
    x = values(torch.float32, 9)
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e38, -1e38, 1e-40, 65519.9, 448.1, 1e5, 0.5, 1.5, 2.5, -0.75]
    x[0, : len(odd)] = torch.tensor(odd)
    x[1] *= 1e4
    x[2] *= 1e-4
    return x.to(dtype)


def one(operation: Callable[..., Any]) -> Any:
    @ct.kernel
    def kernel(x, y):
        ct.store(y, (0, 0), operation(ct.load(x, (0, 0), (R, C))))

    return kernel


def two(operation: Callable[..., Any]) -> Any:
    @ct.kernel
    def kernel(x, y, z):
        ct.store(z, (0, 0), operation(ct.load(x, (0, 0), (R, C)), ct.load(y, (0, 0), (R, C))))

    return kernel


def rows(operation: Callable[..., Any]) -> Any:
    @ct.kernel
    def kernel(x, y):
        ct.store(y, (0,), operation(ct.load(x, (0, 0), (R, C)), 1))

    return kernel


def converted(target: Any, mode: Any = None) -> Callable[..., Any]:
    def convert(a):
        return ct.astype(a, target, rounding_mode=mode)

    return convert


def through(target: Any) -> Callable[..., Any]:
    def convert(a):
        return ct.astype(ct.astype(a, target), ct.float32)

    return convert


def rounded(operation: Any, mode: Any) -> Callable[..., Any]:
    def round_(a, b):
        return operation(a, b, rounding_mode=mode)

    return round_


def ceiling(a, b):
    return ct.cdiv(a, b)


def power(a, b):
    return ct.pow(ct.abs(a), b)


def squared(a):
    return a**2


@ct.kernel
def products(x, y, z, m: ct.Constant[int], n: ct.Constant[int], k: ct.Constant[int]):
    a = ct.load(x, (0, 0), (m, k))
    b = ct.load(y, (0, 0), (k, n))
    ct.store(z, (0, 0), ct.mma(a, b, ct.zeros((m, n), z.dtype)))


@ct.kernel
def tf32_products(x, y, z, m: ct.Constant[int], n: ct.Constant[int], k: ct.Constant[int]):
    a = ct.load(x, (0, 0), (m, k)).astype(ct.tfloat32)
    b = ct.load(y, (0, 0), (k, n)).astype(ct.tfloat32)
    ct.store(z, (0, 0), ct.mma(a, b, ct.zeros((m, n), ct.float32)))


@ct.kernel
def ends(x, y):
    ct.store(y, (0, 0), ct.load(x, (1, 1), (16, 32), padding_mode=ct.PaddingMode.ZERO))
    ct.store(y, (1, 0), ct.load(x, (1, 1), (16, 32), padding_mode=ct.PaddingMode.NEG_INF))
    ct.store(y, (2, 0), ct.load(x, (1, 0), (16, 32), order=(1, 0), padding_mode=ct.PaddingMode.NAN))
    places = ct.arange(32, dtype=ct.int32)[None, :] * 2 - 8
    lines = ct.arange(16, dtype=ct.int32)[:, None] + 5
    ct.store(y, (3, 0), ct.gather(x, (lines, places), padding_value=7.0))
    ct.scatter(y, (lines + 59, places), ct.ones((16, 32), ct.float32))


@ct.kernel
def scalars(y, n: int, f: float):
    ct.store(y, (0,), (n * 65536 * 65536 + 3).astype(ct.float32))
    ct.store(y, (1,), (-n // 2).astype(ct.float32))
    ct.store(y, (2,), (-n % 4).astype(ct.float32))
    ct.store(y, (3,), ct.cdiv(n, 4).astype(ct.float32))
    ct.store(y, (4,), n / 2)
    ct.store(y, (5,), f * n)
    total = 0
    scale = 0.5
    for i in range(2, n, 3):
        total = total + i
        scale = scale * f
    ct.store(y, (6,), total.astype(ct.float32))
    ct.store(y, (7,), scale)


@ct.kernel
def counted(x, old):
    ct.store(old, (0,), ct.atomic_add(x, ct.arange(16, dtype=ct.int32), ct.full((16,), 3, ct.int32)))


@ct.kernel
def norm(x, w, y, n: int, eps: float, tile: ct.Constant[int]):
    row = ct.bid(0)
    a = ct.load(x, (row, 0), (1, tile), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    scale = ct.rsqrt(ct.sum(a * a, 1, keepdims=True) / n + eps)
    b = ct.load(w, (0,), (tile,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(y, (row, 0), (a * scale * b).astype(y.dtype))


@ct.kernel
def attention(q, k, v, o, scale: float, tm: ct.Constant[int], tn: ct.Constant[int], d: ct.Constant[int]):
    place, head = ct.bid(0), ct.bid(1)
    query = ct.load(q, (head, place, 0), (1, tm, d), padding_mode=ct.PaddingMode.ZERO).reshape((tm, d))
    highest = ct.full((tm, 1), -math.inf, ct.float32)
    total = ct.zeros((tm, 1), ct.float32)
    acc = ct.zeros((tm, d), ct.float32)
    lines = place * tm + ct.arange(tm, dtype=ct.int32)[:, None]
    keys = k.shape[1]
    for j in range(ct.cdiv(min(keys, (place + 1) * tm), tn)):
        key = ct.load(k, (head, 0, j), (1, d, tn), order=(0, 2, 1), padding_mode=ct.PaddingMode.ZERO).reshape((d, tn))
        scores = ct.mma(query, key, ct.zeros((tm, tn), ct.float32)) * scale
        columns = j * tn + ct.arange(tn, dtype=ct.int32)[None, :]
        scores = ct.where((columns <= lines) & (columns < keys), scores, -math.inf)
        now = max(highest, ct.max(scores, 1, keepdims=True))
        weights = ct.exp(scores - now)
        fade = ct.exp(highest - now)
        total = total * fade + ct.sum(weights, 1, keepdims=True)
        value = ct.load(v, (head, j, 0), (1, tn, d), padding_mode=ct.PaddingMode.ZERO).reshape((tn, d))
        acc = ct.mma(weights.astype(value.dtype), value, acc * fade)
        highest = now
    ct.store(o, (head, place, 0), (acc / total).reshape((1, tm, d)).astype(o.dtype))


def cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, kernel: Any, *args: Any, **options: Any) -> None:
        found.append(Case(name, kernel, args, **options))

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape or (R, C), dtype=dtype)

    modes = [ct.RoundingMode.RZ, ct.RoundingMode.RM, ct.RoundingMode.RP]
    for dtype in FLOATS:
        short = str(dtype).removeprefix("torch.")
        x, y, odd = values(dtype, 1), values(dtype, 2), special(dtype)
        for operation in (ct.add, ct.sub, ct.mul, ct.truediv, ct.maximum, ct.minimum, ct.floordiv, ct.mod):
            ulps = 2 if operation in (ct.truediv, ct.floordiv, ct.mod) and dtype != torch.float32 else 0
            add(f"{operation.__name__} {short}", two(operation), x, y, empty(dtype), ulps=ulps)
            if operation not in (ct.floordiv, ct.mod):
                add(f"{operation.__name__} {short} special", two(operation), odd, y, empty(dtype), ulps=ulps)
        names = ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh"]
        for name in names:
            data = x.abs() + 0.01 if name in ("log", "log2", "sqrt", "rsqrt") else x
            add(f"{name} {short}", one(getattr(ct, name)), data, empty(dtype), ulps=4)
        for name in ("floor", "ceil", "abs", "negative"):
            add(f"{name} {short}", one(getattr(ct, name)), odd, empty(dtype))
        add(f"pow {short}", two(power), x, y, empty(dtype), ulps=8)
        add(f"square {short}", one(squared), x, empty(dtype), ulps=1)
        for name in ("sum", "max", "min", "prod"):
            data = x / 4 + 1 if name == "prod" else x
            relative = 0.0 if name in ("max", "min") else {torch.float32: 2e-6}.get(dtype, 0.03)
            add(f"{name} {short}", rows(getattr(ct, name)), data, empty(dtype, R), relative=relative)
        add(f"max {short} special", rows(ct.max), odd, empty(dtype, R))
        for name in ("argmax", "argmin"):
            add(f"{name} {short} special", rows(getattr(ct, name)), odd, empty(torch.int32, R))
        for name in ("cumsum",):
            relative = 2e-6 if dtype == torch.float32 else 0.03

            def scanned(a):
                return ct.cumsum(a, 1)

            add(f"{name} {short}", one(scanned), x, empty(dtype), relative=relative)
        for target in [*FLOATS, torch.int32, torch.int8, torch.uint8, torch.int64, torch.bool]:
            if target != dtype:
                name = f"{short} to {str(target).removeprefix('torch.')}"
                add(name, one(converted(target)), odd, empty(target))
        for target in (torch.float8_e4m3fn, torch.float8_e5m2):
            add(f"{short} to {str(target).removeprefix('torch.')}", one(converted(target)), odd, empty(target))
        add(f"{short} to tf32", one(through(ct.tfloat32)), odd, empty(torch.float32))
    x, y = values(torch.float32, 1), values(torch.float32, 2)
    for mode in modes:
        for operation in (ct.add, ct.mul, ct.truediv):
            add(f"{operation.__name__} {mode.name}", two(rounded(operation, mode)), x, y, empty(torch.float32))
    for dtype in INTEGERS:
        short = str(dtype).removeprefix("torch.")
        x, y = values(dtype, 1), values(dtype, 2)
        divisor = torch.where(y.to(torch.int64) % 2 == 0, 7, 3).to(dtype)
        for operation in (ct.add, ct.sub, ct.mul, ct.maximum, ct.minimum, ct.bitwise_xor):
            add(f"{operation.__name__} {short}", two(operation), x, y, empty(dtype))
        for operation in (ct.floordiv, ct.mod, ceiling, ct.bitwise_rshift, ct.bitwise_lshift):
            add(f"{operation.__name__} {short}", two(operation), x, divisor, empty(dtype))
        for target in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.uint32):
            if target != dtype:
                add(f"{short} to {str(target).removeprefix('torch.')}", one(converted(target)), x, empty(target))
        add(f"sum {short}", rows(ct.sum), x, empty(dtype, R))
    for dtype, acc in (
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float32, torch.float32),
        (torch.int8, torch.int32),
    ):
        a = values(dtype if dtype != torch.float8_e4m3fn else torch.float32, 1, 64, 64).to(dtype)
        b = values(dtype if dtype != torch.float8_e4m3fn else torch.float32, 2, 64, 32).to(dtype)
        relative = {torch.int32: 0.0, torch.float16: 2e-3}.get(acc, 2e-6 if dtype != torch.float8_e4m3fn else 1e-3)
        name = f"mma {str(dtype).removeprefix('torch.')} in {str(acc).removeprefix('torch.')}"
        add(name, products, a, b, empty(acc, 64, 32), 64, 32, 64, relative=relative)
    a, b = values(torch.float32, 1, 64, 64), values(torch.float32, 2, 64, 32)
    add("mma tf32", tf32_products, a, b, empty(torch.float32, 64, 32), 64, 32, 64, relative=1e-5)
    add("padding, order, gather, scatter", ends, values(torch.float32, 3, 24, 50), torch.zeros(128, 32))
    add("scalars and loops", scalars, torch.zeros(8), 17, 1.7, ulps=1)
    add("atomic_add", counted, torch.arange(10, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)[:8])
    for dtype in FLOATS:
        x, w = values(dtype, 4, 5, 1000), values(dtype, 5, 1000)
        name = f"rms norm {str(dtype).removeprefix('torch.')}"
        add(name, norm, x, w, torch.zeros_like(x), 1000, 1e-6, 1024, grid=(5,), ulps=2 if dtype != torch.float32 else 8)
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (values(dtype, seed, 2, 100, 64) / 4 for seed in (6, 7, 8))
        name = f"attention {str(dtype).removeprefix('torch.')}"
        add(name, attention, q, k, v, torch.zeros_like(q), 0.125, 32, 32, 64, grid=(4, 2), relative=1e-2)
    return found


def ordered(x: torch.Tensor) -> torch.Tensor:
    """Floats as integers whose differences count units in the last place."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.contiguous().view(width).to(torch.int64)
    smallest = torch.iinfo(width).min
    return torch.where(bits < 0, smallest - bits, bits)


def compare(case: Case) -> Line:
    def copies(device: str) -> list[Any]:
        return [a.detach().clone().to(device) if isinstance(a, torch.Tensor) else a for a in case.args]

    here, there = copies("cpu"), copies("cuda")
    notes = []
    try:
        launch(case.grid, case.kernel, there)
        torch.cuda.synchronize()
    except Exception as problem:  # what the compiler or the GPU says is the result
        return Line(case.name, 0, 0, 0, 0.0, "no GPU result", f"{type(problem).__name__}: {problem}".splitlines()[0])
    try:
        launch(case.grid, case.kernel, here)
    except Exception as problem:
        return Line(case.name, 0, 0, 0, 0.0, "no CPU result", f"{type(problem).__name__}: {problem}".splitlines()[0])
    elements = equal = ulps = 0
    relative = 0.0
    for ours, theirs in zip(here, there, strict=True):
        if not isinstance(ours, torch.Tensor):
            continue
        theirs = theirs.cpu()
        same = ordered(ours) == ordered(theirs)
        if ours.dtype.is_floating_point:
            same = same | (ours.float().isnan() & theirs.float().isnan())
        elements += ours.numel()
        equal += int(same.sum())
        if not bool(same.all()):
            ulps = max(ulps, int((ordered(ours) - ordered(theirs))[~same].abs().max()))
            a, b = ours.double()[~same], theirs.double()[~same]
            scale = ours.double().nan_to_num(posinf=0, neginf=0).abs().max().clamp(min=1e-30)
            relative = max(relative, float(((a - b).abs() / scale).nan_to_num(nan=math.inf).max()))
            notes = [f"{x:g}/{y:g}" for x, y in zip(a[:3].tolist(), b[:3].tolist(), strict=True)]
    good = equal == elements or (case.ulps and ulps <= case.ulps) or (case.relative and relative <= case.relative)
    note = f"CPU/GPU: {', '.join(notes)}" if notes else ""
    return Line(case.name, elements, equal, ulps, relative, "ok" if good else "differs", note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="cases whose name contains one of these words")
    parser.add_argument("--json", help="file to write the results to")
    options = parser.parse_args()
    lines = [compare(c) for c in cases() if not options.only or any(word in c.name for word in options.only)]
    print(f"{'case':<36}{'equal':>14}{'ulps':>10}{'relative':>10}  verdict")
    for line in lines:
        if line.verdict != "ok" or line.equal != line.elements:
            share = f"{line.equal}/{line.elements}"
            print(f"{line.name:<36}{share:>14}{line.ulps:>10}{line.relative:>10.1e}  {line.verdict} {line.note}"[:160])
    bad = [line for line in lines if line.verdict != "ok"]
    exact = sum(line.equal == line.elements and line.verdict == "ok" for line in lines)
    print(f"{len(lines)} cases, {exact} equal bit for bit, {len(bad)} not ok")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(line) for line in lines], file, indent=1)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
