"""Wanda-sp: Wanda (Sun et al., ICLR 2024) for whole units, as the FLAP paper compares itself with it.

A weight's score is |W_ij| ||h_j||; a unit's the sum over its columns of the output projection. The same share goes in
every layer, and nothing is repaired.
"""

from __future__ import annotations

from typing import Any

from rivals.subject import Subject, best, by_unit, cut, uniform_counts


def wanda(subject: Subject, share: float) -> Any:
    """Weights times the norm of what they see."""
    scores = []
    for sublayer, seen in zip(subject.structure.sublayers, subject.activations, strict=True):
        columns = sublayer.weight.detach().abs().sum(0) * seen.squares.sqrt()  # [n]
        scores.append(by_unit(sublayer, columns))
    return cut(subject, best(scores, uniform_counts(subject, share)))
