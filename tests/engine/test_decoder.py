"""What decoders read: labels shifted by one, or what the model itself writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import tiny_batches, tiny_model
from shearling.engine.decoder import shifted, target_of, with_targets, write
from shearling.sample.read import accepted_by, sample_of


def without_decoder(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if not name.startswith("decoder")}


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "mbart"])
def test_labels_are_shifted_as_the_model_does(family: str) -> None:
    model = tiny_model(family)
    labels = torch.tensor([[7, 8, 9, 2], [11, 2, -100, -100]])
    batch = {name: value[:2] for name, value in without_decoder(tiny_batches(family, 1)[0]).items()}
    sample = with_targets(model, sample_of([batch | {"labels": labels}], accepted=accepted_by(model)))
    (found,) = sample.cut(1000)
    rows = {int(i): row for i, row in zip(found.indices, found.inputs["decoder_input_ids"], strict=True)}
    expected = model.prepare_decoder_input_ids_from_labels(labels=labels)
    assert torch.equal(rows[0], expected[0])
    assert torch.equal(rows[1][:2], expected[1][:2])
    lengths = found.inputs["decoder_attention_mask"].sum(1)[found.indices.argsort()]
    assert lengths.tolist() == [4, 2]


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_missing_targets_are_written_greedily(family: str) -> None:
    """Token by token, the one that the model finds likeliest, computed without any cache."""
    model = tiny_model(family)
    batches = [without_decoder(batch) for batch in tiny_batches(family, 2)]
    sample = with_targets(model, sample_of(batches, accepted=accepted_by(model)))
    assert any("greedily" in note for note in sample.notes)
    for batch in sample.cut(64):
        with torch.no_grad():
            logits = model(**batch.inputs).logits
        for best, read, mask in zip(
            logits.argmax(-1), batch.inputs["decoder_input_ids"], batch.inputs["decoder_attention_mask"], strict=True
        ):
            length = int(mask.sum())
            skipped = 2 if model.generation_config.forced_bos_token_id is not None else 1
            assert torch.equal(best[skipped - 1 : length - 1], read[skipped:length])
    assert sample.fingerprint == with_targets(model, sample).fingerprint, "what is there is not written again"


def test_a_target_ends_with_the_end_token() -> None:
    model = tiny_model("t5")
    model.generation_config.eos_token_id = 1
    read, wanted = target_of(model, torch.tensor([0, 5, 6, 1, 0, 0]))
    assert read.tolist() == [0, 5, 6]
    assert wanted.tolist() == [5, 6, 1]
    read, wanted = target_of(model, torch.tensor([0, 5, 6]))
    assert read.tolist() == [0, 5]
    assert wanted.tolist() == [5, 6]
    batch = without_decoder(tiny_batches("t5", 1)[0])
    assert write(model, batch, 3).shape[1] <= 4
    assert shifted(model, torch.tensor([[5, 6, -100]])).tolist() == [[0, 5, 6]]


def test_models_without_a_decoder_are_left_alone() -> None:
    for family in ("bert", "llama", "bart-classifier", "mt5"):
        sample = sample_of(tiny_batches(family), accepted=accepted_by(tiny_model(family)))
        assert with_targets(tiny_model(family), sample) is sample
