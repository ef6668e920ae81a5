"""Is the file the model? Its outputs against PyTorch's, on every batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shearling.errors import CheckFailed
from shearling.export.inputs import Inputs

Outputs = dict[str, NDArray[Any]]
Runner = Callable[[Inputs], Outputs]

# The largest difference that may be, as a share of the largest output.
TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "int8": 3e-1}


@dataclass(frozen=True)
class Difference:
    """How far the file is from PyTorch: the largest difference, absolute and of the largest output."""

    largest: float
    relative: float
    agreement: float | None  # share of equal predictions, where there is something to choose from
    tolerance: float
    batches: int

    def to_json(self) -> dict[str, float | int | None]:
        """Plain data."""
        return asdict(self)


def check(
    run: Runner, batches: Sequence[Inputs], expected: Sequence[dict[str, Tensor]], *, precision: str
) -> Difference:
    """Run every batch and compare; raises `CheckFailed` beyond the tolerance."""
    worst, scale, same, chosen = 0.0, 0.0, 0, 0
    for number, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        found = run(batch)
        for name, tensor in wanted.items():
            if name not in found or found[name].shape != tuple(tensor.shape):
                got = found[name].shape if name in found else "nothing"
                raise CheckFailed(
                    f"The exported model gives {got} for '{name}' of batch {number}, PyTorch gives "
                    f"{tuple(tensor.shape)}. Nothing was written."
                )
            ours, theirs = _real(found[name], batch), _real(tensor.numpy(), batch)
            difference = float(np.abs(ours - theirs).max(initial=0.0))
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
            scale = max(scale, float(np.abs(theirs).max(initial=0.0)))
            if "logits" in name and tensor.shape[-1] > 1:
                equal = ours.argmax(-1) == theirs.argmax(-1)
                same, chosen = same + int(equal.sum()), chosen + equal.size
    result = Difference(
        worst, worst / max(scale, 1e-12), same / chosen if chosen else None, TOLERANCE[precision], len(batches)
    )
    if not result.relative <= result.tolerance:
        raise CheckFailed(
            f"The exported model differs from PyTorch by {worst:.3g}, {result.relative:.1%} of the largest output "
            f"({result.tolerance:.1%} is allowed for {precision}). Nothing was written."
        )
    return result


def _real(values: NDArray[Any], batch: Inputs) -> NDArray[Any]:
    """The values of real tokens, where the output has one row per token: padding may hold anything."""
    mask = batch.get("attention_mask")
    if mask is None or values.shape[:2] != tuple(mask.shape):
        return values
    return np.asarray(values[mask.numpy().astype(bool)])
