from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, numpy and the processes that tests start: xdist has its own
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # only now: it reads the number of threads

CODE = tempfile.TemporaryDirectory()  # where transformers puts the code that comes with models: nothing of ours stays
os.environ["HF_MODULES_CACHE"] = CODE.name
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a script started the tests in the background


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, help="another order of files, and of the tests in each, drawn by this seed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        draw = random.Random(seed)
        places = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], draw.random()))


@pytest.fixture(autouse=True)
def _threads() -> None:
    """Also after a test that changed it."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session", autouse=True)
def _float32() -> Iterator[None]:
    """Passes are float32 on every CPU, also where it has bfloat16: results are compared with exact ones."""
    from shearling.engine import precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "cpu_has_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power, so no save has to wait until the disk has everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


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
