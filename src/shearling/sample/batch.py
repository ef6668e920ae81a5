"""A batch: some examples, padded to one length, as a pass over the sample runs them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

LABELS = ("labels", "label", "start_positions", "end_positions")
IGNORED = -100  # the label that torch's losses leave out
HELD_OUT = 8  # one example in eight is kept from fits, to judge them


@dataclass(frozen=True)
class Batch:
    """Some examples: the model's inputs, the labels apart, and each example's number in the sample.

    masks  the attention masks on the host: asking a GPU which tokens are real would stop its queue
    """

    inputs: dict[str, Tensor]
    labels: dict[str, Tensor]
    indices: Tensor  # [B], host
    masks: dict[str, Tensor] = field(default_factory=dict)
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # worked out once

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; nothing is copied when it is there already."""

        def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v.to(device, non_blocking=True) for k, v in tensors.items()}

        return Batch(moved(self.inputs), moved(self.labels), self.indices, self.masks)

    def floats_as(self, dtype: torch.dtype) -> Batch:
        """The same batch for a model in that precision: numbers such as pixels are converted, tokens and masks stay."""
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.inputs.items()}
        return Batch(inputs, self.labels, self.indices, self.masks)

    def beside_inputs(self, found: Tensor) -> Tensor:
        """What was worked out on the host, where the model's inputs are."""
        return found.to(next(iter(self.inputs.values())).device, non_blocking=True)

    def pick(self, examples: Tensor) -> Batch:
        """The examples at these places."""

        def taken(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v[examples] for k, v in tensors.items()}

        return Batch(taken(self.inputs), taken(self.labels), self.indices[examples], taken(self.masks))

    def real_tokens(self, mask: str, shape: torch.Size) -> Tensor | None:
        """[B, S] bool, host: which tokens are not padding; None when all are, or the mask is not about them."""
        real = self.masks.get(mask)
        if real is None or real.shape != shape or bool(real.all()):
            return None
        return real.bool()

    def held_out(self) -> Tensor:
        """[B] bool: the examples that judge a fit instead of making it."""
        return is_held_out(self.indices)

    def held_out_last(self) -> Batch:
        """The same examples, those held out at the end: either kind is then a slice, not a copy."""
        return self.pick(self.held_out().int().argsort(stable=True))


def is_held_out(numbers: Tensor) -> Tensor:
    """Whether the examples with these numbers judge fits instead of making them: the last of every eight."""
    return numbers % HELD_OUT == HELD_OUT - 1


def uniform(indices: Tensor, count: int, seed: int) -> Tensor:
    """[B, count] numbers in [0, 1): each row depends on the seed and the example's number alone."""
    rows = [np.random.Generator(np.random.Philox(key=[seed, int(i)])).random(count) for i in indices]
    return torch.from_numpy(np.stack(rows))
