"""How far a model's outputs are from the teacher's, in nats an example: what pruning adds to the loss.

For classes, spans and tokens it is the Kullback-Leibler divergence from the teacher's distribution. For numbers and
embeddings it is half the squared distance, which is what the sampled losses of `losses.py` have as their second-order
change. So a divergence can be added to, and compared with, the error curves of `surgeon`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shearling.engine.distance import bernoulli, divergence
from shearling.engine.head import ENDS, head_of
from shearling.engine.hooks import device_of, frozen, run
from shearling.engine.losses import embeddings, only, token_mask
from shearling.engine.precision import Precision, kernels
from shearling.sample.batch import Batch


def between(teacher: nn.Module, student: nn.Module, batches: Sequence[Batch], precision: Precision) -> Tensor:
    """[examples], on the host: of all examples, by their numbers."""
    parts: list[Tensor] = []
    with frozen(teacher), frozen(student), torch.inference_mode(), kernels(precision):
        for batch in batches:
            here = batch.to(device_of(teacher))
            wanted, found = run(teacher, here, precision), run(student, here, precision)
            parts.append(of_examples(teacher, wanted, found, here).double().cpu())
    order = torch.cat([batch.indices for batch in batches]).argsort()
    return torch.cat(parts)[order]


def of_examples(model: Any, wanted: Any, found: Any, batch: Batch) -> Tensor:
    """[B]: the divergence of one model's outputs from those that are wanted."""
    head = head_of(wanted, model.config)
    if head == "span":
        real = batch.inputs.get("attention_mask")
        pairs = ((only(one[end].float(), real) for one in (found, wanted)) for end in ENDS)
        return torch.stack([divergence(*pair) for pair in pairs]).sum(0)
    if head == "embedding":
        a, b = (embeddings(model, one, batch) for one in (wanted, found))
        return 0.5 * (a - b).square().sum(-1)
    p: Tensor = wanted["logits"].float()
    q: Tensor = found["logits"].float()
    if head == "tokens":
        real = token_mask(batch, p)
        each = divergence(q, p)  # [B, S]
        return (each if real is None else each * real).sum(-1)
    if head == "number":
        return 0.5 * (p - q).square().sum(-1)
    if head == "labels":
        return bernoulli(q, p).sum(-1)
    return divergence(q, p)
