"""Compare the outputs of an exported file with PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shearling.errors import CheckFailed
from shearling.exporters.inputs import Inputs

Outputs = dict[str, NDArray[Any]]
Runner = Callable[[Inputs], Outputs]

# Relative tolerances: of the largest difference for floats, of the root mean square for integers, because quantisation
# changes single outputs far more than the rest. The largest difference is reported for all.
TOLERANCE = {
    "float32": 1e-3, "float16": 5e-2, "q8_0": 0.1, "q4_0": 0.5, "int8-dynamic": 0.25, "int8-static": 0.25
}  # fmt: skip
ROOT_MEAN_SQUARE = ("q8_0", "q4_0", "int8-dynamic", "int8-static")


@dataclass(frozen=True)
class Difference:
    """Difference between the file and PyTorch."""

    largest: float  # absolute
    relative: float  # largest / largest output
    mean: float  # root mean square / that of the outputs
    agreement: float | None  # share of equal predictions, for classifiers
    tolerance: float
    batches: int


def check(
    run: Runner, batches: Sequence[Inputs], expected: Sequence[dict[str, Tensor]], *, precision: str
) -> Difference:
    """Run every batch and compare; raises `CheckFailed` beyond the tolerance."""
    result = _difference(run, batches, expected, TOLERANCE[precision])
    by_mean = precision in ROOT_MEAN_SQUARE
    judged = result.mean if by_mean else result.relative
    if not judged <= result.tolerance:
        what = "root mean square" if by_mean else "largest output"
        raise CheckFailed(
            f"The exported model differs from PyTorch by up to {result.largest:.3g}, {judged:.1%} of the {what} "
            f"({result.tolerance:.1%} is allowed for {precision}). Nothing was written."
        )
    return result


def _difference(
    run: Runner, batches: Sequence[Inputs], expected: Sequence[dict[str, Tensor]], tolerance: float
) -> Difference:
    """Run every batch and accumulate the differences."""
    worst = largest = squares = scale = 0.0
    same = chosen = 0
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
            difference = np.nan_to_num(np.abs(ours.astype(np.float64) - theirs), nan=np.inf)
            worst = max(worst, float(difference.max(initial=0.0)))
            largest = max(largest, float(np.abs(theirs).max(initial=0.0)))
            squares += float((difference**2).sum())
            scale += float((theirs.astype(np.float64) ** 2).sum())
            if "logits" in name and tensor.shape[-1] > 1:
                equal = ours.argmax(-1) == theirs.argmax(-1)
                same, chosen = same + int(equal.sum()), chosen + equal.size
    mean = math.sqrt(squares / max(scale, 1e-24))
    agreement = same / chosen if chosen else None
    return Difference(worst, worst / max(largest, 1e-12), mean, agreement, tolerance, len(batches))


def _real(values: NDArray[Any], batch: Inputs) -> NDArray[Any]:
    """The values of real tokens, if the output has one row per token; values at padding are arbitrary."""
    mask = batch.get("attention_mask")
    if mask is None or values.shape[:2] != tuple(mask.shape):
        return values
    return np.asarray(values[mask.numpy().astype(bool)])
