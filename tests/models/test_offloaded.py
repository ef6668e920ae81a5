"""Models that accelerate has spread out are pruned as if they were in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shearling
from families import tiny_batches, tiny_model
from shearling.errors import ModelError
from tiny import batches_of, model_of

accelerate = pytest.importorskip("accelerate")

MAP = {"bert.embeddings": "cpu", "bert.encoder.layer.0": "cpu", "bert.pooler": "cpu", "classifier": "cpu"}


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.kept, b.kept, strict=True)) and all(
        torch.allclose(x, y, atol=1e-6) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True)
    )


def test_modules_that_move_their_inputs() -> None:
    """As with layers on several devices: every module has a hook that moves what goes in."""
    expected = shearling.prune(model_of("bert"), batches_of(3), flops=0.5)
    model = model_of("bert")
    accelerate.dispatch_model(model, MAP | {"bert.encoder.layer.1": "cpu"}, force_hooks=True)
    assert hasattr(model.bert.encoder.layer[1], "_hf_hook")
    assert same(shearling.prune(model, batches_of(3), flops=0.5), expected)
    assert hasattr(model.bert.encoder.layer[1], "_hf_hook")


@pytest.mark.parametrize("family", ["t5", "mpnet"])
def test_cores_that_pick_heads_of_a_shared_position_bias(family: str) -> None:
    expected = shearling.prune(tiny_model(family), tiny_batches(family, 6), flops=0.5)
    model = tiny_model(family)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert same(shearling.prune(model, tiny_batches(family, 6), flops=0.5), expected)


@pytest.mark.filterwarnings("error")
def test_weights_that_lie_on_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    dense = model_of("bert")
    expected = shearling.prune(dense, batches_of(3), flops=0.5)
    dense.save_pretrained(tmp_path / "dense")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "dense", device_map=MAP | {"bert.encoder.layer.1": "disk"}, offload_folder=tmp_path / "disk"
    )
    assert model.bert.encoder.layer[1].output.dense.weight.device.type == "meta"
    pruned = shearling.prune(model, batches_of(3), flops=0.5)
    assert same(pruned, expected)
    assert "offloaded" in caplog.text
    assert model.bert.encoder.layer[1].output.dense.weight.device.type == "meta"
    pruned.save(tmp_path / "small")
    assert not shearling.load(tmp_path / "small").training


def test_weights_that_are_nowhere() -> None:
    with pytest.raises(ModelError, match="meta"):
        shearling.prune(model_of("bert").to("meta"), batches_of(1), flops=0.5)
