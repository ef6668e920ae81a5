"""What was tried to make `surgeon` better, each against the default: tried.json.

Realignment of what goes into the units, other damping and ridge, other losses for the curvature (the exact factor of
the Fisher information of a softmax instead of a drawn label, softer temperatures, the bare logits), errors weighted by
depth or by kind in the allocation, and a refit of the pooler on the first token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from common import SURGEON, Lab, Row, main, pivot

from shearling.engine import losses
from shearling.engine.head import head_of
from shearling.engine.losses import sampled_losses
from shearling.engine.moments import Moments
from shearling.methods.surgeon import Ordered
from shearling.pipeline import Plan
from shearling.sample.batch import uniform
from shearling.sample.sample import Sample
from shearling.surgeon.order import Order
from shearling.surgeon.refit import refit

BUDGETS = (0.5, 0.3, 0.2, 0.1)
TOKENS = 2048  # per batch of the pooler's refit
Loss = Callable[..., torch.Tensor]


def softmax_factor(temperature: float) -> Loss:
    """z weighted by L s, with L L^T = diag(p) - p p^T and random signs s: no label is drawn, so there is less noise."""

    def losses(model: Any, outputs: Any, batch: Any, seed: int) -> torch.Tensor:
        if head_of(outputs, model.config) == "number":
            return sampled_losses(model, outputs, batch, seed)
        z = outputs.logits.float()
        p = (z.detach() / temperature).softmax(-1)
        signed = p.sqrt() * ((uniform(batch.indices, z.shape[-1], seed) < 0.5).to(z) * 2 - 1)
        return ((signed - p * signed.sum(-1, keepdim=True)) * z).sum(-1)

    return losses


def bare_logits(model: Any, outputs: Any, batch: Any, seed: int) -> torch.Tensor:
    """Every logit counts the same, however sure the model is."""
    if head_of(outputs, model.config) == "number":
        return sampled_losses(model, outputs, batch, seed)
    z = outputs.logits.float()
    signs = (uniform(batch.indices, z.shape[-1], seed) < 0.5).to(z) * 2 - 1
    return ((z - z.mean(-1, keepdim=True)) * signs).sum(-1)


LOSSES: dict[str, Loss] = {
    "drawn label": sampled_losses,
    "exact factor": softmax_factor(1.0),
    "temperature 4": softmax_factor(4.0),
    "bare logits": bare_logits,
}


def weighted(plan: Plan, per_layer: float, heads: float) -> Plan:
    """The same plan with errors multiplied by a power of the depth, and those of heads by a factor."""
    weights = [per_layer**s.depth * (heads if s.kind == "heads" else 1.0) for s in plan.structure.sublayers]
    orders = [Order(o.removed, o.error * w) for o, w in zip((e.order for e in plan.evidence), weights, strict=True)]
    return replace(plan, evidence=[Ordered(order) for order in orders])


def refit_pooler(teacher: Any, student: Any, sample: Sample) -> None:
    """Fold a map from the student's first token to the teacher's into the pooler of a BERT classifier."""
    dense, small = teacher.bert.pooler.dense, student.bert.pooler.dense
    size = small.in_features
    fit, held_out = (Moments.zeros(size, size, small.weight) for _ in range(2))
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, key=key: seen.update({key: args[0]}))
        for key, module in (("teacher", dense), ("student", small))
    ]
    try:
        with torch.inference_mode():
            for batch in sample.cut(TOKENS):
                inputs = batch.to(small.weight.device).inputs
                teacher(**inputs)
                student(**inputs)
                judge = batch.held_out().to(small.weight.device)
                fit.add(seen["student"][~judge], seen["teacher"][~judge])
                held_out.add(seen["student"][judge], seen["teacher"][judge])
            eye = torch.eye(size, dtype=torch.float64, device=small.weight.device)
            found = refit(eye, eye.new_zeros(size), fit, held_out)
            if found.kept and found.bias is not None:
                weight = small.weight.double()
                small.bias.add_((weight @ found.bias).to(small.bias))
                small.weight.copy_((weight @ found.weight).to(small.weight))
    finally:
        for hook in hooks:
            hook.remove()


def variants() -> dict[str, dict[str, Any]]:
    """Name -> what differs from the default."""
    return {
        "default": {},
        "no realignment": {"method": replace(SURGEON, realign=False)},
        **{f"loss: {name}": {"loss": name} for name in LOSSES if name != "drawn label"},
        "damp 1e-1": {"method": replace(SURGEON, damp=1e-1)},
        "damp 1e-3": {"method": replace(SURGEON, damp=1e-3)},
        "ridge 1e-1": {"method": replace(SURGEON, ridge=1e-1)},
        "ridge 1e-3": {"method": replace(SURGEON, ridge=1e-3)},
        "early layers dearer": {"weights": (0.8, 1.0)},
        "late layers dearer": {"weights": (1.25, 1.0)},
        "heads cheaper": {"weights": (1.0, 0.5)},
        "heads dearer": {"weights": (1.0, 2.0)},
        "pooler refitted": {"pooler": True},
    }


def rows(lab: Lab) -> Iterator[Row]:
    for task in lab.tasks:
        for seed in lab.seeds:
            for name, change in variants().items():
                yield from _points(lab, task, seed, name, change)


def _points(lab: Lab, task: str, seed: int, name: str, change: dict[str, Any]) -> Iterator[Row]:
    method = change.get("method", SURGEON)
    if "loss" in change:  # a measurement of its own
        before = losses.sampled_losses
        losses.sampled_losses = LOSSES[change["loss"]]
        try:
            plan = replace(lab.plan(task, replace(method, damp=method.damp * (1 + 1e-9)), seed), method=method)
            lab._plans.popitem()
        finally:
            losses.sampled_losses = before
    else:
        plan = lab.plan(task, method, seed)
    if "weights" in change:
        plan = weighted(plan, *change["weights"])
    bench = lab.bench(task)
    for flops in BUDGETS:
        lab.check_time()
        model = plan.prune(flops=flops).model
        if change.get("pooler"):
            refit_pooler(bench.model, model, plan.sample)
        yield {"variant": name, "task": task, "seed": seed, "flops": flops, "value": bench.exam.take(model).value}


def show(found: list[Row], lab: Lab) -> None:
    keys = dict.fromkeys((row["variant"], row["flops"], row["task"]) for row in found)
    means = []
    for variant, flops, task in keys:
        values = [r["value"] for r in found if (r["variant"], r["flops"], r["task"]) == (variant, flops, task)]
        means.append({"variant": variant, "flops": flops, "task": task, "value": sum(values) / len(values)})
    print(pivot(means, ("variant", "flops")))


if __name__ == "__main__":
    main(sys.modules[__name__])
