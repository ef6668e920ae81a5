"""How far a run is: bars in terminals and notebooks, one line a finished stage elsewhere. Always on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shearling.engine.progress import Watcher
from shearling.methods import Method

logger = logging.getLogger("shearling")
ProgressLike = bool | Watcher

READING = {"load": 5.0, "read": 2.0, "tokenise": 3.0}  # beside about 90 for the work itself
SCORED = ("evaluate dense", "evaluate pruned")
OTHER = 3.0  # a stage that was not expected, once it begins
WHOLE = ("sweep", "max-drop")  # stages that count the points of a longer run; those that go on meanwhile are part of it
Expected = Mapping[str, float]  # the stages of a run, and how long each takes compared with the others, about


def stages_of(method: Method, *, scored: bool = False, drop: bool = False) -> dict[str, float]:
    """The stages of pruning; `drop` is the search for the smallest model within a loss."""
    if drop:
        return READING | {SCORED[0]: 5.0, "max-drop": 85.0}
    polish = {} if method.polish == "off" else {"polish": 60.0}
    return READING | dict(method.stages) | polish | {"check": 5.0} | (dict.fromkeys(SCORED, 20.0) if scored else {})


def quiet(stage: str, done: int, total: int) -> None:
    """A watcher that shows nothing."""


@contextmanager
def step(watcher: Watcher, stage: str) -> Iterator[None]:
    """A stage with nothing to tell between its beginning and its end."""
    watcher(stage, 0, 1)
    yield
    watcher(stage, 1, 1)


@contextmanager
def watching(progress: ProgressLike = True, expected: Expected | None = None) -> Iterator[Watcher]:
    """Show how far the stages of a run are.

    progress  True shows it, False does not; a function is called with (stage, done, total) instead
    expected  the stages to come: the time left of the whole run is guessed from them
    """
    if callable(progress):
        yield progress
    elif not progress or os.environ.get("RANK", "0") != "0":  # of several processes, the first one shows progress
        yield quiet
    elif _drawable():
        with _bars(expected or {}) as watch:
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
def _bars(expected: Expected) -> Iterator[Watcher]:
    """A bar for the whole run with the time left, and one for the stage at work."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<14}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        overall = progress.add_task("in all", total=1.0)
        current = progress.add_task("", total=1, visible=False)
        whole = Overall(expected)
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

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._stages: dict[str, float] = {}  # how far each stage is, 0 to 1
        self._furthest = 0.0

    def after(self, stage: str, done: int, total: int) -> float:
        """The share of the run that is done, 0 to 1; it never goes back."""
        share = done / total if total else 1.0
        self._stages[stage] = max(share, self._stages.get(stage, 0.0))
        other = 0.0 if any(name in self._expected or name in self._stages for name in WHOLE) else OTHER
        takes = dict.fromkeys(self._stages, other) | {name: 1.0 for name in WHOLE if name in self._stages}
        takes |= self._expected
        found = sum(takes[name] * value for name, value in self._stages.items())
        self._furthest = max(self._furthest, found / (sum(takes.values()) or 1.0))
        return self._furthest
