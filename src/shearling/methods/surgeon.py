"""Method `surgeon`: measure, order, allocate, refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shearling.costs import Limit
from shearling.engine.memory import with_halving
from shearling.engine.moments import Moments
from shearling.engine.precision import Precision
from shearling.engine.progress import Stages
from shearling.engine.repair import walk
from shearling.methods.counts import allocate_counts
from shearling.methods.method import Evidence, Repaired, WantsLabels
from shearling.methods.ranges import DAMPING, check_options
from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer
from shearling.sample.sample import Sample
from shearling.surgeon.measure import measure
from shearling.surgeon.order import DAMP, Order, order
from shearling.surgeon.refit import RIDGE, refit


@dataclass(frozen=True)
class Surgeon:
    """Label-free, one-shot, the default: structured optimal brain surgeon, then a ridge refit.

    refit    fit the output projections to the teacher afterwards
    realign  and, before that, what goes into the units
    labels   use the data's labels for the curvature, instead of labels drawn from the model
    damp, ridge  of the order and of the refit, as shares of the mean diagonal: 0 to 1e6
    precision  of the products in passes over the sample, on a GPU; docs/performance.md has what it changes
    """

    name: ClassVar[str] = "surgeon"
    filter_step: ClassVar[int] = 8  # the counts that latency tables hold
    refit: bool = True
    realign: bool = True
    labels: bool = False
    damp: float = DAMP
    ridge: float = RIDGE
    precision: Precision = "bfloat16"

    def __post_init__(self) -> None:
        check_options(self, {"damp": DAMPING, "ridge": DAMPING})

    @property
    def wants_labels(self) -> WantsLabels:
        """Labels are drawn from the model unless the data's are asked for."""
        return "require" if self.labels else "ignore"

    def measure(self, structure: Structure, sample: Sample, *, seed: int, stages: Stages) -> list[Order]:
        """Curvature, then an order and an error curve for every sublayer."""
        with stages("measure") as progress:
            curvatures = with_halving(
                lambda s: measure(
                    structure, s, seed=seed, labels=self.labels, precision=self.precision, progress=progress
                ),
                sample,
            )
        with stages("order") as progress:
            return order(curvatures, damp=self.damp, progress=progress)

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The counts with the least summed error within every budget, each filled by its sublayer's order."""
        with stages("allocate"):
            errors = [o.error.numpy()[::-1] for o in evidence]  # by units kept
            counts = allocate_counts(structure.sublayers, errors, limits, multiple_of)
            return [o.kept(count) for o, count in zip(evidence, counts, strict=True)]

    def pack(self, evidence: Evidence) -> dict[str, Tensor]:
        """Orders and error curves, by sublayer."""
        parts = {f"{i}.removed": order.removed for i, order in enumerate(evidence)}
        return parts | {f"{i}.error": order.error for i, order in enumerate(evidence)}

    def unpack(self, tensors: Mapping[str, Tensor], structure: Structure) -> list[Order]:
        """The orders, each a permutation of its sublayer's units with a finite error curve."""
        orders = []
        for i, sublayer in enumerate(structure.sublayers):
            order = Order(tensors[f"{i}.removed"], tensors[f"{i}.error"])
            whole = sorted(order.removed.tolist()) == list(range(sublayer.units))
            if not whole or len(order.error) != sublayer.units + 1 or not order.error.isfinite().all():
                raise ValueError(f"the order of the {sublayer.name} is damaged; measure again")
            orders.append(order)
        return orders

    def repair(self, teacher: Structure, student: Structure, sample: Sample, *, stages: Stages) -> list[Repaired]:
        """Ridge refit of every output projection, bottom-up."""
        if not self.refit:
            return []
        notes: list[Repaired] = []

        def one(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
            result = refit(sublayer.weight, sublayer.bias, fit, held_out, ridge=self.ridge)
            if result.kept:
                sublayer.write(result.weight, result.bias)
            note = "" if result.kept else "the refit did not carry over to the held-out examples and was dropped"
            notes.append(Repaired(sublayer.name, result.before, result.after, result.kept, note))
            return True

        def into(sublayer: Sublayer, fit: Moments, held_out: Moments) -> bool:
            eye = torch.eye(len(fit.gram), dtype=torch.float64, device=fit.gram.device)
            bias = eye.new_zeros(len(eye)) if sublayer.inputs_have_bias else None
            result = refit(eye, bias, fit, held_out, ridge=self.ridge)
            if result.kept:
                sublayer.fold_inputs(result.weight, result.bias)
            return True

        with stages("refit") as progress:
            realign = into if self.realign else None
            walk(teacher, student, sample, one, realign=realign, precision=self.precision, progress=progress)
        return notes
