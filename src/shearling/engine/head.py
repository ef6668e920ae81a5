"""The kind of head a model has, decided by its outputs so that no class names are needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

# span        start_logits and end_logits [B, S]      question answering
# tokens      logits [B, S, C]                        token classification and language models
# number      logits [B, C]                           regression
# labels      logits [B, C]                           multi-label classification
# classes     logits [B, C]                           classification
# embedding   anything else                           pooled (models/pooling.py)
Head = Literal["span", "tokens", "number", "labels", "classes", "embedding"]
ENDS = ("start_logits", "end_logits")


def head_of(outputs: Mapping[str, Any], config: Any = None) -> Head:
    """The head of these outputs; `problem_type` of the configuration tells regression and multi-label from classes."""
    if "start_logits" in outputs:
        return "span"
    if "logits" not in outputs:
        return "embedding"
    logits, problem = outputs["logits"], getattr(config, "problem_type", None)
    if logits.dim() > 2:
        return "tokens"
    if problem == "regression" or logits.shape[-1] == 1:
        return "number"
    return "labels" if problem == "multi_label_classification" else "classes"


def predicts_next_token(model: Any) -> bool:
    """Whether the model is a causal language model."""
    return bool(model.can_generate()) and not getattr(model.config, "is_encoder_decoder", False)


def gives_embeddings(model: Any) -> bool:
    """Whether the model has no head, so that its hidden states are pooled."""
    return model.base_model is model and not model.can_generate()
