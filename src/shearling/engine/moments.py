"""Second moments of one sublayer: the sufficient statistics of tuning and refitting.

With `h` [tokens, n] the input of the output projection and `y` [tokens, D] its target, both least-squares problems
(Eq. 12, and the ridge refit) are functions of h^T h, h^T y and a few sums. These are accumulated over batches, so the
tall matrices are never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.distributed import add_up
from shearling.engine.gram import Gram, add_gram_and_cross_

EPSILON = 1e-6


def scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """[t, n]: rows multiplied by factors [t], in the dtype and on the device of the rows."""
    return rows * factors.to(rows)[:, None]


def sizes_of(rows: Tensor) -> Tensor:
    """[t]: the root mean square of every row [t, D], with the epsilon of a norm."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    return (wide.square().mean(-1) + EPSILON).sqrt()


@dataclass
class Moments:
    """Sums over tokens."""

    gram: Gram  # h^T h [n, n]
    cross: Tensor  # h^T y [n, D]
    h_sum: Tensor  # [n]
    y_sum: Tensor  # [D]
    y_squared: Tensor  # sum of y^2, a scalar
    count: Tensor  # tokens, or the sum of their weights, a scalar

    @staticmethod
    def zeros(n: int, out: int, like: Tensor) -> Moments:
        """Empty sums: float64 for a float64 model, float32 otherwise."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

        def zero(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        wide = torch.float64
        return Moments(Gram.zeros(n, zero()), zero(n, out), zero(n), zero(out), zero(dtype=wide), zero(dtype=wide))

    def add(self, h: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Add tokens h [t, n], y [t, D], optionally with weights [t]."""
        dtype = self.gram.dtype
        roots = None if weights is None else weights.sqrt().to(h).to(dtype)  # the same rounding in all sums
        if roots is not None:
            h, y = scaled(h, roots), scaled(y, roots)
        add_gram_and_cross_(self.gram, self.cross, h, y)
        for total, rows in ((self.h_sum, h), (self.y_sum, y)):
            total += rows.sum(0, dtype=dtype) if roots is None else roots @ rows.to(dtype)
        self.y_squared += y.to(dtype).square().sum()
        self.count += len(h) if roots is None else roots.square().sum()

    def __add__(self, other: Moments) -> Moments:
        *columns, cross, h_sum, y_sum, y_squared, count = (
            a + b for a, b in zip(self.tensors, other.tensors, strict=True)
        )
        return Moments(Gram(columns), cross, h_sum, y_sum, y_squared, count)

    def add_up(self) -> None:
        """All-reduce over processes."""
        add_up(self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All sums."""
        return *self.gram.columns, self.cross, self.h_sum, self.y_sum, self.y_squared, self.count

    def with_bias(self) -> tuple[Tensor, Tensor]:
        """([n + 1, n + 1], [n + 1, D]) in float64: the Gram and cross moments of [h, 1]."""
        n = len(self.gram)
        gram = self.count.new_empty(n + 1, n + 1)  # filled in place: for wide FFNs, a copy takes 0.2 GB
        self.gram.copy_to(gram[:n, :n])
        gram[n, :n] = gram[:n, n] = self.h_sum
        gram[n, n] = self.count
        return gram, torch.cat([self.cross.double(), self.y_sum.double()[None]])

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """Mean over tokens of || h W^T + b - y ||^2, for W [D, n]."""
        gram, cross = self.with_bias()
        edge = (
            torch.zeros(weight.shape[0], dtype=torch.float64, device=weight.device) if bias is None else bias.double()
        )
        full = torch.cat([weight.double(), edge[:, None]], 1)  # [D, n + 1]
        total = ((full @ gram) * full).sum() - 2 * (full * cross.T).sum() + self.y_squared
        # A difference of large sums: rounding may make it negative for a perfect fit.
        return float(total.clamp_min(0) / self.count.clamp_min(1e-30))
