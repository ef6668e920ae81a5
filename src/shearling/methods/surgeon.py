"""Method `surgeon`: measure, order, allocate, refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shearling.costs import Limit
from shearling.engine.head import gives_embeddings, predicts_next_token
from shearling.engine.hooks import device_of
from shearling.engine.memory import batches_that_fit, give_back, logits_per_token
from shearling.engine.noise import with_random_tokens
from shearling.engine.polish import Polish, checked_polish
from shearling.engine.precision import Precision
from shearling.engine.progress import Stages
from shearling.engine.repair import damaged_sublayers
from shearling.engine.teacher_states import TeacherStates
from shearling.errors import ConstraintError
from shearling.methods.method import Evidence, Method, Repaired, WantsLabels
from shearling.methods.ranges import DAMPING, MOST_SAMPLES, MOST_TEXTS, check_options
from shearling.models.structure import Structure
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample
from shearling.surgeon.allocate import allocate
from shearling.surgeon.measure import Curvature, measure, merged
from shearling.surgeon.order import DAMP, Order, order
from shearling.surgeon.refit import RIDGE, refit

FEWEST = 512  # examples measured first
TOKENS_PER_COLUMN = 4  # of the widest output projection: with fewer, the refit overfits
NOISE = 0.3  # of a language model's tokens
# Embedding models: tokens of a text of n tokens are weighted by n ** -power; 1 weights texts equally. The refit, which
# has to hold for every token, lies between weighting tokens and texts equally (docs/results.md).
MEASURED, REFITTED = 1.0, 0.5
SETTLED = 0.01  # nats per example: below this estimated loss, more examples make no measurable difference


@dataclass(frozen=True)
class Ordered:
    """The evidence of one sublayer: its removal order, and its curvature while more examples may be added."""

    order: Order
    curvature: Curvature | None = None


@dataclass(frozen=True)
class Surgeon(Method):
    """The default, label-free and one-shot: structured optimal brain surgeon, then a ridge refit.

    refit      refit the output projections to the teacher
    realign    before that, also fold a linear correction into the projections into the units
    labels     use the data's labels for the curvature, instead of labels sampled from the model
    damp, ridge  damping of the order and ridge of the refit, as shares of the mean diagonal: 0 to 1e6
    noise      language models: share of random tokens in every other text, in measuring and refitting; costs a little
               on the sample's own domain and gains much on other texts
    polish     distil the result from the dense model: "auto" where it pays, "off", passes, or seconds ("30s")
    precision  of matrix products in passes over the sample, if the hardware has it; see docs/performance.md
    """

    name: ClassVar[str] = "surgeon"
    filter_step: ClassVar[int] = 8  # other widths are slow on GPUs and CPUs, and latency tables have multiples of 8
    stages: ClassVar[Mapping[str, float]] = {"measure": 40, "order": 10, "refit": 50}
    refit: bool = True
    realign: bool = True
    labels: bool = False
    damp: float = DAMP
    ridge: float = RIDGE
    noise: float = NOISE
    polish: Polish = "auto"
    precision: Precision = "bfloat16"

    def __post_init__(self) -> None:
        check_options(self, {"damp": DAMPING, "ridge": DAMPING, "noise": (0.0, 1.0)})
        checked_polish(self.polish)

    @property
    def wants_labels(self) -> WantsLabels:
        """Labels are sampled from the model unless the data's are requested."""
        return "require" if self.labels else "ignore"

    def measure(
        self, structure: Structure, sample: Sample, *, seed: int, stages: Stages, earlier: Evidence | None = None
    ) -> list[Ordered]:
        """Curvature, then an order and an error curve for every sublayer."""
        with stages("measure") as progress:
            for attempt in batches_that_fit(
                sample,
                device_of(structure.model),
                backward=True,
                precision=self.precision,
                sums=True,
                logits=logits_per_token(structure.model),
            ):
                with attempt as batches:
                    found = measure(
                        structure,
                        self._with_noise(structure, batches),
                        seed=seed,
                        labels=self.labels,
                        power=MEASURED if gives_embeddings(structure.model) else 0.0,
                        precision=self.precision,
                        progress=progress,
                    )
            if earlier is not None:
                found = [merged(before.curvature, now) for before, now in zip(earlier, found, strict=True)]
        give_back(device_of(structure.model))
        with stages("order") as progress:
            orders = order(found, damp=self.damp, progress=progress)
        return [Ordered(*pair) for pair in zip(orders, found, strict=True)]

    def _with_noise(self, structure: Structure, batches: Sequence[Batch]) -> Sequence[Batch]:
        """The batches to measure and refit on: with random tokens for a language model."""
        model = structure.model
        if self.labels or not self.noise or not predicts_next_token(model):
            return batches
        return [with_random_tokens(b, self.noise, model) if "input_ids" in b.inputs else b for b in batches]

    def most_examples(self, model: Any) -> int:
        """2,048; 8,192 for embedding models on a GPU."""
        return MOST_TEXTS if gives_embeddings(model) and device_of(model).type == "cuda" else MOST_SAMPLES

    def first_look(self, structure: Structure, sample: Sample) -> int:
        """512 examples, or more so that there are four tokens per column of the widest projection."""
        columns = max(s.units * s.width for s in structure.sublayers)
        tokens = sample.mean_length or 1.0
        count = FEWEST
        while count * tokens < TOKENS_PER_COLUMN * columns:
            count *= 2
        return count

    def enough(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], lengths: Sequence[float]
    ) -> str:
        """Enough if the estimated loss of the best choice under the limits is negligible."""
        try:
            kept = self.choose(evidence, structure, limits, multiple_of=1, stages=Stages())
        except ConstraintError:
            return ""
        loss = self.expected_loss(evidence, structure, kept, lengths)
        return f"the estimated loss, {loss:.2g} nats per example, is below {SETTLED:g}" if loss <= SETTLED else ""

    def expected_loss(
        self, evidence: Evidence, structure: Structure, kept: Sequence[Tensor], lengths: Sequence[float]
    ) -> float:
        """By the error curves, at the number of kept units per sublayer."""
        losses = self.losses(evidence, structure, lengths)
        return float(sum(loss[len(units)] for loss, units in zip(losses, kept, strict=True)))

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The counts with the least summed error within every budget, each filled by its sublayer's order."""
        with stages("allocate"):
            counts = allocate(structure.sublayers, _errors(evidence), limits, multiple_of)
            return self.kept(evidence, counts)

    def losses(self, evidence: Evidence, structure: Structure, lengths: Sequence[float]) -> list[NDArray[np.float64]]:
        """The error curves in nats per example.

        A curve is tr(G dW A dW^T) per token; half of that, times the tokens per example, is the second-order change of
        the loss (for classes, of the divergence from the teacher's prediction).
        """
        return [
            0.5 * length * s.repeats * error
            for error, s, length in zip(_errors(evidence), structure.sublayers, lengths, strict=True)
        ]

    def kept(self, evidence: Evidence, counts: Sequence[int]) -> list[Tensor]:
        """The last units in each sublayer's removal order."""
        return [seen.order.kept(count) for seen, count in zip(evidence, counts, strict=True)]

    def repair(
        self,
        teacher: Structure,
        student: Structure,
        batches: Sequence[Batch],
        *,
        stages: Stages,
        states: TeacherStates | None = None,
    ) -> list[Repaired]:
        """Ridge refit of the output projections, from the first layer to the last."""
        if not self.refit:
            return []
        notes: list[Repaired] = []

        with (
            stages("refit") as progress,
            damaged_sublayers(
                teacher,
                student,
                self._with_noise(teacher, batches),
                realign=self.realign,
                precision=self.precision,
                progress=progress,
                states=states,
                power=REFITTED if gives_embeddings(teacher.model) else 0.0,
            ) as places,
        ):
            for place in places:
                sublayer = place.sublayer
                if place.into_units:
                    eye = torch.eye(len(place.fit.gram), dtype=torch.float64, device=place.fit.gram.device)
                    bias = eye.new_zeros(len(eye)) if sublayer.inputs_have_bias else None
                    result = refit(eye, bias, place.fit, place.held_out, ridge=self.ridge)
                    if result.kept:
                        sublayer.fold_inputs(result.weight, result.bias)
                    continue
                result = refit(sublayer.weight, sublayer.bias, place.fit, place.held_out, ridge=self.ridge)
                if result.kept:
                    sublayer.write(result.weight, result.bias)
                note = "" if result.kept else "the refit did not carry over to the held-out examples and was dropped"
                notes.append(Repaired(sublayer.name, result.before, result.after, result.kept, note))
        return notes

    def finished(self, evidence: Evidence) -> list[Ordered]:
        """Only the orders: the curvatures may take half a gigabyte."""
        return [Ordered(seen.order) for seen in evidence]

    def pack(self, evidence: Evidence) -> dict[str, Tensor]:
        """Orders and error curves, by sublayer."""
        parts = {f"{i}.removed": seen.order.removed for i, seen in enumerate(evidence)}
        return parts | {f"{i}.error": seen.order.error for i, seen in enumerate(evidence)}

    def unpack(self, tensors: Mapping[str, Tensor], structure: Structure) -> list[Ordered]:
        """Check and restore the orders: permutations of the units with finite error curves."""
        found = []
        for i, sublayer in enumerate(structure.sublayers):
            order = Order(tensors[f"{i}.removed"], tensors[f"{i}.error"])
            whole = sorted(order.removed.tolist()) == list(range(sublayer.units))
            if not whole or len(order.error) != sublayer.units + 1 or not order.error.isfinite().all():
                raise ValueError(f"the order of the {sublayer.name} is damaged; measure again")
            found.append(Ordered(order))
        return found


def _errors(evidence: Evidence) -> list[NDArray[np.float64]]:
    """Per sublayer, [units + 1]: the error by the number of units kept."""
    return [seen.order.error.numpy()[::-1] for seen in evidence]
