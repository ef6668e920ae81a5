"""Stock shapes: one width, one number of heads and a number of layers, chosen together for the least estimated loss.

Widths and heads cost what the method's curves say, layers what running the model without them says (`layers.py`). Both
are nats an example, so they add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shearling.costs import Limit, asked
from shearling.engine.progress import Stages
from shearling.errors import ConstraintError, InputError
from shearling.methods.layers import LayerOrder
from shearling.methods.method import Evidence, Method
from shearling.methods.ranges import Shape
from shearling.models.shrink import Cut
from shearling.models.stock import Dial, Layers, all_layers, check_stock, dials_of, less, removable_layers
from shearling.models.structure import Structure
from shearling.surgeon.allocate import Curve
from shearling.surgeon.dials import turn

HOPEFUL = 3.0  # times what curves say is the loss of one width for all layers, run on other examples (docs/method.md)


@dataclass(frozen=True)
class Choice:
    """What stays; `told` is what the record says of a stock shape."""

    cut: Cut
    told: dict[str, Any] | None = None


def check_shape(shape: Shape, method: Method, structure: Structure) -> None:
    """Complain, before any work is done, where there are no stock shapes of this model by this method."""
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
    """The width, the heads and the layers with the least estimated loss within every budget."""
    losses = [HOPEFUL * loss for loss in method.losses(evidence, structure, lengths)]
    dials = [_stepped(dial, multiple_of) for dial in dials_of(structure)]
    _check_reach(structure, dials, limits)
    shapes = []
    depth = sum(len(stack.layers) for stack in structure.stacks)
    with stages("layers") as progress:
        for number, removal in enumerate(order):
            progress(number, depth)
            alive = _alive(structure, removal.layers)
            found = turn([_curve(dial, alive, losses, limits) for dial in dials], [limit.budget for limit in limits])
            if found is not None:
                kept = method.kept(evidence, _spread(dials, found[0], alive))
                shapes.append(_Shape(removal.loss + found[1], Cut(kept, removal.layers), found[0]))
            # Fewer layers lose no less: nothing better can follow, or everything fits already.
            least = min((shape.loss for shape in shapes), default=np.inf)
            if removal.loss >= least or (found and found[0] == [dial.counts[-1] for dial in dials]):
                break
        progress(depth, depth)
    best = min(shapes, key=lambda shape: shape.loss)
    told = {
        "layers": [list(stay) for stay in best.cut.layers or ()],
        "dials": [
            {"kind": dial.kind, "count": count, "dense": dial.counts[-1]}
            for dial, count in zip(dials, best.counts, strict=True)
        ],
        "loss": best.loss,
        "uneven_loss": _uneven(method, evidence, structure, limits, losses, multiple_of),
    }
    return Choice(best.cut, told)


@dataclass(frozen=True)
class _Shape:
    """The best shape of one depth: its estimated loss, what stays, and the count of every dial."""

    loss: float
    cut: Cut
    counts: list[int]


def _stepped(dial: Dial, multiple_of: int) -> Dial:
    """The dial with filter counts in whole steps."""
    if dial.kind == "heads":
        return dial
    most = dial.counts[-1]
    return Dial(dial.kind, dial.sublayers, tuple(n for n in dial.counts if n % multiple_of == 0 or n == most))


def _alive(structure: Structure, layers: Layers) -> set[int]:
    """The numbers of the sublayers whose layers stay."""
    numbers = iter(range(len(structure.sublayers)))
    return {
        number
        for stack, stay in zip(structure.stacks, layers, strict=True)
        for depth, sublayers in enumerate(stack.sublayers)
        for number in [next(numbers) for _ in sublayers]
        if depth in stay
    }


def _curve(dial: Dial, alive: set[int], losses: Sequence[np.ndarray], limits: Sequence[Limit]) -> Curve:
    """The errors and costs of all sublayers of a dial that are left, at equal counts."""
    counts = np.asarray(dial.counts)
    members = [number for number in dial.sublayers if number in alive]
    zero = np.zeros(len(counts))
    errors = sum((losses[number][counts] for number in members), zero)
    costs = [sum((limit.tables[number][counts] for number in members), zero) for limit in limits]
    return Curve(counts, errors, np.stack(costs))


def _spread(dials: Sequence[Dial], counts: Sequence[int], alive: set[int]) -> list[int]:
    """Units that stay, per sublayer of the dense model."""
    found = {n: count if n in alive else 0 for dial, count in zip(dials, counts, strict=True) for n in dial.sublayers}
    return [found[number] for number in range(len(found))]


def _check_reach(structure: Structure, dials: Sequence[Dial], limits: Sequence[Limit]) -> None:
    """Complain, with the least that can be asked for, where not even the smallest stock shape fits."""
    layers, gone = all_layers(structure), removable_layers(structure)
    for one in gone:
        if len(layers[one[0]]) > 1:
            layers = less(layers, one)
    least = _spread(dials, [dial.counts[0] for dial in dials], _alive(structure, layers))
    for limit in limits:
        if not limit.holds(least):
            ratio = (limit.fixed + limit.spent(least)) / limit.dense
            fixed = [dial.kind for dial in dials if len(dial.counts) == 1]
            why = f" (its configuration cannot tell fewer {' or '.join(fixed)})" if fixed else ""
            name = structure.model.config.model_type
            raise ConstraintError(
                f"{asked([limit])} cannot be met by a stock shape: the smallest of this {name}{why} takes {ratio:.3g}. "
                f"Ask for at least {np.ceil(100 * ratio) / 100:.2f}, or use uneven shapes (--shape uneven)."
            )


def _uneven(
    method: Method,
    evidence: Evidence,
    structure: Structure,
    limits: Sequence[Limit],
    losses: Sequence[np.ndarray],
    multiple_of: int,
) -> float | None:
    """The estimated loss of uneven shapes at the same budget; None where they cannot meet it."""
    try:
        kept = method.choose(evidence, structure, limits, multiple_of=multiple_of, stages=Stages(None))
    except ConstraintError:
        return None
    return float(sum(loss[len(units)] for loss, units in zip(losses, kept, strict=True)))
