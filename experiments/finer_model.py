"""A student with units finer than heads: chosen by error and FLOPs, built with zeros, counted and repaired."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from finer_parts import (
    Columns,
    ScoreMoments,
    column_ways,
    kept_values,
    level_way,
    rank_errors,
    rank_path,
    score_bases,
    whole_way,
)
from finer_scores import score_moments
from numpy.typing import NDArray
from torch import Tensor

from shearling.costs import flops_limit, macs_per_unit
from shearling.engine.gram import Gram
from shearling.engine.hooks import device_of
from shearling.engine.memory import batches_that_fit
from shearling.engine.moments import Moments
from shearling.engine.repair import Damaged, damaged_sublayers
from shearling.methods import Surgeon
from shearling.models.shrink import shrink
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import Sublayer
from shearling.pipeline import Plan
from shearling.surgeon.allocate import Curve, best_counts
from shearling.surgeon.refit import refit

EXAMPLES = 512  # for the moments of queries and keys: 64 x 64 numbers a head need no more
# Scores far from the dense model's lose about ten times what their estimate says, columns, heads and filters three to
# four times (SST-2, 1,024 examples, repaired), so their errors count three times beside the others'.
HOPEFUL = 3.0
# Of a whole head's time, what one more head takes at the same FLOPs: 0.02 at 32 tokens, 0.14 at 128 (finer_latency.py).
HEAD_TIME = 0.14
STEP = 4  # of the sizes of heads, where all heads of a layer have the same
FILTERS = 8  # stay in multiples of this, as by default
Floats = NDArray[np.float64]


class Finer(Surgeon):
    """`surgeon` that keeps the curvature beside the orders."""

    def finished(self, evidence: Any) -> Any:
        return evidence


@dataclass(frozen=True)
class Variant:
    """What may go of a head, beside all of it.

    columns    columns of its values
    own_basis  in the basis that loses least, instead of as they are
    scores     dimensions of its queries and keys
    level      all heads of a layer keep the same size, a multiple of STEP
    square     and as many score dimensions as columns, so that a head has one size
    as_fast    no slower than whole heads, where every head costs HEAD_TIME beyond its FLOPs
    """

    columns: bool = False
    own_basis: bool = False
    scores: bool = False
    level: bool = False
    square: bool = False
    as_fast: bool = False


@dataclass(frozen=True)
class Kept:
    """What stays of one sublayer: units and, of heads, directions of the values' basis and ranks of the scores."""

    units: Tensor
    basis: Tensor | None = None  # [units, d, d]
    columns: list[Tensor] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """Ways to cut one attention, none of which another beats: `specs` are (heads, columns, summed ranks)."""

    specs: NDArray[np.int64]  # [options, 3]
    errors: Floats
    sizes: Floats  # columns and dimensions together, each of the same cost

    @classmethod
    def of(cls, parts: Sequence[tuple[Any, Any, Any]]) -> Options:
        """The best of many: no other with as few heads is as small and as good."""
        specs, errors, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        best = []
        for heads in np.unique(specs[:, 0]):
            mine = np.flatnonzero(specs[:, 0] == heads)
            by_size = mine[np.lexsort((errors[mine], sizes[mine]))]
            lowest = np.minimum.accumulate(errors[by_size])
            best.append(by_size[np.concatenate([[True], lowest[1:] < lowest[:-1]])])
        kept = np.concatenate(best)
        return cls(specs[kept], errors[kept], sizes[kept])


@dataclass
class Study:
    """One measured model, ready to be cut in every variant."""

    plan: Plan
    found: dict[Any, list[list[Columns]]] = field(default_factory=dict)

    @property
    def structure(self) -> Structure:
        """The dense model's."""
        return self.plan.structure

    @cached_property
    def attentions(self) -> list[int]:
        """The places of the sublayers that have heads."""
        return [i for i, s in enumerate(self.structure.sublayers) if s.kind == "heads"]

    @cached_property
    def prices(self) -> list[float]:
        """Per sublayer, the multiply-accumulates of a unit."""
        pairs = zip(self.structure.sublayers, self.plan.lengths, strict=True)
        return [macs_per_unit(s, length) for s, length in pairs]

    @cached_property
    def moments(self) -> list[ScoreMoments]:
        """Of queries and keys, one entry an attention."""
        plan = self.plan
        sample = plan.sample.drawn(EXAMPLES, plan.seed)
        device, precision = device_of(self.structure.model), plan.method.precision
        for attempt in batches_that_fit(sample, device, backward=True, precision=precision):
            with attempt as batches:
                found = score_moments(self.structure, batches, plan.seed, precision)
        return found

    @cached_property
    def bases(self) -> list[tuple[Tensor, Tensor]]:
        """X and Y of the scores, one pair an attention."""
        return [score_bases(m.queries, m.keys) for m in self.moments]

    def ways(self, variant: Variant) -> list[list[Columns]]:
        """[heads left - 1][attention]: how columns go."""
        key = (variant.columns, variant.own_basis, variant.level)
        if key not in self.found:
            heads = len(self.plan.evidence[self.attentions[0]].order.removed)
            self.found[key] = [self._ways(left, variant) for left in range(1, heads + 1)]
        return self.found[key]

    def _ways(self, heads: int, variant: Variant) -> list[Columns]:
        curvatures = [self.plan.evidence[i].curvature for i in self.attentions]
        orders = [self.plan.evidence[i].order for i in self.attentions]
        damp = self.plan.method.damp  # type: ignore[attr-defined]
        pairs = zip(curvatures, orders, strict=True)
        if not variant.columns:
            return [whole_way(c.width, way, heads) for c, way in pairs]
        if variant.level:
            return [level_way(c, way, heads, damp=damp, step=STEP) for c, way in pairs]
        return column_ways(curvatures, orders, heads, own_basis=variant.own_basis, damp=damp)


class Chooser:
    """One variant of one model: its options, found once for every budget."""

    def __init__(self, study: Study, variant: Variant) -> None:
        self.study, self.variant = study, variant
        self.ways = study.ways(variant)
        pairs = zip(study.moments, study.bases, strict=True)
        self.errors = [HOPEFUL * rank_errors(m, X, Y).cpu() for m, (X, Y) in pairs]  # [heads, d + 1] each
        self.paths: dict[Any, tuple[Tensor, Tensor]] = {}
        self.options = [self._options(number) for number in range(len(self.ways[0]))]

    def choose(self, flops: float) -> list[Kept]:
        """The least summed error within the budget, over all sublayers."""
        study, plan = self.study, self.study.plan
        budgets = [flops_limit(study.structure, plan.lengths, flops).budget]
        if self.variant.as_fast:
            whole = Chooser(study, Variant()).choose(flops)
            budgets.append(sum(self._time(n, k.units.numel(), k.units.numel()) for n, k in enumerate(whole)))
        curves = []
        for number, sublayer in enumerate(study.structure.sublayers):
            if number in study.attentions:
                options = self.options[study.attentions.index(number)]
                units = options.sizes / (2 * sublayer.width)
                costs = np.stack([units * study.prices[number], self._time(number, units, options.specs[:, 0])])
                curves.append(Curve(np.arange(len(options.errors)), options.errors, costs[: len(budgets)]))
                continue
            counts = np.arange(0, sublayer.units + 1, FILTERS)
            errors = plan.evidence[number].order.error.numpy()[::-1]
            costs = np.stack([counts * study.prices[number], self._time(number, counts, counts)])
            curves.append(Curve(counts, errors[counts], costs[: len(budgets)]))
        picks = best_counts(curves, np.array(budgets))
        return [self._kept(number, pick) for number, pick in enumerate(picks)]

    def _time(self, number: int, units: Any, heads: Any) -> Any:
        """What so many units' worth of FLOPs take when they are spread over so many heads, in multiply-accumulates."""
        extra = HEAD_TIME * heads if number in self.study.attentions else 0.0
        return self.study.prices[number] * (units + extra)

    def _kept(self, number: int, pick: int) -> Kept:
        if number not in self.study.attentions:
            return Kept(self.study.plan.evidence[number].order.kept(pick))
        at = self.study.attentions.index(number)
        heads, count, ranks = self.options[at].specs[pick].tolist()
        if not heads:
            return Kept(torch.zeros(0, dtype=torch.long))
        way = self.ways[heads - 1][at]
        columns = way.kept(count)
        alive = [i for i, kept in enumerate(columns) if len(kept)]
        path, _ = self._path(at, way.heads[alive])
        chosen = path[path.sum(1) == ranks][0].tolist()
        return Kept(way.heads[alive], way.basis[alive], [columns[i] for i in alive], chosen)

    def _options(self, at: int) -> Options:
        """Every number of heads, with every number of their columns, with every sum of their ranks."""
        order = self.study.plan.evidence[self.study.attentions[at]].order
        parts = [(np.zeros((1, 3), dtype=np.int64), order.error[-1:].numpy(), np.zeros(1))]
        for heads, ways in enumerate(self.ways, 1):
            way = ways[at]
            for counts, alive in self._counts(way):
                path, rest = self._path(at, way.heads[alive])
                ranks = path.sum(1)
                gone = len(way.order.removed) - counts
                errors = way.error + way.order.error[gone][:, None] + rest
                sizes = counts[:, None] + ranks
                specs = torch.stack(torch.broadcast_tensors(torch.tensor(heads), counts[:, None], ranks), -1)
                fits = counts[:, None] == ranks if self.variant.square else torch.ones_like(sizes, dtype=torch.bool)
                parts.append((specs[fits].numpy(), errors[fits].numpy(), sizes[fits].double().numpy()))
        return Options.of(parts)

    def _counts(self, way: Columns) -> Iterator[tuple[Tensor, Tensor]]:
        """(numbers of columns that may stay, the heads that have any of them)."""
        m, d = len(way.heads), way.basis.shape[-1]
        if not self.variant.columns:
            yield torch.tensor([m * d]), torch.arange(m)
            return
        if self.variant.level:
            yield m * torch.arange(STEP, d + 1, STEP), torch.arange(m)
            return
        least = torch.zeros(m, dtype=torch.long)  # columns that are left while a head has one of them
        for position, column in enumerate(way.order.removed.tolist()):
            least[column // d] = m * d - position
        ordered = least.argsort()
        for heads in range(1, m + 1):
            most = int(least[ordered[heads]]) if heads < m else m * d + 1
            yield torch.arange(int(least[ordered[heads - 1]]), most), ordered[:heads].sort().values

    def _path(self, at: int, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Ranks [ways, heads] of these heads, and their errors."""
        key = (at, *heads.tolist())
        if key not in self.paths:
            errors = self.errors[at][heads]
            d = errors.shape[1] - 1
            levels = torch.arange(0, d + 1, STEP) if self.variant.scores else torch.tensor([d])
            if self.variant.scores and not self.variant.level:
                self.paths[key] = rank_path(errors)
            else:
                self.paths[key] = levels[:, None].expand(-1, len(heads)), errors[:, levels].sum(0)
        return self.paths[key]

    def student(self, kept: Sequence[Kept]) -> Structure:
        """Whole heads and filters cut out; of the other heads, what goes is zero on both sides."""
        dense = self.study.structure
        small = structure_of(shrink(dense.model, [k.units for k in kept]))
        for number, bases in zip(self.study.attentions, self.study.bases, strict=True):
            if len(kept[number].units):
                _write_heads(dense.sublayers[number], small.sublayers[number], kept[number], bases)
        return small


def _write_heads(dense: Sublayer, small: Sublayer, kept: Kept, bases: tuple[Tensor, Tensor]) -> None:
    d = dense.width
    query, key, value = (_Rows(p.module) for p in dense.inputs)
    targets = [_Rows(p.module) for p in small.inputs]
    weight = small.weight.detach().clone()
    for place, head in enumerate(kept.units.tolist()):
        here, there = slice(place * d, place * d + d), slice(head * d, head * d + d)
        columns, rank = kept.columns[place], kept.ranks[place]
        if rank < d:
            X, Y = (basis[head][:, :rank] for basis in bases)
            targets[0].write(here, X.mT @ query.read(there))
            targets[1].write(here, Y.mT @ key.read(there))
        if len(columns) < d:
            assert kept.basis is not None
            rows, new = kept_values(kept.basis[place], columns, value.read(there), dense.weight[:, there].detach())
            targets[2].write(here, rows)
            weight[:, here] = 0
            weight[:, here][:, : new.shape[1]] = new.to(weight)
    small.write(weight, small.bias)


class _Rows:
    """Rows of a projection into the units, the bias as one more column; missing rows are written as zeros."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def read(self, rows: slice) -> Tensor:
        return torch.cat([self.module.weight[rows], self.module.bias[rows, None]], 1).detach().double()

    def write(self, rows: slice, values: Tensor) -> None:
        with torch.no_grad():
            weight, bias = self.module.weight[rows].zero_(), self.module.bias[rows].zero_()
            weight[: len(values)] = values[:, :-1].to(weight)
            bias[: len(values)] = values[:, -1].to(bias)


def sizes(structure: Structure) -> list[dict[str, int]]:
    """Per layer, what is not zero: heads, columns of values, dimensions of scores, filters."""
    found: list[dict[str, int]] = []
    for sublayer in structure.sublayers:
        if sublayer.kind != "heads":
            found[-1]["filters"] = sublayer.units
            continue
        live = 0
        if sublayer.units:
            query, key = (p.module.weight.detach() for p in sublayer.inputs[:2])
            live = int((query.any(1) & key.any(1)).sum())
        found.append({"heads": sublayer.units, "columns": int(_live(sublayer).sum()), "scores": live})
    return found


def macs(study: Study, structure: Structure) -> float:
    """Multiply-accumulates of a student's prunable layers, counted from what is not zero."""
    total = 0.0
    prices = iter(zip(study.structure.sublayers, study.prices, strict=True))
    for layer in sizes(structure):
        (heads, head), (_, filters) = next(prices), next(prices)
        total += (layer["columns"] + layer["scores"]) * head / (2 * heads.width) + layer["filters"] * filters
    return total


def _live(sublayer: Sublayer) -> Tensor:
    """[n] bool: the columns of the output projection that are not zero."""
    return sublayer.weight.detach().any(0)


def repair(study: Study, student: Structure) -> None:
    """The refit and realignment of `surgeon`, over the columns that are there."""
    method: Any = study.plan.method

    device = device_of(student.model)
    for attempt in batches_that_fit(study.plan.sample, device, backward=False, precision=method.precision):
        with (
            attempt as batches,
            damaged_sublayers(
                study.structure, student, batches, realign=True, precision=method.precision, states=study.plan.states
            ) as places,
        ):
            for place in places:
                if place.into_units:
                    _realign(place, method.ridge)
                else:
                    _refit(place, method.ridge)


def _realign(place: Damaged, ridge: float) -> None:
    eye = torch.eye(len(place.fit.gram), dtype=torch.float64, device=place.fit.gram.device)
    result = refit(eye, eye.new_zeros(len(eye)), place.fit, place.held_out, ridge=ridge)
    if result.kept:
        place.sublayer.fold_inputs(result.weight, result.bias)


def _refit(place: Damaged, ridge: float) -> None:
    sublayer = place.sublayer
    live = _live(sublayer).nonzero().flatten()
    weight = sublayer.weight[:, live]
    result = refit(weight, sublayer.bias, _among(place.fit, live), _among(place.held_out, live), ridge=ridge)
    if result.kept:
        whole = torch.zeros_like(sublayer.weight)
        whole[:, live] = result.weight.to(whole)
        sublayer.write(whole, result.bias)


def _among(moments: Moments, columns: Tensor) -> Moments:
    """The moments of some of the columns of h."""
    return Moments(
        Gram([moments.gram.matrix[columns][:, columns]]), moments.cross[columns], moments.h_sum[columns],
        moments.y_sum, moments.y_squared, moments.count,
    )  # fmt: skip
