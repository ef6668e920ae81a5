"""The sample prepared for many passes: buckets of examples of one shape, with the teacher's outputs and states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shearling.engine.distance import compared
from shearling.engine.hooks import by_example, device_of, run
from shearling.engine.memory import RESIDENT, free_bytes
from shearling.engine.noise import noised, special_tokens
from shearling.engine.precision import Precision
from shearling.models.structure import Structure
from shearling.sample.batch import Batch
from shearling.sample.sample import Group, Sample

KEPT = torch.bfloat16  # of stored hidden states: float32's range, rounding far below the student's error
HOST_BYTES = 4 * 2**30  # limit of the teacher's states on the host
STEP = 8  # lengths are multiples of this
SHAPES = {"cpu": 8, "cuda": 4}  # buckets: on a GPU every further shape costs set-up time


@dataclass
class States:
    """A model's outputs for some examples, as selected by `compared`, and the output of each layer."""

    outputs: dict[str, Tensor]
    hidden: list[Tensor]  # [B, S, D] each, in execution order

    @property
    def bytes(self) -> int:
        """Their size when stored."""
        return sum(KEPT.itemsize * h.numel() for h in self.hidden) + sum(o.nbytes for o in self.outputs.values())


class Observed:
    """A model whose layer outputs are captured by hooks.

    beside  a model that may lack some of the layers: only the corresponding outputs are captured. A layer before a gap
            corresponds to the last layer of the gap, since it takes over the function of the missing layers
    """

    def __init__(self, structure: Structure, precision: Precision, *, beside: Structure | None = None) -> None:
        self.structure, self.precision, self.beside = structure, precision, beside or structure
        self.stacks: list[int] = []  # stack of every layer, in execution order
        self._caught: list[Tensor] = []

    @contextmanager
    def watched(self) -> Iterator[Observed]:
        """Install the hooks; removed afterwards."""
        with ExitStack() as hooks:
            for number, (stack, other) in enumerate(zip(self.structure.stacks, self.beside.stacks, strict=True)):
                after = [*other.dense_numbers[1:], len(stack.layers)] if self.beside is not self.structure else ()
                for layer in [stack.layers[at - 1] for at in after] or stack.layers:
                    hooks.callback(layer.register_forward_hook(self._catching(number)).remove)
            yield self

    def __call__(self, batch: Batch) -> States:
        """One forward pass."""
        self._caught, self.stacks = [], []
        model = self.structure.model
        device = device_of(model)
        with MadeOn(device) if device.type == "cuda" else nullcontext():
            outputs = run(model, batch, self.precision)
        hidden, self._caught = [by_example(h, len(batch)) for h in self._caught], []
        return States(compared(model, outputs, batch), hidden)

    def _catching(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._caught.append(output if isinstance(output, Tensor) else output[0])
            self.stacks.append(number)

        return hook


class MadeOn(TorchFunctionMode):
    """Create ranges and scalars that a model makes on the host, such as positions, on the GPU instead.

    Copies from the host cannot be recorded in a CUDA graph.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.arange:
            return func(*args, **({"device": self.device} | given))
        if func is torch.tensor and isinstance(args[0], (bool, int, float)):
            return torch.full((), args[0], **({"device": self.device} | given))
        return func(*args, **given)


@dataclass
class Bucket:
    """Examples padded to one length, with the teacher's states.

    fit, judging  indices of the examples to fit and of those held out, on the host
    real          per layer, [n, S]: which tokens are not padding; None when all are
    tokens        per example, padding included
    logits        per example
    kept          the teacher's states; None if the teacher runs again for every batch
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
        """The examples `rows`, on the device of `rows`."""
        return _picked(self.batch, rows)

    def wanted(self, rows: Tensor, batch: Batch) -> States:
        """The teacher's states for the examples `rows`; zero at padding."""
        if self.kept is None:
            return self._seen(rows, batch)
        outputs = {name: _take(value, rows) for name, value in self.kept.outputs.items()}
        return States(outputs, [_take(value, rows) for value in self.kept.hidden])

    def real_tokens(self, rows: Tensor) -> list[Tensor | None]:
        """Per layer, [B, S]: the real tokens of the examples `rows`; layers with the same mask share it."""
        taken = {id(real): _take(real, rows) for real in self.real if real is not None}
        return [None if real is None else taken[id(real)] for real in self.real]

    def add_noise(self, noise: float, generator: torch.Generator) -> None:
        """Draw new random tokens for the examples to fit."""
        ids = self.batch.inputs.get("input_ids")
        if noise and ids is not None and len(self.fit) > 1:
            at = self.fit.to(ids.device)
            ids.index_copy_(0, at, noised(self.clean, self.movable, noise, generator).to(ids.device))

    @cached_property
    def clean(self) -> Tensor:
        """[fit, S], host: the original tokens of the examples to fit."""
        return self.batch.inputs["input_ids"][self.fit.to(self.batch.inputs["input_ids"].device)].cpu()

    @cached_property
    def movable(self) -> Tensor:
        """[fit, S], host: which of them are neither padding nor special tokens."""
        special = torch.tensor(sorted(special_tokens(self.teacher.structure.model.config)))
        mask = self.batch.masks.get("attention_mask")
        plain = ~torch.isin(self.clean, special)
        fits = mask is not None and mask.shape == self.batch.inputs["input_ids"].shape
        return plain & mask[self.fit].bool() if fits else plain  # type: ignore[index]

    def fill(self, rows: Tensor) -> None:
        """Run the teacher on the examples `rows` and store its states, if states are stored."""
        if self.kept is None:
            return
        states = self._seen(rows, self.pick(rows))
        for room, values in zip(self.kept.hidden, states.hidden, strict=True):
            room.index_copy_(0, rows.to(room.device), values.to(room))
        for name, values in states.outputs.items():
            room = self.kept.outputs[name]
            room.index_copy_(0, rows.to(room.device), values.to(room))

    @torch.no_grad()
    def _seen(self, rows: Tensor, batch: Batch) -> States:
        states, masks = self.teacher(batch), self.real_tokens(rows)
        pairs = zip(states.hidden, masks, strict=True)
        hidden = [h if real is None else h * real.to(h)[:, :, None] for h, real in pairs]
        return States(states.outputs, hidden)

    def resident(self, device: torch.device) -> bool:
        """Whether everything a step needs is on this device."""
        if self.kept is None:
            return False
        tensors = [*self.batch.inputs.values(), *self.kept.hidden, *self.kept.outputs.values()]
        return all(tensor.device == device for tensor in tensors)


def _picked(batch: Batch, rows: Tensor) -> Batch:
    return Batch({name: _take(value, rows) for name, value in batch.inputs.items()}, {}, torch.arange(len(rows)))


def _take(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows.to(values.device)).to(rows.device, non_blocking=True)


def buckets_of(teacher: Observed, sample: Sample, most_tokens: int) -> list[Bucket]:
    """Split the sample by length into a few buckets; the teacher's states of the held-out examples are filled in."""
    device = device_of(teacher.structure.model)
    shapes = SHAPES.get(device.type, SHAPES["cpu"])
    batches = [batch for group in sample.groups for batch in _by_length(group, shapes)]
    held = sum(tensor.nbytes for batch in batches for tensor in batch.inputs.values())
    if device.type != "cuda" or held < RESIDENT * free_bytes(device):
        batches = [batch.to(device) for batch in batches]
    with torch.no_grad():
        firsts = [teacher(_picked(batch, torch.zeros(1, dtype=torch.long, device=device))) for batch in batches]
    place = _place(sum(first.bytes * len(batch) for first, batch in zip(firsts, batches, strict=True)), device)
    buckets = [_bucket(teacher, batch, first, place) for batch, first in zip(batches, firsts, strict=True)]
    for bucket in buckets:
        for rows in bucket.judging.to(device).split(max(1, most_tokens // bucket.tokens)):
            if len(rows):
                bucket.fill(rows)
    return buckets


def _by_length(group: Group, shapes: int) -> list[Batch]:
    lengths = group.tokens
    edges = torch.tensor(_edges(lengths, shapes))
    numbers = torch.bucketize(lengths, edges)
    return [group.batch((numbers == number).nonzero().flatten(), STEP) for number in numbers.unique().tolist()]


def _edges(lengths: Tensor, most: int) -> list[int]:
    """At most `most` lengths to pad to; neighbours are merged greedily by the padding this adds."""
    rounded = (lengths + STEP - 1) // STEP * STEP
    edges, counts = (found.tolist() for found in rounded.unique(return_counts=True))
    while len(edges) > most:
        added = [count * (edges[i + 1] - edges[i]) for i, count in enumerate(counts[:-1])]
        i = added.index(min(added))
        counts[i + 1] += counts[i]
        del edges[i], counts[i]
    found: list[int] = edges
    return found


def _bucket(teacher: Observed, batch: Batch, first: States, place: torch.device | None) -> Bucket:
    """A bucket with memory for the teacher's states, shaped as those of the first example."""

    def room(like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty((len(batch), *like.shape[1:]), dtype=dtype, device=place)

    real: dict[tuple[int, torch.device], Tensor | None] = {}
    places = [(number, hidden.device) for number, hidden in zip(teacher.stacks, first.hidden, strict=True)]
    for (number, there), hidden in zip(places, first.hidden, strict=True):
        if (number, there) not in real:
            mask = teacher.structure.stacks[number].real_tokens(batch, torch.Size((len(batch), hidden.shape[1])))
            real[number, there] = None if mask is None else mask.to(there)
    held_out = batch.held_out()
    return Bucket(
        batch,
        fit=(~held_out).nonzero().flatten(),
        judging=held_out.nonzero().flatten(),
        teacher=teacher,
        real=[real[place] for place in places],
        tokens=max(hidden.shape[1] for hidden in first.hidden),
        logits=max(output.numel() for output in first.outputs.values()),
        kept=None if place is None else States(
            {name: room(output, output.dtype) for name, output in first.outputs.items()},
            [room(hidden, KEPT) for hidden in first.hidden],
        ),
    )  # fmt: skip


def _place(wanted: int, device: torch.device) -> torch.device | None:
    """The device on which `wanted` bytes fit: the given one, the host, or None."""
    if device.type == "cuda" and 2 * wanted < free_bytes(device):
        return device
    return torch.device("cpu") if wanted < HOST_BYTES else None
