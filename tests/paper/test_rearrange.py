"""Eq. 11 against a plain greedy loop, and against every single swap."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shearling.paper.rearrange import rearrange


def block_of(units: int, seed: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(rank or 2 * units, units, generator=generator, dtype=torch.float64)
    return rows.T @ rows / len(rows)


def objective(block: Tensor, kept: Tensor) -> float:
    pruned = torch.ones(len(block), dtype=block.dtype)
    pruned[kept] = 0
    return float(pruned @ block @ pruned)


def greedy_reference(block: Tensor, kept: Tensor) -> list[int]:
    """Every pruned unit in turn, the objective worked out anew for every swap."""
    now = set(kept.tolist())
    queue = sorted(set(range(len(block))) - now, key=lambda i: -float(block[i, i]))
    for i in queue:
        here = objective(block, torch.tensor(sorted(now)))
        swaps = {j: objective(block, torch.tensor(sorted(now - {j} | {i}))) for j in now}
        best = min(swaps, key=lambda j: swaps[j])
        if swaps[best] < here:
            now = now - {best} | {i}
    return sorted(now)


def top(block: Tensor, count: int) -> Tensor:
    return block.diagonal().argsort(descending=True)[:count].sort().values


@settings(deadline=None, max_examples=60)
@given(units=st.integers(2, 9), data=st.data(), seed=st.integers(0, 1000))
def test_equals_the_plain_greedy_loop(units: int, data: st.DataObject, seed: int) -> None:
    block = block_of(units, seed)
    count = data.draw(st.integers(1, units - 1))
    kept = top(block, count)
    (found,) = rearrange([block], [kept])
    assert found.tolist() == greedy_reference(block, kept)


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5), seed=st.integers(0, 1000), data=st.data())
def test_counts_stay_and_the_objective_never_rises(sizes: list[int], seed: int, data: st.DataObject) -> None:
    blocks = [block_of(n, seed + i, rank=3) for i, n in enumerate(sizes)]  # rank-deficient: strong interactions
    kept = [top(b, data.draw(st.integers(0, n))) for b, n in zip(blocks, sizes, strict=True)]
    for block, before, after in zip(blocks, kept, rearrange(blocks, kept), strict=True):
        assert len(after) == len(before) == len(set(after.tolist()))
        assert after.tolist() == sorted(after.tolist())
        assert objective(block, after) <= objective(block, before) + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_one_pruned_unit_makes_the_best_single_swap(seed: int) -> None:
    """With a single unit pruned, greedy is brute force over all masks of that count."""
    block = block_of(6, seed, rank=2)
    (found,) = rearrange([block], [top(block, 5)])
    best = min(objective(block, torch.tensor(c)) for c in combinations(range(6), 5))
    assert objective(block, found) == pytest.approx(best, rel=1e-9)


def test_sublayers_of_one_size_do_not_disturb_each_other() -> None:
    blocks = [block_of(8, seed, rank=4) for seed in range(6)]
    kept = [top(b, count) for b, count in zip(blocks, (1, 3, 4, 5, 7, 8), strict=True)]
    together = rearrange(blocks, kept)
    alone = [rearrange([b], [k])[0] for b, k in zip(blocks, kept, strict=True)]
    assert [t.tolist() for t in together] == [a.tolist() for a in alone]
    assert any(t.tolist() != k.tolist() for t, k in zip(together, kept, strict=True))  # something moved


def test_a_redundant_pair_is_broken_up() -> None:
    """Units 0 and 1 are opposites: pruning both costs nothing, which the diagonal alone cannot see."""
    rows = torch.tensor([[3.0, -3.0, 2.0, 0.1]], dtype=torch.float64)
    block = rows.T @ rows
    (found,) = rearrange([block], [torch.tensor([0, 1])])
    assert objective(block, found) < objective(block, torch.tensor([0, 1]))
