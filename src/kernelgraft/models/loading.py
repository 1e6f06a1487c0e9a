"""Load or build the model that a spec means, with its tokenizer if it has one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from kernelgraft.errors import UsageError
from kernelgraft.models.prompts import pad_id
from kernelgraft.models.randomising import make_decisive, randomise
from kernelgraft.models.shrinking import in_short, quiet, shrink
from kernelgraft.models.specs import ModelRef, read_preset, resolve

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece*", "sentencepiece*")


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, the spec that it came from, its tokenizer (None without one) and its weights' dtype."""

    ref: ModelRef
    model: PreTrainedModel
    tokenizer: Any
    dtype: torch.dtype


def load(
    spec: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
    split: bool = False,
) -> Loaded:
    """Load the model that `spec` means onto `device`, in eval mode.

    With `split`, each of the processes that torchrun started gets its part of the model (tensor parallelism by the
    model's own plan), on the device that transformers gives it.

    Presets and `config:<model_type>` get random weights from `seed` and the dtype float32 unless one is given, as does
    `tiny`; folders and hub ids keep their stored dtype. Raises UsageError, in one line, for whatever cannot be loaded.
    """
    ref, device = resolve(spec), _device(device)
    if ref.kind in ("preset", "config"):
        if split:
            raise UsageError(
                f"`{spec}` has random weights, which are not split over processes: save it to a folder and give that"
            )
        model = _random(ref, dtype or torch.float32, device, seed)
        loaded = Loaded(ref, model, None, model.dtype)
    else:
        chosen = dtype or (torch.float32 if ref.kind == "tiny" else None)
        loaded = _pretrained(ref, chosen, device, trust_remote_code, split)
    if loaded.model.generation_config.pad_token_id is None:
        loaded.model.generation_config.pad_token_id = pad_id(loaded)  # or generate warns on each call
    return loaded


def wrap(model: nn.Module, tokenizer: Any = None, name: str | None = None) -> Loaded:
    """A live transformers model as `load` would return it, itself untouched; `name` labels it in reports.

    Raises UsageError for an object that has no configuration or cannot generate.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig) or not callable(getattr(model, "generate", None)):
        raise UsageError(
            f"`{type(model).__name__}` is not a transformers model that generates; give one that "
            "`AutoModelForCausalLM` returns"
        )
    label = name or config.name_or_path or type(model).__name__
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return Loaded(ModelRef(label, "live", label), cast(PreTrainedModel, model), tokenizer, dtype)


def configuration(ref: ModelRef) -> PreTrainedConfig:
    """The configuration of a preset at its published sizes, or of a `config:` spec shrunk to tiny ones."""
    try:
        with quiet():
            if ref.kind == "preset" and ref.path is not None:
                preset = read_preset(ref.path)
                return AutoConfig.for_model(preset["model_type"], **preset["config"])
            default = AutoConfig.for_model(ref.name)
    except UsageError:
        raise
    except Exception as error:
        raise _cannot(ref, error) from error
    return shrink(default)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"`{device}` is no device; give `cpu`, `cuda` or `cuda:<index>`") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device `{found}` does not exist here ({torch.cuda.device_count()} found); use `cpu`")
    return found


def _random(ref: ModelRef, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    config = configuration(ref)
    cuda = [device] if device.type == "cuda" else []
    # Built on its device: billions of random numbers take minutes on a CPU.
    with quiet(), torch.random.fork_rng(devices=cuda), device:
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(device).eval()
    randomise(model, seed)
    if ref.kind == "preset":
        make_decisive(model, seed)
    return model


def _pretrained(
    ref: ModelRef, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool, split: bool
) -> Loaded:
    source = str(ref.path or ref.name)
    options = {"trust_remote_code": trust_remote_code, "local_files_only": ref.path is not None}
    parts: dict[str, Any] = {}
    try:
        with quiet(bars=ref.kind == "hub"):
            config = AutoConfig.from_pretrained(source, **options)
            if split:
                from transformers.distributed import DistributedConfig

                parts = {"distributed_config": DistributedConfig(tp_plan="auto")}
            model = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=dtype or "auto", **options, **parts
            )
            tokenizer = _tokenizer(source, ref.path, options)
        if split and model.device.type != device.type:
            raise UsageError(f"transformers puts a split model on `{model.device.type}`, not on `{device.type}`")
    except UsageError:
        raise
    except Exception as error:  # transformers and the hub client raise OSError, ValueError, KeyError, ImportError, ...
        raise _cannot(ref, error) from error
    return Loaded(ref, (model if split else model.to(device)).eval(), tokenizer, model.dtype)


def _tokenizer(source: str, path: Path | None, options: dict[str, Any]) -> Any:
    if path is not None:
        has_files = any(next(path.glob(pattern), None) for pattern in _TOKENIZER_FILES)
        return AutoTokenizer.from_pretrained(source, **options) if has_files else None
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except OSError:  # the repository holds none
        return None


def _cannot(ref: ModelRef, error: Exception) -> UsageError:
    step = {
        "hub": "check the id and the network, or download it and give the folder",
        "folder": "check its config.json and weights",
    }.get(ref.kind, "report it")
    return UsageError(f"`{ref.spec}` cannot be loaded: {in_short(error)}; {step}")
