"""The stages in order: research, plan, integrate. Each reads the records of the one before and writes its own."""

from __future__ import annotations

from kernelgraft.pipeline.ablation import ablate
from kernelgraft.pipeline.compile_check import compile_check
from kernelgraft.pipeline.integration import Integration, integrate, make_graft, restricted, run_integration
from kernelgraft.pipeline.planning import already, candidates, chosen, make_plan, planned
from kernelgraft.pipeline.points import Use
from kernelgraft.pipeline.progress import Progress, silent
from kernelgraft.pipeline.ranks import led
from kernelgraft.pipeline.researching import PROMPT, computes_of, recapture, research
from kernelgraft.pipeline.verifying import Judges

__all__ = [
    "PROMPT",
    "Integration",
    "Judges",
    "Progress",
    "Use",
    "ablate",
    "already",
    "candidates",
    "chosen",
    "compile_check",
    "computes_of",
    "integrate",
    "led",
    "make_graft",
    "make_plan",
    "planned",
    "recapture",
    "research",
    "restricted",
    "run_integration",
    "silent",
]
