"""The interface of a method: gather evidence, choose the units to keep, repair the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shearling.costs import Limit
from shearling.engine.polish import Polish
from shearling.engine.precision import Precision
from shearling.engine.progress import Stages
from shearling.engine.teacher_states import TeacherStates
from shearling.errors import InputError
from shearling.methods.ranges import MOST_SAMPLES
from shearling.models.structure import Structure
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample

Evidence = Sequence[Any]  # one entry per sublayer; opaque to everything but the method
WantsLabels = Literal["require", "prefer", "ignore"]


@dataclass(frozen=True)
class Repaired:
    """The result of repairing one sublayer: its reconstruction error per token, and whether the repair is used."""

    sublayer: str
    before: float
    after: float
    used: bool
    note: str = ""


class Method:
    """Base class of all methods; a method is a frozen dataclass whose fields are its settings.

    name         its name in `--method` and in the record
    filter_step  default step of filter counts, for wide FFNs
    stages       approximate relative durations of its stages, for estimating the remaining time of a run
    """

    name: ClassVar[str]
    filter_step: ClassVar[int] = 1
    stages: ClassVar[Mapping[str, float]] = {}
    precision: Precision = "float32"  # of matrix products in passes over the sample, if the hardware has it
    polish: Polish = "off"  # duration of the distillation after the repair

    @property
    def wants_labels(self) -> WantsLabels:
        """Whether the method requires labels, uses them if present, or ignores them."""
        return "ignore"

    def measure(
        self, structure: Structure, sample: Sample, *, seed: int, stages: Stages, earlier: Evidence | None = None
    ) -> Evidence:
        """Gather evidence about the dense model, for any budget; merged with `earlier` evidence of other examples."""
        raise NotImplementedError

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The units to keep in each sublayer."""
        raise NotImplementedError

    def settled(
        self, evidence: Evidence, structure: Structure, kept: list[Tensor], sample: Sample, *, stages: Stages
    ) -> list[Tensor]:
        """The chosen units after a review on held-out examples; the same number in each sublayer."""
        return kept

    def losses(self, evidence: Evidence, structure: Structure, lengths: Sequence[float]) -> list[NDArray[np.float64]]:
        """Per sublayer [units + 1], by units kept: estimated increase of the loss per example, in nats.

        Needed for stock shapes; optional otherwise.
        """
        raise NotImplementedError

    def kept(self, evidence: Evidence, counts: Sequence[int]) -> list[Tensor]:
        """The units to keep per sublayer, given their numbers; needed for stock shapes."""
        raise NotImplementedError

    def repair(
        self,
        teacher: Structure,
        student: Structure,
        batches: Sequence[Batch],
        *,
        stages: Stages,
        states: TeacherStates | None = None,
    ) -> list[Repaired]:
        """Compensate for the removed units, in place; `states` caches the teacher's tensors between budgets."""
        return []

    def concerns(self, repairs: Sequence[Repaired]) -> list[str]:
        """Warnings for the report, given the results of the repair."""
        return []

    def most_examples(self, model: Any) -> int:
        """Maximum number of examples for `samples="auto"`."""
        return MOST_SAMPLES

    def first_look(self, structure: Structure, sample: Sample) -> int:
        """Number of examples to measure before `enough` is called, where fewer than all may suffice."""
        return sample.examples

    def enough(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], lengths: Sequence[float]
    ) -> str:
        """Why the examples measured so far suffice for these limits; empty if more are needed."""
        return ""

    def expected_loss(
        self, evidence: Evidence, structure: Structure, kept: Sequence[Tensor], lengths: Sequence[float]
    ) -> float | None:
        """Estimated increase of the loss per example, in nats, with these units kept; None without an estimate."""
        return None

    def finished(self, evidence: Evidence) -> Evidence:
        """The evidence without what is needed only for adding further examples."""
        return evidence

    def pack(self, evidence: Evidence) -> dict[str, Tensor]:
        """The evidence as named tensors, for `Plan.save`."""
        raise InputError(f"Plans of method {self.name} cannot be saved.")

    def unpack(self, tensors: Mapping[str, Tensor], structure: Structure) -> Evidence:
        """The evidence from its tensors; raises KeyError or ValueError if they do not fit the model."""
        raise InputError(f"Plans of method {self.name} cannot be loaded.")
