"""How far a run is: bars in terminals and notebooks, one line a finished stage elsewhere. Always on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shearling.engine.progress import Watcher

logger = logging.getLogger("shearling")
ProgressLike = bool | Watcher

# What a stage takes of a whole run, about, in hundredths: the time left of all is guessed from it. A stage that is not
# listed counts as OTHER once it begins.
SHARES = {"load": 5, "read": 2, "tokenise": 3, "measure": 35, "order": 10, "refit": 40}
OTHER = 3
WHOLE = ("sweep", "max-drop")  # stages that count the points of a longer run: they are the whole


def watcher_of(progress: ProgressLike, watcher: Watcher | None) -> ProgressLike:
    """What to show; `watcher=` is the first edition's word for a callable `progress`."""
    if watcher is None:
        return progress
    warnings.warn("watcher= is now called progress=; it takes the same function.", DeprecationWarning, stacklevel=3)
    return watcher


@contextmanager
def watching(progress: ProgressLike = True) -> Iterator[Watcher]:
    """Show how far the stages of a run are.

    progress  True shows it, False does not; a function is called with (stage, done, total) instead
    """
    if callable(progress):
        yield progress
    elif not progress or os.environ.get("RANK", "0") != "0":  # of several processes, the first one shows progress
        yield lambda stage, done, total: None
    elif _drawable():
        with _bars() as watch:
            yield watch
    else:
        yield _Lines(logger.info if _logged() else _write)


def _drawable() -> bool:
    """Whether bars can be drawn: a terminal, or a notebook; rich comes with the command line, not with the core."""
    if importlib.util.find_spec("rich") is None:
        return False
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal or console.is_jupyter


def _logged() -> bool:
    """Whether the program keeps a log: lines then go there."""
    return bool(logging.getLogger().handlers)


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to stop
        print(line, file=sys.stderr, flush=True)


class _Lines:
    """One line for every stage that is done, and for every point of a sweep."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = self.say = write
        self._began: dict[str, float] = {}
        self._points: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if done < total:
            self._began.setdefault(stage, now)
        began = self._began.get(stage)
        if began is None:  # it was reported as done before
            return
        if stage in WHOLE:
            if 0 < done != self._points.get(stage):
                self._points[stage] = done
                left = (now - began) / done * (total - done)
                self._write(f"{stage}: {done} of {total} points, about {left:.0f} s left")
        elif done >= total:
            self._write(f"{stage}: {now - began:.1f} s")
        if done >= total:
            del self._began[stage]


@contextmanager
def _bars() -> Iterator[Watcher]:
    """A bar for the whole run with the time left, and one for the stage at work."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<14}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        overall = progress.add_task("in all", total=1.0)
        current = progress.add_task("", total=1, visible=False)
        whole = Overall()
        shown = ""

        def watch(stage: str, done: int, total: int) -> None:
            nonlocal shown
            progress.update(overall, completed=whole.after(stage, done, total))
            if stage in WHOLE:
                return
            if stage != shown:
                progress.reset(current, description=stage, visible=True)
                shown = stage
            progress.update(current, completed=done, total=total)

        watch.say = progress.console.print  # type: ignore[attr-defined]
        yield watch


class Overall:
    """How far a whole run is, from how far its stages are."""

    def __init__(self) -> None:
        self._stages: dict[str, float] = {}  # how far each stage is, 0 to 1
        self._counts: float | None = None
        self._furthest = 0.0

    def after(self, stage: str, done: int, total: int) -> float:
        """The share of the run that is done, 0 to 1; it never goes back."""
        share = done / total if total else 1.0
        if stage in WHOLE:
            self._counts = share
        else:
            self._stages[stage] = max(share, self._stages.get(stage, 0.0))
        shares = SHARES | {name: SHARES.get(name, OTHER) for name in self._stages}
        found = sum(shares[name] * value for name, value in self._stages.items()) / sum(shares.values())
        self._furthest = max(self._furthest, found if self._counts is None else self._counts)
        return self._furthest
