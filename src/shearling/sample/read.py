"""Turn a DataLoader, batches of any size, or rows of a data set into a sample.

A batch is split into examples, and the padding that its attention mask shows is removed on both sides. Where an
input's shape does not show which entries belong to which token, the padding stays and the sample notes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from shearling.errors import DataError
from shearling.sample.batch import IGNORED, LABELS
from shearling.sample.sample import Column, Group, Sample

# Inputs with one entry per token, by the mask that marks their padding.
AXES = {
    "attention_mask": (
        "input_ids", "token_type_ids", "position_ids", "inputs_embeds", "bbox", "labels", "input_values",
    ),
    "decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids", "labels"),
}  # fmt: skip
MASK = "decoder_attention_mask"
POSITIONS = ("start_positions", "end_positions")  # token positions from the left, padding included
STREAMED = 16  # a stream of unknown length is read up to this multiple of the sample size
DRAWN_AT_ONCE = 256  # examples per call of a loader's collate function


@dataclass(frozen=True)
class Accepted:
    """The inputs a model accepts.

    names    the parameters of its forward; empty where it has only **kwargs
    pad      the padding token id
    batches  whether examples may share a batch (a head that looks for padding needs a padding token)
    targets  whether labels are a decoder's target text, with a length of their own
    """

    names: frozenset[str] = frozenset()
    pad: int = 0
    batches: bool = True
    targets: bool = False

    def wants(self, name: str) -> bool:
        """Whether the model uses an input of this name."""
        return not self.names or name in self.names or name in LABELS


def accepted_by(model: Any) -> Accepted:
    """Inspect a model's forward and its padding token."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = inspect.signature(model.forward).parameters.values()
    texts = getattr(model.config, "text_config", None)  # of a model around a language model
    pad = getattr(model.config if texts is None else texts, "pad_token_id", None)
    pools_last = type(model).__name__.endswith("ForSequenceClassification") and not isinstance(pad, int)
    decodes = hasattr(model, "can_generate") and pools_last and not hasattr(model.config, "type_vocab_size")
    return Accepted(
        frozenset(parameter.name for parameter in named if parameter.kind in kinds),
        pad if isinstance(pad, int) and pad >= 0 else 0,
        batches=not decodes,
        targets=reads_targets(model),
    )


def reads_targets(model: Any) -> bool:
    """Whether the model generates text with an autoregressive decoder beside an encoder (T5, BART, Marian)."""
    if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        return False
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def sample_of(data: Any, *, limit: int | None = None, accepted: Accepted | None = None, seed: int = 0) -> Sample:
    """Returns a sample of at most `limit` examples, drawn at random by the seed.

    data  a DataLoader, any iterable of batches (dicts of tensors), or rows: a tokenised data set, dicts of one example

    Columns that are neither labels nor accepted by the model (`idx`, `text`) are dropped, as Trainer does.
    """
    if isinstance(data, Sample):
        return data if limit is None else data.drawn(limit, seed)
    if isinstance(data, Mapping):
        data = [data]
    if not isinstance(data, Iterable):
        raise DataError(
            f"The sample must be an iterable of batches (dicts of tensors); got {type(data).__name__}. "
            "A torch Dataset goes into a DataLoader."
        )
    reader = _Reader(accepted or Accepted())
    for raw in _source(data, limit, seed, reader):
        reader.read(raw)
        if reader.count >= reader.most:
            reader.notes.append(f"of a stream of unknown length, the first {reader.count:,} examples were read")
            break
    if not reader.count:
        raise DataError("The sample is empty: it yielded no batch. Give at least one; 2,048 examples are good.")
    sample = reader.finish()
    return sample if limit is None else sample.drawn(limit, seed)


def _source(data: Any, limit: int | None, seed: int, reader: _Reader) -> Iterator[Any]:
    """Iterate over batches or rows; from large data sets only the drawn examples are read."""
    if isinstance(data, DataLoader):
        plain = isinstance(data.sampler, (RandomSampler, SequentialSampler)) and data.batch_size is not None
        dataset: Any = data.dataset
        if limit is not None and plain and isinstance(dataset, Sized) and len(dataset) > limit:
            yield from _drawn_from(data, limit, seed, reader)
            return
    elif hasattr(data, "column_names") and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        drawn = np.random.default_rng(seed).permutation(len(data))[:limit]
        reader.given, reader.rows = len(data), True
        yield from (data[int(row)] for row in np.sort(drawn))
        return
    if limit is not None and not _has_end(data):
        reader.most = STREAMED * limit
    reader.given = getattr(data, "given", 0)  # what was drawn from rows before knows of how many
    yield from data


def _has_end(data: Any) -> bool:
    """Whether the data know their length; a DataLoader over a stream has the method, but it raises."""
    try:
        return len(data) >= 0
    except TypeError:
        return False


def _drawn_from(loader: DataLoader[Any], limit: int, seed: int, reader: _Reader) -> Iterator[Any]:
    """Examples drawn from the loader's data set, collated as the loader would."""
    dataset: Any = loader.dataset
    chosen = np.sort(np.random.default_rng(seed).permutation(len(dataset))[:limit])
    reader.given = len(dataset)
    for start in range(0, limit, DRAWN_AT_ONCE):
        yield loader.collate_fn([dataset[int(i)] for i in chosen[start : start + DRAWN_AT_ONCE]])


@dataclass
class _Reader:
    """Splits batches into examples and collects them in groups.

    parts  per group, its pieces in the order they were read
    rows   whether single examples without a batch dimension are read
    """

    accepted: Accepted
    parts: dict[Any, list[Group]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    count: int = 0
    batches: int = 0
    given: int = 0
    rows: bool = False
    most: float = float("inf")

    def read(self, raw: Any) -> None:
        """Add one batch, or one row."""
        number = self.batches
        self.batches += 1
        if not isinstance(raw, Mapping):
            raise DataError(
                f"Batch {number} of the sample is a {type(raw).__name__}; expected a dict of tensors such as "
                "{'input_ids': ..., 'attention_mask': ...}. Texts and rows come as a list (list(texts), "
                "table.to_dict('records')), a file name or a data set."
            )
        tensors = self._tensors(raw, number)
        sizes = {key: len(value) for key, value in tensors.items()}
        if len(set(sizes.values())) != 1:
            raise DataError(f"The tensors of batch {number} do not agree on the number of examples: {sizes}.")
        axes = _axes(tensors)
        unclear = axes is None or not self.accepted.batches
        if axes is None:
            self.notes.append("the shape of some inputs does not show their tokens: batches are kept as given")
        self._add(tensors, axes or {}, number if unclear else None)
        self.count += next(iter(sizes.values()))

    def _tensors(self, raw: Mapping[str, Any], number: int) -> dict[str, Tensor]:
        """The tensors of a batch that the model uses, on the host; a row gets a batch dimension."""
        row = self.rows or _dimensions(raw.get("input_ids")) == 1
        found: dict[str, Tensor] = {}
        for key, value in raw.items():
            if not self.accepted.wants(key) or value is None or (key != "input_ids" and _is_text(value)):
                continue
            if not row and _dimensions(value) == 0:
                continue  # a flag of the call such as `return_loss`
            tensor = _host(value, key, number)
            found["labels" if key == "label" else key] = tensor[None] if row else tensor
        if self.accepted.targets and MASK not in found and _dimensions(found.get("labels")) == 2:
            found[MASK] = (found["labels"] != IGNORED).long()
        if not found.keys() - set(LABELS):
            names = sorted(self.accepted.names - set(LABELS))
            takes = f"; the model takes {names}" if names else ""
            raise DataError(f"Batch {number} of the sample has {sorted(raw)}, but nothing the model can run on{takes}.")
        return found

    def _add(self, tensors: dict[str, Tensor], axes: dict[str, str], apart: int | None) -> None:
        """Add the examples of a batch to the group with the same inputs, dtypes and shapes."""
        kept = {mask: _kept(tensors[mask]) for mask in set(axes.values())}
        columns: dict[str, Column] = {}
        kind: list[Any] = [apart]
        for name, tensor in sorted(tensors.items()):
            kind.append((name, tensor.dtype, axes.get(name), tensor.shape[2:] if name in axes else tensor.shape[1:]))
            pad = self.accepted.pad if name.endswith("input_ids") else IGNORED if name in LABELS else 0
            if name in axes:
                inside = kept[axes[name]][0]
                tensor = tensor.flatten(0, 1) if inside is None else tensor[inside]
            elif name in POSITIONS and "attention_mask" in kept and kept["attention_mask"][2] is not None:
                tensor = tensor - kept["attention_mask"][2].to(tensor)
            columns[name] = Column(tensor, axes.get(name, ""), pad)
        lengths = {mask: lengths for mask, (_, lengths, _) in kept.items()}
        size = len(next(iter(tensors.values())))
        part = Group(columns, lengths, torch.arange(self.count, self.count + size))
        self.parts.setdefault(tuple(kind), []).append(part)

    def finish(self) -> Sample:
        """Build the sample from everything read."""
        groups = []
        for parts in self.parts.values():
            columns = {
                name: replace(column, values=torch.cat([part.columns[name].values for part in parts]))
                for name, column in parts[0].columns.items()
            }
            lengths = {axis: torch.cat([part.lengths[axis] for part in parts]) for axis in parts[0].lengths}
            groups.append(Group(columns, lengths, torch.cat([part.indices for part in parts])))
        return Sample(tuple(groups), self.given or self.count, tuple(dict.fromkeys(self.notes)))


def _axes(tensors: dict[str, Tensor]) -> dict[str, str] | None:
    """Maps each input with one entry per token to its mask; None where a shape is ambiguous."""
    axes: dict[str, str] = {}
    lengths = set()
    for mask, names in AXES.items():
        found = tensors.get(mask)
        if found is None:
            continue
        if found.dim() != 2:
            return None
        axes[mask] = mask
        lengths.add(found.shape[1])
        for name in names:
            # Multi-label targets are floats [B, classes], even where there are as many tokens.
            numbers = name == "labels" and name in tensors and tensors[name].is_floating_point()
            if name in tensors and tensors[name].shape[:2] == found.shape and not numbers:
                axes[name] = mask
    for name, tensor in tensors.items():
        fixed = name in LABELS or name in ("pixel_values", "input_features")
        if name not in axes and not fixed and any(size in lengths for size in tensor.shape[1:]):
            return None
    return axes


def _kept(mask: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """([B, S] bool: positions left once the padding on both sides is removed, [B] lengths, [B] padding on the left).

    The first is None where everything stays, the last where no example is padded on the left. Zeros between real
    tokens stay, and so does an example without real tokens.
    """
    examples, length = mask.shape
    real = mask != 0
    if bool(real.all()):
        return None, torch.full((examples,), length), None
    place = torch.arange(length)
    empty = ~real.any(1)
    first = torch.where(real, place, length).amin(1).masked_fill_(empty, 0)
    last = torch.where(real, place, -1).amax(1).masked_fill_(empty, length - 1)
    inside = (place >= first[:, None]) & (place <= last[:, None])
    return inside, last - first + 1, first if bool(first.any()) else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and bool(value) and _is_text(value[0]))


def _dimensions(value: Any) -> int:
    """Number of dimensions of a tensor, an array or nested lists."""
    if isinstance(value, (list, tuple)):
        return 1 + (_dimensions(value[0]) if value else 0)
    return int(getattr(value, "ndim", 0))


def _host(value: Any, key: str, number: int) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"'{key}' of batch {number} cannot be converted to a tensor: {error}") from None
    return value.detach().cpu()
