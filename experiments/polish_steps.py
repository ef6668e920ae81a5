"""Optimisers that `polish.py` compares with AdamW: matrices get steps of their own, everything else AdamW's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Muon's quintic; singular values end between about 0.7 and 1.2
PROBES = 8  # gradients that bases are made of

Gradients = Callable[[], list[Tensor]]


def orthogonalised(matrix: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of matrix = U S V^T."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp_min(1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + torch.addmm(b * square, square, square, alpha=c) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon:
    """Nesterov momentum, orthogonalised; steps are as long as AdamW's at the same rate."""

    momentum = 0.95

    def __init__(self, weights: Sequence[Tensor], rate: float, betas: tuple[float, float], ratio: float) -> None:
        self.matrices = [w for w in weights if w.dim() == 2 and min(w.shape) > 8]
        chosen = {id(w) for w in self.matrices}
        rest = [w for w in weights if id(w) not in chosen]
        self.others = torch.optim.AdamW(rest, lr=rate, betas=betas, weight_decay=0.0, foreach=True)
        self.param_groups, self.ratio = self.others.param_groups, ratio
        self.means = [torch.zeros_like(w) for w in self.matrices]

    def step(self) -> None:
        self.others.step()
        rate = self.ratio * self.param_groups[0]["lr"]
        for weight, mean in zip(self.matrices, self.means, strict=True):
            if weight.grad is None:
                continue
            mean.lerp_(weight.grad, 1 - self.momentum)
            ahead = weight.grad.lerp(mean, self.momentum)
            weight.add_(orthogonalised(ahead), alpha=-0.2 * rate * max(weight.shape) ** 0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.others.zero_grad(set_to_none)
        for weight in self.matrices:
            weight.grad = None


class EigenAdam:
    """Adam in the eigenvectors of each matrix's gradients, as SOAP has it; found once, before the first step."""

    def __init__(self, weights: Sequence[Tensor], rate: float, betas: tuple[float, float], probe: Gradients) -> None:
        self.weights, self.betas, self.done = list(weights), betas, 0
        self.param_groups = [{"lr": rate}]
        self.means, self.squares = ([torch.zeros_like(w) for w in self.weights] for _ in range(2))
        seen = [probe() for _ in range(PROBES)]
        self.bases = [self._bases([gradients[i] for gradients in seen]) for i in range(len(self.weights))]

    def step(self) -> None:
        self.done += 1
        first, second = self.betas
        rate = self.param_groups[0]["lr"] / (1 - first**self.done)
        for weight, mean, square, (left, right) in zip(self.weights, self.means, self.squares, self.bases, strict=True):
            if weight.grad is None:
                continue
            turned = weight.grad if left is None else left.T @ weight.grad @ right
            mean.lerp_(turned, 1 - first)
            square.lerp_(turned.square(), 1 - second)
            change = mean / ((square / (1 - second**self.done)).sqrt() + 1e-8)
            weight.sub_(change if left is None else left @ change @ right.T, alpha=rate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None

    @staticmethod
    def _bases(gradients: list[Tensor]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if gradients[0].dim() != 2 or min(gradients[0].shape) <= 4:
            return None, None
        return _eigenvectors(sum(g @ g.T for g in gradients)), _eigenvectors(sum(g.T @ g for g in gradients))


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Of a Gram matrix whose scale may be anything."""
    exact = matrix.double()
    exact = exact / exact.diagonal().mean().clamp_min(1e-30)
    return torch.linalg.eigh(exact + 1e-9 * torch.eye(len(exact), dtype=exact.dtype))[1].to(matrix)
