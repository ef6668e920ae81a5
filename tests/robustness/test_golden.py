"""Checkpoints of every released version keep loading, and put out what they put out then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import shearling
from warm import python

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


WITHOUT = """
import sys
assert "shearling" not in sys.modules
sys.modules["shearling"] = None  # it cannot be imported
import json, torch, transformers
transformers.logging.set_verbosity_error()
auto = transformers.AutoModelForSequenceClassification
for folder in sys.argv[1:]:
    try:
        auto.from_pretrained(folder)
    except (RuntimeError, ValueError):
        pass
    else:
        sys.exit(f"{folder} was loaded with layers of another size")
for folder in sys.argv[1:]:
    expected = json.load(open(folder + "/expected.json"))
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(expected["input_ids"])).logits
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-4, atol=1e-5)
"""


def test_they_load_where_shearling_is_not_installed() -> None:
    """With `trust_remote_code`, by the file of their own version, all in one process; without it not at all."""
    done = python(WITHOUT, *(str(GOLDEN / version) for version in VERSIONS))
    assert done.returncode == 0, done.stderr


def test_checkpoints_of_0_1_are_of_this_version_once_loaded(tmp_path: Path) -> None:
    """They kept their shapes where quantisers keep theirs; saved again, they do not."""
    model = shearling.load(GOLDEN / "v0.1.0")
    assert not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    old = json.loads((GOLDEN / "v0.1.0" / "config.json").read_text())["quantization_config"]
    assert config["shearling"]["edits"] == old["edits"]
    assert "quantization_config" not in config


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_small(version: str) -> None:
    assert sum(path.stat().st_size for path in (GOLDEN / version).iterdir()) < 200_000
