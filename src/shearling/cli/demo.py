"""`shearling demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shearling.cli import options as o

if TYPE_CHECKING:
    from shearling.workflows.demo_result import Demo

SAMPLES = 400  # sentences; the demo then takes about half a minute


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the pruned model and the report.")] = Path(
        "demo-output"
    ),
    flops: Annotated[float, typer.Option(help="Keep this share of the layers' FLOPs, in (0, 1].")] = 0.5,
    samples: Annotated[int, typer.Option(help="Sentences to calibrate on.", min=1)] = SAMPLES,
    seed: o.Seed = 0,
    force: o.Force = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Prune a real sentence encoder on this machine, and search with it on the dense model's index."""
    from shearling.cli.console import emit, say
    from shearling.workflows.demo import STAGES
    from shearling.workflows.demo import demo as run
    from shearling.workflows.progress import watching

    say("all-MiniLM-L6-v2, calibrated on Python's own documentation", quiet=quiet or as_json)
    with watching(not quiet, STAGES) as watcher:
        result = run(out, flops=flops, samples=samples, seed=seed, force=force, watcher=watcher)
    if as_json:
        emit(result.to_json())
    elif not quiet:
        _picture(result)


def _picture(result: Demo) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from shearling.workflows.demo_result import summary

    console = Console(highlight=False)
    console.print(f"\n{escape(str(result.pruned))}\n", soft_wrap=True)
    title = f"a search among {result.search.passages:,} held-out paragraphs"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in summary(result):
        table.add_row(name, f"[bold]{escape(value)}[/]")
    console.print(table)
    for example in result.examples:
        console.print(f"\n[dim]search[/] {escape(example.sentence)}")
        for who, what in example.answers:
            console.print(f"  [dim]{who}[/] {escape(what)}")
    console.print(f"\nThe pruned model is in [bold]{escape(str(result.out))}[/], the report in", end=" ")
    console.print(f"[bold]{escape(str(result.page))}[/].", soft_wrap=True)
