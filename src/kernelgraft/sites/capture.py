"""Record what a model's sites are called with while it generates; the model is left as it was.

Every method is recorded through a copy installed on its instance, so the class and other models see nothing. Tensors
are copied with their strides; other objects of a call (a cache, a configuration) are kept as they are and so show
their last state.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from kernelgraft.errors import RebindError
from kernelgraft.identity import LOCAL
from kernelgraft.records import Regime, Site
from kernelgraft.sites import statements
from kernelgraft.sites.calls import Call, copied, differ, signature
from kernelgraft.sites.install import current, install
from kernelgraft.sites.rebind import callee, innermost, rebind

CALLS_PER_KIND = 4
"""At most so many calls of a site are kept per run and regime: a growing cache makes every step's shapes new."""


@dataclass(frozen=True)
class Run:
    """One greedy generation to record."""

    input_ids: torch.Tensor
    """int64 [batch, tokens]."""
    attention_mask: torch.Tensor | None
    """int64 [batch, tokens], 1 = token."""
    new_tokens: int
    cache: Literal["dynamic", "static"] = "dynamic"
    padded: bool = False
    """True if the batch is left padded."""

    @property
    def label(self) -> str:
        """What tells runs apart in messages."""
        return f"{self.cache} cache" + (", left padded" if self.padded else "")


@dataclass
class Capture:
    """What was recorded; keys are `Site.key`."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    """Distinct calls of the first instance that was called, in order."""
    counts: dict[str, dict[Regime, int]] = field(default_factory=dict)
    """Calls of all instances, per regime."""
    tokens: list[torch.Tensor | None] = field(default_factory=list)
    """Per run what `generate` returned, int64 [batch, tokens + new_tokens]; None for a run that was skipped."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Run label to the reason why the model cannot do it."""


def capture(model: nn.Module, sites: Sequence[Site], runs: Sequence[Run], *, seed: int = 0) -> Capture:
    """Generate greedily for each run and record the calls of all sites.

    A run with a static cache or left padding that the model cannot do, recorded or not, is skipped with its reason;
    any other failure is raised. Raises RebindError if a run works only while it is not recorded. Whatever happens,
    the model is as it was before, by identity.
    """
    result = Capture(counts={site.key: {} for site in sites}, calls={site.key: [] for site in sites})
    tape = _Tape(result)
    tokens: torch.Tensor | None
    for run in runs:
        tape.begin(run)
        try:
            with _recording(model, sites, tape):
                tokens = generate(model, run, seed=seed)
        except Exception as error:
            if run.cache == "dynamic" and not run.padded:
                raise
            if _works(model, run, seed):
                raise RebindError(
                    f"`{type(model).__name__}` fails only while it is recorded ({run.label}): {error}"
                ) from error
            result.skipped[run.label] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            tokens = None
        else:
            tape.keep()
        result.tokens.append(tokens)
    if LOCAL in vars(model):
        result.calls = {site.key: [_of_this_rank(site, call) for call in result.calls[site.key]] for site in sites}
    return result


def _of_this_rank(site: Site, call: Call) -> Call:
    """A recorded call with what this rank's part alone returns: recorded were results that ranks had added up."""
    given = [x for value in (*call.args, *call.kwargs.values()) for x in (value if type(value) is tuple else (value,))]
    plain = all(x is None or isinstance(x, (torch.Tensor, bool, int, float, str)) for x in given)
    if site.kind not in ("module", "statement") or not plain or call.mutated:
        return call  # a cache must not be written twice
    args, kwargs = copied((call.args, call.kwargs))
    with torch.no_grad():
        return replace(call, output=copied(call.original(call.module, *args, **kwargs)))


def generate(model: Any, run: Run, *, seed: int = 0) -> torch.Tensor:
    """The tokens of one run, int64 [batch, tokens + new_tokens]: greedy, in eval mode, exactly `new_tokens` of them."""
    from kernelgraft.models.shrinking import quiet

    config = model.generation_config
    extra: dict[str, Any] = {} if config.pad_token_id is not None else {"pad_token_id": _first(config.eos_token_id)}
    if run.cache == "static":
        # Compilation would record the trace instead of the calls.
        extra |= {"cache_implementation": "static", "disable_compile": True}
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(torch.no_grad())
        stack.enter_context(unchanged(model))
        model.eval()
        torch.manual_seed(seed)
        tokens: torch.Tensor = model.generate(
            run.input_ids,
            attention_mask=run.attention_mask,
            do_sample=False,
            num_beams=1,
            min_new_tokens=run.new_tokens,
            max_new_tokens=run.new_tokens,
            return_dict_in_generate=False,
            **extra,
        )
    return tokens.detach().clone()


def _first(token: Any) -> int:
    """An end token, or the first of several, as padding; 0 without one (its positions are masked)."""
    if isinstance(token, (list, tuple)):
        token = token[0] if token else None
    return 0 if token is None else int(token)


def _works(model: nn.Module, run: Run, seed: int) -> bool:
    try:
        generate(model, run, seed=seed)
    except Exception:  # the same model without us: whatever it raises says that it cannot do this run
        return False
    return True


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back, by identity, attributes and buffers that running a model changes: its mode, what generate leaves."""
    states = [state for module in model.modules() for state in (vars(module), module._buffers)]
    before = [dict(state) for state in states]
    try:
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            for name in state.keys() - old.keys():
                del state[name]
            state.update((name, value) for name, value in old.items() if state.get(name, states) is not value)


class _Tape:
    """Records run after run; nothing reaches the result before `keep`."""

    def __init__(self, result: Capture) -> None:
        self._result = result
        self._seen: set[Hashable] = set()
        self._instance: dict[str, str] = {}

    def begin(self, run: Run) -> None:
        """Start a run, forgetting one that was not kept."""
        self.regime: Regime = "prefill"
        self._run = run
        self._new: dict[Hashable, tuple[str, Call]] = {}
        self._kept: Counter[tuple[str, Regime]] = Counter()
        self._counts: Counter[tuple[str, Regime]] = Counter()
        self._first = dict(self._instance)

    def keep(self) -> None:
        """Add what was recorded since `begin` to the result."""
        for key, call in self._new.values():
            self._result.calls[key].append(call)
        for (key, regime), count in self._counts.items():
            counts = self._result.counts[key]
            counts[regime] = counts.get(regime, 0) + count
        self._seen |= self._new.keys()
        self._instance = self._first

    def play(
        self,
        site: Site,
        where: tuple[str, nn.Module],
        original: Callable[..., Any],
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make one call through `run` and record it as a call of `original`."""
        key, regime, (instance, module) = site.key, self.regime, where
        self._counts[key, regime] += 1
        # Expert modules may never be called, so it is the first instance that is called which counts as the first.
        if self._first.setdefault(key, instance) != instance or self._kept[key, regime] >= CALLS_PER_KIND:
            return run(*args, **kwargs)
        # Attention's shapes can hide a mask's content: there each cache and padding counts as new.
        kind = self._run.label if site.kind == "attention" else ""
        sort = (key, regime, kind, signature(args), signature(kwargs))
        if sort in self._seen or sort in self._new:
            return run(*args, **kwargs)
        before = copied((args, kwargs))
        self._kept[key, regime] += 1
        output = run(*args, **kwargs)
        mutated = (
            *(f"args[{i}]" for i, (a, b) in enumerate(zip(args, before[0], strict=True)) if differ(b, a)),
            *(f"kwargs.{name}" for name, value in kwargs.items() if differ(before[1][name], value)),
        )
        kept = copied(output)
        call = Call(
            instance, module, before[0], before[1], kept, regime, original, self._run.cache, self._run.padded, mutated
        )
        self._new[sort] = (key, call)
        return output


@contextmanager
def _recording(model: nn.Module, sites: Sequence[Site], tape: _Tape) -> Iterator[None]:
    """Install recording copies of all methods that are, or hold, a site."""
    by_method: dict[tuple[str, str], list[Site]] = defaultdict(list)
    for site in sites:
        for instance in site.instances:
            by_method[(instance, site.method)].append(site)
    with ExitStack() as stack:
        stack.callback(_watch_regime(model, tape).remove)
        for (instance, name), held in by_method.items():
            module = model.get_submodule(instance)
            stack.callback(install(module, name, _recorder(tape, (instance, module), name, held)))
        yield


def _watch_regime(model: nn.Module, tape: _Tape) -> Any:
    """Tell prefill from decode by the number of tokens in each call of the model that generates."""
    from transformers import GenerationMixin

    # Not the outermost module where an adapter's wrapper is around the model: generating goes past its forward.
    generating = next((m for m in model.modules() if isinstance(m, GenerationMixin)), model)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
        first = next((t for t in tokens if isinstance(t, torch.Tensor)), None)
        tape.regime = "decode" if first is not None and first.shape[1] == 1 else "prefill"

    return generating.register_forward_pre_hook(before, with_kwargs=True)


def _recorder(tape: _Tape, where: tuple[str, nn.Module], name: str, sites: Sequence[Site]) -> Callable[..., Any]:
    """The method with every site in it recorded."""
    base = current(where[1], name)
    scope = innermost(base).__globals__
    names: dict[str, Any] = {}
    for site in sites:
        if site.kind == "function":
            names[site.symbol or ""] = _function(tape, site, where, callee(scope[site.symbol or ""]))
        elif site.kind == "attention":
            names[site.symbol or ""] = _attention(tape, site, where, scope[site.symbol or ""])
        elif site.kind == "statement":
            names[statements.injected_name(site)] = _statement(tape, site, where)
    rewritten = [site for site in sites if site.kind == "statement"]
    transform = statements.transformer(rewritten) if rewritten else None
    method: Callable[..., Any] = rebind(base, names=names, transform=transform) if names else base
    for site in sites:
        if site.kind == "module":
            method = _module(tape, site, where, base, method)
    return method


def _function(
    tape: _Tape, site: Site, where: tuple[str, nn.Module], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        return tape.play(site, where, original, original, args, kwargs)

    return recorded


def _attention(tape: _Tape, site: Site, where: tuple[str, nn.Module], real: Any) -> Any:
    from kernelgraft.sites.attention import InterfaceProxy

    return InterfaceProxy(real, lambda found, _: _function(tape, site, where, found))


def _statement(tape: _Tape, site: Site, where: tuple[str, nn.Module]) -> Callable[..., Any]:
    original = statements.original(site)

    def recorded(module: nn.Module, residual: Any, hidden_states: Any) -> Any:
        return tape.play(site, where, original, functools.partial(original, module), (residual, hidden_states), {})

    return recorded


def _module(
    tape: _Tape, site: Site, where: tuple[str, nn.Module], original: Callable[..., Any], method: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def recorded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tape.play(site, where, original, functools.partial(method, self), args, kwargs)

    return recorded
