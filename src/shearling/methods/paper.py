"""Method `paper`: Fisher search, rearrangement, tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from shearling.costs import Limit
from shearling.engine.agreement import held_out
from shearling.engine.distance import divergences_between
from shearling.engine.distributed import on_first
from shearling.engine.hooks import device_of, masked
from shearling.engine.memory import batches_that_fit, logits_per_token
from shearling.engine.moments import Moments
from shearling.engine.polish import Polish, checked_polish
from shearling.engine.precision import Precision
from shearling.engine.progress import Progress, Stages
from shearling.engine.repair import damaged_sublayers
from shearling.engine.teacher_states import TeacherStates
from shearling.errors import ModelError
from shearling.methods.method import Evidence, Method, Repaired, WantsLabels
from shearling.methods.ranges import DAMPING, check_options
from shearling.methods.select import best, prices, searched, uniform_counts
from shearling.models.structure import Structure
from shearling.models.sublayer import Sublayer
from shearling.paper.fisher import block, mask_gradients
from shearling.paper.importance import Importance, importances
from shearling.paper.rearrange import rearrange
from shearling.paper.tune import DAMP, apply, tune
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample
from shearling.surgeon.allocate import allocate


@dataclass(eq=False)
class MaskGradients:
    """The evidence of one sublayer: the gradient of every example's loss with respect to every mask."""

    gradients: Tensor  # [examples, units]
    importance: Tensor  # [units], host
    held_out: Tensor  # [examples] bool: which of them are held out of fits

    @cached_property
    def fisher(self) -> Tensor:
        """The sublayer's block of the Fisher information."""
        return block(self.gradients)


@dataclass(frozen=True)
class Paper(Method):
    """The method of the paper: Fisher search, rearrangement, tuning; and its baselines.

    importance  importance of a unit in the search
    allocation  `searched` (Alg. 1, 2), or `uniform`: the same ratio in every layer
    damp        damping of the tuning (Eq. 27): 0 to 1e6
    guarded     extension, off by default: one example in eight is held out of rearrangement and tuning. A sublayer is
                rearranged only if that brings the outputs on those nearer to the dense model's, and tuned only if that
                lowers its error on them; a mask out of range does not end the tuning
    precision   of matrix products in passes over the sample, if the hardware has it; see docs/performance.md
    drop_sublayers  where the layers' overheads alone exceed a latency budget, drop whole sublayers
    polish      extension, off by default: distil the result from the dense model, as `surgeon` does
    """

    name: ClassVar[str] = "paper"
    filter_step: ClassVar[int] = 1  # Alg. 2 has no step
    stages: ClassVar[Mapping[str, float]] = {"gradients": 50, "rearrangement": 5, "tuning": 45}
    importance: Importance = "fisher"
    allocation: Literal["searched", "uniform"] = "searched"
    rearrange: bool = True
    tune: bool = True
    damp: float = DAMP
    guarded: bool = False
    drop_sublayers: bool = True
    polish: Polish = "off"
    precision: Precision = "bfloat16"

    def __post_init__(self) -> None:
        check_options(self, {"damp": DAMPING})
        checked_polish(self.polish)

    @property
    def wants_labels(self) -> WantsLabels:
        """The paper's loss uses the labels of the data; without labels, they are sampled from the model."""
        return "prefer"

    def measure(
        self, structure: Structure, sample: Sample, *, seed: int, stages: Stages, earlier: Evidence | None = None
    ) -> list[MaskGradients]:
        """Per-example gradients of the masks; with sampled labels if the data has none."""
        with stages("gradients") as progress:
            device, how = device_of(structure.model), self.precision
            width = logits_per_token(structure.model)
            for attempt in batches_that_fit(sample, device, backward=True, precision=how, logits=width):
                with attempt as batches:
                    gradients = mask_gradients(
                        structure, batches, seed=seed, labels=sample.has_labels, precision=how, progress=progress
                    )
                    kept_out = torch.cat([batch.held_out() for batch in batches])
            if not all(bool(values.isfinite().all()) for values in gradients):
                raise ModelError("The gradients of the masks are not finite; half precision may overflow: try float32.")
            if earlier is not None:
                gradients = [torch.cat([e.gradients, g]) for e, g in zip(earlier, gradients, strict=True)]
                kept_out = torch.cat([earlier[0].held_out.cpu(), kept_out])
            worth = importances(self.importance, structure.sublayers, gradients, seed)
        return [MaskGradients(g, w, kept_out.to(g.device)) for g, w in zip(gradients, worth, strict=True)]

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """Search, then rearrange."""
        sublayers = structure.sublayers
        with stages("search"):
            worth = [seen.importance for seen in evidence]
            if self.allocation == "uniform":
                kept = best(worth, uniform_counts(sublayers, limits, multiple_of))
            elif multiple_of == 1 and prices(sublayers, limits):
                kept = searched(sublayers, worth, limits, drop=self.drop_sublayers)
            else:  # Differs from the paper: costs that vary between layers need the general solver
                lost = [np.concatenate([[0.0], np.cumsum(np.sort(w.numpy()))])[::-1] for w in worth]
                kept = best(worth, allocate(sublayers, lost, limits, multiple_of))
        if self.rearrange and not self.guarded:
            with stages("rearrangement"):
                kept = rearrange([seen.fisher for seen in evidence], kept)
        return kept

    def settled(
        self, evidence: Evidence, structure: Structure, kept: list[Tensor], sample: Sample, *, stages: Stages
    ) -> list[Tensor]:
        """With `guarded`, rearrange here, one sublayer after the other, where that helps on held-out examples.

        With more units than examples, the gradients of some sets cancel on the sample by chance.
        """
        judges = held_out(sample) if self.guarded and self.rearrange else None
        if judges is None:
            return kept
        with stages("rearrangement") as progress:
            found = rearrange([block(seen.gradients[~seen.held_out]) for seen in evidence], kept)
            return on_first(lambda: self._reviewed(structure, kept, found, judges, progress))

    def _reviewed(
        self, structure: Structure, kept: list[Tensor], found: list[Tensor], judges: Sample, progress: Progress
    ) -> list[Tensor]:
        """Replace `kept` by `found` where that lowers the divergence of the masked model."""
        moved = [
            i for i, (old, new) in enumerate(zip(kept, found, strict=True)) if set(old.tolist()) != set(new.tolist())
        ]
        settled, least = kept, self._divergence(structure, kept, judges) if moved else 0.0
        for number, i in enumerate(moved, 1):
            trial = [*settled[:i], found[i], *settled[i + 1 :]]
            divergence = self._divergence(structure, trial, judges)
            if divergence < least:
                settled, least = trial, divergence
            progress(number, len(moved))
        return settled

    def _divergence(self, structure: Structure, kept: Sequence[Tensor], judges: Sample) -> float:
        """Mean divergence of the outputs from the dense model's with all other units masked, in nats per example."""
        model, sublayers = structure.model, structure.sublayers
        masks = [torch.zeros(s.units).index_fill_(0, units.cpu(), 1) for s, units in zip(sublayers, kept, strict=True)]
        cut, width = partial(masked, sublayers, masks), logits_per_token(model)
        for attempt in batches_that_fit(
            judges, device_of(model), backward=False, precision=self.precision, logits=width
        ):
            with attempt as batches:
                found = divergences_between(model, model, batches, self.precision, changed=cut)
        return float(found.mean())

    def pack(self, evidence: Evidence) -> dict[str, Tensor]:
        """The gradients and importances, by sublayer, and which examples are held out."""
        parts = {f"{i}.gradients": seen.gradients for i, seen in enumerate(evidence)}
        parts |= {f"{i}.importance": seen.importance for i, seen in enumerate(evidence)}
        return parts | {"held_out": evidence[0].held_out}

    def unpack(self, tensors: Mapping[str, Tensor], structure: Structure) -> list[MaskGradients]:
        """Check and restore the gradients [examples, units] and importances [units] of every sublayer."""
        found = []
        held_out = tensors.get("held_out", torch.zeros(len(tensors["0.gradients"]), dtype=torch.bool))  # none in 0.1
        for i, sublayer in enumerate(structure.sublayers):
            gradients, importance = tensors[f"{i}.gradients"], tensors[f"{i}.importance"]
            fits = gradients.shape[1:] == importance.shape == (sublayer.units,)
            fits &= held_out.dtype == torch.bool and held_out.shape == gradients.shape[:1]
            if not fits or not gradients.isfinite().all() or not importance.isfinite().all():
                raise ValueError(f"the gradients of the {sublayer.name} are damaged; measure again")
            device = sublayer.weight.device
            found.append(MaskGradients(gradients.to(device), importance, held_out.to(device)))
        return found

    def repair(
        self,
        teacher: Structure,
        student: Structure,
        batches: Sequence[Batch],
        *,
        stages: Stages,
        states: TeacherStates | None = None,
    ) -> list[Repaired]:
        """Mask tuning from the first layer on; a mask out of range ends it, which the last note reports."""
        if not self.tune:
            return []
        notes: list[Repaired] = []

        with (
            stages("tuning") as progress,
            damaged_sublayers(
                teacher, student, batches, precision=self.precision, progress=progress, states=states
            ) as places,
        ):
            for place in places:
                sublayer = place.sublayer
                if not sublayer.units:
                    continue
                if self.guarded:
                    notes.append(self._tuned_with_care(sublayer, place.fit, place.held_out))
                    continue
                moments = place.fit + place.held_out
                result = tune(sublayer.weight, sublayer.bias, moments, sublayer.width, damp=self.damp)
                if not result.accepted:
                    worst = float(result.mask.abs().max())
                    note = f"a mask of {worst:.3g} is outside [-10, 10]: discarded, and tuning stopped here"
                    notes.append(Repaired(sublayer.name, result.before, result.before, False, note))
                    break
                sublayer.write(apply(sublayer.weight, result.mask, sublayer.width), sublayer.bias)
                notes.append(Repaired(sublayer.name, result.before, result.after, True))
        return notes

    def _tuned_with_care(self, sublayer: Sublayer, fit: Moments, held_out: Moments) -> Repaired:
        """Tuned on seven examples in eight, if the masks are in range and help on the held-out ones too."""
        result = tune(sublayer.weight, sublayer.bias, fit, sublayer.width, damp=self.damp)
        judge = held_out if float(held_out.count) else fit
        before = judge.error(sublayer.weight, sublayer.bias)
        weight = apply(sublayer.weight, result.mask, sublayer.width)
        after = judge.error(weight, sublayer.bias) if result.accepted else before
        if after < before:
            sublayer.write(weight, sublayer.bias)
            return Repaired(sublayer.name, before, after, True)
        return Repaired(sublayer.name, before, before, False, "the tuning did not carry over to the held-out examples")

    def concerns(self, repairs: Sequence[Repaired]) -> list[str]:
        """Warns if tuning ended before the last sublayer."""
        if self.guarded or not repairs or repairs[-1].used:
            return []
        return [
            f"tuning stopped early, at the {repairs[-1].sublayer}: {len(repairs) - 1} sublayers were tuned; score the "
            "model before using it, or try guarded=True (--set guarded=true)"
        ]
