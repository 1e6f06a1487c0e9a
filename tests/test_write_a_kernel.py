"""The page "Write a kernel" does what it says, block after block; so do the examples."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "write_a_kernel.md"
BLOCK = re.compile(r"^```(\w+)(?: ([^\n]+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = {"custom_rms_norm": "13 norms have a `scale`", "rms_norm_mlp": "3 layers are fused"}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blocks() -> list[tuple[int, str, str | None, str]]:
    """(line, language, path of a file or None, text) of each block of the page."""
    text = PAGE.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start()) + 2, match[1], match[2], match[3]) for match in BLOCK.finditer(text)]


def run_command(line: str) -> str:
    """One `$ kernelgraft …` line; what it printed."""
    from kernelgraft.cli import app

    words = shlex.split(line)
    assert words[0] == "kernelgraft", f"the page runs `{words[0]}`"
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, f"`{line}`: {done.output}"
    return done.output


def test_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", "")
    names: dict[str, Any] = {}
    done = {"file": 0, "python": 0, "console": 0}
    for line, language, path, text in blocks():
        if path is not None:
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            done["file"] += 1
        elif language == "python":
            # The lines of the page, so that a failure says where it stands there.
            exec(compile("\n" * (line - 1) + text, str(PAGE), "exec"), names)
            done["python"] += 1
        elif language == "console":
            for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                run_command(command)
                done["console"] += 1
    assert done["file"] >= 7
    assert done["python"] >= 7


def test_every_block_is_closed_and_of_a_known_kind() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks())
    assert {language for _, language, _, _ in blocks()} <= {"python", "json", "console"}


@pytest.mark.parametrize(("script", "replaced"), EXAMPLES.items())
def test_the_examples_run(
    script: str, replaced: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", "")
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "largest difference of a logit: 0.0\n" in said
    assert "the same tokens: True\n" in said
    assert "saved as the original: True\n" in said
    assert said.startswith(replaced)


def test_the_page_and_the_examples_hold_the_same_packages() -> None:
    files = {path: text for _, _, path, text in blocks() if path}
    for mine, example in (("my-kernel", "my-rms-norm"), ("my-fusion", "my-rms-norm-mlp")):
        layers = f"{mine}/build/torch-universal/layers.py"
        assert (ROOT / "examples" / example / "build/torch-universal/layers.py").read_text() == files[layers]
