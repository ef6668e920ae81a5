"""A batch: some examples of the sample, padded to one length."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

LABELS = ("labels", "label", "start_positions", "end_positions")
IGNORED = -100  # ignore_index of torch's losses
HELD_OUT = 8  # one example in eight is held out of fits, to validate them


@dataclass(frozen=True)
class Batch:
    """The model's inputs, the labels, and each example's index in the sample.

    masks       attention masks on the host: reading them from a GPU would synchronise
    remembered  cache of values derived from the batch
    """

    inputs: dict[str, Tensor]
    labels: dict[str, Tensor]
    indices: Tensor  # [B], host
    masks: dict[str, Tensor] = field(default_factory=dict)
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; tensors already there are not copied."""

        def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v.to(device, non_blocking=True) for k, v in tensors.items()}

        return Batch(moved(self.inputs), moved(self.labels), self.indices, self.masks)

    def floats_as(self, dtype: torch.dtype) -> Batch:
        """The same batch with floating-point inputs (pixels, audio) converted; token ids and masks stay."""
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.inputs.items()}
        return Batch(inputs, self.labels, self.indices, self.masks)

    def beside_inputs(self, found: Tensor) -> Tensor:
        """Move a tensor to the device of the inputs."""
        return found.to(next(iter(self.inputs.values())).device, non_blocking=True)

    def pick(self, examples: Tensor) -> Batch:
        """The examples at these positions."""

        def taken(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v[examples] for k, v in tensors.items()}

        return Batch(taken(self.inputs), taken(self.labels), self.indices[examples], taken(self.masks))

    def real_tokens(self, mask: str, shape: torch.Size) -> Tensor | None:
        """[B, S] bool, host: which tokens are not padding; None when all are, or the mask has another shape."""
        real = self.masks.get(mask)
        if real is None or real.shape != shape or bool(real.all()):
            return None
        return real.bool()

    def held_out(self) -> Tensor:
        """[B] bool: the examples held out of fits."""
        return is_held_out(self.indices)

    def held_out_last(self) -> Batch:
        """The same examples with those held out last, so that both parts are slices instead of copies."""
        return self.pick(self.held_out().int().argsort(stable=True))


def is_held_out(numbers: Tensor) -> Tensor:
    """Whether the examples with these indices are held out of fits: the last of every eight."""
    return numbers % HELD_OUT == HELD_OUT - 1


def uniform(indices: Tensor, count: int, seed: int) -> Tensor:
    """[B, count] numbers in [0, 1); each row depends only on the seed and the example's index."""
    rows = [np.random.Generator(np.random.Philox(key=[seed, int(i)])).random(count) for i in indices]
    return torch.from_numpy(np.stack(rows))
