"""Stock shapes: one width, one number of heads and a number of layers, chosen together for the least estimated loss.

Widths and heads cost what the method's curves say. What whole layers cost is found by running the model without them:

    which goes next     the one whose removal, with a least-squares map in its place, changes the outputs least
    what it costs       the divergence of the outputs after the usual repair, on examples that the repair has not seen

All of these are nats an example, so they add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shearling.costs import Limit
from shearling.engine.bridges import Map, bridged, layer_maps
from shearling.engine.divergence import divergences
from shearling.engine.hooks import device_of
from shearling.engine.memory import with_smaller_batches
from shearling.engine.moments import Moments
from shearling.engine.progress import Stages
from shearling.errors import ConstraintError, InputError
from shearling.methods.counts import asked
from shearling.methods.method import Evidence, Method
from shearling.methods.ranges import Shape
from shearling.models.cut import Cut
from shearling.models.stock import Dial, Layers, all_layers, check_stock, dials_of, removable_layers
from shearling.models.structure import Structure
from shearling.sample.sample import Sample
from shearling.surgeon.allocate import Curve
from shearling.surgeon.dials import turn
from shearling.surgeon.refit import refit

FITTED = 512  # examples that a repair is tried on, to see what the loss of layers costs
JUDGED = 128  # examples that outputs are compared on
CANDIDATES = 4  # layers tried at each further removal: those that cost least when they went alone


@dataclass(frozen=True)
class Removal:
    """Some layers gone: those that stay, and the loss in nats an example."""

    layers: Layers
    loss: float


@dataclass
class LayerOrder:
    """The order in which layers go, found as far as it is asked for and kept for further budgets."""

    structure: Structure
    sample: Sample
    method: Method
    _found: list[Removal] = field(default_factory=list)
    _alone: list[tuple[float, tuple[int, int]]] = field(default_factory=list)  # (loss, layer), the least first
    _maps: list[list[Map]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Removal]:
        """All layers first, then one less every time."""
        number = 0
        while number < len(self._found) or self._extend():
            yield self._found[number]
            number += 1

    def _extend(self) -> bool:
        """Remove one more layer, where one can go."""
        if not self._found:
            self._found.append(Removal(all_layers(self.structure), 0.0))
            return True
        layers = self._found[-1].layers
        left = [(s, n) for s, n in removable_layers(self.structure) if n in layers[s] and len(layers[s]) > 1]
        if not left:
            return False
        if not self._alone:
            tried = self._run_without([_less(layers, one) for one in left])
            self._alone = sorted(zip(tried, left, strict=True))
        left = [one for _, one in self._alone if one in left]
        if len(self._found) == 1:
            layers = _less(layers, left[0])
        else:
            options = [_less(layers, one) for one in left[:CANDIDATES]]
            losses = self._run_without(options)
            layers = options[losses.index(min(losses))]
        self._found.append(Removal(layers, max(self._repaired_loss(layers), self._found[-1].loss)))
        return True

    @property
    def _judges(self) -> Sample:
        """The examples that outputs are compared on: a quarter of a small sample."""
        return self.sample.drawn(min(JUDGED, max(self.sample.examples // 4, 1)), 0)

    @property
    def _fitted(self) -> Sample:
        """Examples for repairs; a sample of one has no other."""
        rest = self.sample.without(self._judges)
        return (rest if rest.groups else self.sample).drawn(FITTED, 0)

    def _run_without(self, options: Sequence[Layers]) -> list[float]:
        """The divergence of each option, with maps in the place of layers."""
        model, precision = self.structure.model, self.method.precision
        if not self._maps:
            self._maps = with_smaller_batches(
                lambda batches: layer_maps(self.structure, batches, _solve, precision),
                self._fitted,
                device_of(model),
                backward=False,
                precision=precision,
            )
        students = [bridged(self.structure, layers, self._maps) for layers in options]
        return with_smaller_batches(
            lambda batches: divergences(model, students, batches, precision),
            self._judges,
            device_of(model),
            backward=False,
            precision=precision,
        )

    def _repaired_loss(self, layers: Layers) -> float:
        """The divergence of the model with these layers, every unit kept, once it is repaired."""
        dense, device = self.structure, device_of(self.structure.model)
        whole = Cut([torch.arange(s.units) for s in dense.sublayers], layers)
        precision = self.method.precision

        def repaired(batches: Sequence[object]) -> Structure:
            student = whole.student(dense)
            self.method.repair(dense, student, batches, stages=Stages(None))  # type: ignore[arg-type]
            return student

        student = with_smaller_batches(repaired, self._fitted, device, backward=False, precision=precision)
        return with_smaller_batches(
            lambda batches: divergences(dense.model, [student.model], batches, precision)[0],
            self._judges,
            device,
            backward=False,
            precision=precision,
        )


def _less(layers: Layers, gone: tuple[int, int]) -> Layers:
    stack, layer = gone
    return tuple(tuple(n for n in stay if (s, n) != (stack, layer)) for s, stay in enumerate(layers))


def _solve(fit: Moments, held_out: Moments) -> Map:
    """The ridge map of a layer, or none where that does not carry over."""
    eye = torch.eye(len(fit.gram), dtype=torch.float64, device=fit.gram.device)
    found = refit(eye, eye.new_zeros(len(eye)), fit, held_out)
    return found.weight, found.bias


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


def choose_uneven(
    method: Method,
    evidence: Evidence,
    structure: Structure,
    limits: Sequence[Limit],
    *,
    multiple_of: int,
    stages: Stages,
) -> Choice:
    """The units that the method chooses, for each sublayer on its own."""
    kept = method.choose(evidence, structure, limits, multiple_of=multiple_of, stages=stages)
    if not any(len(units) for units in kept):
        raise ConstraintError(f"{asked(limits)} leaves not a single unit in any layer; ask for more.")
    return Choice(Cut(kept))


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
    losses = method.losses(evidence, structure, lengths)
    dials = [_stepped(dial, multiple_of) for dial in dials_of(structure)]
    _check_reach(structure, dials, limits)
    best: tuple[float, Layers, list[int]] | None = None
    depth = sum(len(stack.layers) for stack in structure.stacks)
    with stages("layers") as progress:
        for number, removal in enumerate(order):
            progress(number, depth)
            alive = _alive(structure, removal.layers)
            curves = [_curve(dial, alive, losses, limits) for dial in dials]
            found = turn(curves, [limit.budget for limit in limits])
            if found is not None and (best is None or removal.loss + found[1] < best[0]):
                best = removal.loss + found[1], removal.layers, _spread(dials, found[0], alive)
            # Fewer layers lose no less: nothing better can follow, or everything fits already.
            if (best is not None and removal.loss >= best[0]) or (found and found[0] == [d.counts[-1] for d in dials]):
                break
    assert best is not None  # `_check_reach` has seen that the least fits
    loss, layers, counts = best
    told = {
        "layers": [list(stay) for stay in layers],
        "dials": [
            {"kind": d.kind, "count": max(counts[n] for n in d.sublayers), "dense": d.counts[-1]} for d in dials
        ],
        "loss": loss,
        "uneven_loss": _uneven(method, evidence, structure, limits, losses, multiple_of),
    }  # fmt: skip
    return Choice(Cut(method.kept(evidence, counts), layers), told)


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
            layers = _less(layers, one)
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
