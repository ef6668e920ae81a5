"""`shearling show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shearling.cli import options as o


def show(
    directory: o.Directory,
    html: Annotated[Path | None, o.output(help="Write a page to this file.")] = None,
    force: Annotated[bool, o.output("--force", help="Replace the page if it exists.")] = False,
    as_json: o.Json = False,
) -> None:
    """Show the pruned model in DIRECTORY: sizes, costs, scores, and how it was made."""
    from shearling.checkpoint.load import read_record
    from shearling.checkpoint.record import write_page
    from shearling.cli.console import emit, print_facts, say
    from shearling.report.facts import facts_of

    record = read_record(directory)
    if html is not None:
        write_page(record, directory, html, force=force)
        say(f"page written to {html}")
    if as_json:
        emit({key: value for key, value in record.items() if key != "kept"})
    else:
        print_facts(facts_of(record))
