"""Fine-tuned models and their data in folders small enough to send to a machine without tokenizer or network.

One folder a task: config.json, model.safetensors (half precision; of the embeddings only the rows that the examples
use, in int8), train.npz and dev.npz (token ids end to end, without padding).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shearling.evaluation.metrics import accuracy, spearman

PACKED = 10240  # training examples: enough for samples of 8,192 that differ between seeds
EMBEDDINGS = "embeddings.word_embeddings.weight"
REGRESSION = ("stsb",)
Row = dict[str, Any]


def pack(models: Path, data: Path, tasks: Sequence[str], out: Path) -> None:
    """One folder a task: config.json, model.safetensors, train.npz, dev.npz."""
    from common import Bench

    from shearling.data import encode, find_task

    for task in tasks:
        bench = Bench(task, models, data, "cpu", None, 32)
        folder = out / task
        folder.mkdir(parents=True, exist_ok=True)
        used = {0}
        for split, rows, limit in (("train", bench.train, PACKED), ("dev", bench.rows("dev"), None)):
            batches = encode(
                rows, bench.tokenizer, find_task(task), model_config=bench.model.config, batch_size=256,
                samples=limit or len(rows), seed=0,
            )  # fmt: skip
            examples = flattened(batches)
            np.savez_compressed(folder / f"{split}.npz", **examples)
            used |= set(np.unique(examples["input_ids"]).tolist())
        rows_used = torch.tensor(sorted(used))
        state = {name: value.half() for name, value in bench.model.state_dict().items() if value.is_floating_point()}
        (name,) = (n for n in state if n.endswith(EMBEDDINGS))
        table = state.pop(name)[rows_used].float()
        size = table.abs().amax(1, keepdim=True).clamp_min(1e-8) / 127  # int8, a scale for every token
        state |= {"used": rows_used.int(), "embeddings": (table / size).round().to(torch.int8), "size": size}
        save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(bench.model.config.to_dict()), encoding="utf-8")
        size = sum(f.stat().st_size for f in folder.iterdir()) / 2**20
        print(f"{folder}: {size:.1f} MiB, {len(rows_used)} of the vocabulary's tokens")


def flattened(batches: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Examples end to end without their padding, with their lengths and labels."""
    columns: dict[str, list[Any]] = {"input_ids": [], "token_type_ids": [], "lengths": [], "labels": []}
    for batch in batches:
        for i, mask in enumerate(batch["attention_mask"]):
            real = mask.bool()
            columns["lengths"].append([int(real.sum())])
            columns["labels"].append([float(batch["labels"][i])])
            columns["input_ids"].append(batch["input_ids"][i][real].numpy())
            columns["token_type_ids"].append(batch["token_type_ids"][i][real].numpy())
    types = {"input_ids": np.int32, "token_type_ids": np.int8, "lengths": np.int32, "labels": np.float32}
    return {name: np.concatenate(values).astype(types[name]) for name, values in columns.items()}


@dataclass
class Task:
    """A packed task, unpacked onto a device."""

    name: str
    folder: Path
    device: torch.device

    def __post_init__(self) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        config = AutoConfig.for_model(**json.loads((self.folder / "config.json").read_text(encoding="utf-8")))
        state = load_file(self.folder / "model.safetensors")
        used, rows, size = (state.pop(name) for name in ("used", "embeddings", "size"))
        self.model = AutoModelForSequenceClassification.from_config(config).eval()
        (name,) = (n for n in self.model.state_dict() if n.endswith(EMBEDDINGS))
        table = torch.zeros(config.vocab_size, rows.shape[1])
        table[used.long()] = rows * size
        missing, unknown = self.model.load_state_dict({k: v.float() for k, v in state.items()} | {name: table}, False)
        if unknown or any("position_ids" not in m for m in missing):
            sys.exit(f"{self.folder} does not fit {type(self.model).__name__}: {missing} {unknown}")
        self.model.to(self.device)
        self.train, self.dev = (unflattened(self.folder / f"{split}.npz") for split in ("train", "dev"))
        self.dense = self.score(self.model)

    def batches(self, samples: int, seed: int) -> list[dict[str, Tensor]]:
        """A sample in batches of similar length."""
        drawn = np.random.default_rng(seed).permutation(len(self.train))[:samples]
        return padded([self.train[i] for i in drawn])

    @torch.inference_mode()
    def score(self, model: Any) -> float:
        """Points on the development set."""
        found, gold = [], []
        for batch in padded(self.dev, 256):
            gold.append(batch.pop("labels"))
            found.append(model(**{k: v.to(self.device) for k, v in batch.items()}).logits.float().cpu())
        logits, labels = torch.cat(found).numpy(), torch.cat(gold).numpy()
        if self.name in REGRESSION:
            return 100 * spearman(labels, logits[:, 0])
        return 100 * accuracy(labels, logits.argmax(1))


def unflattened(path: Path) -> list[Row]:
    kept = np.load(path)
    ends = np.cumsum(kept["lengths"])
    examples = []
    for start, end, label in zip(ends - kept["lengths"], ends, kept["labels"], strict=True):
        columns = {name: torch.from_numpy(kept_column[start:end].astype(np.int64)) for name, kept_column in
                   (("input_ids", kept["input_ids"]), ("token_type_ids", kept["token_type_ids"]))}  # fmt: skip
        examples.append(columns | {"labels": torch.tensor(label)})
    return examples


def padded(examples: Sequence[Row], size: int = 64) -> list[dict[str, Tensor]]:
    """Batches of similar length."""
    ordered = sorted(examples, key=lambda e: len(e["input_ids"]))
    batches = []
    for start in range(0, len(ordered), size):
        rows = ordered[start : start + size]
        batch = {
            name: torch.nn.utils.rnn.pad_sequence([r[name] for r in rows], batch_first=True)
            for name in ("input_ids", "token_type_ids")
        }
        lengths = torch.tensor([len(r["input_ids"]) for r in rows])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        batches.append(batch | {"labels": torch.stack([r["labels"] for r in rows])})
    return batches
