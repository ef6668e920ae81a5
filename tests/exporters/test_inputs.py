from __future__ import annotations

import pytest
import torch

from data.tiny import bert_tokenizer
from families import tiny_model
from shearling.exporters.graph import axes, reference
from shearling.exporters.inputs import inputs_from_tokenizer
from tiny import model_of


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt2", {"input_ids", "attention_mask"}),
        ("t5", {"input_ids", "attention_mask", "decoder_input_ids"}),
        ("vit", {"pixel_values"}),
        ("wav2vec2", {"input_values"}),
        ("whisper", {"input_features", "decoder_input_ids"}),
        ("clip", {"input_ids", "attention_mask", "pixel_values"}),
    ],
)
def test_every_kind_of_model_gets_inputs_it_can_run_on(family: str, names: set[str]) -> None:
    model = tiny_model(family)
    batches = inputs_from_tokenizer(model, None)
    assert set(batches[0]) == names
    sizes = {len(next(iter(batch.values()))) for batch in batches}
    assert 1 in sizes  # one example alone
    assert len(sizes) > 1
    assert all(value.isfinite().all() for outputs in reference(model, batches) for value in outputs.values())


def test_sentences_fit_the_model_and_differ_in_length() -> None:
    model = model_of("bert")
    batches = inputs_from_tokenizer(model, bert_tokenizer())
    assert all(batch["input_ids"].shape[1] <= model.config.max_position_embeddings for batch in batches)
    assert any((batch["attention_mask"] == 0).any() for batch in batches)


def test_axes_that_vary() -> None:
    inputs = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "decoder_input_ids": torch.ones(2, 4, dtype=torch.long),
        "pixel_values": torch.ones(2, 3, 8, 8),
    }
    assert axes(inputs) == {
        "input_ids": {0: "batch", 1: "length"},
        "decoder_input_ids": {0: "batch", 1: "decoder_length"},
        "pixel_values": {0: "batch"},
    }
