"""Loading with kernels: shards, ties, dtypes, device maps, configurations, refusals, threads."""

from __future__ import annotations

import copy
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_samples import LAYERS, logits, prompt, same_state, state_of, tiny, write_package
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import kernelgraft
from kernelgraft.errors import KernelgraftError, UsageError
from kernelgraft.layouts import KernelSet, find_layouts
from kernelgraft.layouts.loading import dry_model
from kernelgraft.layouts.quantising import refuse_quantised

NORM_AND_MLP = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def kernels(package: Path) -> dict[Any, str]:
    return {NORM_AND_MLP: f"{package}:NormMLP", "RMSNorm": f"{package}:ScaledNorm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files, of a model whose embeddings are tied and which says how it generates."""
    path = tmp_path_factory.mktemp("checkpoint")
    model = tiny("llama")
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def loaded(folder: Any, kernels: Any, **kwargs: Any) -> Any:
    kwargs.setdefault("check", False)
    return kernelgraft.from_pretrained(AutoModelForCausalLM, folder, kernels=kernels, **kwargs)


def plain(folder: Any, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def assert_converted(model: nn.Module, folder: Any, **kwargs: Any) -> None:
    """The kernels are on the model, and it computes what a plain load does."""
    assert find_layouts(model) is not None
    theirs = logits(plain(folder, **kwargs))
    close = {"rtol": 1e-5, "atol": 1e-5} if theirs.dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(logits(model), theirs, **close)


def test_shards_and_ties(folder: Path, kernels: dict[Any, str], tmp_path: Path) -> None:
    model = loaded(folder, kernels, check=True)
    assert_converted(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "n", max_shard_size="20KB")
    index, again = (
        json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].keys()
        for path in (folder, tmp_path / "n")
    )
    assert index == again
    assert same_state(state_of(plain(folder)), state_of(plain(tmp_path / "n")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float16, "auto"])
def test_dtypes(folder: Path, kernels: dict[Any, str], dtype: Any) -> None:
    model = loaded(folder, kernels, dtype=dtype)
    wanted = next(plain(folder, dtype=dtype).parameters()).dtype
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert_converted(model, folder, dtype=dtype)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, torch.device("cpu")])
def test_device_maps(folder: Path, kernels: dict[Any, str], device_map: Any) -> None:
    assert_converted(loaded(folder, kernels, device_map=device_map), folder)


@pytest.mark.gpu
@pytest.mark.parametrize("device_map", ["cuda", "auto", {"": 0}])
def test_device_maps_with_a_gpu(kernels: dict[Any, str], tmp_path: Path, device_map: Any) -> None:
    tiny("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "m")
    model, other = loaded(tmp_path / "m", kernels, device_map=device_map, check=True), plain(tmp_path / "m")
    ids = prompt().to("cuda")
    torch.testing.assert_close(logits(model, ids).cpu(), logits(other), rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path / "n")
    assert same_state(*(load_file(tmp_path / name / "model.safetensors") for name in "mn"))
    applied = find_layouts(model)
    assert applied is not None
    applied.revert()
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "cuda"


def on_disk(*layers: int) -> dict[str, str]:
    """A device map with these layers on disk."""
    kept = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    return {**dict.fromkeys(kept, "cpu"), **{f"model.layers.{i}": "disk" if i in layers else "cpu" for i in (0, 1)}}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")
@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_layers_on_disk_take_kernels(
    folder: Path, kernels: dict[Any, str], tmp_path: Path, layers: tuple[int, ...]
) -> None:
    model = loaded(folder, kernels, device_map=on_disk(*layers), offload_folder=str(tmp_path / "offload"))
    assert_converted(model, folder)
    assert all(p.is_meta for i in layers for p in model.model.layers[i].parameters())
    model.train()
    model.eval()
    assert_converted(model, folder)
    model.save_pretrained(tmp_path / "n")
    assert same_state(state_of(plain(tmp_path / "n")), state_of(plain(folder)))


def test_layers_on_disk_want_a_folder(folder: Path, kernels: dict[Any, str]) -> None:
    with pytest.raises(UsageError, match="offload_folder"):
        loaded(folder, kernels, device_map=on_disk(1))


def test_what_no_kernel_takes_stays_on_disk(package: Path, folder: Path, tmp_path: Path) -> None:
    given = {"device_map": on_disk(1), "offload_folder": str(tmp_path / "offload")}
    first = tuple((name, path.replace("*", "0")) for name, path in NORM_AND_MLP)
    assert_converted(loaded(folder, {first: f"{package}:NormMLP"}, **given), folder)


def test_a_kernel_without_a_layout_runs_over_what_is_on_disk(package: Path, folder: Path, tmp_path: Path) -> None:
    given = {"device_map": on_disk(0, 1), "offload_folder": str(tmp_path / "offload")}
    assert_converted(loaded(folder, {"RMSNorm": f"{package}:PlainNorm"}, **given), folder)


def test_attention_and_configuration_options_reach_the_load(folder: Path, kernels: dict[Any, str]) -> None:
    model = loaded(folder, kernels, attn_implementation="eager", num_hidden_layers=1)
    assert model.config._attn_implementation == "eager"
    assert len(model.model.layers) == 1
    applied = find_layouts(model)
    assert applied is not None
    assert not [row for row in applied.report() if "layers.1." in row["path"]]


def test_a_configuration_object_is_used_and_not_changed(folder: Path, kernels: dict[Any, str]) -> None:
    config = AutoConfig.from_pretrained(folder)
    before = config.to_dict()
    assert_converted(loaded(folder, kernels, config=config, check=True), folder)
    assert {**config.to_dict(), "dtype": None} == {**before, "dtype": None}


def test_weights_may_be_given_without_files(folder: Path, kernels: dict[Any, str]) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config, state = AutoConfig.from_pretrained(folder), plain(folder).state_dict()
    model = kernelgraft.from_pretrained(LlamaForCausalLM, None, kernels=kernels, config=config, state_dict=state)
    assert_converted(model, folder)


def test_a_model_class_of_its_own(folder: Path, kernels: dict[Any, str]) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    model = kernelgraft.from_pretrained(LlamaForCausalLM, str(folder), kernels=kernels)
    assert_converted(model, folder)


def test_the_loading_info_comes_with_the_model(folder: Path, kernels: dict[Any, str]) -> None:
    model, info = loaded(folder, kernels, output_loading_info=True)
    assert_converted(model, folder)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_kernel_set_serves_any_number_of_models(folder: Path, kernels: dict[Any, str], tmp_path: Path) -> None:
    tiny("mistral", seed=1).save_pretrained(tmp_path / "other")
    chosen = kernelgraft.KernelSet(kernels)
    entries = copy.deepcopy(chosen.entries)
    for path in (folder, tmp_path / "other", folder):
        assert_converted(loaded(path, chosen), path)
    assert chosen.entries == entries


def test_reverting_gives_the_plain_model(folder: Path, kernels: dict[Any, str]) -> None:
    model = loaded(folder, kernels)
    applied = find_layouts(model)
    assert applied is not None
    applied.revert()
    assert find_layouts(model) is None
    assert torch.equal(logits(model), logits(plain(folder)))
    assert same_state(state_of(model), state_of(plain(folder)))


def test_two_threads_load_different_models(package: Path, folder: Path, tmp_path: Path) -> None:
    tiny("gemma2", seed=1).save_pretrained(tmp_path / "other", max_shard_size="20KB")
    jobs = {
        folder: ({"RMSNorm": f"{package}:ScaledNorm"}, torch.float32),
        tmp_path / "other": ({"RMSNorm": f"{package}:OffsetNorm"}, torch.bfloat16),
    }
    found: dict[Path, list[Any]] = {path: [] for path in jobs}

    def work(path: Path) -> None:
        chosen, dtype = jobs[path]
        for _ in range(3):
            found[path].append(loaded(path, chosen, dtype=dtype))

    threads = [threading.Thread(target=work, args=(path,)) for path in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_default_dtype() == torch.float32
    for path, (_, dtype) in jobs.items():
        assert len(found[path]) == 3
        for model in found[path]:
            assert model.dtype == dtype
            assert_converted(model, path, dtype=dtype)


# --- refusals ---


@pytest.mark.parametrize("option", ["use_kernels", "kernel_config", "fusion_config"])
def test_other_ways_to_name_kernels_are_refused(folder: Path, kernels: dict[Any, str], option: str) -> None:
    with pytest.raises(UsageError, match=f"`{option}`"):
        loaded(folder, kernels, **{option: {"gate_up": True}})


def test_what_loads_no_models_is_refused(folder: Path, kernels: dict[Any, str]) -> None:
    with pytest.raises(UsageError, match="loads no models"):
        kernelgraft.from_pretrained("AutoModelForCausalLM", folder, kernels=kernels)


def test_neither_path_nor_configuration(kernels: dict[Any, str]) -> None:
    with pytest.raises(UsageError, match="neither a path nor"):
        loaded(None, kernels)


@pytest.mark.parametrize("given", [None, "RMSNorm", {}, 3])
def test_no_kernels_are_refused_before_the_path_is_read(given: Any) -> None:
    with pytest.raises(UsageError):
        loaded("/nowhere", given)


def test_faults_are_found_before_a_weight_is_read(folder: Path, package: Path, tmp_path: Path) -> None:
    wrong = write_package(tmp_path / "wrong", LAYERS.replace("dim=0", "dim=1"))
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "m")  # no weights there
    with pytest.raises(KernelgraftError) as caught:
        loaded(tmp_path / "m", {NORM_AND_MLP: f"{wrong}:NormMLP"}, check=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="model"):
        loaded(tmp_path / "m", {NORM_AND_MLP: f"{package}:NormMLP"}, check=True)


def test_a_checkpoint_of_other_shapes_raises_as_without_kernels(
    folder: Path, kernels: dict[Any, str], tmp_path: Path
) -> None:
    model = tiny("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "m")
    state = load_file(tmp_path / "m" / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(state, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError) as ours:
        loaded(tmp_path / "m", kernels)
    with pytest.raises(RuntimeError) as theirs:
        plain(tmp_path / "m")
    assert str(ours.value) == str(theirs.value)
    assert_converted(loaded(folder, kernels), folder)


# --- quantising ---


class Int8Linear(nn.Module):
    """A linear whose rows are 8-bit whole numbers and a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().amax(-1, keepdim=True) / 127)
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight * self.scale, self.bias)


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A quantization config whose quantiser, registered with transformers, makes every linear but the head 8-bit."""
    from transformers.quantizers import HfQuantizer, auto
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Config(QuantizationConfigMixin):
        def __init__(self) -> None:
            self.quant_method = "sample"  # type: ignore[assignment]

    class Quantiser(HfQuantizer):
        requires_calibration = False
        is_trainable = False

        def is_serializable(self) -> bool:
            return True

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            for path, module in list(model.named_modules()):
                if type(module) is nn.Linear and path != "lm_head":
                    model.set_submodule(path, Int8Linear(module))
            return model

    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "sample", Config)
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "sample", Quantiser)
    return Config()


@pytest.mark.parametrize("option", [{}, {"device_map": "cpu", "dtype": torch.bfloat16}])
def test_linears_that_kernels_take_are_merged_and_then_quantised(
    folder: Path, kernels: dict[Any, str], int8: Any, tmp_path: Path, option: dict[str, Any]
) -> None:
    wanted = plain(folder, quantization_config=int8, **option)
    model, info = loaded(folder, kernels, quantization_config=int8, output_loading_info=True, **option)
    assert type(model.model.layers[0].post_attention_layernorm.gate_up) is Int8Linear
    assert type(model.model.layers[0].self_attn.q_proj) is Int8Linear
    assert torch.equal(logits(model), logits(wanted))
    assert not torch.equal(logits(model), logits(plain(folder, **option)))
    assert type(model) is type(wanted)
    assert not info["missing_keys"]
    assert model.name_or_path == wanted.name_or_path
    assert model.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert model.lm_head.weight is model.model.embed_tokens.weight

    # Of merged 8-bit numbers no rule makes the original ones.
    applied = find_layouts(model)
    assert applied is not None
    for act in (lambda: model.save_pretrained(tmp_path / "n"), applied.revert, applied.state_dict):
        with pytest.raises(UsageError, match="was quantised in its Layout"):
            act()
    assert torch.equal(logits(model), logits(wanted))


def test_kernels_for_norms_stand_beside_quantised_linears(
    folder: Path, package: Path, int8: Any, tmp_path: Path
) -> None:
    wanted = plain(folder, quantization_config=int8)
    model = loaded(folder, {"RMSNorm": f"{package}:ScaledNorm"}, quantization_config=int8)
    assert torch.equal(logits(model), logits(wanted))
    for one, name in ((model, "n"), (wanted, "w")):  # transformers asks a quantised model for its tensors itself
        one.save_pretrained(tmp_path / name)
    assert same_state(*(load_file(tmp_path / name / "model.safetensors") for name in "nw"))
    assert "model.norm.scale" in model.state_dict()
    applied = find_layouts(model)
    assert applied is not None
    applied.revert()
    assert same_state(state_of(model), state_of(wanted))


def test_a_quantised_checkpoint_takes_kernels_for_norms_only(folder: Path, package: Path) -> None:
    skeleton = dry_model(AutoModelForCausalLM, folder)
    linears = kernelgraft.layouts.load_all({(NORM_AND_MLP[1],): f"{package}:GateUp"})
    refuse_quantised(skeleton, linears)
    skeleton.config.quantization_config = {"quant_method": "bitsandbytes"}
    refuse_quantised(skeleton, kernelgraft.layouts.load_all({"RMSNorm": f"{package}:ScaledNorm"}))
    with pytest.raises(UsageError, match=r"`model\.layers\.0\.mlp`.*`GateUp`.*quantised already"):
        refuse_quantised(skeleton, linears)


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
def test_quantisers_of_libraries(folder: Path, kernels: dict[Any, str], library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    from transformers import BitsAndBytesConfig, TorchAoConfig

    tiny("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path / "m")
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        configs = [TorchAoConfig(Int8WeightOnlyConfig())]
    else:
        configs = [BitsAndBytesConfig(load_in_8bit=True), BitsAndBytesConfig(load_in_4bit=True)]
    for config in configs:
        model = loaded(tmp_path / "m", kernels, quantization_config=config)
        wanted = plain(tmp_path / "m", quantization_config=config)
        torch.testing.assert_close(logits(model), logits(wanted), rtol=1e-5, atol=1e-5)


# --- the rest ---


def test_the_dry_model_has_no_weights_and_the_classes_of_the_load(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    before = (config.to_dict(), config._attn_implementation)
    skeleton = dry_model(AutoModelForCausalLM, folder, attn_implementation="eager", config=config)
    assert (config.to_dict(), config._attn_implementation) == before
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert [type(m) for m in skeleton.modules()] == [type(m) for m in plain(folder).modules()]
    assert skeleton.config._attn_implementation == "eager"
    assert not torch.empty(1).is_meta


def test_adapters_attach_after_and_before(folder: Path, package: Path) -> None:
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # peft reads it
    peft = pytest.importorskip("peft")
    chosen = {"RMSNorm": f"{package}:ScaledNorm"}
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(0)
    after = peft.get_peft_model(loaded(folder, chosen), config)
    torch.manual_seed(0)
    before = peft.get_peft_model(plain(folder), config)
    wanted = logits(before)
    torch.testing.assert_close(logits(after), wanted, rtol=1e-5, atol=1e-5)
    with kernelgraft.apply_layouts(before, chosen):
        torch.testing.assert_close(logits(before), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(before), wanted)


def test_the_public_names() -> None:
    assert kernelgraft.KernelSet is KernelSet
    assert kernelgraft.apply_layouts is kernelgraft.layouts.apply_layouts
    assert {"KernelSet", "apply_layouts", "from_pretrained"} <= set(kernelgraft.__all__)
