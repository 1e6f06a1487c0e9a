"""Kernel packages from a graft: what is written, that it loads through ours and KernelConfig, and what is refused."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from test_emit import Made, make
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

import kernelgraft
from kernelgraft import emit, models
from kernelgraft.emit import hub_fusions, hub_package, hub_parallel
from kernelgraft.errors import UsageError
from kernelgraft.layouts import find_layouts
from kernelgraft.layouts.packages import load_all
from kernelgraft.layouts.records import Part
from kernelgraft.models.specs import TINY
from kernelgraft.records import Graft, Solution

REPO = "owner/tiny-kernels"
IDS = torch.arange(3, 15)[None]
FUSION = (
    Part("Qwen3RMSNorm", "model.layers.*.post_attention_layernorm"),
    Part("Qwen3MLP", "model.layers.*.mlp"),
)


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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path, Path]:
    """A model whose attention can be replaced whole, its package, and a folder with its weights; heads share keys."""
    torch.set_num_threads(1)
    folder, dest = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("hub") / "llama"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=256, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    models.randomise(model, 0)
    model.save_pretrained(folder)
    made = make(str(folder), tmp_path_factory.mktemp("llama"))
    return made, export(made, dest), folder


def export(made: Made, dest: Path, graft: Graft | None = None, **options: Any) -> Path:
    options = {"repo": REPO, "inventory": made.inventory, "format": "hub"} | options
    emit.export(graft or made.graft, dest=dest, **options)
    return dest


def key_of(written: Any) -> Any:
    """A key as KernelConfig takes it: JSON has no tuples."""
    return written if isinstance(written, str) else tuple(tuple(part) for part in written)


def in_folder(root: Path) -> dict[Any, str]:
    """The package's own kernels.json, with the folder for the repository."""
    entries = json.loads((root / "kernels.json").read_text())
    assert all(pin == {"version": 1, "trust_remote_code": True} for _, (_, pin) in entries)
    return {key_of(key): f"{root}:{value.partition(':')[2]}" for key, (value, _) in entries}


def with_solutions(graft: Graft, change: Any) -> Graft:
    return graft.model_copy(update={"solutions": {n: change(s) for n, s in graft.solutions.items()}})


def assert_same_weights(folder: Path, model: Path = TINY) -> None:
    """What was saved are a model's own tensors, under their own names."""
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    before = safetensors.torch.load_file(model / "model.safetensors")
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
    assert [kernel.name for kernel in loaded] == ["Qwen3RMSNormMLPKernel", "Qwen3RMSNormKernel"]
    assert loaded[0].entry.key == FUSION
    for kernel in loaded:
        assert kernel.kernel.__init__ is nn.Module.__init__
        members = {name for name in vars(kernel.kernel) if not name.startswith("__")}
        assert members == {"forward", "has_backward", "can_torch_compile"}
        assert kernel.layout is not None and "forward" in vars(kernel.layout)
        assert kernel.has_backward and kernel.can_torch_compile
    rules = {kernel.name: len(kernel.rules) for kernel in loaded}
    assert rules == {"Qwen3RMSNormKernel": 0, "Qwen3RMSNormMLPKernel": 2}


def test_it_imports_without_transformers_and_without_us(package: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['kernelgraft'] = None\n"
        f"sys.path.insert(0, {str(package / 'build')!r})\n"
        "import importlib; layers = importlib.import_module('torch-universal').layers\n"
        "print(layers.Qwen3RMSNormMLPKernel.__name__, layers.Qwen3RMSNormMLPKernelLayout.conversion_mapping)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Qwen3RMSNormMLPKernel", "[]"]


def test_it_loads_through_ours(package: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = kernelgraft.from_pretrained(AutoModelForCausalLM, TINY, kernels=in_folder(package), dtype=torch.float32)
    layers = sys.modules[type(model.model.layers[0].post_attention_layernorm).__module__]
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
    layer = model.model.layers[0]
    assert type(layer.post_attention_layernorm).__name__ == "Qwen3RMSNormMLPKernelLayout"
    assert isinstance(layer.mlp, nn.Identity)
    assert type(layer.input_layernorm).__name__ == "Qwen3RMSNormKernelLayout"
    assert hasattr(layer.post_attention_layernorm, "gate_up_proj")
    assert not hasattr(layer.post_attention_layernorm, "gate_proj")
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
        fused = ours.post_attention_layernorm
        torch.testing.assert_close(fused.gate_up_proj.weight.grad, merged, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fused.weight.grad, theirs.post_attention_layernorm.weight.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(ours.input_layernorm.weight.grad, theirs.input_layernorm.weight.grad)


@pytest.mark.parametrize(
    ("spec", "norm"), [("config:llama", "post_attention_layernorm"), ("config:gemma2", "pre_feedforward_layernorm")]
)
def test_the_norm_that_feeds_the_product_is_fused_with_it(spec: str, norm: str, tmp_path: Path) -> None:
    made = make(spec, tmp_path / "inventory")
    root = export(made, tmp_path / "package")
    fused, *rest = load_all(in_folder(root))
    others = [kernel.name for kernel in rest]
    assert len(others) == 2 and others[1].endswith("AttentionKernel") and others[0].endswith("RMSNormKernel")
    assert [part.path for part in fused.entry.parts] == [f"model.layers.*.{norm}", "model.layers.*.mlp"]
    ids = IDS % made.model.config.vocab_size
    with torch.no_grad():
        want = made.model(ids).logits
        with kernelgraft.apply_layouts(made.model, in_folder(root), check=False) as applied:
            torch.testing.assert_close(made.model(ids).logits, want, rtol=1e-4, atol=1e-5)
            assert applied.report()[0]["path"] == f"model.layers.0.{norm}"


def test_a_norm_after_the_product_is_not(tmp_path: Path) -> None:
    made = make("config:olmo2", tmp_path / "inventory")
    root = export(made, tmp_path / "package")
    assert {kernel.name for kernel in load_all(in_folder(root))} == {"Olmo2RMSNormKernel", "Olmo2MLPKernel"}


def test_linears_of_one_input_become_one_and_functions_have_their_kernels(
    llama: tuple[Made, Path, Path], tmp_path: Path
) -> None:
    made, root, folder = llama
    (kernel,) = [k for k in load_all(in_folder(root)) if k.name == "LlamaAttentionKernel"]
    assert kernel.has_backward and [type(rule).__name__ for rule in kernel.rules] == ["WeightConverter"]
    model = kernelgraft.from_pretrained(AutoModelForCausalLM, folder, kernels=in_folder(root))
    attention = model.model.layers[0].self_attn
    layers = sys.modules[type(attention).__module__]
    sizes = [getattr(made.model.model.layers[0].self_attn, f"{name}_proj").out_features for name in "qkv"]
    assert attention.qkv_proj.out_features == sum(sizes) and sizes[0] > sizes[1]
    assert layers.LlamaAttentionKernel_sizes(model.config) == sizes
    assert not hasattr(attention, "q_proj")
    with torch.no_grad():
        logits = model(IDS).logits
    served: list[Any] = []
    choose = layers.attention.choose_1
    with pytest.MonkeyPatch.context() as patching, torch.no_grad():
        # What is looked up is remembered by name, and the seat holds its chooser: a new object asks for it again.
        patching.setattr(layers.attention, "choose_1", lambda *a: served.append(choose(*a)) or served[-1])
        fresh = layers.InterfaceProxy(layers.ALL_ATTENTION_FUNCTIONS, layers.LlamaAttentionKernel_attention)
        patching.setattr(layers, "LlamaAttentionKernel_ALL_ATTENTION_FUNCTIONS", fresh)
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    chosen = [kernel is not None and kernel.__name__.startswith("torch_packed_attention_causal") for kernel in served]
    count = len(model.model.layers)
    assert chosen == [False] * count + [True] * 2 * count, "that kernel serves one query at a time"
    assert "attention at" not in (root / "README.md").read_text()
    if inspect.isfunction(layers.apply_rotary_pos_emb):  # the package `kernels` makes it a module
        served.clear()
        with pytest.MonkeyPatch.context() as patching, torch.no_grad():
            inner = layers.LlamaAttentionKernel_apply_rotary_pos_emb
            assert inner is not layers.apply_rotary_pos_emb
            watched = "LlamaAttentionKernel_apply_rotary_pos_emb"
            patching.setattr(layers, watched, lambda *a: served.append(a) or inner(*a))
            assert torch.equal(model(IDS).logits, logits)
            assert layers.rope.choose_1(*served[0]).__name__.startswith("torch_")
        assert len(served) == len(model.model.layers)
        assert "rope at" not in (root / "README.md").read_text()
    with torch.no_grad():
        torch.testing.assert_close(logits, made.model(IDS).logits, rtol=1e-5, atol=1e-5)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **greedy), made.model.generate(IDS, **greedy))
    model.save_pretrained(tmp_path)
    assert_same_weights(tmp_path, folder)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def scaled(self) -> None:
        """What another module may not be called."""


class Product(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.down, self.act = nn.Linear(4, 4), nn.SiLU()
        for name, value in more.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


@pytest.mark.parametrize(
    ("more", "reads", "together"),
    [
        ({}, "self.down(self.act(x)) if self.training else x", True),
        ({"eps": 1.0}, "self.down(x) * self.eps", False),
        ({"scaled": 2}, "self.down(x) * self.scaled", False),
        ({"table": torch.ones(4)}, "self.down(x) * self.table", False),
        ({}, "self.extra_repr()", False),
    ],
    ids=["alike", "one name", "the norm's method", "buffer", "own method"],
)
def test_what_one_module_can_hold_for_two(more: dict[str, Any], reads: str, together: bool) -> None:
    model = nn.ModuleDict({"layer": nn.ModuleDict({"norm": Norm(), "mlp": Product(**more)})})
    second: Any = SimpleNamespace(original=f"def forward(self, x):\n    return {reads}")
    assert hub_fusions._together(model, "layer.norm", "*.mlp", ["layer"], second) is together


def test_attention_that_holds_norms_with_kernels_stays(package: Path) -> None:
    assert "what is patched in `Qwen3Attention`: modules in it have kernels" in (package / "README.md").read_text()


def test_a_package_for_another_forward_says_so(llama: tuple[Made, Path, Path]) -> None:
    """transformers' own loader would call it wrongly without a word."""
    made, root, _ = llama
    (kernel,) = [k for k in load_all(in_folder(root)) if k.name == "LlamaAttentionKernel"]
    assert kernel.layout is not None
    kernel.layout(made.model.config, 0)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(LlamaAttention, "forward", lambda self, hidden_states, renamed=None, **kwargs: None)
        with pytest.raises(TypeError, match="made for another version of transformers"):
            kernel.layout(made.model.config, 0)


MERGES = """
def forward(self, x, y):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("a = self.q(x)\n    b = self.k(x)\n    return a + b", ("x", ["q", "k"])),
        ("a, b = self.q(x), self.k(x)\n    return a + b", ("x", ["q", "k"])),
        ("a = self.q(x)\n    x = x + 1\n    b = self.k(x)\n    return a + b", None),
        ("a = self.q(x)\n    b = self.k(y)\n    return a + b", None),
        ("a = self.q(x)\n    b = self.q(x) + self.k(y)\n    return a + b", None),
        ("a = self.q(x)\n    if y:\n        return self.k(x)\n    return a", None),
        ("a = self.q(x)\n    b = self.k(x)\n    return a + b + self.k.bias", None),
        ("a = self.q(x)\n    b = self.k(x)\n    c = self.v(y)\n    return a + b + c", ("x", ["q", "k"])),
        ("a = self.act(x)\n    b = self.k(x)\n    return a + b", None),
    ],
)
def test_which_linears_read_one_input(body: str, found: Any) -> None:
    (node,) = ast.parse(MERGES.format(body=body)).body
    assert isinstance(node, ast.FunctionDef)
    assert hub_parallel._calls_of_one_input(node, ["q", "k", "v"]) == found


def test_a_fusion_that_the_check_refuses_is_two_kernels(made: Made, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patching:
        wrong = ("model.layers.*.input_layernorm", "model.layers.*.mlp")
        patching.setattr(hub_fusions, "_chains", lambda *_: [wrong])
        root = export(made, tmp_path / "apart")
    assert {kernel.name for kernel in load_all(in_folder(root))} == {"Qwen3RMSNormKernel", "Qwen3MLPKernel"}
    card = (root / "README.md").read_text()
    assert (
        "- `Qwen3RMSNorm` at `model.layers.*.input_layernorm` and `Qwen3MLP` at `model.layers.*.mlp` are not one"
        in card
    )
    assert "the output of `input_layernorm`" in card


def test_a_norm_that_the_graft_left_alone_is_not_fused(made: Made, tmp_path: Path) -> None:
    """The fused kernel would run where the graft runs the original."""
    patches = []
    for patch in made.graft.patches:
        sites = [s for s in patch.sites if not any(p.endswith("post_attention_layernorm") for p in s.instances)]
        patches.append(patch.model_copy(update={"sites": tuple(sites) if patch.family == "rms_norm" else patch.sites}))
    graft = made.graft.model_copy(update={"patches": tuple(p for p in patches if p.sites)})
    root = export(made, tmp_path / "left", graft)
    assert {kernel.name for kernel in load_all(in_folder(root))} == {"Qwen3RMSNormKernel", "Qwen3MLPKernel"}


def test_kernels_for_a_gpu_are_a_build_for_cuda(made: Made, tmp_path: Path) -> None:
    def on_a_gpu(solution: Solution) -> Solution:
        guard = solution.meta.guard.model_copy(update={"devices": ("cuda",)})
        sources = tuple(
            s.model_copy(update={"content": f"from kernelgraft import errors\n{s.content}"}) for s in solution.sources
        )
        meta = solution.meta.model_copy(update={"guard": guard})
        return solution.model_copy(update={"meta": meta, "sources": sources})

    graft = with_solutions(made.graft, on_a_gpu)
    graft = graft.model_copy(update={"model": graft.model.model_copy(update={"device": "cuda"})})
    root = export(made, tmp_path / "cuda", graft)
    (build,) = (root / "build").iterdir()
    assert build.name == "torch-cuda"
    assert json.loads((build / "metadata.json").read_text())["backend"] == {"type": "cuda"}
    card = (root / "README.md").read_text()
    assert "not self-contained: they call kernelgraft (`pip install 'kernelgraft'`)" in card
    assert "the build is `torch-cuda`" in card and 'device_map="cuda")' in card
    with pytest.raises(UsageError, match="torch-cuda"):
        load_all(in_folder(root), device="cpu")
    export(made, root, overwrite=True)
    assert [path.name for path in (root / "build").iterdir()] == ["torch-universal"]


def test_a_choice_is_remembered_for_calls_alike_in_all_that_guards_ask(package: Path) -> None:
    load_all(in_folder(package))
    guards = next(m for n, m in sys.modules.items() if n.startswith("kernelgraft_kernel_") and n.endswith(".guards"))
    asked: list[Any] = []
    chosen = guards.remembered(lambda *inputs: asked.append(inputs) or len(asked))
    x, w = torch.ones(2, 4), torch.ones(4)
    with torch.no_grad():
        assert [chosen(x, w), chosen(x + 1, w)] == [1, 1]
        others = [
            (x[:1], w),
            (x.double(), w),
            (x.t().contiguous().t(), w),
            (x, nn.Parameter(w)),
            (x,),
            (x.to("meta"), w),
        ]
        assert [chosen(*inputs) for inputs in others] == [2, 3, 4, 5, 6, 7]
        with torch.autocast("cpu"):
            assert chosen(x, w) == 8
        assert chosen(x, None) == 9 and chosen(x, None) == 10, "nothing is remembered for what is no tensor"
    assert chosen(x, w) == 11, "with gradients"
    guards_table = guards.MOST_REMEMBERED
    for size in range(1, guards_table + 2):
        chosen(torch.empty(size, device="meta"))
    before = len(asked)
    assert chosen(x, w) > before, "a full table was emptied"


def test_linears_are_not_merged_for_kernels_that_want_contiguous_inputs(made: Made, tmp_path: Path) -> None:
    def strict(solution: Solution) -> Solution:
        if solution.meta.family != "gated_mlp":
            return solution
        guard = solution.meta.guard.model_copy(update={"contiguous": ("gate", "up")})
        return solution.model_copy(update={"meta": solution.meta.model_copy(update={"guard": guard})})

    root = export(made, tmp_path / "strict", with_solutions(made.graft, strict))
    (fused,) = [k for k in load_all(in_folder(root)) if k.name == "Qwen3RMSNormMLPKernel"]
    assert [type(rule).__name__ for rule in fused.rules] == ["WeightRenaming"] * 3
    model = models.load("tiny").model
    with torch.no_grad():
        want = model(IDS).logits
        kernelgraft.apply_layouts(model, in_folder(root), check=False)
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-5, atol=1e-5)
    assert hasattr(model.model.layers[0].post_attention_layernorm, "gate_proj")


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
    assert flags == {"Qwen3RMSNormKernel": (False, True), "Qwen3RMSNormMLPKernel": (False, False)}


def test_gradients_are_tried_whatever_the_mode_of_the_caller(made: Made, tmp_path: Path) -> None:
    with torch.no_grad():
        root = export(made, tmp_path / "no-grad")
    assert all(kernel.has_backward for kernel in load_all(in_folder(root)))


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
    assert "they call no_such_package. Without it" in (root / "README.md").read_text()
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
    none = made.graft.model_copy(
        update={"patches": tuple(p for p in made.graft.patches if p.family == "residual_norm")}
    )
    with pytest.raises(UsageError, match="has no module to export: residual_norm"):
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
key_of = lambda key: key if isinstance(key, str) else tuple(map(tuple, key))
mapping = {key_of(key): (value, {"revision": "local"}) for key, (value, _) in json.load(open(f"{root}/kernels.json"))}
config = KernelConfig(mapping, inherit_mapping=False)
ours = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_kernels=True, kernel_config=config)
layers = sys.modules[type(ours.model.layers[0].post_attention_layernorm).__module__]
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


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_it_loads_through_kernel_config(
    name: str, package: Path, llama: tuple[Made, Path, Path], tmp_path: Path
) -> None:
    """In a process of its own, since KernelConfig patches the whole process; kernels' own validation passes there."""
    from transformers.utils.import_utils import is_kernels_available

    pytest.importorskip("kernels", reason="the package `kernels` is not installed")
    if not is_kernels_available():
        pytest.skip("the installed transformers does not take the installed `kernels`")
    root, model = (package, TINY) if name == "tiny" else llama[1:]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"{REPO}={root}", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", THROUGH_KERNEL_CONFIG, str(root), str(model), str(tmp_path)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    runs, difference, trained, served = json.loads(done.stdout.splitlines()[-1])
    expected = {
        "tiny": ["Qwen3RMSNormKernel.forward", "Qwen3RMSNormMLPKernel.forward"],
        "llama": ["LlamaAttentionKernel.forward", "LlamaRMSNormKernel.forward", "LlamaRMSNormMLPKernel.forward"],
    }
    assert runs == expected[name]
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert difference < 1e-4 and trained < 1e-4
    assert served == layers, "each layer once, and none where gradients are wanted"
    assert_same_weights(tmp_path, model)
