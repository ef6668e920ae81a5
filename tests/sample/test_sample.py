"""Batches of any shape become one sample, whose parts and shards are the same examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from shearling.errors import DataError
from shearling.models.structure import structure_of
from shearling.sample.sample import HELD_OUT, Sample, sample_of, uniform
from tiny import batches_of, model_of


def ids(sample: Sample) -> list[list[int]]:
    return [row for batch in sample for row in batch.inputs["input_ids"].tolist()]


def test_labels_are_set_apart_and_examples_are_numbered() -> None:
    sample = sample_of(batches_of(3, 4))
    assert [b.indices.tolist() for b in sample] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(set(b.inputs) == {"input_ids", "attention_mask"} and set(b.labels) == {"labels"} for b in sample)
    assert sample.examples == 12
    assert sample.has_labels


@pytest.mark.parametrize("form", ["one dict", "BatchEncoding", "numpy", "lists", "generator", "label"])
def test_batches_in_many_forms(form: str) -> None:
    batch = batches_of(1, 4)[0]
    forms: dict[str, Any] = {
        "one dict": batch,
        "BatchEncoding": [transformers.BatchEncoding(batch)],
        "numpy": [{k: v.numpy() for k, v in batch.items()}],
        "lists": [{k: v.tolist() for k, v in batch.items()}],
        "generator": (b for b in [batch]),
        "label": [{"label" if k == "labels" else k: v for k, v in batch.items()}],
    }
    sample = sample_of(forms[form])
    assert ids(sample) == batch["input_ids"].tolist()
    assert sample.batches[0].labels["labels"].tolist() == batch["labels"].tolist()


def test_rows_are_put_together() -> None:
    """What iterating over a data set gives: no batch dimension."""
    batch = batches_of(1, 4)[0]
    rows = [{k: v[i].tolist() for k, v in batch.items()} for i in range(4)]
    sample = sample_of(rows)
    assert [len(b) for b in sample] == [4]
    assert ids(sample) == batch["input_ids"].tolist()
    assert sample.batches[0].labels["labels"].tolist() == batch["labels"].tolist()


def rows_of_lengths(lengths: list[int], *, mask: bool = True) -> list[dict[str, Any]]:
    """Rows as a tokenizer and `map` leave them: lists, a text beside them, a tag for every token."""
    rows = []
    for number, length in enumerate(lengths):
        row: dict[str, Any] = {"input_ids": list(range(1, length + 1)), "labels": [number] * length, "text": "words"}
        rows.append(row | ({"attention_mask": [1] * length} if mask else {}))
    return rows


def test_rows_of_unequal_length_are_padded_and_sorted() -> None:
    sample = sample_of(rows_of_lengths([3, 7, 5, 3]))
    (batch,) = sample
    assert batch.inputs["attention_mask"].sum(1).tolist() == [3, 3, 5, 7]
    assert batch.inputs["input_ids"][0].tolist() == [1, 2, 3, 0, 0, 0, 0]
    assert batch.labels["labels"][2].tolist() == [2] * 5 + [-100] * 2
    assert "text" not in batch.inputs
    assert batch.indices.tolist() == [0, 1, 2, 3]


def test_rows_without_a_mask_are_never_padded() -> None:
    sample = sample_of(rows_of_lengths([3, 7, 5, 3], mask=False))
    assert sorted(tuple(b.inputs["input_ids"].shape) for b in sample) == [(1, 5), (1, 7), (2, 3)]


def test_many_rows_make_several_batches() -> None:
    sample = sample_of(rows_of_lengths([5] * 70), limit=66)
    assert [len(b) for b in sample] == [32, 32, 2]


def test_rows_of_a_data_set_are_drawn_by_the_seed() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"input_ids": [n, n], "attention_mask": [1, 1], "label": 0} for n in range(50)])

    def drawn(seed: int) -> set[int]:
        return {row[0] for row in ids(sample_of(data, limit=10, seed=seed))}

    assert len(drawn(0)) == 10
    assert drawn(0) == drawn(0) != drawn(1)
    assert ids(sample_of(data)) == [[n, n] for n in range(50)]
    images = datasets.Dataset.from_list([{"pixel_values": [[float(n)]], "label": n} for n in range(3)])
    assert sample_of(images).batches[0].inputs["pixel_values"].shape == (3, 1, 1)


@pytest.mark.parametrize("limit", [1, 5, 8, 100])
def test_a_limit_is_kept(limit: int) -> None:
    batches = batches_of(3, 4)
    for data in (batches, sample_of(batches)):
        sample = sample_of(data, limit=limit)
        assert ids(sample) == ids(sample_of(batches))[:limit]


def test_bad_samples_are_told() -> None:
    with pytest.raises(DataError, match="empty"):
        sample_of([])
    with pytest.raises(DataError, match="iterable of batches"):
        sample_of(3)
    with pytest.raises(DataError, match="Batch 1 of the sample is a list"):
        sample_of([batches_of(1)[0], [1, 2]])
    with pytest.raises(DataError, match="do not agree"):
        sample_of([{"input_ids": torch.zeros(2, 3), "attention_mask": torch.zeros(3, 3)}])
    with pytest.raises(DataError, match="'input_ids' of batch 0"):
        sample_of([{"input_ids": ["some", "text"]}])


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), world=st.integers(1, 5))
def test_shards_are_a_partition(sizes: list[int], world: int) -> None:
    sample = sample_of([{"input_ids": torch.randint(0, 99, (n, 3))} for n in sizes])
    shards = [sample.shard(rank, world) for rank in range(world)]
    seen = sorted(int(i) for shard in shards for batch in shard for i in batch.indices)
    assert seen == list(range(sum(sizes)))
    everything = ids(sample)
    for shard in shards:
        for batch in shard:
            assert batch.inputs["input_ids"].tolist() == [everything[i] for i in batch.indices]


def test_halving_keeps_the_examples_in_order() -> None:
    sample = sample_of(batches_of(2, 5))
    halved = sample.halved()
    assert ids(halved) == ids(sample)
    assert [len(b) for b in halved] == [3, 2, 3, 2]
    assert torch.cat([b.indices for b in halved]).tolist() == list(range(10))
    with pytest.raises(DataError, match="single example"):
        sample_of(batches_of(2, 1)).halved()


def test_mean_length() -> None:
    batches = batches_of(3, 4)
    real = sum(int(b["attention_mask"].sum()) for b in batches) / 12
    assert sample_of(batches).mean_length == pytest.approx(real)
    assert sample_of([{"input_ids": torch.zeros(2, 7)}]).mean_length == 7
    assert sample_of([{"pixel_values": torch.zeros(2, 3, 8, 8)}]).mean_length is None


def test_the_fingerprint_sees_every_value() -> None:
    batches = batches_of(2, 4)
    same = sample_of(batches_of(2, 4)).fingerprint
    assert sample_of(batches).fingerprint == same
    batches[1]["labels"][3] += 1
    assert sample_of(batches).fingerprint != same
    assert len(sample_of([{"pixel_values": torch.zeros(2, 3, dtype=torch.bfloat16)}]).fingerprint) == 64


def test_real_tokens() -> None:
    (batch,) = sample_of(batches_of(1, 4, length=6))
    mask = batch.inputs["attention_mask"]
    real = batch.real_tokens("attention_mask", mask.shape)
    assert real is not None
    assert real.tolist() == mask.bool().tolist()
    assert batch.real_tokens("attention_mask", torch.Size((4, 9))) is None  # about other tokens
    assert batch.real_tokens("nothing", mask.shape) is None
    assert batch.part(0, 1).real_tokens("attention_mask", mask[:1].shape) is None  # nothing is padding


def test_one_example_in_eight_is_held_out() -> None:
    sample = sample_of(batches_of(4, 6))
    held = [int(i) for b in sample for i in b.indices[b.held_out()]]
    assert held == [i for i in range(24) if i % HELD_OUT == HELD_OUT - 1]


def test_the_fingerprint_is_of_the_examples_not_of_their_batches() -> None:
    sample = sample_of(batches_of(2, 8))
    assert sample.halved().fingerprint == sample.capped(24).fingerprint == sample.fingerprint
    assert sample_of(batches_of(2, 8, seed=1)).fingerprint != sample.fingerprint
    assert sample.first(15).fingerprint != sample.fingerprint


def test_the_fingerprint_does_not_see_padding() -> None:
    rows = rows_of_lengths([3, 5])
    apart = sample_of([{k: [v] for k, v in row.items() if k != "text"} for row in rows])
    assert len(apart) == 2
    assert sample_of(rows).fingerprint == apart.fingerprint
    assert sample_of(rows_of_lengths([3, 6])).fingerprint != apart.fingerprint


def test_held_out_examples_can_come_last() -> None:
    batch = sample_of(batches_of(1, 20)).batches[0]
    sorted_ = batch.held_out_last()
    assert sorted_.indices.tolist() == [i for i in range(20) if i not in (7, 15)] + [7, 15]
    assert torch.equal(sorted_.inputs["input_ids"], batch.inputs["input_ids"][sorted_.indices])
    assert torch.equal(sorted_.labels["labels"], batch.labels["labels"][sorted_.indices])


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_rows_are_the_real_tokens_of_a_share(padded: bool, last: bool) -> None:
    stack = structure_of(model_of("bert")).stacks[0]
    batch = sample_of(batches_of(1, 9)).batches[0]
    if not padded:
        batch.inputs["attention_mask"].fill_(1)
    batch = batch.held_out_last() if last else batch
    mask = batch.inputs["attention_mask"].bool()
    wanted = {"all": mask, "fit": mask & ~batch.held_out()[:, None], "held out": mask & batch.held_out()[:, None]}
    numbers = torch.arange(mask.numel())
    for share, real in wanted.items():
        rows = stack.rows(batch, mask.shape, share)
        assert numbers[rows].tolist() == numbers[real.flatten()].tolist()
        assert isinstance(rows, slice) == (not padded and (last or share == "all"))


def test_uniform_numbers_depend_on_seed_and_index_alone() -> None:
    one = uniform(torch.tensor([3, 8]), 5, seed=1)
    assert torch.equal(uniform(torch.tensor([8]), 5, seed=1)[0], one[1])
    assert torch.equal(uniform(torch.tensor([8, 3]), 9, seed=1)[:, :5], one.flip(0))
    assert not torch.equal(uniform(torch.tensor([3, 8]), 5, seed=2), one)
    many = uniform(torch.arange(2000), 3, seed=0).numpy()
    assert many.min() >= 0
    assert many.max() < 1
    np.testing.assert_allclose(np.quantile(many, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.02)
    np.testing.assert_allclose(np.corrcoef(many.T), np.eye(3), atol=0.08)
