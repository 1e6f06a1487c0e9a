"""Residual additions next to a norm: which are found, and that the rewritten method does the same."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import nn

from kernelgraft.errors import RebindError
from kernelgraft.models import load
from kernelgraft.sites import current, discover, injected_name, install, original, rebind, transformer
from kernelgraft.sites.statements import find, select

TYPES = ("config:llama", "config:olmo2", "config:bert", "config:starcoder2", "config:gemma3_text")
"""Both orders, the inlined form, RMS and layer norms, and an addition between two norms."""


def found(source, *, norms=("norm", "block.norm")):
    tree = ast.parse(source).body[0]
    return [
        (f.order, f.norm, f.line, f.last, ast.unparse(f.residual), ast.unparse(f.hidden_states))
        for f in select(find(tree), lambda path: path in norms)
    ]


def test_pre_with_copies_between():
    assert found(
        """def forward(self, x):
    residual = x
    x = self.branch(x)
    x = residual + x
    residual = x
    x = self.norm(x)
    return residual + x
"""
    ) == [("pre", "norm", 3, 5, "residual", "x")]


@pytest.mark.parametrize(
    ("total", "sides"),
    [
        ("y + residual", ("residual", "y")),
        ("residual + y", ("residual", "y")),
        ("residual + self.drop(y) * 0.5", ("residual", "self.drop(y) * 0.5")),
        ("self.drop(y) + residual", ("residual", "self.drop(y)")),
    ],
)
def test_the_residual_is_what_was_set_aside(total, sides):
    source = f"def forward(self, x):\n    residual = x\n    y = self.branch(x)\n    x = {total}\n    z = self.norm(x)\n"
    assert found(source) == [("pre", "norm", 3, 4, *sides)]


def test_a_parameter_and_an_earlier_sum_count_as_set_aside():
    source = """def forward(self, x):
    y = self.branch(x)
    h = y + x
    z = self.block.norm(h)
    z = self.branch(z)
    out = z + h
    out = self.norm(out)
"""
    assert found(source) == [("pre", "block.norm", 2, 3, "x", "y"), ("pre", "norm", 5, 6, "h", "z")]


def test_post():
    source = "def forward(self, x):\n    y = self.branch(x)\n    y = self.norm(y)\n    y = x + y\n    return y\n"
    assert found(source) == [("post", "norm", 3, 3, "x", "y")]
    source = "def forward(self, x):\n    y = self.norm(self.branch(x))\n    x = y + x\n    return x\n"
    assert found(source) == [("post", "norm", 2, 2, "x", "self.branch(x)")]


def test_post_needs_the_normed_value_for_nothing_else():
    source = "def forward(self, x):\n    y = self.norm(self.branch(x))\n    x = y + x\n    return x, y\n"
    assert found(source) == []


def test_inlined():
    source = "def forward(self, x, inputs):\n    x = self.drop(x)\n    x = self.norm(x + inputs)\n    return x\n"
    assert found(source) == [("pre", "norm", 2, 2, "inputs", "x")]


def test_an_addition_between_two_norms_is_taken_once():
    source = """def forward(self, x):
    residual = x
    x = self.norm(x)
    x = residual + x
    residual = x
    x = self.block.norm(x)
    return residual + x
"""
    assert found(source) == [("post", "norm", 3, 3, "residual", "x")]
    assert found(source, norms=("block.norm",)) == [("pre", "block.norm", 3, 5, "residual", "x")]


def test_inside_a_branch_of_the_code():
    source = """def forward(self, x):
    for _ in range(2):
        if self.flag:
            x = x + self.branch(x)
            y = self.norm(x)
    return y
"""
    assert found(source) == [("pre", "norm", 3, 4, "x", "self.branch(x)")]


@pytest.mark.parametrize(
    "body",
    [
        "x = r + x\n    x = x * 2\n    x = self.norm(x)",  # something between
        "x = r + x\n    r = self.norm(y)",  # the norm reads something else
        "x = r + x\n    x = y\n    z = self.norm(x)",  # the sum is replaced before the norm
        "x = r - x\n    x = self.norm(x)",
        "x += r\n    x = self.norm(x)",  # in place
        "x = r + x\n    x = self.norm(x, r)",
        "x = r + x\n    x = self.norm(x, out=r)",
        "x = r + x\n    x = norm(x)",
        "x = r + x\n    x = self.norm[0](x)",
        "x = f(r) + g(x)\n    x = self.norm(x)",  # nothing says which one is the residual
        "x = r + (q := x)\n    x = self.norm(x)",
        "def inner(self, r, x):\n        x = r + x\n        x = self.norm(x)",
        "x = self.norm(x)\n    x = r + r",
    ],
)
def test_not_a_site(body):
    assert found(f"def forward(self, r, x, y):\n    {body}\n    return x\n") == []


class Layer(nn.Module):
    """Every order once, with names that must keep their values."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.branch = nn.Linear(8, 8)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        residual = x
        x = self.branch(x)
        x = residual + x
        residual = x
        kept = residual
        x = self.norm(x)
        y = self.last(self.branch(x))
        y = y + residual
        z = self.norm(self.branch(y) + y)
        return x, y, z, kept, residual, sorted(n for n in locals() if n not in ("self", "__class__"))


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def statement_sites(model):
    return [site for site in discover(model) if site.kind == "statement"]


def test_values_of_all_names_are_those_of_the_original():
    torch.manual_seed(0)
    model = Holder()
    sites = statement_sites(model)
    assert [(s.symbol, s.detail["order"]) for s in sites] == [("norm", "pre"), ("last", "post"), ("norm", "pre")]
    layer, x = model.layers[1], torch.randn(3, 8)
    expected = layer(x)
    names = {injected_name(site): original(site) for site in sites}
    install(layer, "forward", rebind(current(layer), names=names, transform=transformer(sites)))
    got = layer(x)
    assert got[-1] == expected[-1]
    for a, b in zip(got[:-1], expected[:-1], strict=True):
        assert torch.equal(a, b)


def test_the_replacement_gets_residual_and_branch():
    torch.manual_seed(0)
    model = Holder()
    _, post, pre = statement_sites(model)
    layer, x, seen = model.layers[0], torch.randn(3, 8), {}

    def replacement(site):
        def call(module, residual, hidden_states):
            seen[site.symbol] = (module, residual, hidden_states)
            return original(site)(module, residual, hidden_states)

        return call

    names = {injected_name(site): replacement(site) for site in (post, pre)}
    method = rebind(current(layer), names=names, transform=transformer([post, pre]))
    _, y, z, *_ = method(layer, x)
    assert seen["last"][0] is layer and seen["norm"][1] is y
    assert torch.equal(seen["norm"][2], layer.branch(y))
    assert torch.equal(y, layer.last(seen["last"][2]) + seen["last"][1])
    assert torch.equal(z, layer.norm(y + seen["norm"][2]))


def test_a_site_is_replaced_once():
    model = Holder()
    sites = statement_sites(model)
    names = {injected_name(site): original(site) for site in sites}
    once = rebind(current(model.layers[0]), names=names, transform=transformer(sites))
    with pytest.raises(RebindError, match=r"`layers\.\*\.forward:norm#1`: its statements are not in the method"):
        rebind(once, names=names, transform=transformer(sites))
    for site in sites:
        with pytest.raises(RebindError, match="replaced already"):
            rebind(current(model.layers[0]), names=names, transform=transformer([site, site]))


def test_sites_can_be_replaced_one_after_the_other():
    model = Holder()
    layer, x = model.layers[0], torch.randn(3, 8)
    expected, method = layer(x), current(model.layers[0])
    for site in statement_sites(model):
        method = rebind(method, names={injected_name(site): original(site)}, transform=transformer([site]))
    assert all(torch.equal(a, b) for a, b in zip(method(layer, x)[:-1], expected[:-1], strict=True))


@pytest.mark.parametrize("spec", TYPES)
def test_real_layers_give_the_same_bits(spec):
    model = load(spec, dtype=torch.bfloat16).model
    sites = statement_sites(model)
    assert sites
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = model(ids).logits
        counted, undos = [], []
        by_method = {}
        for site in sites:
            for instance in site.instances:
                by_method.setdefault((instance, site.method), []).append(site)
        for (instance, name), held in by_method.items():
            module = model.get_submodule(instance)

            def counting(function, site):
                return lambda *args: (counted.append(site.key), function(*args))[1]

            names = {injected_name(site): counting(original(site), site) for site in held}
            method = rebind(current(module, name), names=names, transform=transformer(held))
            undos.append(install(module, name, method))
        assert torch.equal(model(ids).logits, expected)
        assert len(counted) == sum(len(site.instances) for site in sites)
        for undo in undos:
            undo()
        counted.clear()
        assert torch.equal(model(ids).logits, expected) and not counted


def test_both_orders_are_among_the_real_layers():
    orders = {site.detail["order"] for spec in TYPES[:2] for site in statement_sites(load(spec).model)}
    assert orders == {"pre", "post"}
