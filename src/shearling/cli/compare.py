"""`shearling compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling compare my-model my-model-50 --data dev.jsonl",
    "shearling compare my-model my-model-50 --data texts.txt --html both.html",
    "shearling compare my-model my-model-50 --data dev.jsonl --json | jq .agreement",
)


@o.reads
def compare(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A model directory, or a Hub id.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another one, dense or pruned.", show_default=False)],
    reading: o.DataOptions,
    batch_size: o.BatchSize = None,
    html: Annotated[Path | None, o.output(help="Write a page to this file.")] = None,
    force: Annotated[bool, o.output("--force", help="Replace the page if it exists.")] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Compare two models on the same data: agreement, score, size, FLOPs and latency side by side."""
    from shearling.cli.console import emit, print_facts, say
    from shearling.files import check_file, write_whole
    from shearling.report.facts import facts_of_comparison
    from shearling.report.page import compare_page
    from shearling.workflows.compare import STAGES, compare_sources
    from shearling.workflows.progress import watching

    if html is not None:
        check_file(html, force=force)

    source = reading.source(first, batch_size=batch_size)
    with watching(not quiet, STAGES) as watcher:
        result = compare_sources(source, second, limit=reading.limit, watcher=watcher)
    if html is not None:
        write_whole(html, compare_page(result.to_json()))
        say(f"page written to {html}", quiet=quiet)
    if as_json:
        emit(result.to_json())
    else:
        print_facts(facts_of_comparison(result.to_json()))
