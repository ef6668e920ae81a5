"""The calibration examples, as batches that every pass walks over in the same order."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shearling.errors import DataError

LABELS = ("labels", "label", "start_positions", "end_positions")
ASSUMED_LENGTH = 256  # tokens of an example that does not show them: an image, a sound
ROWS = 32  # of a data set, in a batch
IGNORED = -100  # the label that torch's losses leave out
HELD_OUT = 8  # one example in eight is kept from fits, to judge them


@dataclass(frozen=True)
class Batch:
    """Some examples: the model's inputs, the labels apart, and each example's number in the sample."""

    inputs: dict[str, Tensor]
    labels: dict[str, Tensor]
    indices: Tensor  # [B]
    remembered: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # worked out once

    def __len__(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; nothing is copied when it is there already."""

        def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v.to(device, non_blocking=True) for k, v in tensors.items()}

        return Batch(moved(self.inputs), moved(self.labels), self.indices)

    def part(self, start: int, stop: int) -> Batch:
        """Examples start to stop."""

        def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v[start:stop] for k, v in tensors.items()}

        return Batch(cut(self.inputs), cut(self.labels), self.indices[start:stop])

    def real_tokens(self, mask: str, shape: torch.Size) -> Tensor | None:
        """[B, S] bool: which tokens are not padding; None when all are, or the mask is not about these tokens."""
        real = self.inputs.get(mask)
        if real is None or real.shape != shape or bool(real.all()):
            return None
        return real.bool()

    def held_out(self) -> Tensor:
        """[B] bool: the examples that judge a fit instead of making it."""
        return self.indices % HELD_OUT == HELD_OUT - 1

    def held_out_last(self) -> Batch:
        """The same examples, those held out at the end: either kind can then be had without a copy."""
        return self.pick(self.held_out().int().argsort(stable=True))

    def pick(self, examples: Tensor) -> Batch:
        """The examples at these places."""

        def taken(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {k: v[examples] for k, v in tensors.items()}

        return Batch(taken(self.inputs), taken(self.labels), self.indices[examples])


@dataclass(frozen=True)
class Sample:
    """A re-iterable of batches on the host."""

    batches: tuple[Batch, ...]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def examples(self) -> int:
        """How many examples there are."""
        return sum(len(batch) for batch in self.batches)

    @property
    def largest(self) -> int:
        """Examples in the largest batch."""
        return max(map(len, self.batches))

    @property
    def has_labels(self) -> bool:
        """Whether every batch brings labels."""
        return all(batch.labels for batch in self.batches)

    @property
    def mean_length(self) -> float | None:
        """Mean number of real tokens of an example; None where no mask or token ids tell."""
        total = 0
        for batch in self.batches:
            tokens = batch.inputs.get("attention_mask", batch.inputs.get("input_ids"))
            if tokens is None or tokens.dim() != 2:
                return None
            total += int(tokens.sum()) if "attention_mask" in batch.inputs else tokens.numel()
        return total / self.examples

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every example, however they are batched and padded: the same sample gives the same report."""
        digest = hashlib.sha256()
        for batch in self.batches:
            columns = []
            for name, value in sorted((batch.inputs | batch.labels).items()):
                plain = value.float() if value.dtype == torch.bfloat16 else value
                columns.append((f"{name} {value.dtype}", plain.cpu().numpy()))
            mask = batch.inputs.get("attention_mask")
            real = None if mask is None or mask.dim() != 2 else mask.bool().cpu().numpy()
            for row in range(len(batch)):
                for head, values in columns:
                    found = values[row]
                    if real is not None and found.shape[:1] == real.shape[1:]:
                        found = found[real[row]]
                    digest.update(f"{head} {found.shape}".encode())
                    digest.update(np.ascontiguousarray(found).tobytes())
        return digest.hexdigest()

    def halved(self) -> Sample:
        """The same examples in batches half as large; for when memory runs out."""
        if self.largest == 1:
            raise DataError("A single example does not fit into memory; cut texts with a shorter --max-length.")
        halves = []
        for batch in self.batches:
            middle = (len(batch) + 1) // 2
            halves += [batch.part(0, middle)] + ([batch.part(middle, len(batch))] if len(batch) > 1 else [])
        return Sample(tuple(halves))

    def capped(self, tokens: int) -> Sample:
        """The same examples in batches of at most so many tokens (or pixels' rows, where there are no tokens)."""
        parts: list[Batch] = []
        for batch in self.batches:
            ids = batch.inputs.get("input_ids")
            length = ids.shape[1] if ids is not None and ids.dim() == 2 else ASSUMED_LENGTH
            size = max(1, tokens // length)
            parts += [batch.part(i, i + size) for i in range(0, len(batch), size)]
        return Sample(tuple(parts))

    def first(self, count: int) -> Sample:
        """The first `count` examples."""
        parts = (batch.part(0, int((batch.indices < count).sum())) for batch in self.batches)
        return Sample(tuple(part for part in parts if len(part)))

    def shard(self, rank: int, world: int) -> Sample:
        """Every world-th example, counted from rank: what one process of several works on."""
        if world == 1:
            return self
        parts = []
        for batch in self.batches:
            mine = (batch.indices % world == rank).nonzero().flatten()
            if len(mine):
                parts.append(batch.pick(mine))
        return Sample(tuple(parts))


def accepted_inputs(model: Any) -> frozenset[str]:
    """The inputs that the model's forward names; none where it names none and takes whatever comes."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = inspect.signature(model.forward).parameters.values()
    return frozenset(parameter.name for parameter in named if parameter.kind in kinds)


def sample_of(data: Any, *, limit: int | None = None, accepts: Collection[str] = (), seed: int = 0) -> Sample:
    """A tokenised data set, or any re-iterable of batches, as a sample of at most `limit` examples.

    Of a data set with more rows than that, some are drawn by the seed; of batches, the first ones are taken. Rows are
    put together into batches of similar length.

    Batches may bring more than the model takes (`idx`, `text`): what is neither a label nor in `accepts` is dropped,
    as Trainer does. Without `accepts`, everything stays.
    """
    if isinstance(data, Sample):
        return data if limit is None else data.first(limit)
    if isinstance(data, Mapping):
        data = [data]
    if not isinstance(data, Iterable):
        raise DataError(f"The sample must be an iterable of batches (dicts of tensors); got {type(data).__name__}.")
    batches: list[Batch] = []
    start = 0
    for number, raw in enumerate(_batches_in(data, limit, accepts, seed)):
        batch = _batch(raw, number, start, accepts)
        if limit is not None and start + len(batch) > limit:
            batch = batch.part(0, limit - start)
        start += len(batch)
        if len(batch):
            batches.append(batch)
        if limit is not None and start >= limit:
            break
    if not batches:
        raise DataError(
            "The sample is empty: not one batch came out of it. Give at least one; 2,048 examples are good."
        )
    return Sample(tuple(batches))


def _batches_in(data: Any, limit: int | None, accepts: Collection[str], seed: int) -> Iterator[Any]:
    """What there is to run, batch by batch: rows of a data set are put together first."""
    if hasattr(data, "column_names") and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        drawn = np.random.default_rng(seed).permutation(len(data))[:limit]
        yield from _put_together((data[int(row)] for row in np.sort(drawn)), accepts)
        return
    items = iter(data)
    first = next(items, None)
    everything = itertools.chain([] if first is None else [first], items)
    yield from _put_together(itertools.islice(everything, limit), accepts) if _is_row(first) else everything


def _is_row(raw: Any) -> bool:
    """Whether this is one example, not a batch of them."""
    ids = raw.get("input_ids") if isinstance(raw, Mapping) else None
    return ids is not None and np.ndim(ids) == 1


def _put_together(rows: Iterable[Any], accepts: Collection[str]) -> Iterator[Any]:
    """Batches of rows that differ in length only, the shortest first; those without a mask are never padded."""
    alike: dict[Hashable, list[dict[str, Tensor]]] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            yield row  # complained about where batches are
            return
        wanted = (k for k in row if _is_wanted(k, accepts) and (k == "input_ids" or not _is_text(row[k])))
        tensors = {k: _host(row[k], k, number) for k in wanted}
        length = _length(tensors)
        padded = "attention_mask" in tensors
        shape = tuple((k, *(None if padded and n == length else n for n in v.shape)) for k, v in tensors.items())
        alike.setdefault(shape, []).append(tensors)
    for group in alike.values():
        group.sort(key=_length)
        for start in range(0, len(group), ROWS):
            yield _padded(group[start : start + ROWS])


def _is_wanted(key: str, accepts: Collection[str]) -> bool:
    return not accepts or key in accepts or key in LABELS


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, list) and bool(value) and _is_text(value[0]))


def _length(row: dict[str, Tensor]) -> int:
    return len(row["input_ids"]) if "input_ids" in row and row["input_ids"].dim() else 0


def _padded(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    def together(name: str) -> Tensor:
        values = [row[name] for row in rows]
        if not values[0].dim():
            return torch.stack(values)
        return pad_sequence(values, batch_first=True, padding_value=IGNORED if name in LABELS else 0)

    return {name: together(name) for name in rows[0]}


def _batch(raw: Any, number: int, start: int, accepts: Collection[str] = ()) -> Batch:
    if not isinstance(raw, Mapping):
        raise DataError(
            f"Batch {number} of the sample is a {type(raw).__name__}; expected a dict of tensors such as "
            "{'input_ids': ..., 'attention_mask': ...}."
        )
    wanted = [key for key in raw if _is_wanted(key, accepts)]
    tensors = {key: _host(raw[key], key, number) for key in wanted if raw[key] is not None}
    if not tensors.keys() - set(LABELS):
        takes = f"; the model takes {sorted(set(accepts) - set(LABELS))}" if accepts else ""
        raise DataError(f"Batch {number} of the sample brings {sorted(raw)}, and nothing the model can run on{takes}.")
    lengths = {key: len(value) for key, value in tensors.items() if value.dim()}
    if not lengths or len(set(lengths.values())) != 1:
        raise DataError(f"The tensors of batch {number} do not agree on the number of examples: {lengths}.")
    count = next(iter(lengths.values()))
    labels = {"labels" if k == "label" else k: tensors.pop(k) for k in LABELS if k in tensors}
    return Batch(tensors, labels, torch.arange(start, start + count))


def _host(value: Any, key: str, number: int) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"'{key}' of batch {number} is not a tensor and cannot be made one: {error}") from None
    return value.detach().cpu()


def uniform(indices: Tensor, count: int, seed: int) -> Tensor:
    """[B, count] numbers in [0, 1): each row depends on the seed and the example's number alone."""
    rows = [np.random.Generator(np.random.Philox(key=[seed, int(i)])).random(count) for i in indices]
    return torch.from_numpy(np.stack(rows))
