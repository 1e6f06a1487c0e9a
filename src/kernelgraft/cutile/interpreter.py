"""`interpreted()`: while it is active, every launch of a cuTile kernel runs here, on CPU tensors, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile.tune import Measurement, TuningResult, exhaustive_search
from torch.overrides import TorchFunctionMode

from kernelgraft.cutile.arrays import uninitialised
from kernelgraft.cutile.launching import interpret

_launch_on_gpu = ct.launch
"""`cuda.tile.launch`, as it is on a machine with a GPU."""

CAPABILITY = (9, 0)
PROCESSORS = 132
"""What launchers are told about the device that is not there."""


Launched = Callable[[Sequence[int], Any, Sequence[Any]], None]
"""Takes the grid, the kernel and the arguments of a launch."""


@dataclass(frozen=True)
class Options:
    """What becomes of a launch: it is given to `instead`, or interpreted with `shuffle` and `check`."""

    shuffle: int | None = None
    check: bool = True
    instead: Launched | None = None


_active: list[Options] = []


class _Stream:
    """Stands for a CUDA stream where a launcher asks for one."""

    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take whatever a stream is made with."""

    def wait_stream(self, stream: Any) -> None:
        """Everything has been done already."""

    def synchronize(self) -> None:
        """Everything has been done already."""


@dataclass(frozen=True)
class _Device:
    """Stands for a GPU's properties where a launcher sizes its grid by them."""

    name: str = "cuTile interpreter"
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    multi_processor_count: int = PROCESSORS
    total_memory: int = 1 << 37
    L2_cache_size: int = 60 << 20
    max_threads_per_multi_processor: int = 2048
    shared_memory_per_multiprocessor: int = 228 << 10
    warp_size: int = 32


_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}


class _Host(TorchFunctionMode):
    """Tensors that a launcher asks for on a GPU come on another device; those without values are marked if wished."""

    def __init__(self, device: str | None, mark: bool) -> None:
        super().__init__()
        self.device = device
        self.mark = mark

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Change the device, call, mark."""
        options = dict(kwargs or {})
        if self.device is not None:
            if _is_cuda(options.get("device")):
                options["device"] = self.device
            if func is torch.Tensor.to:
                args = [torch.device(self.device) if _is_cuda(value) else value for value in args]
            elif func is torch.Tensor.cuda:
                return args[0].to(self.device)
        found = func(*args, **options)
        if self.mark and func in _EMPTY and isinstance(found, torch.Tensor) and not found.is_inference():
            uninitialised(found)
        return found


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.split(":")[0] == "cuda"
    )


def _launch(stream: Any, grid: Any, kernel: Any, kernel_args: Any, /, *rest: Any, **options: Any) -> Any:
    """`ct.launch` while the interpreter is active; afterwards (kept by somebody) the real one."""
    if not _active:
        return _launch_on_gpu(stream, grid, kernel, kernel_args, *rest, **options)
    _do(_active[-1], grid, kernel, kernel_args)
    return None


def _do(mode: Options, grid: Sequence[int], kernel: Any, args: Sequence[Any]) -> None:
    if mode.instead is not None:
        mode.instead(grid, kernel, args)
    else:
        interpret(grid, kernel, args, shuffle=mode.shuffle, check=mode.check)


def _first_configuration(search_space: Any, *args: Any, **options: Any) -> Any:
    """`ct.tune.exhaustive_search` while the interpreter is active: nothing is timed, the first is taken."""
    configurations = list(search_space)
    if not configurations:
        raise ValueError("the search space is empty")
    if not _active:
        return exhaustive_search(configurations, *args, **options)
    best = Measurement(config=configurations[0], mean_us=0.0, num_samples=0, error_margin_us=0.0)
    return TuningResult(best=best, successes=[best], failures=[])


def _holders(value: Any) -> Iterator[tuple[Any, str]]:
    """Modules that hold an object under some name."""
    for module in list(sys.modules.values()):
        for name, held in list(getattr(module, "__dict__", {}).items()):
            if held is value and module is not sys.modules[__name__]:
                yield module, name


def _cuda_stand_ins() -> dict[str, Callable[..., Any]]:
    return {
        "Stream": _Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda *args, **options: _Stream(),
        "default_stream": lambda *args, **options: _Stream(),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda *args, **options: None,
        "get_device_capability": lambda *args, **options: CAPABILITY,
        "get_device_properties": lambda *args, **options: _Device(),
        "get_device_name": lambda *args, **options: _Device.name,
    }


@contextmanager
def interpreted(*, shuffle: int | None = None, check: bool = True) -> Iterator[None]:
    """Run every cuTile kernel that is launched meanwhile on the CPU, block after block.

    `ct.launch` (wherever a module keeps it), `ct.tune.exhaustive_search` and, on a machine without a GPU, what
    launchers ask of `torch.cuda` are replaced; tensors asked for on a GPU come on the CPU. Everything is put back at
    the end, also after an exception. `shuffle` is a seed: blocks run in a random order, so that a result that depends
    on the order shows. With `check`, the compiler's front end types each kernel first (its errors are raised here),
    and tensors from `torch.empty` and its like are watched: a kernel that uses what was never written is a fault.
    """
    with standing_in(Options(shuffle, check), None if torch.cuda.is_available() else "cpu"):
        yield


@contextmanager
def standing_in(options: Options, device: str | None) -> Iterator[None]:
    """Replace what `interpreted` says, and do with launches what `options` say.

    `device`: where tensors go that are asked for on a GPU; None: to the GPU.
    """
    with ExitStack() as stack:
        absent = not torch.cuda.is_available()
        replaced: list[tuple[Any, str, Any]] = []

        def put_back() -> None:
            for owner, name, value in reversed(replaced):
                setattr(owner, name, value)

        stack.callback(put_back)
        if not _active:
            for old, new in ((_launch_on_gpu, _launch), (exhaustive_search, _first_configuration)):
                for owner, name in list(_holders(old)):
                    replaced.append((owner, name, old))
                    setattr(owner, name, new)
            if absent:
                for name, function in _cuda_stand_ins().items():
                    replaced.append((torch.cuda, name, getattr(torch.cuda, name)))
                    setattr(torch.cuda, name, function)
        _active.append(options)
        stack.callback(_active.pop)
        stack.enter_context(_Host(device, options.check and options.instead is None))
        yield


def launch(
    grid: Sequence[int],
    kernel: Any,
    args: Sequence[Any],
    *,
    stream: Any = None,
    shuffle: int | None = None,
    check: bool | None = None,
) -> None:
    """Launch a cuTile kernel: on the GPU if its tensors are there, otherwise by the interpreter.

    `stream` defaults to torch's current one; `shuffle` and `check` are for the interpreter and default to those of the
    surrounding `interpreted()`, or to blocks in order, checked.
    """
    if _on_gpu(args):
        _launch_on_gpu(stream or torch.cuda.current_stream(), tuple(grid), kernel, tuple(args))
        return
    mode = _active[-1] if _active else Options()
    if shuffle is not None:
        mode = replace(mode, shuffle=shuffle)
    if check is not None:
        mode = replace(mode, check=check)
    _do(mode, grid, kernel, args)


def _on_gpu(args: Sequence[Any]) -> bool:
    return any(
        value.is_cuda if isinstance(value, torch.Tensor) else isinstance(value, tuple | list) and _on_gpu(value)
        for value in args
    )
