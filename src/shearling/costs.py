"""What units cost: multiply-accumulates, parameters, or measured time, as a table per sublayer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shearling.engine.hooks import device_of, frozen, run
from shearling.errors import ConstraintError
from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("flops", "params", "latency")
SLACK = 1e-9  # relative; costs are sums of floats


@dataclass(frozen=True)
class Piecewise:
    """What k units of one sublayer cost: nothing at 0, `overhead` up to `threshold`, then `slope` for each one more."""

    slope: float
    overhead: float = 0.0
    threshold: int = 0

    def __call__(self, count: int) -> float:
        """The cost of keeping `count` units."""
        if count == 0:
            return 0.0
        return self.overhead + self.slope * max(0, count - self.threshold)


@dataclass(frozen=True)
class Limit:
    """One constraint, ready for a method: what keeping k units of each sublayer costs, and how much there is."""

    name: str
    ratio: float
    tables: tuple[NDArray[np.float64], ...]  # per sublayer [units + 1]
    fixed: float = 0.0  # what pruning cannot touch but the ratio counts
    whole: float | None = None  # what the ratio is of, where that is not the sum of the above
    pieces: tuple[Piecewise, ...] = ()  # per sublayer, Alg. 2's picture of a table that is not a straight line

    @property
    def dense(self) -> float:
        """The cost with every unit."""
        if self.whole is not None:
            return self.whole
        return self.fixed + float(sum(table[-1] for table in self.tables))

    @property
    def budget(self) -> float:
        """What the units may cost together."""
        return self.ratio * self.dense - self.fixed

    def among(self, numbers: Sequence[int]) -> Limit:
        """The same limit for a model that has these sublayers only; the budget stays."""
        pieces = tuple(self.pieces[i] for i in numbers) if self.pieces else ()
        return replace(self, tables=tuple(self.tables[i] for i in numbers), pieces=pieces, whole=self.dense)

    def spent(self, counts: Sequence[int]) -> float:
        """What these counts cost together."""
        return float(sum(table[count] for table, count in zip(self.tables, counts, strict=True)))

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether these counts are within the budget."""
        return self.spent(counts) <= self.budget + SLACK * self.dense


@dataclass(frozen=True)
class Constraint:
    """What the user asks for: ratios of the dense model's costs, all of which must hold."""

    flops: float | None = None
    params: float | None = None
    latency: float | None = None

    @classmethod
    def of(cls, *, flops: object = None, params: object = None, latency: object = None) -> Constraint:
        """The constraint as a caller gave it, checked."""
        given = {"flops": flops, "params": params, "latency": latency}
        ratios = {name: ratio_of(name, value) for name, value in given.items() if value is not None}
        if not ratios:
            raise ConstraintError(
                "Give a constraint: flops=0.5, params=0.5 or latency=0.5 (--flops 0.5 ...), or several together."
            )
        return cls(**ratios)

    def limits(self, structure: Structure, lengths: Sequence[float]) -> list[Limit]:
        """FLOPs and parameters as tables of costs; a latency's own come from its table."""
        limits = []
        if self.flops is not None:
            limits.append(flops_limit(structure, lengths, self.flops))
        if self.params is not None:
            limits.append(params_limit(structure, self.params))
        return limits


def ratio_of(name: str, value: object) -> float:
    """A constraint as the user gave it, checked."""
    try:
        ratio = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConstraintError(f"{name}={value!r} is not a number; give a ratio in (0, 1], such as 0.5.") from None
    if not (math.isfinite(ratio) and 0 < ratio <= 1):
        raise ConstraintError(f"{name}={value} is outside (0, 1]; 0.5 asks for half of the dense model's cost.")
    return ratio


def macs_per_unit(sublayer: Sublayer, length: float) -> float:
    """Multiply-accumulates of one unit for one example of `length` tokens."""
    pairs = length * sublayer.reach(length)
    product = 2 * pairs * sublayer.width if sublayer.kind == "heads" else 0.0  # q k^T and its product with v
    rows = sublayer.position_rows(length)
    positions = sublayer.position_products * rows * sublayer.width  # projected, then met by tokens
    once = length * sublayer.weights_per_unit + product + positions * (sublayer.weight.shape[0] + length)
    return sublayer.repeats * once


def flops_limit(structure: Structure, lengths: Sequence[float], ratio: float) -> Limit:
    """The constraint on multiply-accumulates of the prunable layers."""
    tables = (_linear(s.units, macs_per_unit(s, n)) for s, n in zip(structure.sublayers, lengths, strict=True))
    return Limit("flops", ratio, tuple(tables))


def params_limit(structure: Structure, ratio: float) -> Limit:
    """The constraint on parameters of the prunable layers that go with units."""
    return Limit("params", ratio, tuple(_linear(s.units, s.params_per_unit) for s in structure.sublayers))


def _linear(units: int, price: float) -> NDArray[np.float64]:
    return np.arange(units + 1, dtype=np.float64) * price


def count_macs(structure: Structure, lengths: Sequence[float]) -> float:
    """Multiply-accumulates of the prunable layers, from the modules as they are."""
    pairs = zip(structure.sublayers, lengths, strict=True)
    return sum(s.units * macs_per_unit(s, length) for s, length in pairs)


def count_params(structure: Structure) -> int:
    """Parameters of the prunable layers, from the modules as they are."""
    return sum(s.units * s.params_per_unit for s in structure.sublayers)


def parameters(model: nn.Module) -> int:
    """All parameters of the model."""
    return sum(p.numel() for p in model.parameters())


def sequence_lengths(structure: Structure, sample: Sample) -> list[float]:
    """Per sublayer, the mean number of real tokens of an example; seen by running one."""
    seen: dict[tuple[int, int], torch.Size] = {}
    batch = sample.some(1)
    handles = []
    for number, stack in enumerate(structure.stacks):
        for part, sublayer in enumerate(stack.sublayers[0]):

            def hook(module: nn.Module, args: tuple[Tensor, ...], at: tuple[int, int] = (number, part)) -> None:
                seen[at] = torch.Size((1, args[0].shape[:-1].numel()))  # of one example, maybe in windows

            handles.append(sublayer.out.register_forward_pre_hook(hook))
    try:
        with frozen(structure.model), torch.inference_mode():
            run(structure.model, batch.to(device_of(structure.model)))
    finally:
        for handle in handles:
            handle.remove()
    lengths: list[float] = []
    for number, stack in enumerate(structure.stacks):
        found = []
        name = stack.mask_of(batch)
        mask = batch.masks.get(name)
        for part in range(len(stack.sublayers[0])):
            length = float(seen[number, part][1])
            if mask is not None and (mask.shape == seen[number, part] or stack.frames is not None):
                length *= sample.mean_total(name) / mask.shape[1]  # a mask over audio samples counts frames
            elif mask is None and _tokens(batch) == length:
                length = sample.mean_length or length
            found.append(length)
        lengths += found * len(stack.sublayers)
    return lengths


def _tokens(batch: Batch) -> int | None:
    """How many tokens an example of the batch has, where it is made of tokens."""
    ids = batch.inputs.get("input_ids")
    return None if ids is None or ids.dim() != 2 else ids.shape[1]


def whole_macs(model: PreTrainedModel, batch: Batch, length: float) -> int:
    """Multiply-accumulates of the whole model for one example of about `length` tokens, counted by running it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    example = _of_length(batch.pick(torch.tensor([0])).inputs, round(length))
    here = {k: v.to(device_of(model)) for k, v in example.items()}
    # The counter does not see fused attention on a CPU; as plain matrix products it does.
    with frozen(model), torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**here)
    return int(counter.get_total_flops()) // 2


@dataclass(frozen=True)
class Counted:
    """Multiply-accumulates of a dense model, to compare smaller ones with.

    layers  of its prunable layers, at the lengths that the sublayers see
    rest    of everything else
    """

    dense: Structure
    sample: Sample
    lengths: Sequence[float]
    layers: float
    rest: float

    @classmethod
    def of(cls, dense: Structure, sample: Sample, lengths: Sequence[float]) -> Counted:
        """Counted by running one example of the mean length."""
        mean = _mean(lengths)
        alike = len(set(lengths)) == 1
        tokens = [float(round(mean))] * len(lengths) if alike else lengths  # what was run; layers count the mean itself
        whole = whole_macs(dense.model, sample.some(1), mean)
        return cls(dense, sample, lengths, count_macs(dense, lengths), whole - count_macs(dense, tokens))

    @property
    def whole(self) -> float:
        """Of the whole dense model."""
        return self.rest + self.layers

    def layers_of(self, student: Structure) -> float:
        """Of a smaller model's prunable layers."""
        return count_macs(student, [self.lengths[place] for place in student.places_in(self.dense)])

    def whole_of(self, student: Structure) -> float:
        """Of the whole smaller model; where all layers see the same tokens, the dense one tells the rest."""
        if len(set(self.lengths)) > 1:
            return whole_macs(student.model, self.sample.some(1), _mean(self.lengths))
        return self.rest + self.layers_of(student)


def _mean(lengths: Sequence[float]) -> float:
    return sum(lengths) / len(lengths)


def _of_length(inputs: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """An example with its tokens cut or repeated to a length, where it has tokens."""
    ids = inputs.get("input_ids")
    if ids is None or ids.dim() != 2:
        return inputs
    wide = ids.shape[1]
    index = torch.arange(max(length, 1)) % wide
    result = {k: v[:, index.to(v.device)] if v.dim() == 2 and v.shape[1] == wide else v for k, v in inputs.items()}
    if "attention_mask" in result:
        result["attention_mask"] = torch.ones_like(result["attention_mask"])
    return result
