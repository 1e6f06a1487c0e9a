"""Which sites a model has, how instances are grouped, and what is left out."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import create_causal_mask

from kernelgraft.models import load
from kernelgraft.sites import current, discover, source_ref
from kernelgraft.sites.rebind import function_tree

LOOKUP = AttentionInterface()


def rotate(x):
    return -x


def helper(x):
    return x


def never_called(x):
    return x


def shifted(x):
    return x + 1


class Norm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * x


class Mixer(nn.Module):
    """Looks attention up under a name of its own, in a method of its own."""

    def __init__(self, layer_idx=0):
        super().__init__()
        self.layer_idx = layer_idx
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        x = rotate(self.proj(x))
        create_causal_mask  # noqa: B018
        torch.nn.functional.relu(x)
        return self.mix(x, fallback=never_called)

    def mix(self, x, fallback):
        return LOOKUP.get("sdpa", fallback) and helper(x)

    def spare(self, x):
        return never_called(x)


class Layer(nn.Module):
    def __init__(self, index, **norm):
        super().__init__()
        self.mixer = Mixer(index)
        self.norm = Norm(4, **norm)

    def forward(self, x):
        residual = x
        x = self.mixer(x)
        x = residual + x
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.layers = nn.ModuleList(layers)
        self.drop = nn.Dropout(0.1)
        self.act = nn.SiLU()
        self.final = Norm(4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return shifted(self.final(x))


def by_key(model):
    sites = discover(model)
    keyed = {site.key: site for site in sites}
    assert len(keyed) == len(sites)
    return keyed


def test_every_kind_is_found_without_names():
    sites = by_key(Model([Layer(i) for i in range(3)]))
    assert {key: (site.kind, site.symbol) for key, site in sites.items()} == {
        "layers.*": ("module", None),
        "layers.*.mixer": ("module", None),
        "layers.*.mixer.forward:rotate": ("function", "rotate"),
        "layers.*.mixer.mix:LOOKUP": ("attention", "LOOKUP"),
        "layers.*.mixer.mix:helper": ("function", "helper"),
        "layers.*.norm": ("module", None),
        "final": ("module", None),
    }
    assert sites["layers.*.mixer"].instances == ("layers.0.mixer", "layers.1.mixer", "layers.2.mixer")
    assert sites["layers.*.mixer"].class_name == f"{__name__}.Mixer"
    assert sites["layers.*.mixer.mix:LOOKUP"].method == "mix"


def test_statements_are_found_where_the_child_may_be_a_norm():
    class Pre(Layer):
        def forward(self, x):
            residual = x
            x = residual + self.mixer(x)
            y = self.norm(x)
            y = self.mixer(y)
            x = x + y  # the mixer holds a matrix
            return self.mixer.proj(x)

    sites = by_key(Model([Pre(0), Pre(1)]))
    site = sites["layers.*.forward:norm"]
    assert (site.kind, site.symbol, site.detail) == ("statement", "norm", {"order": "pre", "index": 2})
    begin = function_tree(Pre.forward).lineno
    assert site.source == source_ref(Pre.forward, first=begin + 2, last=begin + 3)
    assert [s.symbol for s in sites.values() if s.kind == "statement"] == ["norm"]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.norm, "eps", 1e-3),
        lambda layer: setattr(layer.norm, "mode", "other"),
        lambda layer: setattr(layer.norm, "flag", True),
        lambda layer: setattr(layer.norm, "window", 7),
        lambda layer: setattr(layer.norm, "sizes", (4, 4)),
        lambda layer: setattr(layer.norm, "function", rotate),
        lambda layer: setattr(layer.norm, "function", functools.partial(rotate, x=1)),
        lambda layer: setattr(layer.norm, "weight", nn.Parameter(torch.ones(5))),
        lambda layer: setattr(layer.norm, "weight", nn.Parameter(torch.ones(4, dtype=torch.bfloat16))),
        lambda layer: layer.norm.register_buffer("offset", torch.zeros(4)),
        lambda layer: setattr(layer.norm, "inner", nn.ReLU()),
    ],
)
def test_instances_that_differ_are_different_sites(change):
    layers = [Layer(i) for i in range(3)]
    change(layers[1])
    sites = by_key(Model(layers))
    assert sites["layers.*.norm#1"].instances == ("layers.0.norm", "layers.2.norm")
    assert sites["layers.*.norm#2"].instances == ("layers.1.norm",)
    assert sites["layers.*.norm#2"].detail == {"variant": 2} and sites["layers.*.norm#2"].path == "layers.*.norm"
    # The layer around a norm that differs differs, what stands beside it does not.
    assert "layers.*#2" in sites and sites["layers.*.mixer"].instances == tuple(f"layers.{i}.mixer" for i in range(3))


def test_a_layer_number_is_no_difference_unless_it_may_be_something_else():
    numbered = [Layer(i + 3) for i in range(3)]
    assert "layers.*.mixer" in by_key(Model(numbered))
    few, many = [Layer(0) for _ in range(3)], [Layer(0) for _ in range(4)]
    for layers in (few, many):
        for index, layer in enumerate(layers):
            layer.norm.rank = index
    assert "layers.*.norm#3" in by_key(Model(few))
    assert "layers.*.norm" in by_key(Model(many))
    many[3].norm.rank = 0
    assert "layers.*.norm#2" in by_key(Model(many))


def test_different_classes_at_one_place_are_different_sites():
    layers = [Layer(0), Layer(1)]
    layers[1].norm = nn.LayerNorm(4)
    sites = by_key(Model(layers))
    assert sites["layers.*.norm#1"].class_name == f"{__name__}.Norm"
    assert sites["layers.*.norm#2"].class_name == "torch.nn.modules.normalization.LayerNorm"


def test_a_norm_called_twice_has_two_sites():
    class Twice(Layer):
        def forward(self, x):
            x = x + self.mixer(x)
            y = self.norm(x)
            x = x + self.mixer(y)
            return self.norm(x)

    class Assigned(Twice):
        def forward(self, x):
            x = x + self.mixer(x)
            y = self.norm(x)
            x = x + self.mixer(y)
            x = self.norm(x)
            return x

    assert "layers.*.forward:norm" in by_key(Model([Twice(0)]))
    sites = by_key(Model([Assigned(0)]))
    assert sites["layers.*.forward:norm#1"].detail == {"order": "pre", "index": 1, "variant": 1}
    assert sites["layers.*.forward:norm#2"].detail == {"order": "pre", "index": 3, "variant": 2}


def test_an_installed_method_is_what_is_looked_at():
    model = Model([Layer(0), Layer(1)])

    def forward(self, x):
        return shifted(x)

    for layer in model.layers:
        layer.mixer.forward = types.MethodType(forward, layer.mixer)
    assert "layers.*.mixer.forward:shifted" in by_key(model)
    model.layers[0].mixer.forward = lambda x: x
    sites = by_key(model)
    assert sites["layers.*.mixer"].instances == ("layers.1.mixer",)


def test_a_mere_holder_is_no_site():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm(4)

    assert [site.key for site in discover(nn.ModuleList([Holder()]))] == ["*.norm"]


def test_code_without_source_gives_no_sites():
    scope = {"nn": nn, "__name__": "nowhere"}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x\n", scope)
    assert [site.key for site in discover(nn.ModuleDict({"a": scope["Made"](), "b": Norm(4)}))] == ["b"]


@pytest.mark.parametrize("spec", ["config:qwen3", "config:gemma2", "config:gpt_neox"])
def test_a_real_decoder(spec):
    model = load(spec).model
    state = {name: dict(vars(module)) for name, module in model.named_modules()}
    sites = by_key(model)
    kinds = {site.kind for site in sites.values()}
    assert {"module", "attention", "function"} <= kinds
    for site in sites.values():
        assert site.source.url and site.source.url.startswith("https://github.com/")
        for instance in site.instances:
            module = model.get_submodule(instance)
            assert f"{type(module).__module__}.{type(module).__qualname__}" == site.class_name
            assert callable(current(module, site.method))
    assert not [site for site in sites.values() if "mask" in (site.symbol or "")]
    assert discover(model) == list(sites.values())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == state


def test_layers_with_and_without_a_window_are_told_apart():
    model = load("config:gemma2").model
    attention = [site for site in discover(model) if site.kind == "attention"]
    windows = [{model.get_submodule(i).sliding_window for i in site.instances} for site in attention]
    assert len(attention) == 2 and all(len(w) == 1 for w in windows) and windows[0] != windows[1]
