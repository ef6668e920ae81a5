"""How far a student's outputs are from the teacher's, without labels, for every head.

classes      KL divergence in nats; per class where several may hold at once
numbers      squared error over the teacher's variance
spans        KL divergence of start and end over real tokens, added
tokens       KL divergence, mean over real tokens
embeddings   squared distance, and squared error of the similarities within the batch, which is what a search ranks by
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.engine.head import ENDS, head_of
from shearling.engine.losses import embeddings, token_mask
from shearling.sample.batch import Batch

NEVER = -1e4  # the logit of padding: finite, so that 0 * log 0 stays 0


def compared(model: Any, outputs: Any, batch: Batch) -> dict[str, Tensor]:
    """The part of a model's outputs that `output_distance` looks at; every tensor has the examples first."""
    head = head_of(outputs, model.config)
    if head == "embedding":
        return {"embedding": embeddings(model, outputs, batch)}
    return {name: outputs[name] for name in (ENDS if head == "span" else ("logits",))}


def output_distance(
    config: Any,
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    batch: Batch,
    scale: Tensor,
    *,
    similarities: float = 1.0,
) -> Tensor:
    """A scalar, 0 where the outputs are equal: the mean over the batch. `scale` comes from `output_scale`.

    similarities  their weight beside the distance of embeddings
    """
    found = {name: value.float() for name, value in student.items()}
    wanted = {name: value.to(found[name]) for name, value in teacher.items()}
    head = head_of(found, config)
    if head == "embedding":
        return _embedding_distance(found["embedding"], wanted["embedding"], scale, similarities)
    if head == "span":
        return torch.stack([_span_distance(found[end], wanted[end], batch) for end in ENDS]).sum()
    logits, target = found["logits"], wanted["logits"]
    if head == "tokens":
        each = divergence(logits, target)  # [B, S]
        real = token_mask(batch, logits)
        return each.mean() if real is None else (each * real).sum() / real.sum().clamp_min(1)
    if head == "number":
        return ((logits - target).square() / scale.to(logits)).mean()
    if head == "labels":
        return bernoulli(logits, target).sum(-1).mean()
    return divergence(logits, target).mean()


def output_scale(config: Any, outputs: Mapping[str, Tensor]) -> Tensor:
    """What makes distances of different models compare, from the teacher's outputs for some examples.

    The variance of numbers, [C]; the mean square length of embeddings; 1 for every other head.
    """
    one = torch.ones((), device=next(iter(outputs.values())).device)
    head = head_of(outputs, config)
    if head == "embedding":
        return outputs["embedding"].float().square().sum(-1).mean().clamp_min(1e-12)
    if head != "number" or len(outputs["logits"]) < 2:
        return one
    variance = outputs["logits"].float().var(0, correction=0)
    return torch.where(variance > 0, variance, one)


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(teacher || student) over the last dimension; scores that are minus infinity in both count nothing."""
    found, wanted = logits.log_softmax(-1), target.log_softmax(-1)
    each = F.kl_div(found, wanted, reduction="none", log_target=True)
    return each.masked_fill(wanted.isneginf(), 0.0).sum(-1)


def bernoulli(logits: Tensor, target: Tensor) -> Tensor:
    """KL divergence of every class that may hold by itself."""
    chance = target.sigmoid()
    found, least = (F.binary_cross_entropy_with_logits(x, chance, reduction="none") for x in (logits, target))
    return found - least


def _span_distance(logits: Tensor, target: Tensor, batch: Batch) -> Tensor:
    real = batch.inputs.get("attention_mask")
    if real is not None and real.shape == logits.shape:
        padding = real.to(logits.device) == 0
        logits, target = logits.masked_fill(padding, NEVER), target.masked_fill(padding, NEVER)
    return divergence(logits, target).mean()


def _embedding_distance(found: Tensor, wanted: Tensor, scale: Tensor, similarities: float) -> Tensor:
    distance = (found - wanted).square().sum(-1).mean() / scale
    return distance + similarities * (found @ found.T - wanted @ wanted.T).square().mean() / scale.square()
