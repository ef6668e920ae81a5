"""How many units stay: the allocator, fed with the limits of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shearling.costs import Limit
from shearling.errors import ConstraintError
from shearling.models.sublayer import Sublayer
from shearling.surgeon.allocate import Curve, allocate


def allocate_counts(
    sublayers: Sequence[Sublayer], errors: Sequence[Any], limits: Sequence[Limit], multiple_of: int
) -> list[int]:
    """The best counts for errors given by units kept ([units + 1] per sublayer)."""
    curves = []
    for number, (sublayer, error) in enumerate(zip(sublayers, errors, strict=True)):
        counts = np.arange(min(sublayer.floor, sublayer.units), sublayer.units + 1)
        if sublayer.kind == "filters" and multiple_of > 1:
            counts = counts[(counts % multiple_of == 0) | (counts == sublayer.units)]
        costs = np.stack([limit.tables[number][counts] for limit in limits])
        curves.append(Curve(counts, np.asarray(error)[counts], costs))
    try:
        return allocate(curves, [limit.budget for limit in limits])
    except ConstraintError as error:
        raise ConstraintError(f"{asked(limits)} cannot be met. {error}") from None


def asked(limits: Sequence[Limit]) -> str:
    """The constraints in words, each once."""
    return ", ".join(dict.fromkeys(f"{limit.name}={limit.ratio:g}" for limit in limits))
