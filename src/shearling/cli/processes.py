"""One of several processes that `torchrun` or `accelerate launch` started: what this one has to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SHARED = ("prune", "sweep")  # commands whose work the processes share; the first process does the others alone


def place() -> tuple[int, int]:
    """This process's number and how many there are, as the launcher says; no torch is needed to know."""
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def first() -> bool:
    """Only the first process prints results."""
    rank, world = place()
    return world == 1 or rank == 0


def idle(arguments: Sequence[str]) -> bool:
    """There is nothing to do here: the command is not one to share, and another process does it."""
    return not first() and not _shared(arguments)


@contextmanager
def together(arguments: Sequence[str]) -> Iterator[None]:
    """Have the processes find each other, where there are several and the command is one to share."""
    if place()[1] == 1 or not _shared(arguments):
        yield
        return
    from shearling.engine.distributed import joined

    with joined():
        yield


def _shared(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0] in SHARED and not {"-h", "--help"} & set(arguments)
