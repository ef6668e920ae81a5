"""Tokenised examples, and batches of CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shearling.errors import InputError
from shearling.sample.batch import IGNORED

Tensors = dict[str, torch.Tensor]  # a batch as keyword arguments of the model's forward, labels included


@dataclass(frozen=True)
class Tokenized:
    """Model inputs before padding: per example, `tokens` has a list (or an image, an audio clip), `values` a number."""

    tokens: Mapping[str, Sequence[Sequence[int]]]
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.tokens.values())))

    def select(self, indices: NDArray[np.int64]) -> Tokenized:
        """The examples at `indices`, in that order."""
        tokens = {name: [lists[i] for i in indices] for name, lists in self.tokens.items()}
        return replace(self, tokens=tokens, values={name: values[indices] for name, values in self.values.items()})


class Batches(list[Tensors]):
    """A list of batches that knows which example each row is.

    order  index of the example in each row, counted over all batches
    given  number of examples they were drawn from; 0 if unknown
    """

    def __init__(self, batches: Iterable[Tensors], order: NDArray[np.int64], given: int = 0) -> None:
        super().__init__(batches)
        self.order = order
        self.given = given


def cut(
    examples: Tokenized, batch_size: int, lengths: Sequence[int] | None, stack: Callable[[Tokenized], Tensors]
) -> Batches:
    """Split into batches, each built by `stack`; the longest examples first if lengths are given, else in order."""
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}; give at least 1")
    order = np.arange(len(examples)) if lengths is None else np.argsort(-np.asarray(lengths), kind="stable")
    chunks = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return Batches([stack(examples.select(chunk)) for chunk in chunks], order)


def padded(examples: Tokenized, pad_id: int) -> Tensors:
    """One batch, padded to its longest example."""
    # Right padding for every model, so that positions count from the first real token, also in decoders.
    fill = {"input_ids": pad_id, "decoder_input_ids": pad_id, "labels": IGNORED}
    batch: Tensors = {}
    for name, lists in examples.tokens.items():
        longest = max(map(len, lists))
        padded = np.full((len(lists), longest), fill.get(name, 0), dtype=np.int64)  # [examples, tokens]
        for row, ids in zip(padded, lists, strict=True):
            row[: len(ids)] = ids
        batch[name] = torch.from_numpy(padded)
    for name, values in examples.values.items():
        batch[name] = torch.from_numpy(values)
    return batch
