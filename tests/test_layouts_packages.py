"""KernelSet reads what KernelConfig takes; packages are found, imported, and held to their rules."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import KernelConfig

from kernelgraft import machine
from kernelgraft.errors import MissingExtraError, UsageError
from kernelgraft.layouts import locating, packages
from kernelgraft.layouts.kernel_set import KernelSet
from kernelgraft.layouts.locating import locate
from kernelgraft.layouts.packages import load, load_all, signature_drift
from kernelgraft.layouts.records import Entry, Part, Place, Source
from kernelgraft.layouts.variants import Host, backend_of, choose, lacks_architecture

SHA = "0123456789abcdef0123456789abcdef01234567"
OTHER_SHA = "f" * 40
LAYERS = """
try:
    from transformers.conversion_mapping import WeightRenaming
except ImportError:
    WeightRenaming = None
import torch
import torch.nn as nn

class ScaleLayout(nn.Module):
    conversion_mapping = [] if WeightRenaming is None else [WeightRenaming("weight", "scale")]
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

class Scale(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.scale * hidden_states

class Plain(nn.Module):
    can_torch_compile = True
    has_backward = False
    def forward(self, hidden_states):
        return hidden_states
"""
METADATA = {
    "id": "_scale_1",
    "name": "scale",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cpu"},
}


def write_build(
    root: Path, layers: str = LAYERS, variant: str = "torch-universal", metadata: dict[str, Any] | None = None
) -> Path:
    """A package of one build; the root."""
    build = root / "build" / variant
    build.mkdir(parents=True)
    (build / "__init__.py").write_text("from . import layers\n", encoding="utf-8")
    (build / "layers.py").write_text(layers, encoding="utf-8")
    (build / "metadata.json").write_text(json.dumps(METADATA | (metadata or {})), encoding="utf-8")
    return root


def entry_of(value: Any, key: Any = "RMSNorm") -> Entry:
    (entry,) = KernelSet({key: value})
    return entry


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An offline Hub cache with `owner/scale` at one commit: v1, a tag and a branch point to it."""
    from huggingface_hub import constants

    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "kernels--owner--scale"
    write_build(repo / "snapshots" / SHA)
    for name in ("v1", "main", "release/one"):
        file = repo / "refs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SHA, encoding="utf-8")
    return tmp_path / "hub"


# --- KernelSet ---


def test_the_forms_of_the_guide_are_read() -> None:
    fusion = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
    kernels = KernelSet(
        {
            "RMSNorm": ("owner/my-kernel:CustomRMSNorm", {"trust_remote_code": True, "version": 1}),
            fusion: ("owner/my-kernel:RMSNormMLP", {"revision": "main"}),
            "MLP": "owner/my-kernel:Mlp",
        }
    )
    first, second, third = kernels
    assert first == Entry("RMSNorm", Source("owner/my-kernel", version=1, trust_remote_code=True), "CustomRMSNorm")
    assert second.key == (Part("RMSNorm", fusion[0][1]), Part("MLP", fusion[1][1]))
    assert second.is_fusion
    assert not first.is_fusion
    assert second.source == Source("owner/my-kernel", revision="main")
    assert third.source == Source("owner/my-kernel", version=1), "a plain string is version 1 without trust"
    assert first.parts == (Part("RMSNorm"),)


@pytest.mark.parametrize(
    ("value", "folder"),
    [
        ("/abs/kernel:Scale", "/abs/kernel"),
        ("(/abs/kernel):Scale", "/abs/kernel"),
        ("(/abs/kernel:Scale)", "/abs/kernel"),
        ("./kernel:Scale", "kernel"),
        ("(owner/kernel):Scale", "owner/kernel"),
        ("kernel:Scale", "kernel"),
        ("a/b/c:Scale", "a/b/c"),
        (("/abs/kernel:Scale", {"version": 1}), "/abs/kernel"),
        (("/abs/kernel:Scale", {}), "/abs/kernel"),
    ],
)
def test_folders_are_read(value: Any, folder: str) -> None:
    assert entry_of(value).source.folder == Path(folder)
    assert entry_of(value).kernel_name == "Scale"
    assert entry_of(value).source.repo is None


def test_a_kernel_config_is_read_and_left_as_it_is() -> None:
    mapping = {"RMSNorm": ("owner/scale:Scale", {"version": 2}), (("A", "x.a"), ("B", "x.b")): "owner/scale:Both"}
    config = KernelConfig(dict(mapping))
    assert KernelSet.of(config) == KernelSet(mapping)
    assert config.kernel_mapping == mapping
    assert KernelSet.of(config) == KernelSet.of(config)
    local = KernelSet.of(KernelConfig({"RMSNorm": "owner/scale:Scale"}, use_local_kernel=True))
    assert local.entries[0].source.folder == Path("owner/scale")


def test_a_set_is_itself_and_survives_copies() -> None:
    kernels = KernelSet({"RMSNorm": "owner/scale:Scale"})
    assert KernelSet.of(kernels) is kernels
    assert copy.deepcopy(kernels) == kernels == pickle.loads(pickle.dumps(kernels))
    assert hash(kernels) == hash(KernelSet([["RMSNorm", "owner/scale:Scale"]]))
    assert kernels != KernelSet({"RMSNorm": "owner/scale:Other"})
    with pytest.raises(AttributeError):
        kernels.entries = ()  # type: ignore[misc]
    assert "owner/scale@v1:Scale" in repr(kernels)


def test_json_can_say_every_key_and_value() -> None:
    text = '[[[["A", "x.*.a"], ["B", "x.*.b"]], ["owner/k:Both", {"version": 1}]], ["RMSNorm", "owner/k:One"]]'
    assert KernelSet.of(json.loads(text)) == KernelSet(
        {(("A", "x.*.a"), ("B", "x.*.b")): ("owner/k:Both", {"version": 1}), "RMSNorm": "owner/k:One"}
    )


def test_values_for_devices() -> None:
    kernels = KernelSet({"RMSNorm": {"cuda": "owner/k:Fast", "cpu": "/k:Slow"}, "MLP": "owner/k:Any"})
    assert [entry.kernel_name for entry in kernels] == ["Fast", "Slow", "Any"]
    assert [entry.kernel_name for entry in kernels.for_device("cuda")] == ["Fast", "Any"]
    assert [entry.kernel_name for entry in kernels.for_device("cpu")] == ["Slow", "Any"]


def test_a_list_of_trusted_repositories() -> None:
    assert entry_of(("owner/k:C", {"version": 1, "trust_remote_code": ["owner/k"]})).source.trust_remote_code
    assert not entry_of(("owner/k:C", {"version": 1, "trust_remote_code": ["owner/other"]})).source.trust_remote_code


def hub_repository(**changes: Any) -> SimpleNamespace:
    """What kernels.LayerRepository holds."""
    held = {"_repo_id": "owner/k", "layer_name": "C", "_revision": None, "_version": 3, "_trust_remote_code": False}
    return SimpleNamespace(**(held | {"load": lambda: None} | changes))


def test_repository_objects_say_where_they_are(tmp_path: Path) -> None:
    assert entry_of(hub_repository()).source == Source("owner/k", version=3)
    assert entry_of(hub_repository(_trust_remote_code=["owner/k"])).source.trust_remote_code
    pinned = hub_repository(_version=None, _revision=SHA)
    assert entry_of(pinned).source == Source("owner/k", revision=SHA)
    local = SimpleNamespace(_repo_path=tmp_path, layer_name="C", load=lambda: None)
    assert entry_of(local).source == Source(folder=tmp_path)
    # The nested form is what KernelConfig.update_kernel writes.
    assert entry_of({"cuda": {"inference": hub_repository()}}).device == "cuda"


def test_a_locked_repository_is_at_the_commit_of_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / "kernels.lock"
    lock.write_text(json.dumps([{"dependency": {"repo-id": "owner/k", "version": 1}, "lock": {"commit": SHA}}]))
    locked = hub_repository(_lockfile=lock, _version=None)
    assert entry_of(locked).source == Source("owner/k", revision=SHA)
    by_object = hub_repository(kernel_locks={"dep": SimpleNamespace(commit=OTHER_SHA)}, kernel_dep="dep")
    assert entry_of(by_object).source.revision == OTHER_SHA
    with pytest.raises(UsageError, match=r"`owner/z` is not in .*kernels lock"):
        entry_of(hub_repository(_repo_id="owner/z", _lockfile=lock))


MALFORMED = [
    (5, "is no set of kernels"),
    ("owner/k:C", "is no set of kernels"),
    ([("RMSNorm",)], "is no pair"),
    ({7: "owner/k:C"}, "neither a class name nor a tuple"),
    ({(): "owner/k:C"}, "neither a class name nor a tuple"),
    ({"": "owner/k:C"}, "empty class name"),
    ({"RMSNorm(": "owner/k:C"}, "no regular expression"),
    ({("RMSNorm", "x.norm"): "owner/k:C"}, "a tuple of pairs"),
    ({(("RMSNorm", "x.norm", "y"),): "owner/k:C"}, "write \\(class name, path pattern\\)"),
    ({(("A", "x.a"), ("B", "y.b")): "owner/k:C"}, "different parents \\(`x`, `y`\\)"),
    ({(("A", "x.a"), ("A", "x.a")): "owner/k:C"}, "one module twice"),
    ({(("A", "x..a"),): "owner/k:C"}, "empty segment"),
    ({(("A", "x.**.a"),): "owner/k:C"}, "exactly one segment"),
    ({"A": 3}, "`3` for `A` is no kernel"),
    ({"A": "owner/k"}, "names no class"),
    ({"A": "owner/k:not a name"}, "names no class"),
    ({"A": "ow ner/k:C"}, "neither owner/repo nor a folder"),
    ({"A": ("owner/k:C",)}, "is no kernel"),
    ({"A": ("owner/k:C", {})}, "neither version nor revision"),
    ({"A": ("owner/k:C", {"version": 1, "revision": "main"})}, "leave one of them out"),
    ({"A": ("owner/k:C", {"version": "1"})}, "no whole number"),
    ({"A": ("owner/k:C", {"version": True})}, "no whole number"),
    ({"A": ("owner/k:C", {"revision": " "})}, "tag, branch or commit"),
    ({"A": ("owner/k:C", {"version": 1, "trust_remote_code": "yes"})}, "True, False or a list"),
    ({"A": ("owner/k:C", {"verson": 1})}, "`verson` of the kernel"),
    ({"A": ("/k:C", {"revision": "main"})}, "only a repository of the Hub has one"),
    ({"A": {}}, "empty dict"),
    ({"A": {"gpu": "owner/k:C"}}, "the device `gpu`"),
    ({"A": {"cpu": {}}}, "differs by mode"),
    ({"A": {"cpu": {"train": "owner/k:C", "eval": "owner/k:D"}}}, "differs by mode \\(train, eval\\)"),
    ([["A", "owner/k:C"], ["A", "owner/k:D"]], "stands twice"),
]


@pytest.mark.parametrize(("kernels", "said"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_malformed_is_one_line(kernels: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        KernelSet.of(kernels)
    assert "\n" not in str(raised.value)


def test_paths_of_a_place() -> None:
    loaded: Any = None
    assert Place(loaded, "model.layers.0", ("norm", "mlp")).paths == ("model.layers.0.norm", "model.layers.0.mlp")
    assert Place(loaded, "", ("norm",)).paths == ("norm",)


# --- loading from folders ---


@pytest.mark.parametrize("inside", ["", "build", "build/torch-universal"])
def test_a_package_is_loaded_from_any_of_its_folders(tmp_path: Path, inside: str) -> None:
    write_build(tmp_path / "k")
    loaded = load(entry_of(f"{tmp_path / 'k' / inside}:Scale"))
    assert loaded.kernel.__name__ == "Scale"
    assert loaded.layout is not None
    assert loaded.layout.__name__ == "ScaleLayout"
    assert [rule.source_patterns for rule in loaded.rules] == [["weight"]]
    assert loaded.location == (tmp_path / "k" / "build" / "torch-universal").resolve()
    assert (loaded.licence, loaded.commit) == ("Apache-2.0", None)
    assert (loaded.fusion, loaded.has_backward, loaded.can_torch_compile) == ("chain", True, False)
    layout = loaded.layout(4)
    torch.testing.assert_close(loaded.kernel.forward(layout, torch.ones(2, 4)), torch.ones(2, 4))


def test_the_guides_two_files_are_enough(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from . import layers\n")
    (tmp_path / "layers.py").write_text(LAYERS)
    loaded = load(entry_of(f"{tmp_path}:Plain"))
    assert (loaded.layout, loaded.rules, loaded.licence) == (None, (), None)
    assert (loaded.has_backward, loaded.can_torch_compile) == (False, True)


def test_an_older_build_holds_its_package_in_a_folder(tmp_path: Path) -> None:
    build = write_build(tmp_path) / "build" / "torch-universal"
    (build / "scale").mkdir()
    for name in ("__init__.py", "layers.py"):
        (build / name).rename(build / "scale" / name)
    assert load(entry_of(f"{tmp_path}:Scale")).kernel.__name__ == "Scale"


def test_layers_may_be_a_package_that_exports_from_other_files(tmp_path: Path) -> None:
    build = write_build(tmp_path) / "build" / "torch-universal"
    (build / "layers.py").unlink()
    (build / "layers").mkdir()
    (build / "layers" / "__init__.py").write_text("from .scale import Scale\n")
    (build / "layers" / "scale.py").write_text(LAYERS)
    loaded = load(entry_of(f"{tmp_path}:Scale"))
    assert loaded.layout is not None, "the Layout stands beside the kernel, not in `layers`"


def test_equal_content_is_one_package_and_other_content_another(tmp_path: Path) -> None:
    first = load(entry_of(f"{write_build(tmp_path / 'a')}:Scale"))
    again = load(entry_of(f"{write_build(tmp_path / 'b')}:Scale"))
    assert first.kernel is again.kernel
    other = load(entry_of(f"{write_build(tmp_path / 'c', LAYERS.replace('self.scale *', '2 * self.scale *'))}:Scale"))
    assert other.kernel is not first.kernel
    assert other.kernel.__module__ != first.kernel.__module__, "though both say the same id in metadata.json"


def test_an_edited_file_is_imported_anew_and_no_byte_code_is_left(tmp_path: Path) -> None:
    root = write_build(tmp_path)
    entry = entry_of(f"{root}:Scale")
    ones = torch.ones(2)
    assert load(entry).kernel.forward(SimpleNamespace(scale=3.0), ones).tolist() == [3, 3]  # type: ignore[arg-type]
    # The same size within the same second: what a byte code cache cannot tell apart.
    layers = root / "build" / "torch-universal" / "layers.py"
    layers.write_text(LAYERS.replace("self.scale * hidden", "self.scale + hidden"), encoding="utf-8")
    assert load(entry).kernel.forward(SimpleNamespace(scale=3.0), ones).tolist() == [4, 4]  # type: ignore[arg-type]
    assert not list(root.rglob("__pycache__"))


def test_what_fails_to_import_leaves_nothing_and_can_be_mended(tmp_path: Path) -> None:
    root = write_build(tmp_path, LAYERS + "\nraise RuntimeError('half\\nway')\n")
    before, finders = set(sys.modules), dict(sys.path_importer_cache)
    with pytest.raises(UsageError, match=r"cannot be imported \(RuntimeError: half way\)"):
        load(entry_of(f"{root}:Scale"))
    assert {name for name in set(sys.modules) - before if name.startswith("kernelgraft_kernel")} == set()
    assert sys.path_importer_cache == finders
    (root / "build" / "torch-universal" / "layers.py").write_text(LAYERS, encoding="utf-8")
    assert load(entry_of(f"{root}:Scale")).layout is not None


def test_threads_import_a_package_once(tmp_path: Path) -> None:
    entry = entry_of(f"{write_build(tmp_path, LAYERS + '# threads')}:Scale")
    found: list[type] = []
    threads = [threading.Thread(target=lambda: found.append(load(entry).kernel)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    folder = locate(entry.source).folder
    assert packages._import(folder, entry) is packages._import(folder, entry) is sys.modules[found[0].__module__[:-7]]


def test_a_package_is_read_where_transformers_is_not(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from kernelgraft.layouts import KernelSet, load\n"
        f"loaded = load(KernelSet({{'RMSNorm': {str(write_build(tmp_path)) + ':Scale'!r}}}).entries[0])\n"
        "assert loaded.rules == () and loaded.layout is not None\n"
        "assert 'kernels' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=machine.child_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_repository_object_that_does_not_say_where_it_is_loads_itself(tmp_path: Path) -> None:
    kernel = load(entry_of(f"{write_build(tmp_path, LAYERS + '# own')}:Scale")).kernel
    entry = entry_of(SimpleNamespace(layer_name="Scale", load=lambda: kernel))
    loaded = load(entry)
    with pytest.raises(UsageError, match="does not say which commit"):
        load(entry, pinned=True)
    assert loaded.kernel is kernel
    assert loaded.layout is not None
    assert loaded.location == (tmp_path / "build" / "torch-universal").resolve()


def test_every_kernel_of_a_set_for_a_device(tmp_path: Path) -> None:
    root = write_build(tmp_path)
    kernels = {"RMSNorm": {"cuda": f"{root}:Scale"}, "MLP": f"{root}:Plain"}
    assert [loaded.name for loaded in load_all(kernels, device="cpu")] == ["Plain"]
    assert [loaded.name for loaded in load_all(kernels)] == ["Scale", "Plain"]
    with pytest.raises(UsageError, match="none of the kernels is for the device `cpu`: they are for cuda"):
        load_all({"RMSNorm": {"cuda": f"{root}:Scale"}}, device="cpu")
    with pytest.raises(UsageError, match="is empty"):
        load_all({})


def test_objects_and_folders_of_kernels_itself(cache: Path, tmp_path: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="the package `kernels` is not installed")
    root = write_build(tmp_path / "k")
    local = kernels.LocalLayerRepository(root, layer_name="Scale")
    mine = load(entry_of(local))
    theirs = local.load()
    assert mine.kernel is not theirs, "each has its own import"
    assert (mine.kernel.__name__, mine.location) == (theirs.__name__, (root / "build" / "torch-universal").resolve())
    hub = kernels.LayerRepository("owner/scale", layer_name="Scale", version=1, trust_remote_code=True)
    assert load(entry_of(hub)).commit == SHA
    lock = tmp_path / "kernels.lock"
    lock.write_text(json.dumps([{"dependency": {"repo-id": "owner/scale", "version": 1}, "lock": {"commit": SHA}}]))
    locked = kernels.LockedLayerRepository("owner/scale", lockfile=lock, layer_name="Scale", trust_remote_code=True)
    assert load(entry_of(locked), pinned=True).commit == SHA
    config = KernelConfig({})
    config.update_kernel("owner/scale", "RMSNorm", "Scale", "cpu", kernels.Mode.INFERENCE, trust_remote_code=True)
    assert [loaded.commit for loaded in load_all(config, device="cpu")] == [SHA]


# --- rules of a package ---

BAD_LAYERS = [
    ("Scale", LAYERS.replace("class Scale(nn.Module)", "class Scale"), "no class of nn.Module"),
    ("Scale", LAYERS.replace("class Scale(nn.Module):", "class Scale(nn.Module):\n    eps = 1"), "the member `eps`"),
    (
        "Scale",
        LAYERS.replace("class Scale(nn.Module):", "class Scale(nn.Module):\n    def __init__(self): ..."),
        "has an __init__: a kernel has no state",
    ),
    (
        "Scale",
        LAYERS.replace("class Scale(nn.Module):", "class Scale(nn.Module):\n    def __call__(self, x): ..."),
        "__call__",
    ),
    ("Plain", LAYERS.replace("has_backward = False", "has_backward = 'no'"), "has_backward` of .* is no bool"),
    ("Plain", LAYERS.replace("def forward(self, hidden_states):", "def other(self, hidden_states):"), "has no forward"),
    ("ScaleLayout", LAYERS, "names a Layout: name the kernel, `Scale`"),
    ("Scaled", LAYERS, "has no class `Scaled`: it has `Scale`"),
    ("Scale", LAYERS.replace("class ScaleLayout(nn.Module)", "class ScaleLayout"), "is no nn.Module"),
    ("Scale", LAYERS.replace("conversion_mapping = ", "conversion_mapping = 'x'  # "), "write a list of rules"),
    (
        "Scale",
        LAYERS.replace("    conversion_", "    fusion = 'diagonal'\n    conversion_"),
        "write one of chain, parallel",
    ),
    (
        "Scale",
        LAYERS.replace("class Scale(", "    def forward(self, x):\n        return x\n\nclass Scale("),
        "the same parameters",
    ),
    ("Scale", "import torch\n", "it has no kernel at all"),
]


@pytest.mark.parametrize(("name", "layers", "said"), BAD_LAYERS, ids=range(len(BAD_LAYERS)))
def test_a_package_that_breaks_the_rules_is_one_line(tmp_path: Path, name: str, layers: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        load(entry_of(f"{write_build(tmp_path, layers)}:{name}"))
    assert "\n" not in str(raised.value)


def test_kinds_of_fusion_and_annotations_are_allowed(tmp_path: Path) -> None:
    layers = LAYERS.replace("    conversion_", "    fusion = 'parallel'\n    conversion_")
    layers = layers.replace(
        "class Scale(nn.Module):", 'class Scale(nn.Module):\n    """Words."""\n    scale: torch.Tensor'
    )
    assert load(entry_of(f"{write_build(tmp_path, layers)}:Scale")).fusion == "parallel"


def test_a_fusion_needs_a_layout(tmp_path: Path) -> None:
    entry = entry_of(f"{write_build(tmp_path)}:Plain", key=(("A", "x.a"), ("B", "x.b")))
    with pytest.raises(UsageError, match="define `PlainLayout` beside `Plain`"):
        load(entry)


def test_layers_must_be_exposed(tmp_path: Path) -> None:
    root = write_build(tmp_path)
    (root / "build" / "torch-universal" / "__init__.py").write_text("")
    with pytest.raises(UsageError, match="does not expose `layers`"):
        load(entry_of(f"{root}:Scale"))
    (root / "build" / "torch-universal" / "__init__.py").unlink()
    with pytest.raises(UsageError, match=r"has no `.*__init__.py`"):
        load(entry_of(f"{root}:Scale"))


def test_what_a_package_needs_must_be_here(tmp_path: Path) -> None:
    root = write_build(tmp_path / "a", metadata={"python-depends": ["no-such-thing"]})
    with pytest.raises(MissingExtraError, match="needs `no-such-thing`"):
        load(entry_of(f"{root}:Scale"))
    root = write_build(tmp_path / "b", "import no_such_module\n")
    with pytest.raises(MissingExtraError, match="imports `no_such_module`"):
        load(entry_of(f"{root}:Scale"))
    root = write_build(tmp_path / "c", metadata={"kernel-depends": [{"repo-id": "owner/z", "version": 1}]})
    with pytest.raises(UsageError, match="built on other kernels"):
        load(entry_of(f"{root}:Scale"))


def test_a_folder_that_is_none_or_has_no_build(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        load(entry_of(f"{tmp_path / 'none'}:Scale"))
    with pytest.raises(UsageError, match=r"it has none at all\): add build/torch-universal"):
        load(entry_of(f"{tmp_path}:Scale"))
    write_build(tmp_path, variant="torch-xpu")
    with pytest.raises(UsageError, match=r"`torch-xpu` is for xpu, not for cpu"):
        load(entry_of(f"{tmp_path}:Scale"), device="cpu")


def test_metadata_is_read_strictly(tmp_path: Path) -> None:
    root = write_build(tmp_path)
    with pytest.raises(UsageError, match="has version 1, not 2"):
        load(entry_of((f"{root}:Scale", {"version": 2})))
    for text, said in (("{", "cannot be read"), ("[]", "holds no object")):
        (root / "build" / "torch-universal" / "metadata.json").write_text(text)
        with pytest.raises(UsageError, match=said):
            load(entry_of(f"{root}:Scale"))


# --- the Hub's cache ---


@pytest.mark.parametrize(
    "where",
    [{"version": 1}, {"revision": "main"}, {"revision": "release/one"}, {"revision": SHA}, {"revision": SHA[:9]}],
)
def test_the_hubs_cache_by_version_revision_and_commit(cache: Path, where: dict[str, Any]) -> None:
    loaded = load(entry_of(("owner/scale:Scale", where | {"trust_remote_code": True})))
    assert loaded.commit == SHA
    assert loaded.location == cache / "kernels--owner--scale" / "snapshots" / SHA / "build" / "torch-universal"


def test_the_hubs_cache_of_links_and_of_older_tools(cache: Path) -> None:
    repo = cache / "kernels--owner--scale"
    build = repo / "snapshots" / SHA / "build" / "torch-universal"
    (repo / "blobs").mkdir()
    for file in list(build.iterdir()):
        file.rename(repo / "blobs" / file.name)
        file.symlink_to(Path("../../../../blobs") / file.name)
    repo.rename(cache / "models--owner--scale")
    loaded = load(entry_of(("owner/scale:Scale", {"version": 1, "trust_remote_code": True})))
    assert loaded.commit == SHA


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (("owner/scale:Scale", {"version": 2, "trust_remote_code": True}), "without `v2`: give one of .*`main`.*`v1`"),
        (("owner/scale:Scale", {"revision": OTHER_SHA, "trust_remote_code": True}), f"without `{OTHER_SHA}`"),
        (
            ("owner/scale:Scale", {"revision": "../../leads-out", "trust_remote_code": True}),
            "without `../../leads-out`",
        ),
        (("owner/other:Scale", {"version": 1, "trust_remote_code": True}), "LOCAL_KERNELS=owner/other=FOLDER"),
        ("kernels-community/other:Scale", "is not in the Hub's cache and HF_HUB_OFFLINE is set"),
    ],
)
def test_what_the_cache_lacks(cache: Path, value: Any, said: str) -> None:
    (cache / "leads-out").write_text(SHA)
    with pytest.raises(UsageError, match=said) as raised:
        load(entry_of(value))
    assert "\n" not in str(raised.value)


def test_a_reference_cannot_lead_out_of_the_cache(cache: Path, tmp_path: Path) -> None:
    write_build(tmp_path / "elsewhere")
    (cache / "kernels--owner--scale" / "refs" / "v1").write_text("../../../elsewhere")
    with pytest.raises(UsageError, match="without `v1`"):
        load(entry_of(("owner/scale:Scale", {"version": 1, "trust_remote_code": True})))


def test_a_snapshot_without_a_build_for_this_machine(cache: Path) -> None:
    snapshot = cache / "kernels--owner--scale" / "snapshots" / SHA / "build"
    (snapshot / "torch-universal").rename(snapshot / "torch-xpu")
    with pytest.raises(UsageError, match="`torch-xpu` is for xpu"):
        load(entry_of(("owner/scale:Scale", {"version": 1, "trust_remote_code": True})), device="cpu")


def test_code_of_the_hub_must_be_trusted(cache: Path) -> None:
    for value in ("owner/scale:Scale", ("owner/scale:Scale", {"revision": SHA, "trust_remote_code": ["owner/z"]})):
        with pytest.raises(UsageError, match=r"not trusted: read it, then give .*'trust_remote_code': True") as raised:
            load(entry_of(value))
        assert "kernelgraft_kernel" not in str(raised.value)
    (cache / "kernels--owner--scale").rename(cache / "kernels--kernels-community--scale")
    assert load(entry_of("kernels-community/scale:Scale")).commit == SHA, "the one owner that is trusted as it is"


def test_pinned_code_is_trusted_by_name_and_at_a_commit(cache: Path) -> None:
    def value(**metadata: Any) -> Entry:
        return entry_of(("owner/scale:Scale", {"trust_remote_code": True} | metadata))

    assert load(value(revision=SHA), pinned=True).commit == SHA
    for loose, said in (({"version": 1}, "a version can"), ({"revision": "main"}, "a tag or branch can")):
        with pytest.raises(UsageError, match=f"is not pinned: .*{said}"):
            load(value(**loose), pinned=True)
    (cache / "kernels--owner--scale").rename(cache / "kernels--kernels-community--scale")
    with pytest.raises(UsageError, match="not trusted"):
        load(entry_of(("kernels-community/scale:Scale", {"revision": SHA})), pinned=True)


def test_local_kernels_stand_in_for_repositories(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_build(tmp_path / "mine", LAYERS + "# mine")
    monkeypatch.setenv("LOCAL_KERNELS", f"owner/z={tmp_path}:owner/scale={root}")
    loaded = load(entry_of("owner/scale:Scale"))
    assert loaded.commit is None
    assert loaded.location == (root / "build" / "torch-universal").resolve()
    monkeypatch.setenv("LOCAL_KERNELS", "owner/scale")
    with pytest.raises(UsageError, match=r"LOCAL_KERNELS has the entry `owner/scale`"):
        load(entry_of("owner/scale:Scale"))


class Hub:
    """Stands in for HfApi: one repository, fetched into the cache as the Hub does it."""

    asked: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self, library_name: str) -> None:
        self.library_name = library_name

    def list_repo_tree(self, repo: str, *, path_in_repo: str, repo_type: str, revision: str) -> list[Any]:
        Hub.asked.append((repo, revision))
        if repo != "owner/online":
            raise ConnectionError("no\nnetwork")
        return [SimpleNamespace(path=f"{path_in_repo}/{name}") for name in ("torch-universal", "torch-xpu")]

    def snapshot_download(
        self, repo: str, *, revision: str, allow_patterns: list[str], cache_dir: str, **_: Any
    ) -> str:
        Hub.asked.append((repo, allow_patterns))
        snapshot = Path(cache_dir) / "kernels--owner--online" / "snapshots" / SHA
        write_build(snapshot)
        return str(snapshot)


def test_what_the_cache_lacks_is_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [])
    with pytest.raises(UsageError, match="not trusted"):
        load(entry_of("owner/online:Scale"))
    assert Hub.asked == [], "nothing is asked for what is not trusted"
    loaded = load(entry_of(("owner/online:Scale", {"version": 4, "trust_remote_code": True})))
    assert loaded.commit == SHA
    assert Hub.asked == [("owner/online", "v4"), ("owner/online", ["build/torch-universal/*"])]
    with pytest.raises(UsageError, match=r"cannot be fetched \(no network\)"):
        load(entry_of(("owner/none:Scale", {"version": 4, "trust_remote_code": True})))


def test_locating_runs_nothing(tmp_path: Path) -> None:
    root = write_build(tmp_path, "raise RuntimeError\n")
    found = locate(Source(folder=root))
    assert found.metadata["name"] == "scale"
    assert found.licence == "Apache-2.0"


def test_the_cache_is_the_usual_one_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.delenv("KERNELS_CACHE", raising=False)
    assert locating.cache_roots() == [Path(constants.HF_HUB_CACHE)]


# --- variants ---

GPU = Host("cuda", (12, 8), (2, 13), True, None, "x86_64", "linux")
XPU = Host("xpu", (2025, 2), (2, 13), True, None, "x86_64", "linux")
CPU = Host("cpu", None, (2, 13), True, None, "x86_64", "linux")


@pytest.mark.parametrize(
    ("names", "here", "chosen"),
    [
        (["torch-universal"], GPU, "torch-universal"),
        (["torch-universal", "torch-cuda", "torch-cpu"], GPU, "torch-cuda"),
        (["torch-universal", "torch-cuda", "torch-cpu"], CPU, "torch-cpu"),
        (["torch-cuda", "torch213-cxx11-cu128-x86_64-linux"], GPU, "torch213-cxx11-cu128-x86_64-linux"),
        (
            ["torch213-cxx11-cu126-x86_64-linux", "torch213-cxx11-cu128-x86_64-linux"],
            GPU,
            "torch213-cxx11-cu128-x86_64-linux",
        ),
        (["torch213-cxx11-cu128-x86_64-linux", "torch213-cu128-x86_64-linux"], GPU, "torch213-cu128-x86_64-linux"),
        (
            ["torch213-cu128-x86_64-linux", "torch-stable-abi29-cu126-x86_64-linux"],
            GPU,
            "torch-stable-abi29-cu126-x86_64-linux",
        ),
        (
            ["torch-stable-abi29-cpu-x86_64-linux", "torch-stable-abi210-cpu-x86_64-linux"],
            CPU,
            "torch-stable-abi210-cpu-x86_64-linux",
        ),
        (["torch-stable-abi214-cpu-x86_64-linux", "torch-cpu"], CPU, "torch-cpu"),
        (
            ["torch213-xpu20252-x86_64-linux", "torch213-cxx11-xpu20252-x86_64-linux"],
            XPU,
            "torch213-xpu20252-x86_64-linux",
        ),
        (["torch213-cxx11-cu129-x86_64-linux"], GPU, None),
        (["torch213-cxx11-cu118-x86_64-linux"], GPU, None),
        (["torch212-cxx11-cpu-x86_64-linux"], CPU, None),
        (["torch213-cxx98-cpu-x86_64-linux"], CPU, None),
        (["torch213-cxx11-cpu-aarch64-linux", "torch213-cpu-x86_64-windows"], CPU, None),
        (["tvm-ffi01-cpu-x86_64-linux"], CPU, None),
        (["docs", "torchless", "torch-"], CPU, None),
    ],
)
def test_the_best_build_for_a_machine(names: list[str], here: Host, chosen: str | None) -> None:
    best, refused = choose(names, here)
    assert best == chosen
    assert set(refused) <= set(names) - {chosen}


def test_builds_that_do_not_fit_say_why() -> None:
    refused = choose(["torch212-cxx11-cpu-x86_64-linux", "torch-cuda", "torch213-cu129-x86_64-linux", "docs"], CPU)[1]
    assert refused == {
        "torch212-cxx11-cpu-x86_64-linux": "for torch 2.12, here it is 2.13",
        "torch-cuda": "for cuda, not for cpu",
        "torch213-cu129-x86_64-linux": "for cuda, not for cpu",
    }
    assert choose(["torch213-cu129-x86_64-linux"], GPU)[1] == {
        "torch213-cu129-x86_64-linux": "for cuda 12.9, here it is 12.8"
    }


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["8.0", "9.0"], (9, 0), True),
        (["8.0"], (8, 9), True),
        (["8.9"], (8, 6), False),
        (["8.0"], (9, 0), False),
        (["8.0+PTX"], (9, 0), True),
        (["9.0a"], (9, 0), True),
        (["10.0a"], (10, 3), False),
        (["10.0f"], (10, 3), True),
        (["10.0f"], (12, 0), False),
        (["next-generation"], (9, 0), True),
        ([], (9, 0), True),
    ],
)
def test_architectures_that_a_build_names(archs: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert (lacks_architecture({"backend": {"type": "cuda", "archs": archs}}, capability) is None) == runs
    assert lacks_architecture({"backend": {"type": "cpu", "archs": archs}}, capability) is None
    assert lacks_architecture({}, capability) is None


def test_a_build_for_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_build(tmp_path, metadata={"backend": {"type": "cuda", "archs": ["9.0"]}})
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UsageError, match=r"built for 9\.0, this GPU is 8\.0"):
        load(entry_of(f"{root}:Scale"), device="cuda")
    assert load(entry_of(f"{root}:Scale"), device="cpu").layout is not None


def test_devices_of_torch_as_packages_call_them() -> None:
    assert (backend_of("mps"), backend_of("npu"), backend_of("cpu")) == ("metal", "cann", "cpu")


# --- signatures ---


class Attention(nn.Module):
    def forward(self, hidden_states: Any, mask: Any = None, *, cache: Any = None, **kwargs: Any) -> Any:
        return hidden_states


def kernel_with(forward: Any) -> type[nn.Module]:
    return type("Kernel", (nn.Module,), {"forward": forward})


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda self, hidden_states, mask=None, *, cache=None, **kwargs: None, None),
        (lambda self, x, mask=None, *, cache=None, **kwargs: None, None),
        (
            lambda self, x, mask=None, *, past=None, **kw: None,
            "lacks `cache` and has `past`, which `Attention` has not",
        ),
        (lambda self, x, mask=None, **kwargs: None, r"lacks `cache`; its \*\*kwargs would swallow it"),
        (lambda self, x, mask=None, *, cache=None: None, r"has no \*\*kwargs"),
        (lambda self, x, mask=None, cache=None, **kwargs: None, "takes `cache` as positional or keyword"),
        (lambda self, x, mask=None, *, cache=None, extra=0, **kwargs: None, "has `extra`, which"),
    ],
)
def test_signatures_are_compared_by_name(forward: Any, said: str | None) -> None:
    drift = signature_drift(kernel_with(forward), Attention)
    if said is None:
        assert drift is None
    else:
        assert drift is not None
        assert re.search(said, drift)


def test_the_order_of_parameters_matters() -> None:
    original = kernel_with(lambda self, a, b, c: None)
    assert signature_drift(kernel_with(lambda self, a, c, b: None), original) is not None
    assert signature_drift(kernel_with(lambda self, a, b, c: None), original) is None


def test_own_members_are_what_a_class_says() -> None:
    assert set(packages._own_members(kernel_with(lambda self: None))) == {"forward"}
