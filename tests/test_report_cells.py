"""Many benchmarks beside each other, from the file of benchmarks/end_to_end.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_samples import cells, five
from rich.console import Console

from kernelgraft import report
from kernelgraft.errors import UsageError
from kernelgraft.report import Job, plots
from kernelgraft.report.cells import Cells, cell_lines, cell_rows, environment_text, missing_lines, read_cells


def written(folder: Path) -> Path:
    file = folder / "end_to_end.json"
    file.write_text(json.dumps(cells()), encoding="utf-8")
    return file


def test_a_row_for_every_setting() -> None:
    rows = list(cell_rows(Cells.model_validate(cells()).cells))
    assert len(rows) == 6
    assert rows[0] == [
        "small",
        "decode, batch 1",
        "80.0",
        "400",
        "–",
        "56.0",
        "120",
        "1.500x",
        "2.143x",
        "12.0",
        "equal",
    ]
    # 4096 tokens at 20,000 a second, and at 1.5 times that.
    assert rows[5][1:3] == ["prefill of 4096, batch 1", "205 ms"]
    assert rows[5][6:9] == ["137 ms", "1.500x", "1.667x"]


def test_what_is_behind_is_named() -> None:
    lines = cell_lines(Cells.model_validate(cells()).cells)
    assert lines == [
        "kernelgraft is at least as fast as eager in 5 of 6 settings",
        "behind eager: large, decode, batch 32: 0.800x",
        "kernelgraft is at least as fast as the best peer in 5 of 6 settings",
        "behind the best peer: large, decode, batch 32: 0.889x",
    ]


def test_what_was_measured_later_or_elsewhere_is_said() -> None:
    file = cells()
    before = missing_lines(Cells.model_validate(file))
    file["environment"] = {"gpu": "one", "time": "today"}
    compiled = next(cell for cell in file["cells"] if cell["contender"] == "static-compile")
    compiled["measured_later_beside"] = {"eager": {"ttft_ms": 1.0}, "kernelgraft": {"ttft_ms": 0.5}}
    file["models"] |= {
        "small": {"environment": {"gpu": "one", "time": "yesterday"}},
        "large": {"environment": {"gpu": "two", "time": "today"}},
    }
    assert missing_lines(Cells.model_validate(file)) == [
        *before,
        "measured after the others, in turns with eager and kernelgraft: static-compile, small, decode, batch 1",
        "measured elsewhere: large: gpu two, time today",
    ]


def test_without_a_graft_nothing_is_claimed() -> None:
    found = [cell for cell in cells()["cells"] if cell["contender"] != "kernelgraft"]
    made = Cells.model_validate({"cells": found}).cells
    assert cell_lines(made) == []
    assert next(iter(cell_rows(made)))[-4:] == ["–"] * 4


def test_the_environment_is_said_whatever_it_holds() -> None:
    text = environment_text(cells()["environment"])
    assert "gpu A GPU" in text and "torch 2.13.0" in text and "seed 0" in text


def test_a_folder_or_a_file(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert len(report.read(file).cells.cells) == 30  # type: ignore[union-attr]
    assert report.read(tmp_path) == report.read(file)
    bench = tmp_path / "b.json"
    bench.write_text(five().model_dump_json(), encoding="utf-8")
    assert report.read(bench) == Job(bench=five())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"cells": [{"model": "x"}]}', '{"contenders": []}'])
def test_a_file_of_something_else_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        report.read(file)
    assert "\n" not in str(caught.value) and "x.json" in str(caught.value)
    with pytest.raises(UsageError):
        read_cells(tmp_path / "missing.json")
    with pytest.raises(UsageError, match="does not exist"):
        report.read(tmp_path / "missing")


def test_the_terminal_and_the_page_show_them(tmp_path: Path) -> None:
    job = report.read(written(tmp_path))
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*report.job_tables(job))
    console.file.close()
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "behind eager: large, decode, batch 32: 0.800x" in shown
    rows = [line.split() for line in shown.splitlines()]
    place = rows.index(["large", "205", "41.0", "228", "293", "137", "1.500x", "1.667x", "equal"])
    assert rows[place + 1] == ["prefill", "4096"]
    text = report.page(job)
    assert "<h1>kernelgraft: end to end</h1>" in text
    assert "prefill of 4096, batch 1" in text
    for said in (
        "failed: tilegym, small: tilegym has no patch for `small`",
        "missing: small: trace of eager, decode",
        "GPU time: large",
        "kernelgraft, decode: &gt;&gt;&gt; cuTile Kernel Coverage (GPU Time):    49.21% &lt;&lt;&lt;",
        "Not covered: kernelgraft, decode",
        "model.norm: liger_rms_norm",
        "Calls through the patches of kernelgraft",
        "acme_norm: 7",
        "behind the best peer: large, decode, batch 32: 0.889x",
    ):
        assert said in text, said
    assert "GPU time: small" not in text
    assert text.count("failed: tilegym, small") == 1


@pytest.mark.skipif(not plots.can_plot(), reason=plots.NO_PLOTS)
def test_a_folder_in_a_models_name_is_no_folder() -> None:
    made = cells()
    made["models"] = {"a/../b c": made["models"]["large"]}
    assert list(plots.figures_of(Job(cells=Cells.model_validate(made)))) == ["speedups", "a-..-b-c_modules_decode"]


@pytest.mark.skipif(not plots.can_plot(), reason=plots.NO_PLOTS)
def test_speeds_over_the_original_are_drawn(tmp_path: Path) -> None:
    drawn = plots.figures_of(report.read(written(tmp_path)))
    assert list(drawn) == ["speedups", "large_modules_decode"]
    text, figure = drawn["speedups"]
    assert "in all 1.53 ms to 1.35 ms" in drawn["large_modules_decode"][0]
    assert "large, decode, batch 32: static-compile 5.00, tilegym 0.90, liger 0.70, kernelgraft 0.80" in text
    bars = [round(bar.get_width(), 6) for bar in figure.axes[0].patches]
    assert sorted(bars) == [0.7] * 6 + [0.8] + [0.9] * 3 + [1.5] * 5 + [5.0] * 6
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "static-compile",
        "tilegym",
        "liger",
        "kernelgraft",
    ]
    small = Cells.model_validate({"cells": [cell for cell in cells()["cells"] if cell["model"] == "small"]})
    (_, other) = plots.figures_of(Job(cells=small))["speedups"]
    assert [text.get_text() for text in other.legends[0].texts] == ["static-compile", "liger", "kernelgraft"]
    nothing = Cells.model_validate({"cells": [cell for cell in cells()["cells"] if cell["contender"] == "eager"]})
    assert plots.figures_of(Job(cells=nothing)) == {}
