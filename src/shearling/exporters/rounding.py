"""GPTQ (Frantar et al., 2023), with the blocks of a GGUF file as groups.

With A = mean x x^T over the inputs x of the projection, rounding W to Q costs tr((W - Q) A (W - Q)^T). Columns are
rounded from left to right, and the columns not rounded yet are updated to compensate for each column's error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # adjacent weights of a row that share a scale
DAMP = 0.01  # added to the diagonal of A, as a share of its mean


@dataclass(frozen=True)
class Grid:
    """Integers from `low` to `high`, times a float16 scale per block of a row.

    shares  candidate scales as shares of a block's range; below 1, the largest weights are clipped
    """

    low: int
    high: int
    shares: tuple[float, ...] = (1.0,)

    def scale(self, block: Tensor, importance: Tensor) -> Tensor:
        """[D, 1]: the candidate scale of a block [D, b] with the least error, columns weighted by importance [b]."""
        extreme = block.gather(1, block.abs().argmax(1, keepdim=True))
        tried = torch.stack([(share * extreme / self.low).half().to(block) for share in self.shares])  # [tried, D, 1]
        errors = ((self.codes(block, tried) * tried - block).square() * importance).sum(-1)  # [tried, D]
        return tried.gather(0, errors.argmin(0)[None, :, None])[0]

    def codes(self, weights: Tensor, scale: Tensor) -> Tensor:
        """The nearest integers; 0 where the scale is 0."""
        return (weights / scale.where(scale != 0, torch.inf)).round().clamp(self.low, self.high)


GRIDS = {"q8_0": Grid(-127, 127), "q4_0": Grid(-8, 7, (1.0, 0.95, 0.9, 0.85, 0.8))}


def round_columns(weight: Tensor, A: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns W [D, n] rounded to the grid, and the scales [D, blocks]."""
    rest = weight.detach().double().clone()
    factor = _factor(A.double())
    scales = []
    for start in range(0, rest.shape[1], BLOCK):
        here = slice(start, start + BLOCK)
        block, inner = rest[:, here], factor[here, here]
        diagonal = inner.diagonal()
        scale = grid.scale(block, 1 / diagonal.square())
        errors = torch.empty_like(block)
        for j in range(block.shape[1]):
            rounded = grid.codes(block[:, j : j + 1], scale)[:, 0] * scale[:, 0]
            errors[:, j] = (block[:, j] - rounded) / diagonal[j]
            block[:, j + 1 :] -= errors[:, j : j + 1] * inner[j, j + 1 :]
            block[:, j] = rounded
        rest[:, start + BLOCK :] -= errors @ factor[here, start + BLOCK :]
        scales.append(scale)
    return rest.to(weight), torch.cat(scales, 1).to(weight)


def _factor(A: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped A; identity if A is zero."""
    mean = A.diagonal().mean()
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    damped = A + DAMP * mean * eye if mean > 0 else eye
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.as_tensor(torch.linalg.cholesky(inverse, upper=True))
