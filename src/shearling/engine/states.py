"""A model's outputs and its layers' hidden states for some examples; the teacher's are kept where they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shearling.engine.distance import compared
from shearling.engine.hooks import by_example, run, split_call
from shearling.engine.pools import Pool
from shearling.engine.precision import Precision
from shearling.models.structure import Structure
from shearling.sample.sample import Batch

KEPT = torch.bfloat16  # hidden states of the teacher: the range of float32, and errors far below the student's
HOST_BYTES = 4 * 2**30  # of the teacher's states, at most, on the host


@dataclass
class States:
    """Outputs as `compared` picks them, and the hidden states of every stack, its layers side by side."""

    outputs: dict[str, Tensor]
    hidden: dict[int, Tensor]  # by the stack's number: [B, layers, S, D]

    @property
    def bytes(self) -> int:
        """Their size once kept."""
        return sum(2 * h.numel() for h in self.hidden.values()) + sum(o.nbytes for o in self.outputs.values())


class Watcher:
    """Runs a model and catches what its layers put out, inside `with`. No gradient goes below a stack's first layer."""

    def __init__(self, structure: Structure, precision: Precision) -> None:
        self.structure, self.precision = structure, precision
        self._seen: list[tuple[int, Tensor]] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Watcher:
        for number, pile in enumerate(self.structure.stacks):
            first = pile.layers[0].register_forward_pre_hook(self._detach(number), with_kwargs=True)
            self._hooks += [first, *(layer.register_forward_hook(self._catch(number)) for layer in pile.layers)]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __call__(self, batch: Batch) -> States:
        """One forward pass."""
        self._seen.clear()
        model = self.structure.model
        inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in batch.inputs.items()}
        batch = Batch(inputs, batch.labels, batch.indices)
        outputs = run(model, batch, self.precision)
        layers: dict[int, list[Tensor]] = {}
        for number, hidden in self._seen:
            layers.setdefault(number, []).append(by_example(hidden, len(batch)).to(batch.indices.device))
        self._seen.clear()
        return States(compared(outputs, batch), {number: torch.stack(found, 1) for number, found in layers.items()})

    def _detach(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if any(seen == number for seen, _ in self._seen):  # layers that share weights come by here again
                return args, kwargs
            hidden, rest, named = split_call(args, kwargs)
            return (hidden.detach(), *rest), named

        return hook

    def _catch(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._seen.append((number, output if isinstance(output, Tensor) else output[0]))

        return hook


@dataclass
class Targets:
    """The teacher's states for the examples of one pool: kept from one pass, or run anew for every batch."""

    pool: Pool
    real: list[Tensor | None]  # per stack: [n, S] bool, which tokens are not padding; None when all are
    kept: States | None
    teacher: Watcher

    def pick(self, rows: Tensor, batch: Batch) -> States:
        """The states of the examples at these places, on the pool's device."""
        if self.kept is None:
            with torch.no_grad():
                return self.teacher(batch)
        outputs, hidden = self.kept.outputs, self.kept.hidden
        return States({k: _take(v, rows) for k, v in outputs.items()}, {k: _take(h, rows) for k, h in hidden.items()})

    def on(self, device: torch.device) -> bool:
        """Whether everything a step needs is on this device already."""
        return self.kept is not None and all(h.device == device for h in self.kept.hidden.values())

    def real_tokens(self, stack: int, rows: Tensor) -> Tensor | None:
        """[B, S] bool of the examples at these places."""
        real = self.real[stack]
        return None if real is None else real.index_select(0, rows.to(real.device))


def _take(values: Tensor, rows: Tensor) -> Tensor:
    picked = values.index_select(0, rows.to(values.device))
    return picked.to(rows.device, non_blocking=True)


def targets_of(teacher: Watcher, pools: Sequence[Pool], most_tokens: int, *, keep: bool | None = None) -> list[Targets]:
    """Run the teacher once over all examples and keep its states, on the device or on the host, if there is room.

    keep  None decides by bytes; False runs the teacher again for every batch
    """
    found: list[Targets] = []
    with torch.no_grad():
        firsts = [teacher(pool.pick(torch.zeros(1, dtype=torch.long, device=_device(pool)))) for pool in pools]
        wanted = sum(first.bytes * len(pool.examples) for first, pool in zip(firsts, pools, strict=True))
        place = _place(wanted, _device(pools[0])) if keep is not False else None
        for pool, first in zip(pools, firsts, strict=True):
            kept = None if place is None else _kept(teacher, pool, first, max(1, most_tokens // pool.tokens), place)
            found.append(Targets(pool, _real(teacher.structure, pool, first), kept, teacher))
    return found


def _device(pool: Pool) -> torch.device:
    return next(iter(pool.examples.inputs.values())).device


def _place(wanted: int, device: torch.device) -> torch.device | None:
    """Where so many bytes fit: the device, the host, or nowhere."""
    if device.type == "cuda" and 2 * wanted < torch.cuda.mem_get_info(device)[0]:
        return device
    return torch.device("cpu") if wanted < HOST_BYTES else None


def _kept(teacher: Watcher, pool: Pool, first: States, size: int, place: torch.device) -> States:
    count = len(pool.examples)

    def room(like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty((count, *like.shape[1:]), dtype=dtype, device=place)

    hidden = {number: room(value, KEPT) for number, value in first.hidden.items()}
    outputs = {name: room(value, value.dtype) for name, value in first.outputs.items()}
    for rows in pool.places.split(size):
        states = teacher(pool.pick(rows.to(_device(pool))))
        span = slice(int(rows[0]), int(rows[-1]) + 1)
        for number, value in states.hidden.items():
            hidden[number][span].copy_(value)
        for name, value in states.outputs.items():
            outputs[name][span].copy_(value)
    return States(outputs, hidden)


def _real(structure: Structure, pool: Pool, first: States) -> list[Tensor | None]:
    shapes = {number: torch.Size((len(pool.examples), h.shape[2])) for number, h in first.hidden.items()}
    return [
        stack.real_tokens(pool.examples, shapes[number]) if number in shapes else None
        for number, stack in enumerate(structure.stacks)
    ]
