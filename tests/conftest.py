from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CODE = tempfile.TemporaryDirectory()  # where transformers puts the code that comes with models: nothing of ours stays
os.environ["HF_MODULES_CACHE"] = CODE.name


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny products are slower on two threads than on one, and xdist brings its own processes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model directory; see folders.py."""
    from folders import dense_folder

    return dense_folder(tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="session")
def pruned(dense: Path) -> Path:
    """A checkpoint pruned from it, two sublayers empty. Copy it before changing it."""
    from folders import pruned_folder

    return pruned_folder(dense, dense.parent / "pruned")
