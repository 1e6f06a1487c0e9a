"""A graft's module patches as a package of two-class kernels: `build/<variant>/`, a README card, kernels.json.

A kernel class is made for each class of modules that the graft patched: its forward is the graft's dispatch (guards
included), its Layout the original class, where that is exact with linears merged that read the same input. A norm and
the gated product that it feeds become one kernel. What the package says of itself is tried before it is written: the
check of Layouts on the model's configuration, gradients and tracing on a small model.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelgraft.emit import computes as code
from kernelgraft.emit import hub_trial, monkey_patch, testing
from kernelgraft.emit.hub_classes import classes_of, plan_merges
from kernelgraft.emit.hub_fitting import Offer
from kernelgraft.emit.hub_fusions import plan_fusions
from kernelgraft.emit.hub_parallel import plan_parallels
from kernelgraft.emit.monkey_patch import HEADER, VERSION
from kernelgraft.errors import UsageError
from kernelgraft.records import Graft, Patch, Solution
from kernelgraft.store import Inventory

VARIANTS = {"torch-cuda": "cuda", "torch-universal": "cpu"}
"""Builds of plain Python, and what their metadata says of the device: the first is for kernels that only run on a GPU.
"""
PACKAGE_VERSION = 1
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z][\w.-]*[A-Za-z0-9]")


def check_repo(repo: str | None) -> str:
    """The name of a repository; raises UsageError if it is none."""
    if repo is None or not _REPO.fullmatch(repo):
        raise UsageError(f"`{repo}` is not `owner/name`: give the repository as --repo owner/name")
    return repo


def write(graft: Graft, stage: Path, *, repo: str, inventory: Inventory | None, config: Any = None) -> None:
    """Write the package into the folder `stage`. UsageError if nothing can be exported, or it does not fit the model.

    Where a fusion does not fit, its parts are kernels of their own; where merged linears do not, the Layouts keep the
    modules as they are; a class that does not fit is left out. The card says why.
    """
    skipped: list[str] = []
    modules, functions, inside = _parted(graft, skipped)
    if not modules and not functions:
        skipped += _others(graft, Offer([], [], []))
        detail = f": {skipped[0]}" if skipped else ", for it has no accepted patch"
        raise UsageError(f"the graft of `{graft.model.name}` has no module to export{detail}")
    chosen = [*modules, *functions]
    built = []
    for family in dict.fromkeys(p.family for p in chosen):
        compute = code.Compute(family, [p for p in chosen if p.family == family])
        code.build(compute, graft, {}, [], skipped)
        built.append(compute)
    full = testing.configuration(graft, inventory, config)
    sites = [site for patch in graft.accepted for site in patch.sites if site.class_name in inside]
    small = testing.small(full, [site for p in modules for site in p.sites] + sites)
    classes = [
        one
        for compute in built
        if compute.family not in {p.family for p in functions}
        for one in classes_of(compute, skipped)
    ]
    taken = [path for one in classes for path in one.paths]
    offer = Offer(classes, [], plan_parallels(built, inside, taken, full, skipped))
    if not offer.kernels:
        skipped += _others(graft, offer)
        raise UsageError(f"the graft of `{graft.model.name}` has no module to export: {skipped[0]}")
    plan_merges(classes, built, graft, full)
    offer.fusions = plan_fusions(classes, full)

    def draft() -> None:
        _put_all(stage, _files(graft, repo, built, offer, [], skipped))

    notes = offer.fit(stage, full, graft.model.device.partition(":")[0], draft, skipped)
    how = hub_trial.measure(stage, offer.kernels, small, graft.model)
    skipped += _others(graft, offer)
    _put_all(stage, _files(graft, repo, built, offer, notes, skipped, how))


def _parted(graft: Graft, skipped: list[str]) -> tuple[list[Patch], list[Patch], dict[str, list[str]]]:
    """Accepted patches with their modules only, with their functions only, and the classes in which functions are
    patched, each with the paths of its modules."""
    modules: list[Patch] = []
    functions: list[Patch] = []
    inside: dict[str, list[str]] = {}
    for patch in graft.accepted:
        skipped += code.unservable(patch)
        ours = [site for site in patch.sites if site.class_name.startswith("transformers.")]
        for kind, found in (("module", modules), ("function", functions), ("attention", functions)):
            if sites := tuple(site for site in ours if site.kind == kind):
                found.append(patch.model_copy(update={"sites": sites}))
        for site in ours:
            if site.kind in ("function", "attention") and site.method == "forward":
                paths = inside.setdefault(site.class_name, [])
                paths += [path for path in site.instances if path not in paths]
    return modules, functions, inside


def _others(graft: Graft, offer: Offer) -> list[str]:
    """A line for each place that the package leaves alone for its kind."""
    served = {(one.owner, name) for one in offer.parallels for name in one.functions}
    return [
        f"{patch.family} at `{site.key}`: a place of kind {site.kind}, which monkey-patch exports"
        for patch in graft.accepted
        for site in patch.sites
        if site.kind != "module" and (site.class_name.rpartition(".")[2], site.symbol) not in served
    ]


# --- files ---


def _files(
    graft: Graft,
    repo: str,
    built: Sequence[code.Compute],
    offer: Offer,
    notes: Sequence[str],
    skipped: Sequence[str],
    how: str = "not measured",
) -> dict[str, str]:
    render = monkey_patch.render
    kernels = offer.kernels
    used = [compute for compute in built if offer.uses(compute.family)]
    common = {
        "header": f"{HEADER} {VERSION}.",
        "repo": repo,
        "model": graft.model.name,
        "model_type": graft.model.type,
        "transformers": graft.model.transformers,
        "dtype": graft.model.dtype,
        "device": graft.machine.gpu if graft.model.device.startswith("cuda") else graft.machine.cpu,
        "classes": offer.classes,
        "fusions": offer.fusions,
        "parallels": offer.parallels,
        "kernels": [{"value": one, "key": _written(one.key)} for one in kernels],
        "version": PACKAGE_VERSION,
        "families": [compute.family for compute in used],
    }
    title = f'"""Kernels of `{repo}`. {HEADER} {VERSION}."""'
    build = {"__init__.py": f'{title}\n\nfrom . import layers\n\n__all__ = ["layers"]\n'}
    build["guards.py"] = render("hub_guards.py.j2", {**common, **_helpers()})
    build["layers.py"] = render("hub_layers.py.j2", {**common, "proxy": monkey_patch.embedded()["proxy"]})
    needs: set[str] = set()
    for compute in used:
        foreign = [line for line in compute.merged.imports if _root(line) not in ("torch", *sys.stdlib_module_names)]
        needs |= {root for line in foreign if (root := _root(line))}
        standard = {line for line in compute.merged.imports if _root(line) in sys.stdlib_module_names}
        standard |= {"from collections.abc import Callable", "from typing import Any"}
        names = {*re.findall(r"^import torch\..*|^from torch.*", "\n".join(compute.merged.imports), re.M)}
        seats = [seat for one in offer.classes if one.family == compute.family for seat in one.seats]
        seats += [seat for one in offer.parallels for group in one.functions.values() for seat in group]
        context = {
            **common,
            "family": compute.family,
            "groups": compute.groups,
            "measured": monkey_patch.measured_lines(compute, graft),
            "standard_imports": sorted(standard) + sorted(names),
            "foreign_imports": foreign,
            "choosers": sorted(
                {seat["select"] for seat in seats if seat.get("family", compute.family) == compute.family}
            ),
        }
        build[f"{compute.family}.py"] = render("hub_kernels.py.j2", context)
        for name, solution in compute.packages.items():
            build[f"{name}/__init__.py"] = f'"""Sources of `{solution.name}`."""\n'
            build |= {f"{name}/{source.path}": source.content for source in solution.sources}
    seated = [graft.solutions[s] for compute in used for p in compute.patches for s in p.solutions]
    licence = " and ".join(sorted({solution.meta.licence.lower() for solution in seated}))
    variant = _variant(seated)
    build["metadata.json"] = json.dumps(_metadata(repo, licence, build, variant), indent=2) + "\n"
    card = {
        **common,
        "licence": licence,
        "needs": sorted(needs - {"triton"}),
        "install": _install(needs, seated),
        "gpu_only": VARIANTS[variant] == "cuda",
        "measured_how": how,
        "measured": [monkey_patch.measured_lines(compute, graft) for compute in used],
        "evidence": _evidence(graft, seated, notes),
        "skipped": skipped,
    }
    pin = {"version": PACKAGE_VERSION, "trust_remote_code": True}
    entries = [[one.key, [f"{repo}:{one.name}", pin]] for one in kernels]
    files = {f"build/{variant}/{name}": text for name, text in build.items()}
    files["kernels.json"] = json.dumps(entries, indent=2) + "\n"
    return {**files, "README.md": render("hub_readme.md.j2", card)}


def _variant(seated: Sequence[Solution]) -> str:
    """The name of the build: kernels that all want a GPU make one for CUDA, others one for any device."""
    devices = {device for solution in seated for device in solution.meta.guard.devices}
    return "torch-cuda" if devices == {"cuda"} else "torch-universal"


def _written(key: Any) -> str:
    """A key of a set of kernels as Python."""
    if isinstance(key, str):
        return json.dumps(key)
    return f"({', '.join(f'({json.dumps(owner)}, {json.dumps(path)})' for owner, path in key)})"


def _install(needs: set[str], seated: Sequence[Solution]) -> str | None:
    """How what the kernels call is installed; None if that is nothing of ours."""
    if "kernelgraft" not in needs:
        return None
    extra = "[cutile]" if any(solution.spec.language == "cuda-tile" for solution in seated) else ""
    return f"pip install 'kernelgraft{extra}'"


def _metadata(repo: str, licence: str, build: dict[str, str], variant: str) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "-", repo.partition("/")[2].lower()).strip("-")
    digest = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in sorted(build.items())).encode()).hexdigest()
    return {
        "id": f"_{name.replace('-', '_')}_{digest[:12]}",
        "name": name,
        "version": PACKAGE_VERSION,
        "license": licence,
        "python-depends": [],
        "backend": {"type": VARIANTS[variant]},
    }


def _evidence(graft: Graft, seated: Sequence[Solution], notes: Sequence[str]) -> list[str]:
    lines = ["| Solution | supplier | licence | verdict | cases | error ratio |", "| --- " * 6 + "|"]
    for solution in {s.name: s for s in seated}.values():
        row = f"| `{solution.name}` | {solution.meta.supplier} | {solution.meta.licence}"
        verdicts = [e for e in graft.evaluations if e.solution == solution.name]
        for verdict in verdicts:
            ratio = "" if verdict.error_ratio is None else f"{verdict.error_ratio:.2f}"
            lines.append(f"{row} | {verdict.status} | {verdict.cases} | {ratio} |")
        if not verdicts:
            lines.append(f"{row} | not judged | | |")
    lines += ["", "The error ratio is the relRMSE against float64 over that of the original.", ""]
    lines.append("`kernelgraft check` finds nothing wrong with the package on the model's configuration.")
    return lines + [f"- {note}" for note in notes]


def _helpers() -> dict[str, str]:
    """The functions of an emitted `patching.py` that guards call."""
    loader = monkey_patch.environment().loader
    assert loader is not None
    text = loader.get_source(monkey_patch.environment(), "patching.py.j2")[0]
    found = {name: re.search(rf"^def {name}\(.*?(?=^\S|\Z)", text, re.M | re.S) for name in ("plain", "needs_gradient")}
    return {name: match.group().strip() + "\n" for name, match in found.items() if match}


def _root(line: str) -> str:
    """The top-level package that an import line names; empty for a relative one."""
    match = re.match(r"(?:from|import)\s+([\w.]+)", line)
    return match[1].partition(".")[0] if match else ""


def _put_all(stage: Path, files: dict[str, str]) -> None:
    for path in [p for p in stage.rglob("*") if p.is_file()]:
        path.unlink()
    for name, text in files.items():
        monkey_patch.put(stage / name, text)
