"""Text for language models: packed into blocks, and masked for masked language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shearling.data.batches import Tokenized
from shearling.errors import DataError
from shearling.sample.batch import IGNORED

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from shearling.data.encoder import Encoder
    from shearling.data.rows import Rows

MASKED_SHARE = 0.15
_TEXTS_AT_ONCE = 256


def make_blocks(encoder: Encoder, rows: Rows, at_most: int | None = None) -> Tokenized:
    """Pack texts into blocks of `max_length` tokens, the last maybe shorter; stops after `at_most` blocks."""
    (texts,), tokenizer, length = encoder.texts(rows), encoder.tokenizer, encoder.max_length
    limit = None if at_most is None else at_most * length
    stream: list[int] = []
    for ids in _token_lists(texts, tokenizer):
        stream += ids
        if limit is not None and len(stream) >= limit:
            stream = stream[:limit]
            break
    blocks = [stream[start : start + length] for start in range(0, len(stream), length)]
    blocks = [block for block in blocks if len(block) > 1]  # a single token predicts nothing
    if not blocks:
        raise DataError(f"the {len(texts)} texts have no two tokens to learn from; give running text")
    inputs, labels = blocks, blocks
    if fills_blanks(tokenizer, encoder.config):
        inputs, labels = _mask(blocks, tokenizer, encoder.seed)
    tokens = {"input_ids": inputs, "attention_mask": [[1] * len(block) for block in blocks]}
    return Tokenized(tokens if encoder.labels == "ignore" else tokens | {"labels": labels})


def fills_blanks(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> bool:
    """Whether the model predicts masked tokens (BERT) instead of the next token (GPT)."""
    architecture = (config.architectures or [""])[0]
    if architecture.endswith(("ForCausalLM", "LMHeadModel")) or getattr(config, "is_decoder", False):
        return False
    return tokenizer.mask_token_id is not None


def _token_lists(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    # Texts are separated by the special tokens that the tokenizer adds, or else by its end-of-text token.
    eos = tokenizer.eos_token_id
    separator = [eos] if eos is not None and tokenizer.num_special_tokens_to_add() == 0 else []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        for ids in tokenizer(list(texts[start : start + _TEXTS_AT_ONCE]), verbose=False)["input_ids"]:
            yield ids + separator


def _mask(
    blocks: list[list[int]], tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Mask 15% of the ordinary tokens; only these are labelled.

    Unlike in pre-training, none of them is kept or replaced by a random token.
    """
    rng = np.random.default_rng(seed)
    inputs, labels = [], []
    for block in blocks:
        ids = np.array(block)
        ordinary = np.flatnonzero(~np.isin(ids, tokenizer.all_special_ids))
        count = min(len(ordinary), max(1, round(MASKED_SHARE * len(ordinary))))
        hidden = np.zeros(len(ids), dtype=bool)
        hidden[rng.choice(ordinary, size=count, replace=False)] = True
        inputs.append(np.where(hidden, tokenizer.mask_token_id, ids).tolist())
        labels.append(np.where(hidden, ids, IGNORED).tolist())
    return inputs, labels
