"""Alg. 1 and Alg. 2 against every possible choice of units."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shearling.errors import ConstraintError
from shearling.paper.search import Piecewise, Prices, search


def drawn(layers: int, units: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(units, generator=generator, dtype=torch.float64) for _ in range(layers)]


def spent(prices: Prices, heads: Sequence[Any], filters: Sequence[Any]) -> float:
    return sum(prices.head(len(k)) for k in heads) + sum(prices.filter(len(k)) for k in filters)


def worth(importances: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> float:
    return sum(float(i[k].sum()) for i, k in zip(importances, kept, strict=True))


def best_by_brute_force(
    heads: Sequence[torch.Tensor], filters: Sequence[torch.Tensor], prices: Sequence[Prices]
) -> float:
    """The most importance within every budget, over all masks that keep the thresholds of Alg. 2."""
    everything = [*heads, *filters]
    kinds = ["head"] * len(heads) + ["filter"] * len(filters)
    floors = {kind: max(getattr(p, kind).threshold for p in prices) for kind in ("head", "filter")}
    options = []
    for kind, importance in zip(kinds, everything, strict=True):
        masks = [np.array(mask) for mask in product((0, 1), repeat=len(importance))]
        options.append([m for m in masks if m.sum() >= min(floors[kind], len(importance))])
    best = -np.inf
    for choice in product(*options):
        costs = (
            sum(getattr(p, kind)(int(mask.sum())) for kind, mask in zip(kinds, choice, strict=True)) for p in prices
        )
        if all(cost <= p.budget * (1 + 1e-9) for cost, p in zip(costs, prices, strict=True)):
            best = max(best, sum(float(mask @ i.numpy()) for mask, i in zip(choice, everything, strict=True)))
    return best


@settings(deadline=None, max_examples=30)
@given(
    ratio=st.floats(0.01, 1.0),
    head=st.floats(0.5, 9.0),
    filter_=st.floats(0.1, 2.0),
    seed=st.integers(0, 1000),
)
def test_alg_1_is_optimal(ratio: float, head: float, filter_: float, seed: int) -> None:
    heads, filters = drawn(2, 2, seed), drawn(2, 3, seed + 1)
    prices = Prices(Piecewise(head), Piecewise(filter_), ratio * (4 * head + 6 * filter_))
    kept = search(heads, filters, [prices])
    assert spent(prices, *kept) <= prices.budget * (1 + 1e-9)
    found = worth(heads, kept[0]) + worth(filters, kept[1])
    assert found == pytest.approx(best_by_brute_force(heads, filters, [prices]), abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    ratio=st.floats(0.3, 1.0),
    overheads=st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)),
    thresholds=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    seed=st.integers(0, 1000),
)
def test_alg_2_is_optimal(ratio: float, overheads: tuple[float, float], thresholds: tuple[int, int], seed: int) -> None:
    heads, filters = drawn(2, 2, seed), drawn(2, 3, seed + 1)
    head, filter_ = (Piecewise(s, c, t) for s, c, t in zip((2.0, 0.7), overheads, thresholds, strict=True))
    dense = 2 * head(2) + 2 * filter_(3)
    prices = Prices(head, filter_, ratio * dense)
    expected = best_by_brute_force(heads, filters, [prices])
    if expected == -np.inf:
        with pytest.raises(ConstraintError, match="fixed costs"):
            search(heads, filters, [prices])
        return
    kept = search(heads, filters, [prices])
    assert spent(prices, *kept) <= prices.budget * (1 + 1e-9)
    assert worth(heads, kept[0]) + worth(filters, kept[1]) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(ratio=st.floats(0.3, 1.0), overheads=st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0)))
def test_an_overhead_without_a_threshold_is_still_paid(ratio: float, overheads: tuple[float, float]) -> None:
    heads, filters = drawn(2, 2, 0), drawn(2, 3, 1)
    head, filter_ = Piecewise(2.0, overheads[0]), Piecewise(0.7, overheads[1])
    prices = Prices(head, filter_, ratio * (2 * head(2) + 2 * filter_(3)))
    if 2 * sum(overheads) > prices.budget * (1 + 1e-9):
        with pytest.raises(ConstraintError, match="fixed costs"):
            search(heads, filters, [prices])
    else:
        assert spent(prices, *search(heads, filters, [prices])) <= prices.budget * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
@given(ratios=st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)), seed=st.integers(0, 1000))
def test_several_budgets_at_once(ratios: tuple[float, float], seed: int) -> None:
    heads, filters = drawn(2, 2, seed), drawn(2, 3, seed + 1)
    slopes = ((3.0, 0.5), (1.0, 1.0))
    prices = [Prices(Piecewise(h), Piecewise(f), r * (4 * h + 6 * f)) for (h, f), r in zip(slopes, ratios, strict=True)]
    kept = search(heads, filters, prices)
    assert all(spent(p, *kept) <= p.budget * (1 + 1e-9) for p in prices)
    found = worth(heads, kept[0]) + worth(filters, kept[1])
    assert found == pytest.approx(best_by_brute_force(heads, filters, prices), abs=1e-12)


@settings(deadline=None, max_examples=100)
@given(ratio=st.floats(0.0, 1.0, exclude_min=True), length=st.floats(1.0, 512.0), seed=st.integers(0, 9))
def test_never_over_budget_with_prices_of_a_real_model(ratio: float, length: float, seed: int) -> None:
    heads, filters = drawn(3, 4, seed), drawn(3, 40, seed + 1)
    head, filter_ = 4 * length * 384 * 32 + 2 * length**2 * 32, 2 * length * 384
    prices = Prices(Piecewise(head), Piecewise(filter_), ratio * (12 * head + 120 * filter_))
    kept = search(heads, filters, [prices])
    assert spent(prices, *kept) <= prices.budget * (1 + 1e-9)
    left = prices.budget - spent(prices, *kept)
    assert left < filter_ or sum(map(len, kept[1])) == 120  # nothing affordable is left out


@settings(deadline=None, max_examples=100)
@given(length=st.floats(1.0, 512.0))
def test_the_whole_budget_keeps_every_unit(length: float) -> None:
    """Rounding must not cost a unit when all of them fit exactly."""
    heads, filters = drawn(3, 4, 0), drawn(3, 40, 1)
    head, filter_ = 4 * length * 384 * 32 + 2 * length**2 * 32, 2 * length * 384
    tables = [np.arange(5) * head] * 3 + [np.arange(41) * filter_] * 3
    prices = Prices(Piecewise(head), Piecewise(filter_), float(sum(t[-1] for t in tables)))
    kept = search(heads, filters, [prices])
    assert [len(k) for k in (*kept[0], *kept[1])] == [4] * 3 + [40] * 3


def test_kept_units_are_the_most_important_of_their_layer() -> None:
    heads, filters = drawn(3, 4, 5), drawn(3, 10, 6)
    prices = Prices(Piecewise(2.0), Piecewise(1.0), 25.0)
    for importances, kept in zip((heads, filters), search(heads, filters, [prices]), strict=True):
        for importance, units in zip(importances, kept, strict=True):
            assert units.tolist() == sorted(importance.argsort(descending=True)[: len(units)].tolist())


def test_layers_may_differ_in_size_and_be_empty() -> None:
    heads = [torch.tensor([1.0, 5.0]), torch.zeros(0), torch.tensor([3.0])]
    filters = [torch.tensor([2.0]), torch.zeros(0), torch.tensor([0.1, 4.0])]
    kept = search(heads, filters, [Prices(Piecewise(1.0), Piecewise(1.0), 3.0)])
    assert [k.tolist() for k in kept[0]] == [[1], [], [0]]
    assert [k.tolist() for k in kept[1]] == [[], [], [1]]


def test_bert_base_takes_milliseconds() -> None:
    import time

    heads, filters = drawn(12, 12, 0), drawn(12, 3072, 1)
    prices = Prices(Piecewise(64.0 * 768 * 4), Piecewise(2.0 * 768), 12 * 768.0 * 4 * 768)
    search(heads, filters, [prices])
    start = time.process_time()
    search(heads, filters, [prices])
    assert time.process_time() - start < 0.5
