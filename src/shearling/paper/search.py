"""Mask search (Alg. 1 and Alg. 2): which units to keep if importances are additive.

Alg. 1 is Alg. 2 with no overhead and no threshold, so one function serves both. Vectorised: one sort, one cumulative
sum, all numbers of heads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shearling.costs import Piecewise
from shearling.errors import ConstraintError

SLACK = 1e-12  # relative: allows for rounding where units fill the budget exactly


@dataclass(frozen=True)
class Prices:
    """One constraint: the cost of heads and filters, and the budget C."""

    head: Piecewise
    filter: Piecewise
    budget: float


def search(heads: Sequence[Tensor], filters: Sequence[Tensor], prices: Sequence[Prices]) -> list[list[Tensor]]:
    """[heads, filters], each with the kept units per layer (ascending), of maximum importance within every budget.

    `heads` and `filters` hold each layer's importances. With Alg. 2, every layer keeps at least its threshold at the
    cost of the overhead; the other units compete.
    """
    head_floor = max(p.head.threshold for p in prices)
    filter_floor = max(p.filter.threshold for p in prices)
    free_heads, free_filters = _Free(heads, head_floor), _Free(filters, filter_floor)  # Alg. 2, lines 1-4

    n = np.arange(len(free_heads) + 1)  # remaining heads beyond the floors
    f = np.full(len(n), len(free_filters), dtype=np.int64)
    for p in prices:
        fixed = free_heads.fixed(p.head) + free_filters.fixed(p.filter)
        left = p.budget * (1 + SLACK) - fixed - n * p.head.slope  # Alg. 2, lines 5 and 8
        affordable = np.floor(left / p.filter.slope) if p.filter.slope else np.where(left >= 0, np.inf, -1)
        f = np.minimum(f, np.clip(affordable, -1, len(free_filters)).astype(np.int64))
    feasible = f >= 0
    if not feasible.any():
        raise ConstraintError("The fixed costs of the layers alone exceed the budget; ask for more.")
    kept = free_heads.sums[n] + free_filters.sums[np.maximum(f, 0)]  # Alg. 2, line 12
    best = int(np.argmax(np.where(feasible, kept, -np.inf)))  # Alg. 1, line 10
    return [free_heads.take(best), free_filters.take(int(f[best]))]


class _Free:
    """The units of one kind in all layers: each layer keeps its floor, the rest are sorted by importance."""

    def __init__(self, importances: Sequence[Tensor], floor: int) -> None:
        values = [i.double().cpu().numpy() for i in importances]
        ranked = [np.argsort(-v, kind="stable") for v in values]
        self.kept = [r[:floor] for r in ranked]
        self.sizes = [len(r) for r in ranked]
        layers = np.concatenate([np.full(len(r[floor:]), layer) for layer, r in enumerate(ranked)])
        units = np.concatenate([r[floor:] for r in ranked])
        worth = np.concatenate([v[r[floor:]] for v, r in zip(values, ranked, strict=True)])
        line = np.argsort(-worth, kind="stable")
        self.layers, self.units = layers[line], units[line]
        self.sums = np.concatenate([[0.0], np.cumsum(worth[line])])

    def __len__(self) -> int:
        return len(self.units)

    def fixed(self, price: Piecewise) -> float:
        """Cost of the floors; a layer has its overhead even with a floor of zero (Alg. 2, line 5)."""
        return sum(price(len(k)) if len(k) else price.overhead for k, n in zip(self.kept, self.sizes, strict=True) if n)

    def take(self, count: int) -> list[Tensor]:
        """Per layer, the units of the floor and those among the `count` most important others."""
        layers, units = self.layers[:count], self.units[:count]
        both = (np.concatenate([k, units[layers == layer]]) for layer, k in enumerate(self.kept))
        return [torch.from_numpy(np.sort(b).astype(np.int64)) for b in both]
