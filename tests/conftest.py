from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny products are slower on two threads than on one, and xdist brings its own processes."""
    torch.set_num_threads(1)
