"""Applying a graft: claims, conflicts, mismatches, one transaction, counters, reach."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import generate, load, logits, make_graft, prompt
from torch import nn

from kernelgraft import models
from kernelgraft.errors import ConflictError, GraftError, MismatchError, MissingExtraError, UnreachedError
from kernelgraft.patch import Applied, apply, check, find_applied, patch_label
from kernelgraft.patch import apply as apply_function
from kernelgraft.patch.claims import PATCHED
from kernelgraft.records import Graft, Guard, Patch, Seat
from kernelgraft.sites import current, innermost

apply_module = sys.modules["kernelgraft.patch.applying"]
NAME = "qwen3"


@functools.cache
def graft() -> Graft:
    return make_graft(load(NAME))


@pytest.fixture
def loaded() -> Any:
    return load(NAME)


def only(*families: str) -> Graft:
    return graft().model_copy(update={"patches": tuple(p for p in graft().patches if p.family in families)})


def changed(patch: Patch, **fields: Any) -> Patch:
    return patch.model_copy(update=fields)


def with_patches(*patches: Patch) -> Graft:
    return graft().model_copy(update={"patches": patches})


def row(applied: Applied, family: str) -> dict[str, Any]:
    return next(r for r in applied.report() if r["family"] == family)


def state(model: nn.Module) -> dict[str, dict[str, int]]:
    return {path: {name: id(value) for name, value in vars(m).items()} for path, m in model.named_modules()}


# --- the right model, here and now


def test_every_difference_is_named_in_one_line_with_the_next_step(loaded: Any) -> None:
    card = graft().model.model_copy(update={"config_sha256": "0" * 64, "transformers": "1.2.3"})
    versions = {**graft().machine.versions, "torch": "1.0"}
    machine = graft().machine.model_copy(update={"cpu": "another", "versions": versions})
    before = state(loaded.model)
    with pytest.raises(MismatchError) as caught:
        apply(graft().model_copy(update={"model": card, "machine": machine}), loaded.model)
    text = str(caught.value)
    for part in ("configuration", "transformers is", "`1.2.3`", "cpu is", "`another`", "torch is", "`1.0`"):
        assert part in text
    assert "\n" not in text
    assert f"`kernelgraft run {graft().model.name} --force`" in text
    assert state(loaded.model) == before


def test_a_model_of_another_class_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"Qwen3ForCausalLM.*LlamaForCausalLM"):
        apply(graft(), load("llama").model)


def test_another_configuration_of_the_class_is_refused(loaded: Any) -> None:
    loaded.model.config.rms_norm_eps = 0.25
    with pytest.raises(MismatchError, match="configuration is another"):
        apply(graft(), loaded.model)


@pytest.mark.parametrize(("field", "value"), [("dtype", "bfloat16"), ("device", "cuda"), ("type", "other")])
def test_another_dtype_device_or_type_is_refused(loaded: Any, field: str, value: str) -> None:
    card = graft().model.model_copy(update={field: value})
    with pytest.raises(MismatchError, match=f"{field} is"):
        apply(graft().model_copy(update={"model": card}), loaded.model)


def test_a_graft_measured_on_a_gpu_asks_for_that_gpu_and_not_for_the_processor() -> None:
    card = graft().model.model_copy(update={"device": "cuda"})
    there = graft().machine.model_copy(update={"gpu": "A", "compute_capability": "sm_90", "cpu": "x"})
    made = graft().model_copy(update={"model": card, "machine": there})
    assert not list(check.machine_differences(made, there.model_copy(update={"cpu": "y"})))
    (gpu,) = check.machine_differences(made, there.model_copy(update={"gpu": "B"}))
    assert "`B`" in gpu
    assert "`A`" in gpu


def test_versions_of_what_a_seated_solution_needs_count_and_others_do_not() -> None:
    name, solution = next(iter(graft().solutions.items()))
    spec = solution.spec.model_copy(update={"dependencies": ("triton",)})
    solutions = {**graft().solutions, name: solution.model_copy(update={"spec": spec})}
    there = graft().machine.model_copy(update={"versions": {**graft().machine.versions, "triton": "3.0", "peft": "0"}})
    made = graft().model_copy(update={"solutions": solutions, "machine": there})
    here = graft().machine.model_copy(update={"versions": {**there.versions, "triton": "4.0", "peft": "1"}})
    assert [d.partition(" ")[0] for d in check.machine_differences(made, here)] == ["triton"]


def rewritten(tmp_path: Path, function: Callable[..., Any], edit: Callable[[str], str]) -> Any:
    """The module of a function, loaded from a copy of its file with another text."""
    source = Path(innermost(function).__code__.co_filename).read_text()
    text = edit(source)
    assert text != source
    file = tmp_path / "upstream.py"
    file.write_text(re.sub(r"from \.\.\.", "from transformers.", re.sub(r"from \.(\w)", r"from upstream_\1", text)))
    spec = importlib.util.spec_from_file_location(function.__module__, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    fake = types.ModuleType("upstream_configuration_qwen3")
    fake.Qwen3Config = object  # type: ignore[attr-defined]
    sys.modules[fake.__name__] = fake
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[fake.__name__]
    return module


def test_a_parameter_renamed_upstream_is_refused(loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = type(loaded.model.model.norm)
    newer = rewritten(
        tmp_path,
        norm.forward,
        lambda text: text.replace(
            "def forward(self, hidden_states: torch.Tensor) ->", "def forward(self, states: torch.Tensor) ->"
        ),
    )
    monkeypatch.setattr(norm, "forward", getattr(newer, norm.__name__).forward)
    before = state(loaded.model)
    with pytest.raises(MismatchError, match=r"source of `model\.layers\.\*\.input_layernorm` is another"):
        apply(only("rms_norm"), loaded.model)
    assert state(loaded.model) == before


def test_a_function_changed_or_gone_upstream_is_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = type(loaded.model.model.layers[0].self_attn)
    scope = innermost(attention.forward).__globals__

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, axis: int = 1) -> Any:
        return q, k

    monkeypatch.setitem(scope, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    with pytest.raises(MismatchError, match=r"source of `.*apply_rotary_pos_emb` is another"):
        apply(only("rope"), loaded.model)

    def forward(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        return hidden_states, None

    monkeypatch.setattr(attention, "forward", forward)
    with pytest.raises(MismatchError, match="apply_rotary_pos_emb` is not there any more"):
        apply(only("rope"), loaded.model)


def test_a_method_that_something_else_replaced_is_refused(loaded: Any) -> None:
    loaded.model.model.layers[1].mlp.forward = lambda x: x
    with pytest.raises(MismatchError, match=r"`model\.layers\.1\.mlp\.forward` was replaced"):
        apply(only("gated_mlp"), loaded.model)


def test_a_module_that_is_missing_or_of_another_class_is_refused(loaded: Any) -> None:
    loaded.model.model.layers[1].mlp = nn.Identity()
    with pytest.raises(MismatchError, match=r"`model\.layers\.1\.mlp` is no `.*Qwen3MLP`"):
        apply(only("gated_mlp"), loaded.model)


# --- who holds what


def test_two_grafts_on_one_site_conflict_and_the_site_is_named(loaded: Any) -> None:
    ids = prompt(loaded)
    with apply(only("rope"), loaded.model) as first:
        before = state(loaded.model)
        with pytest.raises(ConflictError, match=r"`model\.layers\.0\.self_attn\.forward:apply_rotary_pos_emb`.*revert"):
            apply(only("rope", "rms_norm"), loaded.model)
        assert state(loaded.model) == before
        with apply(only("gated_mlp"), loaded.model) as second:
            assert find_applied(loaded.model) is second
            logits(loaded.model, ids)
            first.check()
            second.check()
        assert find_applied(loaded.model) is first
        for path, attributes in state(loaded.model).items():
            assert attributes.keys() == before[path].keys()
            assert all(before[path][k] == v for k, v in attributes.items() if k != apply_module.APPLIED)
    assert find_applied(loaded.model) is None


def test_grafts_that_come_off_in_the_order_they_went_on_leave_nothing(loaded: Any) -> None:
    before = state(loaded.model)
    first, second = apply(only("rope"), loaded.model), apply(only("gated_mlp"), loaded.model)
    first.revert()
    assert find_applied(loaded.model) is second
    second.revert()
    assert state(loaded.model) == before


def test_a_copied_part_of_a_grafted_model_is_known_as_patched(loaded: Any) -> None:
    other = load(NAME)
    with apply(only("gated_mlp"), loaded.model):
        other.model.model = copy.deepcopy(loaded.model.model)  # the body without the module that knows of the graft
    assert find_applied(other.model) is None
    with pytest.raises(ConflictError, match=r"model\.layers\.0\.mlp"):
        apply(only("gated_mlp"), other.model)


def test_two_patches_of_one_graft_on_one_site_conflict(loaded: Any) -> None:
    (mlp,) = only("gated_mlp").patches
    twin = changed(mlp, sites=tuple(s.model_copy(update={"instances": s.instances[1:]}) for s in mlp.sites))
    before = state(loaded.model)
    with pytest.raises(ConflictError, match=r"`model\.layers\.1\.mlp` is claimed by two patches, `gated_mlp`"):
        apply(with_patches(mlp, twin), loaded.model)
    assert state(loaded.model) == before


def test_a_norm_inside_a_claimed_statement_is_not_counted_on(loaded: Any) -> None:
    fused = next(s.symbol for p in only("residual_norm").patches for s in p.sites)
    norms = [p for p in only("rms_norm").patches if any(s.path.endswith(str(fused)) for s in p.sites)]
    contained = changed(norms[0], sites=tuple(s for s in norms[0].sites if s.path.endswith(str(fused))))
    both = with_patches(*only("residual_norm").patches, contained)
    with apply(both, loaded.model, check_reach=True) as applied:
        logits(loaded.model, prompt(loaded))
        assert row(applied, "rms_norm")["instances"] == 0
        assert row(applied, "rms_norm")["contained"] == len(loaded.model.model.layers)
        assert not applied.unreached()
    alone = with_patches(contained)
    with apply(alone, loaded.model, check_reach=True) as applied:
        logits(loaded.model, prompt(loaded))
        assert row(applied, "rms_norm")["instances"] == len(loaded.model.model.layers)


def test_a_statement_that_stays_the_originals_by_choice_still_uses_the_norms_kernel(loaded: Any) -> None:
    (fusion,) = only("residual_norm").patches
    seat = fusion.seats[0]
    small = seat.model_copy(update={"regime": "decode", "work": 1, "seated": False})
    mixed = changed(fusion, seats=(small, seat.model_copy(update={"work": 100})))
    (norms,) = [p for p in only("rms_norm").patches if any(s.path == "model.norm" for s in p.sites)]
    ids = prompt(loaded)
    with apply(with_patches(mixed, norms), loaded.model) as applied:
        layers = len(loaded.model.model.layers)
        logits(loaded.model, ids[:, :1])
        assert row(applied, "residual_norm")["original_by_choice"] == layers
        assert sum(row(applied, "rms_norm")["calls"].values()) == 2 * layers + 1
        applied.check()


# --- one transaction


@pytest.mark.parametrize("after", [0, 1, 5, 9])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle_puts_everything_back(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException]
) -> None:
    before, wanted = state(loaded.model), logits(loaded.model, prompt(loaded))
    real, done = apply_module.install, []

    def failing(*args: Any) -> Any:
        if len(done) == after:
            raise error("in the middle")
        done.append(args)
        return real(*args)

    monkeypatch.setattr(apply_module, "install", failing)
    with pytest.raises(error, match="in the middle"):
        apply(graft(), loaded.model)
    assert len(done) == after
    assert state(loaded.model) == before
    assert find_applied(loaded.model) is None
    assert torch.equal(logits(loaded.model, prompt(loaded)), wanted)
    monkeypatch.undo()
    apply(graft(), loaded.model).revert()
    assert state(loaded.model) == before


def test_a_solution_that_cannot_be_loaded_fails_before_any_change(loaded: Any) -> None:
    name = only("gated_mlp").patches[0].solutions[0]
    solution = graft().solutions[name]
    text = "import a_package_that_nobody_has\n" + solution.sources[0].content
    broken = solution.model_copy(update={"sources": (solution.sources[0].model_copy(update={"content": text}),)})
    before = state(loaded.model)
    with pytest.raises(MissingExtraError, match="a_package_that_nobody_has"):
        apply(graft().model_copy(update={"solutions": {**graft().solutions, name: broken}}), loaded.model)
    assert state(loaded.model) == before


def test_nothing_to_apply_is_an_error(loaded: Any) -> None:
    rejected = tuple(
        changed(
            p, status="rejected", reason="slow", seats=tuple(s.model_copy(update={"seated": False}) for s in p.seats)
        )
        for p in graft().patches
    )
    with pytest.raises(GraftError, match="no accepted patch"):
        apply(with_patches(*rejected), loaded.model)
    with pytest.raises(GraftError, match="no accepted patch"):
        apply(with_patches(), loaded.model)


def test_the_context_reverts_on_an_exception_too(loaded: Any) -> None:
    before = state(loaded.model)
    with pytest.raises(ZeroDivisionError), apply(graft(), loaded.model, check_reach=True):
        _ = 1 / 0
    assert state(loaded.model) == before


def test_a_method_replaced_later_is_said_and_can_be_reverted_afterwards(loaded: Any) -> None:
    before = state(loaded.model)
    applied = apply(graft(), loaded.model)
    mlp = loaded.model.model.layers[0].mlp
    ours = mlp.forward
    mlp.forward = lambda x: x
    with pytest.raises(GraftError, match="was replaced after kernelgraft"):
        applied.revert()
    assert applied.active
    assert find_applied(loaded.model) is applied
    mlp.forward = ours
    applied.revert()
    assert not applied.active
    assert state(loaded.model) == before


# --- what is installed


def test_instances_of_a_site_share_one_function_that_holds_no_module(loaded: Any) -> None:
    with apply(graft(), loaded.model):
        installed = [m.__dict__["forward"].__func__ for m in loaded.model.modules() if "forward" in m.__dict__]
        layers = loaded.model.model.layers
        assert layers[0].mlp.forward.__func__ is layers[1].mlp.forward.__func__
        assert layers[0].forward.__func__ is layers[1].forward.__func__
        assert installed
        for function in installed:
            assert getattr(function, PATCHED)
            assert not list(held_modules(function))


def held_modules(root: Any) -> Iterator[nn.Module]:
    """Modules that can be reached from a function through closures, attributes and containers."""
    seen, todo = {id(root)}, [root]
    while todo:
        for held in gc.get_referents(todo.pop()):
            if id(held) in seen or isinstance(held, (type, types.ModuleType)):
                continue
            seen.add(id(held))
            if isinstance(held, nn.Module):
                yield held
            ours = getattr(type(held), "__module__", "").startswith("kernelgraft")
            plain = (dict, list, tuple, types.FunctionType, types.MethodType, types.CellType, functools.partial)
            if (ours or isinstance(held, plain)) and "__builtins__" not in (held if isinstance(held, dict) else ()):
                todo.append(held)


def test_all_sites_of_one_method_go_into_one_replacement(loaded: Any) -> None:
    if not only("attention").patches:
        pytest.fail("the attention interface was not recognised")
    with apply(only("rope", "attention"), loaded.model, check_reach=True):
        attention = loaded.model.model.layers[0].self_attn
        keys = getattr(current(attention, "forward"), PATCHED)
        assert sorted(k.rpartition(":")[2] for k in keys) == ["ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb"]
        logits(loaded.model, prompt(loaded))


def test_the_attention_registry_and_the_configuration_are_not_written(loaded: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    names, config = dict(ALL_ATTENTION_FUNCTIONS), loaded.model.config._attn_implementation
    with apply(graft(), loaded.model):
        generate(loaded.model, prompt(loaded))
        assert dict(ALL_ATTENTION_FUNCTIONS) == names
        assert loaded.model.config._attn_implementation == config


# --- what is counted


def test_the_report_says_who_served_and_where(loaded: Any) -> None:
    ids, layers = prompt(loaded), len(loaded.model.model.layers)
    with apply(only("gated_mlp"), loaded.model) as applied:
        generate(loaded.model, ids)
        (only_row,) = applied.report()
    (patch,) = only("gated_mlp").patches
    assert only_row == {
        "family": "gated_mlp",
        "sites": ["model.layers.*.mlp"],
        "solutions": list(patch.solutions),
        "instances": layers,
        "calls": {patch.solutions[0]: 6 * layers},
        "original_by_choice": 0,
        "fallbacks": {},
        "contained": 0,
    }


def test_unknown_arguments_run_the_original_and_are_counted(loaded: Any) -> None:
    mlp, x = loaded.model.model.layers[0].mlp, torch.randn(1, 3, 64)
    wanted = mlp(x)
    with apply(only("gated_mlp"), loaded.model) as applied:
        assert torch.equal(mlp(x=x), wanted)
        assert not applied.unreached()
        with pytest.raises(TypeError, match="surprise"):
            mlp(x, surprise=1)
        assert sum(row(applied, "gated_mlp")["fallbacks"].values()) == 1


def test_calls_outside_the_guard_fall_back_and_are_counted(loaded: Any) -> None:
    guarded = make_graft(load(NAME), only={"gated_mlp"}, guard=Guard(max_axes={"seq_len": 3}))
    ids, layers = prompt(loaded), len(loaded.model.model.layers)
    wanted = logits(loaded.model, ids)
    with apply(guarded, loaded.model) as applied:
        assert torch.equal(logits(loaded.model, ids), wanted)
        found = row(applied, "gated_mlp")
        assert found["fallbacks"] == {"seq_len is larger than 3": layers}
        assert sum(found["calls"].values()) == 0
        assert applied.unreached() == [patch_label(guarded.patches[0])]
        with pytest.raises(UnreachedError, match=r"every call of `model\.layers\.\*\.mlp` .*seq_len is larger than 3"):
            applied.check()
        logits(loaded.model, ids[:, :3])
        assert not applied.unreached()
        applied.check()


def test_a_patch_that_no_call_reaches_is_an_error(loaded: Any) -> None:
    with apply(graft(), loaded.model) as applied:
        assert sorted(applied.unreached()) == sorted(patch_label(p) for p in graft().accepted)
        with pytest.raises(UnreachedError, match=r"no call reached `model\.norm`"):
            applied.check()
    with pytest.raises(UnreachedError, match="no call reached"), apply(graft(), loaded.model, check_reach=True):
        pass
    assert find_applied(loaded.model) is None
    with apply(graft(), loaded.model, check_reach=True):
        logits(loaded.model, prompt(loaded))


def test_one_site_of_a_patch_that_no_call_reaches_is_an_error_too(loaded: Any) -> None:
    (patch,) = only("gated_mlp").patches
    site = patch.sites[0]
    halves = [site.model_copy(update={"instances": (path,), "path": path, "detail": {}}) for path in site.instances[:2]]
    with apply(with_patches(changed(patch, sites=tuple(halves))), loaded.model) as applied:
        loaded.model.model.layers[0].mlp(torch.randn(1, 3, 64))
        assert not applied.unreached()
        with pytest.raises(UnreachedError, match=r"no call reached `model\.layers\.1\.mlp`"):
            applied.check()


def test_the_originals_choice_counts_as_reached(loaded: Any) -> None:
    (patch,) = only("gated_mlp").patches
    first = patch.seats[0]
    seats = (
        Seat(definition=first.definition, regime="decode", work=1, solution=first.solution, seated=False),
        first.model_copy(update={"work": 1000}),
    )
    with apply(with_patches(changed(patch, seats=seats)), loaded.model, check_reach=True) as applied:
        logits(loaded.model, prompt(loaded)[:, :1])
        assert row(applied, "gated_mlp")["original_by_choice"] == len(loaded.model.model.layers)


def test_another_attention_implementation_runs_as_it_is_and_is_counted(loaded: Any) -> None:
    other, ids = load(NAME), prompt(loaded)
    padded, mask = models.left_padded(loaded, ["one two three", "four"])
    with apply(only("attention"), loaded.model) as applied:
        for model in (loaded.model, other.model):
            model.set_attn_implementation("eager")
        got = loaded.model(padded, attention_mask=mask, output_attentions=True)
        wanted = other.model(padded, attention_mask=mask, output_attentions=True)
        assert torch.equal(got.logits[mask.bool()], wanted.logits[mask.bool()])
        assert len(got.attentions) == len(wanted.attentions) > 0
        (reason,) = row(applied, "attention")["fallbacks"]
        assert "`eager`" in reason
        assert "`sdpa`" in reason
        with pytest.raises(UnreachedError, match="eager"):
            applied.check()
        loaded.model.set_attn_implementation("sdpa")
        logits(loaded.model, ids)
        applied.check()


def test_public_names() -> None:
    import kernelgraft.patch

    assert apply_function is kernelgraft.patch.apply
    assert set(kernelgraft.patch.__all__) >= {"Applied", "Dispatcher", "apply", "find_applied"}
