"""Where `paper` breaks on a base-size encoder, stage by stage, and what the released code's steps and float64 change.

    python ../shared/tools/base_model.py pack PACK
    python ../shared/tools/base_model.py tune PACK MODELS/mpnet-base-sst2 sst2 ../shared/data      # and mrpc, stsb
    python experiments/base_size.py --models MODELS --data ../shared/data --tasks sst2,stsb,mrpc --device cuda

With more units in a layer than examples, sets of units exist whose gradients cancel on the sample alone.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
from common import Lab, Row, main, pivot
from torch import Tensor

from shearling.methods import Method, Paper, Surgeon
from shearling.methods import paper as method
from shearling.methods.paper import MaskGradients
from shearling.paper.importance import importances
from shearling.pipeline import Plan

BUDGETS = (0.6, 0.5)
BATCH = 32  # examples whose gradients the released code averages


@dataclass(frozen=True)
class Variant:
    """A method, and steps of the released code in place of the paper's."""

    method: Method = field(default_factory=Paper)
    averaged: bool = False  # gradients of batches instead of examples
    released_order: bool = False
    float64: bool = False


VARIANTS = {
    "search": Variant(Paper(rearrange=False, tune=False)),
    "search, tuning": Variant(Paper(rearrange=False)),
    "search, rearrangement": Variant(Paper(tune=False)),
    "search, rearrangement, tuning: the paper": Variant(),
    "the paper, all in float64": Variant(Paper(precision="float32"), float64=True),
    "the paper, released order": Variant(released_order=True),
    "the paper, gradients of batches of 32": Variant(averaged=True),
    "the paper, both": Variant(averaged=True, released_order=True),
    "search, tuning, gradients of batches of 32": Variant(Paper(rearrange=False), averaged=True),
    "guarded": Variant(Paper(guarded=True)),
    "surgeon, no polish": Variant(Surgeon(polish="off")),
}


def averaged(plan: Plan) -> Plan:
    """With the mean gradients of batches in the place of examples."""
    gradients = [seen.gradients[: len(seen.gradients) // BATCH * BATCH] for seen in plan.evidence]
    means = [g.unflatten(0, (-1, BATCH)).mean(1) for g in gradients]
    worth = importances("fisher", plan.structure.sublayers, means, plan.seed)
    none = torch.zeros(len(means[0]), dtype=torch.bool)
    return replace(plan, evidence=[MaskGradients(*pair, none) for pair in zip(means, worth, strict=True)])


def released_order(blocks: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """Every unpruned unit in turn, least important first, joins the pruned ones, and the best one to keep leaves them.

    The set is judged by p^T I p; leaving i out of it changes that by I_ii - 2 r_i, with r = I p.
    """
    found = []
    for block, units in zip(blocks, kept, strict=True):
        fisher = block.double().cpu()
        diagonal, pruned = fisher.diagonal(), torch.ones(len(fisher), dtype=torch.bool)
        pruned[units.cpu()] = False
        interaction = fisher @ pruned.double()
        turns = (~pruned).nonzero().flatten() if 0 < len(units) < len(fisher) else []
        for i in sorted(map(int, turns), key=lambda unit: float(diagonal[unit])):
            pruned[i] = True
            interaction += fisher[i]
            out = int((diagonal - 2 * interaction).masked_fill(~pruned, torch.inf).argmin())
            pruned[out] = False
            interaction -= fisher[out]
        found.append((~pruned).nonzero().flatten())
    return found


def in_float64(lab: Lab, task: str) -> Lab:
    """The same laboratory with the model in double precision."""
    wide = replace(lab, _benches={}, _plans=copy.copy(lab._plans), _samples=lab._samples)
    wide._plans.clear()
    wide.bench(task).model = copy.deepcopy(lab.bench(task).model).double()
    return wide


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        wide = in_float64(lab, task)
        for flops in BUDGETS:
            for name, variant in VARIANTS.items():
                for seed in lab.seeds:
                    lab.check_time()
                    used = wide if variant.float64 else lab
                    plan = used.plan(task, variant.method, seed)
                    order = released_order if variant.released_order else method.rearrange
                    with patch.object(method, "rearrange", order):
                        pruned = (averaged(plan) if variant.averaged else plan).prune(flops=flops)
                    yield {
                        "variant": name, "task": task, "flops": flops, "seed": seed, "dense": lab.bench(task).dense,
                        "value": used.bench(task).exam.take(pruned.model).value,
                        "notes": [r.note for r in pruned.report.repairs if r.note],
                    }  # fmt: skip


def show(found: list[Row], lab: Lab) -> None:
    print(pivot(found, ("flops", "variant")))


if __name__ == "__main__":
    main(sys.modules[__name__])
