"""Memory: batches that fit the device, and retrying with smaller ones if they do not."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from shearling.engine.distributed import rank_and_world
from shearling.engine.precision import Precision, has_bfloat16
from shearling.errors import DataError, ShearlingError
from shearling.sample.batch import Batch
from shearling.sample.sample import Sample

logger = logging.getLogger("shearling")
# Tokens per batch: large to utilise a GPU, small to stay in a CPU's caches.
BACKWARD_TOKENS = {"cpu": 1024, "cuda": 10240}  # forward and backward, in float32
FORWARD_TOKENS = {"cpu": 2048, "cuda": 24576}
LENGTH_MULTIPLE = {"cuda": 8}  # attention kernels are slow for other lengths
LOGITS = {"cpu": 2**26, "cuda": 2**29}  # per batch; a loss needs several times their memory
RESIDENT = 1 / 8  # share of the free GPU memory that all batches together may take


def logits_per_token(model: Any) -> int:
    """Logits per token: the vocabulary size of a language model, 0 for other heads."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # not a language model
        return 0
    return int(head.weight.shape[0]) if head is not None and hasattr(head, "weight") else 0


def tokens_at_once(device: torch.device, *, backward: bool, precision: Precision = "float32", logits: int = 0) -> int:
    """Tokens per batch in a pass on a device, before memory has run out."""
    most = BACKWARD_TOKENS if backward else FORWARD_TOKENS
    tokens = most.get(device.type, most["cpu"])
    if precision == "bfloat16" and device.type == "cuda" and has_bfloat16(device):
        tokens *= 2  # activations take half the memory
    return min(tokens, LOGITS.get(device.type, LOGITS["cpu"]) // logits) if logits else tokens


def cut_batches(
    sample: Sample,
    device: torch.device,
    *,
    backward: bool,
    precision: Precision = "float32",
    shrink: int = 1,
    logits: int = 0,
) -> list[Batch]:
    """Split the sample into batches for one pass on a device, `shrink` times smaller than usual.

    logits  logits per token, which limit the batch size
    """
    tokens = tokens_at_once(device, backward=backward, precision=precision, logits=logits)
    batches = sample.cut(max(tokens // shrink, 1), multiple=LENGTH_MULTIPLE.get(device.type, 1))
    held = sum(t.nbytes for batch in batches for t in (*batch.inputs.values(), *batch.labels.values()))
    if device.type == "cuda" and held > RESIDENT * free_bytes(device):
        return batches  # moved one by one when they are run
    return [batch.to(device) for batch in batches]  # moved in advance: copies between kernels would synchronise


def batches_that_fit(
    sample: Sample,
    device: torch.device,
    *,
    backward: bool,
    precision: Precision = "float32",
    sums: bool = False,
    logits: int = 0,
) -> Iterator[AbstractContextManager[list[Batch]]]:
    """Attempts at a stage over the sample; if memory runs out, the next has batches of half the size.

        for attempt in batches_that_fit(sample, device, backward=True):
            with attempt as batches:
                found = stage(batches)

    sums  the stage has collectives, so that a single process cannot repeat it
    """
    shrink, done = 1, False

    @contextmanager
    def attempt() -> Iterator[list[Batch]]:
        nonlocal done, shrink
        batches = cut_batches(sample, device, backward=backward, precision=precision, shrink=shrink, logits=logits)
        largest = max(map(len, batches))
        try:
            yield batches
            done = True
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if sums and rank_and_world()[1] > 1:
                raise ShearlingError(
                    f"Memory ran out with batches of {largest}, and the other processes cannot start over with "
                    "this one; use shorter texts (max_length), fewer processes on this machine, or a larger device."
                ) from error
            if largest == 1:
                raise DataError(
                    "A single example does not fit into memory; cut texts with a shorter max_length (--max-length)."
                ) from error
            shrink *= 2
            logger.warning("Out of memory with batches of %d; going on with half of that.", largest)

    while not done:
        if shrink > 1 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield attempt()


def give_back(device: torch.device) -> None:
    """Return freed memory of a CPU's heap to the operating system; glibc would keep it, between what is in use."""
    if device.type == "cpu":
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; on a CPU torch raises only a RuntimeError with a message."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def free_bytes(device: torch.device) -> int:
    """Free GPU memory, including memory that this process's allocator has reserved but does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
