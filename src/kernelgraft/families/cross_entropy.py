"""The cross entropy of a language model's head, from hidden states: logits = hidden · weightᵀ, then the loss.

Semantics: `reduction` (`mean` over the labels that are not ignored, `sum`, `none`), `ignore_index`, `scale` (times the
logits), `softcap` (softcap · tanh(logits / softcap), None: not capped). The loss is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kernelgraft.families.base import Distribution
from kernelgraft.families.probe import draw
from kernelgraft.families.reference import torch_dtype
from kernelgraft.families.unsited import Unsited, written
from kernelgraft.records import Definition

IGNORED_SHARE = 5
"""One label of so many is ignored."""


class CrossEntropy(Unsited):
    """A head's loss without its logits as a result."""

    name: ClassVar[str] = "cross_entropy"

    def inputs(
        self, definition: Definition, axes: dict[str, int], generator: torch.Generator, distribution: Distribution
    ) -> list[torch.Tensor]:
        """See `Family.inputs`: weights N(0, 4 / hidden_size), any labels, the first of which counts."""
        sizes = {n: a.value for n, a in definition.axes.items() if a.value is not None} | axes
        tokens, words, channels = sizes["tokens"], sizes["vocab_size"], sizes["hidden_size"]
        dtype = torch_dtype(definition.inputs["hidden_states"].dtype)
        hidden = draw((tokens, channels), dtype, generator, distribution)
        weight = torch.randn(words, channels, generator=generator) * (2 * channels**-0.5)
        labels = torch.randint(0, words, (tokens,), generator=generator)
        labels[1::IGNORED_SHARE] = definition.meta.semantics["ignore_index"]
        return [hidden, weight.to(dtype), labels]

    def work(self, inputs: Sequence[Any]) -> int:
        """See `Family.work`: tokens."""
        return int(inputs[0].shape[0])


def definition_for(
    *,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    reduction: str = "mean",
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Definition:
    """The loss of hidden states [tokens, hidden_size] and labels [tokens]."""
    lines = [
        "def run(hidden_states, weight, labels):",
        "    logits = torch.nn.functional.linear(hidden_states, weight).float()",
        *([] if scale == 1.0 else [f"    logits = logits * {scale!r}"]),
        *([] if softcap is None else [f"    logits = torch.tanh(logits / {softcap!r}) * {softcap!r}"]),
        f"    return torch.nn.functional.cross_entropy(logits, labels, ignore_index={ignore_index}, "
        f"reduction={reduction!r})",
    ]
    return written(
        FAMILY.name,
        f"cross_entropy_h{hidden_size}_v{vocab_size}_{reduction}",
        semantics={"reduction": reduction, "ignore_index": ignore_index, "scale": scale, "softcap": softcap},
        axes={"tokens": None, "hidden_size": hidden_size, "vocab_size": vocab_size},
        inputs={
            "hidden_states": (("tokens", "hidden_size"), dtype),
            "weight": (("vocab_size", "hidden_size"), dtype),
            "labels": (("tokens",), torch.int64),
        },
        outputs={"loss": (("tokens",) if reduction == "none" else (), torch.float32)},
        body="\n".join(lines),
        source="transformers.loss.loss_utils:fixed_cross_entropy",
        description="Cross entropy of a head's logits against labels.",
    )


FAMILY = CrossEntropy()
