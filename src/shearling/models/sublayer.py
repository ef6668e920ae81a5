"""One sublayer as the algorithms see it: units, an output projection, and the projections into the units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shearling.models.row import Along, Fused, Kind, Part

Reads = Literal["tokens", "positions", "source"]


@dataclass(frozen=True)
class Projection:
    """A projection into the units, with `rows` outputs per unit in each block.

    reads  its input: the sublayer's own tokens, relative positions, or the encoder's tokens (source)
    """

    path: str
    module: nn.Module
    rows: tuple[int, ...]
    reads: Reads = "tokens"

    @property
    def per_unit(self) -> int:
        """Outputs per unit."""
        return sum(self.rows)

    def rows_of(self, kept: Tensor, units: int) -> Tensor:
        """Row indices of the kept units, block by block."""
        found, start = [], 0
        for rows in self.rows:
            found.append(start + columns_of(kept, rows))
            start += units * rows
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Sublayer:
    """The attention, the cross-attention or the FFN of one layer.

    units, width   `h` has units x width columns, a unit's columns adjacent
    weight         [D, units x width], the output projection applied to `h`
    floor          units that must stay
    repeats        number of times the sublayer runs in one forward pass
    """

    kind: Kind
    depth: int
    path: str  # of the layer, from the base model
    layer: nn.Module
    part: Part
    units: int
    width: int
    floor: int = 0
    repeats: int = 1

    def _at(self, path: str) -> nn.Module:
        return self.layer.get_submodule(path)

    @property
    def name(self) -> str:
        """For messages: `heads of layer 3`."""
        return f"{self.unit} of layer {self.depth}"

    @property
    def unit(self) -> str:
        """Name of its units in reports: `heads`, `cross_heads` or `filters`."""
        return f"cross_{self.kind}" if self.part.across else self.kind

    @property
    def out(self) -> nn.Module:
        """The output projection."""
        return self._at(self.part.out)

    @property
    def core(self) -> nn.Module:
        """The module that computes `h` or the output."""
        return self._at(self.part.core)

    @property
    def out_in_core(self) -> bool:
        """Whether the output projection is part of the core."""
        return self.part.out.startswith(f"{self.part.core}.")

    @property
    def residual(self) -> nn.Module:
        """The module whose input is the residual stream."""
        return self._at(self.part.residual_path)

    @property
    def inputs(self) -> tuple[Projection, ...]:
        """The projections into the units."""
        return tuple(self._projections())

    def _projections(self) -> Iterator[Projection]:
        positions = self.part.positions.paths if self.part.positions else ()
        for entry in (*self.part.inputs, *positions):
            fused = entry if isinstance(entry, Fused) else Fused(entry, 1)
            module = find(self.layer, fused.path)
            if module is None:
                continue
            reads: Reads = "positions" if entry in positions else "tokens"
            if self.part.across and entry != self.part.inputs[0]:
                reads = "source"
            yield Projection(fused.path, module, self._rows(module, fused.blocks), reads)

    def _rows(self, module: nn.Module, blocks: int) -> tuple[int, ...]:
        """Rows per unit in each block: its columns of `h` in the first, the rest shared equally."""
        total = linear_shape(module)[0] // self.units if self.units else 0
        first = min(self.width, total) if blocks > 1 else total
        return (first, *[(total - first) // max(blocks - 1, 1)] * (blocks - 1))

    @property
    def follows(self) -> Literal["residual", "output"]:
        """The target of a repair of the output projection.

        residual  the teacher's residual stream after the sublayer: o_T + x_T - x_S, which also corrects earlier errors
        output    the teacher's output o_T alone, because of a norm before the residual or windowed attention
        """
        return "output" if self.normed or self.part.windows else "residual"

    @property
    def normed(self) -> bool:
        """Whether a norm lies between the output and the residual: only the direction of the output matters then."""
        return bool(self.part.norm)

    def reach(self, length: float) -> float:
        """Number of tokens each token attends to in a sequence of `length`."""
        return min(length, self.read(self.part.windows) ** 2) if self.part.windows else length

    @property
    def own(self) -> tuple[tuple[Along, Tensor], ...]:
        """Other parameters with entries per unit, without those that a variant lacks."""
        found = ((along, self.read(along.path)) for along in self.part.own)
        return tuple((along, value) for along, value in found if isinstance(value, Tensor))

    @property
    def foldable(self) -> tuple[Projection, ...]:
        """The projections that read only the tokens, so that a linear map of the tokens can be folded into them."""
        tokens = tuple(p for p in self.inputs if p.reads == "tokens")
        shared = self.position_products and len(tokens) == len(self.inputs)
        apart = len({linear_shape(p.module)[1] for p in tokens}) > 1  # MobileBERT: values read another tensor
        return () if shared or apart else tokens

    @property
    def position_products(self) -> int:
        """Number of products of tokens with projected relative positions."""
        kinds = self.read(self.part.positions.kinds) if self.part.positions and self._span else None
        return len(kinds) if kinds else 0

    def position_rows(self, length: float) -> float:
        """Rows of the relative position table that are projected for a sequence of `length` tokens."""
        positions = self.part.positions
        return 2 * (min(self._span, length) if positions and positions.cut else self._span)

    @property
    def _span(self) -> int:
        """Maximum relative distance; 0 without relative positions."""
        return (self.read(self.part.positions.span) if self.part.positions else None) or 0

    def read(self, attribute: str) -> Any:
        """An attribute by its dotted path from the layer, or None."""
        value: Any = self.layer
        for name in attribute.split("."):
            value = getattr(value, name, None)
        return value

    @property
    def weight(self) -> Tensor:
        """[D, n], for both weight layouts."""
        weight = cast(Tensor, self.out.weight)
        return weight.T if is_transposed(self.out) else weight

    @property
    def bias(self) -> Tensor | None:
        """[D], or None."""
        return cast("Tensor | None", self.out.bias)

    def write(self, weight: Tensor, bias: Tensor | None) -> None:
        """Overwrite the output projection in place."""
        with torch.no_grad():
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    def fold_inputs(self, weight: Tensor, bias: Tensor | None) -> None:
        """Fold the map z -> weight z + bias ([D, D] and [D]) into the projections into the units, in place."""
        with torch.no_grad():
            for projection in self.foldable:
                module = projection.module
                old = cast(Tensor, module.weight)
                rows = old.T if is_transposed(module) else old  # [outputs, D]
                if bias is not None:
                    cast(Tensor, module.bias).add_((rows.to(bias) @ bias).to(rows))
                rows.copy_((rows.to(weight) @ weight).to(rows))

    @property
    def inputs_have_bias(self) -> bool:
        """Whether a bias can be folded into the projections into the units."""
        return all(getattr(p.module, "bias", None) is not None for p in self.foldable)

    @property
    def scale(self) -> Tensor | None:
        """[D]: factor of the output before the residual is added, if any."""
        scale = self.read(self.part.scale) if self.part.scale else None
        if isinstance(scale, float):
            scale = self.weight.new_tensor(scale)
        if not isinstance(scale, Tensor):
            return None
        return scale.masked_fill(scale == 0, torch.inf)  # residuals are divided by it: zero for zero channels

    @property
    def weights_per_unit(self) -> int:
        """Multiply-accumulates per token in the projections of one unit."""
        return self.entries_per_unit("tokens") + self.width * int(self.weight.shape[0])

    def entries_per_unit(self, reads: Reads) -> int:
        """Matrix entries of one unit in the input projections that read this."""
        inputs = (p for p in self.inputs if p.reads == reads)
        return sum(p.per_unit * linear_shape(p.module)[1] for p in inputs)

    @property
    def params_per_unit(self) -> int:
        """Parameters removed with one unit, including biases of its inputs."""
        biases = sum(p.per_unit for p in self.inputs if getattr(p.module, "bias", None) is not None)
        own = sum(value.numel() // self.units for _, value in self.own) if self.units else 0
        elsewhere = self.entries_per_unit("positions") + self.entries_per_unit("source")
        return self.weights_per_unit + elsewhere + biases + own


def columns_of(kept: Tensor, width: int) -> Tensor:
    """Indices of the rows or columns of the kept units, `width` each."""
    return (kept[:, None] * width + torch.arange(width)).flatten()  # [kept x width]


def find(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, or None."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored as [in, out], as in GPT-2's Conv1D."""
    return hasattr(module, "nf")


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear module, for both layouts."""
    rows, columns = cast(Tensor, module.weight).shape
    return (columns, rows) if is_transposed(module) else (rows, columns)
