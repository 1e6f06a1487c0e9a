"""The next token from logits: argmax, or a draw among the k largest.

Semantics: `method`: `argmax` or `top_k`; then `k`, `temperature`, `top_p`, `softcap` (None: not capped). A draw takes
uniform numbers u as an input: of the kept tokens in order of falling probability (equal ones by rising index), the one
whose interval of the cumulative probability holds u. NaN counts as infinity. Exactly k tokens are kept, where a filter
by the k-th largest value keeps all that equal it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kernelgraft.families.base import Distribution
from kernelgraft.families.probe import draw
from kernelgraft.families.reference import torch_dtype
from kernelgraft.families.unsited import Shapes, Unsited, written
from kernelgraft.records import Definition


class Sampling(Unsited):
    """Choosing tokens."""

    name: ClassVar[str] = "sampling"

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`; u is uniform whatever the distribution."""
        sizes = {n: a.value for n, a in definition.axes.items() if a.value is not None} | axes
        shape = [sizes[axis] for axis in definition.inputs["logits"].shape or ()]
        logits = draw(shape, torch_dtype(definition.inputs["logits"].dtype), generator, distribution)
        if "u" not in definition.inputs:
            return [logits]
        return [logits, torch.rand(shape[0], generator=generator)]

    def work(self, inputs: Sequence[Any]) -> int:
        """See `Family.work`: rows of logits."""
        return int(inputs[0].shape[0])


def definition_for(
    *,
    vocab_size: int,
    dtype: torch.dtype,
    k: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    softcap: float | None = None,
) -> Definition:
    """argmax of each row, without `k`; with it, top-k sampling."""
    axes: dict[str, int | None] = {"rows": None, "vocab_size": vocab_size}
    inputs: Shapes = {"logits": (("rows", "vocab_size"), dtype)}
    outputs: Shapes = {"token": (("rows",), torch.int64)}
    if k is None:
        return written(
            FAMILY.name,
            f"argmax_v{vocab_size}",
            semantics={"method": "argmax"},
            axes=axes,
            inputs=inputs,
            outputs=outputs,
            body="def run(logits):\n    return torch.argmax(logits, dim=-1)",
            source="transformers.generation.utils:GenerationMixin._sample",
            description="The lowest index of the largest logit of each row.",
        )
    return written(
        FAMILY.name,
        f"top_k_v{vocab_size}_k{k}",
        semantics={"method": "top_k", "k": k, "temperature": temperature, "top_p": top_p, "softcap": softcap},
        axes=axes,
        inputs=inputs | {"u": (("rows",), torch.float32)},
        outputs=outputs,
        body=_body(k, temperature, top_p, softcap),
        source="transformers.generation.logits_process:TopKLogitsWarper.__call__",
        description=f"A token of each row, drawn by u among the {k} largest.",
    )


def _body(k: int, temperature: float, top_p: float, softcap: float | None) -> str:
    capped = [] if softcap is None else [f"    scores = torch.tanh(scores / {softcap!r}) * {softcap!r}"]
    nucleus = ["    shares = torch.where(before < " + f"{top_p!r} * shares.sum(-1, keepdim=True), shares, 0.0)"]
    lines = [
        "def run(logits, u):",
        "    scores = logits.float()",
        '    scores = torch.where(scores.isnan(), float("inf"), scores)',
        "    scores, tokens = scores.sort(dim=-1, descending=True, stable=True)",
        f"    scores, tokens = scores[:, :{k}], tokens[:, :{k}]",
        *capped,
        f"    scores = scores / {temperature!r}",
        "    shares = torch.where(scores == scores[:, :1], 1.0, (scores - scores[:, :1]).exp())",
        "    before = shares.cumsum(-1) - shares",
        *(nucleus if top_p < 1.0 else []),
        "    goal = u.unsqueeze(-1) * shares.sum(-1, keepdim=True)",
        "    reached = (shares > 0) & (before <= goal)",
        "    places = torch.arange(scores.shape[-1], device=scores.device)",
        "    place = torch.where(reached, places, 0).amax(-1, keepdim=True)",
        "    return tokens.gather(-1, place).squeeze(-1)",
    ]
    return "\n".join(lines)


FAMILY = Sampling()
