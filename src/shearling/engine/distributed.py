"""Several processes: every rank sums over its shard of the sample, and the sums are all-reduced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shearling.errors import InputError, ShearlingError

T = TypeVar("T")
_guarded: ContextVar[bool] = ContextVar("guarded", default=False)  # inside `fail_together`


def _let_go_of_the_group() -> None:
    """Take the process group out of the default arguments in which `torch.distributed.nn.functional` keeps it.

    transformers imports that module; if a group exists by then, it outlives `destroy_process_group`, and with it gloo's
    threads. One of them that frees a tensor while Python shuts down aborts the process. Without a group at the time of
    the import these defaults are None, which means the group of the call.
    """
    with suppress(ImportError):  # torch without torch.distributed
        from torch.distributed.nn import functional

        for function in vars(functional).values():
            if isinstance(function, FunctionType):
                values = function.__defaults__ or ()
                function.__defaults__ = tuple(None if isinstance(v, dist.ProcessGroup) else v for v in values) or None


_let_go_of_the_group()


class _PeerFailed(ShearlingError):
    """Another process failed or exited; all processes know."""


def rank_and_world() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def add_up(tensors: Iterable[Tensor]) -> None:
    """All-reduce (sum) each tensor in place."""
    if rank_and_world()[1] == 1:
        return
    agree()
    for tensor in tensors:
        here = tensor.to(_meeting_place(tensor.device))  # no copy if its device can be reduced
        with _connection_errors_explained():
            dist.all_reduce(here)
        if here is not tensor:
            tensor.copy_(here)


def dealt(sizes: Sequence[int]) -> list[int]:
    """This process's share of independent tasks, assigned round-robin by decreasing size."""
    rank, world = rank_and_world()
    return sorted(sorted(range(len(sizes)), key=lambda i: -sizes[i])[rank::world])


def gathered(mine: dict[int, T]) -> dict[int, T]:
    """Merge the results of all processes."""
    world = rank_and_world()[1]
    if world == 1:
        return mine
    agree()
    found: list[dict[int, T]] = [{} for _ in range(world)]
    with _connection_errors_explained():
        dist.all_gather_object(found, mine)
    return {number: result for results in found for number, result in results.items()}


def on_first(work: Callable[[], T]) -> T:
    """Run something on rank 0 only, such as timing or writing files; all ranks get its result or its error.

    It runs once all ranks have arrived, so that nothing is written if a process died before.
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
    """If one process fails, make the others fail instead of waiting for it; usable as a decorator.

    Every collective begins with `agree`. A process that fails inside this scope takes part in one more `agree`, which
    tells the others; so does a process that reaches the end. Nested scopes do nothing.
    """
    if _guarded.get() or rank_and_world()[1] == 1:
        yield
        return
    token = _guarded.set(True)
    try:
        yield
        agree()
    except _PeerFailed:  # the others know, or have exited
        raise
    except Exception as error:
        with suppress(ShearlingError):
            agree(error)
        raise
    finally:
        _guarded.reset(token)


def agree(error: Exception | None = None) -> None:
    """Barrier that raises if any process has failed, with its message."""
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
    raise _PeerFailed(f"Process {who} of {world} failed, so this one stops too: {message[0]}")


@contextmanager
def joined() -> Iterator[None]:
    """Join the process group that `torchrun` or `accelerate launch` has set up."""
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
    """Turn the connection errors of a process that died into a readable message."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise _PeerFailed(
            f"Another process of this run ended or cannot be reached; its own message says why. Nothing was left "
            f"half-written. ({reason})"
        ) from error


def _meeting_place(device: torch.device) -> torch.device:
    """The device on which a tensor can be reduced: NCCL does not support CPU tensors."""
    if device.type == "cpu" and "cpu" not in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _portable(error: Exception) -> Exception:
    """The error itself, or one with the same message where another process might not be able to unpickle it."""
    if type(error).__module__ in ("builtins", "shearling.errors"):
        return error
    return ShearlingError(f"{type(error).__name__}: {error}")
