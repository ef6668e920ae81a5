"""Stage 2 of `surgeon`: in which order a sublayer gives up its units, and what each step costs.

Structured optimal brain surgeon. With B = (A + damp mean(diag A) I)^-1, C = W^T G W and S the columns of a unit,
removing the unit and refitting all other columns raises the estimated loss by

    cost(S) = tr(C_SS B_SS^-1)

and leaves, with R = B_:S B_SS^-1 and F = C_:S - R C_SS / 2,

    B <- B - R B_S:        C <- C - R F^T - F R^T

The greedy order follows from taking the cheapest unit again and again. Only the diagonal blocks of B and C decide, so
whole updates can wait: the last few (R, B_S:, F) are kept in a panel, a row of B or C is corrected by the panel when
it is needed, and a full panel is worked in with three matrix products. Sublayers of one shape go in one batch, and a
step asks nothing of the host, so that a GPU can run thousands of them in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shearling.engine.cuda_graph import Loop
from shearling.engine.distributed import dealt, gathered
from shearling.engine.progress import Progress, silent
from shearling.errors import ModelError
from shearling.surgeon.damped import damped_factor
from shearling.surgeon.measure import Curvature

DAMP = 1e-2
PANEL = 32  # columns
TOGETHER = {"cpu": 160 * 2**20, "cuda": 2 * 2**30}  # bytes of B for the sublayers that are worked on together


@dataclass(frozen=True)
class Order:
    """One sublayer's way down: `removed[k]` is the k-th unit to go, `error[k]` the loss once k are gone."""

    removed: Tensor  # [units], host
    error: Tensor  # [units + 1], host, float64, error[0] = 0

    def kept(self, count: int) -> Tensor:
        """The units that stay when `count` may, ascending."""
        return self.removed[len(self.removed) - count :].sort().values


def order(curvatures: Sequence[Curvature], *, damp: float = DAMP, progress: Progress = silent) -> list[Order]:
    """An order for every sublayer: those of one shape are worked on together, and several processes share them out."""
    mine = dealt([c.A.numel() for c in curvatures])
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
    everyones = gathered(orders)
    return [everyones[i] for i in range(len(curvatures))]


def _bounded(groups: Iterable[list[int]], curvatures: Sequence[Curvature]) -> Iterator[list[int]]:
    """The groups in parts that memory has room for."""
    for members in groups:
        one = curvatures[members[0]]
        size = max(1, TOGETHER.get(one.W.device.type, TOGETHER["cpu"]) // max(1, 8 * one.A.numel()))
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
    picks = state.picked.cpu()  # [L, units]
    errors = state.costs.cpu().clamp_min(0).cumsum(1)
    zero = torch.zeros(1, dtype=torch.float64)
    return [Order(p, torch.cat([zero, e])) for p, e in zip(picks, errors, strict=True)]


class _State:
    """B and C of L sublayers of one shape, behind a panel of updates that wait."""

    def __init__(self, B: Tensor, C: Tensor, width: int) -> None:
        self.B, self.C, self.width = B, C, width  # [L, n, n]
        count, units = len(B), B.shape[1] // width
        self.layers = torch.arange(count, device=B.device)
        self.inside = torch.arange(width, device=B.device)
        self.picked = torch.zeros(count, units, dtype=torch.long, device=B.device)
        self.costs = torch.zeros(count, units, dtype=B.dtype, device=B.device)
        self.done = torch.zeros(1, dtype=torch.long, device=B.device)
        self.left = units
        self._lay_out(torch.arange(units, device=B.device).expand(count, -1).contiguous())

    @staticmethod
    def start(batch: Sequence[Curvature], damp: float) -> _State:
        device = batch[0].W.device
        A, W, G = (torch.stack([getattr(c, name).to(device).double() for c in batch]) for name in ("A", "W", "G"))
        if not all(bool(statistic.isfinite().all()) for statistic in (A, W, G)):
            raise ModelError(
                "The activations, gradients or weights of a sublayer are not finite, so its units cannot be ordered. "
                "Check the weights; half precision may overflow: try --dtype float32."
            )
        # A sublayer that never fired still needs an inverse; its columns then cost nothing, as they should.
        B = torch.cholesky_inverse(damped_factor(A, damp))
        return _State(B, W.mT @ G @ W, batch[0].width)

    def _lay_out(self, names: Tensor) -> None:
        """Start with an empty panel; `names` [L, units] are the units' numbers in the whole sublayer."""
        self.names = names
        self.alive = torch.ones_like(names, dtype=torch.bool)
        self.diagonal_B = _diagonal_blocks(self.B, self.width)  # [L, units, w, w]
        self.diagonal_C = _diagonal_blocks(self.C, self.width)
        shape = (len(names), max(PANEL, self.width), self.B.shape[1])
        self.panel_R, self.panel_B, self.panel_F = (self.B.new_zeros(shape) for _ in range(3))
        self.slot = torch.zeros(1, dtype=torch.long, device=self.B.device)  # the panel's first free row
        # Inverting blocks asks the host whether it went well, so only units of one column can be recorded.
        self.loop = Loop(self._remove_cheapest, self.B.device if self.width == 1 else torch.device("cpu"))

    def remove_panel(self) -> None:
        """Take out the cheapest units, one after the other, until the panel is full; then work it in."""
        steps = min(self.left, self.panel_R.shape[1] // self.width)
        self.loop.run(steps)
        self.left -= steps
        self._flush()
        if 0 < self.left <= self.names.shape[1] // 2:
            self._compact()

    def _remove_cheapest(self) -> None:
        w = self.width
        scores = _traces(self.diagonal_C, self.diagonal_B).masked_fill(~self.alive, torch.inf)
        cost, pick = scores.min(1, keepdim=True)  # [L, 1]
        self.picked.index_copy_(1, self.done, self.names.gather(1, pick))
        self.costs.index_copy_(1, self.done, cost)
        self.alive.scatter_(1, pick, False)

        columns = pick * w + self.inside  # [L, w]
        rows_B, rows_C = self._rows(columns)  # [L, w, n]: B_S: and C_S:
        own_B, own_C = _take(rows_B, columns), _take(rows_C, columns)  # [L, w, w]
        R = _inverse(own_B) @ rows_B  # R^T
        F = rows_C - 0.5 * own_C @ R  # F^T
        slots = self.slot + self.inside
        self.panel_R.index_copy_(1, slots, R)
        self.panel_B.index_copy_(1, slots, rows_B)
        self.panel_F.index_copy_(1, slots, F)
        self.slot += w
        self.done += 1

        R_blocks, B_blocks, F_blocks = (_by_unit(rows, w) for rows in (R, rows_B, F))  # [L, units, w, w]
        self.diagonal_B -= _products(R_blocks, B_blocks)
        product = _products(R_blocks, F_blocks)
        self.diagonal_C -= product + product.mT

    def _rows(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of B and C as they would be had the panel been worked in; its free rows are zero."""
        at = self.layers[:, None]
        R_S, F_S = _take(self.panel_R, columns).mT, _take(self.panel_F, columns).mT  # [L, w, p]
        rows_B = torch.baddbmm(self.B[at, columns], R_S, self.panel_B, alpha=-1)
        rows_C = torch.baddbmm(self.C[at, columns], R_S, self.panel_F, alpha=-1)
        return rows_B, torch.baddbmm(rows_C, F_S, self.panel_R, alpha=-1)

    def _flush(self) -> None:
        R, B, F = self.panel_R, self.panel_B, self.panel_F
        self.B.baddbmm_(R.mT, B, alpha=-1)
        self.C.baddbmm_(R.mT, F, alpha=-1).baddbmm_(F.mT, R, alpha=-1)
        R.zero_()
        F.zero_()
        self.slot.zero_()

    def _compact(self) -> None:
        """Half the units are gone: go on with matrices of half the size."""
        stay = self.alive.nonzero()[:, 1].view(len(self.B), -1)  # [L, left]
        columns = (stay[:, :, None] * self.width + self.inside).flatten(1)
        at = self.layers[:, None, None]
        self.B, self.C = (M[at, columns[:, :, None], columns[:, None, :]] for M in (self.B, self.C))
        self._lay_out(self.names.gather(1, stay))


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


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a^T b of every block; the common case of blocks of one is no matrix product at all."""
    return a * b if a.shape[-1] == 1 else a.mT @ b


def _inverse(blocks: Tensor) -> Tensor:
    return blocks.reciprocal() if blocks.shape[-1] == 1 else torch.linalg.inv(blocks)


def _traces(C: Tensor, B: Tensor) -> Tensor:
    """tr(C_SS B_SS^-1) of every unit; a removed unit's B block is singular and its score is not used."""
    if B.shape[-1] == 1:
        scores: Tensor = C / B
        return scores[..., 0, 0]
    eye = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
    safe = B + eye * torch.finfo(B.dtype).tiny
    inverse, _ = torch.linalg.inv_ex(safe)
    traces: Tensor = (C * inverse.mT).sum((-1, -2))
    return traces.nan_to_num(nan=torch.inf)
