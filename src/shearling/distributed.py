"""Several processes, one result: every rank sums over its share of the sample, and the sums are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor


def rank_and_world() -> tuple[int, int]:
    """This process's number, and how many there are; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over all processes."""
    if rank_and_world()[1] > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def on_first(work: Callable[[], object]) -> None:
    """Do something on one process alone, such as writing files; the others wait, and fail with it."""
    rank, world = rank_and_world()
    if world == 1:
        work()
        return
    failed: list[Exception | None] = [None]
    if rank == 0:
        try:
            work()
        except Exception as error:
            failed[0] = error
    dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise failed[0]
