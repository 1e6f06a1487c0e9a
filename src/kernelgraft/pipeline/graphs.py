"""Calls inside CUDA graphs: what they take when the host is out of the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

CALLS = 16
"""In one graph: launching the graph itself is then a small part."""
WARMUP = 33
"""Calls before a capture. What takes turns in a call must have had its turn by then: nothing is compiled in one."""
_abandoned: list[Any] = []
"""Graphs whose capture torch has not ended: its allocator of pinned memory may still ask them whether they capture."""


def captured_graphs(functions: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], int]:
    """Replays of graphs that hold so many calls of each function; what cannot be captured is left out."""
    found: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        if (graph := _captured(function)) is not None:
            found[name] = graph.replay
    return found, CALLS


def _captured(function: Callable[[], Any]) -> Any:
    """A graph of `CALLS` calls, None if a call needs the host (it reads a result, say) or there is no room for it."""
    torch.cuda.synchronize()
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # capture wants the first calls (compilation, workspaces) to be over
        for _ in range(WARMUP):
            function()
    current.wait_stream(stream)
    torch.cuda.synchronize()
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(CALLS):
                function()
    except Exception:  # whatever a call raises in a capture and torch makes of it: it is not one for a graph
        torch.cuda.set_stream(current)
        if _end_capture(torch.cuda.current_device(), pool):
            _abandoned.append(graph)
        torch.cuda.synchronize()
        return None
    return graph


def _end_capture(device: int, pool: Any) -> bool:
    """Tell torch that a capture is over which failed: up to 2.11 at least it goes on believing in it. True if it did.

    Its allocator would then refuse to give memory back or abort, and random numbers of the device would raise.
    """
    believed = True
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError as error:
        if "not currently recording" not in str(error):
            raise
        believed = False
    else:  # what torch has not ended it has not released either
        torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # the same numbers, without the mark of a capture
    return believed
