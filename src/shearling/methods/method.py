"""What the pipeline needs of a method: gather evidence, choose what stays, repair what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from shearling.costs import Limit
from shearling.models.structure import Structure
from shearling.sample import Sample
from shearling.stages import Stages

Evidence = Sequence[Any]  # one entry a sublayer; what it is, the method knows


@dataclass(frozen=True)
class Repaired:
    """What became of one sublayer: its reconstruction error per token, and whether the repair is used."""

    sublayer: str
    before: float
    after: float
    used: bool
    note: str = ""


class Method(Protocol):
    """What the pipeline needs of a method."""

    name: ClassVar[str]

    def measure(self, structure: Structure, sample: Sample, *, seed: int, stages: Stages) -> Evidence:
        """Look at the dense model once; serves every budget."""

    def choose(
        self, evidence: Evidence, structure: Structure, limits: Sequence[Limit], *, multiple_of: int, stages: Stages
    ) -> list[Tensor]:
        """The units that stay in each sublayer."""

    def repair(self, teacher: Structure, student: Structure, sample: Sample, *, stages: Stages) -> list[Repaired]:
        """Make up for the units that are gone, in place."""
