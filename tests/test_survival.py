"""What must survive a graft: other models, identity, hooks, adapters, copies, training, generation.

Each test runs on several architectures, with the reference of every recognised Definition seated as its Solution, so
that the outcome must equal the original's.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import TEXTS, generate, load, logits, make_graft, prompt
from torch import nn

from kernelgraft import models
from kernelgraft.patch import Applied, apply, find_applied
from kernelgraft.records import Graft

ARCHITECTURES = ("llama", "qwen3", "gemma2", "olmo2", "phi3", "gpt_neox", "cohere", "starcoder2")
"""Between them: grouped heads, q/k norms, four norms a layer, norms after, packed gate and up, partial and interleaved
rotary embeddings, layer norms, parallel branches, biases, tied embeddings."""
FEW = ("qwen3", "gemma2", "gpt_neox")

# Other packages' own warnings, in code that a test calls on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@dataclass(frozen=True)
class Case:
    graft: Graft
    exact: bool
    """True if every reference reproduced the original bit for bit."""

    def close(self, got: Any, wanted: Any) -> None:
        if self.exact:
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@functools.cache
def case(name: str) -> Case:
    graft = make_graft(load(name))
    assert graft.accepted, f"nothing recognised in {name}"
    return Case(graft, all(d.meta.reference_error == 0.0 for d in graft.definitions.values()))


def calls(applied: Applied) -> int:
    return sum(sum(row["calls"].values()) for row in applied.report())


def fallbacks(applied: Applied) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in applied.report():
        for reason, count in row["fallbacks"].items():
            found[reason] = found.get(reason, 0) + count
    return found


def snapshot(model: nn.Module) -> dict[str, dict[str, int]]:
    """Identity of every attribute of every module."""
    return {path: {name: id(value) for name, value in vars(m).items()} for path, m in model.named_modules()}


def everything(loaded: Any, model: nn.Module) -> dict[str, Any]:
    """What a model does in the ways that people use it."""
    ids = prompt(loaded)
    padded, mask = models.left_padded(loaded, TEXTS)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True)
        positions = torch.stack([torch.arange(5), torch.arange(3, 8)])
        return {
            "dynamic": generate(model, ids),
            "static": generate(model, ids, cache_implementation="static"),
            "padded": generate(model, padded, mask),
            "padded logits": model(padded, attention_mask=mask).logits[mask.bool()],
            "hidden states": torch.stack(states.hidden_states),
            "positions per row": model(ids[:, :5].repeat(2, 1), position_ids=positions).logits,
            "last logits": model(ids, logits_to_keep=1).logits,
            "one token": model(ids[:, :1]).logits,
            "embeddings": model(inputs_embeds=model.get_input_embeddings()(ids)).logits,
        }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_grafted_model_does_what_the_original_does_in_every_use(name: str) -> None:
    loaded, this = load(name), case(name)
    before = everything(loaded, loaded.model)
    with apply(this.graft, loaded.model, check_reach=True) as applied:
        during = everything(loaded, loaded.model)
        assert calls(applied) > 0
        assert not applied.unreached()
    after = everything(loaded, loaded.model)
    for use, wanted in before.items():
        this.close(during[use], wanted)
        assert torch.equal(after[use], wanted), use


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_another_model_of_the_class_stays_as_it_was(name: str) -> None:
    first, second, this = load(name, seed=1), load(name, seed=2), case(name)
    second.model.config = first.model.config  # shared, as between a student and its teacher
    ids = prompt(second)
    before, state = logits(second.model, ids), snapshot(second.model)
    classes = {type(m) for m in first.model.modules()}
    dictionaries = {c: dict(vars(c)) for c in classes}
    modules = {inspect.getmodule(c) for c in classes}
    spaces = {m: dict(vars(m)) for m in modules if m}
    config = copy.deepcopy(first.model.config.to_dict())
    with apply(this.graft, first.model) as applied:
        logits(first.model, ids)
        counted = calls(applied)
        assert counted > 0
        assert torch.equal(logits(second.model, ids), before)
        assert torch.equal(logits(load(name, seed=2).model, ids), before)
        assert calls(applied) == counted
        assert snapshot(second.model) == state
        assert {c: dict(vars(c)) for c in classes} == dictionaries
        for module, space in spaces.items():
            assert dict(vars(module)) == space, module
        assert first.model.config.to_dict() == config


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_revert_restores_every_attribute_by_identity(name: str) -> None:
    loaded, this = load(name), case(name)
    before = snapshot(loaded.model)
    applied = apply(this.graft, loaded.model)
    assert snapshot(loaded.model) != before
    logits(loaded.model, prompt(loaded))
    applied.revert()
    assert snapshot(loaded.model) == before
    applied.revert()
    assert snapshot(loaded.model) == before
    assert find_applied(loaded.model) is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_signature_class_parameters_and_names_stay(name: str) -> None:
    loaded, this = load(name), case(name)
    model = loaded.model

    def looks(model: nn.Module) -> dict[str, Any]:
        return {
            "signatures": {p: inspect.signature(m.forward) for p, m in model.named_modules()},
            "names": {
                p: (m.forward.__name__, m.forward.__qualname__, m.forward.__doc__) for p, m in model.named_modules()
            },
            "classes": {p: type(m) for p, m in model.named_modules()},
            "parameters": [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)],
            "buffers": [(n, id(b)) for n, b in model.named_buffers(remove_duplicate=False)],
            "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,  # type: ignore[operator]
            "text": repr(model),
            "state": {k: v.data_ptr() for k, v in model.state_dict().items()},
        }

    before = looks(model)
    with apply(this.graft, model):
        during = looks(model)
        for what, wanted in before.items():
            assert during[what] == wanted, what


@pytest.mark.parametrize("name", FEW)
def test_weights_loaded_later_are_used(name: str, tmp_path: Path) -> None:
    loaded, other, this = load(name, seed=1), load(name, seed=2), case(name)
    ids = prompt(loaded)
    wanted = logits(other.model, ids)
    with apply(this.graft, loaded.model):
        loaded.model.load_state_dict(other.model.state_dict())
        this.close(logits(loaded.model, ids), wanted)
        loaded.model.save_pretrained(tmp_path)
    again = type(loaded.model).from_pretrained(tmp_path)
    assert find_applied(again) is None
    assert torch.equal(logits(again, ids), wanted)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_deep_copy_is_grafted_by_itself(name: str) -> None:
    loaded, this = load(name), case(name)
    model, ids = loaded.model, prompt(loaded)
    wanted, pristine = logits(model, ids), snapshot(model)
    applied = apply(this.graft, model)
    twin = copy.deepcopy(model)
    other = find_applied(twin)
    assert other is not None
    assert other is not applied
    assert find_applied(model) is applied

    with torch.no_grad():  # the copy computes with its own weights
        for parameter in twin.parameters():
            parameter.mul_(1.25)
    changed = logits(twin, ids)
    assert not torch.allclose(changed, wanted)
    this.close(logits(model, ids), wanted)

    applied.revert()
    assert snapshot(model) == pristine
    counted = calls(other)
    assert torch.equal(logits(twin, ids), changed)
    assert calls(other) > counted, "the copy lost its patches with the first model's"
    other.revert()
    assert find_applied(twin) is None
    this.close(logits(twin, ids), changed)
    assert {p: set(vars(m)) for p, m in twin.named_modules()} == {p: set(vars(m)) for p, m in model.named_modules()}

    # And the other way round.
    applied = apply(this.graft, model)
    twin = copy.deepcopy(model)
    other = find_applied(twin)
    assert other is not None
    other.revert()
    counted = calls(applied)
    this.close(logits(model, ids), wanted)
    assert calls(applied) > counted
    this.close(logits(twin, ids), wanted)


@pytest.mark.parametrize("name", FEW)
def test_a_pickled_model_is_the_original(name: str) -> None:
    loaded, this = load(name), case(name)
    ids = prompt(loaded)
    wanted = logits(loaded.model, ids)
    applied = apply(this.graft, loaded.model)
    twin = pickle.loads(pickle.dumps(loaded.model))
    counted = calls(applied)
    assert torch.equal(logits(twin, ids), wanted)
    assert calls(applied) == counted
    assert find_applied(twin) is None
    apply(this.graft, twin).revert()


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, ids.numel()).view(*ids.shape, 1)  # no two tokens weigh the same
    (model(ids, use_cache=False).logits.log_softmax(-1) * weights).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_gives_the_same_gradients(name: str) -> None:
    loaded, this = load(name), case(name)
    model, ids = loaded.model.train(), prompt(loaded)
    wanted = gradients(model, ids)
    with apply(this.graft, model) as applied:
        got = gradients(model, ids)
        assert calls(applied) > 0
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", FEW)
def test_a_solution_without_gradients_leaves_training_to_the_original(name: str) -> None:
    from kernelgraft.records import Guard

    loaded = load(name)
    graft = make_graft(loaded, guard=Guard(autograd=False))
    model, ids = loaded.model.train(), prompt(loaded)
    wanted = gradients(model, ids)
    with apply(graft, model) as applied:
        got = gradients(model, ids)
        assert all(torch.equal(got[key], wanted[key]) for key in wanted)
        served = calls(applied)
        assert any("needs a gradient" in reason for reason in fallbacks(applied))
        logits(model.eval(), ids)
        assert calls(applied) > served


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradient_checkpointing_still_runs_each_layer_twice(name: str) -> None:
    loaded, this = load(name), case(name)
    model, ids = loaded.model.train(), prompt(loaded)
    wanted = gradients(model, ids)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    seen: list[int] = []
    for layer in layers:
        first = next(m for m in layer.modules() if isinstance(m, nn.Linear))
        first.register_forward_pre_hook(lambda *_: seen.append(1))
    with apply(this.graft, model):
        model.gradient_checkpointing_enable()
        got = gradients(model, ids)
        assert len(seen) == 2 * len(layers)
        model.gradient_checkpointing_disable()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def hooked(model: nn.Module) -> tuple[list[int], Callable[[], None]]:
    """An accelerate hook on every module that is not a plain layer; the list grows with each call."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    seen: list[int] = []

    class Counting(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            return args, kwargs

    chosen = [
        m for m in model.modules() if m is not model and not isinstance(m, (nn.ModuleList, nn.Linear, nn.Embedding))
    ]
    for module in chosen:
        add_hook_to_module(module, Counting())
    return seen, lambda: [remove_hook_from_module(m) for m in chosen] and None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_accelerate_hooks_attached_before_and_after_are_called(name: str) -> None:
    loaded, this = load(name), case(name)
    model, ids = loaded.model, prompt(loaded)
    wanted = logits(model, ids)

    seen, remove = hooked(model)
    logits(model, ids)
    expected = len(seen)
    assert expected > 0
    under = snapshot(model)
    applied = apply(this.graft, model)
    seen.clear()
    this.close(logits(model, ids), wanted)
    assert len(seen) == expected, "hooks attached before are lost"
    applied.revert()
    assert snapshot(model) == under
    remove()

    applied = apply(this.graft, model)
    seen, remove = hooked(model)
    this.close(logits(model, ids), wanted)
    assert len(seen) == expected, "hooks attached after are lost"
    assert calls(applied) > 0
    seen.clear()
    applied.revert()  # under the hooks
    counted = calls(applied)
    assert torch.equal(logits(model, ids), wanted)
    assert len(seen) == expected
    assert calls(applied) == counted
    remove()
    assert torch.equal(logits(model, ids), wanted)

    applied = apply(this.graft, model)
    seen, remove = hooked(model)
    remove()  # first the hooks, then the graft
    this.close(logits(model, ids), wanted)
    assert calls(applied) > 0
    applied.revert()
    assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("order", ["before", "after"])
def test_offloaded_weights_are_there_when_a_patch_reads_them(name: str, order: str) -> None:
    from accelerate import cpu_offload

    loaded, this = load(name), case(name)
    model, ids = loaded.model, prompt(loaded)
    wanted = logits(model, ids)
    device = torch.device("cpu")
    if order == "before":
        graft = this.graft.model_copy(update={"model": this.graft.model.model_copy(update={"device": "meta"})})
        cpu_offload(model, execution_device=device)
        applied = apply(graft, model)
    else:
        applied = apply(this.graft, model)
        cpu_offload(model, execution_device=device)
    this.close(logits(model, ids), wanted)
    assert calls(applied) > 0


def with_adapter(model: nn.Module, **options: Any) -> nn.Module:
    """LoRA on every linear layer, with weights that are not zero and the same each time."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(model, config)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_an_adapter_keeps_its_effect(name: str, order: str) -> None:
    plain, loaded, this = load(name), load(name), case(name)
    ids = prompt(loaded)
    bare = logits(plain.model, ids)
    adapted = with_adapter(plain.model)
    wanted = logits(adapted, ids)
    assert not torch.allclose(wanted, bare, atol=1e-3)
    names = list(adapted.state_dict())
    if order == "before":
        model = with_adapter(loaded.model)
        applied = apply(this.graft, model)
    else:
        applied = apply(this.graft, loaded.model)
        model = with_adapter(loaded.model)
    assert find_applied(model) is applied
    this.close(logits(model, ids), wanted)
    assert calls(applied) > 0
    assert list(model.state_dict()) == names
    got, expected = gradients(model.train(), ids), gradients(adapted.train(), ids)
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], rtol=1e-4, atol=1e-6)
    with model.disable_adapter():  # type: ignore[operator]
        this.close(logits(model.eval(), ids), bare)
    applied.revert()
    assert torch.equal(logits(model, ids), logits(adapted.eval(), ids))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("order", ["before", "after"])
def test_norms_that_an_adapter_trains_are_the_ones_that_compute(name: str, order: str) -> None:
    loaded, plain, this = load(name), load(name), case(name)
    ids = prompt(loaded)
    final = [n.rpartition(".")[2] for n, m in plain.model.named_modules() if "Norm" in type(m).__name__]
    options = {"modules_to_save": sorted(set(final))}

    def trained(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "modules_to_save" in key:
                    parameter.add_(0.5)
        return model

    wanted = logits(trained(with_adapter(plain.model, **options)), ids)
    if order == "before":
        model = trained(with_adapter(loaded.model, **options))
        applied = apply(this.graft, model)
    else:
        applied = apply(this.graft, loaded.model)
        model = trained(with_adapter(loaded.model, **options))
    this.close(logits(model, ids), wanted)
    assert calls(applied) > 0
    applied.revert()
    assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize("name", FEW)
def test_attention_weights_and_switched_implementations(name: str) -> None:
    loaded, plain, this = load(name), load(name), case(name)
    ids = prompt(loaded)
    applied = apply(this.graft, loaded.model)
    for model in (plain.model, loaded.model):
        model.set_attn_implementation("eager")
    got, wanted = (m(ids, output_attentions=True) for m in (loaded.model, plain.model))
    this.close(got.logits, wanted.logits)
    assert len(got.attentions) == len(wanted.attentions) > 0
    for a, b in zip(got.attentions, wanted.attentions, strict=True):
        this.close(a, b)
    applied.revert()


@pytest.mark.parametrize("name", FEW)
def test_another_dtype_is_left_to_the_original_and_counted(name: str) -> None:
    loaded, plain, this = load(name), load(name), case(name)
    ids = prompt(loaded)
    wanted = logits(plain.model.to(torch.bfloat16), ids)
    with apply(this.graft, loaded.model) as applied:
        got = logits(loaded.model.to(torch.bfloat16), ids)
        assert any("dtype bfloat16" in reason for reason in fallbacks(applied))
    this.close(got, wanted)


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_sees_the_graft_come_and_go(name: str) -> None:
    loaded, this = load(name), case(name)
    model, ids = loaded.model, prompt(loaded)
    wanted = logits(model, ids, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(logits(compiled, ids, use_cache=False), wanted)
    spoilt = spoil(this.graft)
    applied = apply(spoilt, compiled)
    eager = logits(model, ids, use_cache=False)
    assert not torch.allclose(eager, wanted)
    torch._dynamo.utils.counters.clear()
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), eager)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert find_applied(compiled) is applied
    applied.revert()
    assert torch.equal(logits(compiled, ids, use_cache=False), wanted)


def spoil(graft: Graft) -> Graft:
    """The same graft with Solutions that add a little to what they return, so that one sees whether they run."""
    solutions = {}
    for key, solution in graft.solutions.items():
        source = solution.sources[0]
        text = source.content.replace("def run(", "def honest(") + (
            "\n\ndef run(*inputs):\n    outputs = honest(*inputs)\n"
            "    return tuple(o + 0.125 for o in outputs) if isinstance(outputs, tuple) else outputs + 0.125\n"
        )
        solutions[key] = solution.model_copy(update={"sources": (source.model_copy(update={"content": text}),)})
    return graft.model_copy(update={"solutions": solutions})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_spoilt_solutions_change_the_outcome(name: str) -> None:
    """The tests above are worth something only if what is seated is what runs."""
    loaded, this = load(name), case(name)
    ids = prompt(loaded)
    wanted = logits(loaded.model, ids)
    for patch in this.graft.accepted:
        alone = spoil(this.graft.model_copy(update={"patches": (patch,)}))
        with apply(alone, loaded.model) as applied:
            assert not torch.allclose(logits(loaded.model, ids), wanted), applied.report()
