"""How much of the original's time is spent where a graft sits: a range around each site's original, by module path.

Only for CPU: there the profiler's ranges are the time of the thread that computes. On a GPU a range is the time of the
host, which says little; nothing is measured there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from kernelgraft.bench.result import Coverage
from kernelgraft.errors import KernelgraftError
from kernelgraft.patch.claims import Claim, collect, find_root
from kernelgraft.records import Graft
from kernelgraft.sites import InterfaceProxy, Undo, current, innermost, install, rebind, statements

WHOLE = "kernelgraft whole"
PREFIX = "kernelgraft site "
WARMUP_RUNS = 1


@dataclass(frozen=True)
class Range:
    """One stretch of time in which a named piece of code ran, µs."""

    name: str
    start_us: float
    end_us: float


def measure(model: nn.Module, graft: Graft, generate: Callable[[], Any], new_tokens: int) -> Coverage:
    """Profile `generate` with a range around the original of every site that the graft replaces; the model is restored.

    `new_tokens` is only written down. Raises KernelgraftError if no site was reached.
    """
    with ranged(model, graft):
        for _ in range(WARMUP_RUNS):
            generate()
        with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function(WHOLE):
            generate()
    events = [e for e in profiled.events() or () if e.name == WHOLE or e.name.startswith(PREFIX)]
    ranges = [Range(e.name, float(e.time_range.start), float(e.time_range.end)) for e in events]
    total, sites = shares(ranges)
    return Coverage(device="cpu", cpu_time_percent=total, sites_percent=sites, new_tokens=new_tokens)


def shares(ranges: Sequence[Range]) -> tuple[float, dict[str, float]]:
    """Percent of the whole inside any site, and inside each; a site inside another counts once in the first figure.

    The ranges are of one thread, so two of them nest or do not touch. Raises KernelgraftError if there is no whole.
    """
    whole = next((r for r in ranges if r.name == WHOLE), None)
    if whole is None or whole.end_us <= whole.start_us:
        raise KernelgraftError("the profiler lost the range of the whole run; run the benchmark again")
    length = whole.end_us - whole.start_us
    sites: dict[str, float] = {}
    total, covered_until = 0.0, whole.start_us
    for r in sorted((r for r in ranges if r is not whole), key=lambda r: (r.start_us, -r.end_us)):
        spent = r.end_us - r.start_us
        key = r.name.removeprefix(PREFIX)
        sites[key] = sites.get(key, 0.0) + 100 * spent / length
        if r.start_us >= covered_until:
            total += 100 * spent / length
            covered_until = r.end_us
    return total, sites


@contextlib.contextmanager
def ranged(model: nn.Module, graft: Graft) -> Iterator[None]:
    """The original code with a range around each site of the accepted patches; taken out again at the end."""
    methods: dict[tuple[int, str], list[Claim]] = {}
    for claim in collect(graft, find_root(model, graft.model.class_name)):
        methods.setdefault((id(claim.module), claim.site.method), []).append(claim)
    undos: list[Undo] = []
    try:
        for group in methods.values():
            undos.append(install(group[0].module, group[0].site.method, _with_ranges(group)))
        yield
    finally:
        for undo in reversed(undos):
            undo()


def _with_ranges(group: Sequence[Claim]) -> Callable[..., Any]:
    """One method with ranges around its sites: the parts inside it first, then the whole of it."""
    before = current(group[0].module, group[0].site.method)
    scope = innermost(before).__globals__
    names: dict[str, Any] = {}
    written = []
    for site in (claim.site for claim in group):
        symbol = site.symbol or ""
        if site.kind == "function":
            names[symbol] = _range(scope[symbol], site.key)
        elif site.kind == "attention":
            names[symbol] = InterfaceProxy(scope[symbol], functools.partial(_attention, site.key))
        elif site.kind == "statement":
            names[statements.injected_name(site)] = _range(statements.original(site), site.key)
            written.append(site)
    function: Callable[..., Any] = before
    if names:
        function = rebind(before, names=names, transform=statements.transformer(written) if written else None)
    for site in (claim.site for claim in group):
        if site.kind == "module":
            function = _range(function, site.key)
    return function


def _range(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def through(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + key):
            return function(*args, **kwargs)

    return through


def _attention(key: str, found: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    return _range(found, key)
