"""The mathematics of units finer than heads: columns of values in a basis of their own, and scores of low rank.

With q and k the queries and keys of one head, and v its values, what the head computes does not change when

    q -> X^T q,  k -> Y^T k    with X Y^T = I        v -> T^-1 v,  W -> W T    (W: its part of the output projection)

so a head may give up dimensions in whatever basis loses least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shearling.engine.gram import Gram
from shearling.models.sublayer import columns_of
from shearling.surgeon.damped import damped_factor
from shearling.surgeon.measure import Curvature
from shearling.surgeon.order import Order, order

FLOOR = 1e-9  # of the largest eigenvalue: below it a direction does not occur


@dataclass(frozen=True)
class ScoreMoments:
    """Means over tokens for every head of a sublayer, [heads, d, d] each; g is the gradient of the loss.

    Scores that change alike for all keys change nothing behind the softmax, so keys count less their example's mean.
    """

    queries: Tensor  # q q^T
    keys: Tensor  # k k^T
    gradients: Tensor  # g g^T, at the queries


def roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """M^1/2 and M^-1/2 of symmetric matrices [..., d, d]."""
    values, vectors = torch.linalg.eigh(moments.double())
    values = values.clamp_min(FLOOR * values[..., -1:].clamp_min(torch.finfo(torch.float64).tiny ** 0.5))
    return tuple((vectors * values[..., None, :] ** power) @ vectors.mT for power in (0.5, -0.5))  # type: ignore[return-value]


def score_bases(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """X and Y [heads, d, d]: q^T X_r Y_r^T k by their first r columns is the best approximation of q^T k of rank r.

    Best in the mean over all pairs of a query and a key, given their second moments. With A the inputs' second moment
    this is the truncated singular value decomposition of A^1/2 W_q^T W_k A^1/2, done in the d dimensions of a head.
    """
    left, left_inverse = roots(queries)
    right, right_inverse = roots(keys)
    U, S, Vh = torch.linalg.svd(left @ right)
    half = S.sqrt()[..., None, :]
    return left_inverse @ U * half, right_inverse @ Vh.mT * half


def rank_errors(moments: ScoreMoments, X: Tensor, Y: Tensor) -> Tensor:
    """[heads, d + 1], by rank: the estimated loss when queries and keys keep the first dimensions of X and Y.

    tr(G dq dq^T) with dq = (Y_r X_r^T - I) q, as for the output projections: a mean over tokens.
    """
    product = (X.mT @ moments.queries.double() @ X) * (Y.mT @ moments.gradients.double() @ Y)  # [heads, d, d]
    tails = product.flip(-1, -2).cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)  # of 1, 2, ..., d dimensions gone
    errors = torch.cat([torch.zeros_like(tails[..., :1]), tails.clamp_min(0)], -1)
    return errors.cummax(-1).values.flip(-1)


def rank_path(errors: Tensor) -> tuple[Tensor, Tensor]:
    """Dimensions go one at a time, the cheapest first: ranks [n + 1, heads] and summed errors [n + 1], n down to 0."""
    heads, d = errors.shape[0], errors.shape[1] - 1
    steps = (errors[:, :-1] - errors[:, 1:]).tolist()  # of going from rank r + 1 to r
    ranks, total = [d] * heads, float(errors[:, -1].sum())
    path, sums = [list(ranks)], [total]
    for _ in range(heads * d):
        pick = min((h for h in range(heads) if ranks[h]), key=lambda h: steps[h][ranks[h] - 1])
        ranks[pick] -= 1
        total += steps[pick][ranks[pick]]
        path.append(list(ranks))
        sums.append(total)
    return torch.tensor(path), torch.tensor(sums, dtype=torch.float64)


@dataclass(frozen=True)
class Columns:
    """How a sublayer with some heads left gives up single columns.

    heads    [m], by their numbers in the dense model
    basis    [m, d, d]: T of each; the columns are those of W T
    order    of the m x d columns, a head's side by side
    error    once the other heads are gone, and all columns are left
    """

    heads: Tensor
    basis: Tensor
    order: Order
    error: float

    def kept(self, count: int) -> list[Tensor]:
        """For each head, the columns of its basis that stay when `count` may."""
        d = self.basis.shape[-1]
        left = self.order.kept(count)
        return [left[left // d == number] % d for number in range(len(self.heads))]


def damped(curvature: Curvature, damp: float) -> Curvature:
    """In float64, with the damping of the order in A."""
    factor = damped_factor(curvature.A.matrix.double()[None].clone(), damp)[0]
    return Curvature(
        Gram([factor @ factor.mT]), Gram([curvature.G.matrix.double()]), curvature.W.double(), curvature.width
    )


def with_heads(curvature: Curvature, heads: Tensor) -> Curvature:
    """Of the columns of these heads alone, refitted to make up for the others: W A_:K A_KK^-1."""
    columns = columns_of(heads, curvature.width).to(curvature.A.matrix.device)
    A = curvature.A.matrix[columns][:, columns]
    W = torch.linalg.solve(A, curvature.A.matrix[columns] @ curvature.W.mT).mT
    return Curvature(Gram([A]), curvature.G, W, curvature.width)


def column_bases(curvature: Curvature) -> Tensor:
    """T [m, d, d] of each head, such that its columns, with all others refitted, cost least to remove from the last.

    The cost of a set of directions is tr(C_SS B_SS^-1) with B = A^-1; in the basis T both C_SS = T^T (W^T G W)_SS T and
    B_SS are diagonal, the largest first.
    """
    d = curvature.width
    B = torch.linalg.inv(curvature.A.matrix)
    C = curvature.W.mT @ curvature.G.matrix @ curvature.W
    L = torch.linalg.cholesky(torch.linalg.inv(_blocks(B, d)))
    vectors = torch.linalg.eigh(L.mT @ _blocks(C, d) @ L).eigenvectors.flip(-1)
    bases: Tensor = L @ vectors
    return bases


def in_basis(curvature: Curvature, basis: Tensor) -> Curvature:
    """The same curvature for h -> T^-1 h and W -> W T; units of one column."""
    T = torch.block_diag(*basis)
    inverse = torch.block_diag(*torch.linalg.inv(basis))
    return Curvature(Gram([inverse @ curvature.A.matrix @ inverse.mT]), curvature.G, curvature.W @ T, 1)


def column_ways(
    curvatures: Sequence[Curvature], orders: Sequence[Order], heads: int, *, own_basis: bool, damp: float
) -> list[Columns]:
    """For every sublayer, with so many heads left: the order of their columns, as they are or in bases of their own."""
    starts = [_start(c, way, heads, own_basis, damp) for c, way in zip(curvatures, orders, strict=True)]
    ways = order([left for left, _ in starts], damp=0.0)
    return [replace(columns, order=way) for (_, columns), way in zip(starts, ways, strict=True)]


def level_way(curvature: Curvature, way: Order, heads: int, *, damp: float, step: int) -> Columns:
    """The same in bases of their own, but all heads give up their last directions together, `step` at a time."""
    left, columns = _start(curvature, way, heads, True, damp)
    d = columns.basis.shape[-1]
    removed = torch.stack([torch.arange(heads) * d + at for at in reversed(range(d))]).flatten()
    A, C = left.A.matrix, left.W.mT @ left.G.matrix @ left.W
    error = torch.full((heads * d + 1,), torch.inf, dtype=torch.float64)
    error[0] = 0.0
    for level in range(0, d, step):
        kept = removed[heads * (d - level) :].to(C.device)
        rest = A - A[:, kept] @ torch.linalg.solve(A[kept][:, kept], A[kept]) if level else A
        error[heads * (d - level)] = (C * rest).sum()
    return replace(columns, order=Order(removed, error))


def _start(curvature: Curvature, way: Order, heads: int, own_basis: bool, damp: float) -> tuple[Curvature, Columns]:
    """The curvature of the heads that are left, in the basis their columns go in, and that basis with no order yet."""
    columns = whole_way(curvature.width, way, heads)
    left = with_heads(damped(curvature, damp), columns.heads)
    columns = replace(columns, basis=column_bases(left) if own_basis else columns.basis.to(left.A.matrix))
    return in_basis(left, columns.basis), columns


def whole_way(width: int, way: Order, heads: int) -> Columns:
    """With so many heads left, none of which gives up a column."""
    columns = Order(torch.arange(heads * width), torch.zeros(heads * width + 1, dtype=torch.float64))
    basis = torch.eye(width, dtype=torch.float64).expand(heads, width, width)
    return Columns(way.kept(heads), basis, columns, float(way.error[len(way.removed) - heads]))


def kept_values(basis: Tensor, kept: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One head's values [c, D] and output columns [D, c] when these directions of its basis stay.

    value   [d, n]: rows of the value projection (and its bias as a column)
    weight  [D, d]: the head's part of the output projection
    The directions are made orthonormal, so that a ridge treats them as it treats whole heads.
    """
    inverse = torch.linalg.inv(basis.double())[kept]  # [c, d]
    Q, R = torch.linalg.qr(inverse.mT)  # [d, c], [c, c]
    return Q.mT @ value.double(), weight.double() @ basis.double()[:, kept] @ R.mT


def _blocks(matrix: Tensor, width: int) -> Tensor:
    """[n, n] -> [n / width, width, width], those on the diagonal."""
    blocks = matrix.unflatten(0, (-1, width)).unflatten(2, (-1, width))
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0).contiguous()
