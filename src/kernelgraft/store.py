"""The inventory: Definitions, Workloads, Solutions and Evaluations on disk, laid out as a FlashInfer-Bench trace set.

```
<root>/
├── inventory.json                                     marks the folder as ours, with the schema version
├── definitions/<op_type>/<definition>.json
├── solutions/<author>/<op_type>/<definition>/<solution>.json
├── workloads/<op_type>/<definition>.jsonl             captured calls
├── blob/workloads/<op_type>/<definition>/<uuid>.safetensors
├── traces/<author>/<op_type>/<definition>.jsonl       the evaluations that the schema can hold
├── meta/<any of the paths above>                      what the schema has no field for
├── evaluations.jsonl                                  all evaluations, complete
└── config.json, research.json, plan.json, graft.json, bench.json, compile.json   records of the stages
```

`meta/` is a tree of its own, because a trace-set loader reads every `*.json` below `definitions/` and `solutions/`.
Every file is written to a temporary name and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from pydantic import ValidationError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors

from kernelgraft import machine as machine_module
from kernelgraft.errors import RecordError, UsageError
from kernelgraft.records import (
    SCHEMA_VERSION,
    Definition,
    Evaluation,
    MachineCard,
    Record,
    Solution,
    Status,
    Workload,
    WorkloadInput,
    WorkloadMeta,
)

RECORDS = ("config", "research", "plan", "graft", "bench", "compile")
FOLDERS = ("definitions", "solutions", "workloads", "blob", "traces", "meta")
DSL_TAG = "dsl:cuda-tile"
"""Ends the description of a Solution whose language the schema does not know and that is stored as `python`."""

_MARKER = "inventory.json"
_EVALUATIONS = "evaluations.jsonl"
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")

R = TypeVar("R")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file under a temporary name and rename it; makes folders. UsageError if the place cannot be written."""
    content = data.encode() if isinstance(data, str) else data
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise UsageError(f"cannot write `{path}`: {error.strerror or error}; choose another folder") from error


class Inventory:
    """Records of one model on disk; nothing is created until the first write."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    # --- definitions ---------------------------------------------------------------------------------------------

    def save_definition(self, definition: Definition) -> Path:
        """Store a Definition; an earlier one of that name is replaced. Returns its path."""
        path = Path("definitions", _part(definition.op_type), f"{definition.name}.json")
        body = definition.model_dump(mode="json", exclude={"meta"})
        body["axes"] = {name: axis.model_dump(exclude_none=True) for name, axis in definition.axes.items()}
        self._write_json(Path("meta") / path, {"schema_version": SCHEMA_VERSION, "meta": definition.meta})
        return self._write_json(path, body)

    def definitions(self) -> dict[str, Definition]:
        """All Definitions by name."""
        found: dict[str, Definition] = {}
        for path in self._files("definitions", "*.json"):
            body = _object(self._read_json(path), path)
            definition = self._validate(Definition, {**body, "meta": self._meta(path)["meta"]}, path)
            if definition.name in found:
                raise RecordError(f"`{path}` holds a second definition `{definition.name}`; remove one of the two")
            found[definition.name] = definition
        return found

    # --- workloads -----------------------------------------------------------------------------------------------

    def save_workload(
        self, definition: Definition, meta: WorkloadMeta, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> Workload:
        """Store one captured call: inputs (tensors or Python scalars) and outputs, in the Definition's order.

        `meta.strides` and `meta.outputs` are filled in here. The uuid is derived from the content, so that the same
        call stored twice is one workload. UsageError if the inputs do not fit the Definition.
        """
        named_inputs = dict(zip(definition.inputs, inputs, strict=True))
        named_outputs = dict(zip(definition.outputs, outputs, strict=True))
        axes = _bind_axes(definition, named_inputs)
        values = named_inputs | named_outputs
        tensors = {n: x.detach().cpu() for n, x in values.items() if isinstance(x, torch.Tensor)}
        strides = {n: tuple(tensors[n].stride()) for n in named_inputs if n in tensors}
        data = dump_tensors({n: t.contiguous().clone() for n, t in tensors.items()})
        scalars = {n: repr(x) for n, x in values.items() if n not in tensors}
        identity = json.dumps([definition.name, meta.model_dump(mode="json"), strides, scalars])
        digest = hashlib.sha256(identity.encode() + data).digest()
        name = str(uuid.UUID(bytes=digest[:16]))
        place = Path(_part(definition.op_type), definition.name)
        blob = Path("blob", "workloads", place, f"{name}.safetensors")

        def stored(values: dict[str, Any]) -> dict[str, WorkloadInput]:
            return {
                n: WorkloadInput(type="safetensors", path=blob.as_posix(), tensor_key=n)
                if n in tensors
                else WorkloadInput(type="scalar", value=x)
                for n, x in values.items()
            }

        workload = Workload(axes=axes, inputs=stored(named_inputs), uuid=name)
        full = meta.model_copy(update={"strides": strides, "outputs": stored(named_outputs)})
        self._write(blob, data)
        lines = Path("workloads", _part(definition.op_type), f"{definition.name}.jsonl")
        self._put_line(Path("meta") / lines, name, {"uuid": name, **full.model_dump(mode="json", exclude_none=True)})
        self._put_line(lines, name, _workload_trace(definition.name, workload))
        return workload

    def workloads(self, definition_name: str) -> list[tuple[Workload, WorkloadMeta]]:
        """The captured calls of a Definition, in the order in which they were stored."""
        found: list[tuple[Workload, WorkloadMeta]] = []
        for path in self._files("workloads", f"{definition_name}.jsonl"):
            beside = self.root / "meta" / path.relative_to(self.root)
            metas = {row.pop("uuid", None): row for row in self._read_lines(beside)}
            for row in self._read_lines(path):
                workload = self._validate(Workload, row.get("workload"), path)
                if workload.uuid not in metas:
                    raise RecordError(f"`{beside}` has no line for workload `{workload.uuid}`; run research again")
                found.append((workload, self._validate(WorkloadMeta, metas[workload.uuid], path)))
        return found

    def load_inputs(self, workload: Workload, meta: WorkloadMeta) -> list[Any]:
        """The inputs of a workload on the CPU, in the Definition's order, with the strides that were captured."""
        return [_strided(x, meta.strides.get(n)) for n, x in self._load(workload.inputs).items()]

    def load_outputs(self, workload: Workload, meta: WorkloadMeta) -> list[Any]:
        """What the original returned for a workload, in the Definition's order, contiguous, on the CPU."""
        return list(self._load(meta.outputs).values())

    def _load(self, specs: dict[str, WorkloadInput]) -> dict[str, Any]:
        files: dict[str, dict[str, torch.Tensor]] = {}
        values: dict[str, Any] = {}
        for name, spec in specs.items():
            if spec.type == "scalar":
                values[name] = spec.value
                continue
            if spec.type != "safetensors" or spec.path is None or spec.tensor_key is None:
                raise RecordError(f"input `{name}` has no stored tensor; run research again")
            path = self.root / spec.path
            try:
                tensors = files.get(spec.path) or load_tensors(path.read_bytes())
                values[name] = tensors[spec.tensor_key]
            except Exception as error:  # safetensors has its own error class, and a missing key or file is as bad
                raise RecordError(f"cannot read tensor `{name}` from `{path}`: {error}; run research again") from error
            files[spec.path] = tensors
        return values

    # --- solutions -----------------------------------------------------------------------------------------------

    def save_solution(self, solution: Solution) -> Path:
        """Store a Solution; its Definition must be stored before. An earlier one of that name is replaced."""
        definition = self.definitions().get(solution.definition)
        if definition is None:
            raise UsageError(f"solution `{solution.name}`: definition `{solution.definition}` is not in `{self.root}`")
        place = Path("solutions", _part(solution.author), _part(definition.op_type), definition.name)
        path = place / f"{_part(solution.name)}.json"
        body = solution.model_dump(mode="json", exclude={"meta"})
        extra: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "meta": solution.meta}
        if solution.spec.language == "cuda-tile":
            extra |= {"language": "cuda-tile", "description": solution.description}
            body["spec"]["language"] = "python"
            body["description"] = f"{solution.description or solution.name} [{DSL_TAG}]"
        self._write_json(Path("meta") / path, extra)
        return self._write_json(path, body)

    def solutions(self) -> dict[str, Solution]:
        """All Solutions by name."""
        found: dict[str, Solution] = {}
        for path in self._files("solutions", "*.json"):
            body, extra = _object(self._read_json(path), path), self._meta(path)
            if "language" in extra:
                body["spec"] = {**body.get("spec", {}), "language": extra["language"]}
                body["description"] = extra.get("description")
            solution = self._validate(Solution, {**body, "meta": extra["meta"]}, path)
            if solution.name in found:
                raise RecordError(f"`{path}` holds a second solution `{solution.name}`; remove one of the two")
            found[solution.name] = solution
        return found

    # --- evaluations ---------------------------------------------------------------------------------------------

    def append_evaluations(self, evaluations: Iterable[Evaluation], machine: MachineCard) -> None:
        """Add verdicts of this machine: all to `evaluations.jsonl`, and to `traces/` those that the schema can hold.

        A trace ties an evaluation to one workload: per measured regime the first stored workload of that regime
        (unpadded ones first), for a failure the first one. A passed Solution that was not measured has no trace.
        """
        rows = list(evaluations)
        stamp = machine_module.timestamp()
        head = {"schema_version": SCHEMA_VERSION, "timestamp": stamp, "machine": machine}
        self._append(Path(_EVALUATIONS), [{**head, "evaluation": row} for row in rows])
        definitions, solutions = self.definitions(), self.solutions()
        traces: dict[Path, list[dict[str, Any]]] = {}
        for row in rows:
            definition, solution = definitions.get(row.definition), solutions.get(row.solution)
            if definition is None or solution is None:
                continue
            path = Path("traces", _part(solution.author), _part(definition.op_type), f"{definition.name}.jsonl")
            traces.setdefault(path, []).extend(_traces(row, self.workloads(definition.name), machine, stamp))
        for path, new in traces.items():
            if new:
                self._append(path, new)

    def evaluations(self) -> list[Evaluation]:
        """All verdicts, oldest first."""
        path = self.root / _EVALUATIONS
        rows = self._read_lines(path) if path.exists() else []
        return [self._validate(Evaluation, row.get("evaluation"), path) for row in rows]

    # --- records of the stages -----------------------------------------------------------------------------------

    def save_record(self, name: str, record: Record | dict[str, Any]) -> Path:
        """Store the record of a stage as `<name>.json` (`research`, `plan`, `graft`, `bench`)."""
        return self._write_json(Path(_record_file(name)), record)

    def load_record(self, name: str, cls: type[R]) -> R:
        """The record of a stage; `cls`: a Record class or `dict`. RecordError: missing, corrupt, another schema."""
        path = self.root / _record_file(name)
        if not path.exists():
            raise RecordError(f"`{path}` does not exist; run the stage that writes it first")
        body = _object(self._read_json(path), path)
        return self._validate(cls, body, path)

    def has_record(self, name: str) -> bool:
        """True if the record of that stage is there."""
        return (self.root / _record_file(name)).exists()

    # --- the folder ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the folder and mark it as an inventory; UsageError if it cannot be written."""
        marker = self.root / _MARKER
        if marker.exists():
            _object(self._read_json(marker), marker)
        else:
            write_atomic(marker, json.dumps({"schema_version": SCHEMA_VERSION, "kind": "kernelgraft inventory"}) + "\n")

    def clear(self) -> None:
        """Remove everything that an Inventory writes; other files of the folder stay. Without the marker: nothing."""
        if not (self.root / _MARKER).exists():
            return
        try:
            for folder in FOLDERS:
                if (self.root / folder).exists():
                    shutil.rmtree(self.root / folder)
            for name in (*map(_record_file, RECORDS), _EVALUATIONS, _MARKER):
                (self.root / name).unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot clear `{self.root}`: {error.strerror or error}; remove it by hand") from error

    def _files(self, folder: str, pattern: str) -> Iterator[Path]:
        return iter(sorted(p for p in (self.root / folder).rglob(pattern) if not p.name.startswith(".")))

    def _meta(self, path: Path) -> dict[str, Any]:
        beside = self.root / "meta" / path.relative_to(self.root)
        if not beside.exists():
            raise RecordError(f"`{path}` has no `{beside}`: it was not written by kernelgraft; run research again")
        body = _object(self._read_json(beside), beside)
        if "meta" not in body:
            raise RecordError(f"`{beside}` has no field `meta`; run research again")
        return body

    def _read_json(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RecordError(f"cannot read `{path}`: {error}; run the stage that writes it again") from error

    def _read_lines(self, path: Path) -> list[dict[str, Any]]:
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RecordError(f"cannot read `{path}`: {error}; run the stage that writes it again") from error
        return [_object(line, path) for line in lines]

    def _validate(self, cls: type[R], body: Any, path: Path) -> R:
        if cls is dict:
            return cast(R, body)
        try:
            return cast(R, cast(type[Record], cls).model_validate_json(json.dumps(body)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the record"
            what = f"`{path}` is not a valid {cls.__name__}: {where}: {first['msg']}"
            raise RecordError(f"{what}; write it again") from error

    def _write(self, path: Path, data: bytes | str) -> Path:
        self.prepare()
        write_atomic(self.root / path, data)
        return self.root / path

    def _write_json(self, path: Path, body: Any) -> Path:
        return self._write(path, json.dumps(_plain(body), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def _append(self, path: Path, rows: Sequence[Any]) -> None:
        old = self._read_lines(self.root / path) if (self.root / path).exists() else []
        self._write_lines(path, [*old, *rows])

    def _put_line(self, path: Path, name: str, row: dict[str, Any]) -> None:
        """Add a line, or replace the one of the same workload."""
        old = self._read_lines(self.root / path) if (self.root / path).exists() else []
        self._write_lines(path, [*(r for r in old if r.get("uuid", r.get("workload", {}).get("uuid")) != name), row])

    def _write_lines(self, path: Path, rows: Sequence[Any]) -> None:
        text = "".join(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        self._write(path, text)


def _record_file(name: str) -> str:
    if name not in RECORDS:
        raise UsageError(f"unknown record `{name}`; known: {', '.join(RECORDS)}")
    return f"{name}.json"


def _part(name: str) -> str:
    """A name that is safe as one part of a path."""
    if not _SAFE.fullmatch(name):
        raise UsageError(f"`{name}` cannot be a file name; use letters, digits and `_.+-`")
    return name


def _plain(body: Any) -> Any:
    """Records inside dictionaries as JSON values; infinities and NaN as the strings that pydantic reads back."""
    if isinstance(body, Record):
        return json.loads(body.model_dump_json())
    if isinstance(body, dict):
        return {str(k): _plain(v) for k, v in body.items()}
    if isinstance(body, (list, tuple)):
        return [_plain(v) for v in body]
    if isinstance(body, float) and (body != body or body in (float("inf"), float("-inf"))):
        return "NaN" if body != body else ("Infinity" if body > 0 else "-Infinity")
    return body


def _object(body: Any, path: Path) -> dict[str, Any]:
    """A JSON object whose schema version, if it has one, is ours."""
    if not isinstance(body, dict):
        raise RecordError(f"`{path}` does not hold a JSON object; run the stage that writes it again")
    found = body.get("schema_version", SCHEMA_VERSION)
    if found != SCHEMA_VERSION:
        raise RecordError(f"`{path}` has schema version {found}, this version reads {SCHEMA_VERSION}; write it again")
    return body


def _bind_axes(definition: Definition, inputs: dict[str, Any]) -> dict[str, int]:
    """Sizes of the var axes; UsageError where an input does not fit."""
    sizes = {n: axis.value for n, axis in definition.axes.items() if axis.value is not None}
    for name, spec in definition.inputs.items():
        value = inputs[name]
        if spec.shape is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() != len(spec.shape):
            raise UsageError(f"input `{name}` of `{definition.name}` is not a tensor of {len(spec.shape)} dimensions")
        for axis, size in zip(spec.shape, value.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise UsageError(f"input `{name}` of `{definition.name}`: axis `{axis}` is {size}, not {sizes[axis]}")
    return {n: sizes[n] for n, axis in definition.axes.items() if axis.value is None}


def _strided(value: Any, strides: tuple[int, ...] | None) -> Any:
    """The same values with the given strides, expanded or overlapping ones too (equal values share their place)."""
    if not isinstance(value, torch.Tensor) or strides is None or value.stride() == strides:
        return value
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(value.shape, strides, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    length = int(offsets.max()) + 1 if value.numel() else 0
    storage = torch.zeros(length, dtype=value.dtype)
    storage[offsets.flatten()] = value.flatten()
    return storage.as_strided(value.shape, strides)


def _workload_trace(definition: str, workload: Workload) -> dict[str, Any]:
    body = workload.model_dump(mode="json", exclude_none=True)
    return {"definition": definition, "workload": body, "solution": None, "evaluation": None}


def _traces(
    row: Evaluation, workloads: Sequence[tuple[Workload, WorkloadMeta]], machine: MachineCard, stamp: str
) -> list[dict[str, Any]]:
    """The trace lines of one evaluation; none if the schema cannot hold it."""
    if not workloads:
        return []
    evaluation: dict[str, Any] = {
        "status": row.status.value,
        "environment": {"hardware": machine.gpu or machine.cpu, "libs": dict(machine.versions)},
        "timestamp": stamp,
        "log": row.reason or "",
    }
    if row.status in (Status.PASSED, Status.INCORRECT_NUMERICAL):
        if row.max_absolute_error is None or row.max_relative_error is None:
            return []
        evaluation["correctness"] = {
            "max_relative_error": row.max_relative_error,
            "max_absolute_error": row.max_absolute_error,
            "extra": {"error_ratio": row.error_ratio, "cases": row.cases, "refused": row.refused, "check": row.check},
        }
    if row.status is not Status.PASSED:
        trace = _workload_trace(row.definition, workloads[0][0])
        return [{**trace, "solution": row.solution, "evaluation": evaluation}]
    lines = []
    for regime, times in row.performance.items():
        of_regime = sorted((m.padded, n) for n, (_, m) in enumerate(workloads) if m.regime == regime)
        if of_regime:
            performance = {
                "latency_ms": times.solution_us / 1000,
                "reference_latency_ms": times.original_us / 1000,
                "speedup_factor": times.original_us / times.solution_us,
            }
            trace = _workload_trace(row.definition, workloads[of_regime[0][1]][0])
            measured = {**evaluation, "performance": performance}
            lines.append({**trace, "solution": row.solution, "evaluation": measured})
    return lines
