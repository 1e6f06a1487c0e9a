"""KernelSet: what transformers' KernelConfig takes, read once into entries; one line for each thing that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelgraft.errors import UsageError
from kernelgraft.layouts.records import Entry, Part, Source

FORMS = '"owner/repo:Class", ("owner/repo:Class", {"version": 1, "trust_remote_code": True}) or "/folder:Class"'
DEVICES = ("cpu", "cuda", "rocm", "xpu", "npu", "neuron", "tpu", "mps")
"""The types of device that a value can be given for."""
_METADATA = ("version", "revision", "trust_remote_code")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class KernelSet:
    """Which modules take which kernels: an immutable set that any number of models can be loaded with.

    Takes the arguments of transformers' KernelConfig: a dict of a class name, the name of a function, or a tuple of
    (class name, path pattern) pairs for a fusion, to `"owner/repo:Class"` (version 1), `("owner/repo:Class", {"version"
    | "revision": …, "trust_remote_code": bool | list of repositories})`, `"folder:Class"`, a repository object of
    `kernels`, or a dict {device type: one of these}. Unlike a KernelConfig it is not changed by a load. With
    `use_local_kernel` every place is a folder. transformers' own default mapping is never added (`inherit_mapping` has
    no effect).
    Raises UsageError, one line, for what cannot be read.
    """

    def __init__(
        self,
        kernel_mapping: Mapping[Any, Any] | Iterable[Any] | None = None,
        use_local_kernel: bool = False,
        inherit_mapping: bool = True,
    ) -> None:
        entries = [
            entry
            for key, value in _pairs(kernel_mapping if kernel_mapping is not None else {})
            for entry in _entries(read_key(key), value, use_local_kernel)
        ]
        seen: set[tuple[Any, str | None]] = set()
        for entry in entries:
            if (entry.key, entry.device) in seen:
                raise UsageError(f"the key {_show(entry.key)} stands twice in the kernels: leave one of them out")
            seen.add((entry.key, entry.device))
        self._entries = tuple(entries)

    @classmethod
    def of(cls, kernels: Any) -> KernelSet:
        """The set that `kernels` describes: a KernelSet (as it is), a KernelConfig, a dict, or a list of (key, value).

        A KernelConfig that a load of transformers already rewrote has lost its keys, and what is left is read.
        """
        if isinstance(kernels, cls):
            return kernels
        mapping = getattr(kernels, "kernel_mapping", kernels)
        if isinstance(mapping, str) or not isinstance(mapping, Mapping | list | tuple):
            raise UsageError(f"{_show(kernels)} is no set of kernels: give a dict such as {{'RMSNorm': {FORMS}}}")
        return cls(mapping, use_local_kernel=bool(getattr(kernels, "use_local_kernel", False)))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every pair, in the order given; a value for several devices is several entries."""
        return self._entries

    def for_device(self, device: str) -> tuple[Entry, ...]:
        """The entries for a type of device: those that name it ("cuda" of torch for ROCm is "rocm"), or name none."""
        if device == "cuda":
            import torch

            device = "cuda" if torch.version.hip is None else "rocm"
        return tuple(entry for entry in self.entries if entry.device in (None, device))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSet) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(tuple(str(entry) for entry in self.entries))

    def __repr__(self) -> str:
        return f"KernelSet({'; '.join(str(entry) for entry in self.entries)})"


def _pairs(mapping: Mapping[Any, Any] | Iterable[Any]) -> list[tuple[Any, Any]]:
    """The (key, value) pairs; a list of pairs is how JSON says them, since its keys are only strings."""
    if isinstance(mapping, Mapping):
        return list(mapping.items())
    pairs = list(mapping)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UsageError(f"{_show(pair)} is no pair of a key and a kernel: write [key, value]")
    return [(pair[0], pair[1]) for pair in pairs]


# --- keys ---


def read_key(key: Any) -> str | tuple[Part, ...]:
    """A key of a mapping as a class name or the parts of a fusion. Raises UsageError."""
    if isinstance(key, str):
        _check_class_name(key, key)
        return key
    if not isinstance(key, tuple | list) or not key:
        raise UsageError(
            f"the key {_show(key)} is neither a class name nor a tuple of (class name, path pattern) pairs: write "
            f'"RMSNorm" or (("RMSNorm", "model.layers.*.norm"), ("MLP", "model.layers.*.mlp"))'
        )
    if len(key) == 2 and all(isinstance(item, str) for item in key):
        raise UsageError(f"the key {_show(key)} is a bare pair: write ({_show(tuple(key))},), a tuple of pairs")
    parts = tuple(_read_part(pair, key) for pair in key)
    if len(set(parts)) < len(parts):
        raise UsageError(f"the key {_show(key)} names one module twice: a fusion is of different modules")
    parents = {(part.path or "").rpartition(".")[0] for part in parts}
    if len(parents) > 1:
        raise UsageError(
            f"the key {_show(key)} names modules of different parents "
            f"({', '.join(f'`{p}`' for p in sorted(parents))}): all that is fused must be children of one module"
        )
    return parts


def _read_part(pair: Any, key: Any) -> Part:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(item, str) for item in pair):
        raise UsageError(f"{_show(pair)} in the key {_show(key)} is no pair: write (class name, path pattern)")
    name, path = pair
    _check_class_name(name, key)
    segments = path.split(".")
    if not all(segments):
        raise UsageError(
            f"the path `{path}` in the key {_show(key)} has an empty segment: write it as `model.layers.*.mlp`"
        )
    if "**" in path:
        raise UsageError(f"the path `{path}` has `**`: `*` stands for exactly one segment, so write one for each")
    return Part(name, path)


def _check_class_name(name: str, key: Any) -> None:
    if not name.strip():
        raise UsageError(f"the key {_show(key)} has an empty class name: it would match every module")
    try:
        re.compile(name)
    except re.error as error:
        raise UsageError(
            f"the class name `{name}` is no regular expression ({error}): write the name of the class as it is"
        ) from error


# --- values ---


def _entries(key: str | tuple[Part, ...], value: Any, local: bool) -> list[Entry]:
    """One entry for a plain value, one for each device of a dict of devices."""
    if not isinstance(value, Mapping):
        source, kernel_name = read_value(value, key, local)
        return [Entry(key, source, kernel_name)]
    if not value:
        raise UsageError(f"the kernel for {_show(key)} is an empty dict: give {FORMS}, or one for each type of device")
    entries = []
    for device, given in value.items():
        if str(device) not in DEVICES:
            raise UsageError(
                f"the kernel for {_show(key)} is given for the device {_show(device)}: give one of {', '.join(DEVICES)}"
            )
        source, kernel_name = read_value(_of_mode(given, key), key, local)
        entries.append(Entry(key, source, kernel_name, device=str(device)))
    return entries


def _of_mode(value: Any, key: Any) -> Any:
    """What KernelConfig.update_kernel writes is {device: {mode: repository}}: one repository whatever the mode."""
    if not isinstance(value, Mapping):
        return value
    given = list(value.values())
    if not given or any(one != given[0] for one in given[1:]):
        raise UsageError(
            f"the kernel for {_show(key)} differs by mode ({', '.join(map(str, value)) or 'none given'}): "
            "give one for a device; its has_backward and can_torch_compile say when the original runs"
        )
    return given[0]


def read_value(value: Any, key: Any, local: bool = False) -> tuple[Source, str]:
    """Where the package is, and the kernel's class name in it. Raises UsageError."""
    if isinstance(value, str):
        return _read_place(value, {}, key, local)
    if isinstance(value, tuple | list):
        if len(value) != 2 or not isinstance(value[0], str) or not isinstance(value[1], Mapping):
            raise UsageError(f"{_show(value)} for {_show(key)} is no kernel: write {FORMS}")
        return _read_place(value[0], _read_metadata(value[1], value[0], key), key, local)
    name = getattr(value, "layer_name", getattr(value, "func_name", None))
    if isinstance(name, str) and callable(getattr(value, "load", None)):
        return _read_repository(value, key), name
    raise UsageError(
        f"{_show(value)} for {_show(key)} is no kernel: write {FORMS}, or a repository object of `kernels`"
    )


def _read_metadata(metadata: Mapping[Any, Any], place: str, key: Any) -> dict[str, Any]:
    unknown = [name for name in metadata if name not in _METADATA]
    if unknown:
        raise UsageError(f"`{unknown[0]}` of the kernel `{place}` is unknown: give {', '.join(_METADATA)}")
    given = {name: value for name, value in metadata.items() if value is not None}
    version, revision, trust = given.get("version"), given.get("revision"), given.get("trust_remote_code", False)
    if version is not None and revision is not None:
        raise UsageError(f"the kernel `{place}` for {_show(key)} has a version and a revision: leave one of them out")
    if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
        raise UsageError(
            f"the version {_show(version)} of the kernel `{place}` is no whole number: write 1, or a revision"
        )
    if revision is not None and (not isinstance(revision, str) or not revision.strip()):
        raise UsageError(
            f"the revision {_show(revision)} of the kernel `{place}` is no name: write a tag, branch or commit"
        )
    listed = isinstance(trust, list | tuple) and all(isinstance(one, str) for one in trust)
    if not isinstance(trust, bool) and not listed:
        raise UsageError(
            f"trust_remote_code of the kernel `{place}` is {_show(trust)}: write True, False or a list of repositories"
        )
    return {"version": version, "revision": revision, "trust": trust, "explicit": True}


def _read_place(text: str, metadata: Mapping[str, Any], key: Any, local: bool) -> tuple[Source, str]:
    # "(folder:Class)" and "(folder):Class" say that it is a folder whatever it looks like.
    bare = text.strip()
    bracketed = bare.startswith("(")
    if bracketed:
        bare = bare[1:-1] if bare.endswith(")") else bare[1:].replace("):", ":", 1)
    place, _, kernel_name = bare.rpartition(":")
    if not place or not kernel_name.isidentifier():
        raise UsageError(f"{_show(text)} for {_show(key)} names no class: write {FORMS}")
    version, revision = metadata.get("version"), metadata.get("revision")
    if local or bracketed or _is_folder(place):
        if revision is not None:
            raise UsageError(
                f"the folder `{place}` for {_show(key)} has a revision: only a repository of the Hub has one"
            )
        return Source(folder=Path(place).expanduser(), version=version), kernel_name
    if not _REPO.fullmatch(place):
        raise UsageError(f"`{place}` for {_show(key)} is neither owner/repo nor a folder: write {FORMS}")
    if metadata.get("explicit") and version is None and revision is None:
        raise UsageError(f"the kernel `{text}` for {_show(key)} has neither version nor revision: give one of them")
    if version is None and revision is None:
        version = 1
    return Source(place, None, version, revision, trusts(metadata.get("trust", False), place)), kernel_name


def _is_folder(place: str) -> bool:
    return place.startswith(("/", ".", "~")) or place.count("/") != 1 or "\\" in place


def trusts(given: bool | Iterable[str], repo: str) -> bool:
    """What `trust_remote_code` says about a repository: True, or a list that names it."""
    return given if isinstance(given, bool) else repo in given


def _read_repository(value: Any, key: Any) -> Source:
    """The place that a repository object of `kernels` holds; the object itself where it does not say."""
    repo, folder = getattr(value, "_repo_id", None), getattr(value, "_repo_path", None)
    if folder is not None:
        return Source(folder=Path(folder))
    if not isinstance(repo, str):
        return Source(repository=value)
    trust = trusts(getattr(value, "_trust_remote_code", False), repo)
    locks, dependency = getattr(value, "kernel_locks", None), getattr(value, "kernel_dep", None)
    if locks is not None and dependency is not None:
        return Source(repo, None, None, str(locks[dependency].commit), trust)
    lockfile = getattr(value, "_lockfile", None)
    if lockfile is not None:
        return Source(repo, None, None, _locked_commit(repo, Path(lockfile)), trust)
    version, revision = getattr(value, "_version", None), getattr(value, "_revision", None)
    if version is None and revision is None:
        return Source(repository=value)
    return Source(repo, None, version if revision is None else None, revision, trust)


def _locked_commit(repo: str, lockfile: Path) -> str:
    """The commit of a repository in a kernels.lock."""
    try:
        for lock in json.loads(lockfile.read_text(encoding="utf-8")):
            if lock["dependency"]["repo-id"] == repo:
                return str(lock["lock"]["commit"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the lock file `{lockfile}` cannot be read ({error}): write it with `kernels lock`"
        ) from error
    raise UsageError(f"the kernel `{repo}` is not in `{lockfile}`: lock it with `kernels lock`")


def _show(thing: Any) -> str:
    """A key or value for a message: one line, not too long."""
    if isinstance(thing, tuple) and thing and all(isinstance(part, Part) for part in thing):
        return f"`{' + '.join(f'{part.class_name} at {part.path}' for part in thing)}`"
    text = thing if isinstance(thing, str) else repr(thing)
    text = " ".join(text.split())
    return f"`{text if len(text) <= 120 else text[:117] + '...'}`"
