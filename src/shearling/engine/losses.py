"""One loss per example, for every head: against labels, or against labels sampled from the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.engine.head import ENDS, head_of, predicts_next_token
from shearling.errors import DataError, ModelError
from shearling.models.pooling import pool, pooling_of
from shearling.sample.batch import IGNORED, Batch, uniform

CHUNK = {"cpu": 2**22, "cuda": 2**27}  # logits per chunk of the softmax


def example_losses(model: Any, outputs: Any, batch: Batch, *, seed: int, labels: bool) -> Tensor:
    """[B]: loss against the data's labels, or against labels sampled from the model."""
    return label_losses(model, outputs, batch) if labels else sampled_losses(model, outputs, batch, seed)


def label_losses(model: Any, outputs: Any, batch: Batch) -> Tensor:
    """[B]: the model's own loss for each example."""
    labels, head = batch.labels, head_of(outputs, model.config)
    if head == "span":
        missing = [k for k in ("start_positions", "end_positions") if k not in labels]
        if missing:
            raise DataError(f"A question-answering loss needs {missing}; the batches have {sorted(labels)}.")
        ends = ((outputs.start_logits, labels["start_positions"]), (outputs.end_logits, labels["end_positions"]))
        real = batch.inputs.get("attention_mask")  # the loss must not depend on the amount of padding
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
                f"This model predicts {logits.shape[-1]} labels per example, each 0 or 1; the data's labels have the "
                f"shape {list(target.shape[1:])} per example. Give labels of the model's shape, or data without labels."
            )
        return F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none").mean(-1)
    _in_range(target, logits.shape[-1])
    return F.cross_entropy(logits, target.long(), reduction="none")


def sampled_losses(model: Any, outputs: Any, batch: Batch, seed: int) -> Tensor:
    """[B]: the loss against labels sampled from the model's own output; needs no labels.

    The second moment of its gradient is the Fisher information. For real-valued outputs (regression, embeddings) the
    loss is the inner product with random signs.
    """
    head = head_of(outputs, model.config)
    if head == "span":
        real = batch.inputs.get("attention_mask")
        draws = uniform(batch.indices, 2, seed)
        both = zip(ENDS, draws.T, strict=True)
        return torch.stack([_drawn_loss(only(outputs[end].float(), real), draw) for end, draw in both]).sum(0)
    if head == "embedding":
        return _signed(embeddings(model, outputs, batch), batch, seed)
    if head == "tokens":
        real = token_mask(batch.inputs, outputs.logits)
        losses = _drawn_loss(outputs.logits, uniform(batch.indices, outputs.logits.shape[1], seed))  # [B, S]
        return (losses if real is None else losses * real).sum(-1)
    logits: Tensor = outputs.logits.float()
    if head == "number":
        return _signed(logits, batch, seed)
    if head == "labels":
        draw = uniform(batch.indices, logits.shape[-1], seed).to(logits.device)
        target = (draw < logits.detach().sigmoid()).float()
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1)
    return _drawn_loss(logits, uniform(batch.indices, 1, seed)[:, 0])


def check_finite(losses: Sequence[Tensor], batches: Sequence[Batch]) -> None:
    """Raise an error that names the first example whose loss is not finite.

    Called once after the pass: checking every batch would synchronise with the GPU.
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
    """Cross-entropy against a class sampled from the model's distribution by inverse transform at `draw`."""
    losses: Tensor = _Drawn.apply(logits.flatten(0, -2), draw.flatten().to(logits.device))  # type: ignore[no-untyped-call]
    return losses.view(draw.shape)


class _Drawn(torch.autograd.Function):
    """Cross-entropy of [n, C] logits against sampled classes, in chunks of rows.

    For a vocabulary, the float64 distribution and its cumulative sum would take several times the memory of the logits,
    and so would float32 copies of bfloat16 logits and of their gradients.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, draw: Tensor) -> Tensor:
        # Allocated before the chunks: between their temporaries, small results would fragment a CPU's heap.
        target, norm = torch.empty_like(draw, dtype=torch.long), _full(logits.new_empty(len(logits)))
        for part, at, into, total in zip(*map(_chunks(logits), (logits, draw, target, norm)), strict=True):
            into.copy_(_draw_classes(part, at))
            total.copy_(_full(part).logsumexp(-1))
        ctx.save_for_backward(logits, target, norm)
        return norm - logits.gather(1, target[:, None])[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, target, norm = ctx.saved_tensors
        result = torch.empty_like(logits)
        every = map(_chunks(logits), (result, logits, target, norm, gradients[0]))
        for out, part, at, total, gradient in zip(*every, strict=True):
            softmax = (_full(part) - total[:, None]).exp_()  # minus one at the sampled class
            softmax.scatter_add_(1, at[:, None], torch.full_like(at[:, None], -1, dtype=softmax.dtype))
            out.copy_(softmax * gradient[:, None])
        return result, None


def _full(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _chunks(logits: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    rows = max(1, CHUNK.get(logits.device.type, CHUNK["cpu"]) // logits.shape[1])
    return lambda tensor: tensor.split(rows)


def _draw_classes(logits: Tensor, draw: Tensor) -> Tensor:
    """[n]: the class at which the cumulative distribution exceeds `draw`."""
    steps = logits.softmax(-1, dtype=torch.float64).cumsum_(-1)
    target = torch.searchsorted(steps, draw[:, None] * steps[:, -1:], right=True)
    return target[:, 0].clamp_(max=logits.shape[-1] - 1)


def _signed(values: Tensor, batch: Batch, seed: int) -> Tensor:
    signs = (uniform(batch.indices, values.shape[-1], seed) < 0.5).to(values) * 2 - 1
    return (values * signs).sum(-1)


def embeddings(model: Any, outputs: Any, batch: Batch) -> Tensor:
    """[B, D]: embeddings by the model's own pooling; normalised if only their direction matters."""
    pooling = pooling_of(model)
    pooled = pool(outputs, batch.inputs.get("attention_mask"), pooling).float()
    return F.normalize(pooled, dim=-1) if pooling.direction_only else pooled


def _span_loss(logits: Tensor, positions: Tensor) -> Tensor:
    # As in transformers: positions before the window are clamped to 0, positions beyond it are ignored.
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


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, S]: the cross-entropy of tokens, 0 for those with label -100.

    A few tokens at a time: copies of all logits over the vocabulary may not fit into memory.
    """
    some = max(1, CHUNK.get(logits.device.type, CHUNK["cpu"]) // logits.shape[-1])
    found = torch.empty(labels.shape, device=logits.device)
    for example in zip(found, logits, labels.to(logits.device), strict=True):
        for into, part, at in zip(*(t.split(some) for t in example), strict=True):
            into.copy_(F.cross_entropy(part.float(), at, ignore_index=IGNORED, reduction="none"))
    return found


def only(logits: Tensor, real: Tensor | None) -> Tensor:
    """Scores [B, S] of positions with padding set to -inf."""
    return logits if real is None else logits.masked_fill(real.to(logits.device) == 0, float("-inf"))


def token_mask(inputs: Mapping[str, Tensor], states: Tensor) -> Tensor | None:
    """[B, S]: the mask that matches states or logits [B, S, ...], 1 for real tokens; None if there is none."""
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = inputs.get(name)
        if mask is not None and mask.shape == states.shape[:2]:
            return mask.to(states)
    return None
