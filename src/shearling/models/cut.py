"""What a method has chosen to keep, and the models that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shearling.models.shrink import shrink
from shearling.models.stock import Layers, check_ordinary, numbered, without_layers, write_sizes
from shearling.models.structure import Structure, structure_of


@dataclass(frozen=True)
class Cut:
    """What stays of a dense model.

    kept    per sublayer of the dense model, the units that stay; none in a layer that goes
    layers  per stack, the layers that stay, for a stock shape; None where layers may differ in size, and all stay
    """

    kept: list[Tensor]
    layers: Layers | None = None

    def teacher(self, dense: Structure) -> Structure:
        """The dense model without the layers that go: what the student is when no unit is cut. Not to be changed."""
        return dense if self.layers is None else without_layers(dense, self.layers, shared=True)

    def student(self, dense: Structure) -> Structure:
        """The small model."""
        if self.layers is None:
            return structure_of(shrink(dense.model, self.kept))
        teacher = self.teacher(dense)
        model = shrink(teacher.model, self.units_of(teacher, dense))
        write_sizes(model)
        check_ordinary(model)
        return numbered(structure_of(model), self.layers)

    def units_of(self, smaller: Structure, dense: Structure) -> list[Tensor]:
        """The kept units of the sublayers that a teacher or student has."""
        return [self.kept[number] for number in smaller.places_in(dense)]
