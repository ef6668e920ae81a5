"""The maximum input length of a model."""

from __future__ import annotations

from typing import Any

# Positions of these models start after the padding index, so the first position embeddings are never used.
_AFTER_PADDING = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "esm", "roberta-prelayernorm",
    "data2vec-text",
)  # fmt: skip


def positions_of(config: Any) -> int | None:
    """Maximum tokens of an input; None where the configuration has no limit."""
    positions = getattr(config, "max_position_embeddings", None)  # GPT-2 answers to this name too
    if not isinstance(positions, int) or positions < 1:
        return None
    if config.model_type in _AFTER_PADDING:
        positions -= config.pad_token_id + 1
    return positions
