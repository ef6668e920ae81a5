"""A sample is a set of examples: how they were batched and padded leaves no trace, and every cut has all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shearling.models.structure import structure_of
from shearling.sample.batch import HELD_OUT, uniform
from shearling.sample.read import sample_of
from shearling.sample.sample import Sample
from tiny import as_run, batches_of, model_of


def examples(sample: Sample, tokens: int = 1000, multiple: int = 1) -> dict[int, list[int]]:
    """By number, the real tokens of every example, read from the batches of a cut."""
    found = {}
    for batch in sample.cut(tokens, multiple=multiple):
        for row, number in enumerate(batch.indices.tolist()):
            real = batch.inputs["attention_mask"][row].bool()
            found[number] = batch.inputs["input_ids"][row][real].tolist()
    return found


def padded(lengths: list[int], size: int, side: str, width: int = 3) -> list[dict[str, Tensor]]:
    """Batches of examples 1, 2, 3, ...: as many tokens as their length says, each its number, padding 0."""
    batches = []
    for start in range(0, len(lengths), size):
        part = lengths[start : start + size]
        wide = max(part) + width
        ids, mask = torch.zeros(len(part), wide, dtype=torch.long), torch.zeros(len(part), wide, dtype=torch.long)
        for row, length in enumerate(part):
            at = slice(wide - length, wide) if side == "left" else slice(length)
            ids[row, at] = start + row + 1
            mask[row, at] = 1
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    size=st.integers(1, 12),
    side=st.sampled_from(["left", "right"]),
    tokens=st.integers(1, 60),
    multiple=st.sampled_from([1, 4]),
)
def test_any_batches_make_the_same_sample(lengths: list[int], size: int, side: str, tokens: int, multiple: int) -> None:
    sample = sample_of(padded(lengths, size, side))
    assert examples(sample, tokens, multiple) == {n: [n + 1] * length for n, length in enumerate(lengths)}
    assert sample.fingerprint == sample_of(padded(lengths, 1, "right", width=0)).fingerprint
    assert sample.mean_length == pytest.approx(np.mean(lengths))


def test_the_batches_of_a_cut() -> None:
    sample = sample_of(padded([3, 9, 5, 8, 2], 2, "right"))
    batches = sample.cut(18)
    assert [tuple(b.inputs["input_ids"].shape) for b in batches] == [(2, 9), (3, 5)]  # the longest first
    assert [b.indices.tolist() for b in batches] == [[1, 3], [2, 0, 4]]
    assert tuple(sample.cut(1)[0].inputs["input_ids"].shape) == (1, 9)
    rounded = sample.cut(18, multiple=4)
    assert {b.inputs["input_ids"].shape[1] for b in rounded} <= {9, 8, 4}  # never beyond the longest example


def test_the_longest_of_several_kinds_come_first() -> None:
    """Whether all hidden states fit is estimated from the first batch."""
    short = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    long = {"input_ids": torch.ones(2, 7, dtype=torch.long), "token_type_ids": torch.zeros(2, 7, dtype=torch.long)}
    sample = sample_of([short, long])
    assert len(sample.groups) == 2
    assert [b.inputs["input_ids"].shape[1] for b in sample.cut(14)] == [7, 3]


def test_labels_travel_with_their_examples() -> None:
    batches = batches_of(3, 4)
    sample = sample_of(batches)
    wanted = torch.cat([b["labels"] for b in batches])
    for batch in sample.cut(30):
        assert torch.equal(batch.labels["labels"], wanted[batch.indices])
    assert sample.examples == 12
    assert sample.has_labels
    assert sample.inputs == {"input_ids", "attention_mask"}


def test_drawn_examples_come_from_everywhere_and_depend_on_the_seed() -> None:
    sample = sample_of(padded(list(range(1, 65)), 8, "right"))  # sorted by length, as loaders may be
    drawn = sample.drawn(16, seed=0)
    assert drawn.examples == 16
    assert examples(drawn) == examples(sample.drawn(16, seed=0))
    assert examples(drawn) != examples(sample.drawn(16, seed=1))
    assert 20 < (drawn.mean_length or 0) < 45  # not the shortest ones
    assert examples(drawn).items() <= examples(sample).items()
    rest = sample.without(drawn)
    assert examples(rest) | examples(drawn) == examples(sample)
    assert rest.examples == 48
    assert sample.drawn(64, 0) is sample


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), world=st.integers(1, 5))
def test_shards_are_a_partition(sizes: list[int], world: int) -> None:
    sample = sample_of([{"input_ids": torch.randint(0, 99, (n, 3))} for n in sizes])
    seen = [int(i) for rank in range(world) for b in sample.shard(rank, world).cut(6) for i in b.indices]
    assert sorted(seen) == list(range(sum(sizes)))


def test_mean_length() -> None:
    assert sample_of([{"input_ids": torch.zeros(2, 7, dtype=torch.long)}]).mean_length == 7
    assert sample_of([{"pixel_values": torch.zeros(2, 3, 8, 8)}]).mean_length is None
    sound = {"input_values": torch.zeros(2, 4000), "attention_mask": torch.ones(2, 4000, dtype=torch.long)}
    assert sample_of([sound]).mean_length is None  # the mask counts samples of sound


def test_the_fingerprint_sees_every_value() -> None:
    batches = batches_of(2, 4)
    same = sample_of(batches_of(2, 4)).fingerprint
    assert sample_of(batches).fingerprint == same
    batches[1]["labels"][3] += 1
    assert sample_of(batches).fingerprint != same
    assert sample_of(batches_of(2, 4)).drawn(7, 0).fingerprint != same
    assert len(sample_of([{"pixel_values": torch.zeros(2, 3, dtype=torch.bfloat16)}]).fingerprint) == 64


def test_real_tokens() -> None:
    (batch,) = as_run(batches_of(1, 4, length=6))
    mask = batch.inputs["attention_mask"]
    real = batch.real_tokens("attention_mask", mask.shape)
    assert real is not None
    assert real.tolist() == mask.bool().tolist()
    assert batch.real_tokens("attention_mask", torch.Size((4, 9))) is None  # about other tokens
    assert batch.real_tokens("nothing", mask.shape) is None
    assert batch.pick(torch.tensor([0])).real_tokens("attention_mask", mask[:1].shape) is None  # nothing is padding


def test_one_example_in_eight_is_held_out() -> None:
    held = [int(i) for b in sample_of(batches_of(4, 6)).cut(50) for i in b.indices[b.held_out()]]
    assert sorted(held) == [i for i in range(24) if i % HELD_OUT == HELD_OUT - 1]


def test_held_out_examples_can_come_last() -> None:
    (batch,) = as_run(batches_of(1, 20))
    sorted_ = batch.held_out_last()
    assert sorted_.indices.tolist() == [i for i in range(20) if i not in (7, 15)] + [7, 15]
    assert torch.equal(sorted_.inputs["input_ids"], batch.inputs["input_ids"][sorted_.indices])
    assert torch.equal(sorted_.labels["labels"], batch.labels["labels"][sorted_.indices])


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_rows_are_the_real_tokens_of_a_share(padding: bool, last: bool) -> None:
    stack = structure_of(model_of("bert")).stacks[0]
    batches = batches_of(1, 9)
    if not padding:
        batches[0]["attention_mask"].fill_(1)
    (batch,) = as_run(batches)
    batch = batch.held_out_last() if last else batch
    mask = batch.inputs["attention_mask"].bool()
    wanted = {"all": mask, "fit": mask & ~batch.held_out()[:, None], "held out": mask & batch.held_out()[:, None]}
    numbers = torch.arange(mask.numel())
    for share, real in wanted.items():
        rows = stack.rows(batch, mask.shape, share)
        assert numbers[rows].tolist() == numbers[real.flatten()].tolist()
        assert isinstance(rows, slice) == (not padding and (last or share == "all"))


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
