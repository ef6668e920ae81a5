"""Tokenised examples, and the batches of CPU tensors that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shearling.errors import InputError
from shearling.sample.batch import IGNORED

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tokenized:
    """Model inputs before padding: `tokens` has a list per example and name, `values` one number."""

    tokens: Mapping[str, Sequence[Sequence[int]]]
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens["input_ids"])

    def select(self, indices: NDArray[np.int64]) -> Tokenized:
        """The examples at `indices`, in that order."""
        tokens = {name: [lists[i] for i in indices] for name, lists in self.tokens.items()}
        return replace(self, tokens=tokens, values={name: values[indices] for name, values in self.values.items()})


def joined(first: Tokenized, second: Tokenized) -> Tokenized:
    """The examples of both, those of the first before; neither has values."""
    return Tokenized({name: [*first.tokens[name], *second.tokens[name]] for name in first.tokens})


class Batches(list[Batch]):
    """A list of batches that remembers which example each row of them is.

    `order[i]` is the index of the example in the i-th row, counted through all batches.
    """

    def __init__(self, batches: Iterable[Batch], order: NDArray[np.int64]) -> None:
        super().__init__(batches)
        self.order = order


def make_batches(examples: Tokenized, *, pad_id: int, batch_size: int, bucket: bool = True) -> Batches:
    """Pad to the longest of each batch; `bucket` puts examples of similar length together, the longest first."""
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}; give at least 1")
    lengths = np.array([len(ids) for ids in examples.tokens["input_ids"]])
    order = np.argsort(-lengths, kind="stable") if bucket else np.arange(len(lengths))
    chunks = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return Batches([_pad(examples.select(chunk), pad_id) for chunk in chunks], order)


def _pad(examples: Tokenized, pad_id: int) -> Batch:
    # On the right for every model: positions then count from the first real token, also in decoders.
    fill = {"input_ids": pad_id, "labels": IGNORED}
    longest = max(len(ids) for ids in examples.tokens["input_ids"])
    batch: Batch = {}
    for name, lists in examples.tokens.items():
        padded = np.full((len(lists), longest), fill.get(name, 0), dtype=np.int64)  # [examples, tokens]
        for row, ids in zip(padded, lists, strict=True):
            row[: len(ids)] = ids
        batch[name] = torch.from_numpy(padded)
    for name, values in examples.values.items():
        batch[name] = torch.from_numpy(values)
    return batch
