"""The command line: exit codes, one-line errors, JSON on stdout, the verbs one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelgraft import cli, evaluate, models, pipeline
from kernelgraft.errors import KernelgraftError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line in this process: exit code, stdout, stderr."""
    from rich.console import Console

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kernelgraft", *map(str, arguments)])
        monkeypatch.setattr(cli, "people", Console(stderr=True, width=300))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


@pytest.fixture(scope="module")
def grafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all records of a tiny random model."""
    folder = tmp_path_factory.mktemp("grafted") / "out"
    options = evaluate.JudgeOptions.quick()
    loaded = models.load("config:llama")
    pipeline.integrate(loaded, out=folder, suppliers=["torch"], policy="verified", options=options)
    return folder


def one_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("kernelgraft: ")
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "tinny"), "tinny"),
        (("run", "./no/such/folder"), "no/such/folder"),
        (("run", "config:nonesuch"), "nonesuch"),
        (("run", "tiny", "--dtype", "int4"), "int4"),
        (("run", "tiny", "--device", "tpu"), "tpu"),
        (("run", "tiny", "--policy", "best"), "best"),
        (("run", "tiny", "--suppliers", "nonesuch"), "nonesuch"),
        (("run", "tiny", "--judge", "lenient"), "lenient"),
        (("run", "tiny", "--mode", "graph"), "--mode eager"),
        (("run", "tiny", "--mode", "fast"), "fast"),
        (("run", "tiny", "--batch", "1,x"), "1,x"),
        (("run", "tiny", "--prefill", "0"), "--prefill 0"),
        (("bench", "tiny", "--cache", "paged"), "paged"),
        (("bench", "tiny", "--graft", "no-such-folder"), "no-such-folder"),
        (("bench", "tiny", "--compare", "vllm"), "`vllm` is no contender"),
        (("bench", "tiny", "--graft", "no-such-folder", "--suppliers", "torch"), "--suppliers"),
        (("bench", "tiny", "--suppliers", "nobody"), "nobody"),
        (("plan", "no-such-folder"), "no-such-folder"),
        (("inventory", "--kernel", "rope"), "--tune"),
        (("integrate", "no-such-folder"), "no-such-folder"),
        (("export", "no-such-folder", "--dest", "x"), "no-such-folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert code == 2
    assert f"`{named}`" in one_line(err) or named in one_line(err)
    assert out == ""
    assert not list(tmp_path.iterdir()), "something was written"


def test_an_unwritable_folder_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file stands where the folder would be")
    code, _, err = run("research", "config:llama", "--out", tmp_path / "file" / "out")
    assert code == 2
    assert "cannot write" in err


def test_a_corrupt_graft_is_said(run: Run, grafted: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(grafted, copy)
    (copy / "graft.json").write_text("{not json")
    for arguments in (
        ("export", copy, "--dest", tmp_path / "dest"),
        ("bench", "config:llama", "--graft", copy),
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert "graft.json" in one_line(err)
    assert not (tmp_path / "dest").exists()


def test_a_graft_of_another_model_is_refused(run: Run, grafted: Path) -> None:
    code, _, err = run("bench", "tiny", "--graft", grafted, "--pairs", 1, "--new-tokens", 2)
    assert code == 2
    assert "kernelgraft: " in err
    assert "Traceback" not in err


def test_an_unknown_format_lists_the_known(run: Run, grafted: Path, tmp_path: Path) -> None:
    code, _, err = run("export", grafted, "--format", "onnx", "--dest", tmp_path / "dest")
    assert code == 2
    assert "monkey-patch" in one_line(err)
    assert "flashinfer-trace" in one_line(err)
    assert not (tmp_path / "dest").exists()


def test_the_verbs_run_one_after_the_other(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "steps"
    code, text, _ = run("research", "config:llama", "--out", out, "--json", "-")
    assert code == 0
    record = json.loads(text)
    assert record["model"]["name"] == "config:llama"
    code, text, _ = run("plan", out, "--suppliers", "torch", "--json", "-")
    assert code == 0
    assert {row["verdict"] for row in json.loads(text)["rows"]} <= {"exact", "adapter", "new kernel"}
    code, text, _ = run("integrate", out, "--policy", "verified", "--json", "-")
    assert code == 0
    graft = json.loads(text)
    assert any(p["status"] == "accepted" for p in graft["patches"])
    code, _, err = run("integrate", out)
    assert code == 0
    assert "--force redoes it" in err
    code, text, _ = run("bench", "config:llama", "--graft", out, "--pairs", 2, "--new-tokens", 4, "--json", "-")
    assert code == 0
    sides = {c["name"]: c["side"] for c in json.loads(text)["contenders"]}
    assert set(sides) == {"eager", "kernelgraft"}
    assert sides["kernelgraft"]["tokens_per_s"]["mean"] > 0


def test_a_benchmark_makes_a_graft_where_none_is_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def made(loaded: Any, store: Any, **options: Any) -> None:
        seen.append(([supplier.name for supplier in options["suppliers"]], options["languages"], options["use"]))
        raise KernelgraftError("that is all that is wanted")

    monkeypatch.setattr(pipeline, "run_integration", made)
    for arguments in (["--suppliers", "torch"], ["--compare", "kernelgraft", "--batch", 3], ["--use-cutile"]):
        code, _, err = run("bench", "config:llama", *arguments, "--prompt-tokens", 50)
        assert code != 0
        assert "no --graft is given: making one" in err
    assert seen[0][0] == ["torch"]
    assert {"kernelgraft", "tilegym"} <= set(seen[1][0])
    assert [languages for _, languages, _ in seen] == [None, None, ["cuda-tile"]]
    assert seen[1][2] == pipeline.Use(batches=(1, 3), prefills=(50,))


def test_a_benchmark_measures_each_compute_where_it_is_asked_to(
    run: Run, grafted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelgraft.pipeline import ablation

    monkeypatch.setattr(ablation, "THOROUGH_ROUNDS", 3)
    file = tmp_path / "bench.json"
    options = ["--graft", grafted, "--pairs", 1, "--new-tokens", 2, "--batch", 2, "--prompt-tokens", 12]
    code, out, _ = run("bench", "config:llama", *options, "--ablate", "--json", file)
    assert code == 0
    assert "switched off, the rest on" in out
    found = json.loads(file.read_text())["contributions"]
    graft = json.loads((grafted / "graft.json").read_text())
    accepted = {p["family"] for p in graft["patches"] if p["status"] == "accepted"}
    assert {c["family"] for c in found} == {"all", *accepted}
    assert {(c["regime"], c["batch"], c["prompt_tokens"]) for c in found} >= {
        ("decode", 2, None), ("prefill", 2, None), ("prefill", 1, 12),
    }  # fmt: skip
    code, out, _ = run("report", file, "--html", tmp_path / "page.html")
    assert code == 0
    assert "switched off, the rest on" in out
    assert "What each compute gains in this setting" in (tmp_path / "page.html").read_text()
    code, _, err = run("bench", "config:llama", "--ablate")
    assert code == 2
    assert "`--ablate` measures what a graft gains" in one_line(err)


def test_inventory_and_doctor_answer_in_json(run: Run, grafted: Path) -> None:
    code, text, _ = run("inventory", grafted, "--json")
    assert code == 0
    answer = json.loads(text)
    assert {line["supplier"] for line in answer["catalogue"]} >= {"torch", "inductor"}
    assert all({"language", "hardware", "guard", "unavailable"} <= line.keys() for line in answer["catalogue"])
    assert answer["solutions"]
    code, text, _ = run("doctor", "--json", "-")
    assert code == 0
    assert json.loads(text)["machine"]["cores"] >= 1


def test_tuning_without_a_gpu_is_one_line(run: Run) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU to tune on")
    code, out, err = run("inventory", "--tune", "--budget", 1)
    assert code == 2
    assert "CUDA device" in one_line(err)
    assert out == ""


def test_what_was_tuned_as_a_table_and_as_json(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.tile", reason="needs cuda-tile")
    from kernelgraft.cutile import tuner, tuning

    def outcome(status: Any, us: float | None, **config: Any) -> tuner.Outcome:
        return tuner.Outcome({"rows": 1, "warps": None, **config}, status, None if us else "off by one", us, 0.1)

    outcomes = [outcome("ok", 2.5), outcome("wrong", None, rows=2), outcome("ok", 1.25, rows=4, warps=8)]
    asked: dict[str, Any] = {}

    def tune(modules: list[str], **options: Any) -> tuner.Run:
        asked.update(options, modules=modules)
        results = [tuner.Result("rope", "32+8x128 r1", outcomes, 2)]
        return tuner.Run(tuning.Gpu("NVIDIA Test", "sm_90"), tmp_path / "t.json", results, ["rope/left"], 3.0)

    monkeypatch.setattr(tuner, "tune", tune)
    code, out, _ = run("inventory", "--tune", "--kernel", "rope", "--budget", 9)
    assert code == 0
    assert (asked["kernels"], asked["budget_s"]) == (["rope"], 9.0)
    assert "kernelgraft.kernels.row_tunables" in asked["modules"]
    for said in ("2.50", "1.25", "rows 4", "warps 8", "wrong: rope/32+8x128 r1: off by one", "not reached: rope/left"):
        assert said in out
    code, out, _ = run("inventory", "--tune", "--json")
    assert code == 0
    (result,) = json.loads(out)["tuning"]["results"]
    assert result["gain"] == 2.0
    assert result["outcomes"][1]["status"] == "wrong"


def test_help_lists_the_verbs_and_flags_are_frozen() -> None:
    """A new flag is a promise: change this list on purpose."""
    import typer.main

    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    flags = {name: sorted(o for p in c.params for o in p.opts if o.startswith("--")) for name, c in commands.items()}
    common = ["--device", "--dtype", "--json", "--out", "--trust-remote-code"]
    judging = ["--judge", "--jobs", "--fresh", "--batch", "--prefill", "--mode", "--ablate"]
    assert flags == {
        "doctor": ["--json"],
        "research": common,
        "inventory": ["--arch", "--budget", "--compile", "--json", "--kernel", "--only", "--tune"],
        "check": ["--device", "--json", "--numeric", "--training", "--trust-remote-code"],
        "plan": ["--json", "--suppliers"],
        "integrate": sorted(["--device", "--force", "--json", "--policy", "--trust-remote-code", *judging]),
        "bench": [
            "--ablate",
            "--batch",
            "--cache",
            "--compare",
            "--device",
            "--dtype",
            "--graft",
            "--json",
            "--new-tokens",
            "--pairs",
            "--prompt-tokens",
            "--suppliers",
            "--trace",
            "--use-cutile",
        ],
        "report": ["--html", "--json", "--plots"],
        "export": ["--dest", "--format", "--overwrite", "--package", "--repo"],
        "run": sorted([*common, *judging, "--force", "--new-tokens", "--pairs", "--policy", "--suppliers"]),
    }


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "kernelgraft", "--help"], capture_output=True, text=True, check=True)
    assert "integrate" in done.stdout


def test_run_writes_everything(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "all"
    code, text, err = run(
        "run", "config:llama", "--out", out, "--json", "-", "--suppliers", "torch", "--policy", "verified",
        "--pairs", 2, "--new-tokens", 4,
    )  # fmt: skip
    assert code == 0
    answer = json.loads(text)
    assert set(answer) == {"schema_version", "model", "machine", "patches", "contributions", "bench", "files"}
    assert answer["bench"]["tokens_equal"] is True
    assert "Average throughput: " in err
    for path in answer["files"].values():
        assert Path(path).exists()
    assert json.loads((out / "result.json").read_text())["patches"] == answer["patches"]
    code, text, err = run("run", "config:llama", "--out", out, "--json", "-", "--suppliers", "torch")
    assert code == 0
    assert "--force redoes it" in err
    assert "switched off" not in err
    code, table, err = run("run", "config:llama", "--out", out, "--ablate")
    assert code == 0
    assert "switched off" not in table, "nothing was measured: a graft of policy `verified` is as it is"
    again = json.loads(text)
    assert again["bench"] == answer["bench"], "a job that is done keeps its benchmark"
    assert json.loads((out / "result.json").read_text())["bench"] == answer["bench"]
