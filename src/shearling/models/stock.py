"""Stock shapes: sizes that the family's own configuration can describe, so that any loader of the family reads them.

A dial is one field of the configuration: the width of all FFNs of a stack, or the number of its heads (or key-value
groups). Stacks that read the same field share the dial. Whole layers may be removed too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shearling.errors import CheckFailed, UnsupportedArchitecture
from shearling.models.modeling_shearling import OwnConfig
from shearling.models.row import Kind, StackRow
from shearling.models.structure import Stack, Structure, structure_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layers = tuple[tuple[int, ...], ...]  # per stack, the kept layers

PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")  # fields with one entry per layer
NUMBERS = ("layer_idx", "layer_id", "layer_number")  # attributes with the index of a layer in its stack


@dataclass(frozen=True)
class Dial:
    """One size of the configuration.

    sublayers  indices, among all sublayers of the model, of those with this size
    counts     possible values, ascending; one entry where it is fixed
    """

    kind: Kind
    sublayers: tuple[int, ...]
    counts: tuple[int, ...]


def dials_of(structure: Structure) -> list[Dial]:
    """The dials of a model; every sublayer belongs to exactly one."""
    members: dict[tuple[str, str], list[int]] = {}
    rows: dict[tuple[str, str], StackRow] = {}
    for number, (stack, sublayer) in enumerate(_sublayers(structure)):
        field = stack.row.filters if sublayer.kind == "filters" else stack.row.heads
        key = (stack.row.config if field else stack.row.layers, field)
        rows[key] = stack.row
        members.setdefault(key, []).append(number)
    return [_dial(structure, rows[key], found) for key, found in members.items()]


def _sublayers(structure: Structure) -> list[tuple[Stack, Any]]:
    return [(stack, s) for stack in structure.stacks for layer in stack.sublayers for s in layer]


def _dial(structure: Structure, row: StackRow, members: list[int]) -> Dial:
    sublayers = [structure.sublayers[i] for i in members]
    kind, units = sublayers[0].kind, sublayers[0].units
    config = _part_of(structure.model.config, row)
    free = hasattr(config, row.filters or "_") if kind == "filters" else bool(row.head_size)
    least = max([1 if free else units, *(s.floor for s in sublayers)])
    step = _step(row, config) if kind == "filters" and free else 1
    counts = (
        n
        for n in range(least, units + 1)
        if n % step == 0 and (kind == "filters" or _accepted(config, _head_fields(row, config, n)))
    )
    return Dial(kind, tuple(members), tuple(counts))


def _step(row: StackRow, config: Any) -> int:
    """FFN widths are multiples of this."""
    return int(getattr(config, row.times)) if row.times else 1


def _part_of(config: Any, row: StackRow) -> Any:
    """The configuration of a stack."""
    return getattr(config, row.config) if row.config else config


def _head_fields(row: StackRow, config: Any, count: int) -> dict[str, int]:
    """Configuration fields for `count` kept heads (or key-value groups); empty where all are kept."""
    heads = int(getattr(config, row.heads))
    groups = getattr(config, row.groups, None) if isinstance(row.groups, str) else row.groups
    if count == (groups or heads):
        return {}
    size = getattr(config, row.head_size, None) or config.hidden_size // heads
    fields = {row.heads: count * heads // int(groups or heads), row.head_size: int(size)}
    return fields | ({row.groups: count} if isinstance(row.groups, str) and groups else {})


def _accepted(config: Any, fields: dict[str, int]) -> bool:
    """Whether the configuration class accepts these values: some require hidden size to be a multiple of heads."""
    try:
        type(config).from_dict(config.to_dict() | fields)
    except Exception:  # validators raise their own error classes
        return False
    return True


def check_stock(structure: Structure) -> None:
    """Raise if a model has no stock shapes."""
    model = structure.model
    name = model.config.model_type
    why = structure.row.uneven
    if getattr(model.config, "shearling", None):
        why = "it was pruned to uneven layers before; start from the dense model"
    elif not why and not removable_layers(structure) and all(len(dial.counts) == 1 for dial in dials_of(structure)):
        why = "its configuration has fields for none of its sizes"
    if why:
        raise UnsupportedArchitecture(f"This {name} has no stock shapes: {why}. Use uneven shapes (--shape uneven).")


def removable_layers(structure: Structure) -> list[tuple[int, int]]:
    """(stack, layer) of every layer that may be removed from a stock shape."""
    found = []
    for number, stack in enumerate(structure.stacks):
        config = _part_of(structure.model.config, stack.row)
        # A backbone may return the features of intermediate layers.
        read_inside = getattr(config, "out_indices", None) not in (None, [len(stack.layers)])
        tied = read_inside or getattr(config, stack.row.unless or "_", False)
        if hasattr(config, stack.row.depth or "_") and not tied:
            found += [(number, layer) for layer in range(int(stack.row.first), len(stack.layers))]
    return found


def all_layers(structure: Structure) -> Layers:
    """Every layer of every stack."""
    return tuple(tuple(range(len(stack.layers))) for stack in structure.stacks)


def less(layers: Layers, gone: tuple[int, int]) -> Layers:
    """The layers without the layer `gone`, given as (stack, layer)."""
    return tuple(tuple(n for n in stay if (number, n) != gone) for number, stay in enumerate(layers))


def without_layers(structure: Structure, layers: Layers) -> Structure:
    """Returns a copy of the model with only these layers and a matching configuration.

    Weights share memory with the model: for a temporary copy that is never modified.
    """
    model = structure.model
    student = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for stack, stay in zip(structure.stacks, layers, strict=True):
        if len(stay) == len(stack.layers):
            continue
        pile: Any = student.base_model.get_submodule(stack.row.layers)
        for layer in sorted(set(range(len(pile))) - set(stay), reverse=True):
            del pile[layer]
        for number, layer in enumerate(pile):
            for module in layer.modules():
                for name in NUMBERS:
                    if isinstance(getattr(module, name, None), int):
                        setattr(module, name, number)
        config = _part_of(student.config, stack.row)
        setattr(config, stack.row.depth, len(stay))
        for field in PER_LAYER:
            if isinstance(values := getattr(config, field, None), (list, tuple)):
                setattr(config, field, [values[layer] for layer in stay])
        if hasattr(config, "stage_names"):  # of a backbone: the stem, then every layer
            config.stage_names = config.stage_names[: len(stay) + 1]
            config.set_output_features_output_indices(out_features=None, out_indices=None)
    return numbered(structure_of(student), layers)


def numbered(structure: Structure, layers: Layers) -> Structure:
    """The structure of a model that lacks layers, with the indices of its layers in the dense model."""
    stacks, depth = [], 0
    for stack, stay in zip(structure.stacks, layers, strict=True):
        named = (
            tuple(replace(s, depth=depth + number) for s in sublayers)
            for number, sublayers in zip(stay, stack.sublayers, strict=True)
        )
        stacks.append(replace(stack, sublayers=tuple(named), numbers=stay))
        depth += max(stay) + 1
    return replace(structure, stacks=tuple(stacks))


def write_sizes(model: PreTrainedModel) -> None:
    """Write the sizes of the layers to the configuration and remove everything specific to shearling."""
    wanted: list[tuple[Any, dict[str, int]]] = []
    for stack, sublayer in _sublayers(structure_of(model)):
        config = _part_of(model.config, stack.row)
        if sublayer.kind == "heads":
            wanted.append((config, _head_fields(stack.row, config, sublayer.units)))
        elif stack.row.filters:
            wanted.append((config, {stack.row.filters: sublayer.units // _step(stack.row, config)}))
    for config, fields in wanted:
        for name, value in fields.items():
            setattr(config, name, value)
    vars(model.config).pop("shearling", None)
    for module in model.modules():
        if isinstance(own := getattr(module, "config", None), OwnConfig):
            module.config = own.shared


def check_ordinary(model: PreTrainedModel) -> None:
    """Check that the family's own class, built from this configuration, has the same parameter shapes."""
    config: Any = type(model.config).from_dict(model.config.to_dict())
    with torch.device("meta"):
        plain = type(model)(config)
    found, wanted = ({name: tuple(p.shape) for name, p in m.named_parameters()} for m in (model, plain))
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise CheckFailed(
                f"'{name}' has the shape {found.get(name)}, but the configuration makes it {wanted.get(name)}. Nothing "
                "was saved; please report this with the model's config.json, and use --shape uneven."
            )
