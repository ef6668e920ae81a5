"""Stock shapes: one FFN width, one number of heads and a number of layers, chosen together for the least loss.

For each number of layers, the best width and heads follow from the method's error curves. The number of layers is
chosen by trial: shapes are cut, repaired on part of the sample and run (`layers.py`), beginning with the depth of
least estimated loss. Of shapes within a standard error of the best, the one with the fewest layers is taken, because
it is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shearling.costs import Limit, asked
from shearling.engine.progress import Stages
from shearling.errors import ConstraintError, InputError
from shearling.methods.layers import LayerOrder
from shearling.methods.method import Evidence, Method
from shearling.methods.ranges import Shape
from shearling.models.row import Kind
from shearling.models.shrink import Cut
from shearling.models.stock import Dial, Layers, all_layers, check_stock, dials_of, less, removable_layers
from shearling.models.structure import Structure
from shearling.surgeon.allocate import Curve
from shearling.surgeon.dials import turn

HOPEFUL = 3.0  # the loss of a uniform width over what the curves estimate; only decides where trials begin
NONE = torch.tensor([torch.inf])  # the loss of a missing shape


@dataclass(frozen=True)
class DialSetting:
    """The chosen count of a dial, and its dense count."""

    kind: Kind
    count: int
    dense: int


@dataclass(frozen=True)
class StockShape:
    """The record's `stock`.

    layers       per stack, the kept layers
    loss         measured, in nats per example
    uneven_loss  of uneven shapes at the same budget; None if they cannot meet it
    """

    layers: list[list[int]]
    dials: list[DialSetting]
    loss: float
    uneven_loss: float | None = None


@dataclass(frozen=True)
class Choice:
    """The units and layers to keep; `stock` describes a stock shape."""

    cut: Cut
    stock: StockShape | None = None


def check_shape(shape: Shape, method: Method, structure: Structure) -> None:
    """Raise early if this model or this method has no stock shapes."""
    if shape == "stock":
        check_stock(structure)
        if type(method).losses is Method.losses:
            raise InputError(f"Stock shapes are chosen by the losses that surgeon estimates; {method.name} has none.")


def choose_stock(
    method: Method,
    evidence: Evidence,
    structure: Structure,
    limits: Sequence[Limit],
    lengths: Sequence[float],
    *,
    order: LayerOrder,
    multiple_of: int,
    stages: Stages,
) -> Choice:
    """Choose the width, heads and layers with the least loss within every budget."""
    losses = method.losses(evidence, structure, lengths)
    dials = [_stepped(dial, multiple_of) for dial in dials_of(structure)]
    _check_reach(structure, dials, limits)
    removals = iter(order)
    shapes: list[_Shape] = []

    def found(number: int) -> bool:
        """Whether shape `number` exists, counted from all layers down; computes it on the way."""
        while number >= len(shapes) and (removal := next(removals, None)):
            alive = _alive(structure, removal.layers)
            turned = turn([_curve(dial, alive, losses, limits) for dial in dials], [limit.budget for limit in limits])
            if turned is not None:
                cut = Cut(method.kept(evidence, _spread(dials, turned[0], alive)), removal.layers)
                shapes.append(_Shape(cut, turned[0], removal.loss, removal.loss + HOPEFUL * turned[1]))
        return 0 <= number < len(shapes)

    with stages("layers"):
        best, number = 0, 0
        while found(number) and shapes[number].least < shapes[best].expected:
            best = min(best, number, key=lambda i: shapes[i].expected)
            number += 1
        best = _fewest(best, lambda i: order.losses_of(shapes[i].cut) if found(i) else NONE)
        cut, counts = shapes[best].cut, shapes[best].counts
        settings = [DialSetting(d.kind, count, d.counts[-1]) for d, count in zip(dials, counts, strict=True)]
        loss = float(order.losses_of(cut).mean())
    return Choice(cut, StockShape([list(stay) for stay in cut.layers or ()], settings, loss))


def uneven_loss(
    method: Method,
    evidence: Evidence,
    structure: Structure,
    limits: Sequence[Limit],
    *,
    order: LayerOrder,
    multiple_of: int,
) -> float | None:
    """The loss of uneven shapes at the same budget, measured the same way; None if they cannot meet it."""
    try:
        kept = method.choose(evidence, structure, limits, multiple_of=multiple_of, stages=Stages(None))
    except ConstraintError:
        return None
    return float(order.losses_of(Cut(kept)).mean())


def _fewest(start: int, losses: Callable[[int], Tensor]) -> int:
    """The highest index near `start` whose losses [examples] are within a standard error of the least."""
    best = start
    while _excess(losses(best - 1), losses(best))[0] < 0:
        best -= 1
    taken = best
    while True:
        more, error = _excess(losses(taken + 1), losses(best))
        if not more <= error:
            return taken
        taken += 1
        best = taken if more < 0 else best


def _excess(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """The mean difference per example, and its standard error."""
    each = losses - others
    return float(each.mean()), float(each.std(correction=0)) / len(each) ** 0.5


@dataclass(frozen=True)
class _Shape:
    """The best shape of one depth: the cut, the count of every dial, and its estimated loss.

    least     loss of the removed layers alone
    expected  total loss
    """

    cut: Cut
    counts: list[int]
    least: float
    expected: float


def _stepped(dial: Dial, multiple_of: int) -> Dial:
    """Restrict filter counts to multiples."""
    if dial.kind == "heads":
        return dial
    most = dial.counts[-1]
    return Dial(dial.kind, dial.sublayers, tuple(n for n in dial.counts if n % multiple_of == 0 or n == most))


def _alive(structure: Structure, layers: Layers) -> set[int]:
    """Indices of the sublayers in kept layers."""
    numbers = iter(range(len(structure.sublayers)))
    return {
        number
        for stack, stay in zip(structure.stacks, layers, strict=True)
        for depth, sublayers in enumerate(stack.sublayers)
        for number in [next(numbers) for _ in sublayers]
        if depth in stay
    }


def _curve(dial: Dial, alive: set[int], losses: Sequence[np.ndarray], limits: Sequence[Limit]) -> Curve:
    """Summed errors and costs of a dial's sublayers in kept layers."""
    counts = np.asarray(dial.counts)
    members = [number for number in dial.sublayers if number in alive]
    zero = np.zeros(len(counts))
    errors = sum((losses[number][counts] for number in members), zero)
    costs = [sum((limit.tables[number][counts] for number in members), zero) for limit in limits]
    return Curve(counts, errors, np.stack(costs))


def _spread(dials: Sequence[Dial], counts: Sequence[int], alive: set[int]) -> list[int]:
    """Number of kept units per sublayer of the dense model."""
    found = {n: count if n in alive else 0 for dial, count in zip(dials, counts, strict=True) for n in dial.sublayers}
    return [found[number] for number in range(len(found))]


def _check_reach(structure: Structure, dials: Sequence[Dial], limits: Sequence[Limit]) -> None:
    """Raise, with the least possible ratio, if not even the smallest stock shape fits."""
    layers, gone = all_layers(structure), removable_layers(structure)
    for one in gone:
        if len(layers[one[0]]) > 1:
            layers = less(layers, one)
    least = _spread(dials, [dial.counts[0] for dial in dials], _alive(structure, layers))
    for limit in limits:
        if not limit.holds(least):
            ratio = (limit.fixed + limit.spent(least)) / limit.dense
            fixed = [dial.kind for dial in dials if len(dial.counts) == 1]
            why = f" (its configuration cannot describe fewer {' or '.join(fixed)})" if fixed else ""
            name = structure.model.config.model_type
            raise ConstraintError(
                f"{asked([limit])} cannot be met by a stock shape: the smallest of this {name}{why} takes {ratio:.3g}. "
                f"Ask for at least {np.ceil(100 * ratio) / 100:.2f}, or use uneven shapes (--shape uneven)."
            )
