"""Cholesky factors of damped matrices, with more damping where the factorisation fails."""

from __future__ import annotations

import torch
from torch import Tensor

TRIES = 48  # tenfold steps from 1e-16 of the mean diagonal: far beyond any rounding error
LEAST = torch.finfo(torch.float64).tiny ** 0.5


def damped_factor(matrices: Tensor, damp: float) -> Tensor:
    """Cholesky factors of M + penalty I, for M [L, n, n] in float64, damped in place.

    The penalty is `damp` times the mean diagonal. Where a matrix is indefinite through rounding, or singular without
    damping, the penalty grows tenfold until the factorisation succeeds. Matrices must be finite.
    """
    diagonal = matrices.diagonal(dim1=1, dim2=2)  # [L, n], a view
    scale = diagonal.mean(1).clamp_min(LEAST)  # a matrix of zeros still gets a factor
    diagonal.add_(damp * scale[:, None])
    factor, failed = torch.linalg.cholesky_ex(matrices)
    more = max(damp, torch.finfo(torch.float64).eps)
    for _ in range(TRIES):
        if not failed.any():
            break
        diagonal.add_(torch.where(failed > 0, more * scale, 0)[:, None])
        more *= 10
        factor, failed = torch.linalg.cholesky_ex(matrices)
    else:
        raise ArithmeticError("a matrix has no Cholesky factor even with damping: it is not finite")
    found: Tensor = factor
    return found
