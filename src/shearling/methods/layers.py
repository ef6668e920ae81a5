"""Shapes with fewer layers, evaluated by running them.

order of removal   greedily, the layer whose replacement by a least-squares map changes the outputs least
loss of a shape    the divergence of the outputs after cutting and repairing it, on other examples than the repair's

A repair recovers more than the maps do, so the maps only decide which layer to remove, not how many.
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
from shearling.engine.memory import batches_that_fit, logits_per_token
from shearling.engine.moments import Moments
from shearling.engine.progress import Stages
from shearling.methods.method import Method
from shearling.models.shrink import Cut
from shearling.models.stock import Layers, all_layers, less, removable_layers
from shearling.models.structure import Structure
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample
from shearling.surgeon.refit import refit

FITTED = 512  # examples for fitting maps and trial repairs
JUDGED = 128  # examples for comparing outputs
CANDIDATES = 3  # layers tried for each further removal: those with the least loss when removed alone


@dataclass(frozen=True)
class Removal:
    """The layers kept after some removals, and the loss in nats per example."""

    layers: Layers
    loss: float


@dataclass
class LayerOrder:
    """The order in which layers are removed, computed lazily and reused for further budgets."""

    structure: Structure
    sample: Sample
    method: Method
    _found: list[Removal] = field(default_factory=list)
    _alone: dict[tuple[int, int], float] = field(default_factory=dict)  # loss of removing only this layer
    _maps: list[list[Map]] = field(default_factory=list)
    _losses: dict[tuple[Layers | None, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Removal]:
        """All layers first, then one less each time."""
        number = 0
        while number < len(self._found) or self._extend():
            yield self._found[number]
            number += 1

    def _extend(self) -> bool:
        """Remove one more layer; False if none can be removed."""
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
        """[examples], in nats: divergence of the repaired model after a cut; cached."""
        shape = (cut.layers, tuple(map(len, cut.kept)))
        if shape not in self._losses:
            dense, precision = self.structure, self.method.precision
            for attempt in self._attempts(self._fitted):
                with attempt as batches:
                    student = cut.student(dense)
                    self.method.repair(dense, student, batches, stages=Stages())
            for attempt in self._attempts(self._judges, judging=True):
                with attempt as batches:
                    self._losses[shape] = divergences_between(dense.model, student.model, batches, precision)
        return self._losses[shape]

    @property
    def _judges(self) -> Sample:
        """The examples for comparing outputs: at most a quarter of the sample."""
        return self.sample.drawn(min(JUDGED, max(self.sample.examples // 4, 1)), 0)

    @property
    def _fitted(self) -> Sample:
        """The examples for fits: the others, or the same if the sample has only one."""
        rest = self.sample.without(self._judges)
        return (rest if rest.groups else self.sample).drawn(FITTED, 0)

    def _attempts(self, sample: Sample, *, judging: bool = False) -> Iterator[AbstractContextManager[list[Batch]]]:
        """Attempts at a stage over part of the sample; every process runs all of it, so that all agree.

        judging  outputs are compared and nothing is summed over processes
        """
        device, precision = device_of(self.structure.model), self.method.precision
        logits = logits_per_token(self.structure.model) if judging else 0
        return batches_that_fit(sample, device, backward=False, precision=precision, sums=not judging, logits=logits)

    def _run_without(self, options: Sequence[Layers]) -> list[float]:
        """The divergence of each option, with maps in place of layers."""
        dense, precision = self.structure, self.method.precision
        for attempt in () if self._maps else self._attempts(self._fitted):
            with attempt as batches:
                self._maps = layer_maps(dense, batches, _solve, precision)
        for attempt in self._attempts(self._judges, judging=True):
            with attempt as batches:
                found = divergences_without(dense, options, self._maps, batches, precision)
        return found


def _solve(fit: Moments, held_out: Moments) -> Map:
    """The ridge map of a layer, or the identity if that is better on the held-out examples."""
    eye = torch.eye(len(fit.gram), dtype=torch.float64, device=fit.gram.device)
    found = refit(eye, eye.new_zeros(len(eye)), fit, held_out)
    return found.weight, found.bias
