"""What the benchmark measured, as records."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kernelgraft.records import SCHEMA_VERSION, Contribution, MachineCard, ModelCard, Record

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
    busy_cores: float | None = None
    """Of this machine just before the first pair, when no contender worked: more than one disturbs what is measured."""
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


class Share(Record):
    """A part of the GPU's time."""

    name: str
    """Of the operator or of the kernel."""
    path: str
    """Path of the module that launched it, list indices as `*`; empty if none is known."""
    time_us: float = Field(ge=0)
    percent: float = Field(ge=0)
    """Of the time of all kernels."""
    calls: int


class Trace(Record):
    """Where the GPU's time went in a window of a contender's run, from the profiler's kernel records."""

    regime: Literal["prefill", "decode"]
    tokens: int
    """Decode: steps in the window. Prefill: tokens of one sequence."""
    wall_ms: float
    """Length of the window without the profiler, which slows the host down; from a trace alone: from the first launch
    to the end of the last kernel."""
    busy_ms: float
    """Of that, with at least one kernel on the GPU."""
    kernels: int
    """Without copies and fills."""
    kernel_us: float
    """Sum over all kernels, copies and fills; what all percentages refer to."""
    languages_percent: dict[str, float]
    """By what made the kernel: `cutile`, `triton`, `cublas`, `cudnn`, `flash`, `torch`, `memory`, `other`; adds up to
    100."""
    replaced_percent: float | None = None
    """Baseline with a graft at hand: time of kernels launched inside the sites that the graft replaces."""
    modules: tuple[Share, ...] = ()
    """By module path, largest first; adds up to `kernel_us` with the path-less rest."""
    uncovered: tuple[Share, ...] = ()
    """The ten largest operators that no kernel of a graft or patch serves."""
    libraries: tuple[Share, ...] = ()
    """The ten largest operators that are left to cuBLAS, cuDNN or FlashAttention."""

    @property
    def cutile_percent(self) -> float:
        """Share of the kernels' time that is in cuTile kernels."""
        return self.languages_percent.get("cutile", 0.0)

    @property
    def host_bound_percent(self) -> float:
        """Share of the window in which the GPU waited."""
        return 100 * (1 - self.busy_ms / self.wall_ms)

    @property
    def kernels_per_token(self) -> float:
        """Kernels per decode step; prefill: of the whole prefill."""
        return self.kernels / (self.tokens if self.regime == "decode" else 1)


class Roofline(Record):
    """What the machine allows for a model, and how near a contender came."""

    regime: Literal["prefill", "decode"]
    bytes_per_step: float
    """Read from memory in one decode step (weights that are used, cache) or one prefill."""
    flops_per_step: float
    """Of one decode step or one prefill, counting a multiply-add as two."""
    bandwidth_gb_s: float
    """Measured on this device: a read stream."""
    tflops: float
    """Measured on this device: a large matrix product in the model's dtype."""
    limit_ms: float
    """The longer of both times for one step."""
    limit_tokens_per_s: float
    """Decode: new tokens; prefill: prompt tokens; of the whole batch."""
    percent: float
    """What the contender reached of it."""


class Contender(Record):
    """One way to run the model, in a process of its own."""

    name: str
    """`eager` (the original, always first), `static-compile`, `tilegym`, `liger`, `kernelgraft`."""
    failure: str | None = None
    """Why it could not run, in one line: then all below is None or empty."""
    side: Side | None = None
    proof: Proof | None = None
    evidence: tuple[str, ...] = ()
    """What was found in the process in place of the model's own code: `where: what`."""
    comparison: Comparison | None = None
    """Over the original's runs; None for the original."""
    outputs: Outputs | None = None
    """Against the original's; None for the original."""
    float32_rel_rmse: float | None = None
    """Teacher-forced logits against a float32 copy of the original; None where it was not made."""
    calls: tuple[PatchCalls, ...] = ()
    """Of a graft."""
    traces: tuple[Trace, ...] = ()
    """Empty on a CPU."""
    rooflines: tuple[Roofline, ...] = ()
    """Empty on a CPU."""


class BenchResult(Record):
    """Contenders in fresh processes, in interleaved rounds; the original is one of them."""

    schema_version: int = SCHEMA_VERSION
    model: ModelCard
    machine: MachineCard
    setting: Setting
    contenders: tuple[Contender, ...] = Field(min_length=1)
    coverage: Coverage | None = None
    """Of the graft, by CPU time; None on a GPU, where the contenders' traces say it, and without a graft."""
    contributions: tuple[Contribution, ...] = ()
    """What each compute of the graft gains, switched off with the rest on, measured after the contenders' runs; empty
    if it was not asked for (`bench --ablate`)."""

    def contender(self, name: str) -> Contender | None:
        """The contender of that name, if it took part."""
        return next((c for c in self.contenders if c.name == name), None)

    @property
    def baseline(self) -> Side:
        """The original's runs."""
        side = self.contenders[0].side
        assert side is not None
        return side

    @property
    def grafted(self) -> Side | None:
        """The graft's runs; None if there was none."""
        found = self.contender("kernelgraft")
        return None if found is None else found.side

    @property
    def comparison(self) -> Comparison | None:
        """The graft over the original."""
        found = self.contender("kernelgraft")
        return None if found is None else found.comparison

    @property
    def outputs(self) -> Outputs | None:
        """The graft's outputs against the original's."""
        found = self.contender("kernelgraft")
        return None if found is None else found.outputs
