"""Time several things in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """The median of repeated runs and half their interquartile range, in milliseconds."""

    milliseconds: float
    spread: float
    rounds: int

    def to_json(self) -> dict[str, float | int]:
        """Plain data."""
        return asdict(self)


def in_turns(
    runs: Mapping[str, Callable[[], object]], *, rounds: int = 20, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Run each once per round, one after the other, and give the median of each over the rounds."""
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        names = list(runs)
        for name in names if number % 2 == 0 else reversed(names):  # no run always follows the same one
            start = clock()
            runs[name]()
            seen[name].append(1000 * (clock() - start))
    return {name: _timing(values) for name, values in seen.items()}


def _timing(values: list[float]) -> Timing:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0], values[0], values[0])
    return Timing(statistics.median(values), (high - low) / 2, len(values))
