"""Random token replacement: fits then cover more of the model's input space than the sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shearling.sample.batch import Batch, uniform

SEED = 0x6E6F697365  # keeps this stream apart from other draws for the same example


def noised(tokens: Tensor, movable: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replace a share of the tokens [n, S] by those of other examples at the same position."""
    order = torch.randperm(len(tokens), generator=generator)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)  # a cycle: no example is its own partner
    chosen = (torch.rand(tokens.shape, generator=generator) < share) & movable & movable[partner]
    return torch.where(chosen, tokens[partner], tokens)


def special_tokens(config: Any) -> set[int]:
    """The special token ids in a configuration and its sub-configurations."""
    parts = [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}) if hasattr(config, name))]
    ends = ("_token_id", "_token_index")  # the latter of images
    values = [value for part in parts if part for name, value in vars(part).items() if name.endswith(ends)]
    return {one for value in values for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}


def with_random_tokens(batch: Batch, share: float, model: Any) -> Batch:
    """Replace a share of the tokens by random ones of the vocabulary, in about every other text.

    The result for a text depends only on its index, not on how batches are formed.
    """
    ids = batch.inputs["input_ids"]
    drawn = uniform(batch.indices, 1 + 2 * ids.shape[1], SEED).to(ids.device)
    text, token, other = drawn[:, :1], drawn[:, 1::2], drawn[:, 2::2]  # [B, 1], [B, S], [B, S]
    special = torch.tensor(sorted(special_tokens(model.config)), device=ids.device)
    chosen = (text < 0.5) & (token < share) & ~torch.isin(ids, special)
    known = model.get_input_embeddings().num_embeddings
    random = (known * other).to(ids.dtype)
    if "pixel_values" in batch.inputs:
        chosen &= ~torch.isin(random, special)  # an image fills as many places as it has tokens
    mixed = torch.where(chosen, random, ids)
    return replace(batch, inputs={**batch.inputs, "input_ids": mixed}, remembered={})
