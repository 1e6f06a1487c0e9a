"""Which modules a key means; rules on the tensors of one place, there and back."""

from __future__ import annotations

from typing import Any

import layout_samples as samples
import pytest
import torch
from layout_samples import FUSED, MERGED_GATE_UP, MERGED_QKV, RENAME, loaded, tiny
from torch import nn
from transformers import Concatenate, WeightConverter
from transformers.conversion_mapping import WeightRenaming
from transformers.core_model_loading import MergeModulelist, Transpose, revert_weight_conversion

from kernelgraft.errors import ConflictError, UsageError
from kernelgraft.layouts.arguments import recover
from kernelgraft.layouts.matching import match, path_pattern, places, root_of
from kernelgraft.layouts.rules import SizedConcatenate, SizedSplit, resolve

MLP = loaded("MLP", samples.OneMLP, samples.OneMLPLayout)


def paths(model: nn.Module, *kernels: Any) -> list[tuple[str, ...]]:
    return [place.paths for place in places(model, kernels)]


def fusion(*parts: tuple[str, str]) -> Any:
    return loaded(parts, samples.RMSNormMLP, samples.RMSNormMLPLayout)


# --- paths ---


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (
            "model.layers.*.mlp",
            ["model.layers.0.mlp", "model.layers.11.mlp"],
            ["model.layers.0.1.mlp", "model.layers.mlp"],
        ),
        ("*.layers.*", ["model.layers.1"], ["model.layers", "model.layers.1.mlp"]),
        ("model.norm", ["model.norm"], ["modelxnorm", "model.norms"]),
        ("a.*_norm", ["a.q_norm", "a.post_norm"], ["a.q_norm.x", "a.norm"]),
        ("layers.*.attn.*", ["layers.0.attn.q"], ["layers.0.attn"]),
        ("a+.b", ["a+.b"], ["aa.b"]),
    ],
)
def test_a_star_is_one_segment_and_all_else_is_literal(pattern: str, yes: list[str], no: list[str]) -> None:
    compiled = path_pattern(pattern)
    assert all(compiled.fullmatch(path) for path in yes)
    assert not any(compiled.fullmatch(path) for path in no)


@pytest.mark.parametrize("pattern", ["model.**.mlp", "model..mlp", "", "model.layers."])
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="has the segment"):
        path_pattern(pattern)


# --- keys ---


def test_a_string_means_the_class_of_that_name_else_every_class_it_is_found_in() -> None:
    model = tiny()
    norms = [name for name, module in model.named_modules() if type(module).__name__ == "Qwen3RMSNorm"]
    assert len(norms) == 9
    for key in ("Qwen3RMSNorm", "RMSNorm", "^Qwen3.*Norm$"):
        assert [p[0] for p in paths(model, loaded(key, samples.EveryRMSNorm, samples.EveryRMSNormLayout))] == norms
    exact = type("RMSNorm", (nn.LayerNorm,), {})
    model.model.norm = exact(32)
    assert paths(model, RENAME) == [("model.norm",)], "an exact name is not a regex as well"


def test_a_fusion_means_parents_that_have_every_part() -> None:
    model = tiny()
    names = ("post_attention_layernorm", "mlp")
    wanted = [tuple(f"model.layers.{i}.{name}" for name in names) for i in (0, 1)]
    assert paths(model, FUSED) == wanted
    assert paths(root_of(torch.compile(model, backend="eager")), FUSED) == wanted
    assert (
        paths(model, fusion(("RMSNorm", "model.layers.1.post_attention_layernorm"), ("MLP", "*.*.*.mlp"))) == wanted[1:]
    )
    one = fusion(("Qwen3MLP", "model.layers.*.mlp"), ("^Qwen3RMSNorm$", "model.*.*.post_*_layernorm"))
    assert [p[::-1] for p in paths(model, one)] == wanted, "the order of the parts is that of the key"


def test_kinds_of_places_live_beside_each_other() -> None:
    model = tiny()
    found = match(model, [RENAME, FUSED, MERGED_QKV])
    assert len(found.places) == 9 - 2 + 2 + 2
    taken = [row for row in found.untouched if "fusion `RMSNormMLP` takes it" in row.reason]
    assert [row.path for row in taken] == [f"model.layers.{i}.post_attention_layernorm" for i in (0, 1)]
    assert [p.kernel for p in found.places[:1]] == [RENAME], "in the order of the kernels"


def test_a_layer_without_the_parts_is_told() -> None:
    model = tiny("qwen3_moe", mlp_only_layers=[1], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    found = match(model, [FUSED])
    assert [p.parent for p in found.places] == ["model.layers.1"]
    assert {row.path: row.reason for row in found.untouched} == {
        "model.layers.0.mlp": "its class is not `MLP`",
        "model.layers.0.post_attention_layernorm": "its parent lacks the other parts of the fusion",
    }


MISSED = {
    "a class nobody has": (
        loaded("RMSNorms", samples.EveryRMSNorm, samples.EveryRMSNormLayout),
        "near it: `Qwen3RMSNorm`",
    ),
    "a path nobody has": (
        fusion(("RMSNorm", "layers.*.input_layernorm"), ("MLP", "layers.*.mlp")),
        r"`model\.layers\.\*\.input_layernorm`",
    ),
    "another class": (
        fusion(
            ("RMSNorm", "model.layers.*.mlp"),
        ),
        "holds `Qwen3MLP`, no `RMSNorm`",
    ),
    "other parents": (
        fusion(("RMSNorm", "model.layers.*.self_attn.q_norm"), ("MLP", "model.layers.*.mlp")),
        "have no parent in common",
    ),
    "two children": (
        fusion(("RMSNorm", "model.layers.*.*_layernorm"), ("MLP", "model.layers.*.mlp")),
        "make the path exact",
    ),
    "twice the same": (fusion(("MLP", "model.layers.*.mlp"), ("MLP", "model.*.*.mlp")), "name each once"),
    "no regex": (loaded("RMS(Norm", samples.EveryRMSNorm), "no regular expression"),
}


@pytest.mark.parametrize(("kernel", "message"), MISSED.values(), ids=MISSED)
def test_a_key_that_means_nothing_says_what_is_near(kernel: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        places(tiny(), [kernel])
    assert "\n" not in str(caught.value)


def test_a_class_of_the_same_kind_is_near() -> None:
    with pytest.raises(UsageError, match="near it: `OlmoLayerNorm`"):
        places(tiny("olmo"), [RENAME])


def test_one_module_has_one_kernel() -> None:
    with pytest.raises(ConflictError, match=r"`model\.layers\.0\.mlp\.gate_proj`.*lies inside"):
        places(tiny(), [FUSED, MERGED_GATE_UP])
    with pytest.raises(ConflictError, match="lies inside"):
        places(tiny(), [MLP, MERGED_GATE_UP])
    with pytest.raises(ConflictError, match="keep one"):
        places(tiny(), [FUSED, samples.ADDED])
    with pytest.raises(ConflictError, match="make one of them the name"):
        places(tiny(), [RENAME, loaded("Norm", samples.EveryRMSNorm, samples.EveryRMSNormLayout)])
    with pytest.raises(UsageError, match="only modules that fusions take"):
        places(tiny(), [FUSED, MLP])


def test_the_name_of_a_class_goes_before_a_regex() -> None:
    model = tiny()
    model.model.norm = type("FinalRMSNorm", (nn.LayerNorm,), {})(32)
    exact = loaded("Qwen3RMSNorm", samples.EveryRMSNorm, samples.EveryRMSNormLayout)
    for kernels in ([RENAME, exact], [exact, RENAME]):
        found = match(model, kernels)
        assert [place.paths for place in found.places if place.kernel is RENAME] == [("model.norm",)]
        assert len(found.places) == 9 and len(found.untouched) == 8


# --- arguments ---


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2", "qwen3", "cohere", "gpt_neox"])
def test_arguments_are_read_back_from_every_norm(model_type: str) -> None:
    changes = {"layer_norm_eps": 3e-5} if model_type in ("cohere", "gpt_neox") else {"rms_norm_eps": 3e-5}
    model = tiny(model_type, **changes)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    assert norms
    for norm in norms:
        found = recover(norm)
        assert 3e-5 in found.values()
        again = type(norm)(**found)
        assert [p.shape for p in again.parameters()] == [p.shape for p in norm.parameters()]


class Derived(nn.Module):
    def __init__(self, width: int, factor: float, flag: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.scaled = factor * 2
        self.flag = flag


def test_an_argument_that_left_no_trace_is_named() -> None:
    with pytest.raises(UsageError, match="`factor` of `Derived`"):
        recover(Derived(3, 0.5))


class Linears(nn.Module):
    def __init__(self, wide: int, narrow: int, bias: bool = True, eps: float = 1e-6):
        super().__init__()
        self.up = nn.Linear(wide, narrow, bias=bias)
        self.table = nn.Parameter(torch.zeros(narrow, wide))
        self.epsilon = eps


def test_arguments_are_read_from_layers_and_shapes() -> None:
    assert recover(Linears(5, 3, bias=False, eps=2.0)) == {"wide": 5, "narrow": 3, "bias": False, "eps": 2.0}
    assert recover(Linears(5, 3)) == {"wide": 5, "narrow": 3, "bias": True, "eps": 1e-6}
    assert recover(nn.LayerNorm(4, eps=0.1, bias=False))["bias"] is False
    changed = Linears(5, 3)
    changed.up = nn.Linear(6, 3)
    with pytest.raises(UsageError, match="was changed after it was built"):
        recover(changed)


# --- rules ---


def tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name.replace("__", "."): torch.randn(shape) for name, shape in shapes.items()}


def round_trip(rules: list[Any], given: dict[str, torch.Tensor], config: Any = None) -> dict[str, torch.Tensor]:
    conversion = resolve(rules, list(given), config)
    made = conversion.forward(given)
    back = conversion.backward(made)
    assert back.keys() == given.keys()
    for key, value in given.items():
        assert torch.equal(back[key], value), key
    assert conversion.complete(made) == set(made)
    return made


def test_a_renamed_tensor_is_the_same_object() -> None:
    given = tensors(l__norm__weight=(3,), l__mlp__up__weight=(2, 3))
    made = round_trip([WeightRenaming("norm.weight", "norm.scale")], given)
    assert made["l.norm.scale"] is given["l.norm.weight"]
    assert made["l.mlp.up.weight"] is given["l.mlp.up.weight"]


def test_renamings_chain_before_one_converter() -> None:
    given = tensors(l__0__a__w=(2, 3), l__0__b__w=(4, 3))
    rules = [
        WeightConverter(["x.w", "y.w"], "xy.w", [Concatenate(dim=0)]),
        WeightRenaming("a.w", "m.w"),
        WeightRenaming("m.w", "x.w"),
        WeightRenaming("b.w", "y.w"),
    ]
    made = round_trip(rules, given)
    assert torch.equal(made["l.0.xy.w"], torch.cat([given["l.0.a.w"], given["l.0.b.w"]]))


@pytest.mark.parametrize("dim", [0, 1])
def test_plain_concatenate_comes_back_in_unequal_parts_as_views(dim: int) -> None:
    shapes = [(4, 6), (2, 6), (3, 6)] if dim == 0 else [(6, 4), (6, 2), (6, 3)]
    given = {f"l.{name}.w": torch.randn(shape) for name, shape in zip("qkv", shapes, strict=True)}
    rules = [WeightConverter(["q.w", "k.w", "v.w"], "q.qkv.w", [Concatenate(dim=dim)])]
    conversion = resolve(rules, list(given))
    made = conversion.forward(given)
    back = conversion.backward(made)
    whole = made["l.q.qkv.w"]
    for key, value in given.items():
        assert torch.equal(back[key], value)
        assert back[key].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("sizes", [(4, 2, 3), lambda config: config])
def test_a_sized_concatenate_comes_back_here_and_in_transformers(sizes: Any) -> None:
    given = {f"l.{name}.w": torch.randn(size, 6) for name, size in zip("qkv", (4, 2, 3), strict=True)}
    rules = [WeightConverter(["q.w", "k.w", "v.w"], "q.qkv.w", [SizedConcatenate(0, sizes)])]
    made = round_trip(rules, given, config=(4, 2, 3))
    model = nn.Module()
    model.config = (4, 2, 3)
    model._weight_conversions = rules
    saved = revert_weight_conversion(model, dict(made))
    assert saved.keys() == given.keys() and all(torch.equal(saved[key], given[key]) for key in given)


def test_sizes_that_are_not_those_of_the_parts_are_refused() -> None:
    given = tensors(q__w=(4, 6), k__w=(2, 6))
    rules = [WeightConverter(["q.w", "k.w"], "qk.w", [SizedConcatenate(0, (3, 3))])]
    with pytest.raises(UsageError, match=r"parts of sizes \[4, 2\], the rule says \[3, 3\]"):
        resolve(rules, list(given)).forward(given)
    assert isinstance(SizedSplit(1, (2,)).reverse_op, SizedConcatenate)


def test_several_operations_and_lists_come_back() -> None:
    given = {f"l.experts.{i}.{name}.w": torch.randn(3, 4) for i in range(11) for name in ("gate", "up")}
    rules = [
        WeightConverter(
            ["experts.*.gate.w", "experts.*.up.w"], "experts.gate_up", [MergeModulelist(dim=0), Concatenate(dim=1)]
        )
    ]
    made = round_trip(rules, given)
    assert made["l.experts.gate_up"].shape == (11, 6, 4)
    assert torch.equal(made["l.experts.gate_up"][10, :3], given["l.experts.10.gate.w"])
    assert round_trip([WeightConverter("a.w", "a.t", [Transpose(0, 1)])], tensors(l__a__w=(2, 3)))["l.a.t"].shape == (
        3,
        2,
    )


def test_anchors_and_dollars_come_back_under_the_names_that_were_there() -> None:
    given = tensors(l__norm__weight=(3,))
    made = round_trip([WeightRenaming(r"norm\.weight$", "norm.scale")], given)
    assert list(made) == ["l.norm.scale"]
    assert list(round_trip([WeightRenaming(r"^l\.norm\.weight", "l.norm.gain")], given)) == ["l.norm.gain"]


def test_the_rules_of_a_package_are_not_changed() -> None:
    rule = WeightRenaming("norm.weight", "norm.scale")
    resolve([rule], ["l.norm.weight"]).forward(tensors(l__norm__weight=(3,)))
    assert not rule.was_used()
    converter = samples.RMSNormMLPLayout.conversion_mapping[1]
    assert not converter.collected_tensors and not converter.layer_targets


def test_rules_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(UsageError, match="holds a `str`"):
        resolve(["norm.weight"], ["l.norm.weight"])
    merge = WeightConverter(["a.w", "b.w"], "ab.w", [Concatenate(dim=0)])
    with pytest.raises(UsageError, match=r"nothing here matches `b\.w`"):
        resolve([merge], ["l.a.w"])
    given = tensors(l__a__w=(3,), l__b__w=(3,))
    with pytest.raises(UsageError, match=r"two rules make `l\.c\.w`"):
        resolve([WeightRenaming("a.w", "c.w"), WeightRenaming("b.w", "c.w")], list(given)).forward(given)
    assert MERGED_QKV.rules[0].source_patterns[0] == "self_attn.q_proj.weight"
