"""Commands in several processes, started by `torchrun` or `accelerate launch`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SHARED = ("prune", "sweep")  # commands that all processes run; rank 0 runs the others alone


def place() -> tuple[int, int]:
    """(rank, world size) from the launcher's environment variables, without importing torch."""
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def first() -> bool:
    """Whether this process prints results."""
    rank, world = place()
    return world == 1 or rank == 0


def idle(arguments: Sequence[str]) -> bool:
    """Whether another process runs the command alone."""
    return not first() and not _shared(arguments)


@contextmanager
def together(arguments: Sequence[str]) -> Iterator[None]:
    """Join the process group, if there are several processes and they share the command."""
    if place()[1] == 1 or not _shared(arguments):
        yield
        return
    from shearling.engine.distributed import joined

    with joined():
        yield


def _shared(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0] in SHARED and not {"-h", "--help"} & set(arguments)
