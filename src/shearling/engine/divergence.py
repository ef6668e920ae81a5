"""How far a model's outputs are from the teacher's, in nats an example: what pruning adds to the loss.

For classes, spans and tokens it is the Kullback-Leibler divergence from the teacher's distribution. For numbers and
embeddings it is half the squared distance, which is what the sampled losses of `losses.py` have as their second-order
change. So a divergence can be added to, and compared with, the error curves of `surgeon`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shearling.engine.distance import bernoulli, divergence
from shearling.engine.hooks import device_of, frozen, run
from shearling.engine.losses import embeddings, is_multi_label, is_regression, only, token_mask
from shearling.engine.precision import Precision
from shearling.sample.batch import Batch


def divergences(teacher: Any, students: Sequence[Any], batches: Sequence[Batch], precision: Precision) -> list[float]:
    """The mean over the examples, for each student; the teacher runs once for all of them."""
    totals = [0.0] * len(students)
    with torch.inference_mode(), frozen(teacher):
        for batch in batches:
            here = batch.to(device_of(teacher))
            wanted = run(teacher, here, precision)
            for number, student in enumerate(students):
                with frozen(student):
                    found = run(student, here, precision)
                totals[number] += float(of_examples(teacher, wanted, found, here).sum())
    return [total / sum(map(len, batches)) for total in totals]


def of_examples(model: Any, wanted: Any, found: Any, batch: Batch) -> Tensor:
    """[B]: the divergence of one model's outputs from those that are wanted."""
    if "start_logits" in wanted:
        real = batch.inputs.get("attention_mask")
        pairs = ((only(one[end].float(), real) for one in (found, wanted)) for end in ("start_logits", "end_logits"))
        return torch.stack([divergence(*pair) for pair in pairs]).sum(0)
    if "logits" not in wanted:
        a, b = (embeddings(model, one, batch) for one in (wanted, found))
        return 0.5 * (a - b).square().sum(-1)
    p: Tensor = wanted["logits"].float()
    q: Tensor = found["logits"].float()
    if p.dim() == 3:
        real = token_mask(batch, p)
        each = divergence(q, p)  # [B, S]
        return (each if real is None else each * real).sum(-1)
    if is_regression(model.config, p):
        return 0.5 * (p - q).square().sum(-1)
    if is_multi_label(model.config):
        return bernoulli(q, p).sum(-1)
    return divergence(q, p)
