"""Which counts are timed; the others lie on straight lines between them."""

from __future__ import annotations

from collections.abc import Iterable

MOST_HEADS = 64
MOST_STEPS = 48  # multiples of 64
STEP = 64  # a tile of most matrix products
FINE = 8  # what vector units and tensor cores like


def counts_to_time(kind: str, units: int, also: Iterable[int] = ()) -> list[int]:
    """Every number of heads; for filters 0, 1, all of them, multiples of 64 and some of 8. `also` is always in it."""
    found = {0, 1, units, *also}
    if kind == "heads":
        step = -(-units // MOST_HEADS) if units else 1
        found |= set(range(0, units + 1, step))
    else:
        tiles = -(-units // STEP)
        found |= set(range(0, units + 1, STEP * max(1, -(-tiles // MOST_STEPS))))
        found |= {8, 16, 24, 32, 40, 48, 56} | set(range(0, min(units, STEP), FINE))
        for part in (0.25, 0.5, 0.75):  # between two tiles: is the way up a slope or a step?
            tile = int(part * units) // STEP * STEP
            found |= {tile + FINE, tile + STEP // 2}
    return sorted(count for count in found if 0 <= count <= units)
