"""Was this latency table measured on a model of this shape?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shearling.errors import TableError
from shearling.latency.table import Table, shape_of

if TYPE_CHECKING:
    from shearling.models.structure import Structure


def check_fits(table: Table, structure: Structure) -> None:
    """Raise unless the table was measured on a model of this shape."""
    model_type = structure.model.config.model_type
    if table.model_type != model_type:
        raise TableError(
            f"The latency table is of a {table.model_type} model, this one is {model_type}. "
            "Measure this model with `shearling profile`."
        )
    if table.layers != structure.sizes:
        raise TableError(
            f"The latency table is of a model with {_sizes(table.layers)}; this one has {_sizes(structure.sizes)}. "
            "Measure this model with `shearling profile`."
        )
    known = {entry.shape: entry.units[-1] for entry in table.sublayers}
    for number, sublayer in enumerate(structure.sublayers):
        shape = shape_of(structure, number)
        if sublayer.units and known.get(shape, -1) < sublayer.units:
            raise TableError(
                f"The latency table has no times for the {sublayer.name} ({sublayer.units} units of width "
                f"{sublayer.width}, hidden size {shape[3]}). Measure this model with `shearling profile`."
            )


def _sizes(layers: Sequence[dict[str, int]]) -> str:
    """`12 layers of 12 heads and 3072 filters`, or the sizes themselves where layers differ."""
    alike = all(layer == layers[0] for layer in layers)
    if not alike:
        return f"{len(layers)} layers {layers}"
    return f"{len(layers)} layers of " + " and ".join(f"{count} {kind}" for kind, count in layers[0].items())
