"""Checkpoints of every released version keep loading, and put out what they put out then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import shearling

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))


def test_this_version_has_one() -> None:
    """Made by `python scripts/make_golden.py`, once for each release."""
    assert f"v{shearling.__version__}" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_gives_its_logits(version: str) -> None:
    folder = GOLDEN / version
    expected = json.loads((folder / "expected.json").read_text())
    ids = torch.tensor(expected["input_ids"])
    auto = transformers.AutoModelForSequenceClassification
    for model in (shearling.load(folder), auto.from_pretrained(folder)):
        with torch.inference_mode():
            logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_small(version: str) -> None:
    assert sum(path.stat().st_size for path in (GOLDEN / version).iterdir()) < 200_000
