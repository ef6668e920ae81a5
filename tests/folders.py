"""Model directories for tests: a dense one with a tokenizer and a card, and one pruned from it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from data.tiny import bert_tokenizer
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from shearling.pipeline import Pruned, measure
from tiny import model_of

CARD = """---
license: mit
language: en
tags: [sentiment]
base_model: someone/small-bert
datasets:
- glue
---
# Mine
"""
TEXTS = ["the film was good", "a bad film", "anna lives in paris", "who was in the city ?", "not good , not bad ."]


def dense_folder(folder: Path) -> Path:
    """A tiny classifier as its owner would have saved it."""
    model = model_of("bert")
    model.save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return folder


def pruned_folder(dense: Path, folder: Path) -> Path:
    """Pruned from it, with nothing left of the attention of layer 0 and of the filters of layer 1."""
    from shearling.checkpoint.pretrained import load_model

    model = load_model(str(dense), device="cpu")
    result = emptied(measure(model, batches(), samples=16).prune(flops=0.5))
    return result.save(folder, source=dense)


def emptied(pruned: Pruned) -> Pruned:
    """The same with two sublayers cut away whole."""
    from dataclasses import replace

    kept = [torch.arange(s.units) for s in structure_of(pruned.model).sublayers]
    cut = [units[:0] if number in (0, 3) else units for number, units in enumerate(kept)]
    model = shrink(pruned.model, cut)
    sizes = structure_of(model).sizes
    whole = [units[:0] if number in (0, 3) else units for number, units in enumerate(pruned.kept)]
    return replace(pruned, model=model, kept=whole, report=replace(pruned.report, layers=sizes))


def batches() -> list[dict[str, torch.Tensor]]:
    """Tokenised sentences with labels."""
    encoded = bert_tokenizer()(TEXTS * 4, padding=True, return_tensors="pt")
    return [{**encoded, "labels": torch.arange(20) % 2}]


def rows_file(path: Path, *, labels: bool = True) -> Path:
    """The sentences as jsonl."""
    rows = [{"text": text, **({"label": number % 2} if labels else {})} for number, text in enumerate(TEXTS * 2)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path
