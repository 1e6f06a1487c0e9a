"""The format `monkey-patch`: a package of plain Python that patches transformers' classes before a model is built.

```
<package>/transformers/
├── monkey_patch.py                      apply_<package>_kernel_to_<submodule>(<one flag a compute>, model=None)
├── patching.py, checking.py             what all patches, and all tests, share
├── bench_<submodule>.sh
└── <submodule>/
    ├── monkey_patch_<compute>.py        kernels, guards, places
    ├── test_monkey_patch_<compute>.py   one test: as the original around the place
    ├── modeling_<submodule>.py          only where a method is rewritten
    └── config.json, captured_<compute>.safetensors      what the tests need
```
It needs torch and transformers only. A compute is a family: all accepted patches of one family go into one file.
"""

from __future__ import annotations

import ast
import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import torch
from safetensors.torch import save as dump_tensors

from kernelgraft import machine
from kernelgraft.emit import testing
from kernelgraft.emit.computes import Compute, build, source_sha256, unservable
from kernelgraft.errors import UsageError
from kernelgraft.records import Graft
from kernelgraft.sites.attention import InterfaceProxy
from kernelgraft.store import Inventory

VERSION = machine.version("kernelgraft") or "(not installed)"
HEADER = "Written by `kernelgraft export`"
MOST_CAPTURED_BYTES = 64 * 1024
MOST_CAPTURED = 4
"""Stored calls of one Definition go into the tests up to this size and number."""
DEFAULT_LENGTH = 6
_USED = (("Callable", "from collections.abc import Callable"), ("Any", "from typing import Any"))
_STANDARD = ("import math", "import functools", *(line for _, line in _USED))


def write(
    graft: Graft, stage: Path, *, package: str, submodule: str, inventory: Inventory | None, config: Any = None
) -> None:
    """Write the package into the folder `stage`. UsageError if no accepted patch can be exported."""
    skipped: list[str] = []
    patches = []
    for patch in graft.accepted:
        reasons = unservable(patch)
        skipped += reasons
        patches += [] if reasons else [patch]
    if not patches:
        detail = f": {skipped[0]}" if skipped else ", for it has no accepted patch"
        raise UsageError(f"the graft of `{graft.model.name}` has nothing to export{detail}")
    modules: dict[str, str] = {}
    functions: list[str] = []
    computes: list[Compute] = []
    for family in dict.fromkeys(p.family for p in patches):
        compute = Compute(family, [p for p in patches if p.family == family])
        build(compute, graft, modules, functions, skipped)
        if compute.targets:
            computes.append(compute)
    if not computes:
        raise UsageError(f"the graft of `{graft.model.name}` has nothing to export: {skipped[0]}")
    full = testing.configuration(graft, inventory, config)
    sites = [site for c in computes for t in c.targets.values() for site in t.sites]
    small = testing.small(full, sites)
    common = {
        "header": f"{HEADER} {VERSION}.",
        "package": package,
        "submodule": submodule,
        "model_type": graft.model.type,
        "transformers": graft.model.transformers,
        "dtype": graft.model.dtype,
    }
    files: dict[str, str | bytes] = {}
    home = f"{submodule}/"
    for compute in computes:
        captured = _captured(compute, inventory)
        if captured:
            files[f"{home}captured_{compute.family}.safetensors"] = captured
        files |= {
            f"{home}{name}": text for name, text in _compute_files(compute, graft, common, bool(captured)).items()
        }
    if functions:
        listed = {"modules": modules, "functions": functions}
        files[f"{home}modeling_{submodule}.py"] = render("modeling.py.j2", {**common, **listed})
    names = [c.family for c in computes]
    files[f"{home}__init__.py"] = render("submodule.py.j2", {**common, "computes": names, "skipped": skipped})
    files[f"{home}config.json"] = small.to_json_string(use_diff=False)
    files["patching.py"] = render("patching.py.j2", {**common, **embedded()})
    files["checking.py"] = render("checking.py.j2", common)
    files[f"bench_{submodule}.sh"] = render("bench.sh.j2", {**common, **_bench(graft, inventory)})
    files["__init__.py"] = f'"""Kernels for transformers models. {HEADER} {VERSION}."""\n'
    for name, text in files.items():
        put(stage / "transformers" / name, text)
    put(stage / "__init__.py", f'"""Kernels of `{package}`. {HEADER} {VERSION}."""\n')


def write_apply(folder: Path, package: str) -> None:
    """Write `monkey_patch.py` for all submodules that lie in a package's folder `transformers`."""
    submodules = []
    for init in sorted(folder.glob("*/__init__.py")):
        found = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(init.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        if {"MODEL_TYPE", "COMPUTES"} <= found.keys():
            submodules.append(
                {"name": init.parent.name, "model_type": found["MODEL_TYPE"], "computes": found["COMPUTES"]}
            )
    context = {"header": f"{HEADER} {VERSION}.", "package": package, "submodules": submodules}
    put(folder / "monkey_patch.py", render("apply.py.j2", context))


def embedded() -> dict[str, str]:
    """Code of ours that stands in emitted files as it is."""
    proxy = inspect.getsource(InterfaceProxy).replace("wrap: Wrap", "wrap: Callable[..., Any]")
    return {"proxy": proxy, "source_sha256": inspect.getsource(source_sha256)}


def _compute_files(compute: Compute, graft: Graft, common: dict[str, Any], captured: bool) -> dict[str, str]:
    imports = sorted({"import torch", *compute.merged.imports} - {*_STANDARD})
    standard = {i for i in compute.merged.imports if i in _STANDARD}
    gradient = any("needs_gradient(" in block for group in compute.groups for block in group["blocks"])
    local = [f"from ..patching import Handle, Seat, Target, {'needs_gradient, ' if gradient else ''}plain"]
    if compute.built:
        local.append(f"from .modeling_{common['submodule']} import {', '.join(compute.built)}")
    text = "\n".join(b for g in compute.groups for b in g["blocks"])
    standard |= {line for word, line in _USED if word in text}
    context = {
        **common,
        "family": compute.family,
        "compute": compute.family,
        "kernels": compute.kernels,
        "measured": measured_lines(compute, graft),
        "standard_imports": sorted(standard),
        "imports": imports,
        "local_imports": local,
        "groups": compute.groups,
        "targets": list(compute.targets.values()),
        "seed": 0,
        "length": _length(compute, graft),
        "implementation": _implementation(graft),
        "selects": compute.selects,
        "captured": captured,
    }
    files = {
        f"monkey_patch_{compute.family}.py": render("compute.py.j2", context),
        f"test_monkey_patch_{compute.family}.py": render("test.py.j2", context),
    }
    for name, solution in compute.packages.items():
        files[f"{name}/__init__.py"] = f'"""Sources of `{solution.name}`."""\n'
        files |= {f"{name}/{source.path}": source.content for source in solution.sources}
    return files


def measured_lines(compute: Compute, graft: Graft) -> list[str]:
    """What the graft's figures say, one line a seat."""
    device = graft.machine.gpu if graft.model.device.startswith("cuda") and graft.machine.gpu else graft.machine.cpu
    lines = [f"Measured on {device} with torch {graft.machine.versions.get('torch', 'unknown')}, µs a call:", ""]
    for patch in compute.patches:
        for seat in patch.seats:
            who = "kernel" if seat.seated else "original"
            times = [
                f"{label} {value:.1f}"
                for label, value in (("original", seat.original_us), ("kernel", seat.solution_us))
                if value is not None
            ]
            lines.append(f"- {seat.definition}, {seat.regime}, size {seat.work}: {', '.join(times)}; the {who} serves")
    return lines


def _length(compute: Compute, graft: Graft) -> int:
    """A prompt length that was measured, so that kernels which know only measured shapes are reached."""
    for patch in (*compute.patches, *graft.patches):
        for seat in patch.seats:
            axes = seat.axes or {}
            length = axes.get("seq_len", axes.get("q_len", 1))
            if seat.regime == "prefill" and length > 1 and axes.get("batch_size", 1) == 1:
                return length
    return DEFAULT_LENGTH


def _implementation(graft: Graft) -> str:
    """The attention implementation that the model had, as a Python literal."""
    found = [s.detail.get("implementation") for p in graft.patches for s in p.sites if s.kind == "attention"]
    return next((json.dumps(name) for name in found if isinstance(name, str)), "None")


def _captured(compute: Compute, inventory: Inventory | None) -> bytes | None:
    """Small stored calls of the compute's Definitions: `<definition>/<number>/input.<i>` and `output.<i>`."""
    tensors: dict[str, torch.Tensor] = {}
    for name in compute.selects if inventory is not None else ():
        assert inventory is not None
        kept = 0
        for workload, meta in inventory.workloads(name):
            values = {f"input.{i:02}": x for i, x in enumerate(inventory.load_inputs(workload, meta))} | {
                f"output.{i:02}": x for i, x in enumerate(inventory.load_outputs(workload, meta))
            }
            if not all(isinstance(x, torch.Tensor) for x in values.values()):
                continue
            if (
                sum(x.numel() * x.element_size() for x in values.values()) > MOST_CAPTURED_BYTES
                or kept == MOST_CAPTURED
            ):
                continue
            tensors |= {f"{name}/{kept}/{role}": x.contiguous() for role, x in values.items()}
            kept += 1
    return dump_tensors(tensors) if tensors else None


def _bench(graft: Graft, inventory: Inventory | None) -> dict[str, str]:
    folder = str(inventory.root) if inventory is not None else "graft"
    return {"model": graft.model.name, "graft": folder, "device": graft.model.device}


@cache
def environment() -> jinja2.Environment:
    """Where the templates of emitted files come from."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kernelgraft.emit"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = _literal
    return environment


def render(template: str, context: dict[str, Any]) -> str:
    """The text of an emitted file."""
    return environment().get_template(template).render(context)


def _literal(value: Any, depth: int = 0) -> str:
    """JSON values as Python, a dictionary with one entry a line if it is long."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_literal(v) for v in value)}]"
    if not isinstance(value, dict):
        return repr(value)
    short = "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if len(short) + depth <= 100:
        return short
    inner = " " * (depth + 4)
    lines = "".join(f"{inner}{_literal(k)}: {_literal(v, depth + 4)},\n" for k, v in value.items())
    return "{\n" + lines + " " * depth + "}"


def put(path: Path, content: str | bytes) -> None:
    """Write a file of the stage; Python that does not compile would be a fault of ours."""
    data = content.encode() if isinstance(content, str) else content
    if path.suffix == ".py":
        compile(data, str(path), "exec")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755 if path.suffix == ".sh" else 0o644)


def module_name(model_type: str) -> str:
    """A model type as the name of a Python module."""
    return "".join(c if c.isalnum() else "_" for c in model_type)
