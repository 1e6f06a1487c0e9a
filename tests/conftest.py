"""What every test runs under: no network, one torch thread, its own caches; GPU tests skipped with a reason."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Before transformers and torch are imported anywhere: both read these once. The folder is also for child processes.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
_CACHE = tempfile.mkdtemp(prefix="kernelgraft-tests-")
os.environ["KERNELGRAFT_CACHE"] = _CACHE

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _remove_cache() -> Iterator[None]:
    yield
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers in every run; the judge's own seeds still come from the operating system."""
    torch.manual_seed(0)
