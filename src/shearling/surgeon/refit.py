"""Stage 4 of `surgeon`: refit the kept columns of each output projection to the teacher.

    min  || h W'^T + b' - y ||^2  +  lambda ( || W' - W ||^2 + || b' - b ||^2 )

over the kept columns, with lambda a share of the mean diagonal of the Gram matrix. The projection is dense anyway, so
this costs nothing at inference. One example in eight is held out: a sublayer whose fit does not lower the error on
those keeps its original weights, and the result says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.moments import Moments
from shearling.surgeon.damped import damped_factor

RIDGE = 1e-2


@dataclass(frozen=True)
class Fit:
    """A sublayer's new projection, and the error per token before and after on the examples held out."""

    weight: Tensor  # [D, n]
    bias: Tensor | None  # [D]
    before: float
    after: float
    kept: bool  # whether the fit is used


def refit(weight: Tensor, bias: Tensor | None, fit: Moments, held_out: Moments, *, ridge: float = RIDGE) -> Fit:
    """Returns the ridge fit, or the original weights if these are better on the held-out examples."""
    guarded = float(held_out.count) > 0
    judge = held_out if guarded else fit
    before = judge.error(weight, bias)
    new_weight, new_bias = solve_ridge(weight, bias, fit, ridge)
    after = judge.error(new_weight, new_bias)
    if not after < before:
        return Fit(weight, bias, before, before, kept=False)
    return Fit(new_weight, new_bias, before, after, kept=True)


def solve_ridge(weight: Tensor, bias: Tensor | None, moments: Moments, ridge: float) -> tuple[Tensor, Tensor | None]:
    """The ridge solution, in float64: the change solves (H^T H + lambda I) change = H^T (y - H W^T)."""
    gram, cross = moments.with_bias()
    old = weight.double().T  # [n, D]
    if bias is None:
        gram, cross = gram[:-1, :-1], cross[:-1]
    else:
        old = torch.cat([old, bias.double()[None]])  # [n + 1, D]
    if not len(gram):
        return weight, bias
    rest = cross - gram @ old
    if not rest.isfinite().all():  # the sums overflowed: keep the weights
        return weight, bias
    factor = damped_factor(gram[None], ridge)[0]  # `gram` is a copy of the sums, and not needed any more
    new = (old + torch.cholesky_solve(rest, factor)).to(weight.dtype)
    return (new.T, None) if bias is None else (new[:-1].T, new[-1])
