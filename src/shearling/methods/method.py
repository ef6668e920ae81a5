"""What the pipeline needs of a method: gather evidence, choose what stays, repair what is left."""

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

Evidence = Sequence[Any]  # one entry a sublayer; only the method knows what it is
WantsLabels = Literal["require", "prefer", "ignore"]


@dataclass(frozen=True)
class Repaired:
    """What became of one sublayer: its reconstruction error per token, and whether the repair is used."""

    sublayer: str
    before: float
    after: float
    used: bool
    note: str = ""


class Method:
    """Base of all methods; a method is a frozen dataclass whose fields are its settings.

    name         what `--method` and the record call it
    filter_step  filter counts are multiples of this, where the caller asks for no other step and FFNs are wide
    stages       how long its stages take compared with one another, about; the time left of a run is guessed from it
    """

    name: ClassVar[str]
    filter_step: ClassVar[int] = 1
    stages: ClassVar[Mapping[str, float]] = {}
    precision: Precision = "float32"  # of the products in passes over the sample, where the hardware has it
    polish: Polish = "off"  # how long the repaired student is distilled from the dense model

    @property
    def wants_labels(self) -> WantsLabels:
        """Whether the method requires the data's labels, prefers them where there are any, or ignores them."""
        return "ignore"

    def measure(
        self, structure: Structure, sample: Sample, *, seed: int, stages: Stages, earlier: Evidence | None = None
    ) -> Evidence:
        """Look at the dense model; serves every budget. `earlier` evidence, of other examples, is added to."""
        raise NotImplementedError

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The units that stay in each sublayer."""
        raise NotImplementedError

    def losses(self, evidence: Evidence, structure: Structure, lengths: Sequence[float]) -> list[NDArray[np.float64]]:
        """Per sublayer [units + 1], by units kept: the estimated rise of an example's loss, in nats.

        Stock shapes are chosen by it; a method without it has none.
        """
        raise NotImplementedError

    def kept(self, evidence: Evidence, counts: Sequence[int]) -> list[Tensor]:
        """The units that stay where so many do, per sublayer; for stock shapes."""
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
        """Make up for the units that are gone, in place; `states` of the teacher are kept from budget to budget."""
        return []

    def concerns(self, repairs: Sequence[Repaired]) -> list[str]:
        """What a report has to warn about, given what became of the sublayers."""
        return []

    def most_examples(self, model: Any) -> int:
        """How many examples `samples="auto"` takes at most."""
        return MOST_SAMPLES

    def first_look(self, structure: Structure, sample: Sample) -> int:
        """How many examples to measure before `enough` is asked, where fewer than all may do."""
        return sample.examples

    def enough(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], lengths: Sequence[float]
    ) -> str:
        """Why the examples measured so far will do for these limits; empty where more are wanted."""
        return ""

    def expected_loss(
        self, evidence: Evidence, structure: Structure, kept: Sequence[Tensor], lengths: Sequence[float]
    ) -> float | None:
        """The estimated rise of an example's loss, in nats, with these units kept; None where there is no estimate."""
        return None

    def finished(self, evidence: Evidence) -> Evidence:
        """The evidence without what only further examples would need."""
        return evidence

    def pack(self, evidence: Evidence) -> dict[str, Tensor]:
        """The evidence as named tensors, for `Plan.save`."""
        raise InputError(f"Plans of method {self.name} cannot be saved.")

    def unpack(self, tensors: Mapping[str, Tensor], structure: Structure) -> Evidence:
        """The evidence from its tensors; raises KeyError or ValueError where they are not of this model."""
        raise InputError(f"Plans of method {self.name} cannot be loaded.")
