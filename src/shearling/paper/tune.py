"""Mask tuning (Eq. 12, 27): real-valued masks for the kept units, by least squares against the teacher.

Column i of A is the contribution of unit i to the output of its sublayer. A (tokens x D rows) is never formed:

    (A^T A)_ij = sum over the units' columns of (h^T h) * (W^T W)        (A^T y)_i = sum of (h^T y) * W^T

so the Gram matrix of `h` is enough. With m = 1 + r, (A^T A + damp^2 I) r = A^T (y - A 1), by Cholesky in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.moments import Moments

DAMP = 1.0
RANGE = 10.0


@dataclass(frozen=True)
class Tuned:
    """A sublayer's masks, and the reconstruction error per token before and after."""

    mask: Tensor  # [units], float64
    before: float
    after: float

    @property
    def accepted(self) -> bool:
        """Whether every mask lies in [-10, 10]; a sublayer outside is discarded and ends the tuning."""
        return bool((self.mask.abs() <= RANGE).all())


def tune(weight: Tensor, bias: Tensor | None, moments: Moments, width: int, *, damp: float = DAMP) -> Tuned:
    """The masks for the kept units of one sublayer; weight [D, n], width columns a unit."""
    normal, target = normal_equations(weight, bias, moments, width)
    ones = torch.ones(len(target), dtype=torch.float64, device=target.device)
    mask = 1 + _solve(normal, target - normal @ ones, damp)
    return Tuned(mask, moments.error(weight, bias), moments.error(apply(weight, mask, width), bias))


def _solve(normal: Tensor, rest: Tensor, damp: float) -> Tensor:
    """(A^T A + damp^2 I)^-1 rest.

    A^T A is accumulated in the model's precision, so large activations can make it indefinite by more than the damping.
    Directions with eigenvalues below that rounding error are then left out of the solution.
    """
    if not (normal.isfinite().all() and rest.isfinite().all()):  # NaN masks count as out of range
        return torch.full_like(rest, torch.nan)
    damped = normal.clone()
    damped.diagonal().add_(damp**2)
    factor, failed = torch.linalg.cholesky_ex(damped)
    if not failed:
        return torch.cholesky_solve(rest[:, None], factor)[:, 0]
    values, vectors = torch.linalg.eigh(normal)
    reliable = values > 10 * values[0].abs()
    basis = vectors[:, reliable]
    solution: Tensor = basis @ ((basis.T @ rest) / (values[reliable] + damp**2))
    return solution


def normal_equations(weight: Tensor, bias: Tensor | None, moments: Moments, width: int) -> tuple[Tensor, Tensor]:
    """(A^T A [units, units], A^T y [units]) of Eq. 27, with the bias subtracted from y."""
    W = weight.double()
    cross = moments.cross.double()
    if bias is not None:
        cross = cross - moments.h_sum.double()[:, None] * bias.double()
    products = moments.gram.matrix.double() * (W.T @ W)  # [n, n]
    units = len(products) // width
    normal = products.view(units, width, units, width).sum((1, 3))
    target = (cross * W.T).sum(1).view(units, width).sum(1)
    return normal, target


def apply(weight: Tensor, mask: Tensor, width: int) -> Tensor:
    """The projection with the masks folded in."""
    return weight * mask.to(weight).repeat_interleave(width)
