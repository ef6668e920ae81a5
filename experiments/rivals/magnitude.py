"""Magnitude: the units with the smallest weights go, the same share in every layer. Nothing is repaired."""

from __future__ import annotations

from typing import Any

from rivals.subject import Subject, best, cut, uniform_counts, unit_sums


def magnitude(subject: Subject, share: float) -> Any:
    """Score: the sum of squares of all weights that go with a unit."""
    scores = [unit_sums(s, lambda w: w.detach().square()) for s in subject.structure.sublayers]
    return cut(subject, best(scores, uniform_counts(subject, share)))
