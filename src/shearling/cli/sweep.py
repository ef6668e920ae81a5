"""`shearling sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shearling.cli import options as o

EPILOG = o.examples(
    "shearling sweep my-model --data train.jsonl --eval dev.jsonl --flops 0.7,0.5,0.3 -o sweep",
    "shearling sweep my-model --data train.jsonl --eval dev.jsonl --methods surgeon,paper --seeds 0,1,2 -o sweep",
    "shearling sweep my-model --data train.jsonl --eval dev.jsonl --latency 0.7,0.5 --table table.json -o sweep",
)


def sweep(
    model: o.Model,
    out: Annotated[Path, o.output("--out", "-o", help="Where results.json, curve.svg and report.html go.")],
    data: o.Data = None,
    evaluation: Annotated[str | None, o.inputs("--eval", help="Labelled rows to score every model on.")] = None,
    task: o.Task = None,
    flops: Annotated[str | None, o.constraint(help="Budgets, comma-separated: 0.7,0.5,0.3.")] = None,
    params: Annotated[str | None, o.constraint(help="Budgets of parameters instead.")] = None,
    latency: Annotated[str | None, o.constraint(help="Budgets of latency, with --table.")] = None,
    table: Annotated[Path | None, o.constraint(help="What `shearling profile` wrote.")] = None,
    shape: o.Shape = "uneven",
    methods: Annotated[str, o.method(help="Methods, comma-separated.")] = "surgeon",
    seeds: Annotated[
        str, o.method("--seeds", "--seed", help="Seeds, comma-separated; each draws its own sample.")
    ] = "0",
    save: Annotated[bool, o.output("--save", help="Keep the pruned models under OUT/models.")] = False,
    timing: Annotated[bool, o.advanced("--timing/--no-timing", help="Time every model beside the dense one.")] = True,
    multiple_of: Annotated[int | None, o.method(help="Round filter counts.", min=1)] = None,
    limit: o.Limit = None,
    metric: o.Metric = None,
    index: o.Index = None,
    pooling: o.Pooling = None,
    prefix: o.Prefix = None,
    image_size: o.ImageSize = None,
    mean: o.Mean = None,
    std: o.Std = None,
    text_columns: o.TextColumns = None,
    label_column: o.LabelColumn = None,
    samples: o.Samples = "auto",
    max_length: o.MaxLength = None,
    flops_length: o.FlopsLength = None,
    length: o.OldLength = None,
    batch_size: o.BatchSize = None,
    device: o.Device = "auto",
    dtype: o.Dtype = None,
    trust_remote_code: o.TrustRemoteCode = False,
    force: Annotated[bool, o.output("--force", help="Forget the sweep in OUT and start afresh.")] = False,
    dry_run: Annotated[bool, o.output("--dry-run", help="Say what would be done, and write nothing.")] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Prune MODEL to many budgets by several methods, score each, and draw the curve; goes on where it was stopped."""
    from shearling.cli.console import emit, tell
    from shearling.methods.ranges import checked_shape
    from shearling.workflows.grid import grid_of
    from shearling.workflows.progress import watching
    from shearling.workflows.source import Source
    from shearling.workflows.sweep import STAGES, describe_planned, describe_sweep, sweep_source

    grid = grid_of(
        methods, seeds, multiple_of, table, checked_shape(shape), flops=flops, params=params, latency=latency
    )
    source = Source(
        model, data, task, o.columns(text_columns), label_column, max_length, batch_size, o.samples(samples),
        grid.seeds[0], device, dtype, trust_remote_code, o.renamed("--length", "--flops-length", length, flops_length),
        metric, index, pooling, prefix=prefix, images=o.images(image_size, mean, std),
    )  # fmt: skip
    with watching(not quiet and not dry_run, STAGES) as watcher:
        record = sweep_source(
            source, grid, out, evaluation=evaluation, limit=limit, save=save, timing=timing, force=force,
            dry_run=dry_run, watcher=watcher,
        )  # fmt: skip
    if as_json:
        emit(record)
    else:
        tell((describe_planned if dry_run else describe_sweep)(record), quiet=quiet)
