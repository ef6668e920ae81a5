"""The sample laid out for many passes: buckets of examples of one shape, and what the teacher makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shearling.engine.distance import compared
from shearling.engine.hooks import by_example, device_of, run
from shearling.engine.memory import free_bytes
from shearling.engine.precision import Precision
from shearling.models.structure import Structure
from shearling.sample.batch import Batch
from shearling.sample.sample import Group, Sample

KEPT = torch.bfloat16  # hidden states of the teacher: the range of float32, and errors far below the student's
HOST_BYTES = 4 * 2**30  # of the teacher's states, at most, on the host
STEP = 8  # lengths are multiples of this
SHAPES = {"cpu": 8, "cuda": 4}  # different lengths: every new one costs a GPU time, and a CPU nothing
RESIDENT = 1 / 8  # of the free memory that inputs may take on a GPU


@dataclass
class States:
    """What a model makes of some examples: outputs as `compared` picks them, and what each layer put out."""

    outputs: dict[str, Tensor]
    hidden: list[Tensor]  # [B, S, D] each, in the order the layers ran

    @property
    def bytes(self) -> int:
        """Their size once kept."""
        return sum(KEPT.itemsize * h.numel() for h in self.hidden) + sum(o.nbytes for o in self.outputs.values())


class Observed:
    """A model whose layers' outputs are caught on the way."""

    def __init__(self, structure: Structure, precision: Precision) -> None:
        self.structure, self.precision = structure, precision
        self.stacks: list[int] = []  # of every layer that ran, in their order
        self._caught: list[Tensor] = []

    @contextmanager
    def watched(self) -> Iterator[Observed]:
        """Hooks on every layer, removed on the way out."""
        with ExitStack() as hooks:
            for number, stack in enumerate(self.structure.stacks):
                for layer in stack.layers:
                    hooks.callback(layer.register_forward_hook(self._catching(number)).remove)
            yield self

    def __call__(self, batch: Batch) -> States:
        """One forward pass."""
        self._caught, self.stacks = [], []
        model = self.structure.model
        outputs = run(model, batch, self.precision)
        hidden, self._caught = [by_example(h, len(batch)) for h in self._caught], []
        return States(compared(model, outputs, batch), hidden)

    def _catching(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._caught.append(output if isinstance(output, Tensor) else output[0])
            self.stacks.append(number)

        return hook


@dataclass
class Bucket:
    """Examples padded to one length, with the teacher's states for them.

    fit, judging  places of the examples to fit and of those held out, on the host
    real          for every layer, [n, S]: which tokens are not padding; None when all are
    elements      of the largest tensor that one example makes on its way: tokens, or logits
    kept          the teacher's states; None where it runs anew for every batch
    """

    batch: Batch
    fit: Tensor
    judging: Tensor
    teacher: Observed
    real: list[Tensor | None]
    tokens: int
    logits: int
    kept: States | None = None

    def pick(self, rows: Tensor) -> Batch:
        """The examples at these places, given on the device they are wanted on."""
        inputs = {name: _take(value, rows) for name, value in self.batch.inputs.items()}
        return Batch(inputs, {}, torch.arange(len(rows)))

    def wanted(self, rows: Tensor, batch: Batch) -> States:
        """The teacher's states for the examples at these places."""
        if self.kept is None:
            with torch.no_grad():
                return self.teacher(batch)
        outputs = {name: _take(value, rows) for name, value in self.kept.outputs.items()}
        return States(outputs, [_take(value, rows) for value in self.kept.hidden])

    def real_tokens(self, rows: Tensor) -> list[Tensor | None]:
        """For every layer, [B, S] of the examples at these places."""
        return [None if real is None else _take(real, rows) for real in self.real]

    def resident(self, device: torch.device) -> bool:
        """Whether everything a step needs is on this device already."""
        if self.kept is None:
            return False
        tensors = [*self.batch.inputs.values(), *self.kept.hidden, *self.kept.outputs.values()]
        return all(tensor.device == device for tensor in tensors)


def _take(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows.to(values.device)).to(rows.device, non_blocking=True)


def buckets_of(teacher: Observed, sample: Sample, most_tokens: int, *, keep: bool = True) -> list[Bucket]:
    """The sample by length, in a few shapes. The teacher runs once over all examples if its states can be kept."""
    device = device_of(teacher.structure.model)
    shapes = SHAPES.get(device.type, SHAPES["cpu"])
    batches = [batch for group in sample.groups for batch in _by_length(group, shapes)]
    held = sum(tensor.nbytes for batch in batches for tensor in batch.inputs.values())
    if device.type != "cuda" or held < RESIDENT * free_bytes(device):
        batches = [batch.to(device) for batch in batches]
    with torch.no_grad():
        found = [_bucket(teacher, batch, device) for batch in batches]
        place = _place(sum(size for _, size in found), device) if keep else None
        for bucket, _ in found:
            if place is not None:
                bucket.kept = _kept(bucket, max(1, most_tokens // bucket.tokens), device, place)
    return [bucket for bucket, _ in found]


def _by_length(group: Group, shapes: int) -> list[Batch]:
    lengths = group.tokens
    edges = torch.tensor(_edges(lengths, shapes))
    numbers = torch.bucketize(lengths, edges)
    return [group.batch((numbers == number).nonzero().flatten(), STEP) for number in numbers.unique().tolist()]


def _edges(lengths: Tensor, most: int) -> list[int]:
    """At most so many lengths that examples are padded to, with little padding: the cheapest neighbours are merged."""
    rounded = (lengths + STEP - 1) // STEP * STEP
    edges, counts = (found.tolist() for found in rounded.unique(return_counts=True))
    while len(edges) > most:
        added = [count * (edges[i + 1] - edges[i]) for i, count in enumerate(counts[:-1])]
        i = added.index(min(added))
        counts[i + 1] += counts[i]
        del edges[i], counts[i]
    found: list[int] = edges
    return found


def _bucket(teacher: Observed, batch: Batch, device: torch.device) -> tuple[Bucket, int]:
    """A bucket, and the bytes of the teacher's states for it."""
    held_out = batch.held_out()
    bucket = Bucket(batch, (~held_out).nonzero().flatten(), held_out.nonzero().flatten(), teacher, [], 1, 1)
    first = teacher(bucket.pick(torch.zeros(1, dtype=torch.long, device=device)))
    for number, hidden in zip(teacher.stacks, first.hidden, strict=True):
        real = teacher.structure.stacks[number].real_tokens(batch, torch.Size((len(batch), hidden.shape[1])))
        bucket.real.append(None if real is None else real.to(device))
    bucket.tokens = max(hidden.shape[1] for hidden in first.hidden)
    bucket.logits = max(output.numel() for output in first.outputs.values())
    return bucket, first.bytes * len(batch)


def _place(wanted: int, device: torch.device) -> torch.device | None:
    """Where so many bytes fit: the device, the host, or nowhere."""
    if device.type == "cuda" and 2 * wanted < free_bytes(device):
        return device
    return torch.device("cpu") if wanted < HOST_BYTES else None


def _kept(bucket: Bucket, size: int, device: torch.device, place: torch.device) -> States:
    count = len(bucket.batch)
    kept = States({}, [])

    def fill(room: Tensor | None, values: Tensor, start: int, dtype: torch.dtype) -> Tensor:
        if room is None:
            room = torch.empty((count, *values.shape[1:]), dtype=dtype, device=place)
        room[start : start + len(values)].copy_(values)
        return room

    for start in range(0, count, size):
        rows = torch.arange(start, min(start + size, count), device=device)
        states = bucket.teacher(bucket.pick(rows))
        before: Sequence[Tensor | None] = kept.hidden or [None] * len(states.hidden)
        kept.hidden = [fill(room, h, start, KEPT) for room, h in zip(before, states.hidden, strict=True)]
        kept.outputs = {k: fill(kept.outputs.get(k), o, start, o.dtype) for k, o in states.outputs.items()}
    return kept
