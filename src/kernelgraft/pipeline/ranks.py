"""Work on a model that is split over processes: the first rank leads, the others run the whole model with it.

What concerns one site (recording, recognising, judging, timing) is done by the first rank alone, on its own part of the
model; what runs the whole model runs on all ranks, with the same grafts on. All ranks get the first one's result, so
that they decide alike.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from kernelgraft.errors import KernelgraftError, UsageError
from kernelgraft.identity import split_of
from kernelgraft.models import Loaded
from kernelgraft.patch import Applied, apply
from kernelgraft.patch.applying import APPLIED
from kernelgraft.records import Graft
from kernelgraft.sites.capture import unchanged
from kernelgraft.sites.shards import Shards

Result = TypeVar("Result")

PATIENCE = datetime.timedelta(hours=24)
"""How long the others wait for the next call: a judgement of many Solutions lies between two."""
_leading: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def led(work: Callable[..., Result]) -> Callable[..., Result]:
    """`work(loaded, …)` for split models too: then every rank calls it, the first does it, all get what it returns.

    An error of the first rank is raised on all. What is returned must be picklable.
    """

    @functools.wraps(work)
    def anywhere(loaded: Loaded, *args: Any, **kwargs: Any) -> Result:
        model = loaded.model
        refuse_gathered(model)
        if split_of(model) is None or model in _leading:
            return work(loaded, *args, **kwargs)
        with _control(model) as control:
            if dist.get_rank() == 0:
                with _Leader(model, control) as leader:
                    return leader.result(lambda: work(loaded, *args, **kwargs))
            found: Result = _Follower(model, control).follow()
            return found

    return anywhere


def refuse_gathered(model: nn.Module) -> None:
    """Raise UsageError for a model whose parameters are there only while it runs: nothing in it can be replayed."""
    wrappers = {"FSDPModule", "FullyShardedDataParallel"}
    if any(c.__name__ in wrappers for m in model.modules() for c in type(m).__mro__):
        raise UsageError(
            f"the parameters of `{type(model).__name__}` are sharded by FSDP: integrate it before it is sharded, then "
            "`apply` the graft on every rank"
        )


@contextlib.contextmanager
def _control(model: nn.Module) -> Any:
    """A group of all ranks for what they tell each other, apart from the model's own."""
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UsageError(
            f"this rank holds only some layers of `{type(model).__name__}`: pipeline parallelism is not served, split "
            "it with `tp_plan` alone"
        )
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data: bytes, theirs: str, ours: str) -> Any:
    """A message; tensors of the sender's device are on ours."""
    return torch.load(io.BytesIO(data), map_location={theirs: ours}, weights_only=False)


class _Reference:
    """Stands for an object that both sides have: a cache that an earlier call made or took."""

    def __init__(self, number: int) -> None:
        self.number = number


def _is_cache(value: Any) -> bool:
    return any(c.__name__ == "Cache" for c in type(value).__mro__)


class _Leader:
    """The first rank: has only its own part of the model, but for calls of the whole, which the others make with it."""

    def __init__(self, model: nn.Module, control: Any) -> None:
        self._model, self._control = model, control
        self._device = str(next(model.parameters()).device)
        self._shards = Shards(model)
        self._inside = self._forward = False
        self._known: dict[int, int] = {}
        self._dead: list[int] = []
        self._numbers = 0
        self._grafts: dict[int, tuple[Graft, str]] = {}
        self._handles: list[Any] = []
        self._before_us: dict[str, Any] = {}

    def __enter__(self) -> _Leader:
        model = self._model
        _leading.add(model)
        generate: Any = model.generate
        self._before_us = {name: value for name, value in model.__dict__.items() if name == "generate"}
        model.__dict__["generate"] = functools.partial(self._call, "generate", generate)
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self._shards.part()
        return self

    def __exit__(self, *_: object) -> None:
        self._shards.whole()
        for handle in self._handles:
            handle.remove()
        del self._model.__dict__["generate"]
        self._model.__dict__.update(self._before_us)
        _leading.discard(self._model)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError("a copy of a model that is split over processes cannot run")

    def result(self, work: Callable[[], Result]) -> Result:
        """Do the work, and give all ranks what it returns or raises."""
        try:
            found = work()
        except BaseException as error:
            told = error if isinstance(error, KernelgraftError) else KernelgraftError(f"the first rank failed: {error}")
            self._tell(("raise", type(told), str(told)))
            raise
        self._tell(("return", found))
        return found

    def _tell(self, message: Any) -> None:
        dist.broadcast_object_list([_packed(message), self._device], src=0, group=self._control)

    def _call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call of the whole model together with the others."""
        if self._inside:
            return function(*args, **kwargs)
        self._begin(name, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        return result

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._inside:
            self._begin("forward", args, kwargs)
            self._forward = True

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._inside and self._forward:
            self._end(None if output is not None else RuntimeError("the call failed"))
            if output is not None:
                _remember(output, self._number)

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        new: list[tuple[str, str]] = []
        live = []
        for applied in self._model.__dict__.get(APPLIED, ()):
            if applied is not None and applied.active:
                graft = applied.graft
                if id(graft) not in self._grafts:
                    self._grafts[id(graft)] = graft, graft.content_hash()
                    new.append((self._grafts[id(graft)][1], graft.model_dump_json()))
                live.append(self._grafts[id(graft)][1])
        given = {key: self._sent(value) for key, value in kwargs.items()}
        dead, self._dead = self._dead, []
        mode = torch.is_grad_enabled(), self._model.training
        self._tell(("call", name, tuple(self._sent(a) for a in args), given, mode, live, new, dead))
        _raise_together(None, self._control)
        self._inside, self._forward = True, False
        self._shards.whole()

    def _end(self, error: BaseException | None) -> None:
        self._inside = self._forward = False
        self._shards.part()
        if error is None:
            _raise_together(None, self._control)
        else:
            _statuses(error, self._control)

    def _sent(self, value: Any) -> Any:
        """A cache that the others have as a reference to it; one that they have not is sent, and then known."""
        if not _is_cache(value):
            return value
        if id(value) in self._known:
            return _Reference(self._known[id(value)])
        return _Numbered(self._number(value), value)

    def _number(self, value: Any) -> int:
        self._numbers += 1
        self._known[id(value)] = self._numbers
        weakref.finalize(value, self._forget, id(value), self._numbers)
        return self._numbers

    def _forget(self, key: int, number: int) -> None:
        self._known.pop(key, None)
        self._dead.append(number)


class _Numbered:
    """An object that is sent for the first time, with its number."""

    def __init__(self, number: int, value: Any) -> None:
        self.number, self.value = number, value


def _remember(output: Any, number: Callable[[Any], Any]) -> None:
    """Number the caches in what a forward returned, in their order: the same on all ranks."""
    for value in output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else ():
        if _is_cache(value):
            number(value)


def _statuses(error: BaseException | None, control: Any) -> list[tuple[type[BaseException], str] | None]:
    """What happened on all ranks."""
    mine = None if error is None else (_kind(error), str(error))
    found: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(found, mine, group=control)
    return found


def _kind(error: BaseException) -> type[BaseException]:
    try:
        pickle.dumps(type(error))
    except Exception:  # a class made at run time: what is left is its message
        return KernelgraftError
    return type(error)


def _raise_together(error: BaseException | None, control: Any) -> None:
    """Raise on every rank what any of them failed with."""
    for rank, status in enumerate(_statuses(error, control)):
        if status is not None:
            kind, text = status
            known = kind if issubclass(kind, KernelgraftError) else KernelgraftError
            raise known(f"rank {rank}: {text}")


class _Follower:
    """Another rank: makes the calls of the whole model that the first one makes, with the grafts that it has on."""

    def __init__(self, model: nn.Module, control: Any) -> None:
        self._model, self._control = model, control
        self._device = str(next(model.parameters()).device)
        self._objects: dict[int, Any] = {}
        self._numbers = 0
        self._grafts: dict[str, Graft] = {}
        self._on: list[tuple[str, Applied]] = []

    def follow(self) -> Any:
        """Until the first rank is done: what it returned; raises what it raised."""
        training = self._model.training
        try:
            while True:
                box: list[Any] = [None, None]
                dist.broadcast_object_list(box, src=0, group=self._control)
                data, theirs = box
                what, *rest = _unpacked(data, theirs, self._device)
                if what == "return":
                    return rest[0]
                if what == "raise":
                    raise rest[0](rest[1])
                self._call(*rest)
        finally:
            self._put_on([])
            self._model.train(training)

    def _call(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: tuple[bool, bool],
        live: list[str],
        new: list[tuple[str, str]],
        dead: list[int],
    ) -> None:
        for number in dead:
            self._objects.pop(number, None)
        args, kwargs = tuple(self._had(a) for a in args), {key: self._had(value) for key, value in kwargs.items()}
        failed: BaseException | None = None
        try:
            self._grafts |= {key: Graft.model_validate_json(text) for key, text in new}
            self._put_on(live)
        except KernelgraftError as error:
            failed = error
        with contextlib.suppress(KernelgraftError):  # the first rank raises it, and says what comes next
            _raise_together(failed, self._control)
            grad, training = mode
            self._model.train(training)
            output: Any = None
            raised: Exception | None = None
            run: Any = self._model if name == "forward" else self._model.generate
            left = unchanged(self._model) if name == "generate" else contextlib.nullcontext()
            with torch.set_grad_enabled(grad), left:
                try:
                    output = run(*args, **kwargs)
                except Exception as error:  # told to the first rank, which has most likely raised the same
                    raised = error
            found = _statuses(raised, self._control)
            if name == "forward" and not any(found):
                _remember(output, self._keep)

    def _had(self, value: Any) -> Any:
        if isinstance(value, _Reference):
            return self._objects[value.number]
        if isinstance(value, _Numbered):
            self._numbers = value.number
            self._objects[value.number] = value.value
            return value.value
        return value

    def _keep(self, value: Any) -> None:
        self._numbers += 1
        self._objects[self._numbers] = value

    def _put_on(self, live: list[str]) -> None:
        """Have exactly these grafts on, in this order."""
        if [key for key, _ in self._on] == live:
            return
        while self._on:
            self._on.pop()[1].revert()
        for key in live:
            self._on.append((key, apply(self._grafts[key], self._model)))
