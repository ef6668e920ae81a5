"""Mask rearrangement (Eq. 11): exchange units within a sublayer, taking their interactions into account.

The objective of a sublayer is p^T I p with p = 1 - m. Starting from the searched mask, each pruned unit i, most
important first, is swapped for the unpruned j that lowers the objective most, if any does. With r = I p the change is

    delta_ij = I_ii - 2 r_i + 2 r_j - 2 I_ij + I_jj

so a step reads one row of I. Sublayers of one size are batched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shearling.engine.cuda_graph import Loop


def rearrange(blocks: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """The kept units per sublayer after rearrangement; the counts do not change."""
    groups: dict[tuple[int, torch.device], list[int]] = {}
    for i, (block, units) in enumerate(zip(blocks, kept, strict=True)):
        if 0 < len(units) < len(block):  # nothing to swap otherwise
            groups.setdefault((len(block), block.device), []).append(i)
    result = list(kept)
    for members in groups.values():
        pruned = _swap(torch.stack([blocks[i] for i in members]), [kept[i] for i in members])
        for i, mask in zip(members, pruned.cpu(), strict=True):
            result[i] = (~mask).nonzero().flatten()
    return result


def _swap(blocks: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """[L, n] bool: the pruned units after one swap attempt for each."""
    count, n, _ = blocks.shape
    pruned = torch.ones(count, n, dtype=torch.bool, device=blocks.device)
    for row, units in enumerate(kept):
        pruned[row, units.to(blocks.device)] = False
    diagonal = blocks.diagonal(dim1=1, dim2=2)
    interaction = (blocks @ pruned.to(blocks)[..., None])[..., 0]  # r = I p, [L, n]
    turns = pruned.sum(1, keepdim=True)  # [L, 1]
    queue = diagonal.masked_fill(~pruned, -torch.inf).argsort(dim=1, descending=True, stable=True)
    layers = torch.arange(count, device=blocks.device)
    turn = torch.zeros(1, dtype=torch.long, device=blocks.device)

    def take_turn() -> None:
        i = queue.index_select(1, turn)  # [L, 1]
        row_i = blocks[layers, i[:, 0]]  # [L, n]
        own = diagonal.gather(1, i) - 2 * interaction.gather(1, i)
        deltas = own + 2 * interaction - 2 * row_i + diagonal
        delta, j = deltas.masked_fill(pruned, torch.inf).min(1, keepdim=True)
        swap = (delta < 0) & (turn < turns)  # [L, 1]
        pruned.scatter_(1, i, pruned.gather(1, i) & ~swap)
        pruned.scatter_(1, j, pruned.gather(1, j) | swap)
        interaction.add_(torch.where(swap, blocks[layers, j[:, 0]] - row_i, 0))
        turn.add_(1)

    Loop(take_turn, blocks.device).run(int(turns.max()))
    return pruned
