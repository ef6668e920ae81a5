"""A model as the algorithms see it: stacks of layers with sublayers made of units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from shearling.errors import UnsupportedArchitecture
from shearling.models.refused import EXPERTS, NEAREST, UNSUPPORTED, ModelKind, kind_of
from shearling.models.row import Part, Row, StackRow
from shearling.models.sublayer import Sublayer, find, linear_shape
from shearling.models.table import ROWS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shearling.sample.batch import Batch


Share = Literal["all", "fit", "held out"]  # of the examples


@dataclass(frozen=True)
class Stack:
    """The layers of one encoder, decoder or tower, in order; layers that share weights appear once.

    sublayers  one tuple per layer, in order
    repeats    number of times the layers run one after the other
    frames     converts a mask over audio samples to one over frames
    numbers    indices of the layers in the dense model's stack, if some were removed; else empty
    """

    row: StackRow
    layers: tuple[nn.Module, ...]
    sublayers: tuple[tuple[Sublayer, ...], ...]
    repeats: int = 1
    frames: Callable[[int, Tensor], Tensor] | None = None
    numbers: tuple[int, ...] = ()

    @property
    def dense_numbers(self) -> tuple[int, ...]:
        """Indices of the layers in the dense model's stack."""
        return self.numbers or tuple(range(len(self.layers)))

    def real_tokens(self, batch: Batch, shape: torch.Size) -> Tensor | None:
        """[B, S] bool: which tokens of this stack are not padding; None when all are."""
        name = self.mask_of(batch)
        mask = batch.masks.get(name)
        if self.frames is not None and mask is not None and mask.shape != shape:
            batch = replace(batch, masks={name: self.frames(shape[1], mask)})
        return batch.real_tokens(name, shape)

    def rows(self, batch: Batch, shape: torch.Size, part: Share = "all") -> Tensor | slice:
        """Indices into [B x S] of the real tokens, of all examples or of a part.

        Computed once per batch, on the host, to avoid a GPU synchronisation.
        """
        key = (self.row.layers, shape, part)
        if key not in batch.remembered:
            rows = self._rows(batch, shape, part)
            batch.remembered[key] = rows if isinstance(rows, slice) else batch.beside_inputs(rows)
        found: Tensor | slice = batch.remembered[key]
        return found

    def _rows(self, batch: Batch, shape: torch.Size, part: Share) -> Tensor | slice:
        real = self.real_tokens(batch, shape)
        examples = _chosen(batch, part)
        if real is None and isinstance(examples, slice):
            return slice(*(None if at is None else at * shape[1] for at in (examples.start, examples.stop)))
        chosen = torch.zeros(shape, dtype=torch.bool)
        chosen[examples] = True
        return (chosen if real is None else chosen & real).flatten().nonzero().flatten()

    def weights(self, batch: Batch, shape: torch.Size, power: float, part: Share = "all") -> Tensor:
        """[tokens], aligned with `rows`: n ** -power for tokens of an example with n real tokens."""
        key = ("weights", self.row.layers, shape, power, part)
        if key not in batch.remembered:
            real = self.real_tokens(batch, shape)
            lengths = torch.full(shape[:1], shape[1]) if real is None else real.sum(1).clamp_min(1)
            every = (lengths.float() ** -power).repeat_interleave(shape[1])
            batch.remembered[key] = batch.beside_inputs(every[self._rows(batch, shape, part)])
        found: Tensor = batch.remembered[key]
        return found

    def mask_of(self, batch: Batch) -> str:
        """The input that marks the padding of these layers; a decoder without its own inputs uses the encoder's."""
        own = self.row.mask in batch.inputs or "decoder_input_ids" in batch.inputs
        return self.row.fallback if self.row.fallback and not own else self.row.mask


def _chosen(batch: Batch, part: Share) -> Tensor | slice:
    """The examples of a part; a slice if those held out come last."""
    if part == "all":
        return slice(None)
    judging = batch.held_out()
    border = len(batch) - int(judging.sum())
    if judging[border:].all():
        return slice(border) if part == "fit" else slice(border, None)
    return judging if part == "held out" else ~judging


@dataclass(frozen=True)
class Structure:
    """A model and its prunable parts."""

    model: PreTrainedModel
    row: Row
    stacks: tuple[Stack, ...]

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """All sublayers, in order."""
        return tuple(s for stack in self.stacks for layer in stack.sublayers for s in layer)

    @property
    def sizes(self) -> list[dict[str, int]]:
        """Units per layer, as in reports and `--json`."""
        return [_units_of(layer) for stack in self.stacks for layer in stack.sublayers]

    def places_in(self, dense: Structure) -> list[int]:
        """Indices of its sublayers among those of the dense model, which may have more layers."""
        found, first = [], 0
        for mine, theirs in zip(self.stacks, dense.stacks, strict=True):
            size = len(theirs.sublayers[0])
            found += [first + size * layer + part for layer in mine.dense_numbers for part in range(size)]
            first += size * len(theirs.layers)
        return found

    def sizes_in(self, dense: Structure) -> list[dict[str, int]]:
        """Units left per layer of the dense model; zero in removed layers."""
        sizes = iter(self.sizes)
        return [
            next(sizes) if number in mine.dense_numbers else dict.fromkeys(_units_of(layer), 0)
            for mine, theirs in zip(self.stacks, dense.stacks, strict=True)
            for number, layer in enumerate(theirs.sublayers)
        ]


def _units_of(layer: tuple[Sublayer, ...]) -> dict[str, int]:
    units: Counter[str] = Counter()
    for sublayer in layer:  # a layer may have several FFNs
        units[sublayer.unit] += sublayer.units
    return dict(units)


def structure_of(model: PreTrainedModel) -> Structure:
    """Find the model's row and the modules that it names."""
    row = check_supported(model.config)
    stacks: list[Stack] = []
    for stack_row in row.stacks:
        config = getattr(model.config, stack_row.config) if stack_row.config else model.config
        layers = find(model.base_model, stack_row.layers)
        taken = any(stack.row.layers == stack_row.layers for stack in stacks)
        if layers is not None and not taken and _fits(stack_row, cast(nn.ModuleList, layers), config):
            depth = sum(len(stack.layers) for stack in stacks)
            stacks.append(_stack(stack_row, tuple(cast(nn.ModuleList, layers)), config, model.base_model, depth))
    if not stacks:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not have the modules that the row for '{model.config.model_type}' names "
            f"({', '.join(dict.fromkeys(s.layers for s in row.stacks))}); see docs/adding-an-architecture.md."
        )
    return Structure(model, row, tuple(stacks))


def check_supported(config: Any) -> Row:
    """Returns the row for a configuration; raises with the reason if it is not supported. Needs no weights."""
    row = next((row for row in ROWS if config.model_type in row.model_types), None)
    if row is None:
        raise _refusal(config)
    for field, most, reason in row.refuses:
        if (getattr(config, field, 0) or 0) > most:
            raise UnsupportedArchitecture(
                f"This {config.model_type} has {reason} ({field}={getattr(config, field)}){_near(kind_of(config))}"
            )
    return _around(row, config) if row.inside else row


def _around(row: Row, config: Any) -> Row:
    """The row of a model around a language model, with the stacks of the language model's family."""
    path, field = row.inside or ("", "")
    inner = check_supported(getattr(config, field))
    stacks = tuple(replace(stack, layers=f"{path}.{stack.layers}", config=field) for stack in inner.stacks)
    return replace(row, stacks=stacks, half=inner.half, uneven=inner.uneven)


def _refusal(config: Any) -> UnsupportedArchitecture:
    """The error for a configuration without a row: the reason and the nearest supported family."""
    name = config.model_type
    refused = UNSUPPORTED.get(name)
    kind = refused.kind if refused else kind_of(config)
    reason = refused.reason if refused else EXPERTS if kind == "mixture of experts" else ""
    why = f"'{name}' is not supported: {reason}" if reason else f"No row for the architecture '{name}'"
    return UnsupportedArchitecture(f"{why}{_near(kind, refused.nearest if refused else '')}")


def _near(kind: ModelKind, name: str = "") -> str:
    """The end of a refusal: the nearest supported family, by default that of the kind."""
    what = "dense" if kind == "mixture of experts" else kind
    return (
        f"; the nearest that is supported is '{name or NEAREST[kind]}' ({what}). "
        "`shearling architectures` lists all of them; docs/adding-an-architecture.md shows how to add one."
    )


def _fits(row: StackRow, layers: nn.ModuleList, config: Any) -> bool:
    """Whether the layers have the modules that the row names and its conditions hold."""
    for condition in row.when.split(" and ") if row.when else ():
        if bool(getattr(config, condition.removeprefix("not "), False)) == condition.startswith("not "):
            return False
    paths = [path for part in row.parts for path in (part.out, part.residual_path, part.norm)]
    return all(find(layer, path) is not None for layer in layers for path in paths)


def _stack(row: StackRow, layers: tuple[nn.Module, ...], config: Any, base: nn.Module, depth: int) -> Stack:
    repeats = int(getattr(config, row.repeats)) if row.repeats else 1
    # The first layer, and the first of every other type: attention masks use the length of its cache.
    types = (getattr(config, "layer_types", None) or [])[: len(layers)]
    first = {0} | {types.index(kind) for kind in set(types)}
    views = []
    for i, layer in enumerate(layers):
        parts = (_sublayer(layer, f"{row.layers}.{i}", part, depth + i, row, config) for part in row.parts)
        keep = row.keep_first if i in first else 0
        views.append(tuple(replace(s, repeats=repeats, floor=_floor(s, keep)) for s in parts))
    frames = getattr(base, row.frames) if row.frames else None
    return Stack(row, layers, tuple(views), repeats, frames)


def _floor(sublayer: Sublayer, keep: int) -> int:
    """Minimum number of units, at most those it has."""
    wanted = max(sublayer.part.floor, keep if sublayer.unit == "heads" else 0)
    return min(wanted, sublayer.units)


def _sublayer(layer: nn.Module, path: str, part: Part, depth: int, row: StackRow, config: Any) -> Sublayer:
    columns = linear_shape(layer.get_submodule(part.out))[1]
    sublayer = Sublayer(part.kind, depth, path, layer, part, 0, 1)
    if part.kind == "filters":
        return replace(sublayer, units=columns)
    width = int(sublayer.read(part.size) or 1) if part.size else _head_width(config, row)  # 1 where no head is left
    return replace(sublayer, units=columns // width, width=width)


def _head_width(config: Any, row: StackRow) -> int:
    """Columns of `h` per unit of attention: a head, or all query heads of a key-value group."""
    heads = int(getattr(config, row.heads))
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, row.groups, None) if isinstance(row.groups, str) else row.groups
    return int(size) * (heads // int(groups or heads))
