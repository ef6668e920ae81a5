"""Stages of a run: their durations, and the progress of the current one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

logger = logging.getLogger("shearling")
Progress = Callable[[int, int], None]  # (done, total)
Watcher = Callable[[str, int, int], None]  # (stage, done, total)


def silent(done: int, total: int) -> None:
    """Ignore progress."""


def _wait_for_gpus() -> None:
    """Synchronise all GPUs in use; a model may be on several."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            if torch.cuda.memory_allocated(number):
                torch.cuda.synchronize(number)


class Stages:
    """Times stages by name; repeated names accumulate."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._watcher = watcher

    def say(self, words: str) -> None:
        """Show a message beside the progress bars, or log it if there are none."""
        getattr(self._watcher, "say", logger.info)(words)

    @contextmanager
    def __call__(self, name: str) -> Iterator[Progress]:
        """`with stages("search") as progress:`."""

        def progress(done: int, total: int) -> None:
            if self._watcher is not None:
                self._watcher(name, done, total)

        start = time.perf_counter()
        progress(0, 1)
        yield progress
        _wait_for_gpus()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        progress(1, 1)
