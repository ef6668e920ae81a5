"""Progress of a run, on stderr: bars in terminals and notebooks, else one line per finished stage."""

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

READING = {"load": 5.0, "read": 2.0, "tokenise": 3.0}  # relative to about 90 for the work itself
SCORED = ("evaluate dense", "evaluate pruned")
OTHER = 3.0  # weight of an unexpected stage
WHOLE = ("sweep", "max-drop")  # stages that count the points of a longer run and contain other stages
Expected = Mapping[str, float]  # the stages of a run with their approximate relative durations


def stages_of(method: Method, *, scored: bool = False, drop: bool = False) -> dict[str, float]:
    """The expected stages of pruning; `drop` is the search for the smallest model within an allowed loss."""
    if drop:
        return READING | {SCORED[0]: 5.0, "max-drop": 85.0}
    polish = {} if method.polish == "off" else {"polish": 60.0}
    before, after = ({stage: 20.0} if scored else {} for stage in SCORED)
    return READING | before | dict(method.stages) | polish | {"check": 5.0} | after


def quiet(stage: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def step(watcher: Watcher, stage: str) -> Iterator[None]:
    """A stage that only reports its beginning and end."""
    watcher(stage, 0, 1)
    yield
    watcher(stage, 1, 1)


@contextmanager
def watching(progress: ProgressLike = True, expected: Expected | None = None) -> Iterator[Watcher]:
    """Show the progress of a run.

    progress  True or False, or a callback (stage, done, total)
    expected  the stages to come, for estimating the remaining time
    """
    if callable(progress):
        yield progress
    elif not progress or os.environ.get("RANK", "0") != "0":  # only rank 0 shows progress
        yield quiet
    elif _drawable():
        with _bars(expected or {}) as watch:
            yield watch
    else:
        yield _Lines(logger.info if _logged() else _write)


def _drawable() -> bool:
    """Whether bars can be drawn: in a terminal or notebook, with rich installed."""
    if importlib.util.find_spec("rich") is None:
        return False
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal or console.is_jupyter


def _logged() -> bool:
    """Whether logging is configured; lines are then logged."""
    return bool(logging.getLogger().handlers)


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(line, file=sys.stderr, flush=True)


class _Lines:
    """One line per finished stage, and per point of a sweep."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = self.say = write
        self._began: dict[str, float] = {}
        self._points: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if done < total:
            self._began.setdefault(stage, now)
        began = self._began.get(stage)
        if began is None:  # already reported as done
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
    """A bar for the whole run with the remaining time, and one for the current stage."""
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
    """The progress of a whole run, from that of its stages."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._stages: dict[str, float] = {}  # progress of each stage, 0 to 1
        self._furthest = 0.0

    def after(self, stage: str, done: int, total: int) -> float:
        """Progress of the run, 0 to 1; never decreases."""
        share = done / total if total else 1.0
        self._stages[stage] = max(share, self._stages.get(stage, 0.0))
        other = 0.0 if any(name in self._expected or name in self._stages for name in WHOLE) else OTHER
        takes = dict.fromkeys(self._stages, other) | {name: 1.0 for name in WHOLE if name in self._stages}
        takes |= self._expected
        found = sum(takes[name] * value for name, value in self._stages.items())
        self._furthest = max(self._furthest, found / (sum(takes.values()) or 1.0))
        return self._furthest
