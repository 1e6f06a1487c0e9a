"""Token ids for a model, with a tokenizer or without one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from kernelgraft.errors import UsageError

_SPECIAL = re.compile(r".*(token_ids?|token_index)")


def prompt_ids(loaded: Any, text: str) -> torch.Tensor:
    """Ids of `text`, int64 [1, tokens] on the model's device: the tokenizer's, else one id per byte of the text.

    Without a tokenizer the ids avoid the special tokens and are the same on every run. Raises UsageError when there
    is no token.
    """
    return torch.tensor([_ids(loaded, text)], dtype=torch.int64, device=loaded.model.device)


def long_prompt(loaded: Any, text: str, rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Ids of a prompt of a given length, int64 [rows, tokens] on the model's device: random ones, then those of `text`.

    The random ids are ordinary ones, differ from row to row, and are the same for the same seed everywhere. A length
    below that of `text` keeps its end.
    """
    if rows < 1 or tokens < 1:
        raise UsageError(f"a prompt of {rows} rows and {tokens} tokens is empty; give at least one of each")
    ending = _ids(loaded, text)[-tokens:]
    size = vocabulary_size(loaded)
    ordinary = torch.ones(size, dtype=torch.bool)
    special = {*_special_ids(loaded.model.config), *_special_ids(_generation(loaded))}
    ordinary[[i for i in special if 0 <= i < size]] = False
    choice = ordinary.nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    random = choice[torch.randint(len(choice), (rows, tokens - len(ending)), generator=generator)]
    return torch.cat([random, torch.tensor([ending] * rows)], dim=1).to(loaded.model.device)


def left_padded(loaded: Any, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """A left-padded batch of `texts`: ids and attention mask (1 = token), both int64 [texts, longest]."""
    if not texts:
        raise UsageError("`texts` is empty; give at least one text")
    rows = [_ids(loaded, text) for text in texts]
    longest = max(map(len, rows))
    ids = [[pad_id(loaded)] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    device = loaded.model.device
    return torch.tensor(ids, dtype=torch.int64, device=device), torch.tensor(mask, dtype=torch.int64, device=device)


def pad_id(loaded: Any) -> int:
    """A token id to pad with: the one that is defined, else the end of text, else an ordinary one (it is masked)."""
    config, generation = loaded.model.config.get_text_config(decoder=True), _generation(loaded)
    eos = getattr(config, "eos_token_id", None)
    candidates = [
        getattr(loaded.tokenizer, "pad_token_id", None),
        getattr(generation, "pad_token_id", None),
        getattr(config, "pad_token_id", None),
        *(eos if isinstance(eos, (list, tuple)) else [eos]),
    ]
    size = vocabulary_size(loaded)
    return next((c for c in candidates if isinstance(c, int) and 0 <= c < size), _ordinary(loaded)[0])


def vocabulary_size(loaded: Any) -> int:
    """How many token ids the model knows."""
    size = getattr(loaded.model.config.get_text_config(decoder=True), "vocab_size", None)
    if isinstance(size, int):
        return size
    return int(loaded.model.get_input_embeddings().weight.shape[0])


def _ids(loaded: Any, text: str) -> list[int]:
    if loaded.tokenizer is not None:
        ids = list(loaded.tokenizer(text)["input_ids"])
    else:
        ordinary = _ordinary(loaded)
        ids = [ordinary[byte % len(ordinary)] for byte in text.encode()]
    if not ids:
        raise UsageError(f"text `{text}` has no tokens; give at least one word")
    return ids


def _ordinary(loaded: Any) -> list[int]:
    """The first ids that no configuration field claims for something special, at most one for each byte."""
    special = set(_special_ids(loaded.model.config)) | set(_special_ids(_generation(loaded)))
    return [i for i in range(vocabulary_size(loaded)) if i not in special][:256]


def _generation(loaded: Any) -> Any:
    return getattr(loaded.model, "generation_config", None)


def _special_ids(config: Any) -> Iterable[int]:
    for name, value in vars(config).items() if config is not None else ():
        if hasattr(value, "model_type"):
            yield from _special_ids(value)
        elif _SPECIAL.fullmatch(name.lstrip("_")):
            yield from (i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int))
