"""A tiny fine-tuned-looking model directory and labelled files, written on the spot for tests of whole commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from transformers import BertForSequenceClassification

from data.tiny import WORDS, bert_config, bert_tokenizer, build


def write_model(folder: Path, *, labels: int = 2, seed: int = 0, **sizes: int) -> Path:
    """A random BERT with a head and a tokenizer."""
    model = build(BertForSequenceClassification, bert_config(num_labels=labels, **sizes), seed)
    model.save_pretrained(folder)
    bert_tokenizer(model_max_length=64).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, *, pairs: bool = False, scores: bool = False, seed: int = 0) -> Path:
    """Random sentences; the label says whether `good` is in one, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    words = [word for word in WORDS.split() if word.isalpha()]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            texts = [" ".join(rng.choice(words, rng.integers(3, 12))) for _ in range(2)]
            label = float(rng.random() * 5) if scores else int("good" in texts[0].split())
            row = {"sentence1": texts[0], "sentence2": texts[1]} if pairs else {"sentence": texts[0]}
            file.write(json.dumps(row | {"label": label}) + "\n")
    return path
