"""Stock shapes of every family: cut, saved and loaded by the family's own class, with the same outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from families import FAMILIES, MAIN, outputs_of, slow, tiny_batches, tiny_model
from shearling.errors import CheckFailed, UnsupportedArchitecture
from shearling.models.shrink import Cut, shrink
from shearling.models.stock import all_layers, check_ordinary, check_stock, dials_of, removable_layers, without_layers
from shearling.models.structure import Structure, structure_of
from shearling.sample.read import sample_of
from shearling.verify import check_cut
from tiny import inputs_of

NEVER = {"swin", "swin-padded"}
HEADS = {"llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "phi3", "gemma2", "gemma3"}


def smallest_cut(dense: Structure) -> Cut:
    """A third of every dial, at random, without the first layer that may go of each stack."""
    layers = list(all_layers(dense))
    for stack in range(len(layers)):
        gone = next((layer for at, layer in removable_layers(dense) if at == stack), None)
        layers[stack] = tuple(layer for layer in layers[stack] if layer != gone)
    generator = torch.Generator().manual_seed(0)
    kept = [torch.empty(0)] * len(dense.sublayers)
    for dial in dials_of(dense):
        count = dial.counts[len(dial.counts) // 3]
        for number in dial.sublayers:
            kept[number] = torch.randperm(dense.sublayers[number].units, generator=generator)[:count].sort().values
    return Cut(kept, tuple(layers))


@pytest.mark.parametrize("name", [n if n in MAIN else slow(n) for n in sorted(FAMILIES.keys() - NEVER)])
def test_loads_with_the_familys_own_class(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    dense = structure_of(model)
    check_stock(dense)
    cut = smallest_cut(dense)
    student = cut.student(dense)
    batches = tiny_batches(name)
    check_cut(cut.teacher(dense), student, cut.units_of(student, dense), sample_of(batches))
    student.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"shearling", "auto_map", "quantization_config", "transformers_weights"} & config.keys()
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    inputs = inputs_of(batches[0])
    torch.testing.assert_close(outputs_of(loaded.eval(), inputs), outputs_of(student.model.eval(), inputs))


@pytest.mark.parametrize("name", sorted(NEVER))
def test_families_that_cannot_be_stock_say_why(name: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match="has no stock shapes: its configuration gives the width"):
        check_stock(structure_of(tiny_model(name)))


@pytest.mark.parametrize("name", ["bert", "mpnet", "t5", "gpt2", *sorted(HEADS)])
def test_heads_go_only_where_the_configuration_can_tell(name: str) -> None:
    heads = [dial for dial in dials_of(structure_of(tiny_model(name))) if dial.kind == "heads"]
    assert [len(dial.counts) > 1 for dial in heads] == [name in HEADS] * len(heads)


def test_stacks_that_read_one_field_share_a_dial() -> None:
    t5, bart = (dials_of(structure_of(tiny_model(name))) for name in ("t5", "bart"))
    assert [len(dial.sublayers) for dial in t5 if dial.kind == "filters"] == [4]
    assert [len(dial.sublayers) for dial in bart if dial.kind == "filters"] == [2, 2]


def test_widths_that_are_a_multiple_of_the_hidden_size() -> None:
    widths = {
        name: next(dial.counts for dial in dials_of(structure_of(tiny_model(name))) if dial.kind == "filters")
        for name in ("dinov2", "dinov2-gated")
    }
    assert widths["dinov2"] == (32, 64)
    assert len(widths["dinov2-gated"]) == 1  # rounded from the ratio: it stays


def test_layers_stay_where_inner_features_are_read() -> None:
    model = tiny_model("dinov2")
    assert removable_layers(structure_of(model))
    model.config.set_output_features_output_indices(out_features=["stage1"], out_indices=None)
    assert not removable_layers(structure_of(model))


def test_head_counts_that_the_configuration_refuses_are_left_out() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8, head_dim=4,
                         intermediate_size=16, vocab_size=60)  # fmt: skip
    heads = next(d for d in dials_of(structure_of(LlamaForCausalLM(config))) if d.kind == "heads")
    assert heads.counts == (1, 2, 4, 8)  # the hidden size has to be a multiple


def test_a_model_of_uneven_layers_has_no_stock_shape() -> None:
    model = tiny_model("bert")
    kept = [torch.arange(s.units - number % 2) for number, s in enumerate(structure_of(model).sublayers)]
    with pytest.raises(UnsupportedArchitecture, match="pruned to uneven layers before; start from the dense model"):
        check_stock(structure_of(shrink(model, kept)))


def test_weights_that_the_configuration_does_not_make_are_found() -> None:
    model = tiny_model("bert")
    model.config.intermediate_size -= 1
    with pytest.raises(CheckFailed, match=r"intermediate\.dense\.bias' has the shape \(48,\)"):
        check_ordinary(model)


def test_a_copy_without_layers_shares_its_weights() -> None:
    dense = structure_of(tiny_model("llama"))

    def held(model: Any) -> set[int]:
        return {p.data_ptr() for p in model.parameters()}

    assert held(without_layers(dense, ((1,),)).model) < held(dense.model)
    assert len(dense.stacks[0].layers) == dense.model.config.num_hidden_layers == 2
