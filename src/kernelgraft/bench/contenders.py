"""The ways to run a model that a benchmark compares, each made ready in a process of its own.

A peer's patch is found by the configuration's model type, in the peer's own table or by the name of its function, and
applied as the peer documents it: before the model is built, with its defaults. The patched model takes the weights of
the original, so that all contenders have the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kernelgraft import machine
from kernelgraft.bench.names import COMPILED, GRAFTED
from kernelgraft.bench.proof import Facts, differences, facts
from kernelgraft.errors import UsageError
from kernelgraft.models import Loaded, load
from kernelgraft.models.shrinking import in_short, quiet
from kernelgraft.records import Graft
from kernelgraft.store import Inventory


@dataclass(frozen=True)
class Peer:
    """Another package that patches transformers' models."""

    distribution: str
    module: str
    """Where its functions are."""
    table: str
    """Its mapping from model type to function."""
    function: str
    """The name of a function, with `{}` for the model type."""
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments that its own benchmark gives where the function takes them."""


PEERS = {
    "tilegym": Peer(
        "tilegym",
        "tilegym.transformers.monkey_patch",
        "MODEL_TYPE_TO_APPLY_TILEGYM_FN",
        "apply_tilegym_kernel_to_{}",
        (("use_cutile", True),),
    ),
    "liger": Peer(
        "liger-kernel",
        "liger_kernel.transformers.monkey_patch",
        "MODEL_TYPE_TO_APPLY_LIGER_FN",
        "apply_liger_kernel_to_{}",
    ),
}


@dataclass
class Ready:
    """A contender's model, and what its process can tell about it."""

    loaded: Loaded
    before: Facts
    """Of the original in this process, before anything was changed."""
    applied: Any = None
    """The graft on the model."""
    compiled: bool = False
    """True if `generate` may compile the forward."""
    patch: str | None = None
    """The peer's function that was called."""

    def evidence(self) -> list[str]:
        """What stands in the place of the model's own code now, `where: what`."""
        lines = differences(self.before, facts(self.loaded.model))
        called = [] if self.patch is None else [f"called: {self.patch}"]
        return [*called, *lines]


def prepare(name: str, order: dict[str, Any]) -> Ready:
    """Load the model of an order and make it ready; raises UsageError where a peer has nothing for it."""
    peer = PEERS.get(name)
    module = None if peer is None else _imported(name, peer)
    loaded = load(
        order["spec"],
        dtype=getattr(torch, order["dtype"]) if order["dtype"] else None,
        device=order["device"],
        seed=order["seed"],
        trust_remote_code=order["trust_remote_code"],
    )
    before = facts(loaded.model)
    if peer is not None:
        return _patched(name, peer, module, loaded, before)
    ready = Ready(loaded, before, compiled=name == COMPILED)
    if name == GRAFTED:
        from kernelgraft.patch import apply

        ready.applied = apply(read_graft(order["graft"]), loaded.model)
    return ready


def read_graft(folder: str) -> Graft:
    """The graft in a folder."""
    return Inventory(Path(folder)).load_record("graft", Graft)


def patch_for(name: str, peer: Peer, module: Any, config: Any) -> Callable[..., Any]:
    """The peer's function for a configuration, or for the composite model whose text part it describes."""
    table = getattr(module, peer.table, {})
    own = config.model_type
    around = [kind for kind in table if kind in CONFIG_MAPPING and _holds(CONFIG_MAPPING[kind], type(config))]
    for kind in (own, *around):
        if kind in table:
            found: Callable[..., Any] = table[kind]
            return found
    named = getattr(module, peer.function.format(own), None)
    if callable(named):
        return named
    version = machine.version(peer.distribution)
    raise UsageError(f"{peer.distribution} {version or ''} has no patch for `{own}`: leave `{name}` out for this model")


def _holds(kind: Any, part: type) -> bool:
    return part in getattr(kind, "sub_configs", {}).values()


def _imported(name: str, peer: Peer) -> Any:
    try:
        return importlib.import_module(peer.module)
    except ImportError as error:
        raise UsageError(
            f"`{name}` cannot be imported ({in_short(error)}): install {peer.distribution} or leave `{name}` out"
        ) from error


def _patched(name: str, peer: Peer, module: Any, loaded: Loaded, before: Facts) -> Ready:
    original: Any = loaded.model
    function = patch_for(name, peer, module, original.config)
    accepted = inspect.signature(function).parameters
    with quiet():
        function(**{option: value for option, value in peer.options if option in accepted})
        model = _rebuilt(original)
    loaded = dataclasses.replace(loaded, model=model)
    ready = Ready(loaded, before, patch=f"{function.__module__}.{function.__qualname__}")
    if not differences(before, facts(model)):
        raise UsageError(f"`{ready.patch}` changes nothing in `{type(original).__name__}`: leave `{name}` out")
    return ready


def _rebuilt(original: Any) -> Any:
    """A model from the classes as they are now, with the weights of `original`: the same tensors, not copies."""
    device = next(original.parameters()).device
    config = original.config
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device, _weightless():
        model = AutoModelForCausalLM.from_config(
            config, dtype=original.dtype, attn_implementation=config._attn_implementation
        )
    try:
        model.load_state_dict(original.state_dict(), assign=True)
    except RuntimeError as error:
        raise UsageError(f"the patched model does not take the original's weights: {in_short(error)}") from error
    model.tie_weights()
    model.to(device).eval()
    model.generation_config = original.generation_config
    return model


@contextlib.contextmanager
def _weightless() -> Iterator[None]:
    """Parameters that are registered meanwhile have no memory: they are about to be assigned. Buffers keep theirs."""
    own = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            param._is_hf_initialized = True  # type: ignore[attr-defined]
        own(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]
