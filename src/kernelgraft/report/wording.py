"""How figures, names and tables are written."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from kernelgraft.bench.result import Figure
from kernelgraft.records import ModelCard, Site

REGIMES = ("prefill", "decode")
UNKNOWN = "–"
SMALLEST_FIGURES = 3


def figure_text(figure: Figure | None, digits: int = 1) -> str:
    """`12.3 ± 0.4`."""
    if figure is None:
        return UNKNOWN
    return f"{figure.mean:.{digits}f}" + ("" if figure.std is None else f" ± {figure.std:.{digits}f}")


LARGEST_VARIANT = 4
LONGEST_WORD = 14


def variant_text(semantics: Mapping[str, Any]) -> str:
    """`offset=1, cast=before`: the first short values, and a nested family's name; long names of code are left out."""
    said = []
    for key, value in semantics.items():
        if isinstance(value, Mapping) and "family" in value:
            said.append(f"{key}={value['family']}")
        elif isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= LONGEST_WORD):
            said.append(f"{key}={value}")
    return ", ".join(said[:LARGEST_VARIANT]) + (", …" if len(said) > LARGEST_VARIANT else "")


def short_name(solution: str, definitions: Iterable[str]) -> str:
    """The name of a Solution without that of its Definition."""
    for definition in definitions:
        if solution.endswith(f"_{definition}"):
            return solution.removesuffix(f"_{definition}")
    return solution


def site_name(site: Site) -> str:
    """The last part of a site's path, or what is replaced in its method."""
    if site.symbol is not None:
        return site.symbol
    parts = [part for part in site.path.split(".") if part != "*"]
    return parts[-1] if parts else site.class_name.rpartition(".")[2]


def time_text(us: float) -> str:
    """µs, with a digit after the point where that says something."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def figures(value: float | None) -> str:
    """At least three figures: `0.123`, `1.23`, `12.3`, `1234`."""
    if value is None:
        return UNKNOWN
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(SMALLEST_FIGURES - whole, 0)}f}"


def signed(value: float) -> str:
    """Such figures with their sign."""
    return ("-" if value < 0 else "+") + figures(abs(value))


def usable(reason: str | None) -> str:
    """Whether something can be used here, and why not."""
    return "usable" if reason is None else f"not usable: {reason}"


def make_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Container[int] = (),
    folded: Container[int] = (),
) -> Table:
    """Cells are shown as they are: a name can hold what looks like markup. Only the `folded` columns give way."""
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if index in numbers else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=index not in folded)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def number(value: float | None, digits: int) -> str:
    """Fixed point; a dash for what is unknown."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def model_title(model: ModelCard) -> str:
    """What the model is, in one line."""
    return f"{model.name}: {model.type}, {model.parameters:,} parameters, {model.dtype} on {model.device}"


def one_line(headings: Sequence[str]) -> list[str]:
    """Headings without line breaks."""
    return [heading.replace("\n", " ") for heading in headings]


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A pipe table; what would end a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", "<br>") for c in cells) + " |"

    return "\n".join([line(headings), line(["---"] * len(headings)), *map(line, rows)])
