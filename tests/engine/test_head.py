"""The kind of a head, from what it returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from families import tiny_model
from shearling.engine.head import Head, gives_embeddings, head_of
from tiny import model_of


@pytest.mark.parametrize(
    ("outputs", "problem", "head"),
    [
        ({"start_logits": (2, 5), "end_logits": (2, 5)}, None, "span"),
        ({"last_hidden_state": (2, 5, 8)}, None, "embedding"),
        ({"logits": (2, 5, 3)}, None, "tokens"),
        ({"logits": (2, 1)}, None, "number"),
        ({"logits": (2, 3)}, "regression", "number"),
        ({"logits": (2, 3)}, "multi_label_classification", "labels"),
        ({"logits": (2, 3)}, "single_label_classification", "classes"),
        ({"logits": (2, 3)}, None, "classes"),
    ],
)
def test_every_head(outputs: dict[str, Any], problem: str | None, head: Head) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in outputs.items()}
    assert head_of(tensors, SimpleNamespace(problem_type=problem)) == head
    if problem is None:
        assert head_of(tensors) == head


def test_a_model_without_a_head_gives_embeddings() -> None:
    assert gives_embeddings(model_of("bert", ""))
    assert not gives_embeddings(model_of("bert"))
    assert not any(gives_embeddings(tiny_model(name)) for name in ("gpt2", "t5"))  # T5 is its own base model
