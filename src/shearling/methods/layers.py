"""Shapes with fewer layers, judged by running them.

which layer goes next     the one whose removal, with a least-squares map in its place, changes the outputs least
what a shape costs        the change of the outputs once it is cut and repaired, on other examples than the repair's

A repair makes more of what is left than maps do: they tell which layer to take, and not how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shearling.engine.bridges import Map, divergences_without, layer_maps
from shearling.engine.distance import divergences_between
from shearling.engine.hooks import device_of
from shearling.engine.memory import batches_that_fit
from shearling.engine.moments import Moments
from shearling.engine.progress import Stages
from shearling.methods.method import Method
from shearling.models.shrink import Cut
from shearling.models.stock import Layers, all_layers, less, removable_layers
from shearling.models.structure import Structure
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample
from shearling.surgeon.refit import refit

FITTED = 512  # examples that maps and trial repairs are fitted to
JUDGED = 128  # examples that outputs are compared on
CANDIDATES = 3  # layers tried at each further removal: those that cost least when they went alone


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
    _alone: dict[tuple[int, int], float] = field(default_factory=dict)  # the loss where only this layer goes
    _maps: list[list[Map]] = field(default_factory=list)
    _losses: dict[tuple[Layers | None, tuple[int, ...]], Tensor] = field(default_factory=dict)

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
        if self._alone:
            left = sorted(left, key=self._alone.__getitem__)[:CANDIDATES]
        options = [less(layers, one) for one in left]
        losses = self._run_without(options)
        if not self._alone:
            self._alone = dict(zip(left, losses, strict=True))
        loss, layers = min(zip(losses, options, strict=True))
        self._found.append(Removal(layers, max(loss, self._found[-1].loss)))
        return True

    def losses_of(self, cut: Cut) -> Tensor:
        """[examples], in nats: of the repaired model that a cut leaves; worked out once."""
        shape = (cut.layers, tuple(map(len, cut.kept)))
        if shape not in self._losses:
            dense, precision = self.structure, self.method.precision
            for attempt in self._attempts(self._fitted):
                with attempt as batches:
                    student = cut.student(dense)
                    self.method.repair(dense, student, batches, stages=Stages())
            for attempt in self._attempts(self._judges):
                with attempt as batches:
                    self._losses[shape] = divergences_between(dense.model, student.model, batches, precision)
        return self._losses[shape]

    @property
    def _judges(self) -> Sample:
        """The examples that outputs are compared on: a quarter of a small sample."""
        return self.sample.drawn(min(JUDGED, max(self.sample.examples // 4, 1)), 0)

    @property
    def _fitted(self) -> Sample:
        """Examples for fits; a sample of one has no other."""
        rest = self.sample.without(self._judges)
        return (rest if rest.groups else self.sample).drawn(FITTED, 0)

    def _attempts(self, sample: Sample) -> Iterator[AbstractContextManager[list[Batch]]]:
        """At a stage over a part of the sample; every process on all of it, so that all find the same."""
        device, precision = device_of(self.structure.model), self.method.precision
        return batches_that_fit(sample, device, backward=False, precision=precision, sums=True)

    def _run_without(self, options: Sequence[Layers]) -> list[float]:
        """The divergence of each option, with maps in the place of layers."""
        dense, precision = self.structure, self.method.precision
        for attempt in () if self._maps else self._attempts(self._fitted):
            with attempt as batches:
                self._maps = layer_maps(dense, batches, _solve, precision)
        for attempt in self._attempts(self._judges):
            with attempt as batches:
                found = divergences_without(dense, options, self._maps, batches, precision)
        return found


def _solve(fit: Moments, held_out: Moments) -> Map:
    """The ridge map of a layer, or none where that does not carry over."""
    eye = torch.eye(len(fit.gram), dtype=torch.float64, device=fit.gram.device)
    found = refit(eye, eye.new_zeros(len(eye)), fit, held_out)
    return found.weight, found.bias
