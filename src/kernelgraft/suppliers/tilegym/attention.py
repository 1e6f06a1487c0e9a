"""Which of TileGym's attention kernels computes a Definition, and how it is called.

None of them takes a mask as models make them. Of the two kernels for many queries the later one is called, with a
configuration of its list: the other (`tile_fmha`) takes heads of a power of two only, ignores the configuration that it
is given, and the one that it has without tuning spills registers on sm_90 and compiles for minutes for heads of 256.

Left out: windows, which are one key wider than the models' (masks carry them, and masks are refused); the decode kernel
with sinks, which rounds the logarithm of each part's sum to the dtype of the output before it combines the parts;
float32, whose products use no tensor cores: its tiles then spill kilobytes and compile for a minute (on sm_90).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelgraft.records import Definition
from kernelgraft.suppliers.peers import Draft, Operation, Writer, other_result, power_of_two
from kernelgraft.suppliers.tilegym.sources import calling

LARGEST_GRID = 65535
"""Blocks along the second axis of a grid, one for each head of each row of the batch."""
SMALLEST_HEAD, LARGEST_HEAD = 16, 256
TILES = {False: (128, 64, 2), True: (64, 64, 2)}
"""Whether heads have more than 128 channels → queries and keys of a tile, and blocks a multiprocessor."""

_ROUNDS = "float32 softmax, weights rounded for the second product; relies on padding with zeros past the last key"

OPERATIONS = {
    "fmha": Operation("attention", f"no mask, heads of any size; {_ROUNDS}"),
    "fmha_decode": Operation(
        "attention",
        "one query, no mask; keys in parts that a second launch combines; float32 softmax, weights and parts rounded; "
        "the number of keys is compiled in",
        static_shapes=True,
    ),
    "softcap_attention": Operation(
        "attention",
        f"scores capped by an approximate tanh, no mask; {_ROUNDS}; both lengths are compiled in",
        static_shapes=True,
    ),
    "sink_attention": Operation(
        "attention",
        f"sinks, no mask; {_ROUNDS}; four transposed copies, and one number copied to the GPU; the number of keys is "
        "compiled in",
        static_shapes=True,
    ),
}


def _attention(definition: Definition) -> Iterator[Draft | str]:
    semantics, inputs = definition.meta.semantics, definition.inputs
    dtype = inputs["query"].dtype
    head, heads = semantics["head_dim"], semantics["num_heads"]
    square = semantics["value_dim"] == head
    single = semantics["decode_only"]
    causal = bool(semantics["causal"]) or single
    if "attention_mask" in inputs:
        yield "it ignores masks"
    elif dtype == "float32":
        yield "float32 products use no tensor cores: its tiles spill their registers and compile for minutes"
    elif not SMALLEST_HEAD <= head <= LARGEST_HEAD or semantics["value_dim"] > LARGEST_HEAD:
        yield f"heads of {SMALLEST_HEAD} to {LARGEST_HEAD} channels are served"
    elif heads % semantics["num_kv_heads"]:
        yield "the number of heads is no multiple of that of the keys'"
    elif reason := other_result(definition, {"output": dtype}):
        yield reason
    elif semantics["sinks"]:
        yield _with_sinks(definition, square=square, causal=causal)
    elif semantics["softcap"] is not None:
        yield _with_softcap(definition, square=square, causal=causal)
    else:
        rows, columns, occupancy = TILES[head > 128 or semantics["value_dim"] > 128]
        tiles = f'{{"TILE_M": {rows}, "TILE_N": {columns}, "occupancy": {occupancy}}}'
        call = f"operation(query, key, value, scaling={semantics['scaling']!r}, is_causal={causal}"
        yield _draft("fmha", definition, f"{call}, kernel_configs={tiles})", tunes=True)
        if square:
            call = f"operation(query, key, value, {semantics['scaling']!r})"
            yield _draft("fmha_decode", definition, call, tunes=False, max_axes={"q_len": 1})


def _with_sinks(definition: Definition, *, square: bool, causal: bool) -> Draft | str:
    semantics = definition.meta.semantics
    head, kv = semantics["head_dim"], semantics["num_kv_heads"]
    groups = semantics["num_heads"] // kv
    if semantics["softcap"] is not None:
        return "it has no cap on scores beside sinks"
    if not causal:
        return "beside sinks it is causal"
    if not (square and power_of_two(head)):
        return f"beside sinks it takes heads of a power of two channels, not {head}"
    q = f"query.transpose(1, 2).unflatten(2, ({kv}, {groups}))"
    call = f"operation({q}, key.transpose(1, 2), value.transpose(1, 2), sinks, sm_scale={semantics['scaling']!r}"
    call += ", start_q=key.shape[2] - query.shape[2])"
    back = f"return result.unflatten(2, ({semantics['num_heads']}, {head}))"
    return _draft("sink_attention", definition, call, tunes=True, after=back)


def _with_softcap(definition: Definition, *, square: bool, causal: bool) -> Draft | str:
    semantics = definition.meta.semantics
    if not square:
        return "beside a cap on scores it takes keys and values of one size"
    call = f"operation(query, key, value, scaling={semantics['scaling']!r}, soft_cap={semantics['softcap']!r}"
    return _draft("softcap_attention", definition, f"{call}, is_causal={causal})", tunes=False)


def _draft(operation: str, definition: Definition, call: str, *, tunes: bool, after: str = "", **guard: Any) -> Draft:
    at = ", tunes=True, zero_padding=True" if tunes else ", zero_padding=True"
    source = calling(operation, definition, call, [after or "return result.transpose(1, 2).contiguous()"], at=at)
    rows = LARGEST_GRID // definition.meta.semantics["num_heads"]
    guard["max_axes"] = {"batch_size": rows, **guard.get("max_axes", {})}
    return Draft(operation, source, guard)


WRITERS: dict[str, Writer] = {"attention": _attention}
