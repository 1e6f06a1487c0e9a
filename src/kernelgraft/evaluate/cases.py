"""What a Solution is judged on: captured calls, fresh values, other sizes, distributions and memory layouts."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from kernelgraft.families.base import Distribution, Family
from kernelgraft.families.points import holds
from kernelgraft.families.probe import DRAWN
from kernelgraft.records import Definition, Regime

HELD_OUT_VOLUME = 1 << 24
"""Random sizes whose axes multiply to more are not drawn: the oracle would take seconds."""
SIGNATURES = 6
"""Shapes that a Solution which is compiled per shape is judged on; torch.compile gives a function up after eight."""
LARGE = 1 << 20
"""An input of more elements whose size is fixed, a weight, is drawn once for all cases and laid out as it came."""
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)


@dataclass(frozen=True)
class Captured:
    """One captured call of a Definition."""

    inputs: tuple[Any, ...]
    """In the Definition's order, as the model passed them (strides, device)."""
    regime: Regime
    label: str
    axes: dict[str, int]
    """Sizes of the Definition's var axes."""


@dataclass(frozen=True)
class JudgeOptions:
    """How much is judged, and how long it may take."""

    seeds: int = 5
    """Fresh seeds from the operating system (C5)."""
    captured: int = 12
    """Largest number of captured calls."""
    seeded_shapes: int = 3
    """Captured shapes that every seed is tried on."""
    points: int = 32
    """Largest number of sizes (C6), besides `held_out` random ones."""
    held_out: int = 2
    distributions: tuple[Distribution, ...] = DISTRIBUTIONS
    layouts: tuple[str, ...] = ("strided", "offset", "transposed", "expanded")
    """Memory layouts that each input is tried in (C11)."""
    laid_out: Literal["each", "together"] = "each"
    """Each input alone in each layout and all of them, or only all of them."""
    repeats: int = 3
    """Calls of each case, each with other garbage in uninitialised memory (C9); at most 3."""
    gradients: bool = True
    """Compare gradients where the guard claims them."""
    interpret_first: bool = True
    """A cuTile Solution for a GPU is tried under the interpreter before it runs there."""
    static_gate: bool = True
    """Check C2; off only to test that the other checks do not rely on it."""
    timeout_s: float = 300.0
    """For all calls of one Solution together, compilation included."""
    memory_bytes: int = 8 << 30
    """Address space that a Solution may add (not enforced where it uses a GPU)."""
    fork: bool | None = None
    """One forked child a Solution; False: one fresh process, which is slower. None: fork where the system has it."""

    @classmethod
    def quick(cls) -> JudgeOptions:
        """Fewer cases of every kind, for sweeps over many models."""
        return cls(seeds=2, captured=4, seeded_shapes=1, points=10, held_out=1, layouts=("offset", "transposed"))


@dataclass(frozen=True)
class Case:
    """One input of the judge."""

    check: str
    """The check that it serves: a wrong result is reported under it."""
    label: str
    inputs: tuple[Any, ...]
    gradient: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Cases:
    """All inputs for one Solution, simplest first."""

    cases: tuple[Case, ...]
    seeds: tuple[int, ...]


@dataclass
class _Maker:
    definition: Definition
    family: Family
    device: torch.device
    seeds: tuple[int, ...]
    layouts: dict[tuple[tuple[str, int], ...], tuple[Any, ...]]
    """Captured inputs by their axes: fresh values of such sizes are laid out in memory as they are."""
    turn: int = 0
    large: dict[str, torch.Tensor] = field(default_factory=dict)
    """Large inputs of fixed size, by name: the same tensors in every case."""
    random: secrets.SystemRandom = field(default_factory=secrets.SystemRandom)

    def seed(self) -> int:
        self.turn += 1
        return self.seeds[self.turn % len(self.seeds)]

    def inputs(self, axes: dict[str, int], seed: int, distribution: Distribution = "normal") -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        known = DRAWN.set(self.large)
        try:
            drawn = self.family.inputs(self.definition, axes, generator, distribution)
        finally:
            DRAWN.reset(known)
        made = [self._placed(name, x) for name, x in zip(self.definition.inputs, drawn, strict=True)]
        patterns = self.layouts.get(_key(axes), made)
        return tuple(_like(x, p) if isinstance(x, torch.Tensor) else x for x, p in zip(made, patterns, strict=True))

    def _placed(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not is_large(self.definition, name, value):
            return value.to(self.device)
        return self.large.setdefault(name, value.to(self.device) if name not in self.large else value)

    def case(self, check: str, axes: dict[str, int], seed: int, distribution: Distribution = "normal") -> Case:
        label = f"{words(axes)} ({distribution}, seed {seed})"
        return Case(check, label, self.inputs(axes, seed, distribution), seed=seed)


def make(
    definition: Definition, family: Family, captured: Sequence[Captured], options: JudgeOptions, *, static_shapes: bool
) -> Cases:
    """Draw the cases; seeds come from the operating system at this moment.

    With `static_shapes` (a Solution that is compiled anew per shape) only captured shapes are used.
    """
    seeds = tuple(secrets.randbits(48) for _ in range(max(1, options.seeds)))
    device = next(x.device for x in captured[0].inputs if isinstance(x, torch.Tensor))
    if any(is_large(definition, n, x) for n, x in zip(definition.inputs, captured[0].inputs, strict=True)):
        quick = JudgeOptions.quick()
        few = ("seeds", "captured", "seeded_shapes", "points", "held_out")
        options = replace(options, **{name: min(getattr(options, name), getattr(quick, name)) for name in few})
        seeds = seeds[: options.seeds]
    calls = spread(captured, options.captured)
    if static_shapes:
        calls = _few_signatures(calls)
    maker = _Maker(definition, family, device, seeds, {_key(c.axes): c.inputs for c in reversed(calls)})
    traced = list({_key(c.axes): c.axes for c in captured}.values())
    cases = [Case("C8", f"the captured call {c.label}", _plain(c)) for c in calls]
    shapes = spread(list({_key(c.axes): c.axes for c in calls}.values()), options.seeded_shapes)
    cases += [maker.case("C5", axes, seed) for axes in shapes for seed in seeds]
    if not static_shapes:
        cases += _sizes(maker, traced, options)
    for distribution in options.distributions:
        cases += [maker.case("C7", axes, maker.seed(), distribution) for axes in shapes[: 1 if static_shapes else 2]]
    cases += _swapped(maker, shapes[0])
    if not static_shapes:
        cases += _layouts(maker, traced, options)
    if options.gradients:
        plain = maker.case("C8", shapes[0], maker.seed())
        cases.append(replace(plain, label=f"{plain.label}, gradients", gradient=True))
    return Cases(tuple(cases), seeds)


def is_large(definition: Definition, name: str, value: Any) -> bool:
    """True for an input of a Definition that is large because its constant axes are."""
    fixed = all(definition.axes[axis].value is not None for axis in definition.inputs[name].shape or ())
    return isinstance(value, torch.Tensor) and fixed and value.numel() > LARGE


def _key(axes: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(axes.items()))


def _few_signatures(calls: Sequence[Captured]) -> list[Captured]:
    """The calls of at most `SIGNATURES` different shapes and strides: each is a compilation."""
    groups: dict[str, list[Captured]] = {}
    for call in calls:
        signature = [(x.shape, x.stride()) for x in call.inputs if isinstance(x, torch.Tensor)]
        groups.setdefault(str(signature), []).append(call)
    kept = spread(list(groups), SIGNATURES)
    return [call for signature in kept for call in groups[signature]]


def _plain(captured: Captured) -> tuple[Any, ...]:
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in captured.inputs)


def _sizes(maker: _Maker, traced: list[dict[str, int]], options: JudgeOptions) -> Iterator[Case]:
    points = spread(maker.family.axis_points(maker.definition, traced), options.points)
    for axes in points + _held_out(maker, traced, options.held_out):
        yield maker.case("C6", axes, maker.seed())


def _held_out(maker: _Maker, traced: list[dict[str, int]], count: int) -> list[dict[str, int]]:
    """Random sizes that nobody can know beforehand; the family says which are possible."""
    found: list[dict[str, int]] = []
    for _ in range(20 * count):
        if len(found) == count:
            break
        axes = dict(maker.random.choice(traced))
        size = round(math.exp(maker.random.uniform(math.log(2), math.log(300))))
        names = list(axes) if maker.random.random() < 0.3 else [maker.random.choice(list(axes))] if axes else []
        axes.update(dict.fromkeys(names, size))
        sizes = {n: a.value for n, a in maker.definition.axes.items() if a.value is not None} | axes
        possible = holds(maker.definition.constraints, sizes) and math.prod(sizes.values()) <= HELD_OUT_VOLUME
        if possible and axes not in traced + found and axes in maker.family.axis_points(maker.definition, [axes]):
            found.append(axes)
    return found


def _swapped(maker: _Maker, axes: dict[str, int]) -> Iterator[Case]:
    """Inputs that are alike but for one of them, or but for one element: a cache that looks at less is caught."""
    first, second = maker.seeds[0], maker.seeds[-1]
    base, other = maker.inputs(axes, first), maker.inputs(axes, second)
    if first != second:
        for index, name in enumerate(maker.definition.inputs):
            made = (*base[:index], other[index], *base[index + 1 :])
            yield Case("C5", f"{words(axes)} ({name} from another seed, seed {first})", made, seed=first)
    if isinstance(base[0], torch.Tensor) and base[0].is_floating_point() and base[0].numel():
        nudged = base[0].contiguous().clone()
        nudged.view(-1)[maker.random.randrange(nudged.numel())] += 3
        made = (_like(nudged, base[0]), *base[1:])
        yield Case("C5", f"{words(axes)} (one element changed, seed {first})", made, seed=first)


def _layouts(maker: _Maker, traced: Sequence[dict[str, int]], options: JudgeOptions) -> Iterator[Case]:
    if not options.layouts:
        return
    points = [p for p in maker.family.axis_points(maker.definition, traced) if min(p.values(), default=2) > 1]
    axes = min(points, key=lambda p: sum(p.values()), default=traced[0])
    seed = maker.seed()
    base = tuple(x.contiguous() if isinstance(x, torch.Tensor) else x for x in maker.inputs(axes, seed))
    for layout in options.layouts:
        laid = [
            LAYOUTS[layout](x)
            if isinstance(x, torch.Tensor) and x.dim() and not is_large(maker.definition, name, x)
            else None
            for name, x in zip(maker.definition.inputs, base, strict=True)
        ]
        several = sum(v is not None for v in laid) > 1
        for index, (name, value) in enumerate(zip(maker.definition.inputs, laid, strict=True)):
            if value is not None and not (several and options.laid_out == "together"):
                made = (*base[:index], value, *base[index + 1 :])
                yield Case("C11", f"{words(axes)} ({name} {layout}, seed {seed})", made, seed=seed)
        together = tuple(b if v is None else v for b, v in zip(base, laid, strict=True))
        if several:
            yield Case("C11", f"{words(axes)} (all inputs {layout}, seed {seed})", together, seed=seed)


def _like(x: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """The values of `x` with the strides of `pattern` (same shape); where a stride is 0, those of index 0."""
    if x.stride() == pattern.stride() or not x.numel():
        return x
    narrow = x
    for dim, (size, stride) in enumerate(zip(pattern.shape, pattern.stride(), strict=True)):
        if stride == 0 and size > 1:
            narrow = narrow.narrow(dim, 0, 1)
    laid = torch.empty_strided(narrow.shape, pattern.stride(), dtype=x.dtype, device=x.device)
    return laid.copy_(narrow).expand(x.shape)


def _strided(x: torch.Tensor) -> torch.Tensor | None:
    if x.size(-1) < 2:
        return None
    wide = _garbage((*x.shape[:-1], 2 * x.size(-1)), x)
    view = wide[..., ::2]
    view.copy_(x)
    return view


def _offset(x: torch.Tensor) -> torch.Tensor:
    view = _garbage((x.numel() + 1,), x)[1:].view(x.shape)
    view.copy_(x)
    return view


def _transposed(x: torch.Tensor) -> torch.Tensor | None:
    """Two neighbouring dimensions swapped in memory; the last one stays where it is if possible, as in models."""
    pairs = [*((d, d + 1) for d in range(x.dim() - 2)), (x.dim() - 2, x.dim() - 1)]
    pair = next(((a, b) for a, b in pairs if a >= 0 and x.size(a) > 1 and x.size(b) > 1), None)
    return x.transpose(*pair).contiguous().transpose(*pair) if pair else None


def _expanded(x: torch.Tensor) -> torch.Tensor | None:
    """One row shown many times (stride 0)."""
    return x[:1].expand(x.shape) if x.dim() > 1 and x.size(0) > 1 else None


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "strided": _strided,
    "offset": _offset,
    "transposed": _transposed,
    "expanded": _expanded,
}


def _garbage(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """What must not be read lies between the elements."""
    value = float("nan") if like.is_floating_point() else 1
    return torch.full(tuple(shape), value, dtype=like.dtype, device=like.device)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spread, first and last among them."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[0]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def words(axes: dict[str, int]) -> str:
    """`batch_size=1 seq_len=7`."""
    return " ".join(f"{name}={size}" for name, size in axes.items()) or "its only shape"
