"""The records that every stage reads and writes.

Definition, Workload and Solution carry the field names of FlashInfer-Bench 0.1.2, so that their JSON is readable by it;
what that schema has no place for lives in `meta`, which is stored under the same path in a tree of its own (`meta/`).
All records are frozen, compare by value and hash by content. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import ast
import hashlib
import json
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SCHEMA_VERSION = 1

SiteKind = Literal["module", "function", "attention", "fusion", "statement", "step"]
Regime = Literal["prefill", "decode"]
Match = Literal["exact", "adapter"]


class Record(BaseModel):
    """A frozen record: unknown fields are refused, equal content has an equal `content_hash`."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    def content_hash(self) -> str:
        """SHA-256 (hex) of the canonical JSON of this record."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class SourceRef(Record):
    """The exact lines that a site or a reference was read from."""

    file: str
    """Path inside its distribution, e.g. `transformers/models/x/modeling_x.py`, or a bare module name."""
    first_line: int
    last_line: int
    sha256: str
    """SHA-256 of the cited lines, so that a change upstream is seen without a network."""
    url: str | None = None
    """Permalink with line anchors at the installed version's tag; None where the code is not published."""
    symbol: str | None = None
    """Qualified name of what stands there, e.g. `XAttention.forward`."""

    def comment(self) -> str:
        """One `# Source:` line for the head of a reference."""
        where = self.url or f"{self.file}#L{self.first_line}-L{self.last_line}"
        return f"# Source: {where} sha256:{self.sha256}"


class Site(Record):
    """A place in a model that can take a kernel, for all module instances that share its path pattern."""

    kind: SiteKind
    path: str
    """Module path with layer indices as `*`, e.g. `model.layers.*.mlp`."""
    instances: tuple[str, ...]
    """Full module paths, in model order."""
    class_name: str
    """Qualified class of the modules: `package.module.Class`."""
    method: str = "forward"
    """The method of that class that is (or holds) the site."""
    symbol: str | None = None
    """`function`/`attention`: the global's name in the method. `statement`: attribute path of the norm called there."""
    detail: dict[str, Any] = Field(default_factory=dict)
    """What the kind needs to find its place again (statement: order, line offsets); JSON values only."""
    source: SourceRef

    @property
    def key(self) -> str:
        """Unique text for messages and claims, e.g. `model.layers.*.self_attn.forward:apply_rotary_pos_emb`.

        Sites that would share it (layers of one class set up differently, a norm called twice) end in `#1`, `#2`, …
        """
        variant = f"#{self.detail['variant']}" if "variant" in self.detail else ""
        if self.kind == "module":
            return self.path + variant
        return f"{self.path}.{self.method}:{self.symbol}{variant}"


class Axis(Record):
    """One axis of a Definition: `const` with a value, or `var`."""

    type: Literal["const", "var"]
    value: int | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _value_matches_type(self) -> Axis:
        if (self.value is not None) != (self.type == "const"):
            raise ValueError("a const axis has a value and a var axis has none")
        return self


DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1",
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
)


class TensorSpec(Record):
    """Shape (axis names; `[]` is 0-D, None is a Python scalar) and dtype of one input or output."""

    shape: tuple[str, ...] | None
    dtype: str
    description: str | None = None

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"unknown dtype {value!r}")
        return value


class DefinitionMeta(Record):
    """What FlashInfer-Bench has no field for."""

    family: str
    semantics: dict[str, Any] = Field(default_factory=dict)
    """The family's variant as plain data (offset, cast order, eps, style, …)."""
    fingerprint: str
    """SHA-256 of the reference's canonical operator graph, dtypes and constants; equal means the same compute."""
    sources: tuple[SourceRef, ...] = ()
    mutates: tuple[str, ...] = ()
    reference_error: float | None = None
    """Largest absolute difference between the reference and the captured outputs; 0.0 is bit-equal."""


class Definition(Record):
    """What must be computed at a site: axes, inputs, outputs, and a PyTorch `reference` with a global `run`."""

    name: str
    op_type: str
    axes: dict[str, Axis]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    reference: str
    tags: tuple[str, ...] = ()
    description: str | None = None
    constraints: tuple[str, ...] = ()
    meta: DefinitionMeta

    @model_validator(mode="after")
    def _consistent(self) -> Definition:
        if not self.name.isidentifier():
            raise ValueError(f"definition name {self.name!r} is not an identifier")
        if not self.outputs:
            raise ValueError("a definition has at least one output")
        if set(self.inputs) & set(self.outputs):
            raise ValueError("input and output names overlap")
        bound: set[str] = set()
        for group, specs in (("input", self.inputs), ("output", self.outputs)):
            for name, spec in specs.items():
                for axis in spec.shape or ():
                    if axis not in self.axes:
                        raise ValueError(f"{group} {name!r} uses the undefined axis {axis!r}")
                if group == "input":
                    bound.update(spec.shape or ())
        unbound = [name for name, axis in self.axes.items() if axis.type == "var" and name not in bound]
        if unbound:
            raise ValueError(f"var axes bound by no input: {', '.join(unbound)}")
        run = next(
            (n for n in ast.parse(self.reference).body if isinstance(n, ast.FunctionDef) and n.name == "run"), None
        )
        if run is None:
            raise ValueError("the reference has no top-level function `run`")
        parameters = [a.arg for a in run.args.posonlyargs + run.args.args]
        if parameters != list(self.inputs):
            raise ValueError(f"`run` takes {parameters}, the inputs are {list(self.inputs)}")
        if not self.reference.lstrip().startswith("# Source:"):
            raise ValueError("the reference does not begin with a `# Source:` line")
        return self


class WorkloadInput(Record):
    """Where one input comes from: a safetensors file, a scalar, or random values."""

    type: Literal["safetensors", "scalar", "random"]
    path: str | None = None
    tensor_key: str | None = None
    value: int | float | bool | None = None


class Workload(Record):
    """Concrete inputs of a Definition, captured from a real call."""

    axes: dict[str, int]
    inputs: dict[str, WorkloadInput]
    uuid: str


class WorkloadMeta(Record):
    """How a workload was captured."""

    regime: Regime
    cache: Literal["dynamic", "static", "none"] = "dynamic"
    padded: bool = False
    """True for a left-padded batch."""
    site: str
    """`Site.key` of the captured call."""
    instance: str
    """Full module path of the captured call."""
    outputs: dict[str, WorkloadInput] = Field(default_factory=dict)
    """Outputs of the original, per Definition output."""
    strides: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Strides of the captured inputs (safetensors keeps only contiguous data)."""


class Guard(Record):
    """Which calls a Solution can serve: data that a cheap predicate is made from, and the same in words."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    """Device types."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Dtypes allowed for floating-point inputs."""
    autograd: bool = True
    """True if gradients flow through it; otherwise a call that needs them runs the original."""
    contiguous: tuple[str, ...] = ()
    """Inputs that must be contiguous."""
    last_dim_contiguous: tuple[str, ...] = ()
    """Inputs whose last stride must be 1."""
    max_axes: dict[str, int] = Field(default_factory=dict)
    """Largest served size per axis name of the Definition."""
    equal_axes: tuple[tuple[str, str], ...] = ()
    """Pairs of axes that must be equal unless the first is 1 (e.g. query and key length)."""
    static_shapes: bool = False
    """True if a new shape means a new compilation; such a Solution serves only the shapes that were measured."""
    text: str = ""
    """The guard in words."""


class SourceFile(Record):
    """One source file of a Solution."""

    path: str
    content: str = Field(min_length=1)


class BuildSpec(Record):
    """How a Solution is built and called; `language` may also be `cuda-tile` (exported as `python` + a tag)."""

    language: Literal["python", "triton", "cpp", "cuda", "tilelang", "cuda-tile"]
    target_hardware: tuple[str, ...]
    entry_point: str
    """`file.py::symbol`."""
    dependencies: tuple[str, ...] = ()
    destination_passing_style: bool = False
    binding: Literal["tvm-ffi", "torch"] | None = None


class SolutionMeta(Record):
    """What FlashInfer-Bench has no field for."""

    supplier: str
    family: str
    match: Match = "exact"
    guard: Guard = Guard()
    fingerprint: str
    """Fingerprint of the Definition that it was made for."""
    nondeterministic: bool = False
    uses_compiler: bool = False
    """True if the first call compiles (torch.compile, autotuning): its warm-up is reported apart."""
    licence: str = "Apache-2.0"


class Solution(Record):
    """An implementation of a Definition: value-returning `run`-like function with the Definition's inputs, in order."""

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: tuple[SourceFile, ...] = Field(min_length=1)
    description: str | None = None
    meta: SolutionMeta

    @model_validator(mode="after")
    def _entry_exists(self) -> Solution:
        file, _, symbol = self.spec.entry_point.partition("::")
        if not symbol or file not in {s.path for s in self.sources}:
            raise ValueError(f"entry point {self.spec.entry_point!r} is not `file::symbol` of a source")
        return self

    @property
    def entry_source(self) -> str:
        """Text of the file that holds the entry point."""
        file = self.spec.entry_point.partition("::")[0]
        return next(s.content for s in self.sources if s.path == file)

    @property
    def entry_symbol(self) -> str:
        """Name of the function to call."""
        return self.spec.entry_point.partition("::")[2]


class Status(StrEnum):
    """Outcome of judging one Solution on one workload; the names are FlashInfer-Bench's."""

    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    TIMEOUT = "TIMEOUT"


class Performance(Record):
    """Times of one Solution on one workload, µs, medians; the original was timed in the same interleaved run."""

    original_us: float = Field(gt=0)
    solution_us: float = Field(gt=0)
    spread_us: float = Field(ge=0)
    """How far two timings of the same version lie apart; smaller differences are ties."""


class Evaluation(Record):
    """Verdict of one Solution on one Definition (all cases of the judge), and its times if it passed."""

    solution: str
    definition: str
    status: Status
    check: str | None = None
    """The check that failed, e.g. `C8`; None if it passed."""
    reason: str | None = None
    """One line; None if it passed."""
    cases: int = 0
    """Number of inputs it was judged on."""
    refused: int = 0
    """How many of them its guard refused."""
    error_ratio: float | None = None
    """Largest relRMSE against fp64 over the original's own; None if not reached."""
    max_absolute_error: float | None = None
    max_relative_error: float | None = None
    seeds: tuple[int, ...] = ()
    seconds: float | None = None
    warmup_seconds: float | None = None
    """First call, including any compilation."""
    earlier: bool = False
    """True if an earlier run found this, with equal content, versions and machine."""
    performance: dict[str, Performance] = Field(default_factory=dict)
    """Per regime; empty until measured, forbidden unless passed."""

    @model_validator(mode="after")
    def _status_ties_fields(self) -> Evaluation:
        if self.status is Status.PASSED:
            if self.reason is not None or self.error_ratio is None:
                raise ValueError("a passed evaluation has an error ratio and no reason")
        elif self.performance or not self.reason:
            raise ValueError("a failed evaluation has a reason and no performance")
        return self


class Seat(Record):
    """Which implementation serves one regime of one Definition, and the times that decided it."""

    definition: str
    regime: Regime
    work: int
    """Size of the measured call (rows); at run time the nearest measured size decides."""
    axes: dict[str, int] | None = None
    """Sizes of the var axes of the measured call; an equal call takes this seat before the nearest size is asked."""
    batch: int | None = None
    """Sequences of the run that the call was recorded in."""
    prompt_tokens: int | None = None
    """Length of that run's prompt; None: a short one (of one sequence that of research, of a batch twice as long)."""
    original_us: float | None = None
    solution_us: float | None = None
    """Best verified Solution's time, seated or not; None if nothing could be measured."""
    spread_us: float | None = None
    gain_us: float | None = None
    """Original less best Solution; of a fusion less its parts with what is seated for them, where they were timed."""
    candidates_us: dict[str, float] = Field(default_factory=dict)
    """Time of every verified Solution."""
    solution: str | None = None
    """Best verified Solution, seated or not; None if there is none."""
    seated: bool = False
    """True if that Solution is used, False if the original stays."""


class Patch(Record):
    """One compute of the model: its sites, its Definitions, and who serves them."""

    family: str
    sites: tuple[Site, ...]
    semantics: dict[str, Any] = Field(default_factory=dict)
    definitions: tuple[str, ...]
    status: Literal["accepted", "rejected"]
    reason: str | None = None
    seats: tuple[Seat, ...] = ()

    @property
    def solutions(self) -> tuple[str, ...]:
        """Names of the seated Solutions."""
        return tuple(dict.fromkeys(s.solution for s in self.seats if s.seated and s.solution))

    @model_validator(mode="after")
    def _status_ties_fields(self) -> Patch:
        if self.status == "accepted" and not any(s.seated for s in self.seats):
            raise ValueError("an accepted patch seats at least one solution")
        if self.status == "rejected" and not self.reason:
            raise ValueError("a rejected patch has a reason")
        return self


class ModelCard(Record):
    """Which model a record speaks of."""

    name: str
    """What the user asked for: `tiny`, a path, a hub id, `config:<type>`; class name for a live object."""
    class_name: str
    type: str
    """`config.model_type`."""
    parameters: int
    dtype: str
    device: str
    transformers: str
    config_sha256: str
    """SHA-256 of the configuration without volatile fields (paths, versions)."""
    split: str | None = None
    """How it is split over processes that each compute a part, e.g. `tp=2`; None: it is whole."""


class MachineCard(Record):
    """Where a record was made."""

    platform: str
    cpu: str
    cores: int
    gpu: str | None = None
    gpu_driver: str | None = None
    compute_capability: str | None = None
    python: str
    versions: dict[str, str]
    """Distribution name to version, of those that bear on results (torch, transformers, triton, …)."""


class ResearchRow(Record):
    """What research says of one site."""

    site: Site
    family: str | None = None
    definitions: tuple[str, ...] = ()
    semantics: dict[str, Any] = Field(default_factory=dict)
    reason: str | None = None
    """Why it was not recognised; None if it was."""
    calls: dict[str, int] = Field(default_factory=dict)
    """Regime to number of calls seen."""


class Research(Record):
    """All sites of a model with what was recognised."""

    schema_version: int = SCHEMA_VERSION
    model: ModelCard
    machine: MachineCard
    prompt: str
    rows: tuple[ResearchRow, ...]


class CandidateRow(Record):
    """One Solution proposed for a Definition, or a supplier's refusal."""

    supplier: str
    solution: str | None = None
    match: Match | None = None
    reason: str | None = None
    """Why there is no candidate; None if there is."""


class PlanRow(Record):
    """The candidates of one compute, best first."""

    family: str
    definitions: tuple[str, ...]
    sites: tuple[str, ...]
    candidates: tuple[CandidateRow, ...]
    verdict: Literal["exact", "adapter", "new kernel"]


class Plan(Record):
    """What integrate will try."""

    schema_version: int = SCHEMA_VERSION
    model: ModelCard
    rows: tuple[PlanRow, ...]
    already: str | None = None
    """Set if the model is patched already: what was found."""


class EndToEnd(Record):
    """The grafted model against the original, same weights, same prompt."""

    tokens_equal: bool
    logits_rel_rmse: float
    """relRMSE of the grafted logits against the original's."""
    baseline_error: float | None = None
    """relRMSE of the original's logits against fp64 (or fp32) weights and arithmetic."""
    grafted_error: float | None = None


class Contribution(Record):
    """What one compute of a graft does for the whole model: on against off, interleaved, the rest of the graft on."""

    family: str
    """`all`: the whole graft against the original."""
    sites: tuple[str, ...]
    """`Site.key` of each; empty for the whole graft."""
    regime: Regime
    batch: int
    prompt_tokens: int | None
    """None: the short prompt that research uses."""
    on_ms: float
    """Decode: of one step; prefill: until the first token. The mean over rounds."""
    off_ms: float
    interval_ms: tuple[float, float]
    """95 % interval of off minus on; above zero it is a gain."""
    seated: bool = True
    """False: the graft leaves these sizes of the compute to the original, since this was measured or before."""

    @property
    def gain_ms(self) -> float:
        """Off minus on."""
        return self.off_ms - self.on_ms

    @property
    def gain_percent(self) -> float:
        """Of the time without it."""
        return 100 * self.gain_ms / self.off_ms


class Graft(Record):
    """All of a model's patches with their evidence; self-contained."""

    schema_version: int = SCHEMA_VERSION
    model: ModelCard
    machine: MachineCard
    policy: Literal["fastest", "verified"]
    mode: Literal["eager", "graph"] = "eager"
    """How the times were taken: `eager`: the longer of host and device time, `graph`: device time in a CUDA graph."""
    patches: tuple[Patch, ...]
    definitions: dict[str, Definition]
    solutions: dict[str, Solution]
    evaluations: tuple[Evaluation, ...]
    end_to_end: EndToEnd | None = None
    contributions: tuple[Contribution, ...] = ()
    """What the whole and each accepted patch gained when the model ran with it; empty if that was not measured."""

    @property
    def accepted(self) -> tuple[Patch, ...]:
        """The patches that `apply` installs."""
        return tuple(p for p in self.patches if p.status == "accepted")
