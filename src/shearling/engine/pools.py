"""A sample laid out for many passes: pools of examples of one shape, from which batches are picked."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shearling.sample.sample import Batch, Sample

STEP = 8  # lengths are multiples of this
SHAPES = {"cpu": 8, "cuda": 4}  # different lengths: every new one costs a GPU time, and a CPU nothing


@dataclass(frozen=True)
class Pool:
    """Examples of one shape on one device, and which of them judge."""

    examples: Batch
    fit: Tensor  # [n], host: places of the examples to fit
    judging: Tensor  # [m], host: places of the examples held out

    def pick(self, rows: Tensor) -> Batch:
        """The examples at these places (on the pool's device)."""
        inputs = {name: value.index_select(0, rows) for name, value in self.examples.inputs.items()}
        return Batch(inputs, {}, rows)

    @property
    def tokens(self) -> int:
        """Tokens of one example, padding included; 256 where they do not show."""
        shown = self.examples.inputs.get("input_ids")
        return shown.shape[1] if shown is not None and shown.dim() == 2 else 256

    @property
    def places(self) -> Tensor:
        """All places, held out or not."""
        return torch.arange(len(self.examples))


def pools_of(sample: Sample, device: torch.device) -> list[Pool]:
    """The sample's examples by length, in a few shapes; without a mask, examples keep the shapes they came in."""
    batches = [batch.pick(torch.arange(len(batch))) for batch in sample]
    lengths = [_lengths(batch) for batch in batches]
    known = [length for length in lengths if length is not None]
    edges = _edges(torch.cat(known), SHAPES.get(device.type, SHAPES["cpu"])) if known else []
    groups: dict[Hashable, list[Batch]] = {}
    for batch, length in zip(batches, lengths, strict=True):
        for part in [batch] if length is None else _by_length(batch, length, edges):
            shape = tuple((name, *value.shape[1:], value.dtype) for name, value in sorted(part.inputs.items()))
            groups.setdefault(shape, []).append(part)
    return [_pool(parts, device) for parts in groups.values()]


def _pool(parts: Sequence[Batch], device: torch.device) -> Pool:
    names = parts[0].inputs
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in names}
    whole = Batch(inputs, {}, torch.cat([part.indices for part in parts]))
    judging = whole.held_out()
    return Pool(whole.to(device), (~judging).nonzero().flatten(), judging.nonzero().flatten())


def _lengths(batch: Batch) -> Tensor | None:
    """[B]: up to the last real token; None where examples cannot be cut or padded to another length."""
    mask = batch.inputs.get("attention_mask")
    if mask is None or mask.dim() != 2 or any(name.startswith("decoder_") for name in batch.inputs):
        return None
    if any(not _along(mask, v) and _has_length(mask, v) for v in batch.inputs.values()):
        return None
    places = torch.arange(1, mask.shape[1] + 1)
    return (mask.cpu().bool() * places).amax(1).clamp_min(1)


def _along(mask: Tensor, value: Tensor) -> bool:
    return value.shape == mask.shape


def _has_length(mask: Tensor, value: Tensor) -> bool:
    """Whether a tensor of another shape may run along the tokens too: embedded tokens, boxes, a mask for every head."""
    return value.dim() > 1 and (value.dim() == 2 or mask.shape[1] in value.shape[1:])


def _edges(lengths: Tensor, most: int) -> list[int]:
    """At most so many lengths that examples are padded to, with little padding: the cheapest neighbours are merged."""
    rounded = (lengths + STEP - 1) // STEP * STEP
    edges, counts = (found.tolist() for found in rounded.unique(return_counts=True))
    while len(edges) > most:
        added = [count * (edges[i + 1] - edges[i]) for i, count in enumerate(counts[:-1])]
        i = added.index(min(added))
        counts[i + 1] += counts[i]
        del edges[i], counts[i]
    return [min(edge, int(lengths.max())) for edge in edges]


def _by_length(batch: Batch, lengths: Tensor, edges: Sequence[int]) -> Iterator[Batch]:
    lower = 0
    for edge in edges:
        chosen = ((lengths > lower) & (lengths <= edge)).nonzero().flatten()
        lower = edge
        if len(chosen):
            part = batch.pick(chosen)
            mask = part.inputs["attention_mask"]
            missing = max(0, edge - mask.shape[1])
            fitted = {k: F.pad(v, (0, missing))[:, :edge] if _along(mask, v) else v for k, v in part.inputs.items()}
            yield Batch(fitted, {}, part.indices)
