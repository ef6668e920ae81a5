"""A laboratory with a tiny model and its data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import write_model, write_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from common import Lab  # found through the path


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    place = tmp_path_factory.mktemp("lab")
    write_model(place / "models" / "tiny-sst2")
    for split in ("train", "dev"):
        write_rows(place / f"sst2.{split}.jsonl", 64)
    return Lab(place / "models", place, place / "out", "cpu", ["sst2"], samples=64, limit=16)
