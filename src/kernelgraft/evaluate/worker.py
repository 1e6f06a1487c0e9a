"""Runs one Solution on the judge's inputs, in a process of its own.

It gets sources and inputs, never a reference or an expected output, and writes outputs and facts about each call; what
they mean is decided elsewhere. Every case is called three times (under the interpreter before a GPU run once) with the
same values in the same buffers, and memory that is handed out uninitialised is filled with another garbage each time.

A Solution that rewrites the worker's own memory on purpose can forge the facts; the static gate is against that.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file, save_file

from kernelgraft import machine
from kernelgraft.evaluate.free_memory import FreeMemory
from kernelgraft.records import Solution
from kernelgraft.suppliers.load import load

POISONS = (0xFF, 0xA5, 0x7B)
"""Bytes of uninitialised memory in the three calls. As floats: NaN; about -3e-16 (float16 -0.02); about 1e36 (6e4)."""
GUARD_BYTES = 4096
"""Behind every input buffer lie this many bytes that nobody may write."""
GUARD_VALUE = 0xA5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_PERTURB = -1, -3, -6
"""glibc's mallopt parameters. The last fills what malloc hands out; 0xFF would switch it off, so 0x7F stands in."""


def main(folder: Path) -> int:
    """Do the job in `folder`: `request.json` and `inputs.safetensors` in, `facts.json` and `outputs.safetensors` out.

    Returns the exit status: 0 if all cases were called, 1 if the Solution could not be imported or ended the process.
    """
    request = json.loads((folder / "request.json").read_text())
    _confine(request)
    torch.set_num_threads(1)
    with (folder / "progress").open("w") as progress:
        session = _Session(request, load_file(folder / "inputs.safetensors"), progress)
        session.run()
    save_file(session.results, folder / "outputs.safetensors")
    draft = folder / "facts.draft"
    draft.write_text(json.dumps(session.facts))
    draft.rename(folder / "facts.json")
    return 1 if "error" in session.facts else 0


class _Session:
    """One Solution and its cases; `facts` are for the judge, `results` are what the Solution returned."""

    def __init__(self, request: dict[str, Any], inputs: dict[str, torch.Tensor], progress: TextIO) -> None:
        self.request, self.inputs, self.progress = request, inputs, progress
        self.device = torch.device(request["device"])
        self.facts: dict[str, Any] = {"cases": {}}
        self.results: dict[str, torch.Tensor] = {}
        self.buffers = _Buffers(self.device)
        self.poison = _Poison(self.device, wrap=request["wrap_allocations"])

    def run(self) -> None:
        if self._meets_compiler():
            # It replaces `torch.manual_seed` by one of its own.
            importlib.import_module("torch._dynamo")
        before = _namespaces()
        try:
            with _interpreter(self.request["interpret"]):
                self.calls()
        except BaseException as error:  # also SystemExit: a Solution may not end the process quietly
            traceback.print_exc()
            self.facts["error"] = _words(error.__cause__ or error)
        after = _namespaces()
        added = (name for name in after if name.startswith("torch.Tensor.") and name not in before)
        changed = (name for name, value in before.items() if after.get(name) is not value)
        self.facts["patched"] = [*changed, *added]
        self.facts["threads"] = threading.active_count()

    def _meets_compiler(self) -> bool:
        """True if the Solution imports torch's compiler: it names it, or the first gradient of a custom op does."""
        solution, cases = self.request["solution"], self.request["cases"]
        named = any("torch.compiler" in source["content"] for source in solution["sources"])
        return solution["meta"]["uses_compiler"] and (named or any(case["cotangents"] for case in cases))

    def calls(self) -> None:
        self.say("import")
        entry = load(Solution.model_validate(self.request["solution"]))
        for case in self.request["cases"]:
            self.say(case["id"])
            judged = self.gradients if case["cotangents"] else self.case
            try:
                found = judged(entry, case)
            except Exception as error:
                traceback.print_exc()
                found = {"error": _words(error)}
            self.facts["cases"][str(case["id"])] = found

    def say(self, what: str | int) -> None:
        self.progress.write(f"{what}\n")
        self.progress.flush()

    def case(self, entry: Callable[..., Any], case: dict[str, Any]) -> dict[str, Any]:
        first: list[torch.Tensor] = []
        held: list[torch.Tensor] = []
        found: dict[str, Any] = {"mutated": [], "aliased": [], "overwritten": False, "differs": []}
        for repeat, byte in enumerate(POISONS[: self.request["repeats"]]):
            # The same buffers and the same Python objects in every case of a shape: a cache keyed on either is stale.
            arguments = self.buffers.fill(case["inputs"], self.inputs)
            with torch.no_grad(), self.poison.filling(byte):
                started = machine.clock()
                outputs = entry(*arguments)
                self.buffers.synchronize()
                seconds = machine.clock() - started
            self.facts.setdefault("warmup_seconds", seconds)
            listed = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
            changed = self.buffers.changed(case["inputs"], self.inputs)
            found["mutated"] += [i for i in changed if i not in found["mutated"]]
            described = [_describe(x) for x in listed]
            tensors = [x for x in listed if isinstance(x, torch.Tensor)]
            kept = [_kept(x) for x in tensors]
            if self.poison.free is not None:
                self.poison.free.expect(tensors)
            if repeat == 0:
                found["outputs"] = described
                found["aliased"] = self.buffers.aliased(listed)
                self.results.update({f"{case['id']}.{i}": x for i, x in enumerate(kept)})
                first, held = kept, tensors
                continue
            if described != found["outputs"]:
                found["outputs_changed"] = True
                break
            if not all(_same(a, b) for a, b in zip(kept, first, strict=True)):
                found["differs"].append(repeat)
                self.results.update({f"{case['id']}.{i}.{repeat}": x for i, x in enumerate(kept)})
            # What the first call returned is still held: a later call must neither write into it nor return it again.
            shared = any(_overlap(x, y) for x in held for y in tensors if x.numel() and y.numel())
            found["overwritten"] |= shared or not all(_same(_kept(a), b) for a, b in zip(held, first, strict=True))
        return found

    def gradients(self, entry: Callable[..., Any], case: dict[str, Any]) -> dict[str, Any]:
        """Gradients of the wanted inputs for given cotangents; whether the original has any is not known here."""
        values, wanted = self.inputs, case["wanted"]
        arguments = [
            values[i["key"]].to(self.device).view(i["size"]) if "key" in i else i["value"] for i in case["inputs"]
        ]
        with torch.enable_grad():
            for index in wanted:
                arguments[index] = arguments[index].clone().requires_grad_()
            outputs = entry(*arguments)
            listed = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
            flows = [
                (y, values[key].to(self.device).view(y.shape))
                for y, key in zip(listed, case["cotangents"], strict=True)
                if key and y.requires_grad
            ]
            if not flows:
                return {}
            leaves = [arguments[i] for i in wanted]
            found = torch.autograd.grad([y for y, _ in flows], leaves, [c for _, c in flows], allow_unused=True)
        given = {i: g for i, g in zip(wanted, found, strict=True) if g is not None}
        self.results.update({f"{case['id']}.grad.{i}": _kept(g) for i, g in given.items()})
        return {}


@contextmanager
def _interpreter(wanted: bool) -> Iterator[None]:
    """Runs cuTile kernels on CPU tensors, as on a machine without a GPU."""
    if not wanted:
        yield
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from kernelgraft.cutile import interpreted

    with interpreted():
        yield


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _describe(output: Any) -> dict[str, Any]:
    if not isinstance(output, torch.Tensor):
        return {"type": type(output).__name__}
    return {
        "type": "Tensor" if type(output) is torch.Tensor else type(output).__name__,
        "size": list(output.shape),
        "dtype": str(output.dtype).removeprefix("torch."),
        "device": str(output.device),
        "contiguous": output.is_contiguous(),
    }


def _kept(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(_bytes(a), _bytes(b)))


class _Buffers:
    """Input buffers, one per place and layout, refilled for every call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.used: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.there: dict[str, torch.Tensor] = {}

    def fill(self, specs: Sequence[dict[str, Any]], values: dict[str, torch.Tensor]) -> list[Any]:
        self.used = {}
        return [self._one(i, s, values) if "key" in s else s["value"] for i, s in enumerate(specs)]

    def _one(self, index: int, spec: dict[str, Any], values: dict[str, torch.Tensor]) -> torch.Tensor:
        flat = self._value(spec["key"], values)
        key = (index, flat.dtype, flat.numel(), spec["offset"], *spec["size"], "/", *spec["stride"])
        if key not in self.made:
            guard = max(1, GUARD_BYTES // flat.element_size())
            whole = torch.zeros(spec["offset"] + flat.numel() + guard, dtype=flat.dtype, device=self.device)
            body, end = whole[spec["offset"] : spec["offset"] + flat.numel()], whole[spec["offset"] + flat.numel() :]
            self.made[key] = whole.as_strided(spec["size"], spec["stride"], spec["offset"]), body, _bytes(end)
        view, body, end = self.used[index] = self.made[key]
        # Through `.data`, so that the version counter does not tell that the values are new.
        body.data.copy_(flat)
        end.data.fill_(GUARD_VALUE)
        return view

    def _value(self, key: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """The given values on the device, where they stay: a weight that every case reads would take long to bring."""
        if key not in self.there:
            self.there[key] = values[key].to(self.device)
        return self.there[key]

    def changed(self, specs: Sequence[dict[str, Any]], values: dict[str, torch.Tensor]) -> list[int]:
        """Inputs whose bytes, or the bytes between or behind their elements, are not those that were given."""
        found = []
        for index, (_, body, end) in self.used.items():
            same = _same(body, self._value(specs[index]["key"], values))
            if not same or bool((end != GUARD_VALUE).any()):
                found.append(index)
        return found

    def aliased(self, outputs: Sequence[Any]) -> list[str]:
        """Outputs that lie in an input's memory, or in each other's, in words."""
        places = {view.untyped_storage().data_ptr(): index for index, (view, _, _) in self.used.items()}
        tensors = [(i, x) for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.numel()]
        found = [
            f"output {i} lies in the memory of input {places[pointer]}"
            for i, x in tensors
            if (pointer := x.untyped_storage().data_ptr()) in places
        ]
        for position, (i, x) in enumerate(tensors):
            found += [f"outputs {i} and {j} share memory" for j, y in tensors[position + 1 :] if _overlap(x, y)]
        return found

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """True if two tensors have an element in common."""
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or x.element_size() != y.element_size():
        return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    taken = torch.zeros(places.numel(), dtype=torch.bool)
    taken[places.as_strided(x.shape, x.stride(), x.storage_offset()).reshape(-1)] = True
    return bool(taken[places.as_strided(y.shape, y.stride(), y.storage_offset()).reshape(-1)].any())


class _Poison:
    """Fills uninitialised memory: torch's allocating functions are wrapped, and glibc's malloc fills what it hands out.

    The wrappers stay for good, so that a Solution that took `torch.empty` at import has them too. They are left out for
    a Solution that compiles: its compiler would trace through them. Then malloc (GPU: what the allocator has free) is
    left.
    """

    FUNCTIONS = ("empty", "empty_like", "empty_strided", "empty_permuted")
    METHODS = ("new_empty", "new_empty_strided")

    def __init__(self, device: torch.device, *, wrap: bool) -> None:
        self.byte: int | None = None
        self.device = device
        self.free = FreeMemory(device) if device.type == "cuda" else None
        self.mallopt = _mallopt() if device.type == "cpu" else None
        if self.mallopt:
            # Keep freed memory: fetching it anew page by page would take most of the time.
            self.mallopt(M_MMAP_THRESHOLD, 32 << 20)
            self.mallopt(M_TRIM_THRESHOLD, 1 << 30)
        if wrap:
            for owner, names in ((torch, self.FUNCTIONS), (torch.Tensor, self.METHODS)):
                for name in names:
                    setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(allocate)
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = allocate(*args, **kwargs)
            if self.byte is not None and made.device.type != "meta" and made.numel():
                storage = torch.tensor([], dtype=torch.uint8, device=made.device).set_(made.untyped_storage())
                storage.fill_(True if made.dtype == torch.bool else self.byte)
            return made

        return poisoned

    @contextmanager
    def filling(self, byte: int) -> Iterator[None]:
        self.byte = byte
        if self.free is not None:
            self.free.fill(byte)  # for allocations that do not go through the wrappers
        if self.mallopt:
            self.mallopt(M_PERTURB, (0x7F if byte == 0xFF else byte) ^ 0xFF)
        try:
            yield
        finally:
            self.byte = None
            if self.mallopt:
                self.mallopt(M_PERTURB, 0)


def _mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    return function


def _namespaces() -> dict[str, Any]:
    """What a Solution could replace to be judged by other rules."""
    owners = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.functional": torch.nn.functional}
    return {f"{owner}.{name}": value for owner, space in owners.items() for name, value in vars(space).items()}


def _confine(request: dict[str, Any]) -> None:
    """Limits of the operating system, where it has them: no core dumps, bounded files, processor time and memory."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 4 << 30)]
    limits.append((resource.RLIMIT_CPU, int(request["timeout_s"]) + 10))
    statm = Path("/proc/self/statm")
    if request["device"] == "cpu" and statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        limits.append((resource.RLIMIT_AS, used + request["memory_bytes"]))
    for what, wanted in limits:
        _, hard = resource.getrlimit(what)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(what, (value, hard))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
