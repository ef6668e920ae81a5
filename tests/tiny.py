"""Tiny random models and batches for tests: one entry a family, small enough to build in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from shearling.sample.batch import Batch
from shearling.sample.read import sample_of

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 60,
    "max_position_embeddings": 40,
}
BERT_LIKE = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "electra": "Electra",
}


def config_of(model_type: str, **changes: Any) -> Any:
    """A small configuration of a family."""
    if model_type == "distilbert":
        return transformers.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=60, max_position_embeddings=40, **changes
        )
    extra = {"embedding_size": 32} if model_type == "electra" else {}
    return transformers.AutoConfig.for_model(model_type, **(SMALL | extra | changes))


def model_of(model_type: str, head: str = "SequenceClassification", seed: int = 0, **changes: Any) -> Any:
    """A random model with weights large enough for units to matter."""
    torch.manual_seed(seed)
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    model = auto.from_config(config_of(model_type, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def batches_of(
    count: int = 4, size: int = 4, length: int = 12, labels: str = "class", seed: int = 0
) -> list[dict[str, Tensor]]:
    """Random token batches with padding, and labels of a kind."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(5, 60, (size, length), generator=generator)
        lengths = torch.randint(3, length + 1, (size,), generator=generator)
        lengths[0] = length
        mask = (torch.arange(length) < lengths[:, None]).long()
        batch = {"input_ids": ids * mask + (1 - mask), "attention_mask": mask}
        if labels == "class":
            batch["labels"] = torch.randint(0, 2, (size,), generator=generator)
        elif labels == "number":
            batch["labels"] = torch.rand(size, generator=generator)
        elif labels == "tokens":
            drawn = torch.randint(0, 2, (size, length), generator=generator)
            batch["labels"] = drawn.masked_fill(mask == 0, -100)
        elif labels == "span":
            batch["start_positions"] = torch.randint(0, 3, (size,), generator=generator)
            batch["end_positions"] = torch.randint(0, 3, (size,), generator=generator)
        batches.append(batch)
    return batches


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch without its labels."""
    return {k: v for k, v in batch.items() if k not in ("labels", "start_positions", "end_positions")}


def as_run(batches: list[dict[str, Tensor]]) -> list[Batch]:
    """The batches as a pass runs them, in the order and the sizes they are given in."""
    sample, found, start = sample_of(batches), [], 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        part = sample._where(torch.arange(start, start + size))
        found.append(part.groups[0].batch(torch.arange(size)))
        start += size
    return found
