"""Which versions of transformers and kernels Layouts work with: a short set of trials in an interpreter.

    python scripts/layout_versions.py                                  # this interpreter
    python scripts/layout_versions.py --path DIR --path DIR            # with these folders before its packages
    python scripts/layout_versions.py --python /other/bin/python --json

Prints one row of the table in docs/layouts.md, or the record of each trial as JSON; exits 1 if a trial fails. Needs a
checkout (the packages and tiny models are those of the tests) and no network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("load", "live", "refusal", "save", "train", "config_object", "kernel_config")
"""The trials; the last is transformers' own KernelConfig, with the CPU added to its devices, on the same package."""


class Unavailable(Exception):
    """What is tried does not exist in these versions."""


def trials(folder: Path) -> dict[str, Callable[[], None]]:
    """Each trial by name; it raises if something is wrong."""
    import torch
    from layouts_samples import generated, logits, prompt, same_state, state_of, tiny, write_package
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    import kernelgraft
    from kernelgraft.layouts import find_layouts

    torch.set_num_threads(1)
    checkpoint, other = folder / "model", folder / "other"
    tiny("qwen3").save_pretrained(checkpoint)
    tiny("olmo2").save_pretrained(other)
    package = write_package(folder / "package")
    parts = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
    kernels: dict[Any, Any] = {
        "RMSNorm": f"{package}:ScaledNorm",
        parts: f"{package}:NormMLP",
        tuple(("Linear", f"model.layers.*.self_attn.{name}_proj") for name in "qkv"): f"{package}:QKV",
    }

    def plain(path: Path = checkpoint) -> Any:
        return AutoModelForCausalLM.from_pretrained(path)

    def loaded(given: Any = kernels) -> Any:
        return kernelgraft.from_pretrained(AutoModelForCausalLM, checkpoint, kernels=given)

    def equal(model: Any) -> None:
        torch.testing.assert_close(logits(model), logits(plain()), rtol=1e-5, atol=1e-5)
        assert torch.equal(generated(model), generated(plain())), "other tokens"

    def load() -> None:
        equal(loaded())
        assert find_layouts(plain()) is None, "a plain load afterwards is not plain"

    def live() -> None:
        model = plain()
        with kernelgraft.apply_layouts(model, kernels):
            equal(model)
        assert same_state(state_of(model), state_of(plain())), "reverting left other values"

    def refusal() -> None:
        try:
            kernelgraft.apply_layouts(plain(other), {parts: f"{package}:NormMLP"})
        except kernelgraft.KernelgraftError:
            return
        raise AssertionError("a fusion against the data flow was not refused")

    def save() -> None:
        loaded().save_pretrained(folder / "saved")
        one, two = (load_file(path / "model.safetensors") for path in (checkpoint, folder / "saved"))
        assert same_state(one, two), "saved under other names or with other values"

    def train() -> None:
        found = []
        for model in (loaded(), plain()):
            model.train()
            loss = model(input_ids=prompt(2), labels=prompt(2)).loss
            loss.backward()
            found.append((loss, model.get_input_embeddings().weight.grad))
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)

    def config_object() -> None:
        from transformers import KernelConfig

        equal(loaded(KernelConfig(kernels, use_local_kernel=True)))

    def kernel_config() -> None:
        try:
            import kernels  # noqa: F401
            import transformers.utils.kernel_config as devices
            from transformers import KernelConfig
            from transformers.utils import is_kernels_available
        except ImportError as error:
            raise Unavailable(f"`{error.name}` is not installed") from error
        if not is_kernels_available():
            raise Unavailable("transformers asks for another version of kernels")
        from transformers.integrations import hub_kernels

        supported = getattr(devices, "KERNELS_SUPPORTED_DEVICE_TYPES", None)
        if supported is None or not hasattr(hub_kernels, "make_parent_class_for_kernel_fusion"):
            raise Unavailable("this KernelConfig has no Layouts")
        if "cpu" not in supported:
            supported.append("cpu")
        ours = logits(loaded({parts: f"{package}:NormMLP"}))  # before theirs, which patches classes for good
        os.environ["LOCAL_KERNELS"] = f"owner/sample={package}"
        value = ("owner/sample:NormMLP", {"revision": "local", "trust_remote_code": True})
        config = KernelConfig({parts: value}, inherit_mapping=False)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)
        torch.testing.assert_close(logits(model), ours, rtol=1e-5, atol=1e-5)

    return {
        function.__name__: function for function in (load, live, refusal, save, train, config_object, kernel_config)
    }


def record() -> dict[str, Any]:
    """Versions, and for each trial "works", "not available: …" or "fails: …" """
    sys.path.insert(0, str(ROOT / "tests"))
    found: dict[str, Any] = {name: _version(name) for name in ("transformers", "kernels", "torch")}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, trial in trials(Path(folder)).items():
            try:
                trial()
                found[name] = "works"
            except Unavailable as error:
                found[name] = f"not available: {error}"
            except Exception as error:  # whatever a pair of versions raises is what the table is about
                found[name] = f"fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    found["wall_s"] = round(time.perf_counter() - start, 1)
    return found


def row(found: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    cells = [found["transformers"], found["kernels"] or "–", found["torch"]]
    return "| " + " | ".join([*cells, *(found[name].partition(":")[0] for name in COLUMNS)]) + " |"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    """Run the trials here or in another interpreter."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--python", help="the interpreter to try; default: this one")
    parser.add_argument("--path", action="append", default=[], help="a folder to put before its packages")
    parser.add_argument("--json", action="store_true", help="print what each trial said")
    arguments = parser.parse_args()
    if arguments.python or arguments.path:
        paths = [str(Path(path).resolve()) for path in arguments.path]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "src")]),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        command = [arguments.python or sys.executable, __file__, *(["--json"] if arguments.json else [])]
        return subprocess.run(command, env=environment, check=False).returncode
    found = record()
    print(json.dumps(found, indent=2) if arguments.json else row(found))
    return int(any(found[name].startswith("fails") for name in COLUMNS))


if __name__ == "__main__":
    raise SystemExit(main())
