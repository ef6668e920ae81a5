"""The teacher's tensors at its sublayers, kept from one budget to the next where memory allows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from shearling.engine.layerwise import Captured
from shearling.engine.memory import free_bytes
from shearling.sample.batch import Batch

SHARE = 1 / 4  # of the free memory
Key = tuple[int, int, int, int, str]  # stack, layer, part, batch, point


@dataclass
class TeacherStates:
    """What passes of the teacher have shown; `room` is how many bytes more may be kept."""

    room: float
    _kept: dict[Key, Captured] = field(default_factory=dict)
    _held: set[int] = field(default_factory=set)  # memory that is counted already: entries may share it
    _batches: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def on(cls, device: torch.device) -> TeacherStates:
        """None yet, with room for a share of what is free."""
        return cls(SHARE * (free_bytes(device) if device.type == "cuda" else _host_bytes()))

    def start(self, batches: Sequence[Batch]) -> None:
        """A pass over these batches begins; what was kept of other ones is of no use."""
        shapes = [tuple(next(iter(batch.inputs.values())).shape) for batch in batches]
        if shapes != self._batches:
            self._kept.clear()
            self._held.clear()
            self._batches = shapes

    def get(self, key: Key) -> Captured | None:
        """What was captured there."""
        return self._kept.get(key)

    def put(self, key: Key, captured: Captured) -> None:
        """Keep what a repair reads of the teacher, if there is room."""
        kept = replace(captured, h=None)
        tensors = [t.untyped_storage() for t in (kept.z, kept.x, kept.o, kept.hidden) if t is not None]
        new = {storage.data_ptr(): storage.nbytes() for storage in tensors if storage.data_ptr() not in self._held}
        if sum(new.values()) <= self.room:
            self.room -= sum(new.values())
            self._held |= new.keys()
            self._kept[key] = kept


def _host_bytes() -> int:
    """Memory that is free on the host, as far as the system says; 0 where it does not."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
