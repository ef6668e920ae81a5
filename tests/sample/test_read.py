"""Batches, rows and loaders of any form become the same examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from shearling.errors import DataError
from shearling.sample.read import Accepted, accepted_by, sample_of
from shearling.sample.sample import Sample
from tiny import batches_of, model_of


def tokens(sample: Sample) -> list[list[int]]:
    """The real tokens of every example, by number."""
    found: dict[int, list[int]] = {}
    for batch in sample.cut(10**6):
        mask = batch.inputs.get("attention_mask", torch.ones_like(batch.inputs["input_ids"]))
        for row, number in enumerate(batch.indices.tolist()):
            found[number] = batch.inputs["input_ids"][row][mask[row].bool()].tolist()
    return [found[number] for number in sorted(found)]


def given(batches: list[dict[str, Tensor]]) -> list[list[int]]:
    return [
        row[mask.bool()].tolist()
        for b in batches
        for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("form", ["one dict", "BatchEncoding", "numpy", "lists", "generator", "label", "rows"])
def test_batches_in_many_forms(form: str) -> None:
    batch = batches_of(1, 4)[0]
    forms: dict[str, Any] = {
        "one dict": batch,
        "BatchEncoding": [transformers.BatchEncoding(batch)],
        "numpy": [{k: v.numpy() for k, v in batch.items()}],
        "lists": [{k: v.tolist() for k, v in batch.items()}],
        "generator": (b for b in [batch]),
        "label": [{"label" if k == "labels" else k: v for k, v in batch.items()}],
        "rows": [{k: v[i].tolist() for k, v in batch.items()} for i in range(4)],
    }
    sample = sample_of(forms[form])
    assert tokens(sample) == given([batch])
    assert sample.groups[0].columns["labels"].values.tolist() == batch["labels"].tolist()


def rows_of_lengths(lengths: list[int], *, mask: bool = True) -> list[dict[str, Any]]:
    """Rows as a tokenizer and `map` leave them: lists, a text beside them, a tag for every token."""
    rows = []
    for number, length in enumerate(lengths):
        row: dict[str, Any] = {"input_ids": list(range(1, length + 1)), "labels": [number] * length, "text": "words"}
        rows.append(row | ({"attention_mask": [1] * length} if mask else {}))
    return rows


def test_rows_of_unequal_length_are_padded_where_a_mask_can_say_so() -> None:
    sample = sample_of(rows_of_lengths([3, 7, 5, 3]), accepted=Accepted(pad=9))
    (batch,) = sample.cut(100)
    assert batch.inputs["attention_mask"].sum(1).tolist() == [7, 5, 3, 3]
    assert batch.inputs["input_ids"][3].tolist() == [1, 2, 3, 9, 9, 9, 9]
    assert batch.labels["labels"][1].tolist() == [2] * 5 + [-100] * 2
    assert "text" not in batch.inputs
    bare = sample_of(rows_of_lengths([3, 7, 5, 3], mask=False))
    assert sorted(tuple(b.inputs["input_ids"].shape) for b in bare.cut(100)) == [(1, 5), (1, 7), (2, 3)]


def test_padding_on_the_left_shifts_the_positions_of_answers() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    batch = {"input_ids": torch.arange(10).view(2, 5), "attention_mask": mask, "start_positions": torch.tensor([3, 1])}
    sample = sample_of([batch])
    assert tokens(sample) == [[2, 3, 4], [5, 6, 7, 8, 9]]
    assert sample.groups[0].columns["start_positions"].values.tolist() == [1, 1]


def test_zeros_inside_a_mask_and_examples_without_a_token_stay() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    sample = sample_of([{"input_ids": torch.arange(8).view(2, 4), "attention_mask": mask}])
    assert sample.groups[0].lengths["attention_mask"].tolist() == [3, 4]
    assert sample.groups[0].columns["attention_mask"].values.tolist() == [1, 0, 1, 0, 0, 0, 0]


def test_encoder_and_decoder_have_lengths_of_their_own() -> None:
    batch = {
        "input_ids": torch.ones(2, 6, dtype=torch.long),
        "attention_mask": torch.tensor([[1] * 6, [1] * 2 + [0] * 4]),
        "decoder_input_ids": torch.ones(2, 4, dtype=torch.long),
        "decoder_attention_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]),
        "labels": torch.ones(2, 4, dtype=torch.long),
    }
    (found,) = sample_of([batch]).cut(100)
    assert found.inputs["attention_mask"].sum(1).tolist() == [6, 2]
    assert found.inputs["decoder_attention_mask"].sum(1).tolist() == [1, 4]
    assert found.labels["labels"].tolist() == [[1, -100, -100, -100], [1] * 4]


def test_labels_of_several_classes_are_no_tokens() -> None:
    batch = {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    sample = sample_of([batch | {"labels": torch.rand(2, 3)}])
    assert sample.groups[0].columns["labels"].values.shape == (2, 3)


def test_what_cannot_be_taken_apart_stays_as_it_came() -> None:
    batches = batches_of(2, 4)
    for batch in batches:
        size = batch["input_ids"].shape[1]
        batch["attention_mask"] = torch.ones(4, 1, size, size)
    sample = sample_of(batches)
    assert [len(b) for b in sample.cut(1000)] == [4, 4]
    assert [len(b) for b in sample.cut(24)] == [2, 2, 2, 2]  # cut between examples, never padded
    assert any("kept as given" in note for note in sample.notes)


def test_flags_about_the_call_are_left_out() -> None:
    """What CLIP's collator adds."""
    batches = [batch | {"return_loss": True} for batch in batches_of(2)]
    assert "return_loss" not in sample_of(batches).inputs


def test_a_head_that_needs_a_padding_token_keeps_its_batches() -> None:
    config = transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=2, num_labels=2)
    model = transformers.GPT2ForSequenceClassification(config)
    assert not accepted_by(model).batches
    model.config.pad_token_id = 0
    assert accepted_by(model).batches
    assert accepted_by(model_of("roberta")).pad == 1


def test_large_loaders_are_drawn_from_without_reading_all() -> None:
    read: list[int] = []

    class Numbers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            read.append(index)
            return {"input_ids": torch.full((3,), index), "attention_mask": torch.ones(3, dtype=torch.long)}

    sample = sample_of(DataLoader(Numbers(), batch_size=7, shuffle=True), limit=20, seed=3)
    assert len(read) == sample.examples == 20
    assert sample.given == 10_000
    assert max(read) > 5000
    assert tokens(sample) == tokens(sample_of(DataLoader(Numbers(), batch_size=2), limit=20, seed=3))
    weighted = DataLoader(Numbers(), batch_size=8, sampler=WeightedRandomSampler([1.0] * 10_000, 64))
    read.clear()
    assert sample_of(weighted, limit=20).examples == 20
    assert len(read) == 64  # its sampler says which examples count


def test_more_batches_than_needed_are_drawn_from_all_of_them() -> None:
    batches = [{"input_ids": torch.full((4, 2), n)} for n in range(50)]
    first, again, other = (sample_of(batches, limit=30, seed=seed) for seed in (0, 0, 1))
    assert tokens(first) == tokens(again) != tokens(other)
    assert first.given == 200
    assert max(map(max, tokens(first))) > 25


def test_a_stream_is_read_only_so_far() -> None:
    def stream() -> Any:
        while True:
            yield batches_of(1, 8)[0]

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return stream()

    for data in (stream(), DataLoader(Stream(), batch_size=None)):
        sample = sample_of(data, limit=4)
        assert sample.examples == 4
        assert any("stream" in note for note in sample.notes)


def test_rows_of_a_data_set_are_drawn_by_the_seed() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"input_ids": [n, n], "attention_mask": [1, 1], "label": 0} for n in range(50)])

    def drawn(seed: int) -> set[int]:
        return {row[0] for row in tokens(sample_of(data, limit=10, seed=seed))}

    assert len(drawn(0)) == 10
    assert drawn(0) == drawn(0) != drawn(1)
    assert tokens(sample_of(data)) == [[n, n] for n in range(50)]
    images = datasets.Dataset.from_list([{"pixel_values": [[float(n)]], "label": n} for n in range(3)])
    assert sample_of(images).some(9).inputs["pixel_values"].shape == (3, 1, 1)


def test_bad_samples_are_told() -> None:
    with pytest.raises(DataError, match="empty"):
        sample_of([])
    with pytest.raises(DataError, match="iterable of batches"):
        sample_of(3)
    with pytest.raises(DataError, match=r"Batch 0 of the sample is a str; .*list\(texts\)"):  # a Series, or a DataFrame
        sample_of(iter(["a text"]))
    with pytest.raises(DataError, match="a DataLoader"):
        sample_of(torch.utils.data.TensorDataset(torch.zeros(2, 3)))
    with pytest.raises(DataError, match="Batch 1 of the sample is a list"):
        sample_of([batches_of(1)[0], [1, 2]])
    with pytest.raises(DataError, match="do not agree"):
        sample_of([{"input_ids": torch.zeros(2, 3), "attention_mask": torch.zeros(3, 3)}])
    with pytest.raises(DataError, match="'input_ids' of batch 0"):
        sample_of([{"input_ids": ["some", "text"]}])
    with pytest.raises(DataError, match="nothing the model can run on; the model takes"):
        sample_of([{"text": torch.zeros(2)}], accepted=accepted_by(model_of("bert")))
