"""Several processes, one result: every rank sums over its share of the sample, and the sums are added up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shearling.errors import InputError, ShearlingError

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """This process's number, and how many there are; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over all processes."""
    if rank_and_world()[1] > 1:
        with _lost_ones_told():
            for tensor in tensors:
                dist.all_reduce(tensor)


def dealt(sizes: Sequence[int]) -> list[int]:
    """This process's share of independent pieces of work, dealt out from the largest on."""
    rank, world = rank_and_world()
    return sorted(sorted(range(len(sizes)), key=lambda i: -sizes[i])[rank::world])


def gathered(mine: dict[int, T]) -> dict[int, T]:
    """The results of all processes."""
    world = rank_and_world()[1]
    if world == 1:
        return mine
    everyones: list[dict[int, T]] = [{} for _ in range(world)]
    with _lost_ones_told():
        dist.all_gather_object(everyones, mine)
    return {number: result for results in everyones for number, result in results.items()}


def on_first(work: Callable[[], object]) -> None:
    """Do something on one process alone, such as writing files; the others wait, and fail with it.

    It is done once all have come this far: a process that died before leaves nothing written.
    """
    rank, world = rank_and_world()
    if world == 1:
        work()
        return
    failed: list[Exception | None] = [None]
    with _lost_ones_told():
        dist.barrier()
    if rank == 0:
        try:
            work()
        except Exception as error:
            failed[0] = error
    with _lost_ones_told():
        dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise failed[0]


@contextmanager
def joined() -> Iterator[None]:
    """Work together with the processes that `torchrun` or `accelerate launch` started beside this one."""
    if dist.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise InputError(f"There are {torch.cuda.device_count()} GPUs here; start one process for each, not more.")
        torch.cuda.set_device(local)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"RANK and WORLD_SIZE are set, but the processes do not find each other: {error}. "
            "Start them with torchrun or accelerate launch, or unset these variables."
        ) from None
    try:
        yield
        with _lost_ones_told():
            dist.barrier()  # nobody hangs up while another is still on the line
    finally:
        dist.destroy_process_group()


@contextmanager
def _lost_ones_told() -> Iterator[None]:
    """A process that died shows as a broken connection; say what it means."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ShearlingError(
            f"Another process of this run ended or cannot be reached; its own message says why. Nothing was left "
            f"half-written. ({reason})"
        ) from error
