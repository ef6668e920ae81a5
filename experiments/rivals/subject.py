"""The model under test with its calibration tokens, and what several methods need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shearling.costs import Limit, params_limit
from shearling.engine.hooks import frozen, watched
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import Sublayer, is_transposed

TOKENS = {"cpu": 2048, "cuda": 32768}  # of a batch


class Unsuited(Exception):
    """A method that has no meaning for this architecture."""


@dataclass
class Activations:
    """Per sublayer, sums over tokens of the input of its output projection."""

    total: Tensor  # [n]
    squares: Tensor  # [n]
    tokens: int = 0

    @property
    def mean(self) -> Tensor:
        return self.total / self.tokens

    @property
    def variance(self) -> Tensor:
        return (self.squares / self.tokens - self.mean**2).clamp_min(0)


@dataclass
class Subject:
    """A dense model, calibration tokens [windows, length], and a place to keep measurements from share to share."""

    model: Any
    calibration: Tensor
    measured: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def structure(self) -> Structure:
        return structure_of(self.model)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """What was measured under a name, or what `measure` finds now."""
        if name not in self.measured:
            self.measured[name] = measure()
        return self.measured[name]

    def batches(self, tokens: int | None = None) -> Iterator[Tensor]:
        """The calibration windows, some at a time, on the model's device."""
        size = max(1, (tokens or TOKENS[self.device.type]) // self.calibration.shape[1])
        for some in self.calibration.split(size):
            yield some.to(self.device)

    def limit(self, share: float) -> Limit:
        """The budget: a share of the parameters of the prunable layers."""
        return params_limit(self.structure, share)

    @contextmanager
    def watching(self, see: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Inference, with the input of every output projection shown as it passes by."""
        with frozen(self.model), torch.no_grad(), watched(self.structure.sublayers, see):
            yield

    def run(self, ids: Tensor) -> Tensor:
        """The last hidden states; most measurements need no logits."""
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    @property
    def activations(self) -> list[Activations]:
        """Means and variances of every sublayer's `h`, measured once."""
        found: list[Activations] = self.once("activations", self._activations)
        return found

    def _activations(self) -> list[Activations]:
        def zeros(sublayer: Sublayer) -> Tensor:
            return torch.zeros(sublayer.units * sublayer.width, dtype=torch.float64, device=self.device)

        found = [Activations(zeros(s), zeros(s)) for s in self.structure.sublayers]

        def see(number: int, h: Tensor) -> None:
            rows = h.flatten(0, -2).double()
            found[number].total += rows.sum(0)
            found[number].squares += rows.square().sum(0)
            found[number].tokens += len(rows)

        with self.watching(see):
            for ids in self.batches():
                self.run(ids)
        return found


def by_unit(sublayer: Sublayer, columns: Tensor) -> Tensor:
    """[units]: values of the columns of `h`, summed over each unit's."""
    return columns.view(sublayer.units, sublayer.width).sum(1)


def unit_sums(sublayer: Sublayer, value: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """[units]: `value` of every weight that goes with a unit, summed: rows of its inputs, columns of its output."""
    out = value(sublayer.out.weight)  # type: ignore[arg-type]
    total = by_unit(sublayer, (out.T if is_transposed(sublayer.out) else out).sum(0))
    for projection in sublayer.inputs:
        weight = value(projection.module.weight)  # type: ignore[arg-type]
        rows = (weight.T if is_transposed(projection.module) else weight).sum(1)
        for unit in range(sublayer.units):
            total[unit] += rows[projection.rows_of(torch.tensor([unit]), sublayer.units).to(rows.device)].sum()
    return total


def uniform_counts(subject: Subject, share: float, prunable: Sequence[bool] | None = None) -> list[int]:
    """The same number of units in every layer: heads to the nearest whole number, filters what the budget leaves.

    prunable  per sublayer; the others keep all their units
    """
    sublayers = subject.structure.sublayers
    limit = subject.limit(share)
    free = [True] * len(sublayers) if prunable is None else list(prunable)
    fixed = sum(table[-1] for table, may in zip(limit.tables, free, strict=True) if not may)
    whole = sum(table[-1] for table, may in zip(limit.tables, free, strict=True) if may)
    part = max(0.0, (limit.budget - fixed) / whole)
    counts = [s.units for s in sublayers]
    for number, s in enumerate(sublayers):
        if free[number] and s.kind == "heads":
            counts[number] = max(s.floor, min(s.units, round(part * s.units)))
    filters = [n for n, s in enumerate(sublayers) if free[n] and s.kind == "filters"]
    others = limit.spent([0 if n in filters else count for n, count in enumerate(counts)])
    price = sum(limit.tables[n][1] for n in filters)
    for n in filters:
        counts[n] = max(0, min(sublayers[n].units, int((limit.budget - others) / price)))
    return counts


def best(scores: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The units with the highest scores, as many as each sublayer keeps, ascending."""
    return [s.topk(count).indices.sort().values.cpu() for s, count in zip(scores, counts, strict=True)]


def cut(subject: Subject, kept: list[Tensor], biases: Sequence[Tensor] | None = None) -> Any:
    """A smaller copy with the kept units; `biases` [D] are added to the output projections' own."""
    limit_holds(subject, kept)
    student = shrink(subject.model, kept)
    if biases is not None:
        for sublayer, bias in zip(structure_of(student).sublayers, biases, strict=True):
            own = sublayer.bias
            new = bias if own is None else own.detach() + bias
            sublayer.out.bias = nn.Parameter(new.to(sublayer.weight))
    return student


def limit_holds(subject: Subject, kept: Sequence[Tensor]) -> None:
    """Layer 0 needs a head for the cache; nothing else is asked here, budgets are checked where points are made."""
    for sublayer, units in zip(subject.structure.sublayers, kept, strict=True):
        if len(units) < sublayer.floor:
            raise ValueError(f"{sublayer.name}: {len(units)} units are left, at least {sublayer.floor} must stay")
