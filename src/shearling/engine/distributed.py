"""Several processes, one result: every rank sums over its share of the sample, and the sums are added up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shearling.errors import InputError, ShearlingError

T = TypeVar("T")
_guarded: ContextVar[bool] = ContextVar("guarded", default=False)  # inside `fail_together`


class _Told(ShearlingError):
    """Another process failed or ended; the others know of it already."""


def rank_and_world() -> tuple[int, int]:
    """This process's number, and how many there are; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over all processes."""
    if rank_and_world()[1] == 1:
        return
    agree()
    with _connection_errors_explained():
        for tensor in tensors:
            here = tensor.to(_meeting_place(tensor.device))  # the tensor itself where its device can be summed over
            dist.all_reduce(here)
            if here is not tensor:
                tensor.copy_(here)


def dealt(sizes: Sequence[int]) -> list[int]:
    """This process's share of independent pieces of work, dealt out from the largest on."""
    rank, world = rank_and_world()
    return sorted(sorted(range(len(sizes)), key=lambda i: -sizes[i])[rank::world])


def gathered(mine: dict[int, T]) -> dict[int, T]:
    """The results of all processes."""
    world = rank_and_world()[1]
    if world == 1:
        return mine
    agree()
    found: list[dict[int, T]] = [{} for _ in range(world)]
    with _connection_errors_explained():
        dist.all_gather_object(found, mine)
    return {number: result for results in found for number, result in results.items()}


def on_first(work: Callable[[], T]) -> T:
    """Do something on one process alone, such as timing or writing files: all get its result, or fail with it.

    It is done once all have come this far: a process that died before leaves nothing written.
    """
    rank, world = rank_and_world()
    if world == 1:
        return work()
    agree()
    outcome: list[Any] = [None, None]  # result, error
    if rank == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = _portable(error)
    with _connection_errors_explained():
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


@contextmanager
def fail_together() -> Iterator[None]:
    """Where one process fails, have the others fail too instead of waiting for it; usable as a decorator.

    Every exchange between the processes begins with `agree`. A process that fails in here takes part in one more
    agreement, which tells the others; so does one that comes to the end. Inside another such scope this one does
    nothing: the outermost one tells.
    """
    if _guarded.get() or rank_and_world()[1] == 1:
        yield
        return
    token = _guarded.set(True)
    try:
        yield
        agree()
    except _Told:  # the others know, or are gone
        raise
    except Exception as error:
        with suppress(ShearlingError):
            agree(error)
        raise
    finally:
        _guarded.reset(token)


def agree(error: Exception | None = None) -> None:
    """Wait for all processes; raises where one of them has failed, with its message."""
    rank, world = rank_and_world()
    if world == 1:
        return
    with _connection_errors_explained():
        failed = torch.zeros(world, dtype=torch.int32, device=_meeting_place(torch.device("cpu")))
        failed[rank] = error is not None
        dist.all_reduce(failed)
        if not failed.any():
            return
        who = int(failed.nonzero()[0])
        message = [None if error is None else f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(message, src=who)
    raise _Told(f"Process {who} of {world} failed, and this one ends with it: {message[0]}")


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
        with fail_together():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _connection_errors_explained() -> Iterator[None]:
    """Explain the broken connection that a process leaves behind when it dies."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise _Told(
            f"Another process of this run ended or cannot be reached; its own message says why. Nothing was left "
            f"half-written. ({reason})"
        ) from error


def _meeting_place(device: torch.device) -> torch.device:
    """Where a tensor of this device can be summed over the processes: NCCL alone does not serve the CPU."""
    if device.type == "cpu" and "cpu" not in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _portable(error: Exception) -> Exception:
    """The error itself, or, where another process might not be able to rebuild it, one that says the same."""
    if type(error).__module__ in ("builtins", "shearling.errors"):
        return error
    return ShearlingError(f"{type(error).__name__}: {error}")
