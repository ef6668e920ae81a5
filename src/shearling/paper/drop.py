"""Drop whole sublayers where the overheads alone exceed the budget, which Alg. 2 cannot meet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shearling.costs import Piecewise


def sublayers_to_drop(
    worth: Sequence[Tensor], prices: Sequence[Sequence[Piecewise]], budgets: Sequence[float]
) -> set[int]:
    """The sublayers to drop, chosen greedily by the least importance per overhead.

    worth    per sublayer, the importances of its units
    prices   per constraint, the cost of each sublayer

    Differs from the paper: Alg. 2 keeps every layer at its threshold, whatever the budget.
    """
    least = [_least(row, worth, prices) for row in prices]  # [constraints][sublayers]
    dropped: set[int] = set()
    while True:
        left = [i for i in range(len(worth)) if i not in dropped]
        over = [sum(row[i] for i in left) - budget for row, budget in zip(least, budgets, strict=True)]
        worst = max(range(len(over)), key=lambda c: over[c] / max(sum(least[c]), 1e-300))
        candidates = [i for i in left if least[worst][i] > 0]
        if over[worst] <= 0 or not candidates:
            return dropped
        dropped.add(min(candidates, key=lambda i: float(worth[i].sum()) / least[worst][i]))


def _least(row: Sequence[Piecewise], worth: Sequence[Tensor], prices: Sequence[Sequence[Piecewise]]) -> list[float]:
    """Minimum cost of each sublayer that is not dropped: at the largest threshold of all constraints."""
    costs = []
    for i, price in enumerate(row):
        floor = min(max(p[i].threshold for p in prices), len(worth[i]))
        costs.append(price(floor) if floor else price.overhead * bool(len(worth[i])))
    return costs
