"""Recording: what is kept of a call, that nothing else changes, and what happens when a run fails."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, GenerationConfig

from kernelgraft.errors import RebindError
from kernelgraft.models import left_padded, load, prompt_ids
from kernelgraft.sites import Run, capture, discover, generate
from kernelgraft.sites.calls import copied, differ

TYPES = ("config:qwen3", "config:gemma2", "config:gpt2")


def scale(x, factor, bias=None):
    return x * factor


def overwrite(x):
    return x.mul_(2.0)


def tables(x, table):
    return x + table["a"][0]


def keep(x, seen):
    seen.append(x)
    return x


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.broken, self.rows = False, 9

    def forward(self, x, *, table):
        residual = x
        x = scale(x.clone(), 0.5, bias=None)
        x = residual + x
        x = self.norm(x)
        if self.broken:
            raise ValueError("out of order")
        if x.shape[0] > self.rows:
            raise ValueError("too many rows")
        x = tables(x, table)
        return overwrite(x)


class Fake(nn.Module):
    """As much of a model as `generate` needs: layers, a step per token, and a mode that a run can break."""

    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.generation_config = GenerationConfig()
        self.asked = []
        self.no_static = False

    def forward(self, input_ids):
        x = torch.nn.functional.one_hot(input_ids % 4, 4).float()
        # A slice and an expanded tensor, whose strides must be kept.
        table = {"a": [torch.arange(8.0).reshape(4, 2)[:, 0].expand(1, 1, 4), "text"]}
        for layer in self.layers:
            x = layer(x, table=table)
        self.last_seen = x
        return x

    def generate(self, input_ids, **options):
        self.asked.append((options, self.training, torch.is_grad_enabled()))
        if self.no_static and options.get("cache_implementation") == "static":
            raise ValueError("no static cache here\nsecond line")
        tokens = input_ids
        step = input_ids
        for _ in range(options["max_new_tokens"]):
            step = self(step)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, step], 1)
        return tokens


IDS = torch.tensor([[1, 2, 3]])


def run(**changes):
    return Run(**{"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "new_tokens": 3, **changes})


def fake(**kwargs):
    torch.manual_seed(0)
    return Fake(**kwargs)


def state(model):
    """Every attribute of every module, by identity."""
    return {
        (name, holder, key): id(value)
        for name, module in model.named_modules()
        for holder, held in (("", vars(module)), ("p", module._parameters), ("b", module._buffers))
        for key, value in held.items()
    }


def test_every_kind_of_site_is_recorded():
    model = fake()
    sites = discover(model)
    got = capture(model, sites, [run()])
    assert {s.key for s in sites} == set(got.calls) == set(got.counts)
    function = got.calls["layers.*.forward:scale"]
    assert [(c.regime, tuple(c.args[0].shape), c.args[1], c.kwargs) for c in function] == [
        ("prefill", (1, 3, 4), 0.5, {"bias": None}),
        ("decode", (1, 1, 4), 0.5, {"bias": None}),
    ]
    assert all(c.instance == "layers.0" and c.module is model.layers[0] and c.original is scale for c in function)
    statement = got.calls["layers.*.forward:norm"][0]
    assert torch.equal(statement.output[0], statement.args[0] + statement.args[1])
    assert torch.equal(statement.output[1], statement.output[0] * model.layers[0].norm.weight)
    module = got.calls["layers.*"][0]
    assert set(module.kwargs) == {"table"} and module.original is Layer.forward
    assert got.tokens[0].shape == (1, 6)


def test_calls_of_all_instances_are_counted():
    model = fake(layers=3)
    got = capture(model, discover(model), [run(), run(new_tokens=1)])
    for key in ("layers.*", "layers.*.norm", "layers.*.forward:scale", "layers.*.forward:norm"):
        assert got.counts[key] == {"prefill": 6, "decode": 6}, key
        assert [c.regime for c in got.calls[key]] == ["prefill", "decode"], key


@pytest.mark.parametrize("spec", TYPES)
def test_replaying_the_original_gives_the_output(spec):
    loaded = load(spec)
    got = capture(loaded.model, discover(loaded.model), runs(loaded))
    replayed = 0
    for site in discover(loaded.model):
        for call in got.calls[site.key]:
            lead = (call.module,) if site.kind in ("module", "statement") else ()
            if site.kind == "module" and list(call.module.children()):
                continue  # larger modules take a cache, which has moved on
            with torch.no_grad():
                output = call.original(*lead, *call.args, **call.kwargs)
            for a, b in zip(leaves(output), leaves(call.output), strict=True):
                assert torch.equal(a, b), site.key
            replayed += 1
    assert replayed > 10


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, (tuple, list)) else []


def runs(loaded):
    ids = prompt_ids(loaded, "The capital")
    padded, mask = left_padded(loaded, ["The capital", "The"])
    return [
        Run(ids, torch.ones_like(ids), 3),
        Run(padded, mask, 3, padded=True),
        Run(ids, torch.ones_like(ids), 3, cache="static"),
    ]


@pytest.mark.parametrize("spec", TYPES)
def test_a_real_model_is_left_as_it_was(spec):
    loaded = load(spec)
    model = loaded.model
    before = state(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    plain = [generate(model, r) for r in runs(loaded)]
    got = capture(model, discover(model), runs(loaded))
    assert not got.skipped
    assert all(torch.equal(a, b) for a, b in zip(plain, got.tokens, strict=True))
    assert state(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not model._forward_pre_hooks


def test_the_model_is_left_as_it_was_after_an_exception_in_the_middle():
    model = fake()
    model.train()
    model.layers[1].eval()
    before = state(model)
    modes = [m.training for m in model.modules()]
    sites = discover(model)
    model.layers[1].broken = True
    with pytest.raises(ValueError, match="out of order"):
        capture(model, sites, [run()])
    model.layers[1].broken = False
    assert state(model) == before and [m.training for m in model.modules()] == modes
    assert not model._forward_pre_hooks


def test_generation_is_greedy_and_quiet(capsys):
    model = fake()
    model.generation_config.eos_token_id = [7, 8]
    capture(model, discover(model), [run(), run(cache="static")])
    (first, training, grad), (static, *_) = model.asked
    assert (training, grad) == (False, False)
    assert first["do_sample"] is False and first["min_new_tokens"] == first["max_new_tokens"] == 3
    assert first["pad_token_id"] == 7 and "cache_implementation" not in first
    assert static["cache_implementation"] == "static" and static["disable_compile"] is True
    assert model.training
    assert capsys.readouterr().out == ""


def test_a_change_in_place_is_seen_and_the_value_before_it_kept():
    model = fake()
    got = capture(model, discover(model), [run()])
    call = got.calls["layers.*.forward:overwrite"][0]
    assert call.mutated == ("args[0]",)
    assert torch.equal(call.output, call.args[0] * 2)
    before = got.calls["layers.*.forward:tables"][0]
    assert torch.equal(before.output, call.args[0])  # as it was returned, not as it is now
    assert all(c.mutated == () for c in got.calls["layers.*.forward:scale"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_copies_are_equal_and_changes_are_seen(dtype):
    values = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(dtype)
    for tensor in (values, values.T, values[:, 1], values[0, 0], values[:0], values[0].expand(3, 2)):
        twin = copied([tensor])[0]
        assert (twin.stride() == tensor.stride() and twin.data_ptr() != tensor.data_ptr()) or not tensor.numel()
        assert not differ([tensor], [twin])
    other = copied(values)
    other[0, 0] = 1
    assert differ(values, other) and differ(values, values.T[:1]) and differ(values, None)


def test_nan_is_no_change_and_another_sign_of_zero_is():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert not differ(nan, nan.clone()) and differ(zero, -zero)


def test_a_list_that_grows_is_a_change_in_place():
    model = fake()

    class Collects(Layer):
        def forward(self, x, *, table):
            return keep(x, seen=[x])

    model.layers = nn.ModuleList([Collects()])
    got = capture(model, discover(model), [run()])
    call = got.calls["layers.*.forward:keep"][0]
    assert call.mutated == ("kwargs.seen",) and len(call.kwargs["seen"]) == 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_steps_under_an_adapter_are_decode():
    from peft import LoraConfig, get_peft_model

    loaded = load("config:qwen3")
    model = get_peft_model(loaded.model, LoraConfig(r=2, target_modules=["q_proj"]))
    ids = prompt_ids(loaded, "The")
    sites = [site for site in discover(model) if site.kind == "attention"]
    (counts,) = capture(model, sites, [Run(ids, torch.ones_like(ids), 3)]).counts.values()
    layers = len(sites[0].instances)
    assert counts == {"prefill": layers, "decode": 2 * layers}


def test_strides_are_kept():
    model = fake()
    got = capture(model, discover(model), [run()])
    call = got.calls["layers.*.forward:tables"][0]
    table = call.args[1]["a"][0]
    assert table.shape == (1, 1, 4) and table.stride() == torch.arange(8.0).reshape(4, 2)[:, 0].expand(1, 1, 4).stride()
    assert table.flatten().tolist() == [0.0, 2.0, 4.0, 6.0] and call.args[1]["a"][1] == "text"


def test_a_run_that_the_model_cannot_do_is_skipped_with_its_reason():
    model = fake()
    model.no_static = True
    before = state(model)
    sites = discover(model)
    alone = capture(model, sites, [run()])
    got = capture(model, sites, [run(), run(cache="static"), run(new_tokens=2)])
    assert got.skipped == {"static cache": "ValueError: no static cache here"}
    assert got.tokens[1] is None and got.tokens[0] is not None and got.tokens[2] is not None
    assert got.counts["layers.*"]["prefill"] == 2 * alone.counts["layers.*"]["prefill"]
    assert {k: v for k, v in state(model).items() if k[2] != "asked"} == {
        k: v for k, v in before.items() if k[2] != "asked"
    }


def test_a_run_that_fails_in_the_middle_leaves_no_calls():
    model = fake()
    model.layers[1].rows = 1
    sites = discover(model)
    two_rows = run(input_ids=IDS.expand(2, 3), padded=True)
    got = capture(model, sites, [two_rows])
    assert got.skipped == {"dynamic cache, left padded": "ValueError: too many rows"}
    assert not any(got.calls.values()) and not any(got.counts.values())
    after = capture(model, sites, [two_rows, run()])
    alone = capture(model, sites, [run()])
    assert after.counts == alone.counts
    assert {k: len(v) for k, v in after.calls.items()} == {k: len(v) for k, v in alone.calls.items()}


def test_failing_only_while_recorded_is_an_error():
    model = fake()
    sites = discover(model)

    def watchful(input_ids, **options):
        if "forward" in vars(model.layers[0]):
            raise ValueError("someone is looking")
        return Fake.generate(model, input_ids, **options)

    model.generate = watchful
    with pytest.raises(
        RebindError, match=r"`Fake` fails only while it is recorded \(static cache\): someone is looking"
    ):
        capture(model, sites, [run(cache="static")])


def test_the_first_instance_that_is_called_is_recorded():
    model = fake(layers=3)
    sites = discover(model)
    model.layers[0].forward = functools.partial(lambda x, table: x)
    model.forward = functools.partial(last_layers, model)
    got = capture(model, [s for s in sites if s.key == "layers.*.norm"], [run()])
    assert {c.instance for c in got.calls["layers.*.norm"]} == {"layers.1.norm"}


def last_layers(self, input_ids):
    x = torch.nn.functional.one_hot(input_ids % 4, 4).float()
    for layer in self.layers[1:]:
        x = layer(x, table={"a": [torch.zeros(4)]}).repeat(2, 1, 1)
    return x[:1]


def test_a_growing_cache_does_not_fill_the_memory():
    loaded = load("config:qwen3")
    ids = prompt_ids(loaded, "The capital")
    sites = [site for site in discover(loaded.model) if site.kind == "attention"]
    got = capture(loaded.model, sites, [Run(ids, torch.ones_like(ids), 12)])
    (calls,) = got.calls.values()
    assert [c.regime for c in calls] == ["prefill"] + ["decode"] * 4
    (counts,) = got.counts.values()
    layers = len(sites[0].instances)
    assert counts == {"prefill": layers, "decode": 11 * layers}


def test_attention_is_recorded_with_grouped_heads_and_a_mask():
    loaded = load("config:mixtral", dtype=torch.bfloat16)
    model = loaded.model
    interface = dict(AttentionInterface._global_mapping)
    (site,) = [site for site in discover(model) if site.kind == "attention"]
    got = capture(model, [site], runs(loaded))
    assert not got.skipped
    calls = got.calls[site.key]
    assert {(c.cache, c.padded) for c in calls} == {("dynamic", False), ("dynamic", True), ("static", False)}
    for call in calls:
        module, query, key, value, mask = call.args
        assert module is call.module is model.get_submodule(site.instances[0])
        assert query.dtype == torch.bfloat16
        assert query.shape[1] == model.config.num_attention_heads > key.shape[1] == model.config.num_key_value_heads
        assert key.shape == value.shape
        assert call.output[0].shape == (query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        assert "scaling" in call.kwargs
        if call.padded or (call.cache == "static" and call.regime == "decode"):
            assert mask is not None and mask.shape[-2:] == (query.shape[2], key.shape[2])
        if call.padded:
            blind = mask[-1, 0, -1] == 0 if mask.dtype == torch.bool else mask[-1, 0, -1] < 0
            assert blind.any() and not blind.all()  # the shorter row does not see its padding
    assert dict(AttentionInterface._global_mapping) == interface


def test_attention_of_a_padded_batch_is_kept_beside_one_of_the_same_shape():
    loaded = load("config:mixtral")
    loaded.model.set_attn_implementation("eager")  # which has a mask in either case
    padded, mask = left_padded(loaded, ["The capital", "The"])
    same = [Run(padded, torch.ones_like(mask), 2), Run(padded, mask, 2, padded=True)]
    (site,) = [site for site in discover(loaded.model) if site.kind == "attention"]
    calls = capture(loaded.model, [site], same).calls[site.key]
    assert [(c.regime, c.padded) for c in calls] == [
        ("prefill", False),
        ("decode", False),
        ("prefill", True),
        ("decode", True),
    ]
    assert not torch.equal(calls[0].args[4], calls[2].args[4])
    assert calls[0].original.__name__ == "eager_attention_forward"


def test_another_model_of_the_class_is_not_recorded():
    model, other = fake(), fake()
    sites = discover(model)
    seen = []

    class Talks(Norm):
        def forward(self, x):
            seen.append("forward" in vars(other.layers[0]))
            return super().forward(x)

    model.layers[1].norm = Talks()
    capture(model, sites, [run()])
    assert seen and not any(seen)


def test_random_numbers_of_the_caller_are_not_used_up():
    model = fake()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    capture(model, discover(model), [run()])
    assert torch.equal(torch.rand(3), expected)
