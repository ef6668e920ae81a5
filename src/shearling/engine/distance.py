"""Distance of a student's outputs from the teacher's, without labels, for every head.

`divergences` are per example, in nats. `output_distance` is the training loss of a student, a mean over the batch:

classes      KL divergence in nats; for multi-label models, summed over classes
numbers      squared error / variance of the teacher
spans        KL divergence of start plus end, over real tokens
tokens       KL divergence, mean over real tokens
embeddings   squared distance plus squared error of the similarities within the batch, which rank search results
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shearling.engine.head import ENDS, head_of
from shearling.engine.hooks import device_of, frozen, run
from shearling.engine.losses import embeddings, only, token_mask
from shearling.engine.precision import Precision, kernels
from shearling.sample.batch import Batch

NEVER = -1e4  # the logit of padding: finite, so that 0 * log 0 stays 0


def compared(model: Any, outputs: Any, batch: Batch) -> dict[str, Tensor]:
    """The outputs that `output_distance` compares, with the batch dimension first."""
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
    """Mean distance over the batch, a scalar; 0 for equal outputs. `scale` is from `output_scale`.

    similarities  weight of the similarities term for embeddings
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
        real = token_mask(batch.inputs, logits)
        return each.mean() if real is None else (each * real).sum() / real.sum().clamp_min(1)
    if head == "number":
        return ((logits - target).square() / scale.to(logits)).mean()
    if head == "labels":
        return bernoulli(logits, target).sum(-1).mean()
    return divergence(logits, target).mean()


def output_scale(config: Any, outputs: Mapping[str, Tensor]) -> Tensor:
    """Normaliser of the distance, from the teacher's outputs for some examples.

    The variance for regression, [C]; the mean squared norm for embeddings; 1 for every other head.
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
    """KL(teacher || student) over the last dimension; entries that are -inf in both contribute 0."""
    found, wanted = logits.log_softmax(-1), target.log_softmax(-1)
    each = F.kl_div(found, wanted, reduction="none", log_target=True)
    return each.masked_fill(wanted.isneginf(), 0.0).sum(-1)


def bernoulli(logits: Tensor, target: Tensor) -> Tensor:
    """KL divergence of independent Bernoulli distributions, per class."""
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


def divergences_between(
    teacher: nn.Module,
    student: nn.Module,
    batches: Sequence[Batch],
    precision: Precision,
    *,
    changed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Tensor:
    """[examples], host: the divergence of two models' outputs, ordered by example.

    changed  the context in which the student runs, such as with masks; it may be the same model
    """
    parts: list[Tensor] = []
    with frozen(teacher), frozen(student), torch.no_grad(), kernels(teacher, precision):
        for batch in batches:
            here = batch.to(device_of(teacher))
            wanted = run(teacher, here, precision)
            with changed():
                found = run(student, here, precision)
            parts.append(divergences(teacher, wanted, found, here).double().cpu())
    order = torch.cat([batch.indices for batch in batches]).argsort()
    return torch.cat(parts)[order]


def divergences(model: Any, wanted: Any, found: Any, batch: Batch) -> Tensor:
    """[B]: divergence from the teacher's outputs in nats per example: the increase of the loss.

    For classes, spans and tokens it is the Kullback-Leibler divergence from the teacher's distribution; for numbers and
    embeddings half the squared distance, the second-order change of the sampled losses of `losses.py`. So it has the
    same unit as the error curves of `surgeon`.
    """
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
        real = token_mask(batch.inputs, p)
        each = divergence(q, p)  # [B, S]
        return (each if real is None else each * real).sum(-1)
    if head == "number":
        return 0.5 * (p - q).square().sum(-1)
    if head == "labels":
        return bernoulli(q, p).sum(-1)
    return divergence(q, p)
