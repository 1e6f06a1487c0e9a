"""What a model can be called: the bundled model, presets, folders, hub ids and configurations by type."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernelgraft.errors import UsageError

PACKAGE = Path(__file__).resolve().parent.parent
TINY = PACKAGE / "assets" / "tiny"
PRESETS = PACKAGE / "presets"
ACCEPTED = "`tiny`, a preset, a local folder, a hub id `owner/name` or `config:<model_type>`"


@dataclass(frozen=True)
class ModelRef:
    """Which model a spec means; `path` is set for what lies on this disk (tiny, preset, folder).

    `live` is a model object that the caller made: no spec can load it again.
    """

    spec: str
    kind: Literal["tiny", "preset", "folder", "hub", "config", "live"]
    name: str
    path: Path | None = None


def causal_types() -> list[str]:
    """All model types that transformers can build a causal language model for, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def presets() -> list[str]:
    """Names of the shipped presets, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_preset(path: Path) -> dict[str, Any]:
    """The fields of a preset file: model_type, config, note."""
    preset = json.loads(path.read_text(encoding="utf-8"))
    missing = {"model_type", "config", "note"} - preset.keys()
    if missing:
        raise UsageError(f"preset `{path}` lacks {sorted(missing)}; compare it with another file of that folder")
    return preset


def resolve(spec: str) -> ModelRef:
    """Say what `spec` means without loading anything; raises UsageError for a name that cannot mean a model."""
    spec = spec.strip()
    if spec == "tiny":
        return ModelRef(spec, "tiny", "tiny", TINY)
    if spec in presets():
        return ModelRef(spec, "preset", spec, PRESETS / f"{spec}.json")
    if spec.startswith("config:"):
        return _config(spec)
    if spec and (_looks_like_path(spec) or Path(spec).is_dir()):
        return _folder(spec)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        return ModelRef(spec, "hub", spec)
    raise UsageError(f"`{spec}` is not a model: give {ACCEPTED}{_hint(spec)}")


def _config(spec: str) -> ModelRef:
    name, types = spec.removeprefix("config:"), causal_types()
    if name not in types:
        close = difflib.get_close_matches(name, types, n=3)
        hint = f"did you mean {_listed(close, 'config:')}?" if close else f"there are {len(types)} types"
        raise UsageError(f"`{spec}` names no causal model type of transformers: {hint} (see `causal_types()`)")
    return ModelRef(spec, "config", name)


def _looks_like_path(spec: str) -> bool:
    return spec.startswith((".", "/", "~", "\\")) or "\\" in spec or spec.endswith("/") or spec.count("/") > 1


def _folder(spec: str) -> ModelRef:
    path = Path(spec).expanduser()
    if not path.is_dir():
        raise UsageError(f"folder `{spec}` does not exist; check the path, or give {ACCEPTED}")
    if not (path / "config.json").is_file():
        raise UsageError(f"folder `{spec}` has no config.json; save the model there with `save_pretrained`")
    path = path.resolve()
    return ModelRef(spec, "folder", path.name, path)


def _hint(spec: str) -> str:
    if spec in causal_types():
        return f"; did you mean `config:{spec}`?"
    names = ["tiny", *presets()]
    if close := difflib.get_close_matches(spec, names, n=3):
        return f"; did you mean {_listed(close)}?"
    return f"; presets are {_listed(presets())}"


def _listed(names: list[str], prefix: str = "") -> str:
    return ", ".join(f"`{prefix}{name}`" for name in names)
