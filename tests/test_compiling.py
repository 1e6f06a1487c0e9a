"""Compiling ahead of time: launches recorded, signatures as on a GPU, children that crash or hang, the table, the verb.

The compiler is not installed for these tests: scripts stand in for it. `make compile` runs the real one.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

pytest.importorskip("cuda.tile", reason="the kernels are written in cuTile: pip install 'kernelgraft[cutile]'")

import compiling_samples as samples
import cuda.tile as ct
from cuda.tile import _compile
from test_ours import SERVED, solution
from test_suppliers import fresh_inputs, sizes_of

from kernelgraft import cli, kernels
from kernelgraft.cutile import compile_pool, compile_worker, compiling, interpreted, tuning
from kernelgraft.cutile.compiling import ARCHITECTURES, Call, Compilation, CompileCheck, check, chosen_architectures
from kernelgraft.cutile.cubin import Resources, resources
from kernelgraft.cutile.interpreter import Options, standing_in
from kernelgraft.cutile.recording import recording
from kernelgraft.cutile.signatures import disjoint, launch_signature
from kernelgraft.cutile.tuning import shipped
from kernelgraft.errors import MissingExtraError, UsageError
from kernelgraft.kernels.examples import MODULES, examples, run_tuned
from kernelgraft.pipeline import compile_check
from kernelgraft.pipeline.compile_check import example_calls, solution_calls
from kernelgraft.records import WorkloadMeta
from kernelgraft.report import compile_table
from kernelgraft.store import Inventory

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- recording ---


def test_a_launch_is_recorded_and_not_done() -> None:
    with recording() as launches:
        samples.double(40)
        kept = samples.double(40, "cpu")
    first, second = launches
    assert first.grid == (3,) and first.kernel is samples.doubled
    assert [x.device.type for x in first.args[:2]] == ["meta", "meta"] and first.args[2] == 2
    assert second.args[0].device.type == "cpu"
    assert samples.double(40, "cpu").eq(2).all(), "launches are done again afterwards"
    assert len(launches) == 2
    assert kept.shape == (40,)


def test_launchers_that_know_of_gpus_only_are_recorded() -> None:
    launch, capability = ct.launch, torch.cuda.get_device_capability
    with recording() as launches:
        assert samples.on_a_gpu().device.type == "meta"
    (only,) = launches
    assert only.grid[0] > 1
    assert all(x.device.type == "meta" for x in only.args[:2])
    assert ct.launch is launch and torch.cuda.get_device_capability is capability


def test_recording_and_interpreting_nest() -> None:
    with recording() as launches, interpreted():
        assert samples.double(40, "cpu").eq(2).all()
    with interpreted(), recording() as more:
        samples.double(40, "cpu")
    assert (len(launches), len(more)) == (0, 1)


# --- signatures ---


@ct.kernel
def anything(x, y, number, factor, flag: ct.Constant[bool], far: ct.IndexedWithInt64, whole: ct.ScalarInt64):
    pass


@ct.kernel
def fixed(
    x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(-1,))],
    y: Annotated[ct.Array, ct.ArrayAnnotation(static_stride_dims=(0,))],
):
    pass


@ct.kernel
def several(arrays, pair):
    pass


def parts(signature: Any) -> list[Any]:
    return list(signature.parameters)


def test_what_a_launch_tells_of_an_array() -> None:
    """As `KernelSignature.from_kernel_args` of cuda-tile 1.7.0 says it for such arrays on a GPU."""

    def told(x: torch.Tensor) -> Any:
        (array, *_) = parts(launch_signature(samples.doubled, (x, x, 2)))
        return array

    row = told(meta(1, 4, 4096))
    assert row.stride_constant == (None, None, 1) and row.shape_constant == (1, None, None)
    assert row.stride_divisible_by == (8, 8, 1) and row.shape_divisible_by == (1, 1, 16)
    assert row.base_addr_divisible_by == 16 and row.stride_lower_bound_incl == (0, 0, None)
    assert not row.may_alias_internally and row.alias_groups == ()
    odd = told(meta(2, 33, dtype=torch.float32))
    assert odd.stride_divisible_by == (1, 1) and odd.shape_divisible_by == (1, 1)
    single = told(meta(4, 1, 1))
    assert single.stride_constant == (1, 1, 1) and single.shape_constant == (None, 1, 1)
    repeated = told(meta(1, 1, 4).expand(5, 1, 4))
    assert repeated.may_alias_internally and repeated.stride_divisible_by == (8, 1, 1)
    turned = told(meta(4, 96).t())
    assert turned.stride_constant == (1, None) and turned.shape_divisible_by == (16, 1)
    six = told(meta(1, 4, 1, 1, 4, 16))
    assert set(six.stride_constant) == {None} == set(six.shape_constant) and set(six.shape_divisible_by) == {1}


def test_what_a_launch_tells_of_annotated_arrays_scalars_and_lists() -> None:
    *_, number, factor, flag, far, whole = parts(
        launch_signature(anything, (meta(2), meta(2), 3, 1.5, True, meta(8, 8), 2**40))
    )
    assert (number.dtype, factor.dtype, whole.dtype) == (ct.int32, ct.float32, ct.int64)
    assert flag.value is True and far.index_dtype == ct.int64
    x, y = parts(launch_signature(fixed, (meta(2, 1, 48), meta(2, 1, 48))))
    assert x.shape_constant == (None, None, 48) and x.stride_constant == (None, None, 1)
    assert y.stride_constant == (48, None, None) and y.shape_constant == (None, 1, None)
    arrays, pair = parts(launch_signature(several, ([meta(4, 16), meta(1, 24)], (meta(4), 2))))
    assert arrays.elements_may_alias
    assert arrays.element.shape_constant == (None, None) and arrays.element.shape_divisible_by == (1, 1)
    assert arrays.element.stride_divisible_by == (8, 1)
    assert len(pair.items) == 2
    (overlapping, _) = parts(launch_signature(several, ([meta(4, 16), meta(1, 16).expand(4, 16)], (1,))))
    assert overlapping.element.may_alias_internally and not arrays.element.may_alias_internally


def test_elements_that_overlap() -> None:
    assert disjoint(meta(3, 4)) and disjoint(meta(3, 4).t()) and disjoint(meta(4, 64)[:, ::2])
    assert not disjoint(meta(1, 4).expand(3, 4))
    assert not disjoint(torch.empty_strided((4, 4), (1, 1), device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("tuned", [False, True], ids=["default", "tuned"])
@pytest.mark.parametrize("module", MODULES)
def test_signatures_are_those_of_launches_on_a_gpu(module: str, tuned: bool) -> None:
    """With the defaults, and with what is shipped for some GPU: the same table on both sides."""
    from cuda.tile.compilation import CallingConvention, KernelSignature

    tables = list(shipped())
    if tuned and not tables:
        pytest.skip("nothing is shipped for the versions of cuTile and its compiler that are installed here")
    slug = tables[0].slug if tuned else "none"
    on_gpu: list[tuple[Any, Any]] = []
    for index, example in enumerate(examples()[module]):
        with recording() as launches:
            run_tuned(module, index, slug, "meta")
        on_gpu.clear()
        with standing_in(Options(instead=lambda grid, kernel, args: on_gpu.append((kernel, args))), None):
            run_tuned(module, index, slug, "cuda")
        assert len(on_gpu) == len(launches), example.name
        for launch, (kernel, args) in zip(launches, on_gpu, strict=True):
            real = KernelSignature.from_kernel_args(kernel, tuple(args), CallingConvention.cutile_python_v2())
            assert launch_signature(launch.kernel, launch.args).symbol == real.symbol, example.name


# --- examples ---


def own_kernels() -> dict[str, list[Any]]:
    """Module of `kernelgraft.kernels` that defines kernels → those at its top level (others are made by functions)."""
    found = {}
    for info in pkgutil.iter_modules(kernels.__path__):
        if "@ct.kernel" not in (Path(kernels.__path__[0]) / f"{info.name}.py").read_text(encoding="utf-8"):
            continue  # a module in another language needs what may not be installed
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        every = [k for k in vars(module).values() if isinstance(k, ct.kernel)]
        found[module.__name__] = [k for k in every if k._pyfunc.__module__ == module.__name__]
    return found


def test_every_kernel_is_launched_by_an_example() -> None:
    launched = set()
    for name, listed in examples().items():
        names = [example.name for example in listed]
        assert len(set(names)) == len(names), f"`{name}` has two examples of one name"
        for example in listed:
            with recording() as launches:
                example.run("meta")
            assert launches, f"`{name}: {example.name}` launches nothing"
            launched |= {launch.kernel._pyfunc for launch in launches}
    modules = {function.__module__ for function in launched}
    for module, own in own_kernels().items():
        assert module in modules, f"no example launches a kernel of `{module}`: list it, or who uses it, in `MODULES`"
        missing = [k._pyfunc.__name__ for k in own if k._pyfunc not in launched]
        assert not missing, f"no example launches `{missing}` of `{module}`"


@pytest.mark.gpu
@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    for example in examples()[module]:
        example.run("cuda")
    torch.cuda.synchronize()


# --- cubins ---


def elf(sections: list[tuple[str, int, bytes | int]], symbols: list[str]) -> bytes:
    """A 64-bit ELF file: sections by name, kind and content (a number: that many bytes that are not stored)."""
    names = b"\0" + b"".join(s.encode() + b"\0" for s in symbols)
    table = b"\0" * 24 + b"".join(struct.pack("<IBBHQQ", names.index(s.encode()), 0x12, 0, 1, 0, 0) for s in symbols)
    every = [("", 0, b""), *sections, (".strtab", 3, names), (".symtab", 2, table)]
    titles = b"".join(name.encode() + b"\0" for name, *_ in every) + b".shstrtab\0"
    every.append((".shstrtab", 3, titles))
    body, headers = b"", b""
    for name, kind, content in every:
        size = content if isinstance(content, int) else len(content)
        at = titles.index(name.encode() + b"\0")
        headers += struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), size, 0, 0, 1, 0)
        body += b"" if isinstance(content, int) else content
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(every), len(every) - 1)
    return head + body + headers


def note(number: int, *values: int) -> bytes:
    return struct.pack("<BBH", 4, number, 4 * len(values)) + struct.pack(f"<{len(values)}I", *values)


def kernel_file(*, reserved: bool, shared: int | None = 1280) -> bytes:
    of_file = note(0x2F, 2, 98) + note(0x11, 1, 8) + note(0x12, 1, 999) + note(0x12, 2, 24)
    of_kernel = struct.pack("<BBH", 3, 0x1B, 255) + note(0x10, 64, 2, 1)
    sections: list[tuple[str, int, bytes | int]] = [(".nv.info", 0x70000000, of_file), (".nv.info.k_A1", 1, of_kernel)]
    if shared is not None:
        sections.append((".nv.shared.k_A1", 8, shared))
    if reserved:
        sections.append((".nv.shared.reserved.0", 8, 0))
    return elf(sections, ["helper", "k_A1"])


def test_a_cubin_tells_what_its_kernel_takes() -> None:
    assert resources(kernel_file(reserved=False), "k_A1") == Resources(128, 98, 24, 1280)
    assert resources(kernel_file(reserved=True), "k_A1").shared_bytes == 256
    assert resources(kernel_file(reserved=True, shared=None), "k_A1").shared_bytes == 0


def test_a_file_that_is_no_cubin_tells_nothing() -> None:
    good = kernel_file(reserved=False)
    for bad in (b"", b"no ELF file at all, but long enough", good[:80], good[:-200], good.replace(b"k_A1", b"k_B2")):
        assert resources(bad, "k_A1") == Resources()


# --- what a child answers ---


def asked(entry: str, *arguments: Any, **more: Any) -> dict[str, Any]:
    return compile_worker.answer({"entry": f"compiling_samples:{entry}", "arguments": list(arguments), **more})


def test_a_child_tells_the_launches_of_a_call() -> None:
    (first,) = asked("double", 40)["launches"]
    assert first["kernel"] == "compiling_samples.doubled" and first["grid"] == (3,)
    assert first["symbol"].startswith("doubled_K") and first["hints"] == {"opt_level": 3}
    (same,) = asked("double", 56)["launches"]
    (other,) = asked("double", 64)["launches"]
    assert same["key"] == first["key"] != other["key"], "64 is divisible by 16, 40 and 56 are not"
    assert len({launch["key"] for launch in asked("twice", 40)["launches"]}) == 2
    made = []
    for factor in (2, 2, 3):
        compile_worker._recorded.clear()
        made.append(asked("made", factor)["launches"][0]["key"])
    assert made[0] == made[1] != made[2], "a kernel that a function makes is told apart by what it holds"
    assert asked("raises")["error"] == "ValueError: no such shape"
    assert "nowhere" in asked("nowhere")["error"]


def test_a_child_compiles_only_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    (launch,) = asked("changes")["launches"]
    compile_worker._recorded.clear()
    found = asked("changes", launch=0, key=launch["key"], architecture="sm_90")
    assert found == {"status": "failed", "message": "the call launches something else when it is repeated"}


# --- a compiler that is none ---

SCRIPT = """#!/bin/sh
here=$(dirname "$0")
case "$1" in --version) echo "Cuda compilation tools, release 13.4, V13.4.92"; exit 0;; esac
case "$1" in --help) for a in 80 89 90 100 120; do echo "    =sm_$a   -   SM $a"; done; exit 0;; esac
name=$(basename "$1")
case "$name" in probe*) : > "$3"; exit 0;; esac
echo "$name $5" >> "$here/compiled"
case "$5" in
  sm_89) echo "error: no room for a tile" >&2; exit 3;;
  sm_90) kill -SEGV $$;;
  sm_100) sleep 600 & echo $! > "$here/sleeper"; wait;;
  sm_120) exec sleep 600;;
esac
echo "not an ELF file" > "$3"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages with a tileiras that works for sm_80 only; the folder of that script."""
    site = tmp_path / "site"
    for name in ("cuda_tileiras", "cuda_nvcc", "nvvm"):
        folder = site / f"nvidia_{name}-13.4.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: nvidia-{name.replace('_', '-')}\nVersion: 13.4.0\n"
        )
    programs = site / "nvidia" / "cu13" / "bin"
    programs.mkdir(parents=True)
    (programs / "tileiras").write_text(SCRIPT)
    (programs / "tileiras").chmod(0o755)
    monkeypatch.syspath_prepend(str(site))
    for name in [n for n in sys.modules if n == "nvidia" or n.startswith("nvidia.cu13")]:
        monkeypatch.delitem(sys.modules, name)
    search = _compile._find_compiler_bin
    search.cache_clear()
    yield programs
    search.cache_clear()


def sample(entry: str, *arguments: Any) -> Call:
    return Call(f"{entry}{arguments or ''}", f"compiling_samples:{entry}", arguments)


def test_a_compiler_may_fail_crash_and_hang(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "GRACE_S", 1.0)
    seen: list[tuple[str, int, int | None]] = []
    calls = [sample("double", 40), sample("double", 56), sample("refused_by_the_front_end"), sample("twice", 16)]
    found = check(
        calls, ["sm_80", "sm_89", "sm_90", "sm_100"], limit_s=3.0, processes=2,
        progress=lambda stage, done, total, text: seen.append((stage, done, total)),
    )  # fmt: skip
    assert found.compiler == "13.4.92" and found.limit_s == 3.0 and not found.failed_calls
    assert len(found.compilations) == 4 * 4, "four signatures, four architectures"
    doubled = [c for c in found.compilations if c.calls == ("double(40,)", "double(56,)")]
    assert [c.status for c in doubled] == ["compiled", "failed", "crashed", "timeout"]
    good, failed, crashed, hung = doubled
    assert good.cubin_bytes == len("not an ELF file\n") and good.registers is None and good.seconds is not None
    assert failed.message == "tileiras: exit status 3: no room for a tile"
    assert crashed.message == "tileiras: was ended by SIGSEGV"
    assert hung.message is not None
    refused = [c for c in found.compilations if "of_three" in c.kernel]
    assert {c.status for c in refused} == {"refused"} and "compiling_samples.py:" in str(refused[0].message)
    assert found.wrong == 16 - 3
    assert seen[0] == ("calls", 1, 4) and seen[-1] == ("compile", 16, 16)
    sleeper = int((compiler / "sleeper").read_text())
    for _ in range(50):
        if not running(sleeper):
            break
        time.sleep(0.1)
    assert not running(sleeper), "what the compiler had started still runs"


def running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_nothing_is_taken_from_a_cache(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        assert check([sample("double", 40)], ["sm_80"], limit_s=60.0).wrong == 0
    assert len((compiler / "compiled").read_text().splitlines()) == 2
    assert not (tmp_path / "cache").exists()


def test_a_call_may_raise_crash_and_hang(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "GRACE_S", 0.0)
    calls = [sample(name) for name in ("raises", "dies", "hangs", "nothing")] + [sample("double", 16)]
    found = check(calls, ["sm_80"], limit_s=2.0, processes=1)
    assert [(f.call, f.message) for f in found.failed_calls] == [
        ("raises", "ValueError: no such shape"),
        ("dies", "was ended by SIGSEGV"),
        ("hangs", "it did not end in time"),
        ("nothing", "it launches nothing"),
    ]
    assert [c.status for c in found.compilations] == ["compiled"]
    assert found.wrong == 4


def test_architectures_are_those_that_the_compiler_knows(compiler: Path) -> None:
    known = compiling.compiler().architectures
    assert known == ARCHITECTURES
    assert chosen_architectures(["sm_90", "sm_80", "sm_90"], known) == ("sm_90", "sm_80")
    assert chosen_architectures(["sm_121a"], ()) == ("sm_121a",)
    for wrong in (["sm_91"], ["hopper"], []):
        with pytest.raises(UsageError):
            chosen_architectures(wrong, known)
    with pytest.raises(UsageError, match="hopper"):
        chosen_architectures(["hopper"], ())


def missing(*_: Any) -> Any:
    raise FileNotFoundError("'tileiras' compiler not found")


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.tile._compile._find_compiler_bin", missing)
    with pytest.raises(MissingExtraError, match=r"`tileiras`.*pip install 'kernelgraft\[cutile\]'"):
        check([sample("double", 16)])


# --- what is compiled ---


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the shipped tables were made with."""
    table = json.loads(next(tuning.PACKAGED.glob("*.json")).read_text(encoding="utf-8"))
    found = table["kernels"]["rms_norm"]["versions"]
    monkeypatch.setattr(tuning, "compiler_versions", lambda: found)


@pytest.mark.usefixtures("versions")
def test_what_a_shipped_table_seats_is_compiled_for_its_architecture() -> None:
    (gpu,) = shipped()
    of_table = [call for call in example_calls() if call.name.endswith(gpu.slug)]
    assert len(of_table) == sum(map(len, examples().values())) and {c.architectures for c in of_table} == {("sm_90",)}
    changed = set()
    for call in of_table:
        module, index, _ = call.arguments
        launches = []
        for entry, arguments in (("run", (module, index)), (call.entry.partition(":")[2], call.arguments)):
            with recording() as found:
                getattr(importlib.import_module("kernelgraft.kernels.examples"), entry)(*arguments)
            launches.append([compile_worker.described(launch) for launch in found])
        if launches[0] != launches[1]:
            changed.add(module)
    assert changed >= {"rms_norm", "rope", "act_and_mul"}, "the table changes nothing"


def test_a_call_may_be_for_some_architectures_only(compiler: Path) -> None:
    calls = [Call("newer", "compiling_samples:double", (40,), ("sm_80", "sm_120")), sample("double", 48)]
    found = check(calls, ["sm_80", "sm_89"], limit_s=60.0, processes=1)
    assert [(c.calls, c.architecture) for c in found.compilations] == [
        (("newer",), "sm_80"),
        (("double(48,)",), "sm_80"),
        (("double(48,)",), "sm_89"),
    ]
    assert not check(calls[:1], ["sm_89"], limit_s=60.0).compilations


def test_the_examples_of_all_modules_are_called() -> None:
    calls = [call for call in example_calls() if call.architectures is None]
    assert {call.name.partition(":")[0] for call in calls} == set(MODULES)
    assert len({call.name for call in calls}) == len(calls)
    module, _, function = calls[0].entry.partition(":")
    with recording() as launches:
        getattr(importlib.import_module(module), function)(*calls[-1].arguments)
    assert launches


@pytest.fixture
def store(tmp_path: Path) -> Inventory:
    """A folder with a Definition, our Solution for it, one in Python, and two captured calls of different strides."""
    definition = SERVED[next(name for name in SERVED if name.startswith("rms_norm") and "bfloat16" in name)]
    ours = solution(definition)
    store = Inventory(tmp_path / "store")
    store.prepare()
    store.save_definition(definition)
    store.save_solution(ours)
    spec = ours.spec.model_copy(update={"language": "python"})
    store.save_solution(ours.model_copy(update={"name": "in_python", "spec": spec}))
    inputs = fresh_inputs(definition, 0, **sizes_of(definition)[-1])
    for turn in (False, True, False):
        x = inputs[0].transpose(0, 1).contiguous().transpose(0, 1) if turn else inputs[0]
        note = WorkloadMeta(regime="prefill", site="s", instance="i")
        store.save_workload(definition, note, [x, *inputs[1:]], [x + len(store.workloads(definition.name))])
    return store


def test_stored_solutions_are_called_as_they_were_captured(store: Inventory) -> None:
    (definition,) = store.definitions().values()
    calls = solution_calls(store)
    assert len(store.workloads(definition.name)) == 3
    assert len(calls) == 2, "one for each shape and stride of the Solution in cuTile's language"
    strides = []
    for call in calls:
        assert call.name.startswith("kernelgraft_rms_norm_")
        module, _, function = call.entry.partition(":")
        with recording() as launches:
            getattr(importlib.import_module(module), function)(*call.arguments)
        (only,) = launches
        assert only.args[0].device.type == "meta"
        strides.append(only.args[0].stride())
    assert strides[0] != strides[1]


def test_captured_calls_outside_the_guard_are_left_out(store: Inventory) -> None:
    ours = next(s for s in store.solutions().values() if s.spec.language == "cuda-tile")
    for field, kept in (({"dtypes": ("float64",)}, ["size 1", "size 16"]), ({"contiguous": ("hidden_states",)}, None)):
        guard = ours.meta.guard.model_copy(update=field)
        store.save_solution(ours.model_copy(update={"meta": ours.meta.model_copy(update={"guard": guard})}))
        listed = [call.arguments[2] for call in solution_calls(store)]
        assert listed == kept if kept else len(listed) == 1 and listed[0].startswith("workload ")


def test_a_stored_solution_without_captured_calls_is_called_small_and_large(store: Inventory) -> None:
    shutil.rmtree(store.root / "workloads")
    calls = solution_calls(store)
    assert [call.arguments[2] for call in calls] == ["size 1", "size 16"]
    for call in calls:
        module, _, function = call.entry.partition(":")
        with recording() as launches:
            getattr(importlib.import_module(module), function)(*call.arguments)
        assert launches


def test_the_check_is_kept_in_the_store(compiler: Path, store: Inventory) -> None:
    found = compile_check(store, architectures=["sm_80"], only=["kernelgraft_"])
    (only,) = found.compilations
    assert found.wrong == 0 and len(only.calls) == 2, "strides of one divisibility make one signature"
    assert store.load_record("compile", CompileCheck) == found
    with pytest.raises(UsageError, match="nonesuch"):
        compile_check(store, only=["nonesuch"])
    store.clear()
    assert not store.has_record("compile")


# --- the table ---


def compilation(architecture: str, **fields: Any) -> Compilation:
    known = {"kernel": "a.b.norm_kernel", "symbol": "k", "hints": {}, "grid": (1,), "calls": ("norm: small",)}
    return Compilation(**{**known, "status": "compiled", "architecture": architecture, **fields})


def shown(found: CompileCheck, width: int = 120) -> str:
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as captured:
        console.print(compile_table(found))
    return captured.get()


def test_the_table_says_what_kernels_take_and_what_failed() -> None:
    from kernelgraft import machine

    found = CompileCheck(
        machine=machine.read(),
        compiler="13.4.92",
        architectures=("sm_80", "sm_90"),
        limit_s=120.0,
        seconds=12.4,
        compilations=(
            compilation("sm_80", seconds=0.31, registers=40, local_bytes=0, shared_bytes=16),
            compilation("sm_80", seconds=0.52, registers=96, local_bytes=144, shared_bytes=4096, calls=("norm: wide",)),
            compilation("sm_90", status="failed", message="tileiras: exit status 3"),
        ),
        failed_calls=({"call": "rope: odd", "message": "it launches nothing"},),
    )
    text = shown(found)
    (row,) = [line.split() for line in text.splitlines() if line.split()[:2] == ["norm", "sm_80"]]
    assert row[2:] == ["2", "of", "2", "0.5", "40–96", "0–144", "1–4"]
    (row,) = [line.split() for line in text.splitlines() if line.split()[:2] == ["norm", "sm_90"]]
    assert row[2:] == ["0", "of", "1", "–", "–", "–", "–"]
    assert "failed: norm for sm_90 (norm: small): tileiras: exit status 3" in text
    assert "local memory: norm: up to 144 B for sm_80 (norm: wide)" in text
    assert "not compiled: rope: odd: it launches nothing" in text
    assert "2 of 3 compiled in 12 s" in text
    long = found.model_copy(update={"compilations": [compilation("sm_100", kernel=f"m.{'a_long_name' * 5}_kernel")]})
    assert "a_long_namea_long_namea_l…  sm_100" in shown(long, width=80)


# --- the verb ---

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`kernelgraft inventory` in this process: exit code, stdout, stderr."""
    from rich.console import Console

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kernelgraft", "inventory", *map(str, arguments)])
        monkeypatch.setattr(cli, "people", Console(stderr=True, width=300))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def one_line(err: str) -> str:
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("kernelgraft: ")
    return line


def test_the_verb_compiles_and_keeps(run: Run, compiler: Path, store: Inventory) -> None:
    code, out, _ = run(store.root, "--compile", "--arch", "sm_80", "--only", "kernelgraft_", "--json")
    assert code == 0
    answer = json.loads(out)
    assert [c["status"] for c in answer["compile"]["compilations"]] == ["compiled"]
    assert answer["solutions"] and answer["catalogue"]
    assert json.loads((store.root / "compile.json").read_text()) == answer["compile"]


def test_the_verb_fails_where_a_kernel_does(run: Run, compiler: Path) -> None:
    code, out, err = run("--compile", "--arch", "sm_80,sm_89", "--only", "rms_norm: decode 1 x 4096")
    assert code == 1
    assert "failed: " in out and "no room for a tile" in out
    assert "did not succeed" in err.splitlines()[-1]


def test_the_verb_says_what_is_missing_or_wrong(
    run: Run, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [
        (("--compile", "--arch", "sm_91"), "sm_91"),
        (("--compile", "--arch", ","), "--arch"),
        (("--compile", "--only", "nonesuch"), "nonesuch"),
        (("--arch", "sm_90"), "--compile"),
        ((tmp_path / "no-such-folder", "--compile"), "no-such-folder"),
    ]
    for arguments, named in wrong:
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert named in one_line(err)
    monkeypatch.setattr("cuda.tile._compile._find_compiler_bin", missing)
    code, out, err = run("--compile")
    assert (code, out) == (2, "")
    assert "pip install 'kernelgraft[cutile]'" in one_line(err)


# --- the real compiler, where it is installed ---


@pytest.mark.slow
def test_one_kernel_for_all_architectures() -> None:
    try:
        found = compiling.compiler()
    except MissingExtraError as error:
        pytest.skip(str(error))
    done = check([sample("double", 40)], found.architectures and ARCHITECTURES)
    assert done.wrong == 0 and len(done.compilations) == 5
    for one in done.compilations:
        assert one.registers and one.threads and one.local_bytes == 0 and one.shared_bytes is not None
