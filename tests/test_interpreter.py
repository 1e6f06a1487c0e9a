"""The interpreter as a whole: launches, blocks in any order, Python inside kernels, what is put back afterwards."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is an optional extra")

from kernelgraft import cutile  # noqa: E402
from kernelgraft.cutile import interpreted, launch  # noqa: E402
from kernelgraft.errors import KernelFault  # noqa: E402

torch.set_num_threads(1)


# --- whole kernels ---


@ct.kernel
def norm(x, w, y, n: int, eps: float, tile: ct.Constant[int]):
    row = ct.bid(0)
    total = ct.zeros((1, tile), ct.float32)
    for j in range(ct.cdiv(n, tile)):
        a = ct.load(x, (row, j), (1, tile), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
        total += a * a
    scale = ct.rsqrt(ct.sum(total, 1, keepdims=True) / n + eps)
    for j in range(ct.cdiv(n, tile)):
        a = ct.load(x, (row, j), (1, tile), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
        b = ct.load(w, (j,), (tile,), padding_mode=ct.PaddingMode.ZERO)
        ct.store(y, (row, j), (a * scale * b).astype(y.dtype))


@pytest.mark.parametrize("width", [64, 100, 1027])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm(width: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(3, width).to(dtype), torch.randn(width)
    with interpreted():
        y = torch.empty_like(x)
        ct.launch(torch.cuda.current_stream(), (3,), norm, (x, w, y, width, 1e-6, 64))
    wanted = torch.nn.functional.rms_norm(x.float(), (width,), w, 1e-6)
    torch.testing.assert_close(y, wanted.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)


@ct.kernel
def product(a, b, c, tm: ct.Constant[int], tn: ct.Constant[int], tk: ct.Constant[int]):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((tm, tn), ct.float32)
    for k in range(ct.num_tiles(a, 1, (tm, tk))):
        left = ct.load(a, (i, k), (tm, tk), padding_mode=ct.PaddingMode.ZERO)
        right = ct.load(b, (k, j), (tk, tn), padding_mode=ct.PaddingMode.ZERO)
        total = ct.mma(left, right, total)
    ct.store(c, (i, j), total.astype(c.dtype))


@pytest.mark.parametrize("shape", [(64, 64, 64), (70, 33, 90)])
def test_a_matrix_product(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, c = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.zeros(m, n).half()
    launch((ct.cdiv(m, 32), ct.cdiv(n, 16)), product, (a, b, c, 32, 16, 32))
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2)


@ct.kernel
def attention(q, k, v, o, scale: float, tm: ct.Constant[int], tn: ct.Constant[int], d: ct.Constant[int]):
    block, head = ct.bid(0), ct.bid(1)
    query = ct.load(q, (head, block, 0), (1, tm, d), padding_mode=ct.PaddingMode.ZERO).reshape((tm, d))
    highest = ct.full((tm, 1), -math.inf, ct.float32)
    total = ct.zeros((tm, 1), ct.float32)
    acc = ct.zeros((tm, d), ct.float32)
    rows = block * tm + ct.arange(tm, dtype=ct.int32)[:, None]
    keys = k.shape[1]
    for j in range(ct.cdiv(min(keys, (block + 1) * tm), tn)):
        key = ct.load(k, (head, 0, j), (1, d, tn), order=(0, 2, 1), padding_mode=ct.PaddingMode.ZERO).reshape((d, tn))
        scores = ct.mma(query, key, ct.zeros((tm, tn), ct.float32)) * scale
        columns = j * tn + ct.arange(tn, dtype=ct.int32)[None, :]
        scores = ct.where((columns <= rows) & (columns < keys), scores, -math.inf)
        now = max(highest, ct.max(scores, 1, keepdims=True))
        weights = ct.exp(scores - now)
        fade = ct.exp(highest - now)
        total = total * fade + ct.sum(weights, 1, keepdims=True)
        value = ct.load(v, (head, j, 0), (1, tn, d), padding_mode=ct.PaddingMode.ZERO).reshape((tn, d))
        acc = ct.mma(weights.astype(value.dtype), value, acc * fade)
        highest = now
    ct.store(o, (head, block, 0), (acc / total).reshape((1, tm, d)).astype(o.dtype))


def test_attention_with_an_online_softmax() -> None:
    q, k, v = (torch.randn(2, 50, 32).half() for _ in range(3))
    o = torch.zeros_like(q)
    launch((4, 2), attention, (q, k, v, o, 32**-0.5, 16, 16, 32), shuffle=3)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(o.float(), wanted, rtol=2e-3, atol=2e-3)


# --- order of blocks ---


@ct.kernel
def racing(x):
    # Every block reads what its left neighbour wrote.
    i = ct.bid(0)
    left = ct.gather(x, i - 1, padding_value=0)
    ct.scatter(x, i, left + 1)


@ct.kernel
def adding(x, total):
    ct.atomic_add(total, 0, ct.gather(x, ct.bid(0)))


def test_a_random_order_of_blocks_shows_a_race() -> None:
    found = []
    for seed in (None, 1, 2):
        x = torch.zeros(16, dtype=torch.int32)
        launch((16,), racing, (x,), shuffle=seed)
        found.append(x.tolist())
    assert found[0] == list(range(1, 17))
    assert found[1] != found[0] and found[2] != found[1]
    again = torch.zeros(16, dtype=torch.int32)
    with interpreted(shuffle=1):
        launch((16,), racing, (again,))
    assert again.tolist() == found[1]


def test_a_kernel_without_a_race_does_not_care() -> None:
    x = torch.arange(16, dtype=torch.int32)
    for seed in (None, 1, 2):
        total = torch.zeros(1, dtype=torch.int32)
        launch((16,), adding, (x, total), shuffle=seed)
        assert total.item() == 120


@ct.kernel
def places(y):
    i, j, k = ct.bid(0), ct.bid(1), ct.bid(2)
    flat = i + ct.num_blocks(0) * (j + ct.num_blocks(1) * k)
    ct.store(y, (k, j, i), flat)


def test_grids_of_three_dimensions() -> None:
    y = torch.zeros(4, 3, 2, dtype=torch.int32)
    launch((2, 3, 4), places, (y,))
    assert y.flatten().tolist() == list(range(24))
    launch((0, 3, 4), places, (y,))
    for grid in ((1, 65536), (1, 1, 65536), (), (1, 1, 1, 1), (-1,)):
        with pytest.raises(ValueError, match="grid"):
            launch(grid, places, (y,))


def test_arrays_without_elements() -> None:
    x = torch.zeros(0, 64)
    launch((0,), norm, (x, torch.ones(64), x, 64, 1e-6, 64))
    with pytest.raises(KernelFault, match=r"entirely outside `x` of shape \(0, 64\)"):
        launch((1,), norm, (x, torch.ones(64), torch.zeros(1, 64), 64, 1e-6, 64))


# --- Python in kernels ---


@ct.function
def doubled(a):
    return twice(a, 2)


def twice(a, times):
    result = a
    for _ in range(times - 1):
        result = result + a
    return result


class Shift:
    """Never called by a kernel, only its static method."""

    @staticmethod
    def by(a, n):
        return max(a + n, 0.0)


OFFSET = 10.0


@ct.kernel
def pythonic(x, y, n: int, pairs: ct.Constant[tuple[int, ...]], flag: bool):
    a = ct.load(x, (0,), (4,))

    def local(b, c=1.0):
        return b * c + OFFSET

    a = doubled(a)
    a = local(a) if flag else a
    i = 0
    while i < n:
        i += 1
        if i == 2:
            continue
        if i > 3:
            break
        a = a + i
    for p in ct.static_iter(pairs):
        a += p
    ct.static_assert(len(pairs) == 2)
    first, *_ = (a, 1, 2)
    a = Shift.by(first, -1000.0) + (lambda t: t + 0.5)(0.5)
    items = tuple(ct.full((4,), j, ct.float32) for j in ct.static_iter(range(3)))
    a = a + items[2]
    if not flag or (n > 100 and not n < 3):
        a = a * 0.0
    ct.store(y, (0,), a)


def test_python_inside_kernels() -> None:
    x, y = torch.tensor([1000.0, 2000.0, 3.0, 4.0]), torch.zeros(4)

    # Star targets are no cuTile syntax: the front end refuses them, the interpreter alone does not mind.
    launch((1,), pythonic, (x, y, 5, (7, 8), True), check=False)
    wanted = (2 * x + 10 + 1 + 3 + 15 - 1000).clamp(min=0) + 1 + 2
    assert torch.equal(y, wanted)


def test_the_compilers_errors_are_raised() -> None:
    y = torch.zeros(4)
    with pytest.raises(ct.TileSyntaxError):
        launch((1,), pythonic, (torch.zeros(4), y, 5, (7, 8), True))


HALVES = (torch.float16, torch.bfloat16)


@ct.kernel
def told_apart(x, y):
    kind = 0
    if x.dtype == torch.float32:
        kind = 1
    if x.dtype in HALVES and x.dtype != torch.bfloat16:
        kind = 2
    ct.store(y, (0,), kind)


def test_dtypes_of_torch_are_those_of_cutile() -> None:
    y = torch.zeros(1, dtype=torch.int32)
    for dtype, kind in ((torch.float32, 1), (torch.float16, 2), (torch.bfloat16, 0)):
        launch((1,), told_apart, (torch.zeros(1, dtype=dtype), y))
        assert y.item() == kind


@ct.kernel
def accumulates_a_number(x, y):
    total = 0.0
    for i in range(3):
        total = total + ct.load(x, (i,), (2,))
    ct.store(y, (0,), total)


def test_a_loop_that_changes_a_variables_type_is_refused() -> None:
    with pytest.raises(ct.TileTypeError, match="Type of `total` depends on path taken"):
        launch((1,), accumulates_a_number, (torch.ones(6), torch.zeros(2)))


@ct.kernel
def wrapping(y, n: int):
    big = n
    for _ in range(3):
        big = big * 65536
    ct.store(y, (0,), big)
    ct.store(y, (1,), n + 2147483647)


def test_scalars_have_32_bits() -> None:
    y = torch.zeros(2, dtype=torch.int64)
    launch((1,), wrapping, (y, 1))
    assert y.tolist() == [0, -(2**31)]


@ct.kernel
def wide(y, n: ct.ScalarInt64):
    ct.store(y, (0,), n * 4)


def test_scalars_of_64_bits_are_annotated() -> None:
    y = torch.zeros(1, dtype=torch.int64)
    launch((1,), wide, (y, 2**40))
    assert y.item() == 2**42
    with pytest.raises(OverflowError, match="ScalarInt64"):
        launch((1,), wrapping, (y, 2**40))


@ct.kernel
def printing(x):
    a = ct.load(x, (0,), (2,))
    print("tile", a, f"first={a.extract((0,), (1,)).item():.1f}", sep=": ")
    ct.print(f"{a:.2f}", ct.bid(0), end="!\n")
    ct.printf("%d of %.1f%%\n", ct.num_blocks(0), a)
    print((a > 0, 3))


def test_printing(capfd: pytest.CaptureFixture[str]) -> None:
    launch((1,), printing, (torch.tensor([1.5, -2.0]),))
    assert capfd.readouterr().out == (
        "tile: [1.500000, -2.000000]: first=1.5\n[1.50, -2.00] 0!\n1 of [1.5, -2.0]%\n([1, 0], 3)\n"
    )


@ct.kernel
def asserting(x):
    a = ct.load(x, (0,), (2,))
    ct.assert_(a > 0, "not positive")  # noqa: PT009


def test_assertions_are_faults() -> None:
    launch((1,), asserting, (torch.ones(2),))
    with pytest.raises(KernelFault, match=r"kernel `asserting`, block \(0, 0, 0\).*assertion failed: not positive"):
        launch((1,), asserting, (torch.tensor([1.0, 0.0]),))


@ct.kernel
def claiming(y, n: int):
    ct.grid_dependency_control_wait()
    m = ct.assume_divisible_by(n, 8)
    size = ct.ensure_constant(4)
    if size != 4:
        raise ct.static_exception(ValueError("never"))
    ct.store(y, (0,), m)
    ct.grid_dependency_control_launch_dependents()


def test_claims_are_checked() -> None:
    y = torch.zeros(1, dtype=torch.int32)
    launch((1,), claiming, (y, 24))
    assert y.item() == 24
    with pytest.raises(KernelFault, match="20 is assumed to be divisible by 8, which it is not"):
        launch((1,), claiming, (y, 20))


@ct.kernel
def constant_only(y, n: int):
    ct.ensure_constant(n)


@ct.kernel
def claims_in_vain(y, n: int):
    ct.static_assert(y.ndim == 2, f"{y.ndim} dimensions")


@pytest.mark.parametrize("check", [True, False])
def test_compile_time_errors(check: bool) -> None:
    y = torch.zeros(1)
    with pytest.raises(ct.TileStaticAssertionError, match="not a compile-time constant"):
        launch((1,), constant_only, (y, 1), check=check)
    with pytest.raises(ct.TileStaticAssertionError, match="1 dimensions"):
        launch((1,), claims_in_vain, (y, 1), check=check)


# --- arguments ---


@ct.kernel
def arguments(arrays, pair, plain: ct.Constant[bool], y, i: int):
    a = ct.load(arrays[i], (0,), (2,))
    x, factor = pair
    b = ct.load(x, (0,), (2,))
    extra = 1 if plain else 2
    ct.store(y, (0,), (a * b * factor + extra).astype(torch.float32))
    ct.static_assert(y.ndim == 1)
    ct.store(y, (1,), (y.shape[0] + y.strides[0] + len(arrays)).astype(y.dtype))


def test_lists_tuples_and_constants() -> None:
    arrays = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    y = torch.zeros(4)
    launch((1,), arguments, (arrays, (torch.tensor([10.0, 20.0]), 2.0), True, y, 1))
    assert y.tolist() == [61.0, 7.0, 0.0, 0.0]
    with pytest.raises(KernelFault, match="item 2 of a list of 2 arrays"):
        launch((1,), arguments, (arrays, (torch.tensor([10.0, 20.0]), 2.0), True, y, 2))


def test_the_number_of_arguments_is_checked() -> None:
    with pytest.raises(TypeError, match="takes 3 arguments, got 1"):
        launch((1,), three, (torch.zeros(1),))
    for check in (True, False):
        with pytest.raises(TypeError):
            launch((1,), three, (torch.zeros(1), "text", 1), check=check)


@ct.kernel
def three(a, b, c):
    pass


def test_tensors_must_be_on_the_cpu() -> None:
    with interpreted(), pytest.raises(TypeError, match="`a` is on meta"):
        launch((1,), three, (torch.empty(1, device="meta"), 1, 2))


def test_gradients_do_not_follow_kernels() -> None:
    x, y = torch.ones(16, requires_grad=True), torch.zeros(1)
    launch((1,), adding, (x, y))
    assert not y.requires_grad


# --- the context ---


def state() -> list[Any]:
    from cuda.tile import tune

    names = ["current_stream", "get_device_capability", "get_device_properties", "synchronize", "Stream"]
    return [ct.launch, tune.exhaustive_search, *(getattr(torch.cuda, name) for name in names)]


def test_everything_is_put_back_after_an_exception() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), interpreted():  # noqa: PT012
        assert state() != before
        with interpreted(shuffle=1):
            pass
        assert ct.launch is not before[0]
        raise ZeroDivisionError
    assert all(now is then for now, then in zip(state(), before, strict=True))
    with pytest.raises(RuntimeError, match="only be called from device code"):
        ct.bid(0)


def test_a_kernel_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(KernelFault):
        launch((1,), asserting, (torch.zeros(2),))
    with pytest.raises(RuntimeError, match="only be called from device code"):
        ct.bid(0)
    launch((1,), asserting, (torch.ones(2),))


def test_launchers_find_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the real device answers here")
    with interpreted():
        assert torch.cuda.get_device_properties("cuda").multi_processor_count > 0
        assert torch.cuda.get_device_capability()[0] >= 8
        x = torch.zeros(4, device="cuda")
        assert x.device.type == "cpu" and x.cuda().to("cuda").device.type == "cpu"
        best = ct.tune.exhaustive_search([3, 4], torch.cuda.current_stream(), None, three, None).best
        assert best.config == 3


def test_a_launcher_kept_from_inside_does_not_interpret_outside() -> None:
    with interpreted():
        kept = ct.launch
    with pytest.raises(Exception) as caught:
        kept(None, (1,), three, (1, 2, 3))
    assert not isinstance(caught.value, KernelFault)


def test_what_was_imported_by_name_is_replaced_too() -> None:
    module = type(sys)("kernelgraft_test_launcher")
    exec("from cuda.tile import launch", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        x, total = torch.arange(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        with interpreted():
            module.launch(None, (16,), adding, (x, total))
        assert total.item() == 120
    finally:
        del sys.modules[module.__name__]


def test_every_operation_of_cuda_tile_is_covered_and_named_in_the_documentation() -> None:
    from kernelgraft.cutile import coverage

    assert not coverage.missing()
    text = (Path(__file__).resolve().parent.parent / "docs" / "cutile.md").read_text(encoding="utf-8")
    written_down = text.split(coverage.BEGIN)[1].split(coverage.END)[0].strip()
    assert written_down == coverage.table()


def test_an_operation_that_is_new_is_named() -> None:
    from cuda.tile._execution import stub

    @stub
    def tomorrow(x):
        """Not known yet."""

    @ct.kernel
    def kernel(x):
        tomorrow(x)

    with pytest.raises(NotImplementedError, match="the interpreter has no operation `tomorrow`"):
        launch((1,), kernel, (torch.zeros(1),), check=False)


def test_the_package_imports_without_cuda_tile() -> None:
    code = (
        "import sys\nsys.modules['cuda'] = None\nimport kernelgraft.cutile\n"
        "try:\n    kernelgraft.cutile.launch\n"
        "except kernelgraft.errors.MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs cuda-tile" in done.stdout, done.stderr
    assert set(cutile.__all__) >= {"interpreted", "launch", "uninitialised", "written"}
