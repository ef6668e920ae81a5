"""Scores of a language model from token ids alone: perplexity, and a choice among four answers by likelihood."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

TOKENS = {"cpu": 2048, "cuda": 32768}  # of a batch
LOGITS = 2**28  # entries of the logits that exist at once

Tokens = dict[str, NDArray[np.int32]]


@torch.inference_mode()
def scores(model: Any, tokens: Tokens, limit: int | None = None) -> dict[str, float]:
    """Perplexity on both domains, and the share of the choice items that are answered correctly, in percent."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    try:
        return {
            "wikitext2": perplexity(model, tokens["wikitext2"][:limit]),
            "squad": perplexity(model, tokens["squad"][:limit]),
            "choice": choice_accuracy(model, tokens, limit),
        }
    finally:
        torch.set_float32_matmul_precision(before)


def perplexity(model: Any, windows: NDArray[np.int32]) -> float:
    """exp of the mean cross-entropy of every token but the first of its window."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    size = max(1, TOKENS[device.type] // windows.shape[1])
    for start in range(0, len(windows), size):
        ids = torch.from_numpy(windows[start : start + size]).long().to(device)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        total += float(-token_likelihoods(model, hidden.flatten(0, 1), ids[:, 1:].flatten()).double().sum())
        count += ids[:, 1:].numel()
    return math.exp(min(total / count, 80.0))


def token_likelihoods(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """[tokens]: the log-probability of each target, from as few logits at a time as memory likes."""
    head = model.get_output_embeddings()
    rows = max(1, LOGITS // head.weight.shape[0])
    capped = getattr(model.config, "final_logit_softcapping", None)
    found = []
    for some, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = head(some).float()
        if capped:
            logits = capped * torch.tanh(logits / capped)
        found.append(-F.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(found)


def choice_accuracy(model: Any, tokens: Tokens, limit: int | None = None) -> float:
    """Percent of items whose right answer has the highest log-likelihood per character."""
    items = len(tokens["choice_right"][:limit])
    likelihood = np.full(4 * items, -np.inf)
    for places, ids, length in _choice_batches(tokens, 4 * items, next(model.parameters()).device):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        answer = torch.from_numpy(tokens["choice_answer"][places]).to(ids)
        position = torch.arange(ids.shape[1] - 1, device=ids.device)
        end = length[:, None] - 1  # padding comes after the answer, where a causal model does not look
        chosen = (position < end) & (position >= end - answer[:, None])  # the tokens before those of the answer
        found = token_likelihoods(model, hidden[:, :-1][chosen], ids[:, 1:][chosen])
        summed = torch.zeros(len(ids), device=ids.device).index_add_(0, chosen.nonzero()[:, 0], found)
        likelihood[places] = summed.cpu().numpy() / tokens["choice_characters"][places]
    picks = likelihood.reshape(items, 4).argmax(1)
    return 100 * float((picks == tokens["choice_right"][:items]).mean())


def _choice_batches(
    tokens: Tokens, count: int, device: torch.device
) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
    """(which sequences, their ids padded on the right, their lengths): of similar length together."""
    lengths = tokens["choice_length"]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    order = np.argsort(lengths[:count], kind="stable")
    size = max(1, TOKENS[device.type] // int(lengths[:count].max()))
    for first in range(0, count, size):
        places = order[first : first + size]
        ids = np.zeros((len(places), int(lengths[places].max())), dtype=np.int64)
        for row, place in enumerate(places):
            ids[row, : lengths[place]] = tokens["choice_tokens"][starts[place] : starts[place + 1]]
        yield places, torch.from_numpy(ids).to(device), torch.from_numpy(lengths[places]).to(device)
