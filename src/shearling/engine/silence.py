"""Silence the messages and progress bars of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers(*, notes: bool = False) -> Iterator[None]:
    """Disable progress bars and, unless `notes`, messages below errors; restored afterwards."""
    from transformers.utils import logging as noisy

    level, bars = noisy.get_verbosity(), noisy.is_progress_bar_enabled()
    if not notes:
        noisy.set_verbosity_error()
    noisy.disable_progress_bar()
    try:
        yield
    finally:
        noisy.set_verbosity(level)
        if bars:
            noisy.enable_progress_bar()
