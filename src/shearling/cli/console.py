"""What people see: results on stdout, for people or as one JSON object; progress and remarks on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shearling.cli.processes import first, place

if TYPE_CHECKING:
    from shearling.engine.progress import Watcher
    from shearling.report.facts import Facts


def complain(message: str) -> None:
    """One clear message on stderr; which process it comes from, where there are several."""
    from rich.console import Console

    rank, world = place()
    who = f"error in process {rank} of {world}:" if world > 1 else "error:"
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]{who}[/] {_plain(message)}")


def say(message: str, *, quiet: bool = False) -> None:
    """A remark for people, on stderr."""
    if not quiet and first():
        from rich.console import Console

        Console(stderr=True, soft_wrap=True, highlight=False).print(_plain(message))


def emit(value: dict[str, Any]) -> None:
    """The result for machines: exactly one JSON object on stdout."""
    if first():
        json.dump(value, sys.stdout)
        sys.stdout.write("\n")


def warn(message: str) -> None:
    """A remark that should not be missed, on stderr."""
    if first():
        from rich.console import Console

        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[yellow]warning:[/] {_plain(message)}")


def tell(result: str, *, quiet: bool = False) -> None:
    """A result for people, on stdout."""
    if not quiet and first():
        sys.stdout.write(f"{result}\n")


def print_facts(facts: Facts, *, quiet: bool = False) -> None:
    """A report for people, on stdout."""
    if not quiet and first():
        from shearling.report.text import show

        show(facts)


def watching(expected: Mapping[str, float], *, quiet: bool = False) -> AbstractContextManager[Watcher]:
    """Bars in a terminal, one line a finished stage elsewhere, nothing where it shall be quiet.

    expected  the stages to come, and how long each takes compared with the others
    """
    from shearling.workflows.progress import watching as watch

    return watch(not quiet, expected)


def _plain(message: str) -> str:
    from rich.markup import escape

    return escape(message)
