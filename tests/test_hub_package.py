"""Kernel packages from a graft: what is written, that it loads through ours and KernelConfig, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_emit import Made, make
from torch import nn
from transformers import AutoModelForCausalLM

import kernelgraft
from kernelgraft import emit, models
from kernelgraft.emit import hub_package
from kernelgraft.errors import UsageError
from kernelgraft.layouts import find_layouts
from kernelgraft.layouts.packages import load_all
from kernelgraft.models.specs import TINY
from kernelgraft.records import Graft, Solution

REPO = "owner/tiny-kernels"
IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.set_num_threads(1)
    return make("tiny", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def package(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dest = tmp_path_factory.mktemp("hub") / "package"
    files = emit.export(made.graft, format="hub", dest=dest, repo=REPO, inventory=made.inventory)
    assert {f.relative_to(dest) for f in files} == {f.relative_to(dest) for f in dest.rglob("*") if f.is_file()}
    return dest


def export(made: Made, dest: Path, graft: Graft | None = None, **options: Any) -> Path:
    options = {"repo": REPO, "inventory": made.inventory, "format": "hub"} | options
    emit.export(graft or made.graft, dest=dest, **options)
    return dest


def in_folder(root: Path) -> dict[str, str]:
    """The package's own kernels.json, with the folder for the repository."""
    entries = json.loads((root / "kernels.json").read_text())
    assert all(pin == {"version": 1, "trust_remote_code": True} for _, (_, pin) in entries)
    return {key: f"{root}:{value.partition(':')[2]}" for key, (value, _) in entries}


def with_solutions(graft: Graft, change: Any) -> Graft:
    return graft.model_copy(update={"solutions": {n: change(s) for n, s in graft.solutions.items()}})


def assert_same_weights(folder: Path) -> None:
    """What was saved are the bundled model's own tensors, under their own names."""
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    before = safetensors.torch.load_file(TINY / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], before[name].float()) for name in saved)


def test_what_is_written(package: Path) -> None:
    build = package / "build" / "torch-universal"
    assert {p.name for p in package.iterdir()} == {"build", "kernels.json", "README.md"}
    expected = {"__init__.py", "layers.py", "metadata.json", "guards.py", "rms_norm.py", "gated_mlp.py"}
    assert {p.name for p in build.iterdir()} == expected
    metadata = json.loads((build / "metadata.json").read_text())
    assert re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", metadata["name"])
    assert metadata["id"].isidentifier()
    assert (metadata["version"], metadata["license"], metadata["python-depends"]) == (1, "apache-2.0", [])
    card = (package / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    for said in (
        '"owner/tiny-kernels" = 1',
        "[tool.kernels.dependencies]",
        "## Evidence",
        "## Left out",
        "measured on",
    ):
        assert said in card
    for kind in ("attention", "statement"):
        assert f"a place of kind {kind}" in card


def test_kernels_have_only_a_forward_and_layouts_their_own(package: Path) -> None:
    loaded = load_all(in_folder(package))
    assert {kernel.name for kernel in loaded} == {"Qwen3RMSNormKernel", "Qwen3MLPKernel"}
    for kernel in loaded:
        assert kernel.kernel.__init__ is nn.Module.__init__
        members = {name for name in vars(kernel.kernel) if not name.startswith("__")}
        assert members == {"forward", "has_backward", "can_torch_compile"}
        assert kernel.layout is not None and "forward" in vars(kernel.layout)
        assert kernel.has_backward and kernel.can_torch_compile
    rules = {kernel.name: len(kernel.rules) for kernel in loaded}
    assert rules == {"Qwen3RMSNormKernel": 0, "Qwen3MLPKernel": 1}


def test_it_imports_without_transformers_and_without_us(package: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['kernelgraft'] = None\n"
        f"sys.path.insert(0, {str(package / 'build')!r})\n"
        "import importlib; layers = importlib.import_module('torch-universal').layers\n"
        "print(layers.Qwen3MLPKernel.__name__, layers.Qwen3MLPKernelLayout.conversion_mapping)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Qwen3MLPKernel", "[]"]


def test_it_loads_through_ours(package: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = kernelgraft.from_pretrained(AutoModelForCausalLM, TINY, kernels=in_folder(package), dtype=torch.float32)
    layers = sys.modules[type(model.model.layers[0].mlp).__module__]
    served: list[str] = []
    choose = layers.gated_mlp.choose_1

    def watched(*inputs: torch.Tensor) -> Any:
        kernel = choose(*inputs)
        served.append(kernel.__name__)
        return kernel

    with pytest.MonkeyPatch.context() as patching, torch.no_grad():
        patching.setattr(layers.gated_mlp, "choose_1", watched)
        logits = model(IDS).logits
    assert len(served) == len(model.model.layers), "each layer asks once, and a kernel serves"
    with torch.no_grad():
        torch.testing.assert_close(logits, plain(IDS).logits, rtol=1e-5, atol=1e-5)
    assert hasattr(model.model.layers[0].mlp, "gate_up_proj")
    assert not hasattr(model.model.layers[0].mlp, "gate_proj")
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **greedy), plain.generate(IDS, **greedy))
    model.save_pretrained(tmp_path)
    assert_same_weights(tmp_path)
    applied = find_layouts(model)
    assert applied is not None
    applied.revert()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_gradients_are_those_of_the_original(package: Path) -> None:
    plain = models.load("tiny").model
    model = models.load("tiny").model
    kernelgraft.apply_layouts(model, in_folder(package), check=False)
    plain(IDS, labels=IDS).loss.backward()
    model(IDS, labels=IDS).loss.backward()
    for ours, theirs in zip(model.model.layers, plain.model.layers, strict=True):
        merged = torch.cat([theirs.mlp.gate_proj.weight.grad, theirs.mlp.up_proj.weight.grad])
        torch.testing.assert_close(ours.mlp.gate_up_proj.weight.grad, merged, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.input_layernorm.weight.grad, theirs.input_layernorm.weight.grad)


def test_linears_are_not_merged_for_kernels_that_want_contiguous_inputs(made: Made, tmp_path: Path) -> None:
    def strict(solution: Solution) -> Solution:
        if solution.meta.family != "gated_mlp":
            return solution
        guard = solution.meta.guard.model_copy(update={"contiguous": ("gate", "up")})
        return solution.model_copy(update={"meta": solution.meta.model_copy(update={"guard": guard})})

    root = export(made, tmp_path / "strict", with_solutions(made.graft, strict))
    (mlp,) = [k for k in load_all(in_folder(root)) if k.name == "Qwen3MLPKernel"]
    assert mlp.rules == ()
    model = models.load("tiny").model
    with torch.no_grad():
        want = model(IDS).logits
        kernelgraft.apply_layouts(model, in_folder(root), check=False)
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-5, atol=1e-5)
    assert hasattr(model.model.layers[0].mlp, "gate_proj")


def test_the_flags_are_what_was_measured(made: Made, tmp_path: Path) -> None:
    """A kernel without a gradient, and one that no tracer gets through."""

    def broken(solution: Solution) -> Solution:
        lines = {
            "rms_norm": ("    hidden_states = hidden_states.detach()\n",),
            "gated_mlp": ("    torch._dynamo.graph_break()\n",),
        }.get(solution.meta.family)
        if lines is None:
            return solution
        head = re.compile(rf"(def {solution.entry_symbol}\([^)]*\)[^:]*:\n)")
        sources = tuple(
            s.model_copy(update={"content": head.sub(lambda m: m[1] + lines[0], s.content, count=1)})
            for s in solution.sources
        )
        assert sources != solution.sources
        return solution.model_copy(update={"sources": sources})

    made_wrong = with_solutions(made.graft, broken)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(hub_package.hub_trial, "fits", lambda *_: [])
        root = export(made, tmp_path / "broken", made_wrong)
    flags = {k.name: (k.has_backward, k.can_torch_compile) for k in load_all(in_folder(root))}
    assert flags == {"Qwen3RMSNormKernel": (False, True), "Qwen3MLPKernel": (True, False)}


def test_a_class_that_does_not_fit_is_left_out(made: Made, tmp_path: Path) -> None:
    """What the check finds wrong goes; if nothing is left, nothing is written."""

    def wrong(solution: Solution, families: tuple[str, ...]) -> Solution:
        head = re.compile(rf"(def {solution.entry_symbol}\([^)]*\)[^:]*:\n)")
        if solution.meta.family not in families:
            return solution
        first = {"rms_norm": "hidden_states", "gated_mlp": "up"}[solution.meta.family]
        sources = tuple(
            s.model_copy(
                update={"content": head.sub(lambda m: f"{m[1]}    {first} = {first} * 1.5 + 0.1\n", s.content)}
            )
            for s in solution.sources
        )
        return solution.model_copy(update={"sources": sources})

    root = export(made, tmp_path / "left", with_solutions(made.graft, lambda s: wrong(s, ("rms_norm",))))
    assert [kernel.name for kernel in load_all(in_folder(root))] == ["Qwen3MLPKernel"]
    assert "- rms_norm of `Qwen3RMSNorm`: " in (root / "README.md").read_text()
    assert not (root / "build" / "torch-universal" / "rms_norm.py").exists()
    with pytest.raises(UsageError, match="does not fit the graft's model"):
        export(made, tmp_path / "none", with_solutions(made.graft, lambda s: wrong(s, ("rms_norm", "gated_mlp"))))
    assert not list((tmp_path / "none").iterdir())


def test_kernels_of_a_package_that_is_missing_leave_the_original(made: Made, tmp_path: Path) -> None:
    def foreign(solution: Solution) -> Solution:
        sources = tuple(
            s.model_copy(update={"content": f"import no_such_package\n{s.content}"}) for s in solution.sources
        )
        return solution.model_copy(update={"sources": sources})

    root = export(made, tmp_path / "foreign", with_solutions(made.graft, foreign))
    assert "need no_such_package;" in (root / "README.md").read_text()
    model = models.load("tiny").model
    with torch.no_grad():
        want = model(IDS).logits
        kernelgraft.apply_layouts(model, in_folder(root), check=False)
        assert torch.equal(model(IDS).logits, want)


@pytest.mark.parametrize("repo", [None, "tiny", "a/b/c", "owner/-x", "owner/x; rm"])
def test_a_repository_has_an_owner_and_a_name(made: Made, tmp_path: Path, repo: str | None) -> None:
    with pytest.raises(UsageError, match="is not `owner/name`"):
        export(made, tmp_path / "dest", repo=repo)


def test_what_is_there_is_kept(made: Made, package: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not empty"):
        export(made, package)
    with pytest.raises(UsageError, match="give --format hub"):
        export(made, tmp_path / "dest", format="monkey-patch")
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError, match="was not written by an export"):
        export(made, tmp_path, overwrite=True)
    assert (tmp_path / "README.md").read_text() == "mine"
    none = made.graft.model_copy(update={"patches": tuple(p for p in made.graft.patches if p.family == "attention")})
    with pytest.raises(UsageError, match="has no module to export: attention"):
        export(made, tmp_path / "none", none)


def test_it_can_be_written_again(made: Made, tmp_path: Path) -> None:
    root = export(made, tmp_path / "twice")
    stale = root / "build" / "torch-universal" / "stale.py"
    stale.write_text("")
    export(made, root, overwrite=True)
    assert not stale.exists()


THROUGH_KERNEL_CONFIG = """
import json, sys, torch
from transformers import AutoModelForCausalLM, KernelConfig
import transformers.utils.kernel_config as devices
root, model, saved = sys.argv[1:]
torch.set_num_threads(1)
devices.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
ids = torch.arange(3, 15)[None]
plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
mapping = {key: (value, {"revision": "local"}) for key, (value, _) in json.load(open(f"{root}/kernels.json"))}
config = KernelConfig(mapping, inherit_mapping=False)
ours = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_kernels=True, kernel_config=config)
layers = sys.modules[type(ours.model.layers[0].mlp).__module__]
served = []
choose = layers.gated_mlp.choose_1
layers.gated_mlp.choose_1 = lambda *inputs: served.append(choose(*inputs)) or served[-1]
runs = {m.forward.__func__.__qualname__ for m in ours.modules() if type(m).__name__.endswith("KernelLayout")}
with torch.no_grad():
    want, got = plain(ids).logits, ours(ids).logits
ours.train()
trained = ours(ids).logits
trained.sum().backward()
ours.eval().save_pretrained(saved)
differences = [float((one - want).abs().max()) for one in (got, trained)]
print(json.dumps([sorted(runs), *differences, sum(kernel is not None for kernel in served)]))
"""


def test_it_loads_through_kernel_config(package: Path, tmp_path: Path) -> None:
    """In a process of its own, since KernelConfig patches the whole process; kernels' own validation passes there."""
    from transformers.utils.import_utils import is_kernels_available

    pytest.importorskip("kernels", reason="the package `kernels` is not installed")
    if not is_kernels_available():
        pytest.skip("the installed transformers does not take the installed `kernels`")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"{REPO}={package}", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", THROUGH_KERNEL_CONFIG, str(package), str(TINY), str(tmp_path)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    runs, difference, trained, served = json.loads(done.stdout.splitlines()[-1])
    assert runs == ["Qwen3MLPKernel.forward", "Qwen3RMSNormKernel.forward"]
    assert difference < 1e-4 and trained < 1e-4 and served > 0
    assert_same_weights(tmp_path)
