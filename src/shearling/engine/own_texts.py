"""Texts that a language model writes itself: to distil on what it knows, of which the sample shows only a part."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shearling.engine.generation import ends_of, generated
from shearling.engine.head import predicts_next_token
from shearling.engine.hooks import device_of
from shearling.engine.memory import out_of_memory
from shearling.engine.noise import special_tokens
from shearling.sample.read import sample_of
from shearling.sample.sample import Sample

LENGTH = 256  # tokens of a text at most
AT_ONCE = {"cpu": 128, "cuda": 512}  # texts; on a GPU a step over all of them takes as long as over a few
CHANGING = ("repetition_penalty", "suppress_tokens", "forced_eos_token_id")  # options that change the distribution
READ = {"input_ids", "attention_mask"}  # the inputs of a sample of plain texts


def with_own_texts(model: Any, sample: Sample, seed: int) -> Sample:
    """The sample and as many tokens again that a causal language model samples from itself; others' unchanged.

    Each text begins with a random token of the vocabulary, so that together they cover more than one domain.
    """
    if not predicts_next_token(model) or "input_ids" not in sample.inputs or sample.inputs - READ:
        return sample
    lengths = torch.cat([group.tokens for group in sample.groups])
    length = min(LENGTH, int(lengths.max()))
    begins = _beginnings(model, sample, math.ceil(int(lengths.sum()) / length), seed)
    if begins.shape[1] >= length:
        return sample
    ends = ends_of(model)
    texts = _texts(model, begins, length, seed)
    written = sample_of([{"input_ids": ids, "attention_mask": _up_to(ends, ids).long()} for ids in texts])
    last = max(int(group.indices.max()) for group in sample.groups)
    own = [replace(group, indices=group.indices + last + 1) for group in written.groups]
    return replace(sample, groups=(*sample.groups, *own))


def _beginnings(model: Any, sample: Sample, count: int, seed: int) -> Tensor:
    """[count, 1 or 2]: a random token each, behind the special one that begins every text of the sample, if any."""
    special = torch.tensor(sorted(special_tokens(model.config)))
    plain = torch.arange(model.get_input_embeddings().num_embeddings)
    plain = plain[~torch.isin(plain, special)]
    drawn = plain[torch.randint(len(plain), (count, 1), generator=torch.Generator().manual_seed(seed))]
    firsts = torch.cat([g.batch(torch.arange(len(g))).inputs["input_ids"][:, 0] for g in sample.groups]).unique()
    if len(firsts) == 1 and bool(torch.isin(firsts, special)):
        return torch.cat([firsts.expand(count, 1), drawn], 1)
    return drawn


def _texts(model: Any, begins: Tensor, length: int, seed: int) -> list[Tensor]:
    """[B, T] each, on the host: continuations sampled at temperature 1."""
    device = device_of(model)
    at_once = AT_ONCE.get(device.type, AT_ONCE["cpu"])
    found: list[Tensor] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        while (done := sum(map(len, found))) < len(begins):
            try:
                found.append(_continued(model, begins[done : done + at_once].to(device), length).cpu())
            except RuntimeError as error:
                if not out_of_memory(error) or at_once == 1:
                    raise
                at_once = -(-at_once // 2)
                torch.cuda.empty_cache()
    return found


def _continued(model: Any, begins: Tensor, length: int) -> Tensor:
    inputs = {"input_ids": begins, "attention_mask": torch.ones_like(begins)}
    options = {
        "do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": length - begins.shape[1],
        "pad_token_id": min(ends_of(model), default=0),
    }  # fmt: skip
    return generated(model, inputs, options, without=CHANGING)


def _up_to(ends: set[int], ids: Tensor) -> Tensor:
    """[B, T]: the tokens up to the first one that ends a text, and that one."""
    ended = torch.isin(ids, torch.tensor(sorted(ends), dtype=ids.dtype))
    ended[:, 0] = False
    return ended.cumsum(1) - ended.long() == 0
