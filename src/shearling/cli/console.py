"""Output: results on stdout, as text or one JSON object; progress and messages on stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from shearling.cli.processes import first, place

if TYPE_CHECKING:
    from shearling.report.facts import Facts


def complain(message: str) -> None:
    """Print an error to stderr, with the process number if there are several."""
    rank, world = place()
    _remark(message, f"[bold red]error in process {rank} of {world}:[/] " if world > 1 else "[bold red]error:[/] ")


def say(message: str, *, quiet: bool = False) -> None:
    """Print a message to stderr."""
    if not quiet and first():
        _remark(message)


def warn(message: str) -> None:
    """Print a warning to stderr."""
    if first():
        _remark(message, "[yellow]warning:[/] ")


def _remark(message: str, before: str = "") -> None:
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True, soft_wrap=True, highlight=False).print(f"{before}{escape(message)}")


def emit(value: dict[str, Any]) -> None:
    """Print the result as one JSON object to stdout."""
    if first():
        json.dump(value, sys.stdout)
        sys.stdout.write("\n")


def tell(result: str, *, quiet: bool = False) -> None:
    """Print a result as text to stdout."""
    if not quiet and first():
        sys.stdout.write(f"{result}\n")


def print_facts(facts: Facts, *, quiet: bool = False) -> None:
    """Print a report to stdout."""
    if not quiet and first():
        from shearling.report.text import show

        show(facts)
