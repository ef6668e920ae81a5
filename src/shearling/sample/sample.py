"""The sample: the calibration examples without padding, from which every pass builds its own batches.

Examples that can share a batch form a group. Inputs with one entry per token are concatenated,
[tokens of all examples, ...], so neither padding nor the caller's batch size affects the result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shearling.sample.batch import LABELS, Batch

TOKENS = {"input_ids", "inputs_embeds"}  # inputs whose mask counts tokens
ASSUMED_LENGTH = 256  # tokens assumed for an example without token ids: an image, an audio clip


@dataclass(frozen=True)
class Column:
    """One input of all examples of a group.

    values  [tokens of all examples, ...] where `axis` names its mask, else [examples, ...]
    pad     padding value
    """

    values: Tensor
    axis: str = ""
    pad: int = 0


@dataclass(frozen=True)
class Group:
    """Examples that can share a batch; `lengths` has each example's length on every axis, [examples]."""

    columns: dict[str, Column]
    lengths: dict[str, Tensor]
    indices: Tensor  # [examples]: index in the sample

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def starts(self) -> dict[str, Tensor]:
        """Where each example begins on every axis."""
        return {axis: lengths.cumsum(0) - lengths for axis, lengths in self.lengths.items()}

    @cached_property
    def tokens(self) -> Tensor:
        """[examples]: tokens per example."""
        found = [torch.full((len(self),), ASSUMED_LENGTH)] if "input_ids" not in self.columns else []
        for name, column in self.columns.items():
            if name.endswith("input_ids"):
                fixed = column.values.shape[1] if not column.axis and column.values.dim() > 1 else 1
                found.append(self.lengths[column.axis] if column.axis else torch.full((len(self),), fixed))
        return torch.stack(found).amax(0)

    def pick(self, rows: Tensor) -> Group:
        """Some of the examples."""
        columns = {}
        for name, column in self.columns.items():
            taken = self._positions(column.axis, rows) if column.axis else rows
            columns[name] = replace(column, values=column.values[taken])
        lengths = {axis: length[rows] for axis, length in self.lengths.items()}
        return Group(columns, lengths, self.indices[rows])

    def _positions(self, axis: str, rows: Tensor) -> Tensor:
        """Positions on the axis of the tokens of these examples."""
        lengths, starts = self.lengths[axis][rows], self.starts[axis][rows]
        first = lengths.cumsum(0) - lengths
        return torch.arange(int(lengths.sum())) + (starts - first).repeat_interleave(lengths)

    def batch(self, rows: Tensor, multiple: int = 1) -> Batch:
        """These examples as a batch, padded on the right to the longest, rounded up to a multiple."""
        places = {axis: self._places(axis, rows, multiple) for axis in self.lengths}
        tensors = {}
        for name, column in self.columns.items():
            if not column.axis:
                tensors[name] = column.values[rows]
                continue
            tensors[name] = _side_by_side(column, *places[column.axis])
        labels = {k: v for k, v in tensors.items() if k in LABELS}
        inputs = {k: v for k, v in tensors.items() if k not in LABELS}
        masks = {k: v for k, v in inputs.items() if k.endswith("attention_mask")}
        return Batch(inputs, labels, self.indices[rows], masks)

    def _places(self, axis: str, rows: Tensor, multiple: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """[B, S] each: the position on the axis of every token of the batch, and whether it is padding."""
        lengths = self.lengths[axis][rows].numpy()
        longest = -(-int(lengths.max()) // multiple) * multiple
        width = min(longest, int(self.lengths[axis].max()))  # rounding up must not exceed the model's positions
        outside = np.arange(width) >= lengths[:, None]
        at = self.starts[axis][rows].numpy()[:, None] + np.arange(width)
        at[outside] = 0
        return at, outside


def _side_by_side(column: Column, at: NDArray[np.int64], outside: NDArray[np.bool_]) -> Tensor:
    """[B, S, ...]: numpy avoids torch's thread start-up for small copies, but has no bfloat16."""
    if column.values.dtype == torch.bfloat16:
        values = column.values[torch.from_numpy(at)]
        values[torch.from_numpy(outside)] = column.pad
        return values
    taken = column.values.numpy()[at]
    taken[outside] = column.pad
    return torch.from_numpy(taken)


@dataclass(frozen=True)
class Sample:
    """The calibration examples.

    given   number of examples it was drawn from
    notes   remarks for the report about how they were read
    """

    groups: tuple[Group, ...]
    given: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def examples(self) -> int:
        """Number of examples."""
        return sum(map(len, self.groups))

    @property
    def has_labels(self) -> bool:
        """Whether every example has labels."""
        return all(group.columns.keys() & set(LABELS) for group in self.groups)

    @property
    def inputs(self) -> set[str]:
        """The names of all inputs, without labels."""
        return {name for group in self.groups for name in group.columns} - set(LABELS)

    @property
    def mean_length(self) -> float | None:
        """Mean number of real tokens per example; None without token ids, as a mask over sound counts its samples."""
        if all("attention_mask" in group.columns and group.columns.keys() & TOKENS for group in self.groups):
            return self.mean_total("attention_mask")
        ids = [group.columns.get("input_ids") for group in self.groups]
        if any(column is None or column.values.dim() != 2 or column.axis for column in ids):
            return None
        return sum(column.values.numel() for column in ids if column is not None) / self.examples

    @property
    def mean_lengths(self) -> dict[str, float]:
        """Mean number of real tokens per example, for every input where masks or token ids show it."""
        found = {"input_ids": self.mean_length}
        if all("decoder_attention_mask" in group.columns for group in self.groups):
            found["decoder_input_ids"] = self.mean_total("decoder_attention_mask")
        return {name: length for name, length in found.items() if length is not None}

    def mean_total(self, name: str) -> float:
        """Mean over examples of the sum of an input; for a mask, the number of real tokens."""
        return sum(int(group.columns[name].values.sum()) for group in self.groups) / self.examples

    def largest_value(self, name: str) -> int:
        """The largest value of an input, such as the highest token id."""
        found = (group.columns[name].values for group in self.groups if name in group.columns)
        return max((int(values.max()) for values in found if values.numel()), default=0)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all examples, independent of the caller's batches and padding."""
        digest = hashlib.sha256()
        for group in self.groups:
            for axis, lengths in sorted(group.lengths.items()):
                digest.update(axis.encode() + lengths.numpy().tobytes())
            for name, column in sorted(group.columns.items()):
                values = column.values.float() if column.values.dtype == torch.bfloat16 else column.values
                digest.update(f"{name} {column.values.dtype} {tuple(values.shape)}".encode())
                digest.update(np.ascontiguousarray(values.numpy()).data)
        return digest.hexdigest()

    def cut(self, tokens: int, *, multiple: int = 1) -> list[Batch]:
        """Split all examples into batches of at most `tokens` tokens (at least one example), grouped by length.

        The longest come first, so that running out of memory shows at once.
        """
        batches = []
        for group in sorted(self.groups, key=lambda group: -int(group.tokens.max())):
            order = group.tokens.argsort(descending=True, stable=True)
            start = 0
            while start < len(order):
                length = -(-int(group.tokens[order[start]]) // multiple) * multiple
                stop = start + max(1, tokens // max(length, 1))
                batches.append(group.batch(order[start:stop], multiple))
                start = stop
        return batches

    def some(self, count: int) -> Batch:
        """Up to `count` examples of the first group as one batch."""
        return self.groups[0].batch(torch.arange(min(count, len(self.groups[0]))))

    def drawn(self, count: int, seed: int) -> Sample:
        """Draw `count` examples without replacement, keeping their order; all of them where there are fewer."""
        numbers = self._numbers
        if count >= len(numbers):
            return self
        chosen = np.random.default_rng(seed).permutation(len(numbers))[:count]
        return self._where(numbers[torch.from_numpy(chosen)])

    def without(self, others: Sample) -> Sample:
        """The examples that are not in `others`."""
        numbers = self._numbers
        return self._where(numbers[~torch.isin(numbers, others._numbers)])

    def shard(self, rank: int, world: int) -> Sample:
        """The share of one process: every world-th example, starting at rank."""
        return self if world == 1 else self._where(self._numbers[rank::world])

    @property
    def _numbers(self) -> Tensor:
        """The indices of all examples, ascending."""
        return torch.cat([group.indices for group in self.groups]).sort().values

    def _where(self, numbers: Tensor) -> Sample:
        """The examples with these indices."""
        found = ((group, torch.isin(group.indices, numbers).nonzero().flatten()) for group in self.groups)
        return replace(self, groups=tuple(group.pick(at) for group, at in found if len(at)))
