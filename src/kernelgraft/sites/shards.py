"""One rank's part of a model that transformers split over processes (tensor parallelism), as an ordinary model.

transformers puts a function around each module that takes part: it talks to the other ranks and calls the module's own
forward on this rank's tensors. Without these functions, and with each split parameter as the tensor that this rank
holds, a model computes its part and talks to nobody: its sites can be replayed, copied and timed on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, MethodType
from typing import Any

import torch
from torch import nn

from kernelgraft.identity import LOCAL, split_of
from kernelgraft.sites.install import wrapped


class Shards:
    """Switches a split model between its whole (as transformers left it) and this rank's part of it.

    What is installed on or taken off its modules meanwhile stays so in the other state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._card = split_of(model), sum(p.numel() for p in model.parameters())
        self._wrappers = [found for module in model.modules() if (found := _wrapper(module)) is not None]
        self._split = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and hasattr(parameter, "device_mesh")
        ]
        local: dict[int, nn.Parameter] = {}  # a tied parameter stays one
        for _, _, parameter in self._split:
            if id(parameter) not in local:
                with torch.no_grad():
                    part: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined]
                local[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        self._local = local
        # What the model itself holds is in no other module, so that nobody asks for its sizes.
        self._full = [
            (module, type(module), full)
            for name, module in model.named_modules()
            if "." in name and (full := _full(module)) is not None
        ]
        self._alone = False

    @property
    def alone(self) -> bool:
        """True while only this rank's part is there."""
        return self._alone

    def part(self) -> None:
        """Leave this rank's part only."""
        if self._alone:
            return
        for module, name, parameter in self._split:
            module._parameters[name] = self._local[id(parameter)]
        for module, _, cell in self._wrappers:
            method = cell.cell_contents
            if method.__func__ is type(module).forward:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = method
        for module, _, full in self._full:
            module.__class__ = full
        self._model.__dict__[LOCAL] = self._card
        self._alone = True

    def whole(self) -> None:
        """Put back what `part` took away."""
        if not self._alone:
            return
        del self._model.__dict__[LOCAL]
        for module, own, _ in self._full:
            module.__class__ = own
        for module, wrapper, cell in self._wrappers:
            method = module.__dict__.get("forward")
            cell.cell_contents = MethodType(type(module).forward, module) if method is None else method
            module.__dict__["forward"] = wrapper
        for module, name, parameter in self._split:
            module._parameters[name] = parameter
        self._alone = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """The whole inside, then what was there before."""
        before = self._alone
        self.whole()
        try:
            yield
        finally:
            if before:
                self.part()


def _full(module: nn.Module) -> type[nn.Module] | None:
    """For a product whose output is gathered from all ranks, or whose input is cut for them: a class that takes and
    gives the full sizes with this rank's weight alone; else None. In place of the others' parts stands the own one."""
    weight: Any = module._parameters.get("weight")
    found = _wrapper(module)
    if found is None or weight is None or not isinstance(module, nn.Linear) or not hasattr(weight, "placements"):
        return None
    style = next((c.cell_contents for c in found[1].__closure__ if hasattr(c.cell_contents, "output_layouts")), None)
    split, ranks = [p for p in weight.placements if not p.is_replicate()], weight.device_mesh.size()
    if style is None or len(split) != 1:
        return None
    gathers = split[0].dim == 0 and _is_replicate(style.output_layouts)
    cuts = split[0].dim == 1 and _is_replicate(style.input_layouts)
    return _stand_in(type(module), ranks if gathers else 1) if gathers or cuts else None


def _is_replicate(layout: Any) -> bool:
    return bool(getattr(layout, "is_replicate", bool)())


def _stand_in(base: type[nn.Module], times: int) -> type[nn.Module]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = base.forward(self, x[..., : self.weight.shape[1]])
        return torch.cat([part] * times, -1)[..., : self.out_features]

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _wrapper(module: nn.Module) -> tuple[nn.Module, Any, CellType] | None:
    """A module, the function that transformers put around its forward, and the cell that holds the forward."""
    found = module.__dict__.get("forward")
    cell = wrapped(module, found)
    if cell is None or not found.__module__.startswith("transformers."):
        return None
    return module, found, cell
