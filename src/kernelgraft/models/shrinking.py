"""Find the tiny configuration that really builds and generates: a short ladder of shrinks, each tried."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from kernelgraft.errors import UsageError
from kernelgraft.models.rewriting import Size, rewrite

MAX_PARAMETERS = 50_000_000  # more means that a size was not recognised
# From the most faithful to the most liberal; the first that builds and generates is taken.
LADDER = (
    Size(),
    Size(fill=True),
    Size(fill=True, towers=False),
    Size(fill=True, repeat=True),
    Size(fill=True, head_dim=32),
    Size(fill=True, head_dim=32, repeat=True),
)


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A tiny configuration of the same class whose causal model builds and generates on a CPU in about 0.1 s.

    Every kind of layer that the configuration lists stays at least once. The argument and torch's generators are left
    as they were. Raises UsageError with the last reason when no shrink works.
    """
    reason: Exception | None = None
    for size in LADDER:
        try:
            with quiet():
                return _working(rewrite(config, size))
        except Exception as error:  # whatever a model class raises for sizes that it cannot take
            reason = error
    raise UsageError(
        f"`{config.model_type}` cannot be shrunk to a tiny model that generates from text: {in_short(reason)}; "
        "save one yourself and give its folder"
    ) from reason


def in_short(error: Exception | None) -> str:
    """The class and the first sentence of an error, on one line."""
    text = " ".join(str(error).split())
    sentence = text.split(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {sentence[:160]}"


@contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Silence transformers' warnings, log and progress `bars`, move prints to stderr, keep torch's CPU generator."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars and not bars:
            logging.enable_progress_bar()


def _working(config: PreTrainedConfig) -> PreTrainedConfig:
    """`config` once its model has generated; attributes that the model misses are borrowed and it is tried again."""
    while True:
        try:
            _try(config)
            return config
        except AttributeError as error:
            if not _borrowed(config, error.name, error.obj):
                raise


def _try(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters are left after shrinking")
    torch.default_generator.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(20, 26)[None]
    pad = {"pad_token_id": 5, "max_new_tokens": 3, "min_new_tokens": 3}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **pad)
    if out.shape != (1, 9) or not model(out, use_cache=False).logits.isfinite().all():
        raise ValueError(f"generated shape {tuple(out.shape)} or non-finite logits")


def _borrowed(config: PreTrainedConfig, name: str | None, owner: Any) -> bool:
    """Give configurations of `owner`'s class the attribute that they lack, from elsewhere in the same tree."""
    if not name or not isinstance(owner, PreTrainedConfig):
        return False
    nodes = list(_tree(config))
    holders = [vars(n) for n in nodes] + [vars(n).get("rope_parameters") or {} for n in nodes]
    values = [holder[name] for holder in holders if name in holder]
    lacking = [n for n in nodes if type(n) is type(owner) and name not in vars(n)]
    if values:
        for node in lacking:
            setattr(node, name, values[0])
    return bool(values and lacking)


def _tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for child in vars(config).values():
        if isinstance(child, PreTrainedConfig):
            yield from _tree(child)
