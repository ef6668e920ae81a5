"""The dials: what exhaustive search finds, for any number of dials and budgets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shearling.surgeon.allocate import Curve
from shearling.surgeon.dials import turn


def curve(rng: np.random.Generator, options: int, budgets: int) -> Curve:
    counts = np.sort(rng.choice(np.arange(1, 40), options, replace=False))
    errors = np.sort(rng.random(options))[::-1]
    return Curve(counts, errors, np.sort(rng.random((budgets, options)), axis=1))


def brute_force(curves: list[Curve], budgets: list[float]) -> float | None:
    best = None
    for picks in itertools.product(*(range(len(c.counts)) for c in curves)):
        spent = sum(c.costs[:, i] for c, i in zip(curves, picks, strict=True))
        if (spent <= budgets).all():
            error = sum(c.errors[i] for c, i in zip(curves, picks, strict=True))
            best = error if best is None else min(best, error)
    return best


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budgets", [1, 2, 3])
def test_as_good_as_exhaustive_search(seed: int, budgets: int) -> None:
    rng = np.random.default_rng(seed)
    curves = [curve(rng, int(rng.integers(1, 6)), budgets) for _ in range(int(rng.integers(1, 5)))]
    limits = list(rng.random(budgets) * len(curves))
    found, wanted = turn(curves, limits), brute_force(curves, limits)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        counts, error = found
        assert error == pytest.approx(wanted)
        places = [c.counts.tolist().index(n) for c, n in zip(curves, counts, strict=True)]
        spent = sum(c.costs[:, i] for c, i in zip(curves, places, strict=True))
        assert (spent <= np.asarray(limits) * (1 + 1e-6)).all()
        assert sum(c.errors[i] for c, i in zip(curves, places, strict=True)) == pytest.approx(error)


def test_a_time_that_dips_is_never_over_budget() -> None:
    dipping = Curve(np.array([1, 2, 3]), np.array([3.0, 2.0, 1.0]), np.array([[1.0, 3.0, 2.0]]))
    assert turn([dipping], [1.5]) == ([1], 3.0)
    assert turn([dipping], [3.0]) == ([3], 1.0)
    assert turn([dipping], [0.5]) is None
