"""Stage 2 of `surgeon`: the order in which a sublayer's units are removed, and the cost of each removal.

Structured optimal brain surgeon. With B = (A + damp mean(diag A) I)^-1, C = W^T G W and S the columns of a unit,
removing the unit and refitting all other columns raises the estimated loss by

    cost(S) = tr(C_SS B_SS^-1)

and leaves, with R = B_:S B_SS^-1 and F = C_:S - R C_SS / 2,

    B <- B - R B_S:        C <- C - R F^T - F R^T

The cheapest unit is removed repeatedly. Costs depend only on the diagonal blocks of B and C, so full updates are
delayed: the last few (R, B_S:, F) are collected in a panel, rows of B or C are corrected by the panel when they are
read, and a full panel is applied with three matrix products. Sublayers of one shape are batched, and a step does not
synchronise with the host, so that a GPU can run thousands of them in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.cuda_graph import Loop
from shearling.engine.distributed import dealt, gathered
from shearling.engine.gram import Gram
from shearling.engine.memory import give_back
from shearling.engine.progress import Progress, silent
from shearling.errors import ModelError
from shearling.surgeon.damped import damped_factor
from shearling.surgeon.measure import Curvature

DAMP = 1e-2
PANEL = 32  # columns
TOGETHER = {"cpu": 160 * 2**20, "cuda": 2 * 2**30}  # bytes of B, and as much of C, per batch of sublayers
ROWS = 5  # the same for the panel and a step's copies of it: rows as long as B's, per column of a unit


@dataclass(frozen=True)
class Order:
    """Removal order of one sublayer: `removed[k]` is the k-th unit, `error[k]` the loss after k removals."""

    removed: Tensor  # [units], host
    error: Tensor  # [units + 1], host, float64, error[0] = 0

    def kept(self, count: int) -> Tensor:
        """The `count` units removed last, ascending."""
        return self.removed[len(self.removed) - count :].sort().values


def order(curvatures: Sequence[Curvature], *, damp: float = DAMP, progress: Progress = silent) -> list[Order]:
    """Order every sublayer; sublayers of one shape are batched, and processes share the work."""
    mine = dealt([len(c.A) for c in curvatures])
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in mine:
        c = curvatures[i]
        groups.setdefault((*c.W.shape, c.width, c.W.device), []).append(i)
    orders: dict[int, Order] = {}
    total = sum(curvatures[i].W.shape[1] // curvatures[i].width for i in mine)
    for members in _bounded(groups.values(), curvatures):
        batch = [curvatures[i] for i in members]
        before = sum(len(o.removed) for o in orders.values())

        def step(done: int, _: int, before: int = before, count: int = len(members)) -> None:
            progress(before + done * count, total)

        orders |= dict(zip(members, _order_batch(batch, damp, step), strict=True))
        give_back(batch[0].A.device)
    everyones = gathered(orders)
    return [everyones[i] for i in range(len(curvatures))]


def _bounded(groups: Iterable[list[int]], curvatures: Sequence[Curvature]) -> Iterator[list[int]]:
    """Split the groups into batches that fit into memory."""
    for members in groups:
        one = curvatures[members[0]]
        each = 8 * len(one.A) * (len(one.A) + ROWS * one.width)
        size = max(1, TOGETHER.get(one.W.device.type, TOGETHER["cpu"]) // max(1, each))
        for start in range(0, len(members), size):
            yield members[start : start + size]


def _order_batch(batch: Sequence[Curvature], damp: float, progress: Progress) -> list[Order]:
    width = batch[0].width
    units = batch[0].W.shape[1] // width
    if units == 0:
        return [Order(torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.float64)) for _ in batch]
    state = _State.start(batch, damp)
    while state.left:
        state.remove_panel()
        progress(units - state.left, units)
    del state.loop  # a reference cycle, which would keep these matrices beside those of the next sublayers
    picks = state.picked.cpu()  # [L, units]
    errors = state.costs.cpu().clamp_min(0).cumsum(1)
    zero = torch.zeros(1, dtype=torch.float64)
    return [Order(p, torch.cat([zero, e])) for p, e in zip(picks, errors, strict=True)]


class _State:
    """B and C of L sublayers of one shape, with a panel of delayed updates.

    On a GPU a step is a few dozen tiny kernels in sequence, so B and C are processed together: M stacks both, and the
    panel holds R^T, B_S: and F^T of every update in one tensor.
    """

    def __init__(self, M: Tensor, width: int) -> None:
        self.M, self.width = M, width  # [L, 2, n, n]
        count, units = len(M), M.shape[2] // width
        self.layers = torch.arange(count, device=M.device)
        self.inside = torch.arange(width, device=M.device)
        self.picked = torch.zeros(count, units, dtype=torch.long, device=M.device)
        self.costs = torch.zeros(count, units, dtype=M.dtype, device=M.device)
        self.counters = torch.zeros(2, dtype=torch.long, device=M.device)  # steps done; rows of the panel in use
        self.advance = torch.tensor([1, width], device=M.device)
        # Rows of B and C, corrected by the panel: B_S - R_S^T B and C_S - F_S^T R - R_S^T F, for R, B, F in the panel.
        self.mix = M.new_tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]])
        self.left = units
        self._lay_out(torch.arange(units, device=M.device).expand(count, -1).contiguous())

    @staticmethod
    def start(batch: Sequence[Curvature], damp: float) -> _State:
        if not all(bool(one.isfinite().all()) for c in batch for one in (c.W, *c.A.columns, *c.G.columns)):
            raise ModelError(
                "The activations, gradients or weights of a sublayer are not finite, so its units cannot be ordered. "
                "Check the weights; half precision may overflow: try --dtype float32."
            )
        device = batch[0].W.device
        # Damping also makes an all-zero A invertible; its columns then cost zero.
        B = torch.cholesky_inverse(damped_factor(_stacked([c.A for c in batch], device), damp))
        M = B.new_empty(len(B), 2, *B.shape[1:])
        M[:, 0] = B
        del B  # for wide FFNs, each of these matrices takes hundreds of megabytes
        W = torch.stack([c.W for c in batch]).double()
        torch.bmm(W.mT @ _stacked([c.G for c in batch], device), W, out=M[:, 1])
        return _State(M, batch[0].width)

    def _lay_out(self, names: Tensor) -> None:
        """Reset the panel and the diagonals; `names` [L, units] are the units' indices in the full sublayer."""
        self.names = names
        self.gone = torch.zeros_like(names, dtype=torch.bool)
        self.diagonal_B, self.diagonal_C = (_diagonal_blocks(self.M[:, i], self.width) for i in (0, 1))
        self.panel = self.M.new_zeros(len(names), 3, max(PANEL, self.width), self.M.shape[2])  # R^T, B_S:, F^T
        self.counters[1] = 0
        # Inverting blocks synchronises with the host, so only units of one column can be recorded.
        self.loop = Loop(self._remove_cheapest, self.M.device if self.width == 1 else torch.device("cpu"))

    def remove_panel(self) -> None:
        """Remove the cheapest units one by one until the panel is full, then apply it."""
        steps = min(self.left, self.panel.shape[2] // self.width)
        self.loop.run(steps)
        self.left -= steps
        self._flush()
        if 0 < self.left <= self.names.shape[1] // 2:
            self._compact()

    def _remove_cheapest(self) -> None:
        w, done, slot = self.width, self.counters[:1], self.counters[1:]
        cost, pick = _traces(self.diagonal_C, self.diagonal_B).masked_fill_(self.gone, torch.inf).min(1, keepdim=True)
        self.picked.index_copy_(1, done, self.names.gather(1, pick))
        self.costs.index_copy_(1, done, cost)
        self.gone.scatter_(1, pick, True)

        columns = pick if w == 1 else pick * w + self.inside  # [L, w]
        rows = self._rows(columns)  # [L, w, 2, n]: B_S: and C_S:
        own = _take(rows.flatten(1, 2), columns).unflatten(1, (w, 2))  # [L, w, 2, w]
        rows_B, rows_C = rows.unbind(2)
        R = rows_B / own[:, :, 0] if w == 1 else torch.linalg.inv(own[:, :, 0]) @ rows_B  # R^T
        F = torch.baddbmm(rows_C, own[:, :, 1], R, alpha=-0.5)  # F^T
        self.panel.index_copy_(2, slot if w == 1 else slot + self.inside, torch.stack([R, rows_B, F], 1))
        self.counters += self.advance
        self._correct_diagonals(*(_by_unit(part, w) for part in (R, rows_B, F)))

    def _rows(self, columns: Tensor) -> Tensor:
        """Rows of B and C corrected by the panel, whose unused rows are zero."""
        count, w = columns.shape
        taken = self.panel.gather(3, columns[:, None, None].expand(-1, *self.panel.shape[1:3], -1))  # [L, 3, p, w]
        weights = (self.mix @ taken.movedim(3, 1)).view(count, 2 * w, -1)  # [L, 2 w, 3 p]
        rows = self.M[self.layers[:, None], :, columns].flatten(1, 2)  # [L, 2 w, n]
        corrected: Tensor = torch.baddbmm(rows, weights, self.panel.flatten(1, 2), alpha=-1)
        return corrected.view(count, w, 2, -1)

    def _correct_diagonals(self, R: Tensor, B: Tensor, F: Tensor) -> None:
        """Update the diagonal blocks, given the blocks [L, units, w, w] of an update."""
        if self.width == 1:
            self.diagonal_B.addcmul_(R, B, value=-1)
            self.diagonal_C.addcmul_(R, F, value=-2)
        else:
            self.diagonal_B -= R.mT @ B
            product = R.mT @ F
            self.diagonal_C -= product + product.mT

    def _flush(self) -> None:
        R, B, F = self.panel.unbind(1)
        self.M[:, 0].baddbmm_(R.mT, B, alpha=-1)
        self.M[:, 1].baddbmm_(R.mT, F, alpha=-1).baddbmm_(F.mT, R, alpha=-1)
        self.panel.zero_()
        self.counters[1] = 0

    def _compact(self) -> None:
        """Half the units are removed: drop their rows and columns."""
        stay = (~self.gone).nonzero()[:, 1].view(len(self.M), -1)  # [L, left]
        columns = (stay[:, :, None] * self.width + self.inside).flatten(1)
        at = self.layers[:, None, None]
        self.M = torch.stack([self.M[at, i, columns[:, :, None], columns[:, None, :]] for i in (0, 1)], 1)
        self._lay_out(self.names.gather(1, stay))


def _stacked(sums: Sequence[Gram], device: torch.device) -> Tensor:
    """[L, n, n] in float64; statistics may be on the host."""
    n = len(sums[0])
    stack = torch.empty(len(sums), n, n, dtype=torch.float64, device=device)
    for matrix, one in zip(stack, sums, strict=True):
        one.copy_to(matrix)
    return stack


def _diagonal_blocks(M: Tensor, width: int) -> Tensor:
    """[L, n, n] -> [L, units, w, w]."""
    count, n, _ = M.shape
    blocks = M.view(count, n // width, width, n // width, width)
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).clone()


def _by_unit(rows: Tensor, width: int) -> Tensor:
    """[L, w, n] -> [L, units, w, w]."""
    blocks: Tensor = rows.unflatten(2, (-1, width))
    return blocks.transpose(1, 2)


def _take(rows: Tensor, columns: Tensor) -> Tensor:
    """rows [L, r, n] at columns [L, w] -> [L, r, w]."""
    return rows.gather(2, columns[:, None].expand(-1, rows.shape[1], -1))


def _traces(C: Tensor, B: Tensor) -> Tensor:
    """tr(C_SS B_SS^-1) of every unit; B blocks of removed units are singular, and their scores are not used."""
    if B.shape[-1] == 1:
        scores: Tensor = C / B
        return scores[..., 0, 0]
    eye = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
    safe = B + eye * torch.finfo(B.dtype).tiny
    inverse, _ = torch.linalg.inv_ex(safe)
    traces: Tensor = (C * inverse.mT).sum((-1, -2))
    return traces.nan_to_num(nan=torch.inf)
