"""LLM-Pruner (Ma et al., NeurIPS 2023): first-order Taylor scores of coupled weights.

score of a unit:  sum of |w dL/dw| over all weights that go with it, L the next-token loss on the calibration text. The
first four and the last two of 32 layers stay whole, the others lose the same share, as its authors do. Its recovery by
LoRA is retraining and left out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rivals.subject import Subject, best, cut, uniform_counts, unit_sums

FIRST, LAST = 1 / 8, 1 / 16  # of the layers stay whole: 4 and 2 of 32
TOKENS = {"cpu": 1024, "cuda": 8192}


def taylor(subject: Subject, share: float) -> Any:
    """Saliencies of all units; a uniform share of the layers in the middle."""
    scores = subject.once("taylor", lambda: _scores(subject))
    depth = len(subject.structure.stacks[0].layers)
    middle = range(round(FIRST * depth), depth - round(LAST * depth))
    prunable = [s.depth in middle for s in subject.structure.sublayers]
    return cut(subject, best(scores, uniform_counts(subject, share, prunable)))


def _scores(subject: Subject) -> list[Tensor]:
    model, sublayers = subject.model, subject.structure.sublayers
    weights = [m.weight for s in sublayers for m in (s.out, *(p.module for p in s.inputs))]
    wanted = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)  # type: ignore[operator]
        weight.grad = None
    try:
        for ids in subject.batches(TOKENS[subject.device.type]):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            (loss / subject.calibration.numel()).backward()
        return [unit_sums(s, lambda w: (w.detach() * w.grad).abs()) for s in sublayers]  # type: ignore[operator]
    finally:
        for weight in weights:
            weight.grad = None
        for parameter, wants in wanted.items():
            parameter.requires_grad_(wants)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
