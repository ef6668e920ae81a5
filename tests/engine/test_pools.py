"""Pools hold every example once, whole, in a few shapes."""

from __future__ import annotations

import pytest
import torch

from families import tiny_batches
from shearling.engine.pools import SHAPES, STEP, pools_of
from shearling.sample.sample import sample_of

CPU = torch.device("cpu")


def texts(count: int, longest: int) -> list[dict[str, torch.Tensor]]:
    """Batches of random texts, padded further than they need."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        lengths = torch.randint(1, longest + 1, (6,), generator=generator)
        mask = (torch.arange(longest + 3) < lengths[:, None]).long()
        ids = torch.randint(5, 60, mask.shape, generator=generator) * mask
        batches.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2})
    return batches


@pytest.mark.parametrize("longest", [5, 40, 200])
def test_every_example_once_and_whole(longest: int) -> None:
    batches = texts(9, longest)
    pools = pools_of(sample_of(batches), CPU)
    assert len(pools) <= SHAPES["cpu"]
    found = {}
    for pool in pools:
        assert sorted([*pool.fit.tolist(), *pool.judging.tolist()]) == pool.places.tolist()
        picked = pool.pick(pool.places)
        for row, index in enumerate(pool.examples.indices.tolist()):
            assert (row in pool.judging.tolist()) == (index % 8 == 7)
            real = picked.inputs["attention_mask"][row].bool()
            assert real.shape[0] - int(real.sum()) < pool.tokens
            found[index] = (picked.inputs["input_ids"][row][real], picked.inputs["token_type_ids"][row][real])
    wanted = [(ids[mask.bool()], types[mask.bool()]) for b in batches for ids, mask, types in
              zip(b["input_ids"], b["attention_mask"], b["token_type_ids"], strict=True)]  # fmt: skip
    assert sorted(found) == list(range(len(wanted)))
    for index, expected in enumerate(wanted):
        for a, b in zip(found[index], expected, strict=True):
            assert torch.equal(a, b)


def test_padding_is_little_and_never_beyond_the_longest() -> None:
    batches = texts(20, 45)
    pools = pools_of(sample_of(batches), CPU)
    assert max(pool.tokens for pool in pools) <= 45
    padded = sum(pool.tokens * len(pool.examples) for pool in pools)
    real = sum(int(b["attention_mask"].sum()) for b in batches)
    assert padded < real + STEP * 120


@pytest.mark.parametrize("family", ["vit", "t5", "whisper"])
def test_what_cannot_be_cut_keeps_its_shape(family: str) -> None:
    batches = tiny_batches(family)
    (pool,) = pools_of(sample_of(batches), CPU)
    for name, value in pool.examples.inputs.items():
        assert torch.equal(value, torch.cat([b[name] for b in batches]))
