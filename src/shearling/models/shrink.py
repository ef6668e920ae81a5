"""Cut the removed units out of a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shearling.models.stock import Layers, check_ordinary, numbered, without_layers, write_sizes
from shearling.models.structure import Structure, structure_of
from shearling.models.sublayer import Sublayer, columns_of, is_transposed, linear_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Values = dict[str, Callable[[], Tensor]]  # new value of each parameter of the base model, computed lazily
Kept = Sequence[Tensor]  # per sublayer, the indices of the units that stay, ascending


def shrink(model: PreTrainedModel, kept: Kept, *, shared: bool = False) -> PreTrainedModel:
    """Returns a smaller copy of the model with only the kept units.

    shared  uncut parameters share memory with the model: for a temporary copy that is never modified
    """
    from shearling.models.modeling_shearling import VERSION, reshape

    structure = structure_of(model)
    before = edits_of(model)  # a pruned model may be pruned again
    edits = empty_edits()
    values: Values = {}
    for sublayer, units in zip(structure.sublayers, kept, strict=True):
        if len(units) < sublayer.units:
            _cut(sublayer, units, edits, values)
            _pick(sublayer, units, before["picks"], edits)

    # Only cut parameters are copied, after reshaping: there is never a second full copy of the model.
    dense = dict(model.base_model.named_parameters())
    own = model.parameters() if shared else (dense[name] for name in values)
    student = copy.deepcopy(model, {id(p): p for p in own})
    reshape(student, edits)
    parameters = dict(student.base_model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value())

    student.config.shearling = {"version": VERSION, "edits": merged(before, edits)}
    return student


def _cut(sublayer: Sublayer, kept: Tensor, edits: dict[str, Any], values: Values) -> None:
    """Remove all units but `kept`: add the new shapes to the edits and the parameters to the values."""
    for projection in sublayer.inputs:
        if not len(kept) and projection.path != sublayer.part.core:  # a core is replaced by `Hollow` instead
            edits["dropped"].append(f"{sublayer.path}.{projection.path}")
            continue
        _slice(sublayer, projection.path, projection.rows_of(kept, sublayer.units), None, edits, values)
    _slice(sublayer, sublayer.part.out, None, columns_of(kept, sublayer.width), edits, values)

    for along, value in sublayer.own:
        index = columns_of(kept, value.shape[along.dim] // sublayer.units).to(value.device)
        values[f"{sublayer.path}.{along.path}"] = partial(value.index_select, along.dim, index)
        edits["parameters"][f"{sublayer.path}.{along.path}"] = [along.dim, len(index)]
    for counter in sublayer.part.counters:
        count = sublayer.read(counter)
        if count is not None and len(kept):
            edits["attributes"][f"{sublayer.path}.{counter}"] = count * len(kept) // sublayer.units
    if not len(kept):
        part = sublayer.part
        edits["bias_only"].append(f"{sublayer.path}.{part.out}")
        inside = part.out.removeprefix(f"{part.core}.") if sublayer.out_in_core else ""
        edits["hollow"][f"{sublayer.path}.{part.core}"] = [inside, part.returns]


def _pick(sublayer: Sublayer, kept: Tensor, before: dict[str, Any], edits: dict[str, Any]) -> None:
    """Add the indices, in the dense model, of the kept heads by which an argument is indexed."""
    pick = sublayer.part.pick
    if pick is None:
        return
    path = f"{sublayer.path}.{sublayer.part.core}"
    dense = before[path]["heads"] if path in before else list(range(sublayer.units))
    edits["picks"][path] = asdict(pick) | {"heads": [dense[head] for head in kept.tolist()]}


def _slice(
    sublayer: Sublayer,
    path: str,
    rows: Tensor | None,
    columns: Tensor | None,
    edits: dict[str, Any],
    values: Values,
) -> None:
    module = sublayer.layer.get_submodule(path)
    shape = linear_shape(module)
    assert isinstance(module.weight, Tensor)
    rows = None if rows is None else rows.to(module.weight.device)
    columns = None if columns is None else columns.to(module.weight.device)
    edits["linear"][f"{sublayer.path}.{path}"] = [
        shape[0] if rows is None else len(rows),
        shape[1] if columns is None else len(columns),
    ]
    sides = (columns, rows) if is_transposed(module) else (rows, columns)
    values[f"{sublayer.path}.{path}.weight"] = partial(_taken, module.weight, sides)
    if isinstance(module.bias, Tensor):
        values[f"{sublayer.path}.{path}.bias"] = partial(_taken, module.bias, (rows,))


def _taken(tensor: Tensor, sides: Sequence[Tensor | None]) -> Tensor:
    """Index every dimension; None keeps all of it."""
    for dim, places in enumerate(sides):
        tensor = tensor if places is None else tensor.index_select(dim, places)
    return tensor


def empty_edits() -> dict[str, Any]:
    """Edits that change nothing; see `modeling_shearling.reshape`."""
    return {"linear": {}, "attributes": {}, "bias_only": [], "hollow": {}, "dropped": [], "picks": {}, "parameters": {}}


def edits_of(model: PreTrainedModel) -> dict[str, Any]:
    """The edits that produced a pruned model; empty for a dense one."""
    shapes = getattr(model.config, "shearling", None)
    return empty_edits() | shapes["edits"] if shapes else empty_edits()


def merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Combine the edits of two prunings: sizes are absolute, so the later ones win."""
    return {
        key: before.get(key, {}) | value if isinstance(value, dict) else sorted({*before.get(key, []), *value})
        for key, value in after.items()
    }


@dataclass(frozen=True)
class Cut:
    """The kept units and layers of a dense model.

    kept    per sublayer of the dense model, its kept units; none in a removed layer
    layers  per stack, its kept layers, for a stock shape; None for uneven shapes, which keep all layers
    """

    kept: list[Tensor]
    layers: Layers | None = None

    def teacher(self, dense: Structure) -> Structure:
        """The dense model without the removed layers. It shares weights with the dense model; read-only."""
        return dense if self.layers is None else without_layers(dense, self.layers)

    def student(self, dense: Structure) -> Structure:
        """Build the pruned model."""
        if self.layers is None:
            return structure_of(shrink(dense.model, self.kept))
        teacher = self.teacher(dense)
        model = shrink(teacher.model, self.units_of(teacher, dense))
        write_sizes(model)
        check_ordinary(model)
        return numbered(structure_of(model), self.layers)

    def units_of(self, smaller: Structure, dense: Structure) -> list[Tensor]:
        """The kept units of the sublayers of a teacher or student that lacks layers."""
        return [self.kept[number] for number in smaller.places_in(dense)]
