"""`shearling show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shearling.cli import options as o


def show(
    directory: Annotated[Path, typer.Argument(help="A directory that `shearling prune` wrote.", show_default=False)],
    as_json: o.Json = False,
) -> None:
    """Show what was pruned in DIRECTORY, how, what it costs now and how well it does."""
    from shearling.checkpoint.load import read_record
    from shearling.cli.console import emit
    from shearling.cli.pictures import show_record

    record = read_record(directory)
    if as_json:
        emit({key: value for key, value in record.items() if key != "kept"})
    else:
        show_record(record)
