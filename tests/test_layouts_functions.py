"""Kernels for functions that modules call, by the name under which transformers registers them or their own."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_samples import generated, logits, prompt, tiny, write_package
from torch import nn
from transformers import AutoModelForCausalLM

import kernelgraft
from kernelgraft.errors import ConflictError, GraftError, UsageError
from kernelgraft.layouts import KernelSet, apply_layouts, check, find_layouts, functions, load_all
from kernelgraft.layouts.dry_run import dry_run
from kernelgraft.layouts.loading import dry_model
from kernelgraft.layouts.matching import match
from kernelgraft.layouts.quantising import linear_taken

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LAYERS = '''
import torch
import torch.nn as nn

calls = []


def half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


class Half(nn.Module):
    can_torch_compile = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        if not torch.compiler.is_compiling():
            calls.append((type(self).__name__, bool(vars(self).get("_parameters"))))
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + half(q) * sin, k * cos + half(k) * sin


class HalfWidth(nn.Module):
    """Cosines of half the width."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (torch.cat((x, x), dim=-1).unsqueeze(unsqueeze_dim) for x in (cos, sin))
        return q * cos + half(q) * sin, k * cos + half(k) * sin


class Pairs(nn.Module):
    """Neighbours are rotated, in a part of each head."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))
        width = cos.shape[-1]
        return tuple(
            torch.cat((x[..., :width] * cos + pairs(x[..., :width]) * sin, x[..., width:]), dim=-1) for x in (q, k)
        )


class Sides(nn.Module):
    def forward(self, q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        cos, sin = (x[..., : x.shape[-1] // 2].unsqueeze(unsqueeze_dim) for x in (cos, sin))
        return tuple(
            torch.cat((x[..., 0::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., 0::2] * sin), dim=-1)
            for x in (q, k)
        )


class Backwards(nn.Module):
    """Rotates the queries the wrong way."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos - half(q) * sin, k * cos + half(k) * sin


class Deaf(nn.Module):
    """Right numbers, no gradient of the keys."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        k = k.detach()
        return q * cos + half(q) * sin, k * cos + half(k) * sin


class DeafSaysSo(nn.Module):
    has_backward = False
    can_torch_compile = False

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        calls.append(("DeafSaysSo", False))
        return Deaf.forward(self, q, k, cos, sin, unsqueeze_dim)


class Renamed(nn.Module):
    def forward(self, q, k, cosine, sin, unsqueeze_dim=1):
        return q, k


class OtherDefault(nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=2):
        return q, k


class Stateful(nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return q * self.scaling, k


class WithParametersLayout(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))


class WithParameters(Half):
    pass


class ConvFn(nn.Module):
    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        calls.append(("ConvFn", False))
        size, width = hidden_states.shape[-1], weight.shape[-1]
        out = nn.functional.conv1d(hidden_states, weight.unsqueeze(1), bias, padding=width - 1, groups=len(weight))
        return nn.functional.silu(out[..., :size])


class ConvUpdate(nn.Module):
    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        calls.append(("ConvUpdate", False))
        both = torch.cat([conv_state, hidden_states], dim=-1)
        conv_state.copy_(both[..., -conv_state.shape[-1] :])
        out = nn.functional.conv1d(both, weight.unsqueeze(1), bias, groups=len(weight))
        return nn.functional.silu(out[..., -hidden_states.shape[-1] :])


class PlainNorm(nn.Module):
    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.type_as(hidden_states)


class Whole(nn.Module):
    """An attention module."""

    def forward(self, hidden_states, position_embeddings, attention_mask, ANCHOR=None, **kwargs):
        return hidden_states, None
'''

PACKAGE = """
import torch
from . import layers


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    layers.calls.append(("rotate", False))
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + layers.half(q) * sin, k * cos + layers.half(k) * sin


rotate.can_torch_compile = True
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    cache = list(inspect.signature(inspect.unwrap(llama.LlamaAttention.forward)).parameters)[4]
    folder = write_package(tmp_path_factory.mktemp("functions"), LAYERS.replace("ANCHOR", cache))
    (folder / "build" / "torch-universal" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    return folder


def calls_of(package: Path, key: str = "rotary_pos_emb") -> list[Any]:
    """What the kernels of the package noted; emptied."""
    kernel = load_all({key: f"{package}:Half"})[0].kernel
    found: list[Any] = sys.modules[kernel.__module__].calls  # type: ignore[attr-defined]
    found.clear()
    return found


def bare(model: nn.Module) -> bool:
    return not any(isinstance(value, types.MethodType) for m in model.modules() for value in vars(m).values())


@pytest.mark.parametrize(
    ("model_type", "key", "kernel", "function"),
    [
        ("llama", "rotary_pos_emb", "Half", "apply_rotary_pos_emb"),
        ("qwen3", "apply_rotary_pos_emb", "Half", "apply_rotary_pos_emb"),
        ("gpt_oss", "rotary_pos_emb", "HalfWidth", "apply_rotary_pos_emb"),
        ("glm4", "apply_rotary_pos_emb", "Pairs", "apply_rotary_pos_emb"),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", "Sides", "apply_rotary_pos_emb_interleave"),
    ],
)
def test_right_result_and_back(package: Path, model_type: str, key: str, kernel: str, function: str) -> None:
    model = tiny(model_type)
    wanted, text = logits(model), [generated(model), generated(model, "static")]
    applied = apply_layouts(model, {key: f"{package}:{kernel}"})
    rows = [(row["path"], row["class"], row["function"], row["kernel"], row["state"]) for row in applied.report()]
    attention = type(model.model.layers[0].self_attn).__name__
    paths = [f"model.layers.{index}.self_attn" for index in range(2)]
    assert rows == [(path, attention, function, kernel, "replaced") for path in paths]
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(generated(model), text[0]) and torch.equal(generated(model, "static"), text[1])
    applied.revert()
    assert torch.equal(logits(model), wanted) and bare(model) and find_layouts(model) is None
    assert {row["state"] for row in applied.report()} == {"reverted"}


@pytest.mark.parametrize("value", ["Half", "rotate"])
def test_the_kernel_runs_without_state(package: Path, value: str) -> None:
    """A class of `layers`, or a function of the package; neither sees the module that calls."""
    model, calls = tiny("llama"), calls_of(package)
    logits(model)
    assert not calls
    with apply_layouts(model, {"rotary_pos_emb": f"{package}:{value}"}, check=False):
        wanted = logits(model)
        assert calls == [(value, False)] * 2
    calls.clear()
    assert torch.equal(logits(model), wanted) and not calls
    with pytest.raises(GraftError, match="`Stateful` raises AttributeError"):
        apply_layouts(model, {"rotary_pos_emb": f"{package}:Stateful"})


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("Backwards", "with `Backwards` the logits of a tiny random model move"),
        ("Pairs", "with `Pairs` the logits of a tiny random model move"),
        ("HalfWidth", "`HalfWidth` raises RuntimeError in a run"),
        ("Deaf", "with `Deaf` the gradient of `model.embed_tokens.weight` moves by"),
        ("Renamed", "`Renamed.forward` lacks `cos` and has `cosine`, which `apply_rotary_pos_emb` has not"),
        ("OtherDefault", "`OtherDefault.forward` has `2` for `unsqueeze_dim`, `apply_rotary_pos_emb` has `1`"),
    ],
)
def test_a_wrong_kernel_is_refused(package: Path, kernel: str, said: str) -> None:
    model = tiny("llama")
    kernels = {"rotary_pos_emb": f"{package}:{kernel}"}
    with pytest.raises((GraftError, UsageError), match=said.replace(".", r"\.")) as error:
        apply_layouts(model, kernels)
    assert bare(model) and "\n" not in str(error.value)
    errors = [finding for finding in check(kernels, model.config) if finding.severity == "error"]
    assert len(errors) == 1 and said in str(errors[0]) and errors[0].kernel == kernel
    if kernel in ("Renamed", "OtherDefault"):
        assert errors[0].check == "signature"
        with pytest.raises(UsageError, match=r"`model\.layers\.0\.self_attn` would call it wrongly"):
            apply_layouts(model, kernels, check=False)


def test_nothing_leaks(package: Path, tmp_path: Path) -> None:
    plain, model, other = tiny("llama"), tiny("llama"), tiny("llama", seed=1)
    module = sys.modules[type(model).__module__]
    globals_before, class_before = dict(vars(module)), module.LlamaAttention.forward
    plain.save_pretrained(tmp_path)
    wanted, others = logits(plain), logits(other)
    calls = calls_of(package)
    kernels = {"rotary_pos_emb": f"{package}:Half"}
    loaded = kernelgraft.from_pretrained(AutoModelForCausalLM, tmp_path, kernels=kernels)
    apply_layouts(model, kernels)
    loaded.save_pretrained(tmp_path / "again")
    files = [folder / "model.safetensors" for folder in (tmp_path, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    calls.clear()
    assert torch.equal(logits(plain), wanted) and torch.equal(logits(other), others)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), wanted) and not calls
    torch.testing.assert_close(logits(loaded), wanted, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2
    assert vars(module).keys() == globals_before.keys()
    assert all(vars(module)[name] is value for name, value in globals_before.items())
    assert module.LlamaAttention.forward is class_before and bare(plain) and bare(other)


def test_two_models_and_copies(package: Path) -> None:
    one, two = tiny("llama"), tiny("llama", seed=1)
    before = logits(one), logits(two)
    first = apply_layouts(one, {"rotary_pos_emb": f"{package}:Half"}, check=False)
    second = apply_layouts(two, {"rotary_pos_emb": f"{package}:Backwards"}, check=False)
    torch.testing.assert_close(logits(one), before[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(two), before[1], atol=1e-2)
    twin = copy.deepcopy(two)
    second.revert()
    assert torch.equal(logits(two), before[1]) and not torch.allclose(logits(twin), before[1], atol=1e-2)
    mine = find_layouts(twin)
    assert mine is not None and mine is not second
    mine.revert()
    assert torch.equal(logits(twin), before[1]) and bare(twin)
    first.revert()
    gone = weakref.ref(one)
    del one, first
    gc.collect()
    assert gone() is None


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=prompt(2), labels=prompt(2)).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_training_and_modes(package: Path) -> None:
    model, calls = tiny("llama"), calls_of(package)
    wanted = gradients(model.train())
    with apply_layouts(model, {"rotary_pos_emb": f"{package}:Half"}):
        calls.clear()
        got = gradients(model)
        assert len(calls) == 2
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        logits(model.eval())
        logits(model.train())
        assert len(calls) == 6
    # One without a backward lets the original run while gradients are wanted.
    kernels = {"rotary_pos_emb": f"{package}:DeafSaysSo"}
    found = check(kernels, model)
    assert [(f.check, f.severity) for f in found] == [("training", "note")]
    assert check(kernels, model, training=True)[0].severity == "error"
    with apply_layouts(model, kernels):
        calls.clear()
        torch.testing.assert_close(gradients(model), wanted, rtol=0, atol=0)
        assert not calls
        logits(model)
        assert len(calls) == 2


def test_compile(package: Path) -> None:
    model, ids, calls = tiny("llama"), prompt(), calls_of(package)
    wanted = logits(model)
    for kernel in ("Half", "rotate"):
        torch._dynamo.reset()
        with apply_layouts(model, {"rotary_pos_emb": f"{package}:{kernel}"}, check=False), torch.no_grad():
            compiled = torch.compile(model, backend="eager", fullgraph=kernel == "Half")
            torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
    # A kernel that cannot be traced leaves the graph to the original.
    torch._dynamo.reset()
    with apply_layouts(model, {"rotary_pos_emb": f"{package}:Backwards"}, check=False), torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits(model), wanted, atol=1e-2)
    torch._dynamo.reset()
    assert calls is not None


def test_hooks(package: Path) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, calls = tiny("llama"), calls_of(package)
    wanted, seen = logits(model), []
    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_hook(lambda module, args, output: seen.append(module))
    add_hook_to_module(attention, ModelHook())
    hooked = attention.forward
    applied = apply_layouts(model, {"rotary_pos_emb": f"{package}:Half"}, check=False)
    logits(model)
    assert len(calls) == 2 and seen == [attention] and attention.forward is hooked
    applied.revert()
    assert torch.equal(logits(model), wanted) and len(calls) == 2
    remove_hook_from_module(attention)
    handle.remove()
    assert torch.equal(logits(model), wanted)


def test_functions_of_other_methods(package: Path) -> None:
    """Registered with a fallback to another package; called in prefill or in decode only, in methods below forward."""
    sizes = {"state_size": 8, "expand": 2, "n_groups": 2, "num_heads": 8, "head_dim": 8, "chunk_size": 8}
    model, calls = tiny("mamba2", num_attention_heads=None, **sizes), calls_of(package)
    wanted, text = logits(model), generated(model)
    kernels = {"causal_conv1d_fn": f"{package}:ConvFn", "causal_conv1d_update": f"{package}:ConvUpdate"}
    assert check(kernels, model) == []
    with apply_layouts(model, kernels):
        calls.clear()
        torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)
        assert {name for name, _ in calls} == {"ConvFn"}
        assert torch.equal(generated(model), text)
        assert {name for name, _ in calls} == {"ConvFn", "ConvUpdate"}
    assert torch.equal(logits(model), wanted)


def test_keys(package: Path) -> None:
    model = tiny("llama")

    def refused(key: Any, kernel: str = "Half", *more: tuple[Any, str]) -> str:
        with pytest.raises((UsageError, ConflictError)) as error:
            apply_layouts(model, [(key, f"{package}:{kernel}"), *more], check=False)
        assert bare(model)
        return str(error.value)

    near = "matches no class and no function of the model; near it: "
    assert refused("rotary_pos_em") == f"the key `rotary_pos_em` {near}`rotary_pos_emb`, `apply_rotary_pos_emb`"
    assert near in refused("^rotary_pos_emb$") and near in refused("rotary.*")  # names of functions are exact
    assert near + "`LlamaAttention`" in refused("LlamaAtention")
    assert "has no parameters for `WithParametersLayout`" in refused("rotary_pos_emb", "WithParameters")
    assert "is matched by the keys `rotary_pos_emb` and `apply_rotary_pos_emb`" in refused(
        "rotary_pos_emb", "Half", ("apply_rotary_pos_emb", f"{package}:Half")
    )
    apply_layouts(model, {"rotary_pos_emb": f"{package}:Half"}, check=False)
    with pytest.raises(UsageError, match="runs a kernel for `apply_rotary_pos_emb` already; revert that first"):
        apply_layouts(model, {"rotary_pos_emb": f"{package}:Half"}, check=False)


def test_beside_kernels_for_modules(package: Path) -> None:
    model = tiny("llama")
    wanted = logits(model)
    loaded = load_all({"rotary_pos_emb": f"{package}:Half", "RMSNorm": f"{package}:PlainNorm"})
    with apply_layouts(model, loaded) as applied:
        torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)
        assert sum(row["function"] is not None for row in applied.report()) == 2 and len(applied.report()) == 7
    assert torch.equal(logits(model), wanted)
    # The function stays where its module is replaced.
    both = {"rotary_pos_emb": f"{package}:Half", "Attention": f"{package}:Whole"}
    with pytest.raises(UsageError, match="`rotary_pos_emb` matches only functions of modules that are replaced"):
        match(model, load_all(both))
    # Linears in a module that calls it are not taken, so quantisers and offloading do not mind.
    assert linear_taken(model, load_all({"rotary_pos_emb": f"{package}:Half"})) is None
    assert linear_taken(model, load_all({"Attention": f"{package}:Whole"})) is not None


def test_an_unreached_function_is_a_note(package: Path) -> None:
    """The model has another function for the layout of its heads, and that kernel is never run."""
    model = tiny("deepseek_v3")
    found = check({"rotary_pos_emb": f"{package}:Half"}, model)
    assert [(f.check, f.severity) for f in found] == [("flow", "note")]
    assert "never calls `apply_rotary_pos_emb` at `model.layers.*.self_attn`: `Half` is not checked" in str(found[0])


def test_names_from_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any alias of the decorator, as an attribute, with a keyword; nothing else is taken for a registration."""
    (tmp_path / "registering.py").write_text(
        "import torch\n"
        "import transformers.integrations as hub\n"
        "from transformers.integrations import use_kernel_forward_from_hub as known, use_kernelized_func\n\n\n"
        '@known("first_name")\ndef first(x):\n    return x + 1\n\n\n'
        '@hub.use_kernel_forward_from_hub(layer_name="second_name")\ndef second(x):\n    return x * 2\n\n\n'
        "def other(x):\n    return x\n\n\n"
        "class Holder(torch.nn.Module):\n"
        "    def forward(self, x):\n        return self.inner(first(x))\n\n"
        "    def inner(self, x):\n        return other(second(x))\n\n"
        "    def unused(self, x):\n        return helper(x)\n\n\n"
        '@known("Layer")\nclass Layer(torch.nn.Module):\n    pass\n\n\n'
        "def helper(x):\n    return x\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("registering")
    try:
        held = [(use.name, use.registered, use.where) for use in functions.uses(module.Holder())]
        assert held == [
            ("first", "first_name", (("forward", "first"),)),
            ("other", None, (("inner", "other"),)),
            ("second", "second_name", (("inner", "second"),)),
        ]
    finally:
        del sys.modules["registering"]


def test_two_functions_of_one_name(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both places are replaced and both are looked at, though one module calls the two."""
    (tmp_path / "twice.py").write_text(
        "import torch\nfrom transformers.integrations import use_kernel_forward_from_hub\n\n\n"
        '@use_kernel_forward_from_hub("turn")\ndef one(q, k, cos, sin, unsqueeze_dim=1):\n    return q, k\n\n\n'
        '@use_kernel_forward_from_hub("turn")\ndef two(q, k, cosine, sin, unsqueeze_dim=1):\n    return q, k\n\n\n'
        "class Holder(torch.nn.Module):\n"
        "    def forward(self, q, k, cos, sin):\n        return two(*one(q, k, cos, sin), cos, sin)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        root = nn.ModuleDict({"a": importlib.import_module("twice").Holder()})
        places = match(root, load_all({"turn": f"{package}:Half"})).places
        assert [(place.paths, place.function and place.function.name) for place in places] == [
            (("a",), "one"),
            (("a",), "two"),
        ]
        assert [f.check for f in dry_run(root, places)] == ["signature"]
        with pytest.raises(UsageError, match="which `two` has not"):
            apply_layouts(root, {"turn": f"{package}:Half"}, check=False)
        assert bare(root)
        q = torch.randn(2, 1, 3, 4)
        angles = torch.randn(1, 3, 4)
        with apply_layouts(root, {"one": f"{package}:Half"}, check=False):
            assert not torch.equal(root["a"](q, q, angles, angles)[0], q)
        assert root["a"](q, q, angles, angles)[0] is q
    finally:
        del sys.modules["twice"]


def test_a_repository_of_a_function(package: Path) -> None:
    class FuncRepository:
        """As older releases of `kernels` have it."""

        func_name = "rotate"
        _repo_path = package

        def load(self) -> Any:
            raise AssertionError("the package is imported by kernelgraft")

    model, calls = tiny("llama"), calls_of(package)
    entry = KernelSet({"rotary_pos_emb": FuncRepository()}).entries[0]
    assert (entry.kernel_name, entry.source.folder) == ("rotate", package)
    with apply_layouts(model, {"rotary_pos_emb": FuncRepository()}, check=False):
        logits(model)
        assert calls == [("rotate", False)] * 2


def test_without_weights(package: Path, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    skeleton = dry_model(AutoModelForCausalLM, tmp_path)
    found = match(skeleton, load_all({"rotary_pos_emb": f"{package}:Half"})).places
    assert [place.paths for place in found] == [(f"model.layers.{i}.self_attn",) for i in range(2)]
    assert check({"rotary_pos_emb": f"{package}:Half"}, skeleton.config) == []
