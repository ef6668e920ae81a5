"""How far a student's outputs are from the teacher's, without labels, for every head that `losses.py` knows.

classes               KL divergence; per class where several may hold at once
numbers               squared error over the teacher's variance
spans                 KL divergence of start and end over real tokens, added
tokens                KL divergence, mean over real tokens
embeddings            1 - cosine, plus the squared error of the similarities within the batch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.engine.losses import _embedding, _is_multi_label, _token_mask, is_regression
from shearling.sample.sample import Batch

NEVER = -1e4  # the logit of a token that is padding: finite, so that 0 * log 0 stays 0


def compared(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    """The part of a model's outputs that `output_distance` looks at; every tensor has the examples first."""
    if "start_logits" in outputs:
        return {"start": outputs.start_logits, "end": outputs.end_logits}
    if "logits" in outputs:
        return {"logits": outputs.logits}
    return {"embedding": _embedding(outputs, batch)}


def output_distance(
    config: Any, student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], batch: Batch, scale: Tensor
) -> Tensor:
    """A scalar, 0 where the outputs are equal: the mean over the batch. `scale` comes from `output_scale`."""
    found = {name: value.float() for name, value in student.items()}
    wanted = {name: value.to(found[name]) for name, value in teacher.items()}
    if "embedding" in found:
        return _embedding_distance(found["embedding"], wanted["embedding"])
    if "start" in found:
        return torch.stack([_span_distance(found[end], wanted[end], batch) for end in ("start", "end")]).sum()
    logits, target = found["logits"], wanted["logits"]
    if logits.dim() == 3:
        return _token_distance(logits, target, batch)
    if is_regression(config, logits):
        return ((logits - target).square() / scale.to(logits)).mean()
    if _is_multi_label(config):
        return _bernoulli(logits, target).sum(-1).mean()
    return _divergence(logits, target).mean()


def output_scale(config: Any, logits: Tensor) -> Tensor:
    """The variance of the teacher's numbers [B, C] over some examples; 1 for every other head."""
    if not is_regression(config, logits) or len(logits) < 2:
        return torch.ones((), device=logits.device)
    variance = logits.float().var(0, correction=0)
    return torch.where(variance > 0, variance, torch.ones_like(variance))


def _divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(teacher || student) over the last dimension."""
    return F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def _bernoulli(logits: Tensor, target: Tensor) -> Tensor:
    """KL divergence of every class that may hold by itself."""
    chance = target.sigmoid()
    found, least = (F.binary_cross_entropy_with_logits(x, chance, reduction="none") for x in (logits, target))
    return found - least


def _span_distance(logits: Tensor, target: Tensor, batch: Batch) -> Tensor:
    real = batch.inputs.get("attention_mask")
    if real is not None and real.shape == logits.shape:
        padding = real.to(logits.device) == 0
        logits, target = logits.masked_fill(padding, NEVER), target.masked_fill(padding, NEVER)
    return _divergence(logits, target).mean()


def _token_distance(logits: Tensor, target: Tensor, batch: Batch) -> Tensor:
    divergence = _divergence(logits, target)  # [B, S]
    real = _token_mask(batch, logits)
    return divergence.mean() if real is None else (divergence * real).sum() / real.sum().clamp_min(1)


def _embedding_distance(found: Tensor, wanted: Tensor) -> Tensor:
    a, b = F.normalize(found, dim=-1), F.normalize(wanted, dim=-1)
    return (1 - (a * b).sum(-1)).mean() + (a @ a.T - b @ b.T).square().mean()
