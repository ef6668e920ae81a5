"""Metrics of rankings against scikit-learn, and against their definitions written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shearling.evaluation.metrics import auc, ndcg, recall, reciprocal_rank

grades = st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]), min_size=2, max_size=25).filter(lambda g: max(g) > 0)


@settings(deadline=None)  # the first call imports scikit-learn
@given(grades, st.integers(0, 10**6))
def test_ndcg_and_auc_agree_with_scikit_learn(gold: list[float], seed: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    scores = np.random.default_rng(seed).permutation(len(gold)).astype(float)
    ordered = [gold[i] for i in np.argsort(-scores)]
    assert ndcg(ordered, gold, 10) == pytest.approx(sklearn.ndcg_score([gold], [scores], k=10))
    positive = np.array(gold) > 0
    if not positive.all():
        assert auc(positive, scores) == pytest.approx(sklearn.roc_auc_score(positive, scores))


def test_auc_counts_ties_half() -> None:
    assert auc([1, 1, 0, 0], [2.0, 1.0, 1.0, 0.0]) == pytest.approx((1 + 1 + 0.5 + 1) / 4)


@given(grades)
def test_rank_and_recall_as_they_are_defined(gains: list[float]) -> None:
    relevant = sum(gain > 0 for gain in gains)
    first = next(i for i, gain in enumerate(gains) if gain > 0)
    assert reciprocal_rank(gains, 10) == (1 / (first + 1) if first < 10 else 0)
    for depth in (1, 10):
        assert recall(gains, relevant, depth) == len([g for g in gains[:depth] if g]) / relevant


def test_a_perfect_ranking_and_an_empty_one() -> None:
    assert ndcg([2, 1, 0], [1, 2], 10) == pytest.approx(1)
    assert ndcg([0, 0], [1], 10) == reciprocal_rank([0, 0], 10) == recall([0, 0], 1, 10) == 0
