"""One loss per example, for every head: against labels, or against a draw from the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.engine.head import ENDS, head_of, predicts_next_token
from shearling.errors import DataError, ModelError
from shearling.models.pooling import pool, pooling_of
from shearling.sample.batch import IGNORED, Batch, uniform

CHUNK = {"cpu": 2**22, "cuda": 2**27}  # logits whose distribution is worked out at a time


def example_losses(model: Any, outputs: Any, batch: Batch, *, seed: int, labels: bool) -> Tensor:
    """[B]: against the data's labels, or against a draw from the model."""
    return label_losses(model, outputs, batch) if labels else sampled_losses(model, outputs, batch, seed)


def label_losses(model: Any, outputs: Any, batch: Batch) -> Tensor:
    """[B]: what the model's own loss would be, run on each example alone."""
    labels, head = batch.labels, head_of(outputs, model.config)
    if head == "span":
        missing = [k for k in ("start_positions", "end_positions") if k not in labels]
        if missing:
            raise DataError(f"A question-answering loss needs {missing}; the batches bring {sorted(labels)}.")
        ends = ((outputs.start_logits, labels["start_positions"]), (outputs.end_logits, labels["end_positions"]))
        real = batch.inputs.get("attention_mask")  # padding is no answer, and how much there is must not matter
        return torch.stack([_span_loss(only(logits, real), at) for logits, at in ends]).mean(0)
    if "labels" not in labels or head == "embedding":
        raise DataError("This loss needs labels and a head; prune an embedding model without --labels.")
    logits: Tensor = outputs.logits.float()
    target = labels["labels"]
    if head == "tokens":
        return _token_loss(model, logits, target)
    if head == "number":
        return ((logits - target.float().view_as(logits)) ** 2).mean(-1)
    if head == "labels":
        if target.shape != logits.shape:
            raise DataError(
                f"This model gives {logits.shape[-1]} labels an example, each 0 or 1; the data's have the shape "
                f"{list(target.shape[1:])} an example. Give labels of that shape, or data without any."
            )
        return F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none").mean(-1)
    _in_range(target, logits.shape[-1])
    return F.cross_entropy(logits, target.long(), reduction="none")


def sampled_losses(model: Any, outputs: Any, batch: Batch, seed: int) -> Tensor:
    """[B]: the loss against labels drawn from the model's own output; needs none from the data.

    The gradient of such a loss has the Fisher information as its second moment. For real-valued outputs (regression,
    embeddings) a product with random signs takes the place of the draw.
    """
    head = head_of(outputs, model.config)
    if head == "span":
        real = batch.inputs.get("attention_mask")
        draws = uniform(batch.indices, 2, seed)
        both = zip(ENDS, draws.T, strict=True)
        return torch.stack([_drawn_loss(only(outputs[end].float(), real), draw) for end, draw in both]).sum(0)
    if head == "embedding":
        return _signed(embeddings(model, outputs, batch), batch, seed)
    logits: Tensor = outputs.logits.float()
    if head == "tokens":
        real = token_mask(batch, logits)
        losses = _drawn_loss(logits, uniform(batch.indices, logits.shape[1], seed))  # [B, S]
        return (losses if real is None else losses * real).sum(-1)
    if head == "number":
        return _signed(logits, batch, seed)
    if head == "labels":
        draw = uniform(batch.indices, logits.shape[-1], seed).to(logits.device)
        target = (draw < logits.detach().sigmoid()).float()
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1)
    return _drawn_loss(logits, uniform(batch.indices, 1, seed)[:, 0])


def check_finite(losses: Sequence[Tensor], batches: Sequence[Batch]) -> None:
    """Raise an error that names the first example whose loss is not a number.

    Called once, after the pass: asking after every batch would stop a GPU's queue.
    """
    if all(bool(one.isfinite().all()) for one in losses):
        return
    for one, batch in zip(losses, batches, strict=True):
        bad = (~one.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ModelError(
                f"The loss of example {int(batch.indices[bad[0]])} is {float(one[bad[0]])}. Check the weights and "
                "that example; half precision may overflow: try float32 (--dtype float32)."
            )


def _drawn_loss(logits: Tensor, draw: Tensor) -> Tensor:
    """Cross-entropy against a class drawn by inverting the model's own distribution at `draw`."""
    losses: Tensor = _Drawn.apply(logits.flatten(0, -2), draw.flatten().to(logits.device))  # type: ignore[no-untyped-call]
    return losses.view(draw.shape)


class _Drawn(torch.autograd.Function):
    """Cross-entropy of [n, C] logits against drawn classes, some rows at a time.

    Over a vocabulary, the distribution in float64 and its sums would take several times the memory of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, draw: Tensor) -> Tensor:
        parts, draws = (_chunks(logits)(tensor) for tensor in (logits, draw))
        target = torch.cat([_draw_classes(part, at) for part, at in zip(parts, draws, strict=True)])
        norm = torch.cat([part.logsumexp(-1) for part in parts])
        ctx.save_for_backward(logits, target, norm)
        return norm - logits.gather(1, target[:, None])[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, target, norm = ctx.saved_tensors
        result = torch.empty_like(logits)
        every = map(_chunks(logits), (result, logits, target, norm, gradients[0]))
        for out, part, at, total, gradient in zip(*every, strict=True):
            torch.exp(part - total[:, None], out=out)  # softmax, less one at the class that was drawn
            out.scatter_add_(1, at[:, None], torch.full_like(at[:, None], -1, dtype=out.dtype))
            out *= gradient[:, None]
        return result, None


def _chunks(logits: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    rows = max(1, CHUNK.get(logits.device.type, CHUNK["cpu"]) // logits.shape[1])
    return lambda tensor: tensor.split(rows)


def _draw_classes(logits: Tensor, draw: Tensor) -> Tensor:
    """[n]: where the running sum of the distribution passes `draw`."""
    steps = logits.double().softmax(-1).cumsum(-1)
    target = torch.searchsorted(steps, draw[:, None] * steps[:, -1:], right=True)
    return target[:, 0].clamp_(max=logits.shape[-1] - 1)


def _signed(values: Tensor, batch: Batch, seed: int) -> Tensor:
    signs = (uniform(batch.indices, values.shape[-1], seed) < 0.5).to(values) * 2 - 1
    return (values * signs).sum(-1)


def embeddings(model: Any, outputs: Any, batch: Batch) -> Tensor:
    """[B, D]: what an embedding model is used for, by its own pooling; of length one where only directions count."""
    pooling = pooling_of(model)
    pooled = pool(outputs, batch.inputs.get("attention_mask"), pooling).float()
    return F.normalize(pooled, dim=-1) if pooling.direction_only else pooled


def _span_loss(logits: Tensor, positions: Tensor) -> Tensor:
    # As in transformers, an answer before the window counts as its first token, one beyond it counts nothing.
    target = positions.long().clamp_min(0)
    target = target.masked_fill(target >= logits.shape[-1], IGNORED)
    return F.cross_entropy(logits.float(), target, reduction="none")


def _token_loss(model: Any, logits: Tensor, target: Tensor) -> Tensor:
    """Mean over the labelled tokens of each example; language models predict the next token."""
    if predicts_next_token(model):
        logits, target = logits[:, :-1], target[:, 1:]
    if logits.shape[:2] != target.shape:
        raise DataError(f"Labels of shape {tuple(target.shape)} do not fit outputs of shape {tuple(logits.shape)}.")
    counted = target != IGNORED
    _in_range(target[counted], logits.shape[-1])
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten().long(), reduction="none").view(target.shape)
    return losses.sum(-1) / counted.sum(-1).clamp_min(1)


def _in_range(target: Tensor, classes: int) -> None:
    if len(target) and (int(target.min()) < 0 or int(target.max()) >= classes):
        raise DataError(
            f"Labels run from {int(target.min())} to {int(target.max())}, but the head has {classes} classes "
            f"(0 to {classes - 1}). Is this the data the model was fine-tuned on?"
        )


def token_losses(logits: Tensor, labels: Tensor, reduction: str = "none") -> Tensor:
    """[B, S], or [B] where they are summed: the cross-entropy of tokens, without those whose label is ignored.

    One example at a time: a float32 copy of all logits over the vocabulary may not fit.
    """
    rows = zip(logits, labels.to(logits.device), strict=True)
    return torch.stack(
        [F.cross_entropy(row.float(), at, ignore_index=IGNORED, reduction=reduction) for row, at in rows]
    )


def only(logits: Tensor, real: Tensor | None) -> Tensor:
    """Scores [B, S] of positions, those of padding set to minus infinity."""
    return logits if real is None else logits.masked_fill(real.to(logits.device) == 0, float("-inf"))


def token_mask(batch: Batch, logits: Tensor) -> Tensor | None:
    """[B, S], 1 for real tokens, of the mask that belongs to the logits [B, S, C]; None where there is none."""
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.inputs.get(name)
        if mask is not None and mask.shape == logits.shape[:2]:
            return mask.to(logits)
    return None
