"""What the interpreter does at the ends of arrays, and what it reports."""

from __future__ import annotations

import math
from typing import Annotated, Any

import pytest
import torch

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is an optional extra")

from kernelgraft.cutile import interpreted, launch, uninitialised, written  # noqa: E402
from kernelgraft.errors import KernelFault  # noqa: E402

torch.set_num_threads(1)


# --- padding and clipping ---


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        (ct.PaddingMode.ZERO, 0.0),
        (ct.PaddingMode.NEG_ZERO, -0.0),
        (ct.PaddingMode.NAN, math.nan),
        (ct.PaddingMode.POS_INF, math.inf),
        (ct.PaddingMode.NEG_INF, -math.inf),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_beyond_the_end_are_filled(mode: Any, value: float, dtype: torch.dtype) -> None:
    @ct.kernel
    def padded(x, y):
        ct.store(y, (0, 0), ct.load(x, (1, 1), (4, 4), padding_mode=mode))

    x, y = torch.randn(6, 7).to(dtype), torch.zeros(4, 4, dtype=dtype)
    launch((1,), padded, (x, y))
    wanted = torch.full((4, 4), value, dtype=dtype)
    wanted[:2, :3] = x[4:, 4:]
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(y[3]), torch.signbit(wanted[3]))


@ct.kernel
def copied(x, y):
    ct.store(y, (0, 0), ct.load(x, (1, 1), (4, 4)))


@ct.kernel
def maximum_of(x, y):
    a = ct.load(x, (1, 1), (4, 4))
    ct.store(y, (0, 0), ct.full((4, 4), ct.max(a), y.dtype))


@ct.kernel
def masked(x, y):
    a = ct.load(x, (1, 1), (4, 4))
    inside = (ct.arange(4, dtype=ct.int32)[:, None] < 2) & (ct.arange(4, dtype=ct.int32)[None, :] < 3)
    ct.store(y, (0, 0), ct.where(inside, a, ct.full((4, 4), 7, y.dtype)))


@ct.kernel
def branching(x, y):
    a = ct.load(x, (1, 1), (4, 4))
    if ct.max(a) > 0:
        ct.store(y, (0, 0), ct.zeros((4, 4), y.dtype))


@pytest.mark.parametrize("kernel", [copied, maximum_of, branching], ids=lambda k: k._pyfunc.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_use_of_undetermined_padding_is_reported(kernel: Any, dtype: torch.dtype) -> None:
    x, y = torch.ones(6, 7, dtype=dtype), torch.zeros(4, 4, dtype=dtype)
    with pytest.raises(KernelFault) as caught:
        launch((1,), kernel, (x, y))
    message = str(caught.value)
    assert f"kernel `{kernel._pyfunc.__name__}`, block (0, 0, 0), test_interpreter_memory.py:" in message
    assert "padding of undetermined value beyond the end of `x` of shape (6, 7)" in message
    assert "\n" not in message
    launch((1,), kernel, (x, y), check=False)


def test_undetermined_padding_that_is_masked_is_no_fault() -> None:
    x, y = torch.randn(6, 7), torch.zeros(4, 4)
    launch((1,), masked, (x, y))
    wanted = torch.full((4, 4), 7.0)
    wanted[:2, :3] = x[4:, 4:]
    assert torch.equal(y, wanted)


@ct.kernel
def clipped(y):
    ct.store(y, (1, 1), ct.ones((4, 4), ct.float32))


def test_stores_are_clipped() -> None:
    y = torch.zeros(6, 7)
    launch((1,), clipped, (y,))
    wanted = torch.zeros(6, 7)
    wanted[4:, 4:] = 1
    assert torch.equal(y, wanted)


@ct.kernel
def outside(x, y, i: int):
    ct.store(y, (i, 0), ct.load(x, (0, 0), (4, 4)))


@ct.kernel
def outside_load(x, y, i: int):
    ct.store(y, (0, 0), ct.load(x, (i, 0), (4, 4), padding_mode=ct.PaddingMode.ZERO))


@ct.kernel
def outside_unchecked(x, y, i: int):
    ct.store(y, (0, 0), ct.load(x, (i, 0), (4, 4), check_bounds=False, padding_mode=ct.PaddingMode.ZERO))


@pytest.mark.parametrize("index", [2, 9, -1])
def test_tiles_entirely_outside_are_faults(index: int) -> None:
    x, y = torch.ones(8, 4), torch.zeros(8, 4)
    with pytest.raises(KernelFault, match="lies entirely outside `y`"):
        launch((1,), outside, (x, y, index))
    with pytest.raises(KernelFault, match="entirely outside `x`"):
        launch((1,), outside_load, (x, y, index))


def test_tiles_that_promise_to_fit_must() -> None:
    x, y = torch.ones(6, 4), torch.zeros(4, 4)
    launch((1,), outside_unchecked, (x, y, 0))
    with pytest.raises(KernelFault, match=r"check_bounds=False of a tile \(4, 4\) at \(4, 0\) leaves `x`"):
        launch((1,), outside_unchecked, (x, y, 1))


@ct.kernel
def turned(x, y, z):
    ct.store(y, (0, 0), ct.load(x, (0, 1), (4, 2), order=(1, 0)))
    ct.store(z, (1, 0), ct.load(x, (0, 0), (2, 4)), order="F")
    ct.store(z, (0, 0), ct.load(x, (0, 0), (1, 1)).item())


def test_order_maps_a_tiles_axes_to_the_arrays() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    y, z = torch.zeros(4, 2), torch.zeros(6, 4)
    launch((1,), turned, (x, y, z))
    assert torch.equal(y, x[2:4, :4].T)
    wanted = torch.zeros(6, 4)
    wanted[:4, 2:4] = x[:2, :4].T
    assert torch.equal(z, wanted)


def test_arrays_may_have_any_strides() -> None:
    base = torch.arange(96.0).reshape(8, 12)
    x = base.T[::2, 1::2]
    y = torch.zeros(12, 8).T
    launch((1,), outside, (x, y[::2, ::3], 0))
    assert torch.equal(y[::2, ::3][:4, :4], x[:4, :4])
    assert y.count_nonzero() == x[:4, :4].count_nonzero()


@ct.kernel
def viewed(x, y, tiles):
    v = x.tiled_view((2, 4), padding_mode=ct.PaddingMode.ZERO)
    w = y.tiled_view((2, 4))
    steps = x.tiled_view((2, 4), traversal_steps=(1, 4), padding_mode=ct.PaddingMode.ZERO)
    for i in range(v.num_tiles(0)):
        w.store((i, 0), v.load((i, 1)) + steps.load((i, 0)))
    w.atomic_store_add((0, 0), 100.0)
    ct.store(tiles, (0,), v.num_tiles(0) * 10 + steps.num_tiles(0))
    ct.store(tiles, (1,), ct.num_tiles(x, 0, (2, 4), order="F"))
    shape, every, dtype = v.tile_shape, steps.traversal_steps, v.dtype
    ct.static_assert(shape == (2, 4) and every == (1, 4) and dtype == ct.float32)


def test_tiled_views() -> None:
    x, y, tiles = torch.randn(5, 7), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int32)
    launch((1,), viewed, (x, y, tiles))
    big = torch.nn.functional.pad(x, (0, 1, 0, 1))
    wanted = torch.cat([big[2 * i : 2 * i + 2, 4:] + big[i : i + 2, :4] for i in range(3)])[:5]
    wanted[:2] += 100
    torch.testing.assert_close(y, wanted)
    assert tiles.tolist() == [35, 4]


@ct.kernel
def sliced(x, y, start: int, stop: int):
    part = x.slice(0, start, stop)
    ct.store(y, (0, 0), ct.load(part, (0, 0), (4, 4), padding_mode=ct.PaddingMode.ZERO))
    view = ct.Array.from_foreign(x.foreign_pointer, (2, 2), (8, 1))
    ct.store(y, (1, 0), ct.load(view, (0, 0), (2, 2), padding_mode=ct.PaddingMode.ZERO))


def test_slices_of_arrays() -> None:
    x, y = torch.randn(8, 4), torch.zeros(6, 4)
    launch((1,), sliced, (x, y, 3, 6))
    wanted = torch.zeros(4, 4)
    wanted[:3] = x[3:6]
    assert torch.equal(y[:2], wanted[:2])
    assert torch.equal(y[2:4, :2], x[0:4:2, :2])
    with pytest.raises(KernelFault, match=r"slice\(0, 3, 9\) of `x` of shape \(8, 4\) is out of bounds"):
        launch((1,), sliced, (x, y, 3, 9))


@ct.kernel
def static(x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,))], y: ct.IndexedWithInt64):
    ct.store(y, (0, 0), ct.load(x, (0, 0), (2, x.shape[1])))
    ct.static_eval(None if y.shape[0].dtype == ct.int64 else 1 / 0)


def test_annotated_arrays() -> None:
    x, y = torch.randn(2, 8), torch.zeros(2, 8)
    launch((1,), static, (x, y))
    assert torch.equal(x, y)
    far = torch.zeros(8).as_strided((1, 8), (2**31, 1), 0)
    with pytest.raises(OverflowError, match="IndexedWithInt64"):
        launch((1,), copied, (far, y), check=False)


# --- single elements ---


@ct.kernel
def gathered(x, y, check: ct.Constant[bool], far: int):
    rows = ct.arange(4, dtype=ct.int32)[:, None] + far
    columns = ct.arange(4, dtype=ct.int32)[None, :]
    keep = columns != 2
    a = ct.gather(x, (rows, columns), mask=keep, padding_value=-1.0, check_bounds=check)
    ct.scatter(y, (columns, rows - far), a, mask=columns != 0)


@pytest.mark.parametrize("check", [True, False])
def test_gather_and_scatter(check: bool) -> None:
    x, y = torch.randn(6, 5), torch.zeros(4, 4)
    launch((1,), gathered, (x, y, check, 1))
    wanted = x[1:5, :4].T.clone()
    wanted[2] = -1
    wanted[0] = 0
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("far", [4, -2])
def test_gathers_out_of_bounds(far: int) -> None:
    x, y = torch.randn(6, 5), torch.zeros(4, 4)
    launch((1,), gathered, (x, y, True, far))
    rows = torch.arange(4) + far
    inside = (rows >= 0) & (rows < 6)
    assert torch.equal(y[1], torch.where(inside, x[rows.clamp(0, 5), 1], -1.0))
    index = r"\(6, 0\)" if far == 4 else r"\(-2, 0\)"
    with pytest.raises(KernelFault, match=f"accesses index {index} outside `x` of shape \\(6, 5\\)"):
        launch((1,), gathered, (x, y, False, far))


@ct.kernel
def colliding(y, same: ct.Constant[bool]):
    places = ct.zeros((4,), ct.int32)
    values = ct.arange(4, dtype=ct.float32) * (0.0 if same else 1.0)
    ct.scatter(y, places, values)


def test_two_values_for_one_element_are_a_fault() -> None:
    y = torch.ones(2)
    launch((1,), colliding, (y, True))
    assert y.tolist() == [0.0, 1.0]
    with pytest.raises(KernelFault, match="more than one value"):
        launch((1,), colliding, (y, False))


@ct.kernel
def raw(x, y, shift: int):
    memory = x.get_raw_memory()
    offsets = ct.arange(4, dtype=ct.int32) + shift
    even = offsets % 2 == 0
    a = memory.load_offset(offsets, mask=even, padding_value=9.0)
    y.get_raw_memory().store_offset(ct.arange(4, dtype=ct.int32) * 2, a, mask=a < 100.0)


def test_raw_memory() -> None:
    x, y = torch.arange(12.0).reshape(3, 4), torch.zeros(8)
    launch((1,), raw, (x, y, 5))
    assert y.tolist() == [9.0, 0.0, 6.0, 0.0, 9.0, 0.0, 8.0, 0.0]
    with pytest.raises(KernelFault, match="accesses offset 12, which lies outside the memory of `x`"):
        launch((1,), raw, (x, y, 9))


@ct.kernel
def advanced(x, y, start: int):
    rows = ct.arange(4, dtype=ct.int32) * 2
    a = ct.load_advanced_indexing(x, (rows, ct.Slice(start, 4)), padding_mode=ct.PaddingMode.ZERO)
    ct.store_advanced_indexing(y, (rows + 1, ct.Slice(1, 4)), a)


def test_slices_at_a_tile_of_indices() -> None:
    x, y = torch.randn(6, 6), torch.zeros(8, 6)
    launch((1,), advanced, (x, y, 3))
    wanted = torch.zeros(8, 6)
    wanted[1:7:2, 1:4] = x[::2, 3:]
    assert torch.equal(y, wanted)


# --- atomic operations ---


OPERATIONS = ("add", "max", "min", "and", "or", "xor", "xchg", "cas")


@ct.kernel
def atomics(x, old, which: ct.Constant[int]):
    name = OPERATIONS[which]
    places = ct.arange(8, dtype=ct.int32) % 3
    values = ct.arange(8, dtype=ct.int32).astype(x.dtype)
    if name == "add":
        before = ct.atomic_add(x, places, values)
    elif name == "max":
        before = ct.atomic_max(x, places, values)
    elif name == "min":
        before = ct.atomic_min(x, places, values)
    elif name == "and":
        before = ct.atomic_and(x, places, values)
    elif name == "or":
        before = ct.atomic_or(x, places, values)
    elif name == "xor":
        before = ct.atomic_xor(x, places, values)
    elif name == "xchg":
        before = ct.atomic_xchg(x, places, values)
    else:
        before = ct.atomic_cas(x, places, values - 3, values)
    ct.store(old, (0,), before)


@ct.kernel
def atomic_offsets(x, old, which: ct.Constant[int]):
    name = OPERATIONS[which]
    memory = x.get_raw_memory()
    places = ct.arange(8, dtype=ct.int32) % 3
    values = ct.arange(8, dtype=ct.int32)
    if name == "add":
        before = memory.atomic_add_offset(places, values)
    elif name == "max":
        before = memory.atomic_max_offset(places, values)
    elif name == "min":
        before = memory.atomic_min_offset(places, values)
    elif name == "and":
        before = memory.atomic_and_offset(places, values)
    elif name == "or":
        before = memory.atomic_or_offset(places, values)
    elif name == "xor":
        before = memory.atomic_xor_offset(places, values)
    elif name == "xchg":
        before = memory.atomic_xchg_offset(places, values)
    else:
        before = memory.atomic_cas_offset(places, values - 3, values)
    ct.store(old, (0,), before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_atomic_operations_happen_one_after_the_other(name: str) -> None:
    x, old = torch.tensor([4, -1, 2], dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    memory, before = x.tolist(), []
    for i in range(8):
        was = memory[i % 3]
        before.append(was)
        memory[i % 3] = {
            "add": was + i,
            "max": max(was, i),
            "min": min(was, i),
            "and": was & i,
            "or": was | i,
            "xor": was ^ i,
            "xchg": i,
            "cas": i if was == i - 3 else was,
        }[name]
    again = x.clone()
    launch((1,), atomics, (x, old, OPERATIONS.index(name)))
    assert x.tolist() == memory and old.tolist() == before
    old.zero_()
    launch((1,), atomic_offsets, (again, old, OPERATIONS.index(name)))
    assert again.tolist() == memory and old.tolist() == before


@ct.kernel
def atomic_views(x, y):
    v = x.tiled_view((4,))
    values = ct.load(y, (0,), (4,))
    v.atomic_store_add((0,), values)
    v.atomic_store_max((1,), values)
    v.atomic_store_min((2,), values)
    v.atomic_store_and((3,), values)
    v.atomic_store_or((4,), values)
    v.atomic_store_xor((5,), values)


def test_atomic_stores_of_tiles() -> None:
    x, y = torch.arange(22, dtype=torch.int32), torch.tensor([5, -3, 12, 7], dtype=torch.int32)
    before = x.clone()
    launch((1,), atomic_views, (x, y))
    parts = torch.nn.functional.pad(before, (0, 2)).reshape(6, 4)
    wanted = [
        parts[0] + y,
        torch.maximum(parts[1], y),
        torch.minimum(parts[2], y),
        parts[3] & y,
        parts[4] | y,
        parts[5] ^ y,
    ]
    assert torch.equal(x, torch.cat(wanted)[:22])


@ct.kernel
def atomic_floats(x):
    ct.atomic_add(x, ct.arange(4, dtype=ct.int32), ct.full((4,), 0.5, x.dtype))
    x.get_raw_memory().atomic_add_offset(0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_atomic_sums_of_floats(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype)
    launch((2,), atomic_floats, (x,))
    assert x.tolist() == [3.0, 1.0, 1.0]


@ct.kernel
def atomic_of_wrong_dtype(x):
    ct.atomic_max(x, 0, 1.0)


def test_atomics_of_dtypes_that_have_none_are_refused() -> None:
    for check in (True, False):
        with pytest.raises(ct.TileTypeError, match="Unsupported array dtype: float32"):
            launch((1,), atomic_of_wrong_dtype, (torch.zeros(3),), check=check)


# --- memory that was never written ---


@ct.kernel
def halves(x, y):
    i = ct.bid(0)
    ct.store(y, (i,), ct.load(x, (i,), (4,)))


@ct.kernel
def reads_all(x, y):
    ct.store(y, (0,), ct.load(x, (0,), (8,)))


@ct.kernel
def reads_and_masks(x, y, n: int):
    a = ct.load(x, (0,), (8,))
    ct.store(y, (0,), ct.where(ct.arange(8, dtype=ct.int32) < n, a, 0.0))


@ct.kernel
def gathers_all(x, y):
    ct.store(y, (0,), ct.gather(x, ct.arange(8, dtype=ct.int32)))


@ct.kernel
def adds_up(x):
    ct.atomic_add(x, ct.arange(8, dtype=ct.int32), 1.0)


def test_what_was_never_written_is_reported_when_it_is_used() -> None:
    x, y = torch.ones(8), uninitialised(torch.zeros(8))
    assert y.isnan().all() and not written(y).any()
    launch((1,), halves, (x, y))
    assert written(y).tolist() == [True] * 4 + [False] * 4
    z = torch.zeros(8)
    for kernel in (reads_all, gathers_all):
        with pytest.raises(KernelFault, match=r"memory of `x` of shape \(8,\) that was never written"):
            launch((1,), kernel, (y, z))
        launch((1,), kernel, (y, z), check=False)
    launch((1,), reads_and_masks, (y, z, 4))
    with pytest.raises(KernelFault, match="never written"):
        launch((1,), reads_and_masks, (y, z, 5))
    with pytest.raises(KernelFault, match=r"updates memory of `x`.*never written"):
        launch((1,), adds_up, (y,))
    launch((2,), halves, (x, y))
    launch((1,), reads_all, (y, z))
    assert z.tolist() == [1.0] * 8 and written(y).all()


def test_tensors_allocated_inside_are_watched_until_torch_writes() -> None:
    with interpreted():
        for make in (
            lambda: torch.empty(8),
            lambda: torch.empty_like(torch.ones(8)),
            lambda: torch.ones(1).new_empty(8),
        ):
            x = make()
            with pytest.raises(KernelFault, match="never written"):
                ct.launch(None, (1,), reads_all, (x, torch.zeros(8)))
            # Another launch in between must not hide what torch writes.
            x.fill_(2.0)
            ct.launch(None, (2,), halves, (torch.ones(8), torch.zeros(8)))
            ct.launch(None, (1,), reads_all, (x, torch.zeros(8)))
        view = torch.empty(2, 8)[1]
        with pytest.raises(KernelFault, match="never written"):
            ct.launch(None, (1,), reads_all, (view, torch.zeros(8)))


def test_inference_mode_is_no_obstacle() -> None:
    with torch.inference_mode(), interpreted():
        x = torch.empty(8)
        x.fill_(1.0)
        y = torch.empty(8)
        ct.launch(None, (2,), halves, (x, y))
        assert torch.equal(x, y)
        with pytest.raises(KernelFault, match="never written"):
            ct.launch(None, (1,), reads_all, (uninitialised(torch.zeros(8)), y))


def test_integers_that_were_never_written_do_not_look_like_zero() -> None:
    assert uninitialised(torch.zeros(3, dtype=torch.int32)).tolist() == [0x55555555] * 3
    assert uninitialised(torch.zeros(3, dtype=torch.uint8)).tolist() == [0x55] * 3


# --- typing rules at the memory ---


@ct.kernel
def odd_tile(x, y):
    ct.store(y, (0,), ct.load(x, (0,), (3,)))


@ct.kernel
def narrowing(x, y):
    ct.store(y, (0,), ct.load(x, (0,), (4,)).astype(ct.float32))


@ct.kernel
def wrong_rank(x, y):
    ct.store(y, (0,), ct.load(x, (0, 0), (4,)))


@ct.kernel
def wrong_mask(x, y):
    ct.store(y, (0,), ct.gather(x, ct.arange(4, dtype=ct.int32), mask=ct.ones((4,), ct.int32)))


@ct.kernel
def float_index(x, y):
    ct.store(y, (0,), ct.gather(x, ct.arange(4, dtype=ct.float32)))


@ct.kernel
def shapes_apart(x, y):
    a = ct.load(x, (0,), (4,))
    ct.store(y, (0,), a + ct.load(x, (0,), (2,)))


@ct.kernel
def directly_indexed(x, y):
    a = ct.load(x, (0,), (4,))
    ct.store(y, (0,), a[0])


@ct.kernel
def assigned(x, y):
    y[0] = ct.load(x, (0,), (4,))


@ct.kernel
def inner_shapes(x, y):
    a = ct.load(x, (0,), (4,)).reshape((2, 2))
    b = ct.load(x, (0,), (4,)).reshape((4, 1))
    ct.store(y, (0,), ct.matmul(a, b).reshape((4,)))


@ct.kernel
def accumulated_low(x, y):
    a = ct.load(x, (0,), (4,)).reshape((2, 2))
    ct.store(y, (0,), ct.mma(a, a, ct.zeros((2, 2), ct.float16)).reshape((4,)))


@ct.kernel
def negative_step(x, y):
    for i in range(3, 0, -1):
        ct.store(y, (0,), ct.load(x, (i,), (4,)))


@ct.kernel
def tile_as_condition(x, y):
    if ct.load(x, (0,), (4,)) > 0:
        ct.store(y, (0,), ct.load(x, (0,), (4,)))


VIOLATIONS = {
    odd_tile: (r"Dimension #0 of shape \(3,\) is not a power of two", torch.float32),
    narrowing: ("cannot implicitly cast float32 to bfloat16", torch.bfloat16),
    wrong_rank: ("Index size 2 does not match the array rank 1", torch.float32),
    wrong_mask: ("Custom mask must have boolean dtype, but got int32", torch.float32),
    float_index: ("integer", torch.float32),
    shapes_apart: ("not broadcastable", torch.float32),
    directly_indexed: ("Directly indexing a tile is not supported", torch.float32),
    assigned: ("Arrays do not support item assignment", torch.float32),
    inner_shapes: ("Incompatible shapes for matrix mul on tiles", torch.float32),
    accumulated_low: ("Unsupported acc dtype float16", torch.bfloat16),
    negative_step: ("Step must be positive, got -1", torch.float32),
    tile_as_condition: ("Expected a scalar value, but given value has type", torch.float32),
}


@pytest.mark.parametrize("kernel", VIOLATIONS, ids=lambda k: k._pyfunc.__name__)
@pytest.mark.parametrize("check", [True, False], ids=["front end", "interpreter"])
def test_violations_are_worded_like_the_compilers(kernel: Any, check: bool) -> None:
    words, dtype = VIOLATIONS[kernel]
    with pytest.raises(ct.TileError, match=words) as caught:
        launch((1,), kernel, (torch.ones(8, dtype=dtype), torch.ones(8, dtype=dtype)), check=check)
    if kernel not in (shapes_apart, accumulated_low) or not check:
        assert f"in {kernel._pyfunc.__name__}" in str(caught.value)
