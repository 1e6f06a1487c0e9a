"""Quantise while loading, with kernels that take linears: converted first, quantised afterwards.

What a quantiser packs can neither be merged nor split again. So the checkpoint is loaded without it, the Layouts are
put on, and transformers loads the converted tensors, quantised, into the same model built with its Layouts on meta.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kernelgraft.errors import UsageError
from kernelgraft.layouts.applying import apply_layouts
from kernelgraft.layouts.matching import places
from kernelgraft.layouts.records import LoadedKernel

PLACING = ("device_map", "max_memory", "offload_folder", "offload_buffers")
"""Arguments of a load that say where the model goes."""
_BOTH = ("dtype", "torch_dtype", "attn_implementation", "use_safetensors")


def linear_taken(model: nn.Module, loaded: Sequence[LoadedKernel]) -> tuple[str, str] | None:
    """The first module with a linear in it that a kernel takes, and the kernel; None if quantisers reach none."""
    for place in places(model, loaded):
        for path in place.paths if place.function is None else ():
            if any(isinstance(inner, nn.Linear) for inner in model.get_submodule(path).modules()):
                return path, place.kernel.name
    return None


def refuse_quantised(model: nn.Module, loaded: Sequence[LoadedKernel]) -> None:
    """Raise UsageError if a kernel wants linears that the checkpoint of `model` holds in quantised form.

    Norms and the like are never quantised, so kernels that leave linears alone are let through.
    """
    stored = getattr(getattr(model, "config", None), "quantization_config", None)
    taken = None if stored is None else linear_taken(model, loaded)
    if taken is not None:
        raise UsageError(
            f"`{taken[0]}`, which `{taken[1]}` takes, holds linears, and the checkpoint is quantised already; "
            "load the original one, with `quantization_config`"
        )


def load_quantised(auto_class: Any, path: Any, loaded: Sequence[LoadedKernel], kwargs: dict[str, Any]) -> Any:
    """`auto_class.from_pretrained(path, **kwargs)` with kernels on it, then quantised as `quantization_config` says.

    The whole model is in memory unquantised meanwhile. What comes back can be run and trained as quantised models can,
    but neither reverted nor saved under the original names: both raise UsageError.
    """
    first = {name: value for name, value in kwargs.items() if name not in (*PLACING, "quantization_config")}
    result = auto_class.from_pretrained(path, **first)
    plain: PreTrainedModel = result[0] if isinstance(result, tuple) else result
    owner: Any = type(plain)
    config = copy.deepcopy(plain.config)
    apply_layouts(plain, loaded, check=False)

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        owner.__init__(self, *args, **options)
        apply_layouts(self, loaded, check=False)

    # A class of this load only, which the model does not keep.
    with_layouts: Any = type(owner.__name__, (owner,), {"__init__": __init__, "__module__": owner.__module__})
    second = {name: value for name, value in kwargs.items() if name in (*PLACING, *_BOTH, "quantization_config")}
    model = with_layouts.from_pretrained(None, config=config, state_dict=plain.state_dict(), **second)
    model.__class__ = owner
    model.name_or_path = model.config.name_or_path = plain.name_or_path
    model.generation_config = plain.generation_config
    return (model, *result[1:]) if isinstance(result, tuple) else model
