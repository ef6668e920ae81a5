"""What checkpoints carry: models that are built in their shapes, copied whole, and saved with what they need."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from families import outputs_of, tiny_batches, tiny_model
from shearling.models import modeling_shearling
from shearling.models.shrink import edits_of, shrink
from shearling.models.structure import structure_of

PICKING = ("mpnet", "beit", "t5")  # cores that are handed a tensor with a slice for each head of the dense model


def smaller(family: str, empty: tuple[int, ...] = ()) -> Any:
    """About half the units of every sublayer, the last ones; none in the sublayers named as empty."""
    model = tiny_model(family)
    kept = []
    for number, sublayer in enumerate(structure_of(model).sublayers):
        first = sublayer.units - sublayer.floor if number in empty else sublayer.units // 2
        kept.append(torch.arange(first, sublayer.units))
    return shrink(model, kept)


def replica_of(model: nn.Module, factor: float) -> Any:
    """What `torch.nn.DataParallel` puts on another device: here on the same one, with other values."""
    copies = {id(module): module._replicate_for_data_parallel() for module in model.modules()}
    values: dict[int, torch.Tensor] = {}
    for module in model.modules():
        replica = copies[id(module)]
        for name, child in module._modules.items():
            if child is not None:
                setattr(replica, name, copies[id(child)])
        for name, parameter in module._parameters.items():
            value = None if parameter is None else values.setdefault(id(parameter), parameter.detach() * factor)
            setattr(replica, name, value)
    return copies[id(model)]


@pytest.mark.parametrize("family", PICKING)
def test_a_replica_uses_its_own_parameters(family: str) -> None:
    small, batch = smaller(family), tiny_batches(family, 1)[0]
    scaled = copy.deepcopy(small)
    with torch.no_grad():
        for parameter in scaled.parameters():
            parameter.mul_(1.5)
    expected = outputs_of(scaled, batch)
    assert not torch.allclose(expected, outputs_of(small, batch), rtol=1e-3)
    replica = replica_of(small, 1.5)
    torch.testing.assert_close(outputs_of(replica, batch), expected)


@pytest.mark.parametrize("family", PICKING)
@pytest.mark.parametrize("empty", [(), (0,)])
def test_copies_and_pickles_give_the_same(family: str, empty: tuple[int, ...]) -> None:
    small, batch = smaller(family, empty), tiny_batches(family, 1)[0]
    expected = outputs_of(small, batch)
    for again in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(outputs_of(again, batch), expected)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        assert torch.equal(outputs_of(small, batch), expected)  # nothing of the copy is the model's


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bart", *PICKING])
def test_a_model_is_built_in_the_shapes_of_its_configuration(family: str) -> None:
    """As tools do that build a model first and fill it later; what they do not fill is initialised, not garbage."""
    small, batch = smaller(family, empty=(1,)), tiny_batches(family, 1)[0]
    built = type(small)(copy.deepcopy(small.config))
    assert {name: p.shape for name, p in built.named_parameters()} == {
        name: p.shape for name, p in small.named_parameters()
    }
    assert all(p.isfinite().all() and p.abs().sum() < 1e4 for p in built.parameters())
    built.load_state_dict(small.state_dict())
    assert torch.equal(outputs_of(built.eval(), batch), outputs_of(small, batch))


def test_projections_into_nothing_are_gone() -> None:
    """A matrix without rows is nothing that quantisers can handle."""
    small = smaller("bert", empty=(0, 1))
    assert all(min(m.weight.shape) > 0 for m in small.modules() if isinstance(m, nn.Linear))
    assert len(edits_of(small)["dropped"]) == 4  # query, key, value; intermediate


def test_saving_adds_the_notice_and_the_file(tmp_path: Path) -> None:
    small = smaller("bert")
    small.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["transformers_weights"] == modeling_shearling.NOTICE
    assert not hasattr(small.config, "transformers_weights")
    assert not (tmp_path / "plain" / "modeling_shearling.py").exists()  # nothing points to it
    small.config.auto_map = {"AutoModel": "modeling_shearling.AutoModel"}
    small.save_pretrained(tmp_path / "mapped")
    ours = Path(modeling_shearling.__file__).read_bytes()
    assert (tmp_path / "mapped" / "modeling_shearling.py").read_bytes() == ours
    tiny_model("bert").save_pretrained(tmp_path / "dense")
    assert "shearling" not in (tmp_path / "dense" / "config.json").read_text()


def test_registering_twice_changes_nothing_and_a_newer_file_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    before: Any = transformers.PreTrainedModel.post_init
    modeling_shearling.register()
    assert transformers.PreTrainedModel.post_init is before
    monkeypatch.setattr(transformers.PreTrainedModel, "post_init", before)
    monkeypatch.setattr(transformers.PreTrainedConfig, "to_json_file", transformers.PreTrainedConfig.to_json_file)
    monkeypatch.setattr(modeling_shearling, "VERSION", modeling_shearling.VERSION + 1)
    modeling_shearling.register()
    newer: Any = transformers.PreTrainedModel.post_init
    assert newer is not before
    assert newer.stock is before.stock


def test_shapes_of_a_newer_version_are_refused() -> None:
    config = copy.deepcopy(smaller("bert").config)
    config.shearling["version"] += 1
    with pytest.raises(ValueError, match="newer version"):
        transformers.BertModel(config)
