"""What the benchmarks share: random models of known shapes, random batches, and the name of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shearling._version import versions
from shearling.latency.timing import device_name

SHAPES = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
GLUE_LENGTH, GLUE_SPREAD = 53.44, 14.0  # mean and deviation of MRPC's training set, in tokens


def random_model(shapes: str, **changes: Any) -> Any:
    """A BERT classifier of the given shapes."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**(SHAPES[shapes] | changes))).eval()


def random_batches(examples: int, length: int | None, batch_size: int) -> list[dict[str, torch.Tensor]]:
    """Token batches sorted by length: all of one length, or of lengths like GLUE's."""
    rng = np.random.default_rng(0)
    if length is None:
        lengths = np.sort(np.clip(rng.normal(GLUE_LENGTH, GLUE_SPREAD, examples).round(), 8, 128).astype(int))[::-1]
    else:
        lengths = np.full(examples, length)
    batches = []
    for start in range(0, examples, batch_size):
        sizes = torch.from_numpy(lengths[start : start + batch_size].copy())
        mask = (torch.arange(int(sizes.max())) < sizes[:, None]).long()
        ids = torch.from_numpy(rng.integers(1000, 30000, mask.shape)) * mask
        labels = torch.from_numpy(rng.integers(0, 2, len(sizes)))
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Name and versions, for the JSON."""
    return {"device": device_name(device), "threads": torch.get_num_threads(), "versions": versions()}


def keep_json(result: dict[str, Any], path: Path | None) -> None:
    """Write a result, if a place for it was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
