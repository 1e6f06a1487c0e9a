"""Load a model with kernels that bring their own parameters: a dry run, transformers' plain load, then the Layouts.

Nothing of the process is patched. The dry run happens on meta before a weight is read, the load is the one that
transformers does without kernels (so shards, ties, dtypes, device maps and a model's own converters are its business),
and the Layouts are put on the loaded object. A load that raises therefore leaves nothing, and a plain one afterwards,
or in another thread, is plain.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from kernelgraft.errors import UsageError
from kernelgraft.layouts.applying import apply_layouts
from kernelgraft.layouts.findings import refuse
from kernelgraft.layouts.kernel_set import KernelSet
from kernelgraft.layouts.matching import places
from kernelgraft.layouts.packages import load_all
from kernelgraft.layouts.quantising import PLACING, linear_taken, load_quantised, refuse_quantised
from kernelgraft.layouts.records import LoadedKernel
from kernelgraft.models.shrinking import quiet

# Other ways to say which kernels; both patch classes for the whole process.
_REFUSED = ("use_kernels", "kernel_config", "allow_all_kernels", "fusion_config")
# What the configuration's loader takes beside values of the configuration; it must not find the weights' options.
_WEIGHTS_ONLY = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "device_map",
    "max_memory",
    "offload_folder",
    "offload_buffers",
    "state_dict",
    "output_loading_info",
    "ignore_mismatched_sizes",
    "use_safetensors",
    "weights_only",
    "variant",
    "key_mapping",
    "adapter_kwargs",
    "tp_plan",
    "tp_size",
    "device_mesh",
    "low_cpu_mem_usage",
)
# One at a time: torch's default dtype is the process's while transformers builds a model.
_loading = threading.RLock()


def from_pretrained(auto_class: Any, path: Any, *, kernels: Any, check: bool = True, **kwargs: Any) -> Any:
    """`auto_class.from_pretrained(path, **kwargs)` with kernels in it.

    `auto_class` is a class of transformers that loads models (AutoModelForCausalLM, or a model's own). `kernels` is
    what KernelSet.of takes. With `check`, everything that can be known without weights is known before one is read,
    and the kernels are run on a tiny model of the same kind. Returns what the class returns: the model, in eval mode,
    with `output_loading_info` a pair. `find_layouts(model)` is what takes the kernels off again. Raises
    UsageError, ConflictError or GraftError, one line, for kernels that do not fit, before a weight is read; whatever
    transformers raises for a checkpoint that does not load.
    """
    if not callable(getattr(auto_class, "from_pretrained", None)):
        raise UsageError(f"`{auto_class!r}` loads no models; give a class such as AutoModelForCausalLM")
    chosen = KernelSet.of(kernels)
    for name in _REFUSED:
        if kwargs.get(name):
            raise UsageError(f"`{name}` is given beside `kernels`; leave it out and name all kernels in `kernels`")
    with _loading:
        device = _device(kwargs.get("device_map"))
        loaded = load_all(chosen, device=device)
        skeleton = dry_model(auto_class, path, **kwargs)
        refuse_quantised(skeleton, loaded)
        if check:
            from kernelgraft.layouts.checking import check as find_faults

            refuse(find_faults(loaded, skeleton, device=device))
        if kwargs.get("quantization_config") is not None and linear_taken(skeleton, loaded) is not None:
            return load_quantised(auto_class, path, loaded, kwargs)
        del skeleton
        result = auto_class.from_pretrained(path, **kwargs)
        model = _model_of(result)
        if not _is_offloaded(model, loaded):
            apply_layouts(model, chosen, check=False)
            return result
        # Rules want values. So once more into memory, and what was to be offloaded is offloaded with the kernels on it.
        device_map = model.hf_device_map
        del model, result
        options = {name: value for name, value in kwargs.items() if name not in PLACING}
        result = auto_class.from_pretrained(path, **options)
        model = _model_of(result)
        apply_layouts(model, loaded, check=False)
        _dispatch(model, device_map, kwargs.get("offload_folder"), bool(kwargs.get("offload_buffers")))
    return result


def dry_model(auto_class: Any, path: Any, **kwargs: Any) -> PreTrainedModel:
    """The model that a load would give, on meta: only its configuration is read."""
    config = _configuration(auto_class, path, kwargs)
    options = {name: kwargs[name] for name in ("trust_remote_code", "attn_implementation") if name in kwargs}
    build = getattr(auto_class, "from_config", None) or auto_class._from_config
    if not hasattr(auto_class, "from_config"):
        options.pop("trust_remote_code", None)
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = build(config, **options)
    return model.eval()


def _model_of(result: Any) -> PreTrainedModel:
    model: PreTrainedModel = result[0] if isinstance(result, tuple) else result
    return model


def _is_offloaded(model: PreTrainedModel, loaded: Sequence[LoadedKernel]) -> bool:
    """Whether a device map put tensors that kernels take to the disk, or to where they are only fetched from."""
    if not getattr(model, "hf_device_map", None):
        return False
    taken = [path for place in places(model, loaded) if place.function is None for path in place.paths]
    return any(parameter.is_meta for path in taken for parameter in model.get_submodule(path).parameters())


def _dispatch(model: PreTrainedModel, device_map: Any, folder: Any, buffers: bool) -> None:
    """What transformers does after a load with a device map."""
    if "disk" in device_map.values() and folder is None:
        raise UsageError(
            "a part of the model goes to the disk with kernels on it; give `offload_folder` to write it to"
        )
    from accelerate import dispatch_model

    skipped = model._skip_keys_device_placement
    dispatch_model(model, device_map=device_map, offload_dir=folder, offload_buffers=buffers, skip_keys=skipped)


def _configuration(auto_class: Any, path: Any, kwargs: dict[str, Any]) -> PreTrainedConfig:
    given = kwargs.get("config")
    if isinstance(given, PreTrainedConfig):
        return copy.deepcopy(given)
    options = {name: value for name, value in kwargs.items() if name != "config" and name not in _WEIGHTS_ONLY}
    source = path if given is None else given
    if source is None:
        raise UsageError("neither a path nor a `config` is given; give one of them")
    reader = AutoConfig if hasattr(auto_class, "from_config") else auto_class.config_class
    source = str(source) if isinstance(source, Path) else source
    config, _ = reader.from_pretrained(source, return_unused_kwargs=True, **options)
    if not isinstance(config, PreTrainedConfig):
        raise UsageError(f"`{source}` has no configuration of transformers; give the folder or id of a model")
    return config


def _device(device_map: Any) -> str:
    """The type of device on which most of the model will lie."""
    if device_map is None:
        return torch.get_default_device().type
    if isinstance(device_map, dict):
        types = [_type(device) for device in device_map.values()]
        return next((t for t in types if t not in ("cpu", "disk")), "cpu")
    if isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    return _type(device_map)


def _type(device: Any) -> str:
    if isinstance(device, int):
        return "cuda"
    return str(device).partition(":")[0]
