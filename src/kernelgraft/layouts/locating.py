"""Where a kernel package lies: a folder, a stand-in from LOCAL_KERNELS, the Hub's cache, the Hub. Runs none of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelgraft import machine
from kernelgraft.errors import UsageError
from kernelgraft.layouts.records import Source
from kernelgraft.layouts.variants import choose, host

TRUSTED_OWNERS = ("kernels-community",)
"""Owners on the Hub whose code runs without trust_remote_code, as transformers documents it."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Location:
    """One build of a package: the folder that is imported, the commit it came from, what its metadata.json says."""

    folder: Path
    commit: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def licence(self) -> str | None:
        """The licence that metadata.json names."""
        licence = self.metadata.get("license")
        return str(licence) if licence else None


def locate(source: Source, *, device: str | None = None, pinned: bool = False) -> Location:
    """The build of a package for a type of device of this machine.

    A folder may be the root of a repository, its `build` or the folder of one build. A repository is looked up in the
    environment variable LOCAL_KERNELS (`owner/repo=folder`, several parted by `:`), then in the Hub's cache, then on
    the Hub if HF_HUB_OFFLINE is not set. Code of a repository must be trusted; with `pinned` explicitly, and its
    revision must be a whole commit. Raises UsageError.
    """
    if source.folder is not None:
        location = _in_folder(source.folder, device, str(source.folder))
        found = location.metadata.get("version")
        if source.version is not None and found is not None and found != source.version:
            raise UsageError(
                f"the folder `{source.folder}` has version {found}, not {source.version}: leave the version out"
            )
        return location
    if source.repo is None:
        raise UsageError(f"the repository object `{source}` does not say where its package is: give owner/repo:Class")
    override = _overrides().get(source.repo)
    if override is not None:
        return _in_folder(override, device, f"{source.repo}, by LOCAL_KERNELS {override}")
    check_trust(source, pinned=pinned)
    snapshot = _cached(source)
    if snapshot is not None:
        build = _build(snapshot / "build", device)[0]
        if build is not None:
            return Location(build, snapshot.name, _metadata(build))
    if _offline():
        raise UsageError(_not_cached(source, snapshot, device))
    snapshot = _download(source, device)
    build = _build(snapshot / "build", device)[0]
    if build is None:
        raise UsageError(_no_build(str(source), snapshot / "build", device))
    return Location(build, snapshot.name, _metadata(build))


def check_trust(source: Source, *, pinned: bool = False) -> None:
    """Raises UsageError if the code of a repository must not run; nothing is said about a folder."""
    if source.repo is None:
        return
    owner = source.repo.partition("/")[0]
    if not source.trust_remote_code and (pinned or owner not in TRUSTED_OWNERS):
        pin = {"revision": source.revision} if source.revision else {"version": source.version}
        raise UsageError(
            f"`{source.repo}` is code of the Hub that is not trusted: read it, then give "
            f"('{source.repo}:Class', {pin | {'trust_remote_code': True}})"
        )
    if pinned and not _COMMIT.fullmatch(source.revision or ""):
        raise UsageError(
            f"`{source}` is not pinned: give the whole commit (40 digits) as the revision, since "
            f"{'a tag or branch' if source.revision else 'a version'} can come to mean other code"
        )


# --- folders ---


def _in_folder(folder: Path, device: str | None, label: str) -> Location:
    if not folder.is_dir():
        raise UsageError(f"there is no folder `{folder}`: give the root of a kernel package, its build or one variant")
    for base in (folder, folder / "build"):
        build, _ = _build(base, device)
        if build is not None:
            return Location(build.resolve(), None, _metadata(build))
    if (folder / "__init__.py").is_file() or (folder / "metadata.json").is_file():
        return Location(folder.resolve(), None, _metadata(folder))
    base = folder / "build" if (folder / "build").is_dir() else folder
    raise UsageError(_no_build(label, base, device))


def _build(base: Path, device: str | None) -> tuple[Path | None, dict[str, str]]:
    """The best build below a folder, and why others do not fit."""
    names = [entry.name for entry in base.iterdir() if entry.is_dir()] if base.is_dir() else []
    name, refused = choose(names, host(device))
    return (base / name if name else None), refused


def _no_build(label: str, base: Path, device: str | None) -> str:
    refused = _build(base, device)[1]
    why = "; ".join(f"`{name}` is {reason}" for name, reason in refused.items())
    return (
        f"`{label}` has no build for this machine ({why or 'it has none at all'}): "
        "add build/torch-universal with __init__.py, layers.py and metadata.json"
    )


def _metadata(build: Path) -> dict[str, Any]:
    file = build / "metadata.json"
    if not file.is_file():
        return {}
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"`{file}` cannot be read ({error}): write it as JSON") from error
    if not isinstance(read, dict):
        raise UsageError(f"`{file}` holds no object: write id, name, version, license, python-depends and backend")
    return read


def _overrides() -> dict[str, Path]:
    """LOCAL_KERNELS as `kernels` reads it."""
    found = {}
    for entry in filter(None, (machine.environment("LOCAL_KERNELS") or "").split(":")):
        repo, equals, folder = entry.partition("=")
        if not equals or not repo or not folder:
            raise UsageError(f"LOCAL_KERNELS has the entry `{entry}`: write owner/repo=folder, several parted by `:`")
        found[repo] = Path(folder).expanduser()
    return found


# --- the Hub and its cache ---


def cache_roots() -> list[Path]:
    """The folders that hold the Hub's cache: KERNELS_CACHE if it is set, else the usual one."""
    own = machine.environment("KERNELS_CACHE")
    if own:
        return [Path(own)]
    from huggingface_hub import constants

    return [Path(constants.HF_HUB_CACHE)]


def _repo_folders(repo: str) -> list[Path]:
    """Where the cache may hold a repository: as a kernel, or as a model in caches of older tools."""
    flat = repo.replace("/", "--")
    folders = [root / f"{kind}--{flat}" for root in cache_roots() for kind in ("kernels", "models")]
    return [folder for folder in folders if folder.is_dir()]


def _cached(source: Source) -> Path | None:
    """The snapshot of a source in the cache; None if it is not there."""
    wanted = source.revision if source.revision is not None else f"v{source.version}"
    for folder in _repo_folders(source.repo or ""):
        commit = wanted
        reference = folder / "refs" / wanted
        if _is_inside(reference, folder / "refs") and reference.is_file():
            commit = reference.read_text(encoding="utf-8").strip()
        elif source.revision is not None and re.fullmatch(r"[0-9a-f]{7,39}", wanted):
            whole = [entry.name for entry in _snapshots(folder) if entry.name.startswith(wanted)]
            commit = whole[0] if len(whole) == 1 else wanted
        snapshot = folder / "snapshots" / commit
        if _is_inside(snapshot, folder / "snapshots") and snapshot.is_dir():
            return snapshot
    return None


def _is_inside(path: Path, folder: Path) -> bool:
    return folder.resolve() in path.resolve().parents


def _snapshots(folder: Path) -> list[Path]:
    return sorted((folder / "snapshots").iterdir()) if (folder / "snapshots").is_dir() else []


def _not_cached(source: Source, snapshot: Path | None, device: str | None) -> str:
    if snapshot is not None:
        return _no_build(str(source), snapshot / "build", device)
    folders = _repo_folders(source.repo or "")
    if not folders:
        beside = (
            f" (for the folder beside you write `./{source.repo}:Class`)" if Path(source.repo or "").is_dir() else ""
        )
        return (
            f"`{source}` is not in the Hub's cache and HF_HUB_OFFLINE is set: fetch it once online, or set "
            f"LOCAL_KERNELS={source.repo}=FOLDER{beside}"
        )
    there = [
        str(file.relative_to(folder / "refs"))
        for folder in folders
        for file in sorted(folder.glob("refs/**/*"))
        if file.is_file()
    ]
    return (
        f"the Hub's cache has `{source.repo}` without `{source.revision or f'v{source.version}'}`: give one of "
        f"{', '.join(f'`{name}`' for name in there) or 'its commits'}, or fetch it once online"
    )


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _download(source: Source, device: str | None) -> Path:
    """Fetch the build for this machine, and nothing else, into the cache; the snapshot's folder."""
    from huggingface_hub import HfApi

    api, revision = HfApi(library_name="kernelgraft"), source.revision or f"v{source.version}"
    repo = source.repo or ""
    own = machine.environment("KERNELS_CACHE")
    try:
        tree = api.list_repo_tree(repo, path_in_repo="build", repo_type="kernel", revision=revision)
        names = [Path(item.path).name for item in tree]
        name, refused = choose(names, host(device))
        if name is None:
            why = "; ".join(f"`{other}` is {reason}" for other, reason in refused.items()) or "it has none at all"
            raise UsageError(f"`{source}` has no build for this machine ({why}): take another version or revision")
        return Path(
            api.snapshot_download(
                repo,
                repo_type="kernel",
                revision=revision,
                allow_patterns=[f"build/{name}/*"],
                ignore_patterns=["*.pyc", "**/__pycache__/**"],
                cache_dir=own,
            )
        )
    except UsageError:
        raise
    # Whatever the HTTP client, the Hub or the disk says: one line with what to do.
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"`{source}` is not in the Hub's cache and cannot be fetched ({said[:160]}): fetch it where there is a "
            f"network, or set LOCAL_KERNELS={repo}=FOLDER"
        ) from error
