"""Costs of units (multiply-accumulates, parameters or measured time), as a table per sublayer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shearling.engine.hooks import device_of, frozen, run, told_what_is_refused, watched
from shearling.engine.noise import special_tokens
from shearling.errors import ConstraintError
from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample
from shearling.schema import KINDS as KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLACK = 1e-9  # relative; costs are sums of floats


@dataclass(frozen=True)
class Piecewise:
    """Cost of k units of one sublayer: 0 for k = 0, `overhead` up to `threshold`, then `slope` per further unit."""

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
    """One constraint as methods see it: the cost of keeping k units of each sublayer, and the budget.

    tables  per sublayer, [units + 1]
    fixed   cost of what cannot be pruned but is part of the dense cost
    whole   dense cost, where it is not the sum of the above
    pieces  per sublayer, the fit of Alg. 2 to a table that is not linear
    """

    name: str
    ratio: float
    tables: tuple[NDArray[np.float64], ...]
    fixed: float = 0.0
    whole: float | None = None
    pieces: tuple[Piecewise, ...] = ()

    @property
    def dense(self) -> float:
        """The cost with all units."""
        if self.whole is not None:
            return self.whole
        return self.fixed + float(sum(table[-1] for table in self.tables))

    @property
    def budget(self) -> float:
        """Maximum total cost of the units."""
        return self.ratio * self.dense - self.fixed

    def among(self, numbers: Sequence[int]) -> Limit:
        """The same limit for a model with only these sublayers; the budget stays."""
        pieces = tuple(self.pieces[i] for i in numbers) if self.pieces else ()
        return replace(self, tables=tuple(self.tables[i] for i in numbers), pieces=pieces, whole=self.dense)

    def spent(self, counts: Sequence[int]) -> float:
        """Total cost of these counts."""
        return float(sum(table[count] for table, count in zip(self.tables, counts, strict=True)))

    def holds(self, counts: Sequence[int]) -> bool:
        """Whether these counts are within the budget."""
        return self.spent(counts) <= self.budget + SLACK * self.dense


def asked(limits: Sequence[Limit]) -> str:
    """The constraints as text, without duplicates."""
    return ", ".join(dict.fromkeys(f"{limit.name}={limit.ratio:g}" for limit in limits))


def ratio_of(name: str, value: object) -> float:
    """Check a constraint given by the user."""
    try:
        ratio = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConstraintError(f"{name}={value!r} is not a number; give a ratio in (0, 1], such as 0.5.") from None
    if not (math.isfinite(ratio) and 0 < ratio <= 1):
        raise ConstraintError(f"{name}={value} is outside (0, 1]; 0.5 asks for half of the dense model's cost.")
    return ratio


def macs_per_unit(sublayer: Sublayer, length: float, source: float = 0.0) -> float:
    """Multiply-accumulates of one unit for an example of `length` tokens, with `source` tokens in its encoder."""
    pairs = length * (source if sublayer.part.across else sublayer.reach(length))
    product = 2 * pairs * sublayer.width if sublayer.kind == "heads" else 0.0  # q k^T, and attention x v
    rows = sublayer.position_rows(length)
    positions = sublayer.position_products * rows * sublayer.width  # projected, then multiplied with tokens
    once = length * sublayer.weights_per_unit + source * sublayer.entries_per_unit("source")
    return sublayer.repeats * (once + product + positions * (sublayer.weight.shape[0] + length))


def _prices(structure: Structure, lengths: Sequence[float]) -> list[float]:
    """Per sublayer, the multiply-accumulates of one unit; cross-attention also reads the tokens of the first stack."""
    source = lengths[0]
    return [macs_per_unit(s, length, source) for s, length in zip(structure.sublayers, lengths, strict=True)]


def flops_limit(structure: Structure, lengths: Sequence[float], ratio: float) -> Limit:
    """The constraint on multiply-accumulates of the prunable layers."""
    tables = (
        _linear(s.units, price) for s, price in zip(structure.sublayers, _prices(structure, lengths), strict=True)
    )
    return Limit("flops", ratio, tuple(tables))


def params_limit(structure: Structure, ratio: float) -> Limit:
    """The constraint on parameters that belong to units of the prunable layers."""
    return Limit("params", ratio, tuple(_linear(s.units, s.params_per_unit) for s in structure.sublayers))


def _linear(units: int, price: float) -> NDArray[np.float64]:
    return np.arange(units + 1, dtype=np.float64) * price


def count_macs(structure: Structure, lengths: Sequence[float]) -> float:
    """Multiply-accumulates of the prunable layers."""
    return sum(s.units * price for s, price in zip(structure.sublayers, _prices(structure, lengths), strict=True))


def count_params(structure: Structure) -> int:
    """Parameters of the prunable layers."""
    return sum(s.units * s.params_per_unit for s in structure.sublayers)


def parameters(model: nn.Module) -> int:
    """Number of parameters of the model."""
    return sum(p.numel() for p in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def sequence_lengths(structure: Structure, sample: Sample) -> list[float]:
    """Per sublayer, the mean number of real tokens per example, found by running one example."""
    batch = sample.some(1)
    firsts = [sublayer for stack in structure.stacks for sublayer in stack.sublayers[0]]
    shapes: dict[Sublayer, torch.Size] = {}

    def on_input(number: int, h: Tensor) -> None:
        shapes[firsts[number]] = torch.Size((1, h.shape[:-1].numel()))  # tokens of the example, maybe in windows

    with frozen(structure.model), torch.no_grad(), watched(firsts, on_input), told_what_is_refused(structure.model):
        run(structure.model, batch.to(device_of(structure.model)))
    ids = batch.inputs.get("input_ids")
    tokens = None if ids is None or ids.dim() != 2 else ids.shape[1]
    lengths: list[float] = []
    for stack in structure.stacks:
        found = []
        name = stack.mask_of(batch)
        mask = batch.masks.get(name)
        for sublayer in stack.sublayers[0]:
            length = float(shapes[sublayer][1])
            if mask is not None and (mask.shape == shapes[sublayer] or stack.frames is not None):
                length *= sample.mean_total(name) / mask.shape[1]  # also scales frames by a mask over audio samples
            elif mask is None and tokens == length:
                length = sample.mean_length or length
            found.append(length)
        lengths += found * len(stack.sublayers)
    return lengths


def whole_macs(model: PreTrainedModel, batch: Batch, lengths: Mapping[str, float]) -> int:
    """Multiply-accumulates of the whole model for one example of these lengths, counted by running it.

    lengths  tokens by input: `input_ids`, and `decoder_input_ids` of an encoder-decoder
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    example = batch.pick(torch.tensor([0])).inputs
    for side in ("decoder_", ""):  # inputs of the encoder have no prefix
        example = _of_length(example, side, round(lengths.get(f"{side}input_ids", 0)), special_tokens(model.config))
    here = {k: v.to(device_of(model)) for k, v in example.items()}
    # The counter misses fused attention on a CPU; this kernel consists of plain matrix products.
    with frozen(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**here)
    return int(counter.get_total_flops()) // 2


@dataclass(frozen=True)
class Counted:
    """Multiply-accumulates of a dense model, the reference for pruned ones.

    lengths  tokens per sublayer
    tokens   tokens by input: those of the layers, or the sample's means where the layers differ
    layers   multiply-accumulates of the prunable layers
    rest     of everything else
    """

    dense: Structure
    sample: Sample
    lengths: Sequence[float]
    tokens: Mapping[str, float]
    layers: float
    rest: float

    @classmethod
    def of(cls, dense: Structure, sample: Sample, lengths: Sequence[float]) -> Counted:
        """Count by running one example of the mean length."""
        mean, alike = sum(lengths) / len(lengths), len(set(lengths)) == 1
        tokens = {"input_ids": mean, "decoder_input_ids": mean} | ({} if alike else sample.mean_lengths)
        ran = [float(round(mean))] * len(lengths) if alike else lengths  # the example's length is rounded
        whole = whole_macs(dense.model, sample.some(1), tokens)
        return cls(dense, sample, lengths, tokens, count_macs(dense, lengths), whole - count_macs(dense, ran))

    @property
    def whole(self) -> float:
        """Of the whole dense model."""
        return self.rest + self.layers

    def layers_of(self, student: Structure) -> float:
        """Of a pruned model's prunable layers."""
        return count_macs(student, [self.lengths[place] for place in student.places_in(self.dense)])

    def whole_of(self, student: Structure) -> float:
        """Of the whole pruned model; counted by running it only where layers differ in length."""
        if len(set(self.lengths)) > 1:
            return whole_macs(student.model, self.sample.some(1), self.tokens)
        return self.rest + self.layers_of(student)


def _of_length(inputs: dict[str, Tensor], side: str, length: int, special: set[int]) -> dict[str, Tensor]:
    """Cut or repeat the tokens of the encoder's or decoder's inputs to a length.

    Special tokens stay, and are not repeated: some heads look for an end token, and an image has places of its own.
    """
    ids = inputs.get(f"{side}input_ids")
    if ids is None or ids.dim() != 2:
        return inputs
    wide = ids.shape[1]
    index = _places(ids[0].cpu(), max(length, 1), special)
    own = {k: v for k, v in inputs.items() if k.startswith("decoder_") is bool(side)}
    cut = {k: v[:, index.to(v.device)] if v.dim() == 2 and v.shape[1] == wide else v for k, v in own.items()}
    mask = f"{side}attention_mask"
    return inputs | cut | ({mask: torch.ones_like(cut[mask])} if mask in cut else {})


def _places(ids: Tensor, length: int, special: set[int]) -> Tensor:
    """[length]: which of the tokens [S] to take, in order."""
    every = torch.arange(len(ids))
    ordinary = every[~torch.isin(ids, torch.tensor(sorted(special), dtype=ids.dtype))]
    if length <= len(ids):
        dropped = ordinary[len(ordinary) - min(len(ids) - length, len(ordinary)) :]
        return every[~torch.isin(every, dropped)][:length]
    filling = ordinary[-1:] if len(ordinary) else every[-1:]
    return torch.cat([every[:-1], filling.expand(length - len(ids)), every[-1:]])
