"""Scaled dot-product attention, as models call it through their attention interface.

A site has up to two Definitions: calls without a mask (`causal`, or `full` where the function hides nothing), and calls
whose mask says what is seen. Semantics of a recognised site:

- `num_heads`, `num_kv_heads`, `head_dim`, `value_dim`; `scaling`; `softcap` (None: none); `sinks`: one logit per head
  joins the softmax;
- `causal`: without a mask a query sees the keys up to its own (False: all); None if no call came without a mask;
  `decode_only`: this is known for single queries only; `slices_keys`: of more keys than queries the first q_len count;
- `mask`: `bool` (True: seen), `float` (added to the scores) or None; `mask_heads`: 1 or num_heads;
- `sliding_window`: the window that masks carry, so that fresh masks have it too;
- `expected`, `neutral`, `weights`, `module_causal`: what the seat needs.

Not covered: position biases, sparse or paged keys, block masks, dropout, returned attention weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from kernelgraft.families.attention_calls import SINKS, Bound, Keywords, bind, classify, probe
from kernelgraft.families.attention_reference import Closeness, body, compare, make_mask, seeing
from kernelgraft.families.base import Call, Distribution, Family, Recognition, Rejection, Seat
from kernelgraft.families.points import LARGEST_ELEMENTS, holds
from kernelgraft.families.probe import PROBE_DTYPES, draw
from kernelgraft.families.reference import as_tuple, body_function, define, dtype_name, torch_dtype
from kernelgraft.records import Definition, Site

UNMASKED = ((2, 5, 5), (2, 1, 7), (1, 3, 3))
MASKED = ((2, 5, 5), (2, 1, 9), (3, 3, 8))
"""Batch size, q_len and kv_len of fresh calls."""
LARGE = 16.0
"""Factor on the scores of the last fresh call in float32: a limit on them shows only when they are large."""


def attention_seat(
    original: Callable[..., Any],
    select: Callable[..., Any],
    *,
    expected: dict[str, Any],
    neutral: list[str],
    sinks: bool,
    causal: bool | None,
    module_causal: bool,
    decode_only: bool,
    slices_keys: bool,
    mask: str | None,
    mask_heads: int,
    weights: bool,
) -> Callable[..., Any]:
    """Replace the attention function; unknown keywords, other constants and other masks run the original.

    `expected` are keywords and the value that they must have, `neutral` those that change nothing. `weights`: the
    original also returns the attention weights, which a kernel does not; it runs when the configuration asks for them.
    """
    ignored = frozenset(neutral)
    required = frozenset(n for n in ("scaling", "softcap", "is_causal") if expected.get(n) is not None)

    def accept(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, kwargs: dict[str, Any]) -> Any:
        column, found = None, 0
        for name, given in kwargs.items():
            if name in ignored:
                continue
            if sinks and name == "s_aux":
                column = given
            elif name not in expected:
                return None
            else:
                wanted = expected[name]
                if given is not wanted and (isinstance(given, torch.Tensor) or given != wanted):
                    return None
                found += name in required
        if found < len(required) or (sinks and column is None):
            return None
        if weights and getattr(getattr(module, "config", None), "output_attentions", False):
            return None
        q_len, kv_len = query.shape[2], key.shape[2]
        inputs = [query, key, value]
        if attention_mask is None:
            if causal is None or getattr(module, "is_causal", True) != module_causal:
                return None
            if q_len > 1 and decode_only:
                return None
            if q_len > 1 and causal and kv_len != q_len:
                if not slices_keys or kv_len < q_len:
                    return None
                inputs = [query, key[:, :, :q_len], value[:, :, :q_len]]
        else:
            if mask is None or not isinstance(attention_mask, torch.Tensor):
                return None
            if (attention_mask.dtype == torch.bool) != (mask == "bool"):
                return None
            if attention_mask.shape[1:] != (mask_heads, q_len, kv_len):
                return None
            inputs.append(attention_mask)
        if sinks:
            inputs.append(column)
        return inputs

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *rest: Any, **kwargs: Any
    ) -> Any:
        inputs: Any = None if rest else accept(module, query, key, value, attention_mask, kwargs)
        kernel = None if inputs is None else select(*inputs)
        if kernel is None:
            return original(module, query, key, value, attention_mask, *rest, **kwargs)
        return kernel(*inputs), None

    return attention


class Attention(Family):
    """Attention over cached keys and values."""

    name: ClassVar[str] = "attention"
    kinds: ClassVar[frozenset[str]] = frozenset({"attention"})
    nan_may_vanish: ClassVar[bool] = True

    def original(self, call: Call) -> Callable[..., Any]:
        """See `Family.original`: the attention function itself, with the recorded call's keywords."""
        bound = bind(call)
        assert isinstance(bound, Bound), bound  # the site was recognised from this call
        sinks = bound.keywords.get(SINKS) is not None

        def kernel(*inputs: Any) -> Any:
            query, key, value, *rest = inputs
            keywords = {**bound.keywords, SINKS: rest.pop()} if sinks else bound.keywords
            return call.original(bound.module, query, key, value, rest.pop() if rest else None, **keywords)[0]

        return kernel

    def recognise(self, site: Site, calls: Sequence[Call]) -> Recognition | Rejection | None:
        """See `Family.recognise`."""
        found = [bind(call) for call in calls]
        bounds = [b for b in found if isinstance(b, Bound)]
        for reason in found:
            if isinstance(reason, str):
                return Rejection(self.name, reason)
        if not bounds:
            return None
        shapes = {(b.query.shape[1], b.key.shape[1], b.query.shape[3], b.value.shape[3], b.query.dtype) for b in bounds}
        if len(shapes) > 1:
            return Rejection(self.name, "calls differ in heads, head sizes or dtype")
        keywords = classify(bounds)
        if isinstance(keywords, str):
            return Rejection(self.name, keywords)
        semantics = _identify(bounds, keywords)
        if isinstance(semantics, str):
            return Rejection(self.name, semantics)
        definitions, served = [], 0
        for masked in (False, True):
            group = [b for b in bounds if (b.mask is not None) == masked]
            if not group and not (masked and semantics["mask"]):
                continue
            results = [c for b in group if (c := self._captured(semantics, b, masked=masked)) is not None]
            served += len(results)
            for result in results:
                if not result.acceptable:
                    errors = f"{result.original:.2g} (reference {result.reference:.2g})"
                    return Rejection(self.name, f"a captured output is relRMSE {errors} away from float64")
            error = max((c.difference for c in results), default=0.0)
            definitions.append(_definition(site, group or bounds, semantics, masked=masked, error=error))
        if not served:
            return Rejection(self.name, "its seat serves none of the captured calls")
        return Recognition(self.name, semantics, tuple(definitions))

    def _captured(self, semantics: dict[str, Any], bound: Bound, *, masked: bool) -> Closeness | None:
        """Judge a captured call through the seat; None if the seat leaves it to the original."""
        source = body(semantics, masked=masked)
        inputs: list[torch.Tensor] = []

        def select(*given: torch.Tensor) -> Callable[..., Any]:
            inputs.extend(given)
            return body_function(source)

        seat = self.seat(semantics)
        with torch.no_grad():
            seat.factory(bound.call.original, select, **seat.constants)(*bound.call.args, **bound.call.kwargs)
        rows = seeing(bound.mask, len(bound.query)) if masked else None
        return compare(source, inputs, bound.output, rows) if inputs else None

    def seat(self, semantics: dict[str, Any]) -> Seat:
        """See `Family.seat`."""
        names = ("expected", "neutral", "sinks", "causal", "module_causal", "decode_only", "slices_keys")
        return Seat(attention_seat, {n: semantics[n] for n in (*names, "mask", "mask_heads", "weights")})

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`.

        Huge values are put into `value` only, so that scores stay finite. An infinity is put where it makes every score
        of one query infinite, a NaN into one query: elsewhere the order of sums decides which other queries they reach.
        """
        sizes = {name: axes[name] if axis.value is None else axis.value for name, axis in definition.axes.items()}
        result = {}
        for name, spec in definition.inputs.items():
            shape, dtype = [sizes[axis] for axis in spec.shape or ()], torch_dtype(spec.dtype)
            if name == "attention_mask":
                result[name] = make_mask(shape, definition.meta.semantics, dtype, generator)
            elif name == "sinks" or distribution in ("inf", "nan") or (distribution == "huge" and name != "value"):
                result[name] = draw(shape, dtype, generator)
            else:
                result[name] = draw(shape, dtype, generator, distribution)
        if distribution in ("inf", "nan"):
            result["query"][0, 0, -1, 0] = float(distribution)
            result["key"][0, 0, :, 0] = result["key"][0, 0, :, 0].abs() + 0.5
        return list(result.values())

    def axis_points(self, definition: Definition, traced: Sequence[dict[str, int]]) -> list[dict[str, int]]:
        """See `Family.axis_points`: lengths of queries and keys that belong together, and batches."""
        const = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
        points = []
        for point in (*traced, *_points(traced)):
            kept = {name: point[name] for name, axis in definition.axes.items() if axis.value is None}
            sizes = {**const, **kept}
            largest = max(
                sizes["batch_size"] * sizes["num_heads"] * sizes["q_len"] * sizes["kv_len"] // 4,
                *(_elements(spec.shape or (), sizes) for spec in definition.inputs.values()),
            )
            fits = largest <= LARGEST_ELEMENTS and holds(definition.constraints, sizes)
            if kept not in points and (fits or point in traced):
                points.append(kept)
        return points

    def work(self, inputs: Sequence[Any]) -> int:
        """Number of queries: batch size times q_len."""
        query = inputs[0]
        return int(query.shape[0] * query.shape[2])


def _elements(shape: Sequence[str], sizes: dict[str, int]) -> int:
    count = 1
    for axis in shape:
        count *= sizes[axis]
    return count


def _points(traced: Sequence[dict[str, int]]) -> Iterator[dict[str, int]]:
    longest = max((t["kv_len"] for t in traced), default=8)
    lengths = [(n, n) for n in (1, 2, 3, 17, 127, longest - 1, longest + 1, 2 * longest, 513)]
    lengths += [(1, n) for n in (2, 3, 17, 127, longest - 1, longest + 1, 2 * longest, 1021)]
    lengths += [(2, 3), (3, 17), (17, 33), (5, 127)]
    for index, (q_len, kv_len) in enumerate(lengths):
        batch = (1, 2, 3)[index % 3]
        yield {"batch_size": batch, "q_len": q_len, "kv_len": kv_len, "mask_batch": batch if index % 2 else 1}


def _start(bounds: list[Bound], keywords: Keywords, *, sinks: bool) -> dict[str, Any]:
    """Semantics as far as they can be read off the captured calls."""
    first = bounds[0]
    scaling = keywords.expected.get("scaling")
    given = any(SINKS in b.keywords for b in bounds)
    ignored = [SINKS] if given and not sinks and any(b.keywords.get(SINKS) is not None for b in bounds) else []
    absent = {SINKS: None} if given and not sinks and not ignored else {}
    return {
        "num_heads": first.query.shape[1],
        "num_kv_heads": first.key.shape[1],
        "head_dim": first.query.shape[3],
        "value_dim": first.value.shape[3],
        "scaling": first.query.shape[3] ** -0.5 if scaling is None else float(scaling),
        "softcap": keywords.expected.get("softcap"),
        "sinks": sinks,
        "causal": None,
        "decode_only": False,
        "slices_keys": False,
        "mask": None,
        "mask_heads": 1,
        "sliding_window": keywords.sliding_window,
        "expected": {**keywords.expected, **absent},
        "neutral": [*keywords.neutral, *ignored],
        "weights": any(len(as_tuple(b.call.output)) > 1 and as_tuple(b.call.output)[1] is not None for b in bounds),
        "module_causal": bool(getattr(first.module, "is_causal", True)),
    }


def _identify(bounds: list[Bound], keywords: Keywords) -> dict[str, Any] | str:
    """The semantics that fresh calls of the original confirm, or why there are none."""
    reason = ""
    sinks = all(b.keywords.get(SINKS) is not None for b in bounds)
    for start in [_start(bounds, keywords, sinks=s) for s in ((True, False) if sinks else (False,))]:
        unmasked = [b for b in bounds if b.mask is None]
        masked = [b for b in bounds if b.mask is not None]
        found: dict[str, Any] | None = start
        if unmasked and (found := _without_mask(bounds[0], keywords, start)) is None:
            reason = reason or "without a mask, fresh tensors show neither causal nor full attention"
            continue
        settled = _with_mask(masked or bounds, keywords, found or start)
        if settled is None and masked:
            reason = reason or "with a mask, fresh tensors do not show attention"
            continue
        return settled or found or start
    return reason


def _without_mask(bound: Bound, keywords: Keywords, start: dict[str, Any]) -> dict[str, Any] | None:
    for causal in (True, False):
        trial = {**start, "causal": causal}
        if not _confirmed(bound, keywords, trial, UNMASKED, masked=False):
            continue
        longer = probe(bound, keywords, (2, 3, 8), None, torch.float32, sinks=start["sinks"], seed=1)
        if causal and longer is not None:
            inputs = [longer.query, longer.key[:, :, :3], longer.value[:, :, :3]]
            inputs += [] if longer.sinks is None else [longer.sinks]
            trial["slices_keys"] = compare(body(trial, masked=False), inputs, longer.output).acceptable
        return trial
    trial = {**start, "causal": True, "decode_only": True}
    single = [sizes for sizes in UNMASKED if sizes[1] == 1]
    return trial if _confirmed(bound, keywords, trial, single, masked=False) else None


def _with_mask(bounds: list[Bound], keywords: Keywords, start: dict[str, Any]) -> dict[str, Any] | None:
    """With the captured kind of mask, else with the kind that a constructed call shows."""
    kinds = dict.fromkeys(
        ("bool" if b.mask.dtype == torch.bool else "float", b.mask.shape[1]) for b in bounds if b.mask is not None
    )
    if len(kinds) > 1:
        return None
    for kind, heads in kinds or (("bool", 1), ("float", 1)):
        trial = {**start, "mask": kind, "mask_heads": heads}
        if _confirmed(bounds[0], keywords, trial, MASKED, masked=True):
            return trial
    return None


def _confirmed(
    bound: Bound,
    keywords: Keywords,
    semantics: dict[str, Any],
    sizes: Sequence[tuple[int, int, int]],
    *,
    masked: bool,
) -> bool:
    """True if the original computes these semantics for fresh tensors, in every probe dtype."""
    source = body(semantics, masked=masked)
    for dtype in PROBE_DTYPES:
        for seed, (batch, q_len, kv_len) in enumerate(sizes):
            mask = None
            if masked:
                shape = (batch, semantics["mask_heads"], q_len, kv_len)
                mask = make_mask(shape, semantics, dtype, torch.Generator().manual_seed(seed))
            scale = LARGE if dtype == torch.float32 and seed == len(sizes) - 1 else 1.0
            lengths = (batch, q_len, kv_len)
            fresh = probe(bound, keywords, lengths, mask, dtype, sinks=semantics["sinks"], seed=seed, scale=scale)
            if fresh is None:
                return False
            inputs = [fresh.query, fresh.key, fresh.value]
            inputs += [x for x in (fresh.mask, fresh.sinks) if x is not None]
            if not compare(source, inputs, fresh.output).acceptable:
                return False
    return True


def _definition(
    site: Site, bounds: list[Bound], semantics: dict[str, Any], *, masked: bool, error: float
) -> Definition:
    bound = bounds[0]
    dtype = bound.query.dtype
    same_size = semantics["head_dim"] == semantics["value_dim"]
    size = "head_dim" if same_size else "value_dim"
    axes: dict[str, int | None] = {
        "batch_size": None,
        "num_heads": semantics["num_heads"],
        "num_kv_heads": semantics["num_kv_heads"],
        "q_len": None,
        "kv_len": None,
        "head_dim": semantics["head_dim"],
    }
    inputs: dict[str, tuple[Sequence[str] | None, torch.dtype]] = {
        "query": (["batch_size", "num_heads", "q_len", "head_dim"], dtype),
        "key": (["batch_size", "num_kv_heads", "kv_len", "head_dim"], dtype),
        "value": (["batch_size", "num_kv_heads", "kv_len", size], dtype),
    }
    if not same_size:
        axes["value_dim"] = semantics["value_dim"]
    constraints = []
    if masked:
        axes |= {"mask_batch": None, "mask_heads": semantics["mask_heads"]}
        kind = torch.bool if semantics["mask"] == "bool" else dtype
        kind = next((b.mask.dtype for b in bounds if b.mask is not None), kind)
        inputs["attention_mask"] = (["mask_batch", "mask_heads", "q_len", "kv_len"], kind)
        constraints.append("mask_batch == 1 or mask_batch == batch_size")
    elif semantics["decode_only"]:
        constraints.append("q_len == 1")
    elif semantics["causal"]:
        constraints.append("q_len == 1 or q_len == kv_len")
    if semantics["sinks"]:
        inputs["sinks"] = (["num_heads"], bound.keywords[SINKS].dtype)
    kind_name = "masked" if masked else "causal" if semantics["causal"] else "full"
    text = json.dumps([semantics, axes, str(inputs)], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    heads = f"h{semantics['num_heads']}_kv{semantics['num_kv_heads']}_d{semantics['head_dim']}"
    return define(
        name=f"attention_{kind_name}_{heads}_{dtype_name(dtype)}_{digest}",
        op_type="attention",
        family=Attention.name,
        semantics=semantics,
        axes=axes,
        inputs=inputs,
        outputs={"output": (["batch_size", "q_len", "num_heads", size], dtype)},
        body=body(semantics, masked=masked),
        site=site,
        description=f"{kind_name} attention of {semantics['num_heads']} heads over {semantics['num_kv_heads']}.",
        reference_error=error,
        constraints=constraints,
    )


FAMILY = Attention()
