"""What one prefill or decode step of a model must read from memory and compute, counted from the model itself.

The model runs once on the meta device, where tensors have shapes and no content, while every operator is looked at:
which weights it reads, and how many multiply-adds it makes. So no architecture has to be known. A model that cannot
run there, because its control flow looks at values, runs where it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import GenerationMixin

from kernelgraft.errors import KernelgraftError
from kernelgraft.models.shrinking import in_short, quiet
from kernelgraft.sites import InterfaceProxy, current, discover, innermost, install, rebind

Regime = Literal["prefill", "decode"]

_CACHES = ("cache", "past_key_values", "cache_params")
"""Names under which a forward takes and returns the cache."""
_ROWS = {"embedding": 0, "index": 0, "index_select": 0, "gather": 0, "_embedding_bag": 0}
"""Operators that read some rows of the tensor in this position."""


def count(model: nn.Module, regime: Regime, batch: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
    """Bytes that must be read, and floating-point operations, of one prefill or of the mean decode step.

    `model` is the original, on any device. Raises KernelgraftError if the model cannot be run for it.
    """
    generating: Any = next((m for m in model.modules() if isinstance(m, GenerationMixin)), model)
    mean_context = prompt_tokens if regime == "prefill" else prompt_tokens + (new_tokens - 1) // 2
    twin = _twin(generating)
    reason: Exception | None = None
    for candidate in (twin, generating) if twin is not None else (generating,):
        try:
            return _count(candidate, regime, batch, mean_context)
        except Exception as error:  # whatever a model's code raises where tensors have no content
            reason = error
    raise KernelgraftError(
        f"what `{type(generating).__name__}` reads and computes cannot be counted: {in_short(reason)}; "
        "bench it without a roofline"
    ) from reason


def _twin(model: Any) -> Any:
    """A model of the same configuration on the meta device; None if its weights would not be of the same size."""
    try:
        with quiet(), torch.device("meta"):
            config = copy.deepcopy(model.config)
            twin = type(model)._from_config(config, dtype=model.dtype).eval()
            # One product a token and expert: neither a loop over the experts that are hit nor a kernel of one dtype.
            twin.set_experts_implementation("batched_mm")
    except Exception:  # quantised, adapted or hand-made: the model itself is run
        return None
    return twin if _sizes(twin) == _sizes(model) else None


def _sizes(model: nn.Module) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return dict(sizes)


def _count(model: Any, regime: Regime, batch: int, context: int) -> tuple[float, float]:
    device = next(model.parameters()).device
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": True} if "use_cache" in accepted else {}
    if "logits_to_keep" in accepted:  # as generate does
        options["logits_to_keep"] = 1
    ids = torch.randint(0, _vocabulary(model), (batch, context), device="cpu").to(device)
    counter = Counter(model)
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_watched(model, counter))
        if regime == "prefill":
            with counter:
                model(input_ids=ids, **options)
            return counter.bytes_read, counter.flops
        out = model(input_ids=ids, **options)
        cache = next((found for name in _CACHES if (found := getattr(out, name, None)) is not None), None)
        counter.forget()
        with counter:
            name = next((name for name in _CACHES if name in accepted), "past_key_values")
            model(input_ids=ids[:, -1:], **options, **({} if cache is None else {name: cache}))
        return counter.bytes_read + sum(tensor_bytes(cache).values()), counter.flops


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def tensor_bytes(value: Any) -> dict[int, int]:
    """Bytes of every tensor in an object, by storage; each once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            size = item.numel() * item.element_size()
            key = item.untyped_storage()._cdata
            found[key] = max(size, found.get(key, 0))
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                waiting.extend(item.values())
            elif isinstance(item, (list, tuple)):
                waiting.extend(item)
            elif hasattr(item, "__dict__") and not isinstance(item, (type, nn.Module)) and not callable(item):
                waiting.extend(vars(item).values())
    return found


def pairs(queries: int, keys: int, window: int | None, causal: bool) -> int:
    """Query and key pairs that one head looks at; the last query sees the last key."""
    limit = keys if window is None else min(window, keys)
    if not causal:
        return queries * limit
    first = keys - queries + 1  # keys that the first query may see
    growing = max(0, limit - first + 1)  # queries that see all keys before them
    return growing * first + growing * (growing - 1) // 2 + (queries - growing) * limit


class Counter(TorchDispatchMode):
    """Looks at every operator: weights read, each place once, and operations of matrix products and convolutions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _weights(model)}
        self.paused = 0
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self._regions: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
        self._rows: dict[int, float] = defaultdict(float)
        self._chosen: dict[int, tuple[int, int]] = {}
        self.flops = 0.0

    @property
    def bytes_read(self) -> float:
        """Bytes of weights that were read."""
        whole = {key: min(sum(parts.values()), self._weights[key]) for key, parts in self._regions.items()}
        rows = sum(min(size, self._weights[key]) for key, size in self._rows.items())
        return sum(whole.values()) + rows

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing meanwhile."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.paused:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func._overloadpacket
        name = packet.__name__
        tensors = [a for a in _flat((args, kwargs)) if isinstance(a, torch.Tensor)]
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        elif "grouped_mm" in name:  # rows of one operand, each times one matrix of the other
            self.flops += 2.0 * tensors[0].numel() * tensors[1].shape[-1]
        if name == "topk" and tensors[0].ndim:
            experts, chosen = tensors[0].shape[-1], args[1]
            self._chosen[experts] = (tensors[0].numel() // max(experts, 1), chosen)
        if not func.is_view:
            for position, tensor in enumerate(tensors):
                if tensor.untyped_storage()._cdata in self._weights:
                    self._read(tensor, name, rows=_ROWS.get(name) == position, out=out)

    def read(self, weight: torch.Tensor) -> None:
        """Note that the whole of a weight is read."""
        if not self.paused:
            self._read(weight, "", rows=False, out=None)

    def _read(self, weight: torch.Tensor, name: str, *, rows: bool, out: Any) -> None:
        key, size = weight.untyped_storage()._cdata, float(weight.numel() * weight.element_size())
        routed = self._chosen.get(weight.shape[0]) if weight.ndim > 1 else None
        if routed is not None and (rows or "grouped_mm" in name):
            # A matrix per expert: only those that some token chose are read.
            tokens, chosen = routed
            size = size * (1 - (1 - chosen / weight.shape[0]) ** tokens)
        elif rows and isinstance(out, torch.Tensor):
            self._rows[key] += min(size, out.numel() * out.element_size())
            return
        self._regions[key][int(weight.storage_offset()), weight.numel()] = size


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


@contextmanager
def _watched(model: nn.Module, counter: Counter) -> Iterator[None]:
    """Attention counted by the pairs that its mask leaves, whatever computes it; the model is restored at the end."""
    with ExitStack() as stack:
        for site in discover(model):
            if site.kind != "attention":
                continue
            for path in site.instances:
                module = model.get_submodule(path)
                base = current(module, site.method)
                symbol = site.symbol or ""
                proxy = InterfaceProxy(innermost(base).__globals__[symbol], functools.partial(_attention, counter))
                stack.callback(install(module, site.method, rebind(base, names={symbol: proxy})))
        yield


def _attention(counter: Counter, found: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    def counted(module: Any, query: Any, key: Any, value: Any, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
        causal = kwargs.get("is_causal")
        if causal is None:
            causal = getattr(module, "is_causal", True)
        queries, keys = query.shape[-2], key.shape[-2]
        seen = pairs(queries, keys, window if isinstance(window, int) else None, bool(causal))
        heads = math.prod(query.shape[:-2])
        counter.flops += 0 if counter.paused else 2.0 * heads * seen * (query.shape[-1] + value.shape[-1])
        for extra in kwargs.values():  # such as sinks
            if isinstance(extra, nn.Parameter):
                counter.read(extra)
        with counter.pause():
            if query.device.type == "meta":
                return query.new_empty(*query.shape[:-3], queries, query.shape[-3], value.shape[-1]), None
            return found(module, query, key, value, mask, *args, **kwargs)

    return counted
