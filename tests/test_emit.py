"""Exports: the emitted package passes its own tests, fails them when it is broken, patches, and lets go again."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernelgraft import emit, families, machine, models, pipeline, suppliers
from kernelgraft.emit import selecting
from kernelgraft.emit.sources import Merged
from kernelgraft.errors import MismatchError, UsageError
from kernelgraft.identity import model_card
from kernelgraft.records import Graft, Guard, Patch, Seat, Solution
from kernelgraft.store import Inventory
from kernelgraft.suppliers.base import Refusal

PACKAGE = "tilegym"
TYPES = ("qwen3", "gemma2")


@dataclass(frozen=True)
class Made:
    """A graft made by hand: the first candidate everywhere, judged by nobody."""

    model: Any
    graft: Graft
    inventory: Inventory


def make(spec: str, folder: Path) -> Made:
    loaded, inventory = models.load(spec), Inventory(folder)
    _, computes = pipeline.research(loaded, inventory)
    (supplier,) = suppliers.select(["torch"])
    patches, solutions, definitions = [], {}, {}
    for compute in computes:
        seats = []
        for definition in compute.definitions:
            definitions[definition.name] = definition
            found = supplier.candidates(definition, machine.read())
            assert not isinstance(found, Refusal)
            solutions[found[0].name] = found[0]
            inventory.save_solution(found[0])
            work = families.get(compute.family).work
            seats += [
                Seat(
                    definition=definition.name,
                    regime=b.call.regime,
                    work=work(b.inputs),
                    solution=found[0].name,
                    seated=True,
                )
                for b in compute.bound
                if b.definition.name == definition.name
            ]
        names = tuple(d.name for d in compute.definitions)
        patches.append(
            Patch(
                family=compute.family,
                sites=tuple(compute.sites),
                semantics=compute.semantics,
                definitions=names,
                status="accepted",
                seats=tuple(seats),
            )
        )
    graft = Graft(
        model=model_card(loaded.model, spec),
        machine=machine.read(),
        policy="verified",
        patches=tuple(patches),
        definitions=definitions,
        solutions=solutions,
        evaluations=(),
    )
    return Made(loaded.model, graft, inventory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    torch.set_num_threads(1)
    return {t: make(f"config:{t}", tmp_path_factory.mktemp(t)) for t in TYPES}


@pytest.fixture(scope="module")
def exported(made: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both grafts in one package; the second call adds to the first."""
    dest = tmp_path_factory.mktemp("dest")
    for number, one in enumerate(made.values()):
        emit.export(
            one.graft, format="monkey-patch", dest=dest, package=PACKAGE, inventory=one.inventory, overwrite=number > 0
        )
    return dest


@pytest.fixture
def applying(exported: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The emitted `monkey_patch` module."""
    monkeypatch.syspath_prepend(str(exported))
    yield importlib.import_module(f"{PACKAGE}.transformers.monkey_patch")
    for name in [n for n in sys.modules if n.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest in a process that cannot import kernelgraft."""
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", ".", str(folder)]
    code = f"import sys; sys.modules['kernelgraft'] = None; import pytest; sys.exit(pytest.main({arguments}))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_layout(exported: Path, made: dict[str, Made]) -> None:
    home = exported / PACKAGE / "transformers"
    for name, one in made.items():
        computes = {p.family for p in one.graft.accepted}
        assert {"attention", "rope", "rms_norm", "gated_mlp", "residual_norm"} == computes
        files = {p.name for p in (home / name).iterdir()}
        expected = {f"{kind}monkey_patch_{c}.py" for c in computes for kind in ("", "test_")}
        expected |= {f"captured_{c}.safetensors" for c in computes}
        assert files == expected | {"__init__.py", "config.json", f"modeling_{name}.py"}
        script = home / f"bench_{name}.sh"
        subprocess.run(["bash", "-n", str(script)], check=True)
        lines = [line for line in script.read_text().splitlines() if line.startswith("kernelgraft bench")]
        assert len(lines) == 2 and "--use-cutile" in lines[1] and "--use-cutile" not in lines[0]
        for compute in computes:
            tree = ast.parse((home / name / f"test_monkey_patch_{compute}.py").read_text())
            assert [n.name for n in tree.body if isinstance(n, ast.FunctionDef)] == [
                f"test_monkey_patch_{compute}_matches_the_original"
            ]
    for path in exported.rglob("*.py"):
        imported = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert imported <= {"torch", "transformers", "safetensors", PACKAGE, *sys.stdlib_module_names}, path


def test_the_emitted_tests_pass_alone_and_fail_for_a_broken_kernel(exported: Path, tmp_path: Path) -> None:
    whole = run_tests(exported)
    assert whole.returncode == 0 and "10 passed" in whole.stdout, whole.stdout
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken)
    home = broken / PACKAGE / "transformers" / "qwen3"
    changes = {"rms_norm": (", 1e-06)", ", 1e-02)"), "rope": ("addcmul_(crossed, sin)", "addcmul_(crossed, cos)")}
    for compute, (right, wrong) in changes.items():
        path = home / f"monkey_patch_{compute}.py"
        assert right in path.read_text()
        path.write_text(path.read_text().replace(right, wrong))
    for path in home.glob("test_*.py"):
        if path.stem.removeprefix("test_monkey_patch_") not in changes:
            path.unlink()
    result = run_tests(home)
    assert result.returncode == 1 and "2 failed" in result.stdout, result.stdout


def tokens(model: Any) -> Any:
    ids = torch.arange(1, 8)[None]
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )


def snapshot(model: Any) -> dict[str, Any]:
    """Everything that a patch could replace, by name."""
    modelling = importlib.import_module(type(model).__module__)
    found = {f"global {k}": v for k, v in vars(modelling).items() if not k.startswith("__")}
    for name, value in vars(modelling).items():
        if isinstance(value, type):
            found |= {f"{name}.{k}": v for k, v in vars(value).items() if k not in ("__dict__", "__weakref__")}
    return found


@pytest.mark.parametrize("model_type", TYPES)
def test_applying_patches_classes_and_undo_restores_them(
    model_type: str, made: dict[str, Made], applying: ModuleType
) -> None:
    model = made[model_type].model
    before, original = snapshot(model), tokens(model)
    apply = getattr(applying, f"apply_{PACKAGE}_kernel_to_{model_type}")
    assert getattr(applying, f"MODEL_TYPE_TO_APPLY_{PACKAGE.upper()}_FN")[model_type] is apply
    handle = apply()
    changed = {k for k, v in snapshot(model).items() if before.get(k) is not v}
    assert {k.rpartition(".")[2] for k in changed} == {
        "forward",
        "global ALL_ATTENTION_FUNCTIONS",
        "global apply_rotary_pos_emb",
    }
    assert len({k for k in changed if k.endswith(".forward")}) == 3  # norm, gated feed-forward, layer
    called: list[str] = []
    for compute in ("attention", "rope", "rms_norm", "gated_mlp", "residual_norm"):
        module = importlib.import_module(f"{PACKAGE}.transformers.{model_type}.monkey_patch_{compute}")
        for name in [n for n in vars(module) if n.startswith("torch_")]:
            kernel = getattr(module, name)
            setattr(module, name, lambda *a, kernel=kernel, compute=compute: called.append(compute) or kernel(*a))
    tokens(model)
    patched = tokens(model)
    assert {c: called.count(c) > 0 for c in set(called)} == dict.fromkeys(
        ("attention", "rope", "rms_norm", "gated_mlp", "residual_norm"), True
    )
    torch.testing.assert_close(patched.logits[0], original.logits[0], rtol=1e-3, atol=1e-4)
    assert torch.equal(patched.sequences, original.sequences)
    handle.undo()
    handle.undo()
    after = snapshot(model)
    assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)
    count = len(called)
    assert torch.equal(tokens(model).logits[0], original.logits[0]) and len(called) == count


def test_flags_choose_computes(made: dict[str, Made], applying: ModuleType) -> None:
    model = made["qwen3"].model
    before = snapshot(model)
    flags = dict.fromkeys(("attention", "rope", "gated_mlp", "residual_norm"), False)
    with applying.apply_tilegym_kernel_to_qwen3(**flags, model=model):
        assert [k for k, v in snapshot(model).items() if before.get(k) is not v] == ["Qwen3RMSNorm.forward"]
    assert all(before[k] is v for k, v in snapshot(model).items())
    with pytest.raises(TypeError, match="swiglu"):
        applying.apply_tilegym_kernel_to_qwen3(swiglu=False)


def test_what_cannot_be_applied_changes_nothing(
    made: dict[str, Made], applying: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made["qwen3"].model
    before = snapshot(model)
    with pytest.raises(ValueError, match="`gemma2`, this one is of type `qwen3`"):
        applying.apply_tilegym_kernel_to_gemma2(model=model)
    with applying.apply_tilegym_kernel_to_qwen3(), pytest.raises(RuntimeError, match="patched already"):
        applying.apply_tilegym_kernel_to_qwen3()
    computes = list(dict.fromkeys(p.family for p in made["qwen3"].graft.accepted))
    last = importlib.import_module(f"{PACKAGE}.transformers.qwen3.monkey_patch_{computes[-1]}")
    monkeypatch.setattr(
        last, "targets", lambda: [t for t in targets() if not setattr(t, "_source", (t._source[0], "0" * 64))]
    )
    targets = importlib.import_module(f"{PACKAGE}.transformers.qwen3.monkey_patch_{computes[0]}").targets
    with pytest.raises(RuntimeError, match="is not the one that this package was written for"):
        applying.apply_tilegym_kernel_to_qwen3(**{computes[0]: False})
    monkeypatch.setitem(sys.modules, last.__name__, None)
    with pytest.raises(ImportError):
        applying.apply_tilegym_kernel_to_qwen3()
    assert all(before[k] is v for k, v in snapshot(model).items())


def test_undo_leaves_what_came_later(made: dict[str, Made], applying: ModuleType) -> None:
    owner = importlib.import_module("transformers.models.qwen3.modeling_qwen3").Qwen3MLP
    original = owner.forward
    handle = applying.apply_tilegym_kernel_to_qwen3()
    patched = owner.forward
    owner.forward = later = lambda self, x: x
    with pytest.raises(RuntimeError, match=r"`Qwen3MLP\.forward` was replaced by something else"):
        handle.undo()
    assert owner.forward is later
    owner.forward = patched
    handle.undo()
    assert owner.forward is original


def test_an_instance_with_other_settings_keeps_the_original(made: dict[str, Made], applying: ModuleType) -> None:
    """The class is patched for silu; a module of that class with another activation must not get it."""
    mlp = made["qwen3"].model.model.layers[0].mlp
    x = torch.randn(1, 3, mlp.hidden_size)
    silu = mlp.act_fn
    try:
        mlp.act_fn = torch.nn.ReLU()
        expected = mlp(x)
        with applying.apply_tilegym_kernel_to_qwen3(), torch.no_grad():
            assert torch.equal(mlp(x), expected) and torch.equal(mlp(x), expected)
    finally:
        mlp.act_fn = silu


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_places_and_names_that_are_refused(made: dict[str, Made], tmp_path: Path) -> None:
    one = made["qwen3"]

    def export(**changes: Any) -> list[Path]:
        given = {"format": "monkey-patch", "dest": tmp_path / "d", "inventory": one.inventory, **changes}
        return emit.export(given.pop("graft", one.graft), **given)

    with pytest.raises(UsageError, match="unknown format `onnx`; known: monkey-patch, flashinfer-trace"):
        export(format="onnx")
    for name in ("transformers", "torch", "two words", "class"):
        with pytest.raises(UsageError, match=f"`{name}` cannot be the name"):
            export(package=name)
    occupied = tmp_path / "file"
    occupied.write_text("here")
    with pytest.raises(UsageError, match=r"cannot write `.*file"):
        export(dest=occupied)
    empty = one.graft.model_copy(update={"patches": ()})
    with pytest.raises(UsageError, match="nothing to export"):
        export(graft=empty)
    foreign = one.graft.accepted[0]
    foreign = foreign.model_copy(
        update={"sites": tuple(s.model_copy(update={"class_name": "torch.nn.LayerNorm"}) for s in foreign.sites)}
    )
    with pytest.raises(UsageError, match=r"`torch\.nn\.LayerNorm` is not a class of transformers"):
        export(graft=one.graft.model_copy(update={"patches": (foreign,)}))
    with pytest.raises(MismatchError, match="not that of the graft"):
        export(config=made["gemma2"].model.config)
    assert files_of(tmp_path) == {"file": b"here"}

    live = one.graft.model_copy(update={"model": one.graft.model.model_copy(update={"name": "Qwen3ForCausalLM"})})
    record = one.inventory.root / "config.json"
    kept = record.read_bytes()
    record.unlink()
    try:
        with pytest.raises(UsageError, match="configuration of `Qwen3ForCausalLM` is not found"):
            export(graft=live)
    finally:
        record.write_bytes(kept)
    assert export(graft=live)


def test_what_is_there_is_kept(made: dict[str, Made], tmp_path: Path) -> None:
    one = made["qwen3"]
    common = {"format": "monkey-patch", "dest": tmp_path, "package": "mine", "inventory": one.inventory}
    written = emit.export(one.graft, **common)
    assert {str(p.relative_to(tmp_path)) for p in written} == files_of(tmp_path).keys()
    before = files_of(tmp_path)
    with pytest.raises(UsageError, match="exists and is not empty"):
        emit.export(one.graft, **common)
    inside = tmp_path / "mine" / "transformers"
    stale, own = inside / "qwen3" / "monkey_patch_old.py", tmp_path / "mine" / "notes.txt"
    stale.write_text("")
    own.write_text("mine")
    emit.export(one.graft, **common, overwrite=True)
    assert files_of(tmp_path) == {**before, "mine/notes.txt": b"mine"}
    (inside / "monkey_patch.py").write_text("# somebody's own\n")
    with pytest.raises(UsageError, match="was not written by an export"):
        emit.export(one.graft, **common, overwrite=True)
    assert not list(tmp_path.glob(".export-*"))


def test_trace_set(made: dict[str, Made], tmp_path: Path) -> None:
    from flashinfer_bench.data import TraceSet

    one = made["qwen3"]
    files = emit.export(one.graft, format="flashinfer-trace", dest=tmp_path / "set", inventory=one.inventory)
    theirs = TraceSet.from_path(str(tmp_path / "set"))
    assert theirs.definitions.keys() == one.graft.definitions.keys()
    assert {s.name for group in theirs.solutions.values() for s in group} == one.graft.solutions.keys()
    workload = next(iter(theirs.workloads.values()))[0].workload
    assert all((tmp_path / "set" / spec.path).is_file() for spec in workload.inputs.values())
    assert {str(p.relative_to(tmp_path / "set")) for p in files} == files_of(tmp_path / "set").keys()
    assert not (tmp_path / "set" / "meta").exists()
    with pytest.raises(UsageError, match="not empty"):
        emit.export(one.graft, format="flashinfer-trace", dest=tmp_path / "set", inventory=one.inventory)
    with pytest.raises(UsageError, match="is the inventory itself"):
        emit.export(one.graft, format="flashinfer-trace", dest=one.inventory.root, inventory=one.inventory)
    emit.export(one.graft, format="flashinfer-trace", dest=tmp_path / "set", overwrite=True)
    alone = TraceSet.from_path(str(tmp_path / "set"))
    assert alone.definitions.keys() == one.graft.definitions.keys() and not alone.workloads


def test_sources_in_one_file_do_not_meet() -> None:
    source = """# Source: somewhere
import torch
import torch.nn.functional as F

LIMIT = 3


def helper(x, limit=LIMIT):
    return F.relu(x) + limit  # helper of kernel


class Box:
    def helper(self, x):
        return helper(x) * LIMIT


def kernel(x, scale=1, helper=None):
    LIMIT = scale
    assert helper is None
    return Box().helper(x) * LIMIT
"""
    merged = Merged({"torch"}, bound={"torch": "import torch"})
    blocks = [merged.add(source, "kernel", name) for name in ("first", "second")]
    blocks.append(
        merged.add(source.replace("torch.nn.functional", "math").replace("F.relu(x)", "F.pi"), "kernel", "third")
    )
    namespace: dict[str, Any] = {}
    exec("\n".join([*merged.imports, "import torch", *blocks]), namespace)
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(namespace["first"](x), torch.tensor([9.0, 15.0]))
    assert torch.equal(namespace["second"](x, scale=2), torch.tensor([18.0, 30.0]))
    assert namespace["third"](x) == pytest.approx((3.14159265 + 3) * 3)
    assert merged.imports == ["import torch", "import torch.nn.functional as F", "import math as F_2"]
    assert "# helper of kernel" in blocks[1] and blocks[0].startswith("# Source: somewhere")


def seat_of(definition: str, work: int, solution: str | None, **axes: int) -> Seat:
    return Seat(
        definition=definition,
        regime="prefill",
        work=work,
        solution=solution,
        seated=solution is not None,
        axes=axes or None,
    )


def test_selection_as_code(made: dict[str, Made]) -> None:
    graft = made["qwen3"].graft
    definition = next(d for n, d in graft.definitions.items() if n.startswith("attention_causal"))
    base = next(s for s in graft.solutions.values() if s.definition == definition.name)

    def solution(name: str, **guard: Any) -> Solution:
        return base.model_copy(update={"name": name, "meta": base.meta.model_copy(update={"guard": Guard(**guard)})})

    solutions = {
        "small": solution("small", max_axes={"kv_len": 8}, autograd=False),
        "large": solution("large", last_dim_contiguous=("query",), equal_axes=(("q_len", "kv_len"),)),
        "fixed": solution("fixed", static_shapes=True),
    }
    seats = [
        seat_of(definition.name, 2, "small"),
        seat_of(definition.name, 8, None),
        seat_of(definition.name, 32, "large"),
        seat_of(definition.name, 4, "fixed", batch_size=1, q_len=4, kv_len=4),
    ]
    family = families.get("attention")
    text = "\n".join(
        [
            selecting.work(family, "size_of"),
            selecting.fits(definition, "fits"),
            selecting.select(definition, "select", "fits", seats, solutions, {n: n for n in solutions}, "size_of"),
        ]
    )
    tensors = made["qwen3"]
    heads = {n: definition.axes[n].value for n in ("num_heads", "num_kv_heads", "head_dim")}
    namespace: dict[str, Any] = {
        "torch": torch,
        "plain": lambda *x: True,
        "needs_gradient": lambda *x: any(t.requires_grad for t in x),
        **{n: n for n in solutions},
    }
    exec(text, namespace)

    def ask(q_len: int, kv_len: int, batch: int = 1, dtype: torch.dtype = torch.float32, **change: Any) -> str | None:
        q = torch.ones(batch, heads["num_heads"], q_len, heads["head_dim"], dtype=dtype)
        k, v = (torch.ones(batch, heads["num_kv_heads"], kv_len, heads["head_dim"], dtype=dtype) for _ in "kv")
        q = change.get("query", lambda x: x)(q)
        found: str | None = namespace["select"](q, k, v)
        return found

    assert tensors.graft.definitions[definition.name].constraints == ("q_len == 1 or q_len == kv_len",)
    assert ask(1, 5) == "small"
    assert ask(1, 9) is None  # longer than its guard allows
    assert ask(1, 5, query=lambda x: x.requires_grad_()) is None
    assert ask(4, 4) == "fixed"  # the measured shape
    assert ask(2, 2, batch=2) is None  # as many queries, but another shape
    assert ask(8, 8) is None  # the original was faster
    assert ask(15, 15) is None and ask(17, 17) == "large"  # 16 lies in the middle between 8 and 32
    assert ask(17, 17, query=lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)) is None
    assert ask(3, 5) is None  # breaks the constraint
    assert ask(1, 5, dtype=torch.bfloat16) is None
