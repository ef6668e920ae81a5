"""Made-up tables: nothing is timed, so what follows from them is known."""

from __future__ import annotations

import numpy as np

from shearling.latency.table import Entry, Table, shapes_in
from shearling.models.structure import Structure

HEADS = {0: 0.0, 1: 2.0, 2: 3.0, 3: 3.0, 4: 5.0}
FILTERS = {0: 0.0, 1: 1.0, 8: 1.0, 16: 3.0, 32: 6.0, 48: 9.0}


def table_of(
    structure: Structure,
    *,
    heads: dict[int, float] = HEADS,
    filters: dict[int, float] = FILTERS,
    fixed: float = 4.0,
    launch: bool = False,
    device: str = "a slow thing",
) -> Table:
    """A table of milliseconds for a model whose layers are alike; `launch`: every sublayer takes the host 4 ms."""
    entries = []
    for number, times in ((0, heads), (1, filters)):
        seconds = [1e-3 * t for t in times.values()]
        host = [0.0] + [4e-3] * (len(times) - 1) if launch else None
        entries.append(Entry(*shapes_in(structure)[number], list(times), seconds, [0.0] * len(times), host))
    layers = len(structure.sizes)
    return Table(
        device=device,
        device_type="cpu",
        model_type=structure.model.config.model_type,
        layers=structure.sizes,
        batch_size=2,
        seq_len=8,
        dtype="float32",
        threads=1,
        whole=1e-3 * (fixed + layers * float(np.sum([list(heads.values())[-1], list(filters.values())[-1]]))),
        fixed=1e-3 * fixed,
        whole_launch=1e-3 * (1 + 8 * layers) if launch else None,
        fixed_launch=1e-3 if launch else None,
        sublayers=entries,
    )
