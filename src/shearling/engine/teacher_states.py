"""Cache of the teacher's tensors at its sublayers, reused from budget to budget where memory allows."""

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
    """Captured tensors of the teacher; `room` is the number of bytes that may still be stored."""

    room: float
    _kept: dict[Key, Captured] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)  # bytes by storage; entries may share them
    _batches: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def on(cls, device: torch.device) -> TeacherStates:
        """An empty cache with room for a share of the free memory."""
        return cls(SHARE * (free_bytes(device) if device.type == "cuda" else _host_bytes()))

    def start(self, batches: Sequence[Batch]) -> None:
        """Begin a pass over these batches; entries of other batches are dropped."""
        shapes = [tuple(next(iter(batch.inputs.values())).shape) for batch in batches]
        if shapes != self._batches:
            self._kept.clear()
            self.room += sum(self._held.values())
            self._held.clear()
            self._batches = shapes

    def get(self, key: Key) -> Captured | None:
        """The captured tensors, or None."""
        return self._kept.get(key)

    def put(self, key: Key, captured: Captured) -> None:
        """Store what a repair reads from the teacher, if there is room."""
        kept = replace(captured, h=None)
        tensors = [t.untyped_storage() for t in (kept.z, kept.x, kept.o, kept.hidden) if t is not None]
        new = {storage.data_ptr(): storage.nbytes() for storage in tensors if storage.data_ptr() not in self._held}
        if sum(new.values()) <= self.room:
            self.room -= sum(new.values())
            self._held |= new
            self._kept[key] = kept


def _host_bytes() -> int:
    """Free memory of the host; 0 where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
