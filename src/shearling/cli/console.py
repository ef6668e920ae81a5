"""What people see: progress and words on stderr, one JSON object on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shearling.cli.processes import first, place

if TYPE_CHECKING:
    from shearling.engine.progress import Watcher


def complain(message: str) -> None:
    """One clear message on stderr; which process it comes from, where there are several."""
    from rich.console import Console

    rank, world = place()
    who = f"error in process {rank} of {world}:" if world > 1 else "error:"
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]{who}[/] {_plain(message)}")


def say(message: str, *, quiet: bool = False) -> None:
    """Words for people, on stderr."""
    if not quiet and first():
        from rich.console import Console

        Console(stderr=True, soft_wrap=True, highlight=False).print(_plain(message))


def emit(value: dict[str, Any]) -> None:
    """The result for machines: exactly one JSON object on stdout."""
    if first():
        json.dump(value, sys.stdout)
        sys.stdout.write("\n")


@contextmanager
def watching(*, quiet: bool = False) -> Iterator[Watcher]:
    """A bar per stage, with the time left."""
    if quiet or not first():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<14}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def watch(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage)
            progress.update(bars[stage], completed=done, total=total)

        yield watch


def _plain(message: str) -> str:
    from rich.markup import escape

    return escape(message)
