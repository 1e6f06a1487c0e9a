"""What a package of kernels offers, and how it gets less until the check of Layouts has nothing against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from kernelgraft.emit import hub_trial
from kernelgraft.emit.hub_classes import HubClass
from kernelgraft.emit.hub_fusions import HubFusion, settle
from kernelgraft.emit.hub_parallel import HubParallel
from kernelgraft.errors import UsageError
from kernelgraft.layouts.findings import Finding

Kernel = HubClass | HubFusion | HubParallel


@dataclass
class Offer:
    """The kernels of a package."""

    classes: list[HubClass]
    fusions: list[HubFusion]
    parallels: list[HubParallel]

    @property
    def kernels(self) -> list[Kernel]:
        """Fusions, the classes that they leave modules to, and what has functions in it."""
        settle(self.classes, self.fusions)
        return [*self.fusions, *(one for one in self.classes if one.alone), *self.parallels]

    def uses(self, family: str) -> bool:
        """Whether some kernel calls those of a family."""
        return any(one.family == family for one in self.classes) or any(family in p.families for p in self.parallels)

    def fit(
        self, stage: Path, config: PreTrainedConfig, device: str, write: Callable[[], None], skipped: list[str]
    ) -> list[str]:
        """Write the package until it fits the model; what the check then says.

        What does not fit is fused no more, then merged no more, then left out; `skipped` gets the reasons. UsageError
        if nothing is left.
        """
        while self.kernels:
            write()
            found = hub_trial.fits(stage, self.kernels, config, device)
            wrong = [finding for finding in found if finding.severity != "note"]
            if not wrong:
                return [str(finding) for finding in found]
            if not self._give_up(wrong, skipped):
                raise UsageError(f"the package does not fit the graft's model: {wrong[0]}")
        raise UsageError(f"the package does not fit the graft's model: {skipped[-1]}")

    def _give_up(self, wrong: Sequence[Finding], skipped: list[str]) -> bool:
        """Offer less; False if nobody is guilty."""
        for fusion in [one for one in self.fusions if _reason(wrong, one)]:
            skipped.append(f"{fusion.place} are not one kernel: {_reason(wrong, fusion)}")
            self.fusions.remove(fusion)
            return True
        offered: list[HubClass | HubParallel] = [*self.classes, *self.parallels]
        guilty = [one for one in offered if _reason(wrong, one)]
        merged = [one for one in guilty if one.merge]
        for one in merged or guilty:
            reason = _reason(wrong, one)
            if one.merge:
                skipped.append(f"the linears of `{one.owner}` are not merged: {reason}")
                one.merge = None
                if isinstance(one, HubParallel) and not one.functions:
                    self.parallels.remove(one)
            elif isinstance(one, HubParallel):
                skipped.append(f"what is patched in `{one.owner}`: {reason}")
                self.parallels.remove(one)
            else:
                skipped.append(f"{one.family} of `{one.owner}`: {reason}")
                self.classes.remove(one)
                self.fusions[:] = [f for f in self.fusions if one not in (f.norm, f.mlp)]
        if not guilty and self.fusions:
            skipped.append(f"norms and gated products are not one kernel: {wrong[0]}")
            self.fusions.clear()
            return True
        return bool(guilty)


def _reason(wrong: Sequence[Finding], one: Kernel) -> str | None:
    """What is wrong with a kernel; None if nothing is."""
    return next((str(finding) for finding in wrong if _speaks_of(finding, one)), None)


def _speaks_of(finding: Finding, one: Kernel) -> bool:
    if finding.kernel is not None:
        return finding.kernel == one.name
    named = f"`{one.name}`" in finding.message
    return named if isinstance(one, HubFusion) else named or f"`{one.owner}`" in finding.message
