"""Plots as PNG files for a document and as SVG for the page. Needs matplotlib, the optional extra `plots`."""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgraft.errors import UsageError
from kernelgraft.report import drawings
from kernelgraft.report.drawings import FAINT, INK
from kernelgraft.report.job import Job
from kernelgraft.report.wording import REGIMES
from kernelgraft.store import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_PLOTS = "no plots without matplotlib: pip install 'kernelgraft[plots]'"
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.0,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
PNG_DPI = 160


def can_plot() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def figures_of(job: Job) -> dict[str, tuple[str, Figure]]:
    """What can be drawn from the records: name to a text for those who do not see it, and the matplotlib figure.

    Raises UsageError if matplotlib is not installed.
    """
    if not can_plot():
        raise UsageError(NO_PLOTS)
    import matplotlib

    drawn: dict[str, tuple[str, Figure] | None] = {}
    with matplotlib.rc_context(SETTINGS):
        if job.cells is not None:
            drawn["speedups"] = drawings.speedups(job.cells.cells)
            for model, contenders in job.cells.contenders.items():
                for regime in REGIMES:
                    drawn[f"{model}_modules_{regime}"] = drawings.modules(contenders, regime, model)
        if job.bench is not None:
            drawn["throughput"] = drawings.throughput(job.bench)
            for regime in REGIMES:
                title = drawings.title_of(job.bench)
                drawn[f"modules_{regime}"] = drawings.modules(job.bench.contenders, regime, title)
            drawn["roofline"] = drawings.roofline(job.bench)
            drawn["bench_contributions"] = drawings.contributions(job.bench.model.name, job.bench.contributions)
        if job.graft is not None:
            drawn["computes"] = drawings.computes(job.graft)
            drawn["contributions"] = drawings.contributions(job.graft.model.name, job.graft.contributions)
    return {file_name(name): made for name, made in drawn.items() if made is not None}


def file_name(name: str) -> str:
    """A name for a file and an id: without what a path or a selector would read otherwise."""
    return re.sub(r"[^\w.-]", "-", name)


def write_pngs(drawn: dict[str, tuple[str, Figure]], folder: Path) -> dict[str, str]:
    """Write `<name>.png` for each; returns the files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, (_, figure) in drawn.items():
        buffer = io.BytesIO()
        _save(figure, buffer, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
        file = folder / f"{name}.png"
        write_atomic(file, buffer.getvalue())
        files[name] = str(file)
    return files


@dataclass(frozen=True)
class Drawing:
    """What goes into an `<svg>` element of a page."""

    name: str
    text: str
    """For those who do not see it."""
    view_box: str
    body: str
    """Elements, in the page's own text colour."""


def svg(name: str, text: str, figure: Figure) -> Drawing:
    """The figure as elements of SVG; texts that matplotlib wrote are escaped."""
    buffer = io.StringIO()
    _save(figure, buffer, hashsalt=name, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = buffer.getvalue().replace(INK, "currentColor").replace("'DejaVu Sans'", "inherit")
    drawn = _own_names(re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL), name)
    found = re.search(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>(.*)</svg>', drawn, flags=re.DOTALL)
    assert found is not None
    return Drawing(name, text, found[1], found[2])


def _own_names(drawn: str, prefix: str) -> str:
    """Ids are one page's: those that nothing refers to go, the others get the plot's name."""
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", drawn)
    return re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}-", drawn)


def _save(figure: Figure, buffer: Any, *, hashsalt: str = "kernelgraft", **how: Any) -> None:
    import matplotlib

    with matplotlib.rc_context(SETTINGS | {"svg.hashsalt": hashsalt}):
        figure.savefig(buffer, **how)
