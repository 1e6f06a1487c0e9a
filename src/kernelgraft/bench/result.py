"""What the benchmark measured, as records."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kernelgraft.records import SCHEMA_VERSION, MachineCard, ModelCard, Record

Cache = Literal["dynamic", "static"]


class Setting(Record):
    """What was run."""

    prompt: str
    prompt_tokens: int
    """Per sequence."""
    new_tokens: int
    """Per sequence; the end-of-text token does not end a run."""
    batch: int
    """Sequences per run: the prompt, repeated."""
    cache: Cache
    device: str
    dtype: str
    threads: int
    """Threads that torch computes one operator with."""
    pairs: int
    repeats: int
    """Calls of `generate` by each model in one pair, in turns; more than one where a call is short."""
    warmup_runs: int
    """Per process, before the first pair."""
    seed: int
    """Of random weights, and of the bootstrap."""


class Run(Record):
    """One model's part of a pair: `generate`, greedy, `Setting.repeats` times."""

    ttft_ms: float = Field(gt=0)
    """From the call of `generate` to the first new token: the prefill and what generate does before it; the mean."""
    decode_ms: tuple[float, ...]
    """From each new token to the next, of all calls."""
    tokens_per_s: float = Field(gt=0)
    """All new tokens of the batch over the whole time of generating."""
    decode_tokens_per_s: float | None = None
    """New tokens of the batch after the first, over the time after the first; None for a single new token."""
    peak_memory_bytes: int
    """CPU: largest resident set of the process until then. CUDA: most memory allocated during the run."""


class Figure(Record):
    """Mean and sample standard deviation over runs."""

    mean: float
    std: float | None = None
    """None for a single run."""


class Side(Record):
    """The baseline's or the grafted model's runs, and what they say."""

    runs: tuple[Run, ...] = Field(min_length=1)
    tokens_per_s: Figure
    ttft_ms: Figure
    decode_tokens_per_s: Figure | None = None
    inter_token_ms_p50: float | None = None
    inter_token_ms_p90: float | None = None
    peak_memory_bytes: int
    """The largest of the runs."""
    load_s: float
    """Loading the model, and putting the graft on it."""
    warmup_s: float
    """The first run, with all compilation; not among the runs."""


class Comparison(Record):
    """Grafted over baseline, above 1 is faster, with the 95 % interval of a bootstrap over pairs."""

    tokens_per_s_ratio: float
    tokens_per_s_interval: tuple[float, float] | None = None
    """None for a single pair."""
    decode_ratio: float | None = None
    decode_interval: tuple[float, float] | None = None
    ttft_ratio: float
    """Baseline time over grafted time."""
    ttft_interval: tuple[float, float] | None = None


class Divergence(Record):
    """The first token that differs, and how near the baseline's choice was there."""

    sequence: int
    position: int
    """Index among the new tokens."""
    baseline_token: int
    grafted_token: int
    baseline_margin: float | None = None
    """The baseline's top-1 minus top-2 logit there; None where the logits were not kept (`Outputs.logits_shape`)."""
    grafted_difference: float | None = None
    """Largest absolute difference of the two models' logits there: a margin below about twice this is a near tie."""


class Outputs(Record):
    """Whether both models say the same."""

    tokens_equal: bool
    divergence: Divergence | None = None
    logits_rel_rmse: float | None = None
    """Root mean square of grafted minus baseline logits over that of the baseline's, both fed the baseline's tokens one
    by one through prefill and decode; None if non-finite values stand in different places."""
    logits_shape: tuple[int, int, int]
    """Sequences, steps and vocabulary that were compared; fewer than were run where they would not fit."""


class Coverage(Record):
    """How much of the baseline's time was spent where the graft now sits, by module path."""

    device: Literal["cpu"]
    cpu_time_percent: float
    """CPU time of the thread inside the replaced sites, over that of generate; a site inside another counts once."""
    sites_percent: dict[str, float]
    """Per `Site.key`, each with all that runs inside it."""
    new_tokens: int
    """Tokens generated per run while this was measured."""


class Proof(Record):
    """That a process ran what it was said to run."""

    patch_imported: bool
    """True if `kernelgraft.patch` was loaded in the process."""
    replaced_methods: tuple[str, ...] = ()
    """Module paths whose forward is not its class's own, or whose class's forward comes from another package."""
    foreign_attention: tuple[str, ...] = ()
    """Attention functions that were registered or replaced after transformers was imported."""

    @property
    def clean(self) -> bool:
        """True if nothing stands in the place of the model's own code."""
        return not (self.patch_imported or self.replaced_methods or self.foreign_attention)


class PatchCalls(Record):
    """Calls that went through one accepted patch in the grafted process, warm-up included."""

    family: str
    sites: tuple[str, ...]
    """`Site.key` of each."""
    calls: dict[str, int]
    """Served, per seated Solution."""
    original_by_choice: int
    """Left to the original because it is the faster one for these sizes."""
    fallbacks: dict[str, int]
    """Left to the original because they are outside the guard, by reason."""
    contained: int
    """Module instances inside another patch, which serves them."""


class BenchResult(Record):
    """Baseline and grafted model in fresh processes, in interleaved pairs."""

    schema_version: int = SCHEMA_VERSION
    model: ModelCard
    machine: MachineCard
    setting: Setting
    baseline: Side
    baseline_proof: Proof
    grafted: Side | None = None
    """None if there was no graft: then all below is None or empty too."""
    comparison: Comparison | None = None
    outputs: Outputs | None = None
    calls: tuple[PatchCalls, ...] = ()
    coverage: Coverage | None = None
    """None on a GPU."""
