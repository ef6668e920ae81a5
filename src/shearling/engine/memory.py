"""Memory: batches that fit, and trying again with smaller ones when they do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from shearling.errors import ShearlingError
from shearling.sample.sample import Sample

logger = logging.getLogger("shearling")
T = TypeVar("T")
MAX_TOKENS = {"cpu": 1024, "cuda": 24576}  # per batch, forward and backward
MAX_TOKENS_FORWARD = {"cpu": 2048, "cuda": 49152}


def bounded(sample: Sample, device: torch.device, *, backward: bool = True) -> Sample:
    """The sample in batches whose activations fit: large ones keep a GPU busy, small ones suit a CPU's caches."""
    most = MAX_TOKENS if backward else MAX_TOKENS_FORWARD
    return sample.capped(most.get(device.type, most["cpu"]))


def with_halving(stage: Callable[[Sample], T], sample: Sample, *, alone: bool = True) -> T:
    """Run a stage; when memory runs out, run it again with batches half as large, and say so.

    A stage in which several processes wait for each other's sums cannot be run again by one of them.
    """
    while True:
        try:
            return stage(sample)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            if not alone:
                raise ShearlingError(
                    f"Memory ran out with batches of {sample.largest}, and the other processes cannot start over with "
                    "this one; give a smaller --batch-size."
                ) from error
            largest = sample.largest
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            sample = sample.halved()
            logger.warning("Out of memory with batches of %d; going on with %d.", largest, sample.largest)


def _out_of_memory(error: Exception) -> bool:
    """A GPU has an error class of its own for this; on a CPU, torch only has words."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
