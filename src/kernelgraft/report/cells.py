"""Many benchmarks beside each other: models, regimes and batches, as `benchmarks/end_to_end.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from kernelgraft.bench.names import COMPILED, CONTENDERS, GRAFTED, ORIGINAL
from kernelgraft.bench.result import Contender, PatchCalls, Proof, Trace
from kernelgraft.errors import UsageError
from kernelgraft.report.wording import UNKNOWN, figures, make_table


class Cell(BaseModel):
    """One contender in one setting; further keys of the file are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str
    regime: Literal["decode", "prefill"]
    batch: int
    prompt_tokens: int
    new_tokens: int
    contender: str
    tokens_per_s: float | None = None
    """None where the contender could not run."""
    ttft_ms: float | None = None
    roofline_percent: float | None = None
    tokens_equal: bool | None = None
    failure: str | None = None
    measured_later_beside: dict[str, Any] = {}
    """Where a contender was not ready in time: with what it was measured in turns afterwards, and their figures."""

    @property
    def setting(self) -> tuple[str, str, int, int]:
        """What contenders are compared within."""
        return self.model, self.regime, self.batch, self.prompt_tokens

    @property
    def figure(self) -> float | None:
        """What is compared, larger is better: decode: tokens per second; prefill: prompt tokens per second."""
        if self.regime == "decode":
            return self.tokens_per_s
        return 1e3 * self.batch * self.prompt_tokens / self.ttft_ms if self.ttft_ms else None


class Traced(Trace):
    """A trace of one contender; further keys are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    contender: str


class Detail(BaseModel):
    """What the file says of a model beside its cells."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    environment: dict[str, Any] = {}
    """Where it was measured, if the file is of several runs."""
    traces: tuple[Traced, ...] = ()
    evidence: dict[str, tuple[str, ...]] = {}
    proof: dict[str, Proof] = {}
    calls: tuple[PatchCalls, ...] = ()
    """Of the graft."""

    @property
    def contenders(self) -> list[Contender]:
        """The same as records of contenders without figures, in the order of reports."""
        names = {trace.contender for trace in self.traces} | set(self.evidence) | set(self.proof)
        return [
            Contender(
                name=name,
                evidence=self.evidence.get(name, ()),
                proof=self.proof.get(name),
                calls=self.calls if name == GRAFTED else (),
                traces=tuple(trace for trace in self.traces if trace.contender == name),
            )
            for name in in_order(names)
        ]


class Cells(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    environment: dict[str, Any] = {}
    cells: tuple[Cell, ...]
    models: dict[str, Detail] = {}
    missing: tuple[str, ...] = ()
    """What there was no time for, and what went wrong."""

    @property
    def contenders(self) -> dict[str, list[Contender]]:
        """By model, what is known of each contender beside its cells: where its time went, and what ran."""
        return {model: detail.contenders for model, detail in self.models.items()}


def read_cells(file: Path) -> Cells:
    """Read such a file. Raises UsageError if it is none."""
    try:
        return Cells.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"`{file}` does not hold the cells of a benchmark: {where}: {first['msg']}") from error
    except (OSError, ValueError) as said:  # not there, not readable, not JSON
        raise UsageError(f"`{file}` does not hold the cells of a benchmark: {said}") from said


def in_order(names: Iterable[str]) -> list[str]:
    """In the order of reports, unknown ones last."""
    return sorted(dict.fromkeys(names), key=lambda n: (CONTENDERS.index(n) if n in CONTENDERS else len(CONTENDERS), n))


def contenders_of(cells: Iterable[Cell]) -> list[str]:
    """All that took part."""
    return in_order(cell.contender for cell in cells)


def settings_of(cells: Iterable[Cell]) -> dict[tuple[str, str, int, int], dict[str, Cell]]:
    """The cells of each setting by contender, in the order of the file."""
    found: dict[tuple[str, str, int, int], dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault(cell.setting, {})[cell.contender] = cell
    return found


def setting_text(setting: tuple[str, str, int, int]) -> str:
    """`decode, batch 32`, `prefill of 4096, batch 1`."""
    _, regime, batch, prompt_tokens = setting
    return f"decode, batch {batch}" if regime == "decode" else f"prefill of {prompt_tokens}, batch {batch}"


def over(cells: dict[str, Cell], name: str, others: Sequence[str]) -> float | None:
    """A contender's figure over the best of others; None if either is unknown."""
    own = cells[name].figure if name in cells else None
    known = [figure for other in others if other in cells and (figure := cells[other].figure) is not None]
    return None if own is None or not known else own / max(known)


def peers_of(names: Iterable[str]) -> list[str]:
    """Those that, as a graft does, patch the model and leave `generate` as it is."""
    return [name for name in names if name not in (ORIGINAL, COMPILED, GRAFTED)]


def cell_headings(names: Sequence[str]) -> list[str]:
    """The setting, a column a contender, and what the graft is over the original and over the best peer."""
    return ["model", "setting", *names, f"over {ORIGINAL}", "over best peer", "roofline %", "tokens"]


def cell_rows(cells: Sequence[Cell]) -> Iterable[list[str]]:
    """Cells of the table, one row a setting: decode in tokens/s, prefill in ms to the first token."""
    names = contenders_of(cells)
    for setting, found in settings_of(cells).items():
        graft = found.get(GRAFTED)
        equal = None if graft is None else graft.tokens_equal
        yield [
            setting[0],
            setting_text(setting),
            *(_figure(found.get(name)) for name in names),
            _ratio(over(found, GRAFTED, [ORIGINAL])),
            _ratio(over(found, GRAFTED, peers_of(names))),
            UNKNOWN if graft is None or graft.roofline_percent is None else f"{graft.roofline_percent:.1f}",
            UNKNOWN if equal is None else "equal" if equal else "differ",
        ]


def missing_lines(cells: Cells) -> list[str]:
    """Who failed where and why, once each, what there was no time for, and what was measured later or elsewhere."""
    failed = {(cell.contender, cell.model, cell.failure): None for cell in cells.cells if cell.failure}
    lines = [f"failed: {contender}, {model}: {reason}" for contender, model, reason in failed]
    lines += [f"missing: {text}" for text in cells.missing]
    lines += [
        f"measured after the others, in turns with {' and '.join(cell.measured_later_beside)}: {cell.contender}, "
        f"{cell.model}, {setting_text(cell.setting)}"
        for cell in cells.cells
        if cell.measured_later_beside
    ]
    here = _machine(cells.environment)
    return lines + [
        f"measured elsewhere: {model}: {environment_text(detail.environment)}"
        for model, detail in cells.models.items()
        if detail.environment and _machine(detail.environment) != here
    ]


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in environment.items() if key != "time"}


def cells_table(cells: Cells) -> RenderableType:
    """One row a setting, and where the graft is not the fastest."""
    names = contenders_of(cells.cells)
    # 80 columns hold five contenders if the headings break and a model shares its column with the setting.
    headings = ["model", *(_broken(name) for name in names), f"over\n{ORIGINAL}", "over\npeer", "tokens"]
    rows = (
        [f"{row[0]}\n{_compact(row[1])}", *(text.removesuffix(" ms") for text in row[2:-2]), row[-1]]
        for row in cell_rows(cells.cells)
    )
    title = "Models: decode in tokens/s, prefill in ms"
    table = make_table(title, headings, rows, numbers=range(1, len(headings) - 1), folded={0})
    return Group(table, *map(Text, [*cell_lines(cells.cells), *missing_lines(cells)]))


def _compact(setting: str) -> str:
    """`decode ×32`, `prefill 4096`."""
    return setting.replace(" of", "").replace(", batch ", " ×").removesuffix(" ×1")


def _broken(name: str) -> str:
    """`static-compile` and `kernelgraft` on two lines each."""
    return name.replace("-", "-\n") if "-" in name else name if len(name) < 8 else f"{name[:-5]}-\n{name[-5:]}"


def _figure(cell: Cell | None) -> str:
    if cell is None:
        return UNKNOWN
    if cell.regime == "decode":
        return figures(cell.tokens_per_s)
    return UNKNOWN if cell.ttft_ms is None else f"{figures(cell.ttft_ms)} ms"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}x"


def cell_lines(cells: Sequence[Cell]) -> list[str]:
    """In how many settings the graft is at least as fast as the original and as the best peer, and where it is not."""
    names, found = contenders_of(cells), settings_of(cells)
    lines = []
    for label, others in ((ORIGINAL, [ORIGINAL]), ("the best peer", peers_of(names))):
        ratios = {setting: over(group, GRAFTED, others) for setting, group in found.items()}
        known = {setting: ratio for setting, ratio in ratios.items() if ratio is not None}
        if known:
            good = sum(ratio >= 1 for ratio in known.values())
            lines.append(f"{GRAFTED} is at least as fast as {label} in {good} of {len(known)} settings")
            lines += [
                f"behind {label}: {setting[0]}, {setting_text(setting)}: {ratio:.3f}x"
                for setting, ratio in known.items()
                if ratio < 1
            ]
    return lines


def environment_text(environment: Mapping[str, Any]) -> str:
    """The machine and the versions in one line, of whatever the file says."""
    said = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            said.append(environment_text(value))
        elif isinstance(value, str | int | float):
            said.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(text for text in said if text)
