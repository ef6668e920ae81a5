"""What the pipeline needs of a method: gather evidence, choose what stays, repair what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from shearling.costs import Limit
from shearling.engine.progress import Stages
from shearling.models.structure import Structure
from shearling.sample.sample import Sample

Evidence = Sequence[Any]  # one entry a sublayer; what it is, the method knows
WantsLabels = Literal["require", "prefer", "ignore"]


@dataclass(frozen=True)
class Repaired:
    """What became of one sublayer: its reconstruction error per token, and whether the repair is used."""

    sublayer: str
    before: float
    after: float
    used: bool
    note: str = ""


class Method(Protocol):
    """What the pipeline needs of a method: a frozen dataclass whose fields are its settings.

    name         what `--method` and the record call it
    filter_step  under a latency, filter counts are multiples of this
    wants_labels "require" labels of the data, "prefer" them where there are any, or "ignore" them
    """

    name: ClassVar[str]
    filter_step: ClassVar[int]

    @property
    def wants_labels(self) -> WantsLabels: ...

    def measure(self, structure: Structure, sample: Sample, *, seed: int, stages: Stages) -> Evidence:
        """Look at the dense model once; serves every budget."""

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The units that stay in each sublayer."""

    def pack(self, evidence: Evidence) -> dict[str, Tensor]:
        """The evidence as named tensors, for `Plan.save`."""

    def unpack(self, tensors: Mapping[str, Tensor], structure: Structure) -> Evidence:
        """The evidence from its tensors; raises KeyError or ValueError where they are not of this model."""

    def repair(self, teacher: Structure, student: Structure, sample: Sample, *, stages: Stages) -> list[Repaired]:
        """Make up for the units that are gone, in place."""
