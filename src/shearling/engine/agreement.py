"""Agreement of the pruned model with the dense one on held-out examples.

Needs no labels, so every run has it. The kind follows from the model's outputs:

    equal       classes, tags, spans or tokens: percentage of equal predictions
    spearman    regression: rank correlation in percent
    cosine      embeddings: mean cosine similarity in percent
    perplexity  causal language models: perplexity of the pruned model over that of the dense one; 1 is no loss
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shearling.engine.head import ENDS, head_of, predicts_next_token
from shearling.engine.hooks import device_of, frozen, run
from shearling.engine.losses import embeddings, only, token_losses
from shearling.engine.memory import batches_that_fit, logits_per_token
from shearling.engine.precision import kernels
from shearling.sample.batch import Batch, is_held_out
from shearling.sample.sample import Sample

Kind = Literal["equal", "spearman", "cosine", "perplexity"]
# Thresholds of the report's warning. The first was measured (docs/reports.md): classifiers with less than 90% equal
# predictions lost at least 6 points, the others at most 4.5. The rest is a judgement.
POOR: dict[Kind, float] = {"equal": 90.0, "spearman": 95.0, "cosine": 95.0, "perplexity": 1.25}
FEW = 16  # with fewer examples the value is too noisy for a warning


@dataclass(frozen=True)
class Agreement:
    """The kind of comparison, its value, and the number of examples."""

    kind: Kind
    value: float
    examples: int

    @property
    def poor(self) -> bool:
        """Whether the value is beyond the threshold of the report's warning."""
        beyond = self.value > POOR[self.kind] if self.kind == "perplexity" else self.value < POOR[self.kind]
        return beyond and self.examples >= FEW

    @property
    def warnings(self) -> list[str]:
        """The report's warnings about it."""
        if not self.poor:
            return []
        what = {
            "equal": f"only {self.value:.1f}% of the predictions are those of the dense model",
            "spearman": f"the outputs correlate with the dense model's by only {self.value:.1f}%",
            "cosine": f"the embeddings have a mean cosine of only {self.value:.1f}% to the dense model's",
            "perplexity": f"the perplexity is {self.value:.2f} times the dense model's",
        }[self.kind]
        return [f"on {self.examples:,} held-out examples, {what}; score it before using it"]


@dataclass(frozen=True)
class Answers:
    """One model's decisions on the held-out examples: [n, ...], one row per decision."""

    kind: Kind
    values: Tensor
    examples: int


def held_out(sample: Sample) -> Sample | None:
    """The examples held out of fits; None where the sample is too small."""
    found = [(group, is_held_out(group.indices).nonzero().flatten()) for group in sample.groups]
    groups = tuple(group.pick(rows) for group, rows in found if len(rows))
    return replace(sample, groups=groups) if groups else None


def answers(model: Any, sample: Sample) -> Answers:
    """Run the model over a sample and collect its decisions, ordered by example."""
    device = device_of(model)
    kind: Kind = "equal"
    for attempt in batches_that_fit(sample, device, backward=False, logits=logits_per_token(model)):
        with attempt as batches, frozen(model), torch.no_grad(), kernels(model, "tf32"):
            parts: list[Tensor] = []
            order: list[Tensor] = []
            for batch in batches:
                here = batch.to(device)
                kind, part, rows = _decisions(model, run(model, here), here)
                parts.append(part.float().cpu())
                order.append(batch.indices[rows])
    # The other model's batches may differ where memory ran out, so decisions are sorted by example.
    return Answers(kind, torch.cat(parts)[torch.cat(order).argsort(stable=True)], sample.examples)


def agreement(dense: Answers, pruned: Answers) -> Agreement:
    """Compare two models' decisions."""
    a, b = dense.values, pruned.values
    if dense.kind == "perplexity":
        value = math.exp(min(float(b.mean() - a.mean()), 50.0))
    elif dense.kind == "cosine":
        value = 100 * float(F.cosine_similarity(a, b).mean())
    elif dense.kind == "spearman":
        value = 100 * _rank_correlation(a, b)
    else:
        value = 100 * float((a == b).all(-1).double().mean())
    return Agreement(dense.kind, value, dense.examples)


def _decisions(model: Any, outputs: Any, batch: Batch) -> tuple[Kind, Tensor, Tensor]:
    """(kind, [n, ...] one row per decision, [n] index of its example in the batch)."""
    each = torch.arange(len(batch))
    real = batch.inputs.get("attention_mask")
    head = head_of(outputs, model.config)
    if head == "span":
        return "equal", best_ends(outputs, real), each
    if head == "embedding":
        return "cosine", embeddings(model, outputs, batch), each
    logits: Tensor = outputs["logits"]
    if head == "number":
        return "spearman", logits[:, :1], each
    if head == "labels":
        return "equal", logits > 0, each
    if head == "classes":
        return "equal", logits.argmax(-1, keepdim=True), each
    if "input_ids" in batch.inputs and predicts_next_token(model):
        losses = token_losses(logits[:, :-1], batch.inputs["input_ids"][:, 1:])  # [B, S - 1]
        counted = torch.ones_like(losses) if real is None else real[:, 1:]
        rows, _ = counted.nonzero(as_tuple=True)
        return "perplexity", losses[counted != 0][:, None], rows.cpu()
    best = logits.argmax(-1)  # [B, S]
    real = batch.inputs.get("decoder_attention_mask", real)
    counted = torch.ones_like(best) if real is None or real.shape != best.shape else real
    rows, _ = counted.nonzero(as_tuple=True)
    return "equal", best[counted != 0][:, None], rows.cpu()


def best_ends(outputs: Any, real: Tensor | None) -> Tensor:
    """[B, 2]: most likely start and end of an answer, among real tokens."""
    return torch.stack([only(outputs[end].float(), real).argmax(-1) for end in ENDS], dim=1)


def _rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman correlation; 1 where both models give a constant, 0 where only one does."""
    a, b = (ranks(values.flatten().numpy()) for values in (x, y))
    if np.array_equal(a, b):
        return 1.0
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size else 0.0


def ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1 for the lowest value; ties get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # the highest rank of each distinct value; its mean rank is (count - 1) / 2 lower
    mean: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return mean
