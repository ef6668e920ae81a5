"""A model as the algorithms see it: stacks of layers, each with sublayers made of units."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shearling.errors import UnsupportedArchitecture
from shearling.models.row import Fused, Kind, Part, Row, StackRow
from shearling.models.table import ROWS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Projection:
    """A projection into the units: `blocks` times `units` times `rows` outputs."""

    path: str
    module: nn.Module
    blocks: int
    rows: int


@dataclass(frozen=True, eq=False)
class Sublayer:
    """The attention or the FFN of one layer.

    units, width   `h` has units x width columns, a unit's columns side by side
    weight         [D, units x width], the output projection as it acts on `h`
    """

    kind: Kind
    depth: int
    path: str  # of the layer, from the base model
    layer: nn.Module
    part: Part
    units: int
    width: int
    floor: int  # units that must stay

    def _at(self, path: str) -> nn.Module:
        return self.layer.get_submodule(path)

    @property
    def name(self) -> str:
        """For messages: `heads of layer 3`."""
        return f"{self.kind} of layer {self.depth}"

    @property
    def out(self) -> nn.Module:
        """The output projection."""
        return self._at(self.part.out)

    @property
    def residual(self) -> nn.Module:
        """The module whose input is the residual stream."""
        return self._at(self.part.residual_path)

    @property
    def inputs(self) -> tuple[Projection, ...]:
        """The projections into the units."""
        return tuple(self._projections())

    def _projections(self) -> Iterator[Projection]:
        for entry in self.part.inputs:
            fused = entry if isinstance(entry, Fused) else Fused(entry, 1)
            module = find(self.layer, fused.path)
            if module is None:
                continue
            rows = linear_shape(module)[0] // (fused.blocks * self.units) if self.units else 0
            yield Projection(fused.path, module, fused.blocks, rows)

    @property
    def weight(self) -> Tensor:
        """[D, n], whatever layout the module keeps."""
        weight = cast(Tensor, self.out.weight)
        return weight.T if is_transposed(self.out) else weight

    @property
    def bias(self) -> Tensor | None:
        """[D], or None where the projection has none."""
        return cast("Tensor | None", self.out.bias)

    def write(self, weight: Tensor, bias: Tensor | None) -> None:
        """Give the output projection new values, in place."""
        with torch.no_grad():
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    def fold_inputs(self, weight: Tensor, bias: Tensor | None) -> None:
        """Have the projections into the units see `weight z + bias` instead of z: [D, D] and [D], in place."""
        with torch.no_grad():
            for projection in self.inputs:
                module = projection.module
                old = cast(Tensor, module.weight)
                rows = old.T if is_transposed(module) else old  # [outputs, D]
                if bias is not None:
                    cast(Tensor, module.bias).add_((rows.to(bias) @ bias).to(rows))
                rows.copy_((rows.to(weight) @ weight).to(rows))

    @property
    def inputs_have_bias(self) -> bool:
        """Whether a constant can be folded into the projections into the units."""
        return all(getattr(p.module, "bias", None) is not None for p in self.inputs)

    @property
    def scale(self) -> Tensor | None:
        """[D]: what the output is multiplied with before it meets the residual, if anything."""
        if not self.part.scale:
            return None
        owner, _, attribute = self.part.scale.rpartition(".")
        return cast("Tensor | None", getattr(self._at(owner), attribute, None))

    @property
    def weights_per_unit(self) -> int:
        """Matrix entries that go with one unit: its multiply-accumulates per token, the attention product aside."""
        into = sum(p.blocks * p.rows * linear_shape(p.module)[1] for p in self.inputs)
        return int(into + self.width * self.weight.shape[0])

    @property
    def params_per_unit(self) -> int:
        """Parameters that go with one unit, biases of its inputs included."""
        biases = sum(p.blocks * p.rows for p in self.inputs if getattr(p.module, "bias", None) is not None)
        return self.weights_per_unit + biases


@dataclass(frozen=True)
class Stack:
    """The layers of one encoder, decoder or tower, in the order they run."""

    row: StackRow
    layers: tuple[nn.Module, ...]
    sublayers: tuple[tuple[Sublayer, ...], ...]  # one tuple a layer, in the order they run


@dataclass(frozen=True)
class Structure:
    """A model and its prunable parts."""

    model: PreTrainedModel
    row: Row
    stacks: tuple[Stack, ...]

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Every sublayer, in the order they run."""
        return tuple(s for stack in self.stacks for layer in stack.sublayers for s in layer)

    @property
    def sizes(self) -> list[dict[str, int]]:
        """Units left per layer, as reports and `--json` give them."""
        return [{s.kind: s.units for s in layer} for stack in self.stacks for layer in stack.sublayers]


def structure_of(model: PreTrainedModel) -> Structure:
    """Find the row for the model and the modules the row names."""
    row = row_of(model.config.model_type)
    base = model.base_model
    stacks = []
    depth = 0
    for stack_row in row.stacks:
        pile = find(base, stack_row.layers)
        if pile is None:
            continue
        config = getattr(model.config, stack_row.config) if stack_row.config else model.config
        layers = tuple(cast(nn.ModuleList, pile))
        views = []
        for i, layer in enumerate(layers):
            floor = row.keep_first if i == 0 else 0
            path = f"{stack_row.layers}.{i}"
            views.append(tuple(_sublayer(layer, path, part, depth, floor, config) for part in stack_row.parts))
            depth += 1
        stacks.append(Stack(stack_row, layers, tuple(views)))
    return Structure(model, row, tuple(stacks))


def row_of(model_type: str) -> Row:
    """The row that serves a `model_type`."""
    for row in ROWS:
        if model_type in row.model_types:
            return row
    known = [name for row in ROWS for name in row.model_types]
    near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.3) or known[:1]
    raise UnsupportedArchitecture(
        f"No row for the architecture '{model_type}'; the nearest that is supported is '{near[0]}'. "
        "`shearling architectures` lists all of them; docs/adding-an-architecture.md shows how to add one."
    )


def _sublayer(layer: nn.Module, path: str, part: Part, depth: int, floor: int, config: Any) -> Sublayer:
    out = layer.get_submodule(part.out)
    columns = linear_shape(out)[1]
    width = _head_width(config) if part.kind == "heads" else 1
    return Sublayer(part.kind, depth, path, layer, part, columns // width, width, floor if part.kind == "heads" else 0)


def _head_width(config: Any) -> int:
    """Columns of `h` per unit of attention: a head, or all query heads that share one key and value head."""
    heads = int(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return int(size) * (heads // int(groups))


def find(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, or None."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is kept as [in, out], as in GPT-2's Conv1D."""
    return hasattr(module, "nf")


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear module of either layout."""
    rows, columns = cast(Tensor, module.weight).shape
    return (columns, rows) if is_transposed(module) else (rows, columns)
