"""`shearling sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from shearling.cli import options as o


def sweep(
    model: o.Model,
    out: Annotated[Path, typer.Option(help="Where results.json, curve.svg and report.html go.")],
    data: o.Data = None,
    evaluation: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--eval", help="Labelled rows to score every model on."),
    ] = None,
    task: o.Task = None,
    flops: Annotated[Optional[str], typer.Option(help="Budgets, comma-separated: 0.7,0.5,0.3.")] = None,  # noqa: UP045
    params: Annotated[Optional[str], typer.Option(help="Budgets of parameters instead.")] = None,  # noqa: UP045
    latency: Annotated[Optional[str], typer.Option(help="Budgets of latency, with --table.")] = None,  # noqa: UP045
    table: Annotated[Optional[Path], typer.Option(help="What `shearling profile` wrote.")] = None,  # noqa: UP045
    methods: Annotated[str, typer.Option(help="Comma-separated: surgeon, paper.")] = "surgeon",
    seeds: Annotated[str, typer.Option("--seeds", "--seed", help="Comma-separated; each draws its own sample.")] = "0",
    save: Annotated[bool, typer.Option("--save", help="Keep the pruned models under OUT/models.")] = False,
    multiple_of: Annotated[Optional[int], typer.Option(help="Round filter counts.", min=1)] = None,  # noqa: UP045
    limit: Annotated[Optional[int], typer.Option(help="Score on the first so many rows.", min=1)] = None,  # noqa: UP045
    metric: o.Metric = None,
    index: o.Index = None,
    pooling: o.Pooling = None,
    text_columns: o.TextColumns = None,
    label_column: o.LabelColumn = None,
    samples: o.Samples = 2048,
    max_length: o.MaxLength = None,
    length: o.Length = None,
    batch_size: o.AutoBatchSize = None,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    trust_remote_code: o.TrustRemoteCode = False,
    force: Annotated[bool, typer.Option("--force", help="Forget the sweep in OUT and start afresh.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Prune MODEL to many budgets by several methods, score each, and draw the curve; goes on where it was stopped."""
    from shearling.cli.console import emit, say, watching
    from shearling.workflows.grid import grid_of
    from shearling.workflows.source import Source
    from shearling.workflows.sweep import describe_planned, describe_sweep, planned, sweep_source

    grid = grid_of(methods, seeds, multiple_of, table, flops=flops, params=params, latency=latency)
    source = Source(
        model, data, task, o.columns(text_columns), label_column, max_length, batch_size, samples, grid.seeds[0],
        device, dtype, trust_remote_code, length, metric, index, pooling,
    )  # fmt: skip
    if dry_run:
        record, describe = planned(source, grid, evaluation=evaluation, limit=limit), describe_planned
    else:
        with watching(quiet=quiet) as watcher:
            record = sweep_source(
                source, grid, out, evaluation=evaluation, limit=limit, save=save, force=force, watcher=watcher
            )
        describe = describe_sweep
    if as_json:
        emit(record)
    else:
        say(describe(record), quiet=quiet)
