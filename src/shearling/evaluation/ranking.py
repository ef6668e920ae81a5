"""Metrics of rankings, as fractions, each for one query: NDCG, reciprocal rank, recall; and AUC over all pairs.

`gains` are the grades of what was found, best first; 0 is not relevant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from shearling.evaluation.metrics import ranks

DEPTH = 10  # no metric looks further down


def ndcg(gains: Sequence[float], relevant: Sequence[float], depth: int) -> float:
    """Gains discounted by log2(rank + 1), of the best that could be had from the `relevant` grades."""
    ideal = _discounted(sorted(relevant, reverse=True)[:depth])
    return _discounted(gains[:depth]) / ideal if ideal > 0 else 0.0


def _discounted(gains: Sequence[float]) -> float:
    return float(np.sum(np.asarray(gains, dtype=np.float64) / np.log2(np.arange(2, len(gains) + 2))))


def reciprocal_rank(gains: Sequence[float], depth: int) -> float:
    """1 / rank of the first relevant; 0 where there is none in the first `depth`."""
    return next((1 / rank for rank, gain in enumerate(gains[:depth], start=1) if gain > 0), 0.0)


def recall(gains: Sequence[float], relevant: int, depth: int) -> float:
    """The share of all relevant passages that are among the first `depth`."""
    return sum(gain > 0 for gain in gains[:depth]) / relevant


def auc(positive: ArrayLike, scores: ArrayLike) -> float:
    """The chance that a relevant pair scores above one that is not; ties count half."""
    wanted = np.asarray(positive, dtype=bool)
    count, others = int(wanted.sum()), int((~wanted).sum())
    above = ranks(np.asarray(scores))[wanted].sum() - count * (count + 1) / 2
    return float(above / (count * others))
