"""Calls inside CUDA graphs: what they take when the host is out of the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

CALLS = 16
"""In one graph: launching the graph itself is then a small part."""
WARMUP = 3


def captured_graphs(functions: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], int]:
    """Replays of graphs that hold so many calls of each function; what cannot be captured is left out."""
    found: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        if (graph := _captured(function)) is not None:
            found[name] = graph.replay
    return found, CALLS


def _captured(function: Callable[[], Any]) -> Any:
    """A graph of `CALLS` calls, None if a call needs the host (it reads a result, say)."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # capture wants the first calls (compilation, workspaces) to be over
        for _ in range(WARMUP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                function()
    except RuntimeError:  # also torch's own errors of capturing: the call is not one for a graph
        torch.cuda.synchronize()
        return None
    return graph
