"""What the benchmarks share: random models of known shapes, random batches, and the name of the machine."""

from __future__ import annotations

import json
import resource
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


def loader_of(examples: int, length: int | None, batch_size: int) -> Any:
    """A DataLoader over the same random examples, whatever its batch size: unsorted, padded to the longest of each."""
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader

    rows = []
    for batch in random_batches(examples, length, 1):
        real = int(batch["attention_mask"].sum())
        rows.append({k: v[0, :real] if v.dim() == 2 else v[0] for k, v in batch.items()})
    order = np.random.default_rng(1).permutation(len(rows))

    def collate(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        together = {k: [row[k] for row in chosen] for k in chosen[0]}
        return {k: pad_sequence(v, batch_first=True) if v[0].dim() else torch.stack(v) for k, v in together.items()}

    return DataLoader([rows[i] for i in order], batch_size=batch_size, collate_fn=collate)


def model_folder(place: Path, shapes: str, rows: int) -> tuple[Path, Path]:
    """A random model with a tokenizer of made-up words, and a file of that many labelled texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(5000))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    folder = place / "model"
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    random_model(shapes).save_pretrained(folder)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(GLUE_LENGTH, GLUE_SPREAD, rows), 8, 120).astype(int)
    texts = (" ".join(f"w{i}" for i in rng.integers(0, 5000, length)) for length in lengths)
    data = place / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": text, "label": int(i) % 2}) + "\n" for i, text in enumerate(texts)))
    return folder, data


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Name and versions, for the JSON."""
    return {"device": device_name(device), "threads": torch.get_num_threads(), "versions": versions()}


def keep_json(result: dict[str, Any], path: Path | None) -> None:
    """Write a result, if a place for it was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def high_water() -> int:
    """Bytes of memory that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
