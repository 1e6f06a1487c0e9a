"""Plots and the HTML page: what they show, and that a page can be read by anyone, anywhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_samples import ALONE, BENCH, GRAFT, PLAN, ablated, five, on_a_gpu, trace

from kernelgraft import cli, report
from kernelgraft.bench.result import BenchResult, Share
from kernelgraft.errors import UsageError
from kernelgraft.report import Job, drawings, page, plots
from kernelgraft.store import Inventory

needs_matplotlib = pytest.mark.skipif(not plots.can_plot(), reason=plots.NO_PLOTS)
PLOTS = ["computes", "modules_decode", "modules_prefill", "roofline", "throughput"]
VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Collects what a page holds, and notices tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.tags if found == tag]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


# --- plots ---


@needs_matplotlib
def test_every_plot_is_written(tmp_path: Path) -> None:
    files = report.write_plots(tmp_path / "plots", Job(GRAFT, PLAN, on_a_gpu()))
    assert sorted(files) == PLOTS
    for file in files.values():
        data = Path(file).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
        assert width == drawings.WIDTH * plots.PNG_DPI and height > 200


@needs_matplotlib
def test_what_is_not_known_is_not_drawn() -> None:
    assert sorted(plots.figures_of(Job(GRAFT, PLAN, BENCH))) == ["computes", "throughput"]
    assert sorted(plots.figures_of(Job(bench=ALONE))) == ["throughput"]
    assert plots.figures_of(Job(GRAFT.model_copy(update={"patches": GRAFT.patches[1:]}))) == {}


@needs_matplotlib
def test_a_plot_says_its_figures_to_those_who_do_not_see_it() -> None:
    drawn = plots.figures_of(Job(GRAFT, PLAN, on_a_gpu()))
    said = {name: text for name, (text, _) in drawn.items()}
    assert "eager 800, static-compile 4000, tilegym failed, liger 780, kernelgraft 1000" in said["throughput"]
    assert "model.layers.*.mlp 200 to 100" in said["modules_decode"]
    assert "in all 6.10 ms to 5.40 ms" in said["modules_prefill"]
    assert "kernelgraft decode 61 %" in said["roofline"]
    assert "rms_norm (norm), prefill 20.0 to 12.0, rms_norm (norm), decode 10.0 to 10.0" in said["computes"]


@needs_matplotlib
def test_the_bars_are_the_figures() -> None:
    drawn = plots.figures_of(Job(GRAFT, PLAN, on_a_gpu()))
    widths = [bar.get_width() for bar in drawn["throughput"][1].axes[0].patches]
    assert widths == [800.0, 4000.0, 0.0, 780.0, 1000.0]
    points = {line.get_label(): line.get_xydata()[0].tolist() for line in drawn["roofline"][1].axes[0].lines[1:]}
    intensity, reached = points["kernelgraft, decode: 61 %"]
    assert intensity == pytest.approx(1.0)
    # 2.5 GFLOP a step that takes 0.581 ms at least, of which 61 % was reached.
    assert reached == pytest.approx(2.5e9 / (0.581e-3 / 0.61) / 1e12)


@needs_matplotlib
def test_gains_and_losses_are_drawn_with_their_intervals() -> None:
    from matplotlib.colors import to_hex

    text, figure = plots.figures_of(Job(ablated()))["contributions"]
    assert "all, decode, batch 1 +20.0 %" in text and "gated_mlp (mlp), prefill of 512, batch 1 -5.3 %" in text
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([20.0, 100 / 6, -100 / 19])
    bench = ALONE.model_copy(update={"contributions": ablated().contributions})
    assert plots.figures_of(Job(bench=bench))["bench_contributions"][0] == text
    gone = ablated().contributions[0].model_copy(update={"seated": False})
    assert "contributions" not in plots.figures_of(Job(GRAFT.model_copy(update={"contributions": (gone,)})))
    noise = ablated().contributions[0].model_copy(update={"interval_ms": (-0.1, 5.1)})
    _, other = plots.figures_of(Job(GRAFT.model_copy(update={"contributions": (noise,)})))["contributions"]
    colours = [to_hex(bar.get_facecolor()) for bar in (*axes.patches, *other.axes[0].patches)]
    assert colours == [drawings.AFTER, drawings.AFTER, drawings.LOSS, drawings.BEFORE]
    segments = axes.collections[0].get_segments()
    assert segments[0][:, 0].tolist() == pytest.approx([18.0, 22.0])
    low, high = axes.get_xlim()
    assert low < -100 * 0.6 / 9.5 and high > 22.0


def test_small_modules_are_added_up_and_nothing_is_lost() -> None:
    def many(scale: float) -> Any:
        shares = [Share(name="x", path=f"m{i}", time_us=scale * (40 - i), percent=1, calls=1) for i in range(20)]
        return trace("prefill").model_copy(update={"modules": tuple(shares), "kernel_us": scale * 700.0})

    rows = drawings.module_times(many(1.0), many(0.5))
    assert len(rows) == drawings.MOST_MODULES + 1
    assert rows[0] == ("m0", 40.0, 20.0)
    assert rows[-1][0] == drawings.REST
    assert sum(row[1] for row in rows) == pytest.approx(700.0)
    assert sum(row[2] for row in rows) == pytest.approx(350.0)


def test_decode_is_shown_for_one_step() -> None:
    rows = dict((name, old) for name, old, _ in drawings.module_times(trace("decode"), trace("decode")))
    assert rows["lm_head"] == 300.0


@needs_matplotlib
def test_a_name_is_no_formula() -> None:
    model = BENCH.model.model_copy(update={"name": r"a$\b$_{c} <b>"})
    drawn = plots.figures_of(Job(bench=on_a_gpu().model_copy(update={"model": model})))
    text = plots.svg("roofline", "r", drawn["roofline"][1]).body
    assert r"a$\b$_{c} &lt;b&gt;" in text


@needs_matplotlib
def test_text_in_a_plot_has_the_colour_of_the_page() -> None:
    text = plots.svg("throughput", "t", plots.figures_of(Job(bench=BENCH))["throughput"][1]).body
    assert drawings.INK not in text
    assert "#000" not in text
    styles = re.findall(r"<text style=\"([^\"]*)\"", text)
    assert styles and all("fill: currentColor" in style for style in styles)


@pytest.mark.parametrize("page_colour", ["#ffffff", "#14171a"])
def test_bars_stand_out_on_light_and_dark(page_colour: str) -> None:
    for colour in (*drawings.COLOURS.values(), drawings.OTHER_COLOUR, drawings.FAINT):
        assert contrast(colour, page_colour) >= 3, colour


@needs_matplotlib
def test_the_same_records_draw_the_same_picture() -> None:
    first, second = (plots.svg("t", "t", plots.figures_of(Job(bench=five()))["throughput"][1]) for _ in range(2))
    assert first == second


# --- the page ---


@needs_matplotlib
def test_the_page_needs_nothing_else_and_can_be_read_by_all() -> None:
    found = Reader(page(Job(GRAFT, PLAN, on_a_gpu())))
    assert [a["lang"] for a in found.all("html")] == ["en"]
    assert not found.all("script") and not found.all("img")
    for _, attributes in found.tags:
        for name in ("src", "href", "xlink:href", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), attributes
        assert "url(" not in (attributes.get("style") or "").replace("url(#", "")
    ids = [a["id"] for _, a in found.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    links = [a["href"] for a in found.all("a")]
    assert links and {link[1:] for link in links if link} <= set(ids)
    levels = [tag for tag, _ in found.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == "h1" and set(levels[1:]) == {"h2"}
    assert len(found.all("svg")) == len(PLOTS)
    assert all(a["role"] == "img" and a["aria-label"] for a in found.all("svg"))
    assert len(found.all("caption")) == len(found.all("table"))
    assert all(a.get("scope") in ("row", "col") for a in found.all("th"))


def test_the_page_holds_the_agreed_words_and_all_figures() -> None:
    text = "".join(Reader(page(Job(GRAFT, PLAN, on_a_gpu()))).text)
    # The coverage line has spaces in a row.
    assert re.search(r"main li \{[^}]*white-space: pre-wrap", page(Job(GRAFT)))
    for said in (
        "Average throughput: 1000.00 ± 2.00 tokens/sec",
        ">>> cuTile Kernel Coverage (GPU Time):    49.21% <<<",
        "22.95 % of the original's GPU time replaced",
        "failed: tilegym has no patch for `b`",
        "Not covered: kernelgraft, decode",
        "Left to libraries: kernelgraft, decode",
        "model.norm: liger_rms_norm",
        "1 of 2 computes accepted",
        "off | by 3",
        "61.0 %",
    ):
        assert said in text, said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_on_light_and_dark(scheme: str) -> None:
    blocks = re.findall(r":root \{(.*?)\}", page(Job(GRAFT)), re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#\w{6})", blocks[0 if scheme == "light" else 1]))
    for ink in ("ink", "faint", "accent"):
        for behind in ("page", "panel"):
            assert contrast(colours[ink], colours[behind]) >= 4.5, (ink, behind)


def test_what_looks_like_markup_is_text() -> None:
    bad = "<script>alert('&')</script>"
    graft = GRAFT.model_copy(update={"model": GRAFT.model.model_copy(update={"name": bad})})
    eager, *_, ours = five().contenders
    failed = ours.model_copy(update={"side": None, "failure": bad, "comparison": None, "outputs": None})
    bench = BENCH.model_copy(update={"contenders": (eager, failed), "model": graft.model})
    found = Reader(page(Job(graft, PLAN, bench)))
    assert not found.all("script")
    assert f"failed: {bad}" in "".join(found.text)


def test_a_page_of_what_there_is() -> None:
    def headings(text: str) -> list[str]:
        return re.findall(r"<h2[^>]*>(.*?)</h2>", text)

    assert headings(page(Job(GRAFT))) == ["Computes", "Times", "Verdicts"]
    assert headings(page(Job(ablated()))) == ["Computes", "Contributions", "Times", "Verdicts"]
    assert headings(page(Job(bench=ALONE))) == ["Contenders", "What ran in each process"]
    told = ALONE.model_copy(update={"contributions": ablated().contributions})
    title = "What each compute gains in this setting"
    assert headings(page(Job(bench=told))) == ["Contenders", title, "What ran in each process"]
    assert "+1.80 to +2.20" in page(Job(bench=told))
    with pytest.raises(ValueError):
        page(Job(plan=PLAN))


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    text = page(Job(GRAFT, PLAN, on_a_gpu()))
    assert "pip install &#39;kernelgraft[plots]&#39;" in text
    assert "<svg" not in text
    with pytest.raises(UsageError, match="kernelgraft\\[plots\\]"):
        report.write_plots(tmp_path, Job(GRAFT, PLAN, BENCH))


# --- the verb ---


def job(folder: Path, bench: BenchResult | None = None) -> Path:
    store = Inventory(folder)
    store.save_record("graft", GRAFT)
    if bench is not None:
        store.save_record("bench", bench)
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["kernelgraft", "report", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_verb_writes_the_page_beside_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job(tmp_path / "job", five())
    assert call(monkeypatch, str(folder)) == 0
    out = capsys.readouterr().out
    assert "static-compile" in out and "1 of 2 computes accepted" in out
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "report.md").is_file()


@needs_matplotlib
def test_the_verb_writes_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job(tmp_path / "job")
    page_file, plots_folder = tmp_path / "p.html", tmp_path / "plots"
    assert call(monkeypatch, str(folder), "--html", str(page_file), "--plots", str(plots_folder), "--json", "-") == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files["page"] == str(page_file) and page_file.is_file()
    assert files["computes"] == str(plots_folder / "computes.png") and (plots_folder / "computes.png").is_file()
    assert not (folder / "report.html").exists()


def test_a_folder_without_a_job_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Inventory(tmp_path / "job").save_record("plan", PLAN)
    assert call(monkeypatch, str(tmp_path / "job")) != 0
    assert "has no graft and no benchmark" in capsys.readouterr().err
