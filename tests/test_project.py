"""What holds for the whole project: import order, names, sizes, exports, packaging."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kernelgraft

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kernelgraft"
MODULES = sorted(SOURCE.rglob("*.py"))
ORDER = [
    "errors",
    "records",
    "machine",
    "identity",
    "store",
    "models",
    "cutile",
    "kernels",
    "sites",
    "families",
    "suppliers",
    "evaluate",
    "patch",
    "layouts",
    "emit",
    "bench",
    "pipeline",
    "report",
    "api",
    "terminal",
    "cli_bench",
    "cli",
    "__main__",
    "__init__",
]
"""A module imports only from those before it, and from its own package."""
LARGEST_MODULE = 600
ENGLISH = {
    "bark",
    "beam",
    "big",
    "bit",
    "bridge",
    "data",
    "doge",
    "dots",
    "fast",
    "flex",
    "git",
    "got",
    "granite",
    "helium",
    "jet",
    "nano",
    "opt",
    "recurrent",
    "seed",
    "solar",
    "text",
}
"""Stems of architecture names that also are words."""


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def own_part(module: str) -> str | None:
    """`kernelgraft.sites.rebind` → `sites`, `kernelgraft` → `__init__`, anything else → None."""
    if module == "kernelgraft":
        return "__init__"
    return module.split(".")[1] if module.startswith("kernelgraft.") else None


def imported_parts(parsed: ast.Module) -> set[str]:
    """The parts of kernelgraft that a module imports, wherever in it."""
    found: set[str | None] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found |= {own_part(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            if node.module == "kernelgraft":
                found |= {alias.name if alias.name in ORDER else "__init__" for alias in node.names}
            else:
                found.add(own_part(node.module or ""))
    return {part for part in found if part}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_up_the_list(path: Path) -> None:
    own = part_of(path)
    assert own in ORDER, f"`{own}` has no place in the order of imports"
    before = set(ORDER[: ORDER.index(own) + 1])
    wrong = imported_parts(tree(path)) - before
    assert not wrong, f"`{own}` comes before {sorted(wrong)}"


def test_the_order_test_sees_lazy_and_typed_imports() -> None:
    lazy = "def f():\n    from kernelgraft import cli\n    import kernelgraft.report\n"
    typed = "if TYPE_CHECKING:\n    from kernelgraft.sites.rebind import x\n"
    assert imported_parts(ast.parse(lazy + typed)) == {"cli", "report", "sites"}


def architecture_stems() -> set[str]:
    """`gemma3_text` → `gemma`: the first word of each causal model type, without numbers."""
    stems = {re.split(r"[_\-\d]", name)[0].lower() for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return {s for s in stems if len(s) > 2} - ENGLISH


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_architecture_is_named(path: Path) -> None:
    words = "|".join(sorted(architecture_stems()))
    # A whole word, or the beginning of a CamelCase or snake_case name or of one with a number.
    pattern = re.compile(rf"(?<![A-Za-z])({words})(?![a-z])", re.IGNORECASE)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = pattern.search(line)
        assert not found, f"line {number} names the architecture `{found and found[0]}`"


def test_the_name_test_would_see_a_name() -> None:
    stems = architecture_stems()
    assert {"llama", "gemma", "qwen", "mistral", "phi", "gpt"} <= stems


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_are_small_and_documented(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LARGEST_MODULE
    parsed = tree(path)
    if parsed.body:
        assert ast.get_docstring(parsed), "the module says nothing about itself"
    for node in ast.walk(parsed):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in node.body):
            pytest.fail(f"line {node.lineno} swallows an exception")
    for node in public_things(parsed):
        assert ast.get_docstring(node), f"`{node.name}` has no docstring"


def public_things(parsed: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a module, and the public methods of its public classes that override nothing."""
    found: list[ast.FunctionDef | ast.ClassDef] = []
    for node in parsed.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            found.append(node)
            if isinstance(node, ast.ClassDef) and not node.bases:
                found += [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_exports_are_sorted(path: Path) -> None:
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names = ast.literal_eval(node.value)
            # Constants, then classes, then functions, each by name: what ruff calls isort-style.
            assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
            assert len(names) == len(set(names))


def test_every_exported_name_is_there() -> None:
    for name in kernelgraft.__all__:
        assert getattr(kernelgraft, name) is not None
    assert set(kernelgraft.__all__) <= set(dir(kernelgraft))


@pytest.mark.parametrize("module", ["kernelgraft", "kernelgraft.records", "kernelgraft.machine", "kernelgraft.cli"])
def test_import_is_light(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- packaging ---


def project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def pins(file: str = "requirements.lock") -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"`{line}` is not pinned"
            found[canonicalize_name(name)] = version
    return found


def test_the_lock_holds_what_the_project_needs() -> None:
    needed = [*project()["dependencies"], *project()["optional-dependencies"]["dev"]]
    for text in needed:
        requirement = Requirement(text)
        version = pins().get(canonicalize_name(requirement.name))
        assert version, f"`{requirement.name}` is not in the lock"
        assert requirement.specifier.contains(version), f"the lock has {requirement.name} {version}"


def test_the_lock_needs_no_gpu() -> None:
    # cuda-tile is the language without its compiler: the interpreter runs it on a CPU.
    gpu_only = ("nvidia", "cuda", "triton", "flashinfer-python")
    assert not [name for name in pins() if name.startswith(gpu_only) and name != "cuda-tile"]


def test_the_compiler_is_locked_apart_and_is_all_that_cutile_looks_for() -> None:
    compiler = pytest.importorskip("cuda.tile._compile")
    locked = pins("requirements-compile.lock")
    assert set(locked) == set(compiler._PIP_TILEIRAS_PACKAGES)
    assert len(set(locked.values())) == 1, "cuTile wants them of one version"
    said = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(name in said for name in locked)


def test_dependencies_have_lower_bounds_only() -> None:
    for text in project()["dependencies"]:
        assert {s.operator for s in Requirement(text).specifier} == {">="}, text


def test_every_dependency_has_its_licence_stated() -> None:
    said = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    extras = [text for group in project()["optional-dependencies"].values() for text in group]
    for text in [*project()["dependencies"], *extras]:
        assert Requirement(text).name in said


def test_version_and_licence_are_said_once() -> None:
    assert project()["version"] == kernelgraft.__version__
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License")
    assert (SOURCE / "py.typed").exists()
