"""Kernels and models as the command line names them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from kernelgraft.errors import UsageError
from kernelgraft.layouts.findings import in_one_line
from kernelgraft.layouts.kernel_set import KernelSet
from kernelgraft.layouts.trial import Maker
from kernelgraft.models import configuration, resolve
from kernelgraft.models.shrinking import quiet

FORMS = (
    "a .json file, a .py file that defines `kernels`, or pairs such as "
    "'RMSNorm=owner/repo:Class' or 'RMSNorm@model.layers.*.norm+MLP@model.layers.*.mlp=./folder:Class'"
)


def read_kernels(text: str) -> KernelSet:
    """The set that `text` names: a .json or .py file, or `key=value` pairs separated by `;`. Raises UsageError.

    A fusion's key is `Class@path+Class@path`; a value may end in `@v<int>` or `@<revision>`. To trust a repository's
    code, say it in a file, as `["owner/repo:Class", {"version": 1, "trust_remote_code": true}]`. JSON holds an object,
    or a list of [key, value] pairs where a key is a list of pairs.
    """
    path = Path(text).expanduser()
    if path.suffix in (".json", ".py"):
        if not path.is_file():
            raise UsageError(f"the kernels `{text}` do not exist: give {FORMS}")
        return KernelSet.of(_json(path) if path.suffix == ".json" else _python(path))
    return KernelSet.of([_pair(pair) for pair in text.split(";") if pair.strip()])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the kernels `{path}` cannot be read ({in_one_line(error)}): correct the JSON") from error


def _python(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("kernelgraft_given_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file raises
        what = f"{type(error).__name__}: {in_one_line(error)}"
        raise UsageError(f"the kernels `{path}` cannot be run ({what}): correct the file") from error
    if not hasattr(module, "kernels"):
        raise UsageError(f"the file `{path}` defines no `kernels`: assign the dict to that name")
    return module.kernels


def _pair(text: str) -> tuple[Any, Any]:
    key, separator, value = text.strip().partition("=")
    if not separator or not key.strip() or not value.strip():
        raise UsageError(f"`{text.strip()}` names no kernels: give {FORMS}")
    return _key(key.strip()), _value(value.strip())


def _key(text: str) -> Any:
    if "@" not in text:
        return text
    parts = [part.strip().partition("@") for part in text.split("+")]
    for name, _, path in parts:
        if not name or not path:
            raise UsageError(f"`{text}` is no key of a fusion: write each part as `Class@path`, joined by `+`")
    return tuple((name, path) for name, _, path in parts)


def _value(text: str) -> Any:
    place, _, last = text.rpartition(":")
    name, separator, pin = last.partition("@")
    if not separator:
        return text
    if pin.startswith("v") and pin[1:].isdigit():
        return (f"{place}:{name}", {"version": int(pin[1:])})
    return (f"{place}:{name}", {"revision": pin})


def read_model(spec: str, trust_remote_code: bool = False) -> tuple[Any, Maker]:
    """The configuration that a spec means, and what builds its model; no weight is read. Raises UsageError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ref = resolve(spec)
    if ref.kind in ("preset", "config"):
        config: Any = configuration(ref)
    else:
        source = str(ref.path or ref.name)
        try:
            with quiet(bars=False):
                config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers and the hub client raise OSError, ValueError, KeyError, …
            raise UsageError(f"the configuration of `{spec}` cannot be loaded: {in_one_line(error)}") from error
    owner: Any = _owner(config) or AutoModelForCausalLM

    def make(given: Any) -> nn.Module:
        build = getattr(owner, "_from_config", None) or owner.from_config
        options = {"trust_remote_code": True} if owner is AutoModelForCausalLM and trust_remote_code else {}
        return cast(nn.Module, build(given, **options))

    return config, make


def _owner(config: Any) -> Any:
    """transformers' own class that the configuration names first, if it is one."""
    import transformers

    names = getattr(config, "architectures", None) or [""]
    return getattr(transformers, str(names[0]), None)
