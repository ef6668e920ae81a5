"""Tokens that a model generates, by options of the caller instead of those in the model's generation config."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shearling.engine.hooks import frozen
from shearling.engine.silence import quiet_transformers

SEARCHING = (  # options of beam search and sampling
    "num_beams", "num_beam_groups", "early_stopping", "length_penalty", "do_sample", "temperature", "top_p", "top_k",
    "min_p", "max_length", "penalty_alpha", "typical_p",
)  # fmt: skip


def generated(
    model: Any, inputs: Mapping[str, Tensor], options: Mapping[str, Any], *, without: Sequence[str] = ()
) -> Tensor:
    """[B, T]: the prompt and the tokens generated with a cache, then padding.

    without  further options of the model's generation config to ignore
    """
    own = model.generation_config
    config = copy.deepcopy(own)
    for name in (*SEARCHING, *without):
        if hasattr(config, name):
            setattr(config, name, None)
    config.update(num_beams=1, use_cache=True, **options)
    model.generation_config = config  # `generate` fills what is None from there
    try:
        with frozen(model), torch.no_grad(), quiet_transformers():
            return torch.as_tensor(model.generate(**inputs, generation_config=config)).clone()
    finally:
        model.generation_config = own


def ends_of(model: Any) -> set[int]:
    """The tokens that end a text."""
    end = model.generation_config.eos_token_id
    return set(end if isinstance(end, list) else [end]) - {None}
