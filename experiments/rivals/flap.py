"""FLAP (An et al., AAAI 2024): remove what fluctuates least, and put its mean into a bias.

score of a column of h:  Var(h_j) ||W_:j||^2, standardised within its sublayer so that layers and modules compare; a
head has the mean of its columns. One threshold over the whole model is set by the budget. What a removed column put out
on average, W_:j mean(h_j), becomes a bias of the output projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rivals.subject import Subject, by_unit, cut
from shearling.models.sublayer import columns_of


def flap(subject: Subject, share: float) -> Any:
    """Fluctuation scores, a threshold over all layers, bias compensation."""
    scores = []
    for sublayer, seen in zip(subject.structure.sublayers, subject.activations, strict=True):
        columns = seen.variance * sublayer.weight.detach().double().square().sum(0)
        units = by_unit(sublayer, columns) / sublayer.width
        spread = units.std(correction=0).clamp_min(1e-30) if len(units) > 1 else units.new_ones(())
        scores.append((units - units.mean()) / spread)
    kept = above_threshold(subject, scores, share)
    return cut(subject, kept, [_constant(subject, n, units) for n, units in enumerate(kept)])


def above_threshold(subject: Subject, scores: list[Tensor], share: float) -> list[Tensor]:
    """The best units of all sublayers together that the budget pays for; each pays for its parameters."""
    sublayers = subject.structure.sublayers
    limit = subject.limit(share)
    prices = torch.cat([torch.full((s.units,), float(t[1])) for s, t in zip(sublayers, limit.tables, strict=True)])
    owners = torch.cat([torch.full((s.units,), n) for n, s in enumerate(sublayers)])
    ranked = torch.cat([one.cpu() for one in scores])
    for number, sublayer in enumerate(sublayers):  # what must stay comes first
        mine = (owners == number).nonzero().flatten()
        ranked[mine[ranked[mine].topk(sublayer.floor).indices]] = torch.inf
    order = ranked.argsort(descending=True, stable=True)
    inside = prices[order].double().cumsum(0) <= limit.budget * (1 + 1e-9)
    chosen = torch.zeros(len(order), dtype=torch.bool)
    chosen[order[inside]] = True
    return [chosen[owners == n].nonzero().flatten() for n in range(len(sublayers))]


def _constant(subject: Subject, number: int, kept: Tensor) -> Tensor:
    """[D]: what the removed columns put out on average."""
    sublayer = subject.structure.sublayers[number]
    mean = subject.activations[number].mean.clone()
    mean[columns_of(kept, sublayer.width).to(mean.device)] = 0
    return sublayer.weight.detach().double() @ mean
